"""Runs every test on the CPU, as if it had eight devices."""

import os

# Before any test module imports JAX, which reads both only once.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
