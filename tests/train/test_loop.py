"""Training: what is left on disk, and that stopping anywhere changes nothing."""

import functools
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import tiny

from transformer_jax import checkpoint
from transformer_jax.config import TrainConfig
from transformer_jax.config_file import read_workdir
from transformer_jax.data import batching
from transformer_jax.data.batching import Shape
from transformer_jax.data.pipeline import read_shapes
from transformer_jax.data.prepare import open_split, prepare
from transformer_jax.train import loop


def rows(workdir: pathlib.Path) -> list[dict]:
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def without_times(rows: list[dict]) -> list[dict]:
    timed = ("time", "tokens_per_second", "step_seconds", "data_wait", "hours")
    return [{k: v for k, v in row.items() if k not in timed} for row in rows]


def state_of(workdir: pathlib.Path, step: int) -> list[np.ndarray]:
    checkpoints = checkpoint.Checkpoints(workdir, print)
    try:
        saved = checkpoints._manager.restore(step)
    finally:
        checkpoints.close()
    whole = (saved["params"], saved["training"])
    return [np.asarray(leaf) for leaf in jax.tree.leaves(whole)]


def same(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(a.shape == b.shape and (a == b).all() for a, b in pairs)


def test_what_a_run_leaves(trained):
    assert json.loads((trained / "config.json").read_text())["train"]["steps"] == 8
    assert (trained / "tokenizer.model").stat().st_size > 0
    assert list((trained / "tensorboard").glob("events.*"))
    train_rows = [row for row in rows(trained) if row["kind"] == "train"]
    valid_rows = [row for row in rows(trained) if row["kind"] == "valid"]
    assert [row["step"] for row in train_rows] == [2, 4, 6, 8]
    assert [row["step"] for row in valid_rows] == [4, 8]
    for row in train_rows:
        rate = 16**-0.5 * row["step"] * 10**-1.5  # warm-up of 10 steps
        assert row["learning_rate"] == pytest.approx(rate, rel=1e-5)
        assert row["perplexity"] == pytest.approx(np.exp(row["nll"]))
        assert row["loss"] > row["nll"] * 0.5 and row["bad_updates"] == 0
    # the validation set is 7 sentences, on 8 devices, each counted once with its EOS
    target = open_split(trained, "valid").target
    assert valid_rows[0]["tokens"] == sum(len(target[i]) + 1 for i in range(7))
    assert 0 <= valid_rows[0]["bleu"] <= 100
    # the last 3, and the best by BLEU
    kept = {p.name for p in (trained / "checkpoints").iterdir() if p.name.isdecimal()}
    assert kept >= {"4", "6", "8"} and len(kept) <= 4


def test_the_start_block_says_how_each_split_is_spelled(trained):
    config = read_workdir(trained)
    data = prepare(config, trained, print)
    trainer = loop.Trainer(config, trained, data, print)
    nothing = SimpleNamespace(params={}, step=0)
    lines = loop.start_block(trainer, nothing)  # pyright: ignore[reportArgumentType]
    trainer.checkpoints.close()
    for split, corpus in data.splits.items():
        (at,) = [i for i, line in enumerate(lines) if line.split()[0] == split]
        assert lines[at + 1].strip() == corpus.spelling()
        assert lines[at + 1].count(" 0 unknown") == 2


def begun(workdir: pathlib.Path) -> tuple[list[Shape], list[str]]:
    """Returns the shapes and the start block of a run that goes on."""
    config = read_workdir(workdir)
    trainer = loop.Trainer(config, workdir, prepare(config, workdir, print), print)
    nothing = SimpleNamespace(params={}, step=8)
    lines = loop.start_block(trainer, nothing)  # pyright: ignore[reportArgumentType]
    trainer.checkpoints.close()
    return trainer.batches.shapes, lines


def test_a_begun_run_keeps_its_shapes(trained, tmp_path, monkeypatch):
    chosen = read_shapes(trained)
    other = [Shape(4, 40, 40)]
    monkeypatch.setattr(batching, "choose_shapes", lambda *_: other)  # a later version
    shapes, lines = begun(trained)
    assert chosen == shapes != other and not any("warning" in line for line in lines)
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / "shapes.json").unlink()
    shapes, lines = begun(tmp_path / "run")
    assert shapes == other and "pairs come in a new order" in lines[-1]


def test_the_start_block_says_the_size_of_an_update(trained):
    (line,) = [line for line in begun(trained)[1] if line.startswith("epoch")]
    lengths = open_split(trained, "train").lengths()
    found = re.fullmatch(
        r"epoch +(\d+) updates of (\d+) \+ (\d+) tokens on average, padding .* %", line
    )
    assert found
    updates, source, target = map(int, found.groups())
    assert np.allclose(lengths.sum(axis=0) / updates, (source, target), atol=0.5)


