"""Pairs of token ids to batches of fixed shapes. NumPy only.

`Batch` is the contract between data, training and evaluation. Shapes come from a small
set chosen from the lengths of the corpus, so that little is padding and nothing is
ever compiled in the middle of a run.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from transformer_jax.config import BatchConfig
from transformer_jax.data.tokenizer import BOS_ID, EOS_ID, PAD_ID
from transformer_jax.errors import ConfigError


class Batch(NamedTuple):
    """R pairs. Rows that only fill the shape have length 0 and count for nothing."""

    source: np.ndarray  # [R, S] int32, EOS last
    source_length: np.ndarray  # [R] int32, EOS included
    target_in: np.ndarray  # [R, T] int32: BOS, then the target without its last token
    target_out: np.ndarray  # [R, T] int32, EOS last
    target_length: np.ndarray  # [R] int32, EOS included


class Shape(NamedTuple):
    """One array shape: `rows` pairs of up to `source` and `target` tokens."""

    rows: int
    source: int
    target: int


def pad(sequences: Sequence[np.ndarray], rows: int, length: int) -> np.ndarray:
    """Returns `[rows, length] int32` with one sequence a row, then padding."""
    padded = np.full((rows, length), PAD_ID, np.int32)
    for row, sequence in zip(padded, sequences, strict=False):
        row[: len(sequence)] = sequence
    return padded


def make_batch(
    sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], shape: Shape
) -> Batch:
    """Makes a batch of ids without BOS and EOS.

    Args:
        sources: ids of each source, at most `shape.source - 1`.
        targets: ids of each target, at most `shape.target - 1`.
        shape: what the batch is padded to.

    Returns:
        The batch. For the target `[7, 8]` in 4 columns, `target_in` is
        `[BOS, 7, 8, PAD]` and `target_out` is `[7, 8, EOS, PAD]`.
    """
    source = [np.append(ids, EOS_ID) for ids in sources]
    target_out = [np.append(ids, EOS_ID) for ids in targets]
    target_in = [np.insert(np.asarray(ids, np.int32), 0, BOS_ID) for ids in targets]

    def lengths(sequences: Sequence[np.ndarray]) -> np.ndarray:
        counts = [len(sequence) for sequence in sequences]
        return np.asarray(counts + [0] * (shape.rows - len(counts)), np.int32)

    return Batch(
        pad(source, shape.rows, shape.source),
        lengths(source),
        pad(target_in, shape.rows, shape.target),
        pad(target_out, shape.rows, shape.target),
        lengths(target_out),
    )


def choose_shapes(lengths: np.ndarray, config: BatchConfig) -> list[Shape]:
    """Chooses at most `config.buckets` shapes that leave little padding.

    The plane of (source, target) lengths is split again and again where a split saves
    the most padded tokens; every part gives the shape of its longest sides.

    Args:
        lengths: `[pairs, 2] int`, source and target lengths with EOS.
        config: token budget and number of shapes.

    Returns:
        The shapes, smallest first.

    Raises:
        ConfigError: the longest pair has no room in the token budget.
    """
    longest = int(lengths.max())
    if longest * config.row_multiple > config.tokens:
        need = longest * config.row_multiple
        raise ConfigError(
            f"config.batch.tokens = {config.tokens} holds no {config.row_multiple} "
            f"rows (config.batch.row_multiple) of the longest sentence, {longest} "
            f"tokens; set it to {need} or more, or lower config.model.max_length"
        )
    counts = np.zeros(lengths.max(axis=0) + 1, np.int64)
    np.add.at(counts, (lengths[:, 0], lengths[:, 1]), 1)
    parts = [_Part(counts, (0, 0))]
    while len(parts) < config.buckets:
        best = max(parts, key=lambda part: part.saving)
        if best.saving <= 0:
            break
        parts.remove(best)
        parts += best.split()
    shapes = set()
    for source, target in {part.longest for part in parts}:
        rows = config.tokens // max(source, target)
        shapes.add(Shape(rows - rows % config.row_multiple, source, target))
    return sorted(shapes, key=lambda shape: (shape.source + shape.target, shape))


class _Part:
    """A rectangle of the plane of lengths, and the best way to split it in two."""

    def __init__(self, counts: np.ndarray, origin: tuple[int, int]) -> None:
        self.counts, self.origin = counts, origin
        present = [np.flatnonzero(counts.sum(axis=1 - axis)) for axis in (0, 1)]
        self.top = tuple(int(p[-1]) for p in present)
        self.longest = tuple(o + t for o, t in zip(origin, self.top, strict=True))
        cost = int(counts.sum()) * sum(self.longest)
        self.saving, self.axis, self.cut = 0, 0, 0
        for axis in (0, 1):
            for cut in present[axis][:-1] + 1:
                low, high = np.split(counts, [cut], axis=axis)
                after = _padded(low, origin) + _padded(high, self._shifted(axis, cut))
                if cost - after > self.saving:
                    self.saving, self.axis, self.cut = cost - after, axis, int(cut)

    def _shifted(self, axis: int, cut: int) -> tuple[int, int]:
        source, target = self.origin
        return (source + cut, target) if axis == 0 else (source, target + cut)

    def split(self) -> list["_Part"]:
        low, high = np.split(self.counts, [self.cut], axis=self.axis)
        shifted = self._shifted(self.axis, self.cut)
        return [_Part(low, self.origin), _Part(high, shifted)]


def _padded(counts: np.ndarray, origin: tuple[int, int]) -> int:
    """Returns the padded tokens of all pairs of a part, were it one shape."""
    longest = [int(np.flatnonzero(counts.sum(axis=1 - axis))[-1]) for axis in (0, 1)]
    return int(counts.sum()) * (sum(origin) + sum(longest))


def assign(lengths: np.ndarray, shapes: Sequence[Shape]) -> np.ndarray:
    """Returns for each pair the index of the first shape that holds it.

    Args:
        lengths: `[pairs, 2] int`, source and target lengths with EOS.
        shapes: smallest first.

    Returns:
        `[pairs] int`; `len(shapes)` where no shape is large enough.
    """
    index = np.full(len(lengths), len(shapes), np.int64)
    for i in reversed(range(len(shapes))):
        fits = (lengths[:, 0] <= shapes[i].source) & (lengths[:, 1] <= shapes[i].target)
        index[fits] = i
    return index
