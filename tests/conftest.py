"""Runs every test on the CPU, as if it had eight devices."""

import os
import pathlib
import sys
import tempfile
from collections.abc import Iterator

import pytest
import tiny

# Before any test module imports JAX, which reads both only once. The last two flags
# more than halve the time of compiling, which is most of the time of these tests.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
    ]
)
# Programs compiled by tests stay out of the user's cache.
_CACHE = tempfile.TemporaryDirectory(prefix="transformer_jax-tests-")
os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE.name


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> Iterator[None]:
    """Frees what a module compiled: a process has room for so many programs only."""
    yield
    jax = sys.modules.get("jax")
    if jax is not None:
        jax.clear_caches()


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A finished tiny run; tests must leave it as it is. Beside it lies its corpus."""
    folder = tmp_path_factory.mktemp("trained")
    workdir = folder / "run"
    assert tiny.train(tiny.write_config(folder / "corpus"), workdir) == 0
    return workdir
