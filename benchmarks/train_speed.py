#!/usr/bin/env python3
"""Measures full updates of a run: target tokens a second, memory, compile time.

Everything is made as `transformer-jax train` makes it, from text to batches and
programs, and updates are taken as its loop takes them. Every repeat takes the same
updates, the first of epoch 0, whose batches come in the epoch's mixture of shapes; one
repeat more goes before and is not counted.

Timed are making the batches (in a thread, as in a run), handing them over, the updates
(forward, dropout, loss, backward, Adam) and fetching their sums once a repeat. Not
timed are reading and tokenising, compiling, validation and checkpoints.

Example: benchmarks/train_speed.py --shape=tiny --config.batch.packing=true
"""

import argparse
import itertools
import pathlib
import tempfile
import time
from typing import Any

import corpus
import jax
import measure
import numpy as np
import shapes

from transformer_jax.config_file import load
from transformer_jax.data.batching import Batch
from transformer_jax.data.prepare import prepare
from transformer_jax.train.loop import Trainer, start_block
from transformer_jax.train.metrics import TrainProgress
from transformer_jax.train.step import TrainState
from transformer_jax.train.stops import RUN_AHEAD

UPDATES = {"tiny": 24, "base": 12, "smoke": 4}  # of a repeat


def make_trainer(shape: str, overrides: list[str], folder: pathlib.Path) -> Trainer:
    """Writes the corpus of a shape and opens a new run on it.

    Raises:
        UserError: an override is wrong.
    """
    config_file = f"{measure.ROOT / 'benchmarks' / 'shapes.py'}:{shape}"
    config = load(config_file, [*corpus.overrides(folder), *overrides])
    corpus.write(folder, config.tokenizer.vocab_size, corpus.PAIRS[shape])
    workdir = folder / "run"
    workdir.mkdir()
    data = prepare(config, workdir, measure.say)
    return Trainer(config, workdir, data, measure.say)


def take_updates(
    trainer: Trainer, state: TrainState, updates: int
) -> tuple[TrainState, float, int]:
    """Takes the first updates of epoch 0, as the loop of a run does.

    Returns:
        The new state, the seconds, and the target tokens that the devices counted.
    """
    pending: list[Any] = []
    batches = trainer.batches.from_batch(0)
    started = time.perf_counter()
    for _ in range(updates):
        some = list(itertools.islice(batches, trainer.config.train.accumulate))
        state, metrics = trainer.update(state, some)
        pending.append(metrics)
        if len(pending) > RUN_AHEAD:
            jax.block_until_ready(pending[-1 - RUN_AHEAD].sums.tokens)
    fetched = [trainer.layout.fetch(metrics) for metrics in pending]
    seconds = time.perf_counter() - started
    batches.close()  # pyright: ignore[reportAttributeAccessIssue]
    return state, seconds, sum(int(each.sums.tokens) for each in fetched)


def sentence_lengths(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Returns lengths with EOS of the sources and of the targets, `[pairs] int64`."""
    if batch.source_segment is None or batch.target_segment is None:
        there = batch.source_length > 0
        sides = batch.source_length[there], batch.target_length[there]
        return sides[0].astype(np.int64), sides[1].astype(np.int64)
    row = np.arange(len(batch.source))[:, None] * (1 + batch.source_segment.max())
    source, target = (
        np.bincount((row + segment)[segment > 0])
        for segment in (batch.source_segment, batch.target_segment)
    )
    return source[source > 0], target[target > 0]


def work(trainer: Trainer, updates: int) -> dict[str, Any]:
    """Returns what the timed updates work on, counted on the host."""
    count = updates * trainer.config.train.accumulate
    batches = [trainer.batches.batch(number) for number in range(count)]
    sides = zip(*map(sentence_lengths, batches), strict=True)
    sources, targets = map(np.concatenate, sides)
    size = trainer.data.vocabularies.target.vocab_size
    places = sum(batch.source.size + batch.target_out.size for batch in batches)
    kinds = {(batch.source.shape, batch.target_out.shape) for batch in batches}
    return {
        "pairs": len(targets),
        "source_tokens": int(sources.sum()),
        "target_tokens": int(targets.sum()),
        "padding": 1 - int(sources.sum() + targets.sum()) / places,
        "shapes_taken": len(kinds),
        "shapes": len(trainer.batches.shapes),
        "updates_per_epoch": trainer.updates_per_epoch,
        "flops": measure.update_flops(trainer.config, size, sources, targets),
    }


def measure_training(args: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    """Compiles, takes the updates, and returns what was measured."""
    trainer = make_trainer(args.shape, args.overrides, folder)
    began = time.monotonic()
    state = trainer.restore()
    progress = TrainProgress(0, args.updates)
    for line in start_block(trainer, state):
        measure.say(line)
    state = trainer.layout.place(state, trainer.axes)
    count = args.updates * trainer.config.train.accumulate
    batches = [trainer.batches.batch(number) for number in range(count)]
    trainer.compile(batches, progress)
    compiled = time.monotonic() - began
    progress.close()
    memory = measure.peak_memory()
    state, _, _ = take_updates(trainer, state, 1)
    first_update = measure.age()
    state, _, counted = take_updates(trainer, state, args.updates)
    done = work(trainer, args.updates)
    if counted != done["target_tokens"]:
        raise RuntimeError(f"{counted} target tokens counted, but the batches: {done}")
    peak = measure.peak_memory()
    rates = []
    for repeat in range(args.repeats):
        if repeat:
            measure.beside(args.beside, repeat - 1)
        state, seconds, _ = take_updates(trainer, state, args.updates)
        rates.append(counted / seconds)
        measure.say(f"repeat {repeat + 1}: {rates[-1]:,.0f} target tokens/s")
        peak = measure.peak_memory()
    found = measure.summary("target_tokens_per_second", rates)
    speed = found["target_tokens_per_second"] / counted * done["flops"]
    return {
        **found,
        **measure.shares(speed),
        "peak_memory": peak,
        "peak_memory_compiled": memory,  # of it, before the first update
        "compile_seconds": compiled,
        "first_update_seconds": first_update,
        "device": str(trainer.layout.devices[0].device_kind),
        "devices": len(trainer.layout.devices),
        **done,
    }


def main() -> None:
    """Measures in this process, which does nothing else."""
    parser = measure.Parser(description="Measure full updates.", allow_abbrev=False)
    parser.add_argument("--shape", choices=tuple(shapes.SHAPES), default="tiny")
    parser.add_argument(
        "--updates", type=measure.positive, help="of each repeat (default: 24; base 12)"
    )
    parser.add_repeats()
    args = parser.parse_overrides()
    args.updates = args.updates or UPDATES[args.shape]
    # Compile time is that of a first run.
    jax.config.update("jax_enable_compilation_cache", False)
    with tempfile.TemporaryDirectory() as folder:
        values = measure_training(args, pathlib.Path(folder))
    measure.emit("train", args, values)


if __name__ == "__main__":
    measure.run(main)
