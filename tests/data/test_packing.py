"""Packed rows: every pair once an epoch, whole, in rows of one shape."""

import gzip
import pathlib
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from test_pipeline import Pair, epoch_of, equal, random_pairs, write_corpus

from transformer_jax.config import BatchConfig
from transformer_jax.data.batching import Batch, Shape, make_batch
from transformer_jax.data.packing import PackedBatches, choose_sides, pack, plan_rows
from transformer_jax.data.pipeline import TrainBatches
from transformer_jax.data.tokenized import TokenizedCorpus
from transformer_jax.data.tokenizer import BOS_ID, EOS_ID, PAD_ID
from transformer_jax.errors import ConfigError, DataError

CONFIG = BatchConfig(tokens=96, row_multiple=2, packing=True)
DATA = pathlib.Path(__file__).resolve().parents[3] / "shared" / "data"


def cut(tokens: np.ndarray, segment: np.ndarray, length: int) -> list[list[int]]:
    """Cuts a row at its segments, which must be 1, 1, ..., 2, ..., then padding."""
    count = int(segment.max())
    parts = [tokens[segment == number].tolist() for number in range(1, count + 1)]
    assert all(parts) and sum(map(len, parts)) == length
    assert segment.tolist() == [*sorted(segment[:length]), *segment[length:] * 0]
    assert (segment[:length] > 0).all() and (tokens[length:] == PAD_ID).all()
    return parts


def pairs_in(batch: Batch) -> list[list[Pair]]:
    """Returns the pairs of each row, without BOS and EOS."""
    assert batch.source_segment is not None and batch.target_segment is not None
    rows = []
    for row in range(len(batch.source)):
        n, m = int(batch.source_length[row]), int(batch.target_length[row])
        source = cut(batch.source[row], batch.source_segment[row], n)
        ahead = cut(batch.target_in[row], batch.target_segment[row], m)
        target = cut(batch.target_out[row], batch.target_segment[row], m)
        for one, before, after in zip(source, ahead, target, strict=True):
            assert one[-1] == EOS_ID == after[-1] and before == [BOS_ID, *after[:-1]]
        pairs = zip(source, target, strict=True)
        rows.append([(tuple(a[:-1]), tuple(b[:-1])) for a, b in pairs])
    return rows


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TokenizedCorpus:
    return write_corpus(tmp_path_factory.mktemp("data") / "train", random_pairs(0, 90))


def test_pairs_are_laid_end_to_end() -> None:
    ids = [np.asarray(n) for n in ([7], [8, 9], [5])]
    alone = make_batch(ids, ids[::-1], Shape(3, 4, 5))
    packed = pack(alone, [2, 1], Shape(3, 6, 5))
    expected: Any = {
        "source": [
            [7, EOS_ID, 8, 9, EOS_ID, PAD_ID],
            [5, EOS_ID, *[PAD_ID] * 4],
            [0] * 6,
        ],
        "source_length": [5, 2, 0],
        "target_in": [[BOS_ID, 5, BOS_ID, 8, 9], [BOS_ID, 7, *[PAD_ID] * 3], [0] * 5],
        "target_out": [[5, EOS_ID, 8, 9, EOS_ID], [7, EOS_ID, *[PAD_ID] * 3], [0] * 5],
        "target_length": [5, 2, 0],
        "source_segment": [[1, 1, 2, 2, 2, 0], [1, 1, 0, 0, 0, 0], [0] * 6],
        "target_segment": [[1, 1, 2, 2, 2], [1, 1, 0, 0, 0], [0] * 5],
    }
    assert equal(packed, Batch(**expected))
    assert all(array is not None and array.dtype == np.int32 for array in packed)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 19, 60])
def test_every_pair_comes_exactly_once_an_epoch(
    tmp_path: pathlib.Path, size: int
) -> None:
    for seed in range(2):
        pairs = random_pairs(seed, size)
        corpus = write_corpus(tmp_path / str(seed), pairs)
        batches = PackedBatches(corpus, CONFIG, seed)
        (shape,) = batches.shapes
        assert shape.rows * max(shape[1:]) <= CONFIG.tokens
        assert shape.rows % CONFIG.row_multiple == 0
        for epoch in (0, 1, 7):
            found = epoch_of(batches, epoch)
            assert {(*b.source.shape, b.target_in.shape[1]) for b in found} == {shape}
            rows = [row for batch in found for row in pairs_in(batch)]
            assert sorted(pair for row in rows for pair in row) == sorted(pairs)
            assert all(any(pairs_in(batch)) for batch in found)  # none of filling only


@pytest.mark.parametrize("seed", range(6))
def test_no_row_overflows_and_none_is_for_nothing(seed: int) -> None:
    """Kinds of any counts, in rows from the tightest on; two rows never fit in one."""
    rng = np.random.default_rng(seed)
    kinds = np.unique(rng.integers(2, 30, (40, 2)), axis=0)
    kinds = kinds[np.argsort(-kinds.sum(axis=1), kind="stable")]
    counts = rng.integers(1, (2, 9, 40)[seed % 3], len(kinds))
    for room in (kinds.max(axis=0), np.asarray([41, 50]), np.asarray([200, 90])):
        slots, sizes = plan_rows(kinds, counts, *room.tolist())
        assert np.bincount(slots).tolist() == counts.tolist()
        rows = np.split(kinds[slots], np.cumsum(sizes)[:-1])
        sums = np.asarray([row.sum(axis=0) for row in rows])
        assert sizes.min() > 0 and (sums <= room).all()
        merged = sums[:, None] + sums
        merged[np.arange(len(rows)), np.arange(len(rows))] = 999
        assert not (merged <= room).all(axis=2).any()


