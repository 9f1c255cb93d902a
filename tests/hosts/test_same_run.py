"""Two and four processes are the run of one: parameters, metrics, scores, texts."""

import json
import pathlib
from typing import Any

import jax
import launch
import numpy as np
import pytest
import tiny

from transformer_jax.checkpoint import load_params

pytestmark = pytest.mark.slow

MESH = ("--config.parallel.strategy=mesh", "--config.parallel.fsdp=2")
TENSOR = ("--config.parallel.tensor=2",)


def rows(workdir: pathlib.Path, kind: str) -> list[dict[str, Any]]:
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def differ(one: pathlib.Path, other: pathlib.Path, step: int = 8) -> float:
    """Returns the largest difference of two runs' parameters."""
    loaded = [load_params(d, str(step), print).params for d in (one, other)]
    pairs = zip(*map(jax.tree.leaves, loaded), strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("hosts")
    tiny.write_config(folder)
    return folder


@pytest.fixture(scope="module")
def alone(folder) -> pathlib.Path:
    """One process with one device."""
    assert launch.train(folder, "alone", 1).codes() == [0]
    return folder / "alone"


def require_same(alone: pathlib.Path, other: pathlib.Path) -> float:
    worst = differ(alone, other)
    assert worst < 2e-4
    for kind, names in (("train", ["loss", "nll"]), ("valid", ["nll", "bleu", "chrf"])):
        pairs = list(zip(rows(alone, kind), rows(other, kind), strict=True))
        assert pairs
        for one, two in pairs:
            assert one["step"] == two["step"]
            for name in names:
                assert one[name] == pytest.approx(two[name], rel=1e-4), name
    return worst


@pytest.mark.parametrize(
    ("name", "count", "devices", "flags"),
    [
        ("pmap-2", 2, 1, ()),
        ("pmap-4", 4, 2, ()),
        ("mesh-2", 2, 2, (*MESH, *TENSOR)),
        ("mesh-4", 4, 1, (*MESH, *TENSOR)),
    ],
)
def test_the_run_of_one_process(folder, alone, name, count, devices, flags):
    running = launch.train(folder, name, count, *flags, devices=devices)
    assert running.codes() == [0] * count, running.said(0)
    print(f"{name}: {require_same(alone, folder / name):.1e}")
    assert f"global = {count} hosts x {256 // count}" in running.said(0)
    for process in range(1, count):
        # Gloo has its own words, and its threads write into each other's lines.
        for ours in (
            "devices",
            "tokenising",
            "compiled",
            "loss",
            "warning",
            "finished",
        ):
            assert ours not in running.said(process)
    assert len(list((folder / name / "tensorboard").iterdir())) == 1


@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1)])
def test_a_run_goes_on_with_another_number_of_processes(folder, alone, first, then):
    name = f"from-{first}"
    begun = launch.train(folder, name, first, "--config.train.steps=5")
    assert begun.codes() == [0] * first, begun.said(0)
    running = launch.train(folder, name, then)
    assert running.codes() == [0] * then, running.said(0)
    assert "resuming    at step 5" in running.said(0)
    assert differ(alone, folder / name) < 2e-4


def test_evaluation_is_that_of_one_process(folder, alone):
    reports = []
    for count in (1, 2):
        workdir = f"--workdir={alone}"
        running = launch.start(folder / f"evaluate-{count}", count, "evaluate", workdir)
        assert running.codes() == [0] * count, running.said(0)
        found = alone / "evaluate" / "test-best"
        texts = found.with_suffix(".txt").read_text()
        report = json.loads(found.with_suffix(".json").read_text())
        reports.append((texts, {k: v for k, v in report.items() if k != "command"}))
    assert reports[0] == reports[1]
    assert "BLEU" not in running.said(1)


def test_early_stopping_by_bleu(folder):
    """BLEU stands still from the first evaluation on."""
    flags = (
        "--config.train.steps=40",
        "--config.train.early_stop_metric=bleu",
        "--config.train.patience=2",
        "--config.train.learning_rate=1e-9",
    )
    for count in (1, 2):
        running = launch.train(folder, f"early-{count}", count, *flags)
        assert running.codes() == [0] * count, running.said(0)
        said = "finished at step 12: the validation's bleu is no better than at step 4"
        assert said in running.said(0)
    assert differ(folder / "early-1", folder / "early-2", 12) < 2e-4


def test_a_signal_to_one_stops_all_after_the_same_update(folder):
    """Then one process goes on, to the parameters of one that was never stopped."""
    steps = "--config.train.steps=3000", "--config.train.eval_every=3000"
    steps = *steps, "--config.train.save_every=3000", "--config.train.log_every=10"
    running = launch.train(folder, "stopped", 2, *steps)
    running.wait_for("step 20/3000")
    running.processes[1].terminate()
    assert running.codes() == [143, 143], running.said(0)
    assert "stopped by SIGTERM at step" in running.said(0)
    (event,) = rows(folder / "stopped", "event")
    saved = [path.name for path in (folder / "stopped" / "checkpoints").iterdir()]
    assert saved == [str(event["step"])]
    until = event["step"] + 3
    ending = *steps[1:], f"--config.train.steps={until}"
    assert launch.train(folder, "stopped", 1, *ending).codes() == [0]
    assert launch.train(folder, "unstopped", 1, *ending).codes() == [0]
    assert differ(folder / "stopped", folder / "unstopped", until) < 2e-4


def test_the_clock_of_one_stops_all(folder):
    running = launch.train(
        folder, "late", 2, "--config.train.steps=100000", "--config.train.hours=0.001"
    )
    assert running.codes() == [0, 0], running.said(0)
    assert "config.train.hours 0.001 reached" in running.said(0)
