"""Pairs of token ids to batches of fixed shapes. NumPy only.

`Batch` is the contract between data, training and evaluation. Shapes come from a small
set chosen from the lengths of the corpus, so that little is padding and no program is
compiled after the first epoch.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from transformer_jax.config import BatchConfig
from transformer_jax.data.tokenizer import BOS_ID, EOS_ID, PAD_ID
from transformer_jax.errors import ConfigError

SWEEPS = 8  # rounds of moving shapes; two to four are the rule


class Batch(NamedTuple):
    """R pairs. Rows that only fill the shape have length 0 and count for nothing.

    A packed row holds several pairs end to end: its segments say which, counted from 1
    and 0 for padding, and its length is that of all of them.
    """

    source: np.ndarray  # [R, S] int32, EOS last
    source_length: np.ndarray  # [R] int32, EOS included
    target_in: np.ndarray  # [R, T] int32: BOS, then the target without its last token
    target_out: np.ndarray  # [R, T] int32, EOS last
    target_length: np.ndarray  # [R] int32, EOS included
    source_segment: np.ndarray | None = None  # [R, S] int32, None where not packed
    target_segment: np.ndarray | None = None  # [R, T] int32


class Shape(NamedTuple):
    """One array shape: `rows` pairs of up to `source` and `target` tokens."""

    rows: int
    source: int
    target: int

    @property
    def width(self) -> int:
        """Padded tokens of a pair, both sides together."""
        return self.source + self.target


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

    Each pair goes to the smallest shape that holds it. The longest sides are one shape;
    the others are added one by one where they save the most padded tokens, then each
    is moved to where it saves most beside the others, until none moves. The rows of a
    shape are then chosen so that its pairs, less those that `share_out` moves to a
    larger shape, fill its batches evenly, instead of all but the last.

    Args:
        lengths: `[pairs, 2] int`, source and target lengths with EOS.
        config: token budget and number of shapes.

    Returns:
        The shapes, smallest first. They depend on nothing but the arguments.

    Raises:
        ConfigError: the longest pair has no room in the token budget.
    """
    check_budget(int(lengths.max()), config)
    sides = _choose_sides(lengths, config.buckets)
    while True:
        shapes = [Shape(1, *side) for side in sides]
        index = assign(lengths, shapes)
        # As tight as its pairs allow, and none without pairs.
        tight = {
            tuple(lengths[index == i].max(axis=0).tolist()) for i in np.unique(index)
        }
        if sorted(tight, key=_by_width) != sides:
            sides = sorted(tight, key=_by_width)
            continue
        shapes = _with_rows(shapes, np.bincount(index).tolist(), config)
        shares = share_out(shapes, np.bincount(index).tolist())
        if all(share.kept for share in shares):
            return shapes
        sides = [side for side, share in zip(sides, shares, strict=True) if share.kept]


def check_budget(longest: int, config: BatchConfig) -> None:
    """Raises ConfigError if the longest sentence has no room in the token budget."""
    if longest * config.row_multiple > config.tokens:
        need = longest * config.row_multiple
        raise ConfigError(
            f"config.batch.tokens = {config.tokens} holds no {config.row_multiple} "
            f"rows (config.batch.row_multiple) of the longest sentence, {longest} "
            f"tokens; set it to {need} or more, or lower config.model.max_length"
        )


class Share(NamedTuple):
    """What becomes of the pairs of one shape in an epoch."""

    kept: int  # pairs in batches of this shape
    larger: int  # index of the shape whose batches take the others, -1 if none does


def share_out(shapes: Sequence[Shape], pairs: Sequence[int]) -> list[Share]:
    """Returns how many pairs each shape keeps, and where its others go.

    Pairs that would leave many rows of a last batch empty go to the smallest shape that
    holds all that this one holds, if that costs fewer padded tokens.

    Args:
        shapes: smallest first.
        pairs: the number of pairs that are assigned to each shape.
    """
    waiting, shares = list(pairs), []
    for i, shape in enumerate(shapes):
        larger = _larger(shapes, i)
        kept = _kept(waiting[i], shape, shapes[larger] if larger >= 0 else None)
        waiting[larger] += waiting[i] - kept
        shares.append(Share(kept, larger))
    return shares


