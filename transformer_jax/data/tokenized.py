"""The format of a tokenised split: flat memory-mapped arrays with offsets.

    FOLDER/source.ids.npy       all ids of the source side, end to end
           source.offsets.npy   where each sentence starts, and the end
           target.ids.npy, target.offsets.npy
           source.txt, target.txt   the text (valid and test)
           manifest.json        what made it; pairs, pieces, characters, counted

Ids are without BOS and EOS, in the smallest type that holds the side's vocabulary.
"""

import contextlib
import json
import pathlib
from collections import Counter
from collections.abc import Iterable
from typing import Any, BinaryIO

import numpy as np

from transformer_jax.data import textfiles
from transformer_jax.data.tokenizer import UNK_ID, Tokenizer
from transformer_jax.data.vocabularies import SIDES, Vocabularies
from transformer_jax.data.workers import Encoded, encode_pairs
from transformer_jax.errors import DataError


class TokenizedSide:
    """One side of a tokenised corpus; `side[i]` is a view of sentence i's ids."""

    def __init__(self, folder: pathlib.Path, name: str) -> None:
        """Maps the arrays of side `name` of `folder`; ValueError if they are cut."""
        self.ids = np.load(folder / f"{name}.ids.npy", mmap_mode="r")
        self.offsets = np.load(folder / f"{name}.offsets.npy", mmap_mode="r")
        if len(self.ids) != self.offsets[-1]:
            raise ValueError(
                f"{name}.ids.npy holds {len(self.ids)} ids, not {self.offsets[-1]}"
            )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.ids[self.offsets[index] : self.offsets[index + 1]]


class TokenizedCorpus:
    """A split as token ids, without BOS and EOS."""

    def __init__(self, folder: pathlib.Path) -> None:
        """Opens the folder of a prepared split.

        Raises:
            DataError: a file is missing or cut short.
        """
        self.folder = folder
        try:
            self.manifest: dict[str, Any] = json.loads(
                (folder / "manifest.json").read_text(encoding="utf-8")
            )
            self.source = TokenizedSide(folder, "source")
            self.target = TokenizedSide(folder, "target")
        except (OSError, ValueError, EOFError) as error:
            raise self._damaged(str(error)) from error

    def _damaged(self, reason: str) -> DataError:
        return DataError(
            f"the tokenised data in {self.folder} are damaged: {reason}; delete that "
            "folder, then transformer-jax prepare (or train) makes it again"
        )

    def __len__(self) -> int:
        return len(self.source)

    def lengths(self) -> np.ndarray:
        """Returns source and target lengths with EOS, `[pairs, 2] int64`."""
        sides = (self.source, self.target)
        return np.stack([np.diff(side.offsets) + 1 for side in sides], axis=1)

    def spelling(self) -> str:
        """Says, in a line, how many pieces of each side are unknown or single bytes.

        The coverage is the share of characters that are in pieces of characters. What
        was not yet counted when the corpus was tokenised is left out.
        """
        said = []
        for side, counts in self.manifest.get("pieces", {}).items():
            line = (
                f"{side} {counts['all']:,} pieces, "
                f"{_share(counts['unknown'], counts['all'])} unknown, "
                f"{_share(counts['bytes'], counts['all'])} bytes"
            )
            characters = self.manifest.get("characters", {}).get(side)
            said.append(line + (f", {_coverage(**characters)}" if characters else ""))
        return "; ".join(said)

    def unclean(self) -> str:
        """Says, in a line, how many lines were no clean text, or ""."""
        found = self.manifest.get("unclean", {})  # older corpora have none
        words = {
            "not_utf8": "not UTF-8",
            "nul": "with NUL",
            "removed": "with control characters removed",
        }
        return ", ".join(
            f"{found[kind]:,} lines {words[kind]}" for kind in words if kind in found
        )

    def text(self) -> tuple[list[str], list[str]]:
        """Returns the sentences of both sides as they were read (valid and test).

        Raises:
            DataError: a file is missing or cut short.
        """
        source, target = (
            list(textfiles.read_lines(str(self.folder / f"{side}.txt")))
            for side in SIDES
        )
        if not len(source) == len(target) == len(self):
            counts = f"{len(source)} and {len(target)} lines of text, not {len(self)}"
            raise self._damaged(counts)
        return source, target


