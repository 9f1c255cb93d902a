"""Whatever goes wrong in one process, all end soon, and each says what it was."""

import os
import pathlib
import signal
import socket
import time
from typing import Any

import launch
import pytest
import tiny

from transformer_jax import channel

pytestmark = pytest.mark.slow

LONG = (
    "--config.train.steps=100000",
    "--config.train.eval_every=100000",
    "--config.train.save_every=100000",
)
SOON = 30.0  # seconds; a machine that tests elsewhere, too, is slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("endings")
    tiny.write_config(folder)
    return folder


def errors(running: Any) -> list[str]:
    """Returns the last line that each process said."""
    return [running.said(i).strip().splitlines()[-1] for i in range(len(running.logs))]


def test_an_error_of_one_is_that_of_all(folder):
    running = launch.train(folder, "fails", 3, *LONG, faults={1: {"raises": 4}})
    assert running.codes() == [2, 2, 2]
    said = "the memory of this host is full"
    assert errors(running) == [
        f"transformer-jax: process 1 failed: {said}",
        f"transformer-jax: process 1: {said}",
        f"transformer-jax: process 2: process 1 failed: {said}",
    ]


@pytest.mark.parametrize("process", [0, 1])
def test_a_crash_of_one_ends_all(folder, process):
    running = launch.train(
        folder, f"crashes-{process}", 2, *LONG, faults={process: {"crashes": 4}}
    )
    assert running.codes() == [1, 1]
    assert "Traceback" in running.said(process)
    for said in errors(running):
        assert said.endswith("RuntimeError: a fault of ours")
    assert f"process {process} failed" in errors(running)[1 - process]


@pytest.mark.parametrize("process", [0, 1])
def test_a_killed_process_ends_the_other(folder, process):
    """Also where it is process 0, at which all meet."""
    running = launch.train(
        folder, f"killed-{process}", 2, *LONG, "--config.train.log_every=5"
    )
    running.wait_for("step 5/")
    time.sleep(3 * channel.BEAT)  # the other has heard of it by then
    running.processes[process].kill()
    started = time.monotonic()
    codes = running.codes()
    seconds = time.monotonic() - started
    print(f"process {process} killed: the other ended after {seconds:.1f} s")
    assert seconds < SOON
    assert (codes[process], codes[1 - process]) == (-9, 1)
    host = socket.gethostname()
    said = errors(running)[1 - process]
    assert f"process {process} on {host} ended without a word; it was at step" in said
    assert "Fatal" not in running.said(1 - process)


def test_a_frozen_process_is_given_up(folder):
    faults = {0: {"silence": 5}, 1: {"silence": 5}}
    running = launch.train(
        folder, "frozen", 2, *LONG, "--config.train.log_every=5", faults=faults
    )
    running.wait_for("step 5/")
    os.kill(running.processes[1].pid, signal.SIGSTOP)
    started = time.monotonic()
    assert running.processes[0].wait(launch.WAIT) == 1
    print(f"frozen: the other ended after {time.monotonic() - started:.1f} s")
    running.processes[1].kill()
    assert "has not answered for 5 s; it was at step" in errors(running)[0]


def test_one_that_never_comes_is_named(folder):
    running = launch.train(folder, "missing", 3, "--start_timeout=15", only={0, 2})
    started = time.monotonic()
    assert running.codes() == [1, 1]
    print(f"missing: all ended after {time.monotonic() - started:.1f} s")
    for said in errors(running):
        assert "process 1 of 3 did not come to the start within 15 s" in said


def test_process_0_that_never_comes_is_named(folder):
    running = launch.train(folder, "headless", 2, "--start_timeout=3", only={1})
    assert running.codes() == [1]
    assert "process 1: process 0 at 127.0.0.1:" in errors(running)[0]
    assert "did not answer within 3 s" in errors(running)[0]


def refused(running: Any, *said: str) -> None:
    assert running.codes() == [2] * len(running.logs)
    for error in errors(running):
        for each in said:
            assert each in error


def test_other_configs_and_code_are_named(folder):
    def change(process: int, given: list[str]) -> list[str]:
        return [*given, "--config.model.dropout=0.3"] if process == 1 else given

    refused(
        launch.train(folder, "other", 2, change=change, faults={1: {"code": "abc"}}),
        "config.model.dropout is 0.3 in process 1, and 0.1 in process 0",
        "the code of transformer_jax is 'abc' in process 1",
    )
    assert not (folder / "other").exists()


def test_other_data_are_named(tmp_path):
    """The same names on both hosts, but other files."""
    names = {
        f"data__{split}_{side}": f"{split}.{lang}"
        for split in ("train", "valid", "test")
        for side, lang in (("source", "en"), ("target", "de"))
    }
    folders = [tmp_path / "0", tmp_path / "1"]
    for each in folders:
        tiny.write_config(each, **names)
    (folders[1] / "valid.en").write_text("a b\n" * 7)
    running = launch.start(
        tmp_path / "logs",
        2,
        "train",
        "--config=config.py",
        f"--workdir={tmp_path / 'run'}",
        folders=folders,
    )
    refused(running, "the data is {'train': ", "in process 1, and {'train': ")


def test_a_folder_that_is_not_shared_is_named(folder):
    def change(process: int, given: list[str]) -> list[str]:
        return [
            f"{each}-{process}" if each.startswith("--workdir") else each
            for each in given
        ]

    shared = {process: {"shared": 2} for process in range(2)}
    running = launch.train(folder, "local", 2, change=change, faults=shared)
    refused(running, "is not one folder for all", f"process 1 ({folder}/local-1)")


def test_a_stall_says_where_each_process_is(folder):
    faults = {0: {"stall": 4, "sleeps": 3, "seconds": 25}}
    running = launch.train(folder, "stalled", 2, faults=faults)
    assert running.codes() == [0, 0], running.said(0)
    (said, *_) = [s for s in running.said(0).splitlines() if "no update for" in s]
    host = socket.gethostname()
    assert f"process 0 on {host}: at step 3, waiting for data" in said
    assert f"process 1 on {host}: at step " in said
    assert "in an update" in said
