"""The data doctor: reads a whole corpus and says what is odd about it.

It changes nothing and goes on where a training run would stop. Copies are found by
hashes of 64 bits, so a corpus needs some 100 bytes of memory a pair, whatever its text.
"""

import array
import bisect
import dataclasses
import hashlib
import itertools
import pathlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from transformer_jax.config import SPLITS, Config
from transformer_jax.data import corpora, textfiles
from transformer_jax.data.cleaning import Cleaner, not_utf8
from transformer_jax.data.findings import FAR, KINDS, SHOWN, Finding, Lengths
from transformer_jax.data.prepare import Track, unwatched
from transformer_jax.data.tokenizer import BLANK
from transformer_jax.data.vocabularies import SIDES, Vocabularies, model_files
from transformer_jax.errors import DataError

_BLANKS = f" {BLANK}"  # all that SentencePiece makes no piece of
CHUNK = 10_000  # pairs looked at together
FAR_BY = 20  # characters, and `FAR` times: then the lengths of a pair are far apart

_CHARACTERS = {
    "inner_bom": "\ufeff",
    "cr": "\r",
    "nul": "\0",
    "separator": "\v\f\x85\u2028\u2029",
    "tab": "\t",
    "control": "\x01-\x08\x0e-\x1f\x7f-\x84\x86-\x9f",
}
_WHITE = re.compile(r"[\s\u200b-\u200d\u2060\ufeff]+")  # the last have no width
_ODD = re.compile(f"[{''.join(_CHARACTERS.values())}]")
_ODD_BY_KIND = {kind: re.compile(f"[{odd}]") for kind, odd in _CHARACTERS.items()}


