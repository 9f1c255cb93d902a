"""Saves in the background: the run goes on beside them, and does not wait for ever."""

import itertools
import os
import pathlib
import threading
from collections.abc import Callable

import jax
import numpy as np
import pytest
import tiny

from transformer_jax import checkpoint
from transformer_jax.errors import CheckpointError
from transformer_jax.train import loop

PATIENCE = 60.0  # seconds after which a test that hangs gives up


def whole_state(workdir: pathlib.Path, step: int) -> list[np.ndarray]:
    checkpoints = checkpoint.Checkpoints(workdir, print)
    try:
        saved = checkpoints._manager.restore(step)
    finally:
        checkpoints.close()
    return [
        np.asarray(x) for x in jax.tree.leaves([saved["params"], saved["training"]])
    ]


@pytest.fixture
def slow_disk(monkeypatch) -> Callable[[int], threading.Event]:
    """Returns a function: the save of a step ends only after the event it returns."""

    def hold(step: int) -> threading.Event:
        free, rename = threading.Event(), os.rename

        def late(source: object, target: object) -> None:
            if pathlib.Path(str(target)).name == str(step):
                free.wait(PATIENCE)
            rename(source, target)  # pyright: ignore[reportArgumentType]

        monkeypatch.setattr(os, "rename", late)
        return free

    return hold


def test_the_run_goes_on_while_a_save_is_written(
    trained, tmp_path, monkeypatch, slow_disk
):
    """The save of step 4 ends only after update 7, which so must not wait for it."""
    free, update, seen = slow_disk(4), loop.Trainer.update, []

    def watched(self, state, batch):
        seen.append((tmp_path / "run" / "checkpoints" / "4").exists())
        if len(seen) == 7:
            free.set()
        return update(self, state, batch)

    monkeypatch.setattr(loop.Trainer, "update", watched)
    config = str(trained.parent / "corpus" / "config.py")
    assert tiny.train(config, tmp_path / "run", ["--config.train.save_every=4"]) == 0
    assert not any(seen[4:7]) and len(seen) == 8
    # What was saved is the state of step 4, though later updates reused its memory.
    found, wanted = (whole_state(w, 4) for w in (tmp_path / "run", trained))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_slow_save_is_warned_of_first(tmp_path, monkeypatch, slow_disk):
    monkeypatch.setattr(checkpoint, "SAVE_WARNING", 0.0)
    monkeypatch.setattr(checkpoint, "SAVE_LIMIT", 5.0)
    said: list[str] = []
    checkpoints = checkpoint.Checkpoints(tmp_path, said.append, keep_last=2)
    free, tree = slow_disk(7), {"kernel": np.ones((2, 3), np.float32)}
    checkpoints.save(7, tree, {"step": np.zeros((), np.int32)}, {})
    checkpoints.check()  # waits for nothing
    with pytest.raises(CheckpointError, match=r"not written after 5 seconds.*\(none\)"):
        checkpoints.wait()
    assert ["the run waits for it up to 5" in line for line in said] == [True]
    free.set()


def test_a_save_that_hangs_stops_the_run(
    trained, tmp_path, monkeypatch, slow_disk, capsys
):
    free, update, count = slow_disk(6), loop.Trainer.update, itertools.count(1)

    def watched(self, state, batch):
        if next(count) == 7:  # only now: an earlier save may take its time
            monkeypatch.setattr(checkpoint, "SAVE_LIMIT", 1.0)
        return update(self, state, batch)

    monkeypatch.setattr(loop.Trainer, "update", watched)
    config = str(trained.parent / "corpus" / "config.py")
    flags = ["--config.train.steps=12", "--config.train.eval_every=12"]
    try:
        assert tiny.train(config, tmp_path / "run", flags) == 2
    finally:
        free.set()
    message = capsys.readouterr().err.splitlines()[-1]
    assert "not written after" in message
    assert "the earlier ones ([2, 4]) are whole; free space" in message
    monkeypatch.undo()
    assert tiny.train(config, tmp_path / "run") == 0
    found, wanted = (whole_state(w, 8) for w in (tmp_path / "run", trained))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_save_that_fails_is_noticed_by_the_next_update(
    trained, tmp_path, monkeypatch, capsys
):
    """The disk is full at step 4; the next save would come at step 8."""
    rename, steps = os.rename, []

    def full(source: object, target: object) -> None:
        if pathlib.Path(str(target)).name == "4":
            raise OSError(28, os.strerror(28))
        rename(source, target)  # pyright: ignore[reportArgumentType]

    def watched(self, state, batch, update=loop.Trainer.update):
        steps.append(len(steps) + 1)
        if steps[-1] == 6:  # so that the save is surely over
            self.checkpoints._manager._finalize_thread.get_not_none().join(PATIENCE)
        return update(self, state, batch)

    monkeypatch.setattr(os, "rename", full)
    monkeypatch.setattr(loop.Trainer, "update", watched)
    config = str(trained.parent / "corpus" / "config.py")
    flags = ["--config.train.save_every=4", "--config.train.eval_every=8"]
    assert tiny.train(config, tmp_path / "run", flags) == 2
    assert "No space left on device" in capsys.readouterr().err.splitlines()[-1]
    assert steps[-1] < 8
