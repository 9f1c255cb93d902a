"""What devices send one another, read from the text of a compiled program.

A collective among n devices is counted as a ring does it. Of B bytes of result on
each device, every device sends

    all-reduce          2 (n - 1) / n B
    all-gather            (n - 1) / n B
    all-to-all            (n - 1) / n B
    reduce-scatter        (n - 1)     B
    collective-permute                B

What is in the body of a loop is sent once a turn.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Callable

# Bytes that a device sends for each byte of its result, among n devices.
SENT: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,
    "collective-permute": lambda n: 1,
}

_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{$")
_COLLECTIVE = re.compile(rf" = (.+?) ({'|'.join(SENT)})(-start)?\(")
_ARRAY = re.compile(r"\b([a-z]+)(\d+)?\w*\[([\d,]*)\]")
_CALL = re.compile(
    r"\b(body|condition|to_apply|calls|branch_computations|called_computations)="
    r"(\{[^}]*\}|%?[\w.-]+)"
)
_TURNS = re.compile(r'known_trip_count[":{n]+(\d+)')


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The collectives of one kind among so many devices, in one run of a program."""

    kind: str  # a key of SENT
    devices: int  # that take part in each
    count: int  # how often one runs
    bytes_sent: float  # by every device, all of them together


def traffic(text: str, devices: int) -> list[Traffic]:
    """Counts the collectives of a compiled program, the largest traffic first.

    Args:
        text: of the optimised program, as `compiled.as_text()` gives it.
        devices: that the program runs on.

    Returns:
        One entry for each kind and number of devices that take part.

    Raises:
        ValueError: a collective runs in a loop of unknown length, is split into its
            start and its end, which the CPU's compiler does not do, or cannot be read.
    """
    entry, bodies = _computations(text)
    counts: collections.Counter[tuple[str, int]] = collections.Counter()
    sent: collections.Counter[tuple[str, int]] = collections.Counter()

    def visit(name: str, times: float) -> None:
        for line in bodies.get(name, ()):
            if found := _COLLECTIVE.search(line):
                if found[3] or times == math.inf:
                    raise ValueError(f"cannot count this collective: {line[:200]}")
                key = found[2], _group(line, devices)
                counts[key] += int(times)
                share = SENT[key[0]](key[1])
                sent[key] += times * share * _size(found[1])  # pyright: ignore
            for how, called in _CALL.findall(line):
                turns: float = 1
                if how in ("body", "condition"):
                    known = _TURNS.search(line)
                    turns = int(known[1]) if known else math.inf
                for inner in re.findall(r"[\w.-]+", called):
                    if inner in talking:
                        visit(inner, times * turns)

    talking = _talking(bodies)
    visit(entry, 1)
    found = [Traffic(*key, counts[key], float(sent[key])) for key in counts]
    return sorted(found, key=lambda t: -t.bytes_sent)


def _computations(text: str) -> tuple[str, dict[str, list[str]]]:
    """Returns the name of the entry, and the lines of every computation that matter."""
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        if line and not line[0].isspace():
            if head := _COMPUTATION.match(line):
                name = head[2]
                bodies[name] = []
                entry = name if head[1] else entry
        elif _CALL.search(line) or _COLLECTIVE.search(line):
            bodies[name].append(line)
    return entry, bodies


def _talking(bodies: dict[str, list[str]]) -> set[str]:
    """Returns the computations that hold a collective, or call one that does."""
    found = {n for n, lines in bodies.items() if any(map(_COLLECTIVE.search, lines))}
    before = -1
    while len(found) > before:
        before = len(found)
        for name, lines in bodies.items():
            called = (c for line in lines for _, c in _CALL.findall(line))
            if any(found & set(re.findall(r"[\w.-]+", c)) for c in called):
                found.add(name)
    return found


def _size(result: str) -> int:
    """Returns the bytes of a result, `f32[2,3]{1,0}` or a tuple of such."""
    total = 0
    for kind, bits, sides in _ARRAY.findall(result):
        width = 1 if kind == "pred" else -(-int(bits) // 8)
        total += width * math.prod(int(side) for side in sides.split(",") if side)
    return total


def _group(line: str, devices: int) -> int:
    """Returns how many devices take part in a collective.

    Groups are written as `{{0,1},{2,3}}`, `[2,2]<=[4]`, `mesh['a'=2,'b'=2] {'b'}`, of
    which an axis may be a part of one, `'b':(1)2`, or, for all devices, `{}`.
    """
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(found[1].split(","))
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(found[1])
    if found := re.search(r"replica_groups=mesh\[([^]]*)\].*? \{('[^}]*)\}", line):
        sizes = dict(re.findall(r"('[^']*')=(\d+)", found[1]))
        axes = re.findall(r"('[^']*')(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    if "replica_groups={}" in line or "source_target_pairs=" in line:
        return devices
    raise ValueError(f"cannot read the groups of this collective: {line[:200]}")
