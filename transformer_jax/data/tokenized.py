"""The format of a tokenised split: flat memory-mapped arrays with offsets.

    FOLDER/source.ids.npy       all ids of the source side, end to end
           source.offsets.npy   where each sentence starts, and the end
           target.ids.npy, target.offsets.npy
           source.txt, target.txt   the text (valid and test)
           manifest.json        what made it; pairs and pieces, counted

Ids are without BOS and EOS, in the smallest type that holds the vocabulary.
"""

import itertools
import json
import pathlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from transformer_jax.data import corpora
from transformer_jax.data.tokenizer import UNK_ID, Tokenizer

CHUNK = 10_000  # pairs tokenised at a time
PART = 1 << 24  # ids copied at a time


class TokenizedSide:
    """One side of a tokenised corpus; `side[i]` is a view of sentence i's ids."""

    def __init__(self, folder: pathlib.Path, name: str) -> None:
        """Maps the arrays of side `name` of `folder`."""
        self.ids = np.load(folder / f"{name}.ids.npy", mmap_mode="r")
        self.offsets = np.load(folder / f"{name}.offsets.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.ids[self.offsets[index] : self.offsets[index + 1]]


class TokenizedCorpus:
    """A split as token ids, without BOS and EOS."""

    def __init__(self, folder: pathlib.Path) -> None:
        """Opens the folder of a prepared split."""
        self.folder = folder
        self.manifest: dict[str, Any] = json.loads(
            (folder / "manifest.json").read_text(encoding="utf-8")
        )
        self.source = TokenizedSide(folder, "source")
        self.target = TokenizedSide(folder, "target")

    def __len__(self) -> int:
        return len(self.source)

    def lengths(self) -> np.ndarray:
        """Returns source and target lengths with EOS, `[pairs, 2] int64`."""
        sides = (self.source, self.target)
        return np.stack([np.diff(side.offsets) + 1 for side in sides], axis=1)

    def spelling(self) -> str:
        """Says, in a line, how many pieces of each side are unknown or single bytes.

        Returns "" for a corpus that was tokenised before they were counted.
        """
        return "; ".join(
            f"{side} {counts['all']:,} pieces, "
            f"{_share(counts['unknown'], counts['all'])} unknown, "
            f"{_share(counts['bytes'], counts['all'])} bytes"
            for side, counts in self.manifest.get("pieces", {}).items()
        )

    def text(self) -> tuple[list[str], list[str]]:
        """Returns the sentences of both sides as they were read (valid and test)."""
        return tuple(  # pyright: ignore[reportReturnType]
            list(corpora.read_lines(str(self.folder / f"{side}.txt")))
            for side in ("source", "target")
        )


def write_split(
    pairs: Iterable[tuple[str, str]],
    training: bool,
    vocabulary: Tokenizer,
    max_length: int,
    folder: pathlib.Path,
) -> dict[str, Any]:
    """Writes the arrays and the text of a split into `folder`.

    Args:
        pairs: source and target sentences.
        training: pairs with an empty or too long side are left out, and no text is
            kept; elsewhere nothing is ever left out.
        vocabulary: what the text is encoded with.
        max_length: most pieces of a training sentence, EOS included.
        folder: an existing, empty folder.

    Returns:
        `counts`: how many pairs were read, kept and left out, by reason. `pieces`: for
        each side how many there are in all, and how many are unknown or single bytes.
    """
    counts = Counter(read=0, kept=0, empty=0, too_long=0)
    sides = [_SideWriter(folder, name, vocabulary) for name in ("source", "target")]
    for chunk in _chunks(pairs, CHUNK):
        counts["read"] += len(chunk)
        encoded = [vocabulary.encode(texts) for texts in zip(*chunk, strict=True)]
        for text, ids in zip(chunk, zip(*encoded, strict=True), strict=True):
            if training:
                if not (ids[0] and ids[1]):
                    counts["empty"] += 1
                    continue
                if max(map(len, ids)) >= max_length:  # EOS needs a place, too
                    counts["too_long"] += 1
                    continue
            counts["kept"] += 1
            for side, line, sentence in zip(sides, text, ids, strict=True):
                side.add(None if training else line, sentence)
    return {"counts": dict(counts), "pieces": {s.name: s.close() for s in sides}}


class _SideWriter:
    """Appends ids to a raw file, so that a corpus of any size needs little memory."""

    def __init__(self, folder: pathlib.Path, name: str, vocabulary: Tokenizer) -> None:
        self.folder, self.name, self.vocabulary = folder, name, vocabulary
        self.dtype = np.min_scalar_type(vocabulary.vocab_size - 1)
        self.raw = folder / f"{name}.raw"
        self.ids = self.raw.open("wb")
        self.text = (folder / f"{name}.txt").open("w", encoding="utf-8", newline="\n")
        self.offsets = [0]

    def add(self, line: str | None, ids: list[int]) -> None:
        if line is not None:
            self.text.write(line + "\n")
        self.ids.write(np.asarray(ids, self.dtype).tobytes())
        self.offsets.append(self.offsets[-1] + len(ids))

    def close(self) -> dict[str, int]:
        """Makes the arrays; returns how many pieces of each kind they hold."""
        self.ids.close()
        self.text.close()
        ids = np.lib.format.open_memmap(
            self.folder / f"{self.name}.ids.npy", "w+", self.dtype, (self.offsets[-1],)
        )
        size = self.vocabulary.vocab_size
        times = np.zeros(size, np.int64)  # that each piece comes
        with self.raw.open("rb") as raw:
            for start in range(0, len(ids), PART):
                part = ids[start : start + PART]
                part[:] = np.fromfile(raw, self.dtype, len(part))
                times += np.bincount(part, minlength=size)
        ids.flush()
        self.raw.unlink()
        offsets = np.asarray(self.offsets, np.int64)
        np.save(self.folder / f"{self.name}.offsets.npy", offsets)
        return {
            "all": int(times.sum()),
            "unknown": int(times[UNK_ID]),
            "bytes": int(times[self.vocabulary.byte_ids].sum()),
        }


def _share(count: int, total: int) -> str:
    return f"{count:,} ({count / total:.2%})" if count else "0"


def _chunks(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk
