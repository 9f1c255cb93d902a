"""What the data doctor finds in a corpus, and how it is shown."""

import dataclasses
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

SHOWN = 10  # lines named of each finding; on the screen half as many
FAR = 3.0  # times longer than the corpus lets expect

# Findings in the order of the report, and their wording.
KINDS = {
    "not_utf8": "not UTF-8",
    "empty": "a side is empty",
    "too_long": "a side is too long",
    "copy": "copy of an earlier pair",
    "other_target": "source of an earlier pair, another target",
    "in_train": "the pair is in train, too",
    "source_in_train": "the source is in train, with another target",
    "untranslated": "source and target are the same",
    "far_lengths": f"lengths differ {FAR:g} times more than in the whole corpus",
    "white": "nothing but white space that is no blank",
    "bom": "BOM at the start, is dropped",
    "inner_bom": "U+FEFF in the text",
    "cr_end": "CR before the end of the line, is dropped",
    "cr": "CR in the text",
    "nul": "NUL",
    "separator": "VT, FF, U+0085, U+2028 or U+2029",
    "tab": "tab",
    "control": "another control character",
}


@dataclasses.dataclass
class Finding:
    """Lines of one kind in one file; for pairs it is the file of the source."""

    kind: str
    file: str
    count: int = 0
    lines: list[int] = dataclasses.field(default_factory=list)  # the first, from 1 on
    notes: list[str] = dataclasses.field(default_factory=list)  # on each of these


@dataclasses.dataclass
class Lengths:
    """How many lines have 0, 1, 2-3, 4-7, 8-15, ... of a unit."""

    lines: list[int] = dataclasses.field(default_factory=list)
    total: int = 0
    longest: int = 0

    def add(self, lengths: Iterable[int]) -> None:
        """Counts some more lines."""
        for length, times in Counter(lengths).items():
            place = length.bit_length()
            self.lines += [0] * (place + 1 - len(self.lines))
            self.lines[place] += times
            self.total += length * times
            self.longest = max(self.longest, length)


def as_text(report: dict[str, Any]) -> str:
    """Returns the report of `doctor.check` for people to read."""
    vocabulary = report["vocabulary"]
    rows = [
        f"pieces of {vocabulary}"
        if vocabulary
        else "no vocabulary yet: of too long lines only those that are so in words"
    ]
    for name, split in report["splits"].items():
        counts = split["counts"]
        left = "left out" if name == "train" else "kept all the same"
        rows.append(
            f"\n{name}  {counts['pairs']:,} pairs, {counts['usable']:,} usable; "
            f"{left}: {counts['empty']:,} empty, {counts['too_long']:,} too long"
            + (f", {n:,} not UTF-8" if (n := counts.get("not_utf8")) else "")
        )
        for files in split["files"]:
            sides = (
                (files["source"], files.get("lines")),
                (
                    files["target"],
                    files.get("target_lines"),
                ),
            )
            for file, lines in sides if name != files["source"] else ():
                rows.append(f"  {file}  " + _lines(lines))
        rows += _table(split["lengths"])
        rows += _findings(split["findings"])
        rows += [f"  stops a training run: {stop}" for stop in split["stops"]]
    every = [f for split in report["splits"].values() for f in split["findings"]]
    kinds = {found["kind"] for found in every}
    absent = [wording for kind, wording in KINDS.items() if kind not in kinds]
    rows.append(f"\nlooked for, found nowhere: {'; '.join(absent) or 'nothing'}")
    return "\n".join(rows)


def stops(report: dict[str, Any]) -> str:
    """Returns, in a line, what would stop a training run, or ""."""
    reasons = [why for split in report["splits"].values() for why in split["stops"]]
    more = f" (and {len(reasons) - 1} more reasons)" if reasons[1:] else ""
    return reasons[0] + more if reasons else ""


def _lines(lines: int | None) -> str:
    return "could not be read" if lines is None else f"{lines:,} lines"


def _table(lengths: dict[str, Any]) -> Iterator[str]:
    """Yields how many lines have which length."""
    width = max((len(row["lines"]) for row in lengths.values()), default=0)
    if not width:
        return
    spans = [(1 << place >> 1, (1 << place) - 1) for place in range(width)]
    heads = [str(a) if a >= b else f"{a}-{b}" for a, b in spans]
    table = {"length": [*heads, "mean", "longest"]}
    for label, row in lengths.items():
        counts = row["lines"] + [0] * (width - len(row["lines"]))
        mean = row["total"] / max(sum(counts), 1)
        cells = [f"{n:,}" if n else "." for n in counts]
        table[label] = [*cells, f"{mean:.1f}", f"{row['longest']:,}"]
    columns = [max(7, *map(len, cells)) for cells in zip(*table.values(), strict=True)]
    for label, cells in table.items():
        placed = zip(cells, columns, strict=True)
        yield f"  {label:17}" + "".join(f" {cell:>{n}}" for cell, n in placed)


def _findings(findings: list[dict[str, Any]]) -> Iterator[str]:
    for found in findings:
        notes = found["notes"] or [""] * len(found["lines"])
        shown = [
            f"{line:,} ({note})" if note else f"{line:,}"
            for line, note in zip(found["lines"], notes, strict=True)
        ][: SHOWN // 2]
        more = ", ..." if found["count"] > len(shown) else ""
        name = os.path.basename(found["file"])
        yield f"  {found['count']:>9,}  {KINDS[found['kind']]}"
        yield f"             {name}: {', '.join(shown)}{more}"
