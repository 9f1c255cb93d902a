"""What all drivers share: clock, memory, FLOPs, the machine, and the line they print.

It imports no JAX, so that a driver that only starts others stays small: Linux counts
what a process held before it became another program as memory of that one, too.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from transformer_jax.config import Config
from transformer_jax.describe import describe
from transformer_jax.errors import ConfigError, UserError
from transformer_jax.machine import use_huge_pages

ROOT = pathlib.Path(__file__).parents[1]
STARTED = time.perf_counter()  # nearly the start of the process: JAX comes later
SIZE = 1024  # rows and columns of the factors of the matrix product
PRODUCTS = 15  # that are timed, after two others
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "sentencepiece")
# What changes the speed of the same program.
SETTINGS = (
    "XLA_FLAGS",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "JAX_PLATFORMS",
    "GLIBC_TUNABLES",
)


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError."""
        raise ConfigError(f"{message}; see {self.prog} --help")

    def add_repeats(self) -> None:
        """Adds how often to measure, and what is run between."""
        self.add_argument("--repeats", type=positive, default=5)
        self.add_argument(
            "--beside",
            action="append",
            default=[],
            metavar="COMMAND",
            help="another toolkit's, to be run between repeats; several take turns",
        )

    def add_run(self) -> None:
        """Adds a trained run to decode with, in place of random parameters."""
        self.add_argument("--workdir", type=pathlib.Path, help="a trained run")
        self.add_argument("--input", type=pathlib.Path, help="text for it to translate")

    def parse_overrides(self) -> argparse.Namespace:
        """Parses the command line; `--config.a.b=value` flags are in `overrides`."""
        args, rest = self.parse_known_args()
        for flag in rest:
            if not flag.startswith("--config."):
                self.error(f"unknown option {flag}")
        args.overrides = rest
        return args


def positive(text: str) -> int:
    """Returns the whole number above 0 that `text` holds."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def beside(commands: Sequence[str], number: int) -> None:
    """Runs one of other toolkits' commands, number 0 first; it prints to stderr."""
    if commands:
        command = commands[number % len(commands)]
        say(command)
        done = subprocess.run(command, shell=True, stdout=sys.stderr)
        say(f"ended with {done.returncode}")


