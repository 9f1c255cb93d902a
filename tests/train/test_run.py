"""The loop around updates that cost nothing: what it logs, and where it ends."""

import dataclasses
import itertools
import json
import math
import pathlib
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import tiny

from transformer_jax.config import Config
from transformer_jax.config_file import load
from transformer_jax.data.prepare import Prepared, prepare
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.errors import ConfigError
from transformer_jax.train import ending, loop
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
        progress_class = loop.TrainProgress
        monkeypatch.setattr(progress_class, "say", lambda _, line: shown.append(line))
        same = SimpleNamespace(fetch=lambda tree: tree, place=lambda tree, axes: tree)
        monkeypatch.setattr(trainer, "layout", same)
        monkeypatch.setattr(
            trainer, "checkpoints", SimpleNamespace(wait=list, check=list)
        )
        monkeypatch.setattr(trainer, "compile", lambda *_: 0.0)
        monkeypatch.setattr(trainer.meter, "add", lambda _: None)
        monkeypatch.setattr(trainer.batches, "from_batch", batches)
        monkeypatch.setattr(trainer, "validate", lambda *_: next(scores or iter([])))

        def update(state: SimpleNamespace, batch: object) -> tuple:
            return SimpleNamespace(step=state.step + 1), METRICS

        monkeypatch.setattr(trainer, "update", update)
        monkeypatch.setattr(trainer, "save", lambda s, *_: saved.append(s.step))
        progress = loop.TrainProgress(0, section.steps)
        state = SimpleNamespace(step=max(saved, default=0))
        limits = trainer.ending(state.step)
        if over := limits.reason(state.step, limits.late):
            return [], saved, [over]
        stop = [] if signals is None else signals
        try:
            stops = loop.Stops(trainer.hosts, limits, stop)
            loop._run(trainer, state, limits, progress, stops)  # pyright: ignore
        finally:
            progress.close()
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines], saved, shown

    run.workdir = tmp_path  # pyright: ignore
    return run


@pytest.mark.parametrize("lowercase", [False, True])
def test_validation_compares_as_the_vocabulary_has_it(
    prepared, tmp_path, monkeypatch, lowercase
) -> None:
    """A perfect translation, but for capitals that a lower-casing one cannot have."""
    trainer = loop.Trainer(prepared[0], tmp_path, prepared[1], print)
    trainer.checkpoints.close()
    _, target = prepared[1].splits["valid"].text()
    assert any(line != line.lower() for line in target)
    found = [[SimpleNamespace(text=line.lower())] for line in target]
    perfect = SimpleNamespace(params=None, translate=lambda *_, **__: found)
    monkeypatch.setattr(Tokenizer, "lowercase", lowercase)
    monkeypatch.setattr(trainer, "_translator", perfect)
    monkeypatch.setattr(trainer.programs, "evaluate", lambda *_: SUMS)
    shown: list[str] = []
    progress = SimpleNamespace(say=shown.append)
    values = trainer.validate(SimpleNamespace(params={}), progress)  # pyright: ignore
    assert (values["bleu"] > 99.9) == lowercase
    assert ("case:lc" in shown[0]) == lowercase


def test_the_share_of_time_spent_waiting_for_data_is_logged(rehearse) -> None:
    rows, _, shown = rehearse(
        steps=6, log_every=2, eval_every=99, batches=slow, scores=itertools.repeat({})
    )
    shares = [row["data_wait"] for row in rows if row["kind"] == "train"]
    assert len(shares) == 3 and all(0.7 < share <= 1 for share in shares)
    for share, line in zip(shares, shown[:3], strict=True):
        assert line.startswith("step ") and f"data wait {share:.1%}" in line


def test_without_waiting_the_share_is_small(rehearse, monkeypatch) -> None:
    monkeypatch.setattr(loop.jax, "block_until_ready", lambda _: time.sleep(0.05))
    rows, *_ = rehearse(
        steps=6, log_every=6, eval_every=99, scores=itertools.repeat({})
    )
    shares = [row["data_wait"] for row in rows if row["kind"] == "train"]
    assert len(shares) == 3 and min(shares) < 0.2


def test_the_seconds_of_an_update_are_logged(rehearse) -> None:
    rows, *_ = rehearse(
        steps=6, log_every=2, eval_every=99, batches=slow, scores=itertools.repeat({})
    )
    times = [row["step_seconds"] for row in rows if row["kind"] == "train"]
    assert len(times) == 3 and all(0.1 <= seconds < 10 for seconds in times)


def test_a_few_updates_are_profiled(rehearse) -> None:
    """After a resume, too: it goes on from step 4."""
    rehearse(steps=4, save_every=4, scores=itertools.repeat({}), profile_steps=2)
    assert not (rehearse.workdir / "profile").exists()
    *_, shown = rehearse(steps=14, scores=itertools.repeat({}), profile_steps=3)
    (line,) = [line for line in shown if line.startswith("profile of")]
    assert line == f"profile of updates 10 to 12 is in {rehearse.workdir / 'profile'}"
    assert list((rehearse.workdir / "profile").rglob("*.trace.json.gz"))


def scores(metric: str, *values: float) -> Iterator[Row]:
    others = {"bleu": 0.0, "chrf": 0.0, "nll": 0.0, "loss": 0.0}
    return iter([others | {metric: value} for value in values])


def steps_of(rows: list[dict], kind: str) -> list[int]:
    return [row["step"] for row in rows if row["kind"] == kind]


