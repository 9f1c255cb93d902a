"""How the processes of a run meet, hear of each other, and end together.

Process 0 holds a `Meeting`, a TCP port to which every process, itself too, keeps a
connection, its `Channel`. Messages are lines of JSON. A process that ends closes its
connection, whatever ended it, so the others know at once; one that is frozen or cut
off falls silent, which they notice after `SILENCE` seconds.
"""

import contextlib
import dataclasses
import json
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

from transformer_jax.errors import ConfigError

BEAT = 1.0  # seconds between two signs of life
SILENCE = 60.0  # seconds without one, after which a process is taken for lost
STALL = 300.0  # seconds without an update, after which the places are reported
LINGER = 5.0  # seconds that the last words of a process may take
PREPARING = "preparing"  # where a library may keep all threads of Python from running

Report = Callable[[str], None]


@dataclasses.dataclass
class Place:
    """Where a process is."""

    host: str
    step: int | None = None  # updates begun
    doing: str = "starting"

    def __str__(self) -> str:
        """Says the last step and what the process does."""
        if self.step is None:
            return f"before its first update, {self.doing}"
        return f"at step {self.step}, {self.doing}"


class Ended(Exception):
    """The run cannot go on; the message says which process, and why."""

    def __init__(self, message: str, code: int) -> None:
        """Takes the message and the exit code."""
        super().__init__(message)
        self.code = code


def _send(connection: socket.socket, lock: threading.Lock, message: Any) -> None:
    """Sends a message; one that is gone is noticed where messages are read."""
    with contextlib.suppress(OSError), lock:
        connection.sendall(json.dumps(message).encode() + b"\n")


@dataclasses.dataclass
class _Member:
    """A process, as the meeting sees it."""

    connection: socket.socket
    place: Place
    heard: float  # when
    left: bool = False  # in order, or its end is told
    gone: bool = False  # its connection is closed
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


@dataclasses.dataclass
class _Round:
    """Values that all processes hand in under one name."""

    ends: float | None  # when all must have come
    seconds: float | None
    values: dict[int, Any] = dataclasses.field(default_factory=dict)


