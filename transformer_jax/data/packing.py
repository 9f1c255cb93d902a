"""Packing: several pairs in one row, end to end, so that every batch has one shape.

Which lengths share a row is found once, from the histogram of the lengths; an epoch
then only draws which pairs of these lengths they are, and the order of the rows. So
an epoch has the same number of rows each time and costs a sort. NumPy only.
"""

import functools
from collections.abc import Sequence

import numpy as np

from transformer_jax.config import BatchConfig
from transformer_jax.data import batching
from transformer_jax.data.batching import Batch, Shape
from transformer_jax.data.pipeline import Batches
from transformer_jax.data.tokenized import TokenizedCorpus
from transformer_jax.errors import DataError

SAMPLE = 100_000  # pairs whose lengths choose the shape
STRETCHES = (1, 1.25, 1.5, 2, 3, 4)  # rows tried, in lengths of the longest pair
NEARLY = 0.01  # share by which a shorter row may need more places than the best
LOOK = 512  # kinds of pairs compared at once for the next place in a row


class PackedBatches(Batches):
    """The endless sequence of training batches of a corpus, several pairs a row.

    Each epoch holds every pair exactly once.
    """

    def __init__(
        self,
        corpus: TokenizedCorpus,
        config: BatchConfig,
        seed: int,
        shapes: list[Shape] | None = None,
    ) -> None:
        """Chooses the shape for `corpus`, or takes the one given.

        Raises:
            ConfigError: a sentence does not fit into the token budget.
            DataError: a pair does not fit into the shape given.
        """
        self._corpus, self._config, self._seed = corpus, config, seed
        self._plan = functools.lru_cache(maxsize=2)(self._make_plan)  # of an epoch
        lengths = corpus.lengths()
        given = shapes[0] if shapes else None
        sides = given[1:] if given else choose_sides(lengths, config)
        if (lengths.max(axis=0) > sides).any():
            raise DataError("the batch shapes of this run do not hold its corpus")
        kinds, self._kind_of = _kinds(lengths)
        slots, sizes = plan_rows(kinds, np.bincount(self._kind_of), *sides)
        self._places = np.argsort(slots, kind="stable")  # those of a kind together
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        shape = given or _with_rows(len(sizes), *sides, config)[1]
        self.shapes = [shape]
        self.batches_per_epoch = -(-len(sizes) // shape.rows)
        places = self.batches_per_epoch * shape.rows * shape.width
        self.tokens_per_epoch = tuple(lengths.sum(axis=0).tolist())
        self.padding = 1.0 - sum(self.tokens_per_epoch) / places

    @functools.cached_property
    def eval_shapes(self) -> list[Shape]:
        """Shapes of batches with a pair a row, those of a run without packing."""
        return batching.choose_shapes(self._corpus.lengths(), self._config)

    def batch(self, number: int) -> Batch:
        """Returns batch `number` of the run, counted from 0 over all epochs."""
        epoch, position = divmod(number, self.batches_per_epoch)
        pairs, order = self._plan(epoch)
        shape = self.shapes[0]
        rows = order[position * shape.rows : (position + 1) * shape.rows]
        members = [pairs[self._starts[row] : self._starts[row + 1]] for row in rows]
        chosen = np.concatenate(members)
        alone = batching.make_batch(
            [self._corpus.source[i] for i in chosen],
            [self._corpus.target[i] for i in chosen],
            shape._replace(rows=len(chosen)),
        )
        return pack(alone, [len(row) for row in members], shape)

    def _make_plan(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the pairs, row after row, and the order of the rows."""
        rng = np.random.default_rng([self._seed, epoch])
        drawn = rng.permutation(len(self._kind_of))
        pairs = np.empty_like(drawn)
        pairs[self._places] = drawn[np.argsort(self._kind_of[drawn], kind="stable")]
        return pairs, rng.permutation(len(self._starts) - 1)


def pack(alone: Batch, counts: Sequence[int], shape: Shape) -> Batch:
    """Lays the pairs of a batch end to end.

    Args:
        alone: one pair a row, P of them.
        counts: how many pairs each row of the result takes; they add up to P.
        shape: of the result; rows beyond `counts` stay empty.

    Returns:
        The batch. The sources `[7, EOS]`, `[8, 9, EOS]` in one row of 6 columns are
        `[7, EOS, 8, 9, EOS, PAD]`, with the segments `[1, 1, 2, 2, 2, 0]` and the
        length 5.
    """
    row_of = np.repeat(np.arange(len(counts)), counts)
    segment = np.concatenate([np.arange(1, 1 + count) for count in counts])

    def lay(columns: int, lengths: np.ndarray, *sides: np.ndarray) -> list[np.ndarray]:
        """Returns the row lengths, the segments, and each of `sides [P, any]`."""
        total = np.bincount(row_of, lengths, shape.rows).astype(np.int32)
        filled = np.arange(columns) < total[:, None]
        real = np.arange(sides[0].shape[1]) < lengths[:, None]
        found = [np.repeat(segment, lengths), *(side[real] for side in sides)]
        rows = [np.full(filled.shape, batching.PAD_ID, np.int32) for _ in found]
        for row, ids in zip(rows, found, strict=True):
            row[filled] = ids
        return [total, *rows]

    source_length, source_segment, source = lay(
        shape.source, alone.source_length, alone.source
    )
    target_length, target_segment, target_in, target_out = lay(
        shape.target, alone.target_length, alone.target_in, alone.target_out
    )
    return Batch(
        source,
        source_length,
        target_in,
        target_out,
        target_length,
        source_segment,
        target_segment,
    )


# --- The shape ------------------------------------------------------------------


def choose_sides(lengths: np.ndarray, config: BatchConfig) -> tuple[int, int]:
    """Chooses how many source and target tokens a row has.

    The two are to each other as all source tokens to all target tokens, so that both
    sides fill up together, and at least as long as the longest sentences. Of several
    such rows, which use up the token budget, it is the shortest that leaves nearly as
    little padding as the best, since attention costs more in longer rows.

    Args:
        lengths: `[pairs, 2] int`, source and target lengths with EOS.
        config: token budget.

    Returns:
        The source and target tokens of a row.

    Raises:
        ConfigError: the longest pair has no room in the token budget.
    """
    batching.check_budget(int(lengths.max()), config)
    pairs, longest = len(lengths), lengths.max(axis=0)
    if pairs > SAMPLE:
        rng = np.random.default_rng(0)
        lengths = lengths[rng.choice(len(lengths), SAMPLE, replace=False)]
    share = lengths.sum(axis=0) / lengths.sum(axis=0).max()
    shortest = int(np.ceil((longest / share).max()))
    kinds, kind_of = _kinds(lengths)
    counts, multiple = np.bincount(kind_of), config.row_multiple
    tried: dict[tuple[int, int], int] = {}  # places of an epoch
    for stretch in STRETCHES:
        rows = int(config.tokens / (stretch * shortest)) // multiple * multiple
        if not rows and tried:
            break
        length = config.tokens // max(rows, multiple)
        source, target = np.maximum(np.floor(length * share), longest).astype(int)
        sides = int(source), int(target)
        if sides not in tried:
            needed = len(plan_rows(kinds, counts, *sides)[1])
            needed = needed * pairs // len(lengths)
            batches, shape = _with_rows(needed, *sides, config)
            tried[sides] = batches * shape.rows * shape.width
    least = min(tried.values()) * (1 + NEARLY)
    return next(sides for sides, places in tried.items() if places <= least)


def _with_rows(
    needed: int, source: int, target: int, config: BatchConfig
) -> tuple[int, Shape]:
    """Returns how many batches of which shape take `needed` rows.

    Rows of the shape are at most a tenth fewer than there is room for, such that the
    last batch is nearly full.
    """
    multiple = config.row_multiple
    most = config.tokens // max(source, target) // multiple * multiple
    most = min(most, -(-needed // multiple) * multiple)
    tried = range(most, max(most - most // 10, 1) - 1, -multiple)
    rows = min(tried, key=lambda rows: -(-needed // rows) * rows)
    return -(-needed // rows), Shape(rows, source, target)


# --- The rows -------------------------------------------------------------------


def _kinds(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the different lengths, longest first, and which of them each pair has."""
    base = int(lengths.max()) + 1
    code = (lengths.sum(axis=1) * base + lengths[:, 0]) * -1
    _, first, kind_of = np.unique(code, return_index=True, return_inverse=True)
    return lengths[first], kind_of.astype(np.int32)


def plan_rows(
    kinds: np.ndarray, counts: np.ndarray, source: int, target: int
) -> tuple[np.ndarray, np.ndarray]:
    """Finds rows that hold all pairs.

    A row takes the kind that fills what is left of it best, again and again, until
    nothing fits. The row is then repeated as often as there are pairs for it.

    Args:
        kinds: `[kinds, 2] int`, lengths that pairs have, by falling sum.
        counts: `[kinds] int`, how many pairs have them; at least 1.
        source: tokens of a row, enough for every kind.
        target: likewise.

    Returns:
        The kind of every place, row after row, `[pairs] int32`, and how many places
        each row has, `[rows] int`.
    """
    slots, sizes, left = [], [], counts.copy()
    alive = np.arange(len(kinds))
    while len(alive):
        open_kinds = _OpenKinds(kinds[alive], left[alive], source, target)
        while open_kinds.some_half_are_left():
            members, times = open_kinds.next_row()
            slots.append(np.tile(alive[members].astype(np.int32), times))
            sizes.append(np.full(times, len(members)))
        left[alive] = open_kinds.left
        alive = alive[open_kinds.left > 0]
    return np.concatenate(slots), np.concatenate(sizes)


class _OpenKinds:
    """Kinds of which pairs are left; made anew when half of them are used up."""

    def __init__(
        self, kinds: np.ndarray, left: np.ndarray, source: int, target: int
    ) -> None:
        self.left, self._sides = left.copy(), (source, target)
        self._source, self._target = np.ascontiguousarray(kinds.T)
        self._falling = -kinds.sum(axis=1)
        self._least = kinds.min(axis=0).tolist()
        self._open = len(kinds)
        self._enough = len(kinds) // 2

    def some_half_are_left(self) -> bool:
        return self._open > self._enough

    def next_row(self) -> tuple[list[int], int]:
        """Returns the kinds of a row, and how often it is repeated; takes them away."""
        room = list(self._sides)
        members: list[int] = []
        while (kind := self._best(*room)) >= 0:
            members.append(kind)
            self.left[kind] -= 1
            room[0] -= int(self._source[kind])
            room[1] -= int(self._target[kind])
        used, uses = np.unique(members, return_counts=True)
        more = int((self.left[used] // uses).min())
        self.left[used] -= more * uses
        self._open -= int((self.left[used] == 0).sum())
        return members, 1 + more

    def _best(self, source: int, target: int) -> int:
        """Returns the kind that leaves the least of the room, or -1 if none fits."""
        if source < self._least[0] or target < self._least[1]:
            return -1
        start = int(np.searchsorted(self._falling, -(source + target)))
        width = LOOK
        while start < len(self.left):
            part = slice(start, start + width)
            over, beyond = source - self._source[part], target - self._target[part]
            fits = np.flatnonzero((over >= 0) & (beyond >= 0) & (self.left[part] > 0))
            if len(fits):
                over = over[fits] / self._sides[0]
                beyond = beyond[fits] / self._sides[1]
                return start + int(fits[np.argmin(over * over + beyond * beyond)])
            start, width = start + width, 4 * width
        return -1