class Examination:
    """What was found in one split. Pairs are numbered over all files, from 0 on."""

    def __init__(
        self,
        name: str,
        cleaner: Cleaner,
        vocabularies: Vocabularies | None,
        longest: int,
        track: Track = unwatched,
    ) -> None:
        """Starts with nothing; `longest` is what training takes, in pieces with EOS."""
        self.name, self.vocabularies, self.longest = name, vocabularies, longest
        self.cleaner, self.track = cleaner, track
        self._skipped = set[int]()  # numbers of pairs that are not UTF-8
        self.files: list[dict[str, Any]] = []  # names and lines of each pair of files
        self.counts = Counter(pairs=0, usable=0, empty=0, too_long=0)
        self.lengths: dict[str, Lengths] = {}
        self.findings: dict[tuple[str, str], Finding] = {}
        self.stops: list[str] = []  # what a training run would end with
        self._starts: list[int] = []  # number of each file's first pair
        self._sources, self._pairs = array.array("Q"), array.array("Q")  # 0: unusable
        self._sizes = array.array("I"), array.array("I")  # in characters

    def note(self, kind: str, file: str, line: int, note: str = "") -> None:
        """Counts a line of `file`."""
        found = self.findings.setdefault((kind, file), Finding(kind, file))
        found.count += 1
        if len(found.lines) < SHOWN:
            found.lines.append(line)
            found.notes += [note] if note else []

    def place(self, number: int) -> tuple[str, int]:
        """Returns the source's file, and the line, of pair `number`."""
        index = bisect.bisect(self._starts, number) - 1
        return self.files[index]["source"], number - self._starts[index] + 1

    # --- Reading ----------------------------------------------------------------

    def read_files(self, source: str, target: str) -> None:
        """Looks at all lines of two files, up to what makes one of them unreadable."""
        lines = Counter[str]()
        self._begin(source, target, lines)
        try:
            for path in (source, target):
                textfiles.describe_file(path)  # a pipe would be used up
            columns = self._lines(source, lines), self._lines(target, lines)
            self._look_at(itertools.zip_longest(*columns))
        except DataError as error:
            self.stops.append(str(error))
            return
        self.files[-1] |= {"lines": lines[source], "target_lines": lines[target]}
        if lines[source] != lines[target]:
            counts = corpora.unequal(source, lines[source], target, lines[target])
            self.stops.append(counts)

    def read_pairs(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Looks at the pairs of a corpus that has no files, by their numbers."""
        self._begin(self.name, self.name, Counter())
        self._look_at(
            (self._checked(source, self.name, i), self._checked(target, self.name, i))
            for i, (source, target) in enumerate(pairs, 1)
        )

    def _begin(self, source: str, target: str, lines: Counter[str]) -> None:
        self._starts.append(len(self._pairs))
        self.files.append({"source": source, "target": target})

    def _lines(self, path: str, lines: Counter[str]) -> Iterator[str]:
        broken = False
        for number, (start, line) in enumerate(textfiles.raw_lines(path), 1):
            lines[path] = number
            if number == 1 and start:
                self.note("bom", path, number)
            if line.endswith(b"\r\n"):
                self.note("cr_end", path, number)
            try:
                text = textfiles.without_end(line).decode("utf-8")
            except UnicodeDecodeError as error:
                self.note("not_utf8", path, number, f"byte {start + error.start}")
                text = textfiles.without_end(line).decode("utf-8", "replace")
                if self.cleaner.skips:
                    self._skipped.add(self._starts[-1] + number - 1)
                if not broken and self.cleaner.invalid_utf8 == "error":
                    self.stops.append(not_utf8(path, number, start, error))
                broken = True
            yield self._checked(text, path, number)

    def _checked(self, text: str, path: str, number: int) -> str:
        if _ODD.search(text):
            for kind, pattern in _ODD_BY_KIND.items():
                if pattern.search(text):
                    self.note(kind, path, number)
        if _WHITE.fullmatch(text) and text.strip(_BLANKS):
            self.note("white", path, number)
        return self.cleaner.clean(text)

    def _look_at(self, rows: Iterable[tuple[str | None, str | None]]) -> None:
        rows = iter(self.track(rows, f"reading {self.name}"))
        while chunk := list(itertools.islice(rows, CHUNK)):
            both = [row for row in chunk if row[0] is not None and row[1] is not None]
            sides = [[row[side] or "" for row in both] for side in (0, 1)]
            pieces = []
            for side, texts in zip(SIDES, sides, strict=True):
                units = {"characters": [len(text) for text in texts]}
                units["words"] = [sum(map(bool, text.split(" "))) for text in texts]
                if self.vocabularies:
                    ids = getattr(self.vocabularies, side).encode(texts)
                    units["pieces"] = list(map(len, ids))
                for unit, lengths in units.items():
                    every = self.lengths.setdefault(f"{side} {unit}", Lengths())
                    every.add(lengths)
                pieces.append(units.get("pieces", units["words"]))
            for source, target, *counts in zip(*sides, *pieces, strict=True):
                self._add(source, target, counts)

    def _add(self, source: str, target: str, pieces: list[int]) -> None:
        """Adds a pair; without a vocabulary, its words are the fewest pieces it has."""
        number = len(self._pairs)
        kind = "usable"
        if number in self._skipped:
            kind = "not_utf8"
        elif not (all(pieces) and source.strip(_BLANKS) and target.strip(_BLANKS)):
            kind = "empty"
        elif max(pieces) >= self.longest:
            kind = "too_long"
        if kind in ("empty", "too_long"):
            self.note(kind, *self.place(number))
        elif source.strip() == target.strip():
            self.note("untranslated", *self.place(number))
        self.counts["pairs"] += 1
        self.counts[kind] += 1
        lone = kind in ("empty", "not_utf8")
        self._sources.append(0 if lone else _hash(source))
        self._pairs.append(0 if lone else _hash(f"{source}\n{target}"))
        for sizes, text in zip(self._sizes, (source, target), strict=True):
            sizes.append(len(text))

    # --- What only the whole corpus shows ---------------------------------------

    def compare(self, train: "Examination | None") -> None:
        """Looks for copies, also of `train`, and for pairs of unlike length."""
        pairs, sources = self._hashes()
        here = np.flatnonzero(pairs)
        pair_first = here[_first(pairs[here], pairs[here])]
        source_first = here[_first(sources[here], sources[here])]
        self._note_all("copy", here, np.where(pair_first < here, pair_first, -1), self)
        new = (source_first < here) & (pair_first == here)
        self._note_all("other_target", here, np.where(new, source_first, -1), self)
        if train:
            train_pairs, train_sources = train._hashes()
            pair = _first(pairs[here], train_pairs)
            source = _first(sources[here], train_sources)
            source = np.where(pair < 0, source, -1)
            self._note_all("in_train", here, pair, train)
            self._note_all("source_in_train", here, source, train)
        self._compare_lengths(here)

    def _hashes(self) -> tuple[np.ndarray, np.ndarray]:
        both = self._pairs, self._sources
        return tuple(np.array(x, np.uint64) for x in both)  # pyright: ignore

    def _note_all(
        self, kind: str, numbers: np.ndarray, like: np.ndarray, where: "Examination"
    ) -> None:
        """Notes each pair that is like pair `like` of `where`; none is -1."""
        for number, other in zip(numbers[like >= 0], like[like >= 0], strict=True):
            file, line = where.place(int(other))
            mine = self.place(int(number))
            known = self.findings.get((kind, mine[0]))
            full = known and len(known.lines) == SHOWN
            note = "" if full else f"{'' if file == mine[0] else file + ' '}line {line}"
            self.note(kind, *mine, note)

    def _compare_lengths(self, here: np.ndarray) -> None:
        source, target = (np.array(s, np.float64)[here] for s in self._sizes)
        if not len(here):
            return
        expected = source * (target.sum() / source.sum())
        far = np.maximum(target, expected) > FAR * np.minimum(target, expected)
        far &= np.abs(target - expected) >= FAR_BY
        for i in np.flatnonzero(far):
            note = f"{source[i]:.0f} and {target[i]:.0f} characters"
            self.note("far_lengths", *self.place(int(here[i])), note)

    def as_dict(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        order = list(KINDS)
        found = sorted(self.findings.values(), key=lambda f: order.index(f.kind))
        return {
            "files": self.files,
            "counts": dict(self.counts),
            "lengths": {k: dataclasses.asdict(v) for k, v in self.lengths.items()},
            "findings": [dataclasses.asdict(finding) for finding in found],
            "stops": self.stops,
        }


def check(
    config: Config, workdir: pathlib.Path, track: Track = unwatched
) -> dict[str, Any]:
    """Examines every split of the config's corpus.

    Args:
        config: names the corpus, and the longest sentence.
        workdir: if it holds a vocabulary, lengths are also counted in its pieces.
        track: watches pairs as they are read.

    Returns:
        `vocabulary`, its file, both files with a comma between, or None, and `splits`:
        for each its files, counts, lengths, findings, and `stops`, the reasons that
        would stop a training run.

    Raises:
        ConfigError: the config names no corpus.
        DataError: vocabulary or TFDS data cannot be read.
    """
    kept = model_files(workdir, config.tokenizer.joint)
    paths = config.tokenizer.model_paths or list(map(str, kept))
    known = bool(config.tokenizer.model_path) or all(path.exists() for path in kept)
    vocabularies = Vocabularies.load(paths) if known else None
    train, splits = None, {}
    for name in SPLITS:
        if name != "train" and not corpora.has_split(config.data, name):
            continue
        cleaner, longest = Cleaner(config.data, name), config.model.max_length
        split = Examination(name, cleaner, vocabularies, longest, track)
        if config.data.corpus == "text":
            for files in corpora.text_files(config.data, name):
                split.read_files(*files)
        else:
            split.read_pairs(corpora.read_pairs(config.data, name))
        split.compare(train)
        used = split.counts["usable" if name == "train" else "pairs"]
        if not used and not split.stops:
            split.stops.append(f"no usable pairs in {name}")
        train = train or split
        splits[name] = split.as_dict()
    return {"vocabulary": ",".join(paths) if vocabularies else None, "splits": splits}


def _hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


def _first(values: np.ndarray, among: np.ndarray) -> np.ndarray:
    """Returns where each value first is in `among`, or -1."""
    if not len(among):
        return np.full(len(values), -1)
    order = np.argsort(among, kind="stable")
    place = np.searchsorted(among, values, sorter=order)
    found = order[np.minimum(place, len(among) - 1)]
    return np.where(among[found] == values, found, -1)