def _larger(shapes: Sequence[Shape], i: int) -> int:
    """Returns the next shape that holds all that shape `i` holds, or -1."""
    _, source, target = shapes[i]
    for j in range(i + 1, len(shapes)):
        if shapes[j].source >= source and shapes[j].target >= target:
            return j
    return -1


def _kept(pairs: int, shape: Shape, larger: Shape | None) -> int:
    rest = pairs % shape.rows
    if larger and rest * larger.width < shape.rows * shape.width:
        return pairs - rest
    return pairs


def _with_rows(
    shapes: Sequence[Shape], pairs: Sequence[int], config: BatchConfig
) -> list[Shape]:
    """Returns the shapes with the rows that leave the fewest padded tokens.

    They are at most a tenth fewer than there is room for, or so few that the pairs of
    the shape still make no more batches.
    """
    waiting, found = list(pairs), []
    multiple = config.row_multiple
    for i, shape in enumerate(shapes):
        at = _larger(shapes, i)
        larger = shapes[at] if at >= 0 else None
        most = config.tokens // max(shape.source, shape.target)
        fewest = -(-waiting[i] // (most // multiple * multiple))
        best = (math.inf, shape, 0)
        for rows in range(most // multiple * multiple, 0, -multiple):
            tried = shape._replace(rows=rows)
            kept = _kept(waiting[i], tried, larger)
            batches = -(-kept // rows)
            if batches > fewest + fewest // 10:
                break
            moved = (waiting[i] - kept) * larger.width if larger else 0
            cost = batches * rows * shape.width + moved
            best = min(best, (cost, tried, kept), key=lambda choice: choice[0])
        _, shape, kept = best
        waiting[at] += waiting[i] - kept
        found.append(shape)
    return found


def _choose_sides(lengths: np.ndarray, buckets: int) -> list[tuple[int, int]]:
    """Returns the (source, target) of shapes, smallest first."""
    grids = [_grid(side) for side in lengths.T]
    counts = np.zeros([len(grid) for grid in grids], np.int64)
    cells = [np.searchsorted(g, n) for g, n in zip(grids, lengths.T, strict=True)]
    np.add.at(counts, tuple(cells), 1)
    sizes = np.add.outer(*grids)
    places = {size: np.nonzero(sizes == size) for size in np.unique(sizes).tolist()}

    def smallest(corners: list[tuple[int, int]]) -> np.ndarray:
        """Returns the size of the smallest shape that holds each cell."""
        found = np.full_like(sizes, sizes[-1, -1])
        for i, j in corners:
            part = found[: i + 1, : j + 1]
            np.minimum(part, sizes[i, j], out=part)
        return found

    def best(found: np.ndarray) -> tuple[int, tuple[int, int]]:
        """Returns the padded tokens that one more shape can save, and the shape."""
        most, corner = 0, (-1, -1)
        for size, (i, j) in places.items():
            gain = counts * np.maximum(found - size, 0)
            total = gain.cumsum(axis=0).cumsum(axis=1)[i, j]
            at = int(total.argmax())
            if total[at] > most:
                most, corner = int(total[at]), (int(i[at]), int(j[at]))
        return most, corner

    corners = [(len(grids[0]) - 1, len(grids[1]) - 1)]
    while len(corners) < buckets:
        saved, corner = best(smallest(corners))
        if not saved:
            break
        corners.append(corner)
    for _ in range(SWEEPS):
        before = list(corners)
        for n in range(1, len(corners)):
            corners[n] = best(smallest(corners[:n] + corners[n + 1 :]))[1]
        if corners == before:
            break
    sides = [(int(grids[0][i]), int(grids[1][j])) for i, j in corners]
    return sorted(sides, key=_by_width)


def _by_width(side: tuple[int, int]) -> tuple[int, tuple[int, int]]:
    return sum(side), side


def _grid(lengths: np.ndarray) -> np.ndarray:
    """Returns lengths that shapes may have: every one to 64, then steps of 1/32."""
    steps = [1]
    while steps[-1] < lengths.max():
        steps.append(steps[-1] + max(1, steps[-1] // 32))
    up = np.asarray(steps)[np.searchsorted(steps, np.unique(lengths))]
    return np.unique(np.minimum(up, lengths.max()))


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
