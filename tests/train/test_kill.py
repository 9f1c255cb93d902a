"""A run killed twenty times, without a word of warning, ends as the run in one go."""

import json
import pathlib
import random
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np
import pytest
import tiny

from transformer_jax.checkpoint import load_params

KILLS, STEPS = 20, 2000
CLOCK = (
    "time",
    "tokens_per_second",
    "step_seconds",
    "data_wait",
    "hours",
)  # may differ


def rows(workdir: pathlib.Path) -> list[dict[str, Any]]:
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if k not in CLOCK} for row in found]


def wait_for(condition: Any, process: subprocess.Popen) -> None:
    while not condition() and process.poll() is None:
        time.sleep(0.002)


@pytest.mark.slow
def test_kill_at_any_moment(tmp_path: pathlib.Path) -> None:
    """Half of them at any time after the start, half while a checkpoint is written."""
    config = tiny.write_config(
        tmp_path,
        train__steps=STEPS,
        train__save_every=20,
        train__log_every=10,
        train__eval_every=1000,
    )
    command = [sys.executable, "-m", "transformer_jax", "train", f"--config={config}"]
    log, rng = tmp_path / "log", random.Random(0)

    def start(name: str) -> subprocess.Popen:
        with log.open("w") as stderr:
            return subprocess.Popen(
                [*command, f"--workdir={tmp_path / name}"], stderr=stderr
            )

    assert start("whole").wait(900) == 0
    killed = tmp_path / "killed"
    cut_short: set[tuple[str, int]] = set()  # the saves that were killed

    def saving() -> list[pathlib.Path]:  # folders that are not yet a checkpoint
        return list(killed.glob("checkpoints/*tmp*"))

    for number in range(KILLS):
        process = start("killed")
        if number % 4:
            wait_for(lambda: "compiled" in log.read_text(), process)
        time.sleep(rng.uniform(0, 1.0))
        if number % 2:
            wait_for(saving, process)
        process.kill()
        assert process.wait(60) == -9, "it was finished before it could be killed"
        cut_short |= {(path.name, path.stat().st_ino) for path in saving()}
    print(f"{len(cut_short)} of {KILLS} kills cut a save short")
    assert len(cut_short) >= KILLS // 4
    assert start("killed").wait(900) == 0

    states = [
        load_params(folder, str(STEPS), print).params
        for folder in (tmp_path / "whole", killed)
    ]
    for one, other in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(one, other)
    assert rows(killed) == rows(tmp_path / "whole")
