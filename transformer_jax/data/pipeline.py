"""Batches in an order that is a pure function of (seed, epoch, position).

Nothing needs to be replayed: batch number n of a run is found directly, so resuming
costs the same at any step, and the only state to save is the number of the next batch.
"""

import collections
import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from transformer_jax.config import BatchConfig
from transformer_jax.data import batching
from transformer_jax.data.batching import Batch, Shape
from transformer_jax.data.tokenized import TokenizedCorpus

PREFETCH = 4  # batches made ahead of the device


class TrainBatches:
    """The endless sequence of training batches of a corpus.

    Each epoch holds every pair exactly once; pairs are shuffled, grouped by shape, and
    the groups cut into batches, whose order is shuffled again.
    """

    def __init__(self, corpus: TokenizedCorpus, config: BatchConfig, seed: int) -> None:
        """Chooses the shapes for `corpus`.

        Raises:
            ConfigError: a sentence does not fit into the token budget.
        """
        self._corpus, self._seed = corpus, seed
        self._plan = functools.lru_cache(maxsize=2)(self._make_plan)  # of an epoch
        lengths = corpus.lengths()
        self.shapes = batching.choose_shapes(lengths, config)
        self._shape_of = batching.assign(lengths, self.shapes)
        self._members = np.bincount(self._shape_of, minlength=len(self.shapes))
        rows = np.asarray([shape.rows for shape in self.shapes])
        self._batches = -(-self._members // rows)
        self.batches_per_epoch = int(self._batches.sum())
        size = np.asarray([s.rows * (s.source + s.target) for s in self.shapes])
        self.padding = 1.0 - float(lengths.sum() / (self._batches * size).sum())

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
        order = rng.permutation(len(self._corpus))
        by_shape = order[np.argsort(self._shape_of[order], kind="stable")]
        members = np.split(by_shape, np.cumsum(self._members)[:-1])
        batches = [
            (index, start)
            for index, pairs in enumerate(members)
            for start in range(0, len(pairs), self.shapes[index].rows)
        ]
        return members, [batches[i] for i in rng.permutation(len(batches))]

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