def test_equal_pairs_fill_their_rows_to_the_last_token() -> None:
    slots, sizes = plan_rows(np.asarray([[5, 7]]), np.asarray([12]), 20, 28)
    assert slots.tolist() == [0] * 12 and sizes.tolist() == [4, 4, 4]
    # A long one and a short one are one row, as they are made for one another.
    kinds = np.asarray([[15, 20], [5, 8], [1, 1]])
    slots, sizes = plan_rows(kinds, np.asarray([3, 3, 1]), 20, 28)
    assert slots.tolist() == [0, 1, 0, 1, 0, 1, 2] and sizes.tolist() == [2, 2, 2, 1]


def test_order_depends_on_seed_epoch_and_position_only(corpus) -> None:
    straight = PackedBatches(corpus, CONFIG, 5)
    numbers = list(range(3 * straight.batches_per_epoch))
    expected = [straight.batch(n) for n in numbers]
    # Asked in another order, by another object, as after a restart.
    jumping = PackedBatches(corpus, CONFIG, 5, straight.shapes)
    for n in np.random.default_rng(0).permutation(numbers).tolist():
        assert equal(jumping.batch(n), expected[n])
    other = PackedBatches(corpus, CONFIG, 6)
    assert not any(equal(other.batch(n), expected[n]) for n in numbers)
    ahead = straight.from_batch(2)
    assert all(equal(next(ahead), expected[n]) for n in numbers[2:])


def test_epochs_put_other_pairs_together(tmp_path: pathlib.Path) -> None:
    """Those of equal lengths change places; here there are 16 kinds of lengths."""
    corpus = write_corpus(tmp_path / "train", random_pairs(0, 90, longest=4))
    batches = PackedBatches(corpus, CONFIG, 1)
    epochs = []
    for epoch in range(3):
        rows = [row for b in epoch_of(batches, epoch) for row in pairs_in(b) if row]
        epochs.append(Counter(map(frozenset, rows)))
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert (epochs[one] & epochs[other]).total() < epochs[one].total() / 2
    first = [len(pairs_in(batches.batch(n * batches.batches_per_epoch))[0]) for n in
             range(20)]  # fmt: skip
    assert len(set(first)) > 1  # long and short in any order


def test_shares_of_padding_and_batches_are_what_they_say(corpus) -> None:
    batches = PackedBatches(corpus, CONFIG, 0)
    found = epoch_of(batches, 0)
    places = sum(b.source.size + b.target_in.size for b in found)
    real = [
        sum(int(b.source_length.sum()) for b in found),
        sum(int(b.target_length.sum()) for b in found),
    ]
    assert batches.padding == pytest.approx(1 - sum(real) / places)
    assert batches.tokens_per_epoch == tuple(real)
    with_buckets = TrainBatches(corpus, CONFIG, 0)
    assert 0 < batches.padding < with_buckets.padding
    assert batches.eval_shapes == with_buckets.shapes == with_buckets.eval_shapes


def test_a_row_is_shared_out_as_the_tokens_are() -> None:
    lengths = np.asarray([[4, 8], [5, 9], [3, 7]] * 200)
    source, target = choose_sides(lengths, BatchConfig(tokens=2000, row_multiple=1))
    assert source / target == pytest.approx(12 / 24, abs=0.05)
    # A single long source, which must have room, too.
    lengths[0] = 90, 8
    source, target = choose_sides(lengths, BatchConfig(tokens=2000, row_multiple=1))
    assert source >= 90 and source / target == pytest.approx(12 / 24, abs=0.05)
    # And where the budget has none for that share.
    sides = choose_sides(lengths, BatchConfig(tokens=90, row_multiple=1))
    assert sides == (90, 90)


def test_a_sentence_longer_than_the_budget_is_refused(corpus) -> None:
    longest = int(corpus.lengths().max())
    for tokens, fits in ((2 * longest, True), (2 * longest - 1, False)):
        config = BatchConfig(tokens=tokens, row_multiple=2, packing=True)
        if fits:
            assert PackedBatches(corpus, config, 0).batches_per_epoch
            continue
        with pytest.raises(ConfigError, match=rf"set it to {2 * longest} or more"):
            PackedBatches(corpus, config, 0)
    with pytest.raises(DataError, match="do not hold its corpus"):
        PackedBatches(corpus, CONFIG, 0, [Shape(2, longest, longest - 1)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["multi30k/train", "tatoeba/en-de.train"])
def test_a_real_corpus_has_little_padding(name: str) -> None:
    """Words stand in for pieces."""
    files = [DATA / f"{name}.{side}.gz" for side in ("en", "de")]
    if not all(file.exists() for file in files):
        pytest.skip("the corpus is not here")
    sides = []
    for file in files:
        with gzip.open(file, "rt", encoding="utf-8", newline="\n") as lines:
            sides.append([line.count(" ") + 2 for line in lines])
    lengths = np.asarray(sides).T
    lengths = lengths[(lengths <= 60).all(axis=1)]
    kinds, counts = np.unique(lengths, axis=0, return_counts=True)
    falling = np.argsort(-kinds.sum(axis=1), kind="stable")
    sides = choose_sides(lengths, BatchConfig(tokens=8192))
    started = time.process_time()
    _, sizes = plan_rows(kinds[falling], counts[falling], *sides)
    assert time.process_time() - started < 30
    assert 1 - lengths.sum() / (len(sizes) * sum(sides)) < 0.03
