"""Checkpoints: what is kept, the best, averages, and trees that do not fit."""

import errno
import os
import shutil

import numpy as np
import orbax.checkpoint as ocp
import pytest

from transformer_jax.checkpoint import (
    Checkpoints,
    average,
    average_trees,
    load_params,
    require_same_shapes,
)
from transformer_jax.config import TrainConfig
from transformer_jax.errors import CheckpointError

TRAINING = {"step": np.zeros((), np.int32)}


def tree(value: float, width: int = 3) -> dict:
    return {"layer": {"kernel": np.full((2, width), value, np.float32)}}


def save(workdir, steps: dict[int, float | None], keep_last: int = 2) -> Checkpoints:
    """Saves parameters full of the step's number, with a BLEU where one is given."""
    checkpoints = Checkpoints(workdir, print, keep_last)
    for step, bleu in steps.items():
        metrics = {} if bleu is None else {"bleu": bleu, "nll": 1.0}
        checkpoints.save(
            step, tree(step), {"step": np.full((), step, np.int32)}, metrics
        )
    checkpoints.wait()
    return checkpoints


def test_keeps_the_newest_and_the_best(tmp_path):
    save(tmp_path, {1: 5.0, 2: 9.0, 3: None, 4: 7.0, 5: None, 6: 1.0}).close()
    checkpoints = Checkpoints(tmp_path, print)
    assert checkpoints.steps() == [2, 5, 6]
    assert checkpoints.best_step() == 2
    found = checkpoints.restore_newest(tree(0), TRAINING)
    checkpoints.close()
    assert found is not None
    step, params, training = found
    assert step == 6 and training["step"] == 6
    np.testing.assert_array_equal(params["layer"]["kernel"], tree(6)["layer"]["kernel"])


def test_averaging_never_lacks_a_checkpoint(tmp_path):
    """Keep 3, best 1, average 5: the best of long ago, and 5."""
    kept = TrainConfig(keep_last=3, average_last=5).kept_newest
    bleu = {2: 9.0, 4: 5.0, 6: 5.0, 9: 1.0}
    save(tmp_path, {step: bleu.get(step) for step in range(1, 11)}, kept).close()
    folders = sorted(int(p.name) for p in (tmp_path / "checkpoints").glob("[0-9]*"))
    assert folders == [2, 6, 7, 8, 9, 10]
    assert average(tmp_path, 5, print) == [6, 7, 8, 9, 10]
    assert TrainConfig(keep_last=4, average_last=8).kept_newest == 8
    assert TrainConfig(keep_last=4, average_last=3).kept_newest == 4


def test_load_by_name(tmp_path):
    save(tmp_path, {1: 5.0, 2: 9.0, 3: 1.0}, keep_last=3).close()
    for which, step in (("best", 2), ("last", 3), ("1", 1)):
        loaded = load_params(tmp_path, which, print)
        assert (loaded.steps, loaded.params["layer"]["kernel"][0, 0]) == ([step], step)
    for which in ("4", "newest", "-1", "1.0"):
        with pytest.raises(CheckpointError, match=r"best, last, average.*1, 2, 3"):
            load_params(tmp_path, which, print)


def files(folder) -> dict:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_reading_beside_a_run_that_saves_touches_nothing(tmp_path, capsys):
    """A save that is half done, and a checkpoint whose metrics are cut short."""
    save(tmp_path, {1: 5.0, 2: 9.0}).close()
    half = tmp_path / "checkpoints" / "3.orbax-checkpoint-tmp"
    shutil.copytree(tmp_path / "checkpoints" / "2", half)
    before = files(tmp_path)
    for which in ("best", "last", "1"):
        load_params(tmp_path, which, print)
    assert files(tmp_path) == before
    (tmp_path / "checkpoints" / "1" / "metrics" / "metrics").write_text("{")
    before = files(tmp_path)
    with pytest.raises(CheckpointError, match="metrics of checkpoint 1 in"):
        load_params(tmp_path, "best", print)
    assert files(tmp_path) == before
    save(tmp_path, {4: None}).close()  # the run itself tidies up
    assert not half.exists() and (tmp_path / "damaged").is_dir()


def test_an_average_that_fails_leaves_the_old(tmp_path, monkeypatch):
    save(tmp_path, {1: None, 2: None}).close()
    average(tmp_path, 1, print)
    before = files(tmp_path / "average")

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ocp.StandardCheckpointer, "save", full)
    with pytest.raises(CheckpointError, match="No space left on device; an earlier"):
        average(tmp_path, 2, print)
    assert files(tmp_path / "average") == before


def test_without_evaluation_the_best_is_the_last(tmp_path):
    save(tmp_path, {1: None, 2: None}).close()
    assert load_params(tmp_path, "best", print).steps == [2]


def test_nothing_there(tmp_path):
    with pytest.raises(CheckpointError, match="train there first"):
        load_params(tmp_path, "best", print)
    Checkpoints(tmp_path, print, keep_last=1).close()
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        load_params(tmp_path, "last", print)


def test_average_is_the_mean_of_the_last(tmp_path):
    save(tmp_path, {1: None, 2: None, 4: None}, keep_last=3).close()
    assert average(tmp_path, 2, print) == [2, 4]
    loaded = load_params(tmp_path, "average", print)
    assert loaded.steps == [2, 4]
    kernel = loaded.params["layer"]["kernel"]
    assert kernel.dtype == np.float32 and (kernel == 3.0).all()
    assert average(tmp_path, 3, print) == [1, 2, 4]  # written over
    kernel = load_params(tmp_path, "average", print).params["layer"]["kernel"]
    np.testing.assert_allclose(kernel, 7 / 3, rtol=1e-7)
    with pytest.raises(CheckpointError, match=r"--last=4.*3 checkpoints \(1, 2, 4\)"):
        average(tmp_path, 4, print)


def test_an_average_is_taken_in_float64():
    trees = {i: tree(value) for i, value in enumerate([1e8, 1.0, -1e8, 1.0])}
    assert (average_trees(trees)["layer"]["kernel"] == 0.5).all()


def test_equal_trees_average_to_themselves():
    mean = average_trees({1: tree(0.1), 2: tree(0.1), 3: tree(0.1)})
    np.testing.assert_array_equal(mean["layer"]["kernel"], tree(0.1)["layer"]["kernel"])


def test_another_model_is_named():
    with pytest.raises(CheckpointError, match=r"checkpoint 2.*layer/kernel.*\(2, 4\)"):
        average_trees({1: tree(1), 2: tree(1, width=4)})
    with pytest.raises(CheckpointError, match=r"other/bias is missing"):
        require_same_shapes(tree(1) | {"other": {"bias": np.zeros(3)}}, tree(1), "x")


def test_restoring_into_another_model_is_refused(tmp_path):
    checkpoints = save(tmp_path, {1: None})
    with pytest.raises(CheckpointError, match="layer/kernel"):
        checkpoints.restore_newest(tree(0, width=5), TRAINING)
    checkpoints.close()


def test_a_save_that_fails_is_an_error(tmp_path, monkeypatch):
    checkpoints = save(tmp_path, {1: None})

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoints._manager, "save", full)
    with pytest.raises(CheckpointError, match=r"No space left.*\[1\].*whole"):
        checkpoints.save(2, tree(2), TRAINING, {})
    monkeypatch.undo()
    monkeypatch.setattr(checkpoints._manager, "wait_until_finished", full)
    with pytest.raises(CheckpointError, match="could not be written"):
        checkpoints.wait()
    shutil.move(tmp_path / "checkpoints", tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="the folder is gone"):
        checkpoints.save(2, tree(2), TRAINING, {})