def test_the_start_block_says_which_checkpoints_are_kept(trained):
    (line,) = [line for line in begun(trained)[1] if line.startswith("checkpoints")]
    every, kept = line.split("; ")
    assert every == "checkpoints every 2 updates and at each evaluation"
    assert kept == "the newest 3 are kept, and the best by valid BLEU"
    rule = loop.keep_rule(TrainConfig(keep_last=3, average_last=5, save_every=7))
    assert rule.startswith("every 7 updates and at each evaluation; the newest 5 are ")
    assert "(config.train.keep_last is 3), of which 5 for the average, and" in rule


def test_loss_falls(trained):
    losses = [row["loss"] for row in rows(trained) if row["kind"] == "train"]
    assert losses[-1] < losses[0]


def test_a_finished_run_started_again_changes_nothing(trained, capsys):
    before = {p: p.read_bytes() for p in trained.rglob("*") if p.is_file()}
    assert tiny.train(str(trained.parent / "corpus" / "config.py"), trained) == 0
    assert "finished" in capsys.readouterr().err
    after = {p: p.read_bytes() for p in trained.rglob("*") if p.is_file()}
    assert before == after


# Overrides under which a stop must change nothing.
VARIANTS = {
    "plain": [],  # all of it inside warm-up
    "clipped": ["--config.train.warmup_steps=4", "--config.train.clip_norm=0.5"],
    "accumulated": ["--config.train.accumulate=2"],
    "packed": ["--config.batch.packing=true", "--config.train.accumulate=3"],
}


@pytest.fixture(scope="module")
def whole(trained, tmp_path_factory) -> Callable[[str], pathlib.Path]:
    """Returns a function that gives the run of a variant in one go."""

    @functools.cache
    def run(variant: str) -> pathlib.Path:
        if not VARIANTS[variant]:
            return trained
        workdir, config = tmp_path_factory.mktemp("whole"), config_of(trained)
        assert tiny.train(config, workdir, VARIANTS[variant]) == 0
        return workdir

    return run


def config_of(trained: pathlib.Path) -> str:
    return str(trained.parent / "corpus" / "config.py")


