"""Huge pages: the program begins anew, once, as it was begun. Cores: each a device."""

import os
import subprocess
import sys

import pytest

from transformer_jax.machine import SETTING, VARIABLE

linux = pytest.mark.skipif(sys.platform != "linux", reason="on Linux only")
PROGRAM = """
import os, sys
from transformer_jax.machine import use_huge_pages
print(os.getpid(), sys.argv[1:], flush=True)
use_huge_pages()
print(os.environ["GLIBC_TUNABLES"], sys.stdin.read())
"""


def started(given: str | None) -> list[str]:
    environment = {k: v for k, v in os.environ.items() if k != VARIABLE}
    if given is not None:
        environment[VARIABLE] = given
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "a b", "*"],
        env=environment,
        input="text",
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@linux
@pytest.mark.parametrize(
    ("given", "set_to"),
    [
        (None, f"{SETTING}=1"),
        ("glibc.malloc.perturb=0", f"glibc.malloc.perturb=0:{SETTING}=1"),
    ],
)
def test_the_process_is_the_same_with_its_arguments_and_input(given, set_to):
    first, second, last = started(given)
    assert first == second and first.endswith("['a b', '*']")
    assert last == f"{set_to} text"


@linux
def test_what_the_user_set_stays():
    once, last = started(f"{SETTING}=0")
    assert once.endswith("['a b', '*']")
    assert last == f"{SETTING}=0 text"


# --- Cores ----------------------------------------------------------------------

DECODING = """
import sys
from transformer_jax import machine, parallel
machine.cores = lambda: int(sys.argv[1])
if sys.argv[2] == "begun":
    parallel.devices()
parallel.cores_as_devices()
print(len(parallel.devices()))
"""
COUNT = "--xla_force_host_platform_device_count"
NUMBER = "JAX_NUM_CPU_DEVICES"


def devices(cores: int, moment: str = "fresh", **environment: str) -> int:
    rest = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", NUMBER)}
    rest |= {"JAX_PLATFORMS": "cpu"} | environment
    command = [sys.executable, "-c", DECODING, str(cores), moment]
    done = subprocess.run(command, env=rest, capture_output=True, check=True)
    return int(done.stdout)


@pytest.mark.parametrize(("cores", "expected"), [(1, 1), (3, 3), (64, 8)])
def test_decoding_takes_each_core_as_a_device(cores, expected):
    assert devices(cores) == expected


@pytest.mark.parametrize("named", [{"XLA_FLAGS": f"{COUNT}=2"}, {NUMBER: "2"}])
def test_a_number_that_the_user_names_stands(named):
    assert devices(3, **named) == 2


def test_jax_that_has_begun_keeps_its_devices():
    assert devices(3, "begun") == 1
