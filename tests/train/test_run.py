"""The loop around updates that cost nothing: what it logs, and where it ends."""

import dataclasses
import itertools
import json
import pathlib
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import tiny

from transformer_jax import parallel
from transformer_jax.config import Config
from transformer_jax.config_file import load
from transformer_jax.data.prepare import Prepared, prepare
from transformer_jax.train import loop
from transformer_jax.train.loss import LossSums
from transformer_jax.train.step import StepMetrics

Row = dict[str, float]
SUMS = LossSums(*map(np.asarray, (6.0, 5.0, 1, 4)))  # pyright: ignore
METRICS = StepMetrics(SUMS, *map(np.asarray, (1.0, -1, 0, 0)))  # pyright: ignore


def fast(start: int) -> Iterator[int]:
    yield from itertools.count(start)


def slow(start: int) -> Iterator[int]:
    for number in itertools.count(start):
        time.sleep(0.1)
        yield number


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Prepared]:
    folder = tmp_path_factory.mktemp("prepared")
    config = load(tiny.write_config(folder))
    return config, prepare(config, folder / "run", print)


@pytest.fixture
def rehearse(
    prepared: tuple[Config, Prepared], tmp_path: pathlib.Path, monkeypatch
) -> Callable:
    """Returns a function that runs the loop without a model, in a folder of its own.

    Its arguments are fields of the train section; `scores` are the validation's
    results in order. It goes on from the last step it saved. It returns the rows of
    `metrics.jsonl`, the steps saved and the lines shown.
    """
    saved: list[int] = []

    def run(
        scores: Iterator[Row] | None = None,
        batches: Callable[[int], Iterator] = fast,
        signals: list[int] | None = None,
        **fields: object,
    ) -> tuple[list[dict], list[int], list[str]]:
        config, data = prepared
        section = dataclasses.replace(config.train, **fields)  # pyright: ignore
        config = dataclasses.replace(config, train=section)
        trainer = loop.Trainer(config, tmp_path, data, print)
        trainer.checkpoints.close()
        shown: list[str] = []
        monkeypatch.setattr(loop.Progress, "say", lambda _, line: shown.append(line))
        monkeypatch.setattr(loop, "parallel", SimpleNamespace(**vars(parallel)))
        monkeypatch.setattr(loop.parallel, "unreplicate", lambda tree: tree)
        monkeypatch.setattr(loop.parallel, "replicate", lambda tree: tree)
        monkeypatch.setattr(trainer, "checkpoints", SimpleNamespace(wait=list))
        monkeypatch.setattr(trainer, "compile", lambda *_: None)
        monkeypatch.setattr(trainer.batches, "from_batch", batches)
        monkeypatch.setattr(trainer, "validate", lambda *_: next(scores or iter([])))

        def update(state: SimpleNamespace, batch: object) -> tuple:
            return SimpleNamespace(step=state.step + 1), METRICS

        monkeypatch.setattr(trainer, "update", update)
        monkeypatch.setattr(trainer, "save", lambda s, *_: saved.append(s.step))
        progress = loop.Progress(0, section.steps)
        state = SimpleNamespace(step=max(saved, default=0))
        try:
            loop._run(trainer, state, progress, signals or [])  # pyright: ignore
        finally:
            progress.close()
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines], saved, shown

    return run


def test_the_share_of_time_spent_waiting_for_data_is_logged(rehearse) -> None:
    rows, _, shown = rehearse(
        steps=6, log_every=2, eval_every=99, batches=slow, scores=itertools.repeat({})
    )
    shares = [row["data_wait"] for row in rows if row["kind"] == "train"]
    assert len(shares) == 3 and all(0.7 < share <= 1 for share in shares)
    for share, line in zip(shares, shown, strict=True):
        assert line.startswith("step ") and f"data wait {share:.1%}" in line


def test_without_waiting_the_share_is_small(rehearse, monkeypatch) -> None:
    monkeypatch.setattr(loop.jax, "block_until_ready", lambda _: time.sleep(0.05))
    rows, *_ = rehearse(
        steps=6, log_every=6, eval_every=99, scores=itertools.repeat({})
    )
    shares = [row["data_wait"] for row in rows if row["kind"] == "train"]
    assert len(shares) == 3 and min(shares) < 0.2
