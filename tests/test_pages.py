"""The program begins anew with huge pages, once, and as it was begun."""

import os
import subprocess
import sys

import pytest

from transformer_jax.pages import SETTING, VARIABLE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="on Linux only")
PROGRAM = """
import os, sys
from transformer_jax.pages import use_huge_pages
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


def test_what_the_user_set_stays():
    once, last = started(f"{SETTING}=0")
    assert once.endswith("['a b', '*']")
    assert last == f"{SETTING}=0 text"
