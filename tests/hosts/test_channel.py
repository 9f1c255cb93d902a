"""How processes hear of each other, without a process: all ends are threads here."""

import socket
import threading
import time
from typing import Any

import pytest

from transformer_jax import channel
from transformer_jax.channel import PREPARING, Channel, Ended, Meeting, Relay
from transformer_jax.errors import ConfigError


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Group:
    """A meeting and its channels; `ends` holds what each was told."""

    def __init__(self, count: int) -> None:
        self.port, self.count = free_port(), count
        self.reports: list[str] = []
        self.ends: dict[int, Ended] = {}
        self.meeting = Meeting(self.port, count, self.reports.append)
        self.channels: dict[int, Channel] = {}

    def join(self, process: int, count: int | None = None) -> Channel:
        def on_end(ended: Ended) -> Any:
            self.ends.setdefault(process, ended)

        found = Channel(
            ("127.0.0.1", self.port), process, count or self.count, 5.0, on_end
        )
        self.channels[process] = found
        return found

    def gather(self, name: str, values: dict[int, Any]) -> dict[int, list[Any]]:
        found: dict[int, list[Any]] = {}

        def run(process: int, value: Any) -> None:
            found[process] = self.channels[process].gather(name, value)

        threads = [
            threading.Thread(target=run, args=item, daemon=True)
            for item in values.items()
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return found

    def told(self, process: int, seconds: float = 20.0) -> str:
        """Waits for what ends a process."""
        until = time.monotonic() + seconds
        while process not in self.ends and time.monotonic() < until:
            time.sleep(0.01)
        return str(self.ends[process])


@pytest.fixture
def three(monkeypatch) -> Group:
    monkeypatch.setattr(channel, "BEAT", 0.05)
    group = Group(3)
    for process in range(3):
        group.join(process)
    group.gather("the start", dict.fromkeys(range(3)))
    return group


def cut(group: Group, process: int) -> None:
    """Ends a process as a kill does: its connections close."""
    group.channels[process]._left = True  # it says no more
    group.channels[process]._connection.shutdown(socket.SHUT_RDWR)


def test_all_get_the_values_of_all(three):
    for values in ({0: "a", 1: [1], 2: None}, {2: 2, 0: 0, 1: 1}):
        found = three.gather("values", values)
        assert found == {i: [values[0], values[1], values[2]] for i in range(3)}
    assert not three.ends


def test_the_end_of_one_ends_the_others(three):
    three.channels[1].place.step = 57
    three.channels[1].place.doing = "in an update"
    time.sleep(0.5)
    started = time.monotonic()
    cut(three, 1)
    for process in (0, 2):
        said = three.told(process)
        assert said.startswith(f"process 1 on {socket.gethostname()} ended without a")
        assert said.endswith("it was at step 57, in an update")
        assert three.ends[process].code == 1
    assert time.monotonic() - started < 5


def test_a_failure_is_told_with_its_code(three):
    three.channels[2].fail("config.x is wrong", 2)
    for process in (0, 1):
        assert three.told(process) == "process 2 failed: config.x is wrong"
        assert three.ends[process].code == 2
    assert 2 not in three.ends


def test_a_failure_of_process_0_is_told_before_it_ends(three):
    three.channels[0].fail("no room", 2)
    assert three.told(1) == three.told(2) == "process 0 failed: no room"


def test_a_process_that_leaves_in_order_is_not_missed(three):
    three.channels[1].leave()
    time.sleep(0.3)
    cut(three, 1)
    time.sleep(0.3)
    assert not three.ends


@pytest.mark.parametrize(("doing", "lost"), [("evaluating", True), (PREPARING, False)])
def test_a_silent_process_is_given_up(three, monkeypatch, doing, lost):
    """But not one that prepares data, where a library may stop all threads."""
    three.channels[2].place.doing, three.channels[2].place.step = doing, 9
    time.sleep(0.5)
    monkeypatch.setattr(channel, "SILENCE", 0.5)
    monkeypatch.setattr(three.channels[2], "_left", True)
    time.sleep(1.5)
    if lost:
        assert three.told(1).startswith(
            f"process 2 on {socket.gethostname()} has not answered for 0 s; it was "
        )
    assert bool(three.ends) == lost


def test_a_silent_process_0_is_given_up(monkeypatch):
    monkeypatch.setattr(channel, "SILENCE", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends: list[Ended] = []
        on_end: Any = ends.append
        Channel(("127.0.0.1", server.getsockname()[1]), 1, 2, 5.0, on_end)
        time.sleep(1.5)
    assert str(ends[0]) == "process 0 has not answered for 0 s"


def test_who_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(channel, "BEAT", 0.05)
    group = Group(4)
    for process in (0, 2):
        found = group.join(process)
        wait = threading.Thread(
            target=found.gather, args=["the start", None, 0.3], daemon=True
        )
        wait.start()
    said, host = group.told(2), socket.gethostname()
    assert said == (
        "processes 1, 3 of 4 did not come to the start within 0.3 s; there are 0 on "
        f"{host}, 2 on {host}"
    )
    assert group.ends[2].code == 1


def test_process_0_that_never_comes():
    port = free_port()
    with pytest.raises(Ended, match=f"process 0 at 127.0.0.1:{port} did not answer"):
        Channel(("127.0.0.1", port), 1, 2, 0.5, lambda ended: None)  # pyright: ignore


@pytest.mark.parametrize(
    ("process", "count", "said"),
    [
        (1, 3, "two processes came as process 1, from"),
        (2, 4, "was started with --num_processes=4, process 0 with 3"),
    ],
)
def test_a_process_that_does_not_fit(process, count, said):
    group = Group(3)
    group.join(0)
    group.join(1)
    time.sleep(0.3)
    group.ends.clear()
    group.join(process, count)
    for told in {0, 1, process}:
        assert said in group.told(told)
        assert group.ends[told].code == 2


def test_a_run_is_not_ended_by_a_stranger(three):
    before = three.channels[1]
    three.join(1)
    assert "another run is at this address" in three.told(1)
    with socket.create_connection(("127.0.0.1", three.port)) as stray:
        stray.sendall(b"GET / HTTP/1.1\r\n\r\n")
    three.channels[1] = before
    assert len(three.gather("more", dict.fromkeys(range(3)))) == 3
    assert three.ends.keys() == {1}


def test_a_stall_is_reported_with_all_places(three, monkeypatch):
    for process, doing in enumerate(["waiting for data", "in an update", "saving"]):
        three.channels[process].place.step = 57 + process
        three.channels[process].place.doing = doing
    time.sleep(0.5)
    monkeypatch.setattr(channel, "STALL", 0.5)
    time.sleep(1.0)
    host = socket.gethostname()
    assert three.reports[0] == (
        f"warning: no update for 0 s; process 0 on {host}: at step 57, waiting for "
        f"data; process 1 on {host}: at step 58, in an update; process 2 on {host}: at "
        "step 59, saving"
    )
    assert not three.ends


def test_a_port_in_use_is_named():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of this host cannot be"):
            Meeting(port, 2, print)


def test_a_relay_outlives_what_is_behind_it():
    with socket.create_server(("127.0.0.1", 0)) as server:
        relay = Relay(server.getsockname())
        with socket.create_connection(("127.0.0.1", relay.port)) as near:
            far, _ = server.accept()
            near.sendall(b"ping")
            assert far.recv(10) == b"ping"
            far.sendall(b"pong")
            assert near.recv(10) == b"pong"
            far.close()
            near.settimeout(0.5)
            with pytest.raises(TimeoutError):
                near.recv(10)