class Meeting:
    """What process 0 does for all: it hands messages round and watches."""

    def __init__(self, port: int, count: int, report: Report) -> None:
        """Opens the port.

        Args:
            port: where the others look for it.
            count: processes that are to come.
            report: is told, in a line, where they stand still.

        Raises:
            ConfigError: the port cannot be opened.
        """
        self._count, self._report = count, report
        self._members: dict[int, _Member] = {}
        self._rounds: dict[str, _Round] = {}
        self._lock = threading.RLock()
        self._over = False
        self._moved = time.monotonic()  # when a process last began another update
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        try:
            self._listener = socket.create_server(
                ("", port), family=family, dualstack_ipv6=both
            )
        except OSError as error:
            raise ConfigError(
                f"port {port} of this host cannot be opened: {error.strerror}; give "
                "all processes --coordinator=HOST:PORT with another port"
            ) from error
        for work in (self._accept, self._watch):
            threading.Thread(target=work, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._read, args=[connection], daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        process = None
        try:
            for line in connection.makefile("rb"):
                message = json.loads(line)
                with self._lock:
                    if process is None:
                        process = self._welcome(message, connection)
                    else:
                        self._take(process, message)
        except (OSError, ValueError, KeyError, TypeError):
            pass  # a broken connection, or no process of ours
        connection.close()
        if process is None:
            return
        with self._lock:
            member = self._members[process]
            member.gone = True
            if not member.left:
                self._end(
                    f"process {process} on {member.place.host} ended without a word; "
                    f"it was {member.place}"
                )

    def _welcome(self, message: Any, connection: socket.socket) -> int | None:
        """Takes a newcomer in and returns its number; None where it does not fit."""
        process, count, host = (message[name] for name in ("process", "count", "host"))
        member = _Member(connection, Place(host), time.monotonic())
        wrong = ""
        if len(self._members) == self._count:
            wrong = "another run is at this address; give --coordinator another port"
        elif process in self._members:
            before = self._members[process].place.host
            wrong = (
                f"two processes came as process {process}, from {before} and {host}; "
                "give each another --process_id"
            )
        elif count != self._count:
            wrong = (
                f"process {process} on {host} was started with --num_processes={count}"
                f", process 0 with {self._count}; start all with the same"
            )
        if not wrong:
            self._members[process] = member
            return process
        _send(connection, member.lock, {"end": wrong, "code": 2})
        if len(self._members) < self._count:  # a run that goes on is not to be ended
            self._end(wrong, 2)
        return None

    def _take(self, process: int, message: Any) -> None:
        """Does what a message of `process` asks for."""
        member = self._members[process]
        member.heard = time.monotonic()
        if "doing" in message:
            if message["step"] != member.place.step:
                self._moved = member.heard
            member.place.step, member.place.doing = message["step"], message["doing"]
        elif "gather" in message:
            name, seconds = message["gather"], message["seconds"]
            ends = None if seconds is None else member.heard + seconds
            entry = self._rounds.setdefault(name, _Round(ends, seconds))
            entry.values[process] = message["value"]
            if len(entry.values) == self._count:
                del self._rounds[name]
                values = [entry.values[i] for i in range(self._count)]
                self._tell({"gathered": name, "values": values})
        elif "failed" in message:
            member.left = True
            self._end(f"process {process} failed: {message['failed']}", message["code"])
        elif "leaves" in message:
            member.left = True

    def _tell(self, message: Any) -> None:
        for member in self._members.values():
            _send(member.connection, member.lock, message)

    def _end(self, message: str, code: int = 1) -> None:
        """Tells all that the run is over, once."""
        if not self._over:
            self._over = True
            self._tell({"end": message, "code": code})

    def _watch(self) -> None:
        while not self._over:
            time.sleep(BEAT)
            with self._lock:
                now = time.monotonic()
                places = {i: dataclasses.astuple(m.place) for i, m in self._sorted()}
                self._tell({"places": places})
                for process, member in self._sorted():
                    patient = member.left or member.place.doing == PREPARING
                    if now - member.heard > SILENCE and not patient:
                        self._end(
                            f"process {process} on {member.place.host} has not answered"
                            f" for {SILENCE:.0f} s; it was {member.place}"
                        )
                for name, entry in self._rounds.items():
                    if entry.ends is not None and now > entry.ends:
                        self._end(self._missing(name, entry))
                if now - self._moved > STALL:
                    self._moved = now
                    self._report_stall()

    def _sorted(self) -> list[tuple[int, _Member]]:
        return sorted(self._members.items())

    def _missing(self, name: str, entry: _Round) -> str:
        missing = sorted({*range(self._count)} - entry.values.keys())
        names = ", ".join(map(str, missing))
        came = ", ".join(f"{i} on {m.place.host}" for i, m in self._sorted())
        return (
            f"process{'es' if len(missing) > 1 else ''} {names} of {self._count} did "
            f"not come to {name.split('#')[0]} within {entry.seconds:g} s; there are "
            f"{came}"
        )

    def _report_stall(self) -> None:
        if all(member.place.step is None for member in self._members.values()):
            return
        members = self._sorted()
        places = [f"process {i} on {m.place.host}: {m.place}" for i, m in members]
        self._report(f"warning: no update for {STALL:.0f} s; {'; '.join(places)}")

    def linger(self) -> None:
        """Waits until the others have heard the last words."""
        until = time.monotonic() + LINGER
        while time.monotonic() < until:
            with self._lock:
                if all(m.gone for i, m in self._sorted() if i):
                    return
            time.sleep(0.05)


class Channel:
    """A process's connection to the meeting."""

    def __init__(
        self,
        address: tuple[str, int],
        process: int,
        count: int,
        seconds: float,
        on_end: Callable[[Ended], NoReturn],
    ) -> None:
        """Connects.

        Args:
            address: host and port of process 0.
            process: number of this one.
            count: of all.
            seconds: within which process 0 must answer.
            on_end: ends this process; called in another thread than the caller's.

        Raises:
            Ended: process 0 does not answer.
        """
        self.place = Place(socket.gethostname())
        self._places: dict[str, Place] = {}
        self._on_end = on_end
        self._gathered: queue.Queue[Any] = queue.Queue()
        self._rounds = 0
        self._left = False
        self._heard_end = threading.Event()
        self._lock = threading.Lock()
        self._connection = _connect(address, seconds)
        self._say({"process": process, "count": count, "host": self.place.host})
        for work in (self._read, self._beat):
            threading.Thread(target=work, daemon=True).start()

    def _say(self, message: Any) -> None:
        _send(self._connection, self._lock, message)

    def _beat(self) -> None:
        while not self._left:
            self._say({"step": self.place.step, "doing": self.place.doing})
            time.sleep(BEAT)

    def _read(self) -> None:
        buffer = b""
        self._connection.settimeout(SILENCE)
        while True:
            try:
                received = self._connection.recv(1 << 16)
            except TimeoutError:
                first = self._places.get("0")
                if not first or first.doing != PREPARING:
                    self._lost(f"has not answered for {SILENCE:.0f} s")
                continue
            except OSError:
                received = b""
            if not received:
                return self._lost("ended without a word")
            *lines, buffer = (buffer + received).split(b"\n")
            for line in lines:
                self._take(json.loads(line))

    def _lost(self, what: str) -> None:
        first = self._places.get("0")
        where = f" on {first.host} {what}; it was {first}" if first else f" {what}"
        self._over(Ended(f"process 0{where}", 1))

    def _take(self, message: Any) -> None:
        if "places" in message:
            places = message["places"].items()
            self._places = {process: Place(*place) for process, place in places}
        elif "gathered" in message:
            self._gathered.put(message)
        elif "end" in message:
            self._over(Ended(message["end"], message["code"]))

    def _over(self, ended: Ended) -> None:
        self._heard_end.set()
        if not self._left:
            self._on_end(ended)

    def gather(self, name: str, value: Any, seconds: float | None = None) -> list[Any]:
        """Hands in a JSON value and returns those of all processes, by their number.

        Args:
            name: what all come to, for messages.
            value: of this process.
            seconds: in which all must have come; None is without limit.
        """
        self._rounds += 1
        name = f"{name}#{self._rounds}"  # the same number in all
        asked = {"gather": name, "value": value, "seconds": seconds}
        self._say(asked)
        return self._gathered.get()["values"]

    def leave(self) -> None:
        """Says that this process ends in order; the others may go on."""
        self._left = True
        self._say({"leaves": True})

    def fail(self, message: str, code: int) -> None:
        """Says why this process ends, and waits until the others can know it."""
        self._left = True
        self._say({"failed": message, "code": code})
        self._heard_end.wait(LINGER)


def _connect(address: tuple[str, int], seconds: float) -> socket.socket:
    until = time.monotonic() + seconds
    while True:
        try:
            return socket.create_connection(address, timeout=5)
        except OSError as error:
            if time.monotonic() > until:
                host, port = address
                raise Ended(
                    f"process 0 at {host}:{port} did not answer within {seconds:g} s "
                    f"({error.strerror or error}); start it, or mend --coordinator",
                    1,
                ) from error
        time.sleep(0.2)


class Relay:
    """A local port that passes all on to `address`, and outlives it.

    JAX's client aborts the process, with a stack trace, as soon as its connection to
    process 0 breaks; behind a relay it keeps it, so the word is the channel's.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        """Opens the port."""
        self._address = address
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            try:
                far = socket.create_connection(self._address, timeout=30)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            for source, sink in ((near, far), (far, near)):
                threading.Thread(
                    target=_pass_on, args=[source, sink, sink is far], daemon=True
                ).start()


def _pass_on(source: socket.socket, sink: socket.socket, closes: bool) -> None:
    with contextlib.suppress(OSError):
        while received := source.recv(1 << 16):
            sink.sendall(received)
    if closes:
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