@pytest.mark.parametrize(
    ("variant", "stop"),
    [
        pytest.param(*("plain", "after the first update"), marks=pytest.mark.slow),
        ("plain", "at the border of epochs"),
        pytest.param(*("plain", "in the second epoch"), marks=pytest.mark.slow),
        pytest.param(
            *("clipped", "just before the end of warm-up"), marks=pytest.mark.slow
        ),
        pytest.param(
            *("accumulated", "after the first update"), marks=pytest.mark.slow
        ),
        ("accumulated", "after an update with batches of two epochs"),
        pytest.param(
            *("packed", "after an update with batches of two epochs"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_stop_and_resume_is_the_same_run(
    whole, trained, tmp_path, monkeypatch, variant, stop
):
    """Stopped by the real signal."""
    config, flags, whole = config_of(trained), VARIANTS[variant], whole(variant)
    run = read_workdir(whole)
    order = loop.PackedBatches if run.batch.packing else loop.TrainBatches
    batches = order(open_split(whole, "train"), run.batch, 0, read_shapes(whole))
    stop = {
        "after the first update": 1,
        "just before the end of warm-up": run.train.warmup_steps - 1,
        "at the border of epochs": batches.batches_per_epoch,
        "in the second epoch": batches.batches_per_epoch + 1,
        "after an update with batches of two epochs": (
            batches.batches_per_epoch // run.train.accumulate + 1
        ),
    }[stop]
    update, count = loop.Trainer.update, 0

    def stopping(self, state, batch):
        nonlocal count
        count += 1
        if count == stop:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(self, state, batch)

    monkeypatch.setattr(loop.Trainer, "update", stopping)
    assert tiny.train(config, tmp_path / "run", flags) == 128 + signal.SIGTERM
    monkeypatch.undo()
    newest = max(checkpoint_steps(tmp_path / "run"))
    assert newest == stop < 8
    assert tiny.train(config, tmp_path / "run", flags) == 0
    assert same(state_of(tmp_path / "run", 8), state_of(whole, 8))
    resumed, in_one_go = rows(tmp_path / "run"), rows(whole)
    steps = [(row["kind"], row["step"]) for row in resumed]
    assert len(set(steps)) == len(steps)
    last = without_times([r for r in resumed if r["step"] == 8])
    assert last == without_times([r for r in in_one_go if r["step"] == 8])


def checkpoint_steps(workdir: pathlib.Path) -> list[int]:
    names = [p.name for p in (workdir / "checkpoints").iterdir()]
    return sorted(int(name) for name in names if name.isdecimal())


def test_epochs_are_short_enough_to_be_crossed(trained):
    config = read_workdir(trained)
    batches = loop.TrainBatches(open_split(trained, "train"), config.batch, 0)
    assert batches.batches_per_epoch < 5


def test_a_damaged_newest_checkpoint_is_passed_over(trained, tmp_path, capsys):
    workdir = tmp_path / "run"
    shutil.copytree(trained, workdir)
    for file in (workdir / "checkpoints" / "8").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    config = str(trained.parent / "corpus" / "config.py")
    assert tiny.train(config, workdir, ["--config.train.steps=8"]) == 0
    assert "checkpoint 8 is damaged, passed over" in capsys.readouterr().err
    assert [p.name.split("-")[0] for p in (workdir / "damaged").iterdir()] == ["8"]
    assert same(state_of(workdir, 8), state_of(trained, 8))  # trained again from 6


def test_no_whole_checkpoint_is_an_error(trained, tmp_path, capsys):
    workdir = tmp_path / "run"
    shutil.copytree(trained, workdir)
    for step in checkpoint_steps(workdir):
        shutil.rmtree(workdir / "checkpoints" / str(step) / "training")
    config = str(trained.parent / "corpus" / "config.py")
    assert tiny.train(config, workdir) == 2
    message = capsys.readouterr().err
    assert "none of the checkpoints" in message and "nothing was deleted" in message
    assert checkpoint_steps(workdir) == checkpoint_steps(trained)


def test_another_config_is_refused(trained, capsys):
    before = (trained / "config.json").read_text()
    config = str(trained.parent / "corpus" / "config.py")
    assert tiny.train(config, trained, ["--config.model.d_ff=48"]) == 2
    message = capsys.readouterr().err
    assert "model.d_ff: 24 -> 48" in message and "--workdir" in message
    assert (trained / "config.json").read_text() == before


def test_changed_data_are_refused(trained, tmp_path, capsys):
    shutil.copytree(trained, tmp_path / "run")
    config = tiny.write_config(tmp_path / "corpus")
    source = tmp_path / "corpus" / "train.en"
    source.write_text(source.read_text().replace("a", "h"))
    steps = ["--config.train.steps=10"]
    fields = read_workdir(trained).data
    assert fields.train_source != str(source)
    moved = json.loads((tmp_path / "run" / "config.json").read_text())
    for key, value in moved["data"].items():
        if isinstance(value, str) and value.endswith((".en", ".de")):
            moved["data"][key] = str(tmp_path / "corpus" / pathlib.Path(value).name)
    (tmp_path / "run" / "config.json").write_text(json.dumps(moved))
    assert tiny.train(config, tmp_path / "run", steps) == 2
    assert "train data are not those this run began with" in capsys.readouterr().err


def test_a_loss_that_stays_non_finite_stops_the_run(tmp_path, capsys):
    config = tiny.write_config(tmp_path, train__learning_rate=1e30)
    steps = ["--config.train.steps=40", "--config.train.max_bad_updates=3"]
    assert tiny.train(config, tmp_path / "run", [*steps]) == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert " is not finite, for 3 updates in a row at step " in message
    assert (
        "; in the forward pass " in message and "config.train.learning_rate" in message
    )
    assert "last good checkpoint" in message
    assert not list((tmp_path / "run").rglob("*nan*"))


def test_a_killed_save_leaves_no_whole_looking_checkpoint(trained, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(trained, workdir)
    half = workdir / "checkpoints" / "9.orbax-checkpoint-tmp"
    shutil.copytree(workdir / "checkpoints" / "8", half)
    config = str(trained.parent / "corpus" / "config.py")
    assert tiny.train(config, workdir) == 0
    assert max(checkpoint_steps(workdir)) == 8


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signals_at_any_moment(tmp_path, signum):
    """The program itself, in processes of its own, stopped at five moments."""
    config = tiny.write_config(tmp_path, train__steps=60, train__eval_every=30)
    command = [sys.executable, "-m", "transformer_jax", "train", f"--config={config}"]

    def start(name: str) -> subprocess.Popen:
        with (tmp_path / "log").open("w") as log:
            return subprocess.Popen(
                [*command, f"--workdir={tmp_path / name}"], stderr=log
            )

    assert start("whole").wait(300) == 0
    for delay in (2.0, 1.0, 0.1, 0.05, 0.3):
        process = start("stopped")
        while process.poll() is None:
            if "compiled" in (tmp_path / "log").read_text():
                break
            time.sleep(0.01)
        time.sleep(delay)
        process.send_signal(signum)
        assert process.wait(300) in (0, 128 + signum)
    assert start("stopped").wait(300) == 0
    assert same(state_of(tmp_path / "stopped", 60), state_of(tmp_path / "whole", 60))