def test_a_run_ends_at_the_first_of_its_limits(rehearse, prepared) -> None:
    config, data = prepared
    trainer = loop.TrainBatches(data.splits["train"], config.batch, 0)
    end = math.ceil(1.5 * trainer.batches_per_epoch)
    always = itertools.repeat({})
    rows, saved, shown = rehearse(always, steps=99, epochs=1.5, eval_every=50)
    assert saved[-1] == end == rows[-1]["step"] and rows[-1]["kind"] == "valid"
    assert shown[-1].startswith(f"finished at step {end}: config.train.epochs 1.5")
    # Not before the next limit is raised, and then from there.
    _, saved, shown = rehearse(always, steps=99, epochs=1.5, eval_every=50)
    assert saved[-1] == end and "config.train.epochs 1.5 reached" in shown[0]
    _, saved, shown = rehearse(always, steps=end + 3, epochs=99.0, eval_every=50)
    assert saved[-1] == end + 3 and f"config.train.steps {end + 3}" in shown[-1]


def test_hours_are_summed_over_resumes(rehearse, monkeypatch) -> None:
    """An hour passes before each batch; the first run is stopped after three."""
    clock, stop = 0.0, []

    def hourly(start: int) -> Iterator[int]:
        nonlocal clock
        for number in itertools.count(start):
            clock += 3600
            stop.extend([15] if number == 2 else [])
            yield number

    monkeypatch.setattr(ending.time, "monotonic", lambda: clock)
    fields = {"steps": 99, "hours": 5.0, "log_every": 50, "eval_every": 50}
    fields |= {"save_every": 50, "batches": hourly, "scores": itertools.repeat({})}
    with pytest.raises(loop.Stopped):
        rehearse(signals=stop, **fields)
    clock += 1e6  # between the two
    rows, saved, shown = rehearse(**fields)
    assert saved == [3, 5]
    assert rows[-2]["hours"] == pytest.approx(5) and rows[-1]["kind"] == "valid"
    assert "config.train.hours 5 reached" in shown[-1]
    assert "config.train.hours 5 reached" in rehearse(**fields)[2][0]


@pytest.mark.parametrize(
    ("metric", "values", "evaluations"),
    [
        ("bleu", [7.0] * 9, 3),
        ("bleu", [1.0, 2.0, 1.5, 3.0, 3.0, 2.0, 9.0], 6),
        ("chrf", [5.0, 4.0, 4.5, 9.0], 3),
        ("nll", [5.0, 4.0, 4.5, 3.0, 3.5, 3.0, 1.0], 6),
        ("loss", [1.0, 2.0, 3.0, 0.0], 3),
        ("nll", [2.0, float("nan"), float("nan"), 1.0], 3),
        ("bleu", [1.0, 2.0, 3.0, 4.0, 5.0], 5),
    ],
)
def test_a_score_that_stands_still_ends_the_run(
    rehearse, metric: str, values: list[float], evaluations: int
) -> None:
    fields = {"steps": 2 * len(values), "eval_every": 2}
    fields |= {"early_stop_metric": metric, "patience": 2}
    rows, saved, shown = rehearse(scores(metric, *values), **fields)
    assert steps_of(rows, "valid") == [2 * n for n in range(1, evaluations + 1)]
    assert saved[-1] == 2 * evaluations
    assert shown[-1].startswith(f"finished at step {2 * evaluations}: ")
    if evaluations < len(values):
        assert f"the validation's {metric} is no better than at step" in shown[-1]
    # Started again it does nothing; with more patience it goes on.
    _, again, over = rehearse(scores(metric), **fields)
    assert again[-1] == 2 * evaluations and over[0] in shown[-1]
    if evaluations < len(values):
        fields["patience"] = 3
        _, again, _ = rehearse(scores(metric, *values[evaluations:]), **fields)
        assert again[-1] > 2 * evaluations


def test_the_count_survives_a_stop_and_forgets_what_came_later(rehearse) -> None:
    fields = {"steps": 20, "early_stop_metric": "bleu", "patience": 2}
    fields |= {"eval_every": 4, "save_every": 2, "log_every": 2}
    stop: list[int] = []

    def stopping(start: int) -> Iterator[int]:
        for number in itertools.count(start):
            stop.extend([15] if number == 8 else [])  # after the second evaluation
            yield number

    with pytest.raises(loop.Stopped):
        rehearse(scores("bleu", 3.0, 2.0), stopping, stop, **fields)
    file = rehearse.workdir / "metrics.jsonl"  # of a step that was never saved
    later = {"kind": "valid", "step": 12, "bleu": 99.0, "hours": 99.0}
    file.write_text(file.read_text() + json.dumps(later) + "\n")
    rows, saved, shown = rehearse(scores("bleu", 1.0), **fields)
    assert saved[-1] == 12 and "no better than at step 4 in 2 evaluations" in shown[-1]
    assert [row["bleu"] for row in rows if row["kind"] == "valid"] == [3.0, 2.0, 1.0]


def test_early_stopping_needs_a_validation_split(prepared, tmp_path) -> None:
    config, data = prepared
    section = dataclasses.replace(config.train, early_stop_metric="nll")
    config = dataclasses.replace(config, train=section)
    data = dataclasses.replace(data, splits={"train": data.splits["train"]})
    with pytest.raises(ConfigError, match="early_stop_metric is 'nll', but the corpus"):
        loop.Trainer(config, tmp_path, data, print)