def run(main: Callable[[], None]) -> NoReturn:
    """Runs a driver as the program runs; a user's mistake is one line and code 2."""
    use_huge_pages()
    try:
        main()
    except UserError as error:
        print(f"{pathlib.Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0)


def say(message: str) -> None:
    """Tells how far it is, on stderr."""
    print(message, file=sys.stderr, flush=True)


# --- Time and memory ------------------------------------------------------------


def age() -> float:
    """Returns the seconds since this module was imported."""
    return time.perf_counter() - STARTED


def peak_memory() -> int:
    """Returns the most bytes that this process had resident so far."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def summary(name: str, values: Sequence[float]) -> dict[str, Any]:
    """Returns the median of `values` as `name`, all of them, and their spread."""
    median = statistics.median(values)
    return {
        name: median,
        "repeats": list(values),
        "spread": (max(values) - min(values)) / median,  # share of the median
    }


def product_rates() -> dict[str, dict[str, float]]:
    """Measures the float32 matrix product of NumPy and of JAX, in GFLOP/s."""
    import jax

    left = np.random.default_rng(0).random((SIZE, SIZE), np.float32)
    right = left.T.copy()
    multiply = jax.jit(lambda a, b: jax.numpy.matmul(a, b, precision="highest"))
    on_device = jax.device_put((left, right))
    return {
        "numpy": _product_rate(lambda: left @ right),
        "jax": _product_rate(lambda: multiply(*on_device).block_until_ready()),
    }


def _product_rate(product: Callable[[], Any]) -> dict[str, float]:
    """Returns the best and the median GFLOP/s of a product of SIZE^3."""
    seconds = []
    for _ in range(2 + PRODUCTS):
        started = time.perf_counter()
        product()
        seconds.append(time.perf_counter() - started)
    flops = 2e-9 * SIZE**3
    best, median = min(seconds[2:]), statistics.median(seconds[2:])
    return {"best": flops / best, "median": flops / median}


def shares(flops_per_second: float) -> dict[str, Any]:
    """Returns the speed in GFLOP/s beside that of the matrix product.

    `fraction` is of the best product of the faster library, `fraction_of_median` of its
    median.
    """
    rates, gflops = product_rates(), flops_per_second / 1e9
    most = {k: max(rate[k] for rate in rates.values()) for k in ("best", "median")}
    return {
        "gflops": gflops,
        "product_gflops": rates,
        "fraction": gflops / most["best"],
        "fraction_of_median": gflops / most["median"],
    }


# --- FLOPs ----------------------------------------------------------------------


def _costs(config: Config, vocab_size: int) -> tuple[int, int, int, int]:
    """Returns the forward FLOPs of a source and a target token, without attention's.

    The last two are those for each position that a token attends to: of a source token
    in all layers together, and of a target token in self- or in cross-attention.
    """
    config = with_vocabulary(config, vocab_size)
    one, two = (describe(config, length=n).flops for n in (1, 2))
    source = two.forward_source_token - one.forward_source_token
    target = two.forward_target_token - one.forward_target_token
    return (
        one.forward_source_token - source,
        one.forward_target_token - target,
        source,
        target // 2,  # as many layers attend to the source as to the target
    )


def with_vocabulary(config: Config, vocab_size: int) -> Config:
    """Returns `config` with the size that its vocabulary really has."""
    tokenizer = dataclasses.replace(config.tokenizer, vocab_size=vocab_size)
    return dataclasses.replace(config, tokenizer=tokenizer)


def update_flops(
    config: Config, vocab_size: int, sources: np.ndarray, targets: np.ndarray
) -> int:
    """Returns the FLOPs of the matrix products of training on these pairs.

    Forward and backward, by the closed form of `describe`, of real tokens only; what
    the causal mask hides is counted, since it is computed.

    Args:
        config: of the run.
        vocab_size: of its model.
        sources: lengths with EOS, `[pairs] int64`.
        targets: likewise.
    """
    source, target, attend_source, attend_target = _costs(config, vocab_size)
    forward = source * sources.sum() + attend_source * (sources**2).sum()
    forward += target * targets.sum()
    forward += attend_target * (targets * (targets + sources)).sum()
    return 3 * int(forward)


def search_flops(
    config: Config,
    vocab_size: int,
    sources: np.ndarray,
    outputs: np.ndarray,
    beams: int,
) -> int:
    """Returns the FLOPs of the matrix products of a search with a cache.

    Args:
        config: of the model.
        vocab_size: of the model.
        sources: lengths with EOS, `[sentences] int64`.
        outputs: steps that each needs, `[sentences] int64`.
        beams: that each step extends.
    """
    source, target, attend_source, attend_target = _costs(config, vocab_size)
    encoder = source * sources.sum() + attend_source * (sources**2).sum()
    past = outputs * (outputs + 1) // 2  # positions that all steps look back at
    steps = target * outputs.sum()
    steps += attend_target * (past + outputs * sources).sum()
    return int(encoder + beams * steps)


# --- The line that is printed ---------------------------------------------------


def emit(benchmark: str, args: argparse.Namespace, values: dict[str, Any]) -> None:
    """Prints a measurement as one line of JSON, with what it was made by and on."""
    asked = {
        k: str(v) if isinstance(v, pathlib.Path) else v for k, v in vars(args).items()
    }
    record = {"benchmark": benchmark, **asked, **values, **machine()}
    print(json.dumps(record), flush=True)


def machine() -> dict[str, Any]:
    """Returns date, commit, versions and hardware."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _commit(),
        "machine": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],  # when it ended, its own included
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "settings": {name: os.environ[name] for name in SETTINGS if name in os.environ},
    }


def _processor() -> str:
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if "model name" in line]
    return names[0] if names else platform.processor()


def _commit() -> str:
    """Returns the commit, with a + behind it where files were changed since."""
    found = []
    for command in (["rev-parse", "HEAD"], ["status", "--porcelain"]):
        git = subprocess.run(
            ["git", *command], cwd=ROOT, capture_output=True, text=True
        )
        if git.returncode:
            return "unknown"
        found.append(git.stdout.strip())
    return found[0] + ("+" if found[1] else "")
