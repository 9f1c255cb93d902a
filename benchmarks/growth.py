#!/usr/bin/env python3
"""Measures how cost grows with work; every point is a fresh process.

    decode   seconds an output token, for outputs of 16 to 256 tokens, by random
             parameters or by a trained run (--workdir, --input)
    memory   peak memory of training, for vocabularies of 8 k to 64 k, and for batches
    start    seconds from the start of `transformer-jax train` to the first update, with
             an empty cache of compiled programs, and with the one that this filled;
             text is tokenised before

Example: benchmarks/growth.py --what=memory --shape=tiny
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import corpus
import measure
import shapes

from transformer_jax.train.metrics import read_rows

STEPS = (16, 32, 64, 128, 256)
VOCABULARIES = (8_000, 16_000, 32_000, 64_000)
BATCHES = (1, 2, 4, 8)  # times the tokens of the shape
HERE = pathlib.Path(__file__).parent


def driver(name: str, *flags: str) -> dict[str, Any]:
    """Runs a driver and returns what it prints.

    Raises:
        CalledProcessError: it failed.
    """
    command = [sys.executable, str(HERE / f"{name}.py"), *flags]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def decode(args: argparse.Namespace, points: Sequence[int]) -> None:
    """Prints a line for each number of forced steps."""
    given = {"workdir": args.workdir, "input": args.input}
    run = [f"--{name}={value}" for name, value in given.items() if value]
    for steps in points:
        found = driver(
            "decode_speed",
            f"--shape={args.shape}",
            f"--steps={steps}",
            f"--beam={args.beam}",
            f"--sentences={args.sentences}",
            f"--repeats={args.repeats}",
            *run,
        )
        seconds = 1 / found["output_tokens_per_second"]
        _point(args, {"steps": steps, "seconds_per_token": seconds, "measured": found})


def memory(
    args: argparse.Namespace, vocabularies: Sequence[int], batches: Sequence[int]
) -> None:
    """Prints a line for each vocabulary, and for each number of tokens a batch.

    There is one shape of batches, that of the longest pairs, since the memory of the
    compiler grows with the number of shapes.
    """
    tokens = shapes.SHAPES[args.shape]["batch.tokens"]
    points = [("tokenizer.vocab_size", size) for size in vocabularies]
    points += [("batch.tokens", times * tokens) for times in batches]
    for field, value in points:
        found = driver(
            "train_speed",
            f"--shape={args.shape}",
            "--updates=2",
            "--repeats=1",
            "--config.batch.buckets=1",
            f"--config.{field}={value}",
        )
        peaks = {name: found[name] for name in ("peak_memory", "peak_memory_compiled")}
        _point(args, {"field": field, "value": value, **peaks, "measured": found})


def start(args: argparse.Namespace) -> None:
    """Prints a line for a cold and for a warm cache of compiled programs."""
    seconds: dict[str, list[float]] = {"cold": [], "warm": []}
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            size = shapes.SHAPES[args.shape]["tokenizer.vocab_size"]
            corpus.write(folder, size, corpus.PAIRS[args.shape])
            _program("prepare", args.shape, folder, "prepared")
            for cache, times in seconds.items():
                began = time.time()
                _program("train", args.shape, folder, cache)
                (first,) = read_rows(folder / cache, 1)[:1]
                times.append(first["time"] - began)
    for cache, times in seconds.items():
        _point(args, {"cache": cache, **measure.summary("first_update_seconds", times)})


def _program(verb: str, shape: str, folder: pathlib.Path, workdir: str) -> None:
    """Runs a verb of the package on the corpus in `folder`, for one update."""
    flags = [
        f"--config={HERE / 'shapes.py'}:{shape}",
        f"--workdir={folder / workdir}",
        *corpus.overrides(folder),
        f"--config.data.cache_dir={folder / 'tokenised'}",
        "--config.train.steps=1",
        "--config.train.log_every=1",
    ]
    caches = {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")}
    subprocess.run(
        [sys.executable, "-m", "transformer_jax", verb, *flags],
        cwd=measure.ROOT,
        env=os.environ | caches,
        stdout=sys.stderr,
        check=True,
    )


def _point(args: argparse.Namespace, values: dict[str, Any]) -> None:
    measure.emit("growth", args, values)


def main() -> None:
    """Measures one kind of growth."""
    parser = measure.Parser(description="Measure cost against work.")
    kinds = ("decode", "memory", "start")
    parser.add_argument("--what", choices=kinds, required=True)
    parser.add_argument("--shape", choices=tuple(shapes.SHAPES), default="tiny")
    parser.add_argument("--beam", type=measure.positive, default=4, help="of decode")
    parser.add_argument("--sentences", type=measure.positive, default=256)
    parser.add_argument("--repeats", type=measure.positive, default=5)
    parser.add_run()
    args = parser.parse_args()
    if args.what == "start":
        start(args)
    elif args.what == "decode":
        decode(args, STEPS)
    else:
        memory(args, VOCABULARIES, BATCHES)


if __name__ == "__main__":
    measure.run(main)
