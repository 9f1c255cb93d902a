"""Starts the program in several processes of this host."""

import dataclasses
import json
import os
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

PROCESS = str(pathlib.Path(__file__).with_name("process.py"))
WAIT = 900.0  # seconds, on a machine that has other things to do


@dataclasses.dataclass
class Running:
    """Processes that were started together."""

    processes: list[subprocess.Popen]
    logs: list[pathlib.Path]

    def said(self, process: int) -> str:
        return self.logs[process].read_text()

    def wait_for(self, text: str, process: int = 0) -> None:
        """Waits until a process says something."""
        until = time.monotonic() + WAIT
        while text not in self.said(process):
            assert self.processes[process].poll() is None, self.said(process)
            assert time.monotonic() < until, self.said(process)
            time.sleep(0.05)

    def codes(self) -> list[int]:
        """Waits until all have ended; returns their exit codes."""
        return [process.wait(WAIT) for process in self.processes]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start(
    folder: pathlib.Path,
    count: int,
    *arguments: str,
    faults: Mapping[int, dict[str, Any]] | None = None,
    devices: int = 1,
    change: Callable[[int, list[str]], list[str]] = lambda process, given: given,
    only: set[int] | None = None,
    folders: Sequence[pathlib.Path] | None = None,
) -> Running:
    """Starts `count` processes, or `only` some of them.

    Args:
        folder: of their logs.
        count: of processes; with 1 it is a plain run.
        arguments: verb and flags.
        faults: of some processes, as `process.py` takes them.
        devices: that each simulates.
        change: returns the arguments of a process.
        only: numbers of those that come.
        folders: where each is started.
    """
    address = f"--coordinator=127.0.0.1:{free_port()}"
    folder.mkdir(parents=True, exist_ok=True)
    running = Running([], [])
    for process in range(count):
        if only is not None and process not in only:
            continue
        flags = [address, f"--num_processes={count}", f"--process_id={process}"]
        given = change(process, [*arguments, *(flags if count > 1 else [])])
        settings = {"devices": devices, **(faults or {}).get(process, {})}
        log = folder / f"log{process}"
        with log.open("w") as stderr:
            started = subprocess.Popen(
                [sys.executable, PROCESS, json.dumps(settings), *given],
                stdout=stderr,
                stderr=stderr,
                cwd=folders[process] if folders else None,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        running.processes.append(started)
        running.logs.append(log)
    return running


def train(
    folder: pathlib.Path, name: str, count: int, *flags: str, **more: Any
) -> Running:
    """Starts `count` processes that train in `folder / name` by its config.py."""
    config, workdir = f"--config={folder / 'config.py'}", f"--workdir={folder / name}"
    return start(
        folder / f"{name}-logs", count, "train", config, workdir, *flags, **more
    )
