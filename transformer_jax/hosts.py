"""Several processes as one: their start-up, what they agree on, and how they end.

Each process is started with the same command, on one host or on many. They meet at the
address of process 0, compare what they were given, and only then begin; `Hosts` is what
the run asks. With one process it asks nobody, and no port or thread is made.
"""

import contextlib
import dataclasses
import hashlib
import os
import pathlib
import secrets
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

import jax
from jax._src import clusters

from transformer_jax import __version__
from transformer_jax.channel import PREPARING, Channel, Ended, Meeting, Relay
from transformer_jax.errors import ConfigError

SHARED = 20.0  # seconds in which a file of process 0 must be seen by the others
GRACE = 3.0  # seconds for news of another's end, before a crash is called our own

Result = TypeVar("Result")


class Refused(ConfigError):
    """All processes find the same mistake, so none needs to hear it of another."""


@dataclasses.dataclass(frozen=True)
class Address:
    """Where process 0 is, and which of how many processes this one is."""

    host: str
    port: int
    count: int
    process: int


class Hosts:
    """All processes of a run, seen from one of them."""

    def __init__(
        self, process: int = 0, count: int = 1, channel: Channel | None = None
    ) -> None:
        """Takes this process's number and its channel, None where it is alone."""
        self.process, self.count, self._channel = process, count, channel

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes."""
        return self.process == 0

    @property
    def alone(self) -> bool:
        """Whether there is no other."""
        return self.count == 1

    def gather(self, name: str, value: Any, seconds: float | None = None) -> list[Any]:
        """Returns the values of all processes; see `Channel.gather`."""
        if self._channel is None:
            return [value]
        return self._channel.gather(name, value, seconds)

    def in_turn(self, name: str, work: Callable[[], Result]) -> Result:
        """Runs `work` in the first process, then in all others; waits for all."""
        if not self.first:
            self.gather(name, None)
        result = work()
        if self.first:
            self.gather(name, None)
        self.gather(name, None)
        return result

    def at(self, doing: str, step: int | None = None) -> None:
        """Notes where this process is, for messages of the others."""
        if self._channel is not None:
            if step is not None:
                self._channel.place.step = step
            self._channel.place.doing = doing


ALONE = Hosts()


def find(
    distributed: str | None,
    coordinator: str | None,
    count: int | None,
    process: int | None,
    seconds: int,
) -> Address | None:
    """Returns where this process belongs, as the options say; None if it is alone.

    Args:
        distributed: `auto` to ask what Cloud TPU, GKE or Slurm set, or None.
        coordinator: host and port of process 0, or None.
        count: of processes.
        process: number of this one.
        seconds: in which the name of process 0 must be known to the network.

    Raises:
        ConfigError: options are missing or contradict each other, or nothing is set.
    """
    explicit = {
        "--coordinator": coordinator,
        "--num_processes": count,
        "--process_id": process,
    }
    missing = [name for name, value in explicit.items() if value is None]
    if distributed and len(missing) < 3:
        raise ConfigError(
            "--distributed=auto takes the address from the machine; leave out "
            "--coordinator, --num_processes and --process_id"
        )
    if distributed:
        return _detect(seconds)
    if len(missing) == 3:
        return None
    if missing:
        raise ConfigError(f"{' and '.join(missing)} missing; give all three or none")
    host, _, port = str(coordinator).rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"--coordinator={coordinator} is not HOST:PORT")
    assert count is not None and process is not None
    if process >= count:
        raise ConfigError(
            f"--process_id={process} is not below --num_processes={count}; they count "
            "from 0"
        )
    found = Address(host.strip("[]"), int(port), count, process)
    return found if count > 1 else None


def _detect(seconds: int) -> Address | None:
    """Asks JAX what Cloud TPU, GKE or Slurm say."""
    try:
        address, count, process, _ = (
            clusters.ClusterEnv.auto_detect_unset_distributed_params(
                None, None, None, None, None, seconds
            )
        )
    except Exception as error:  # whatever a metadata server or a cluster's API raises
        raise ConfigError(f"--distributed=auto: {error}; {_EXPLICIT}") from error
    if address is None or count is None or process is None:
        raise ConfigError(
            f"--distributed=auto: neither Cloud TPU nor GKE nor Slurm is here; "
            f"{_EXPLICIT}"
        )
    host, port = address.rsplit(":", 1)
    return Address(host, int(port), count, process) if count > 1 else None


_EXPLICIT = "give --coordinator=HOST:PORT, --num_processes and --process_id"


@contextlib.contextmanager
def joined(
    address: Address | None,
    seconds: int,
    facts: Callable[[], Mapping[str, Any]],
    workdir: pathlib.Path | None,
    explain: Callable[[BaseException], tuple[str, int] | None],
) -> Iterator[Hosts]:
    """Joins the other processes, and leaves them when the work is done.

    Args:
        address: where this process belongs; None: it is alone.
        seconds: in which all must have come.
        facts: returns what must be the same in all processes, JSON values by name.
        workdir: a folder that all must see, or None.
        explain: returns message and exit code of an error; None if it is our fault.

    Yields:
        The processes. If any of them fails, this one ends, too.

    Raises:
        ConfigError: this host's port cannot be opened.
    """
    if address is None:
        yield ALONE
        return

    def tell(message: str) -> None:
        prefix = f"process {address.process}: " if address.process else ""
        text = " ".join(f"transformer-jax: {prefix}{message}".split())
        print(text, file=sys.stderr, flush=True)

    def end(ended: Ended) -> NoReturn:
        tell(str(ended))
        os._exit(ended.code)  # the main thread may wait for the lost process for ever

    meeting = None
    if not address.process:
        meeting = Meeting(address.port, address.count, tell)
    host = "127.0.0.1" if meeting else address.host
    where = (host, address.port)
    try:
        channel = Channel(where, address.process, address.count, seconds, end)
    except Ended as ended:
        end(ended)
    hosts = Hosts(address.process, address.count, channel)
    try:
        _begin(hosts, address, seconds, facts, workdir)
        yield hosts
        hosts.at("leaving")
        hosts.gather("the end", None)
        channel.leave()
        jax.distributed.shutdown()
    except BaseException as error:
        found = explain(error)
        if found is None:  # then it may be another's end that we saw first
            time.sleep(GRACE)
            traceback.print_exc()
        message, code = found or (f"{type(error).__name__}: {error}", 1)
        if isinstance(error, Refused):
            hosts.gather("the end", None)
            channel.leave()
        else:
            channel.fail(message, code)
        tell(message)
        if meeting:
            meeting.linger()
        os._exit(code)


def _begin(
    hosts: Hosts,
    address: Address,
    seconds: int,
    facts: Callable[[], Mapping[str, Any]],
    workdir: pathlib.Path | None,
) -> None:
    """Waits for all, compares what they were given, and starts JAX."""
    port = _free_port() if hosts.first else 0
    ports = hosts.gather("the start", port, seconds)
    hosts.at(PREPARING)
    _require_equal(hosts, {**facts(), **_versions()})
    if workdir is not None:
        _require_shared(hosts, workdir)
    port = ports[0] if hosts.first else Relay((address.host, ports[0])).port
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        hosts.count,
        hosts.process,
        initialization_timeout=seconds,
        heartbeat_timeout_seconds=600,  # the channel knows earlier
    )
    jax.devices()  # now, when all are here: each waits for the others' devices


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def _versions() -> dict[str, str]:
    package = pathlib.Path(__file__).parent
    code = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        code.update(file.relative_to(package).as_posix().encode() + file.read_bytes())
    return {
        "the version of transformer_jax": __version__,
        "the code of transformer_jax": code.hexdigest()[:12],
        "the version of JAX": jax.__version__,
    }


def _require_equal(hosts: Hosts, facts: Mapping[str, Any]) -> None:
    """Raises Refused in all processes, naming all that differs."""
    found = hosts.gather("the comparison", facts)
    differing = []
    for name in dict.fromkeys(name for each in found for name in each):
        values = [each.get(name) for each in found]
        for process, value in enumerate(values):
            if value != values[0]:
                differing.append(
                    f"{name} is {value!r} in process {process}, and {values[0]!r} in "
                    "process 0"
                )
    if differing:
        raise Refused(
            f"the processes were given different things: {'; '.join(differing)}; start "
            "all with the same command, code and data"
        )


def _require_shared(hosts: Hosts, workdir: pathlib.Path) -> None:
    """Raises Refused in all processes where `workdir` is not one folder."""
    token = ""
    file = workdir / "shared.partial"
    if hosts.first:
        token = secrets.token_hex(8)
        workdir.mkdir(parents=True, exist_ok=True)
        file.write_text(token)
    token = hosts.gather("the check of --workdir", token)[0]
    until = time.monotonic() + SHARED
    while not (seen := _holds(file, token)) and time.monotonic() < until:
        time.sleep(0.2)
    found = hosts.gather("the check of --workdir", [seen, str(workdir.absolute())])
    if hosts.first:
        file.unlink()
    blind = [i for i, (sees, _) in enumerate(found) if not sees]
    if blind:
        names = ", ".join(f"{i} ({found[i][1]})" for i in blind)
        raise Refused(
            f"--workdir={workdir} is not one folder for all: what process 0 writes "
            f"there is not seen after {SHARED:.0f} s by process {names}; give a folder "
            "on a file system that all hosts share"
        )


def _holds(file: pathlib.Path, token: str) -> bool:
    try:
        os.listdir(file.parent)  # lets a network file system look again
        return file.read_text() == token
    except OSError:
        return False