def write_split(
    pairs: Iterable[tuple[str, str]],
    training: bool,
    vocabularies: Vocabularies,
    max_length: int,
    folder: pathlib.Path,
    workers: int = 0,
) -> dict[str, Any]:
    """Writes the arrays and the text of a split into `folder`.

    Args:
        pairs: source and target sentences.
        training: pairs with an empty or too long side are left out, and no text is
            kept; elsewhere nothing is ever left out.
        vocabularies: what the text is encoded with.
        max_length: most pieces of a training sentence, EOS included.
        folder: an existing, empty folder.
        workers: processes that encode; 0 is one for each core.

    Returns:
        `counts`: how many pairs were read, kept and left out, by reason. `pieces`: for
        each side how many there are in all, and how many are unknown or single bytes.
        `characters`: likewise how many there are, blanks left out, and how many are in
        pieces of characters.

    Raises:
        DataError: a process was killed.
    """
    counts = Counter(read=0, kept=0, empty=0, too_long=0)
    with contextlib.ExitStack() as files:
        sides = [
            _SideWriter(folder, name, vocabulary, files)
            for name, vocabulary in zip(SIDES, vocabularies, strict=True)
        ]
        for chunk, encoded in encode_pairs(pairs, vocabularies, workers):
            lengths = np.stack([side.lengths for side in encoded])
            keep = np.ones(len(chunk), bool)
            if training:
                empty = (lengths == 0).any(axis=0)
                # EOS needs a place, too.
                too_long = (lengths >= max_length).any(axis=0) & ~empty
                counts["empty"] += int(empty.sum())
                counts["too_long"] += int(too_long.sum())
                keep = ~(empty | too_long)
            counts["read"] += len(chunk)
            counts["kept"] += int(keep.sum())
            columns = [(), ()] if training else zip(*chunk, strict=True)
            for side, texts, ids in zip(sides, columns, encoded, strict=True):
                side.add(texts, ids, keep)
        pieces = {side.name: side.finish() for side in sides}
        characters = {side.name: side.characters() for side in sides}
    return {"counts": dict(counts), "pieces": pieces, "characters": characters}


class _SideWriter:
    """Appends to the files of one side, so that any corpus needs little memory."""

    def __init__(
        self,
        folder: pathlib.Path,
        name: str,
        vocabulary: Tokenizer,
        files: contextlib.ExitStack,
    ) -> None:
        def array(what: str, dtype: np.dtype) -> _GrowingArray:
            file = (folder / f"{name}.{what}.npy").open("wb")
            return _GrowingArray(files.enter_context(file), dtype)

        self.name, self.vocabulary = name, vocabulary
        self.ids = array("ids", vocabulary.dtype)
        self.offsets = array("offsets", np.dtype(np.int64))
        self.offsets.append(np.zeros(1))
        text = (folder / f"{name}.txt").open("w", encoding="utf-8", newline="\n")
        self.text = files.enter_context(text)
        self.times = np.zeros(vocabulary.vocab_size, np.int64)  # that each piece comes
        self.read = 0  # characters

    def add(self, texts: Iterable[str], encoded: Encoded, keep: np.ndarray) -> None:
        ids = encoded.ids[np.repeat(keep, encoded.lengths)]
        self.offsets.append(self.ids.size + np.cumsum(encoded.lengths[keep]))
        self.ids.append(ids)
        self.times += np.bincount(ids, minlength=len(self.times))
        self.read += int(encoded.characters[keep].sum())
        self.text.writelines(text + "\n" for text in texts)

    def finish(self) -> dict[str, int]:
        """Makes the arrays whole; returns how many pieces of each kind they hold."""
        self.ids.finish()
        self.offsets.finish()
        return {
            "all": int(self.times.sum()),
            "unknown": int(self.times[UNK_ID]),
            "bytes": int(self.times[self.vocabulary.byte_ids].sum()),
        }

    def characters(self) -> dict[str, int]:
        """Returns how many there are, and how many are in pieces of characters."""
        return {"all": self.read, "covered": int(self.times @ self.vocabulary.spelled)}


class _GrowingArray:
    """A .npy file that is appended to; only when finished it says how long it is."""

    def __init__(self, file: BinaryIO, dtype: np.dtype) -> None:
        self.size, self._file, self._dtype = 0, file, dtype
        self._write_head()

    def append(self, values: np.ndarray) -> None:
        self._file.write(values.astype(self._dtype, copy=False).tobytes())
        self.size += len(values)

    def finish(self) -> None:
        self._file.seek(0)
        self._write_head()

    def _write_head(self) -> None:
        # NumPy leaves room in it, so that it has the same size for any length.
        form = np.lib.format.dtype_to_descr(self._dtype)
        head = {"descr": form, "fortran_order": False, "shape": (self.size,)}
        np.lib.format.write_array_header_1_0(self._file, head)


def _share(count: int, total: int) -> str:
    return f"{count:,} ({count / total:.2%})" if count else "0"


def _coverage(all: int, covered: int) -> str:
    """Says how much is covered, rounded down, so that 100% is all of it."""
    share = covered * 1_000_000 // all / 10_000 if all else 100
    return f"coverage {share:g}%"
