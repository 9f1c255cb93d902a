"""Batches in an order that is a pure function of (seed, epoch, position).

Nothing needs to be replayed: batch number n of a run is found directly, so resuming
costs the same at any step, and the only state to save is the number of the next batch.
"""

import abc
import collections
import functools
import json
import pathlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from transformer_jax.config import BatchConfig
from transformer_jax.data import batching
from transformer_jax.data.batching import Batch, Shape
from transformer_jax.data.tokenized import TokenizedCorpus
from transformer_jax.errors import DataError

PREFETCH = 4  # batches made ahead of the device


class Batches(abc.ABC):
    """An endless sequence of training batches, of a few shapes."""

    shapes: list[Shape]
    batches_per_epoch: int
    tokens_per_epoch: tuple[int, ...]  # of each side
    padding: float  # share of all places

    @property
    def eval_shapes(self) -> list[Shape]:
        """Shapes for batches with one pair a row."""
        return self.shapes

    @abc.abstractmethod
    def batch(self, number: int) -> Batch:
        """Returns batch `number` of the run, counted from 0 over all epochs."""

    def from_batch(self, number: int) -> Iterator[Batch]:
        """Yields batches from `number` on, made ahead by a background thread."""
        with ThreadPoolExecutor(1, "batches") as pool:
            ahead = collections.deque(
                pool.submit(self.batch, number + i) for i in range(PREFETCH)
            )
            number += PREFETCH
            while True:
                yield ahead.popleft().result()
                ahead.append(pool.submit(self.batch, number))
                number += 1


class TrainBatches(Batches):
    """The endless sequence of training batches of a corpus.

    Each epoch holds every pair exactly once; pairs are shuffled and grouped by shape,
    some of those left over go to a larger shape, and the groups are cut into batches,
    whose order is shuffled again.
    """

    def __init__(
        self,
        corpus: TokenizedCorpus,
        config: BatchConfig,
        seed: int,
        shapes: list[Shape] | None = None,
    ) -> None:
        """Chooses the shapes for `corpus`, or takes those given.

        Raises:
            ConfigError: a sentence does not fit into the token budget.
            DataError: a pair does not fit into the shapes given.
        """
        self._corpus, self._seed = corpus, seed
        self._plan = functools.lru_cache(maxsize=2)(self._make_plan)  # of an epoch
        lengths = corpus.lengths()
        self.shapes = shapes or batching.choose_shapes(lengths, config)
        shape_of = batching.assign(lengths, self.shapes)
        if shape_of.max() == len(self.shapes):
            raise DataError("the batch shapes of this run do not hold its corpus")
        assigned = np.bincount(shape_of, minlength=len(self.shapes))
        by_shape = np.argsort(shape_of, kind="stable")
        self._pairs_of = np.split(by_shape, np.cumsum(assigned)[:-1])
        self._shares = batching.share_out(self.shapes, assigned.tolist())
        counts = [
            -(-share.kept // shape.rows)
            for share, shape in zip(self._shares, self.shapes, strict=True)
        ]
        self.batches_per_epoch = sum(counts)
        places = sum(
            count * shape.rows * shape.width
            for count, shape in zip(counts, self.shapes, strict=True)
        )
        self.tokens_per_epoch = tuple(lengths.sum(axis=0).tolist())
        self.padding = 1.0 - sum(self.tokens_per_epoch) / places

    def batch(self, number: int) -> Batch:
        """Returns batch `number` of the run, counted from 0 over all epochs."""
        epoch, position = divmod(number, self.batches_per_epoch)
        shape_index, start = self._plan(epoch)[1][position]
        members = self._plan(epoch)[0][shape_index]
        shape: Shape = self.shapes[shape_index]
        pairs = members[start : start + shape.rows]
        source = [self._corpus.source[i] for i in pairs]
        target = [self._corpus.target[i] for i in pairs]
        return batching.make_batch(source, target, shape)

    def _make_plan(self, epoch: int) -> tuple[list[np.ndarray], list[tuple[int, int]]]:
        """Returns each shape's pairs in order, and (shape, start) of each batch."""
        rng = np.random.default_rng([self._seed, epoch])
        waiting = [[pairs] for pairs in self._pairs_of]
        members = []
        for index, share in enumerate(self._shares):
            pairs = rng.permutation(np.concatenate(waiting[index]))
            members.append(pairs[: share.kept])
            waiting[share.larger].append(pairs[share.kept :])
        batches = [
            (index, start)
            for index, pairs in enumerate(members)
            for start in range(0, len(pairs), self.shapes[index].rows)
        ]
        return members, [batches[i] for i in rng.permutation(len(batches))]


def write_shapes(workdir: pathlib.Path, shapes: list[Shape]) -> None:
    """Keeps the shapes of a run in `WORKDIR/shapes.json`."""
    partial = workdir / "shapes.json.partial"
    partial.write_text(json.dumps(shapes) + "\n", encoding="utf-8")
    partial.replace(workdir / "shapes.json")


def read_shapes(workdir: pathlib.Path) -> list[Shape] | None:
    """Returns the shapes that a run began with, None where they were not kept.

    A run that goes on takes these, so that another way to choose them, in a later
    version, does not change the order of its pairs.

    Raises:
        DataError: the file is not such a list.
    """
    file = workdir / "shapes.json"
    if not file.exists():
        return None
    try:
        return [Shape(*map(int, row)) for row in json.loads(file.read_bytes())]
    except (ValueError, TypeError) as error:
        raise DataError(f"{file} holds no batch shapes: {error}; restore it") from error


def eval_batches(
    corpus: TokenizedCorpus, shapes: list[Shape], tokens: int
) -> Iterator[Batch]:
    """Yields every pair of `corpus` once, in the shapes of training where they fit.

    Args:
        corpus: a split of which nothing may be left out.
        shapes: the training shapes, smallest first.
        tokens: budget of the one further shape that longer pairs need.
    """
    lengths = corpus.lengths()
    index = batching.assign(lengths, shapes)
    if (index == len(shapes)).any():
        source, target = (int(n) for n in lengths[index == len(shapes)].max(axis=0))
        rows = max(1, tokens // max(source, target))
        shapes = [*shapes, Shape(rows, source, target)]
    for i, shape in enumerate(shapes):
        members = np.flatnonzero(index == i)
        for start in range(0, len(members), shape.rows):
            pairs = members[start : start + shape.rows]
            yield batching.make_batch(
                [corpus.source[p] for p in pairs],
                [corpus.target[p] for p in pairs],
                shape,
            )
