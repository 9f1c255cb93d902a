"""A packed run: it learns, goes on as if never stopped, and is no unpacked one."""

import itertools
import json
import os
import pathlib
import shutil
import signal

import numpy as np
import pytest
import tiny

from transformer_jax.checkpoint import load_params
from transformer_jax.data.pipeline import read_shapes
from transformer_jax.train import loop

PACKED = ["--config.batch.packing=True", "--config.batch.tokens=128"]


def config_of(trained: pathlib.Path) -> str:
    return str(trained.parent / "corpus" / "config.py")


@pytest.fixture(scope="module")
def packed(trained: pathlib.Path, tmp_path_factory: pytest.TempPathFactory):
    """A finished packed run of 8 updates, in a second epoch."""
    workdir = tmp_path_factory.mktemp("packed") / "run"
    assert tiny.train(config_of(trained), workdir, PACKED) == 0
    return workdir


def rows(workdir: pathlib.Path, kind: str) -> list[dict]:
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def test_it_has_one_shape_and_learns(packed) -> None:
    shapes = read_shapes(packed)
    assert shapes is not None and len(shapes) == 1
    losses = [row["loss"] for row in rows(packed, "train")]
    assert losses[-1] < losses[0]
    assert [row["step"] for row in rows(packed, "valid")] == [4, 8]


def test_validation_is_not_packed(packed, trained) -> None:
    """The same pairs, each counted once, in the shapes of a run without packing."""
    tokens = [rows(workdir, "valid")[0]["tokens"] for workdir in (packed, trained)]
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("stop", [pytest.param(3, marks=pytest.mark.slow), 5])
def test_stop_and_resume_is_the_same_run(
    packed, trained, tmp_path, monkeypatch, stop
) -> None:
    update, count = loop.Trainer.update, itertools.count(1)

    def stopping(self, state, batch):
        if next(count) == stop:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(self, state, batch)

    workdir = tmp_path / "run"
    monkeypatch.setattr(loop.Trainer, "update", stopping)
    assert tiny.train(config_of(trained), workdir, PACKED) == 128 + signal.SIGTERM
    monkeypatch.undo()
    assert tiny.train(config_of(trained), workdir, PACKED) == 0
    states = [load_params(folder, "8", print).params for folder in (packed, workdir)]
    for one, other in zip(*map(loop.jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(one, other)


def test_packing_is_another_run(trained, tmp_path, capsys) -> None:
    workdir = tmp_path / "run"
    shutil.copytree(trained, workdir)
    assert tiny.train(config_of(trained), workdir, PACKED[:1]) == 2
    assert "batch.packing: False -> True" in capsys.readouterr().err
    # A run from before there was packing goes on without it.
    file = workdir / "config.json"
    fields = json.loads(file.read_text())
    del fields["batch"]["packing"]
    file.write_text(json.dumps(fields))
    assert tiny.train(config_of(trained), workdir) == 0
    assert "finished" in capsys.readouterr().err
