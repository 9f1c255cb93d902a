"""The order of training batches, and validation in the shapes of training."""

import itertools
import json
import pathlib
from collections import Counter
from typing import Any

import numpy as np
import pytest

from transformer_jax.config import BatchConfig
from transformer_jax.data.batching import Batch, Shape
from transformer_jax.data.pipeline import (
    PREFETCH,
    Batches,
    TrainBatches,
    eval_batches,
    read_shapes,
    write_shapes,
)
from transformer_jax.data.tokenized import TokenizedCorpus
from transformer_jax.data.tokenizer import EOS_ID
from transformer_jax.errors import ConfigError, DataError

CONFIG = BatchConfig(tokens=64, buckets=3, row_multiple=2)
Pair = tuple[tuple[int, ...], tuple[int, ...]]


def write_corpus(folder: pathlib.Path, pairs: list[Pair]) -> TokenizedCorpus:
    """Writes a tokenised split as `write_split` does, and opens it."""
    folder.mkdir(parents=True)
    for side, name in enumerate(("source", "target")):
        sentences = [pair[side] for pair in pairs]
        ids = np.asarray(list(itertools.chain(*sentences)), np.uint16)
        offsets = np.cumsum([0, *map(len, sentences)], dtype=np.int64)
        np.save(folder / f"{name}.ids.npy", ids)
        np.save(folder / f"{name}.offsets.npy", offsets)
    manifest = {"recipe": {}, "counts": {"kept": len(pairs)}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return TokenizedCorpus(folder)


def random_pairs(seed: int, count: int, longest: int = 15) -> list[Pair]:
    """Returns pairs that all differ: each side starts with the number of its pair."""
    rng = np.random.default_rng(seed)

    def side(number: int) -> tuple[int, ...]:
        more = rng.integers(4, 999, rng.integers(0, longest))
        return (1000 + number, *more.tolist())

    return [(side(i), side(i)) for i in range(count)]


def pairs_in(batch: Batch) -> list[Pair]:
    """Returns the pairs of a batch, without EOS; rows of length 0 are none."""
    pairs = []
    for row in range(len(batch.source)):
        n, m = int(batch.source_length[row]), int(batch.target_length[row])
        assert (n == 0) == (m == 0)
        if n:
            source = batch.source[row, :n].tolist()
            target = batch.target_out[row, :m].tolist()
            assert source.pop() == EOS_ID == target.pop()
            pairs.append((tuple(source), tuple(target)))
    return pairs


def shape_of(batch: Batch) -> Shape:
    rows, source = batch.source.shape
    return Shape(rows, source, batch.target_in.shape[1])


def epoch_of(batches: Batches, epoch: int) -> list[Batch]:
    count = batches.batches_per_epoch
    return [batches.batch(epoch * count + i) for i in range(count)]


def equal(one: Batch, other: Batch) -> bool:
    pairs: Any = zip(one, other, strict=True)  # without segments both are None
    return all(np.array_equal(a, b) for a, b in pairs)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TokenizedCorpus:
    return write_corpus(tmp_path_factory.mktemp("data") / "train", random_pairs(0, 50))


@pytest.mark.parametrize("size", [*range(1, 20), 33, 50])
def test_every_pair_comes_exactly_once_an_epoch(
    tmp_path: pathlib.Path, size: int
) -> None:
    partial = 0
    for seed in range(3):
        pairs = random_pairs(seed, size)
        corpus = write_corpus(tmp_path / str(seed), pairs)
        batches = TrainBatches(corpus, CONFIG, seed)
        for epoch in (0, 1, 7):
            found = epoch_of(batches, epoch)
            seen = [pair for batch in found for pair in pairs_in(batch)]
            assert sorted(seen) == sorted(pairs)
            assert all(pairs_in(batch) for batch in found)  # none of filling only
            partial += sum(len(pairs_in(b)) < len(b.source) for b in found)
            shapes = {shape_of(b) for b in found}
            assert shapes <= set(batches.shapes) and len(shapes) <= CONFIG.buckets
    assert partial


def test_shares_of_padding_and_batches_are_what_they_say(
    corpus: TokenizedCorpus,
) -> None:
    batches = TrainBatches(corpus, CONFIG, 0)
    found = epoch_of(batches, 0)
    places = sum(b.source.size + b.target_in.size for b in found)
    real = sum(int(b.source_length.sum() + b.target_length.sum()) for b in found)
    assert batches.padding == pytest.approx(1 - real / places)
    assert 0 < batches.padding < 0.7


def test_order_depends_on_seed_epoch_and_position_only(
    corpus: TokenizedCorpus,
) -> None:
    straight = TrainBatches(corpus, CONFIG, 5)
    numbers = list(range(3 * straight.batches_per_epoch))
    expected = [straight.batch(n) for n in numbers]
    # Asked in another order, by another object, as after a restart.
    jumping = TrainBatches(corpus, CONFIG, 5)
    for n in np.random.default_rng(0).permutation(numbers).tolist():
        assert equal(jumping.batch(n), expected[n])
    other = TrainBatches(corpus, CONFIG, 6)
    assert not all(equal(other.batch(n), expected[n]) for n in numbers)


@pytest.mark.parametrize("seed", range(4))
def test_epochs_differ_in_members_and_in_order(
    corpus: TokenizedCorpus, seed: int
) -> None:
    batches = TrainBatches(corpus, CONFIG, seed)
    orders = [[pairs_in(b) for b in epoch_of(batches, epoch)] for epoch in range(3)]
    members = [{frozenset(batch) for batch in order} for order in orders]
    shapes = [[b.source.shape for b in epoch_of(batches, e)] for e in range(3)]
    for one, other in itertools.combinations(range(3), 2):
        assert orders[one] != orders[other]
        assert members[one] != members[other]  # other pairs together
        assert Counter(shapes[one]) == Counter(shapes[other])
    assert not shapes[0] == shapes[1] == shapes[2]  # not from short to long


def test_first_batches_do_not_favour_a_length(corpus: TokenizedCorpus) -> None:
    first = Counter(
        TrainBatches(corpus, CONFIG, seed).batch(0).source.shape for seed in range(40)
    )
    assert len(first) == len(TrainBatches(corpus, CONFIG, 0).shapes)


@pytest.mark.parametrize("start", [0, 1, 11, 100])
def test_reading_from_a_batch_on_equals_asking_for_each(
    corpus: TokenizedCorpus, start: int
) -> None:
    batches = TrainBatches(corpus, CONFIG, 1)
    count = 2 * batches.batches_per_epoch + PREFETCH
    ahead = batches.from_batch(start)
    for i, batch in enumerate(itertools.islice(ahead, count)):
        assert equal(batch, batches.batch(start + i))


def test_reading_ahead_stops_with_its_reader(corpus: TokenizedCorpus) -> None:
    made = []

    class Counted(TrainBatches):
        def batch(self, number: int) -> Batch:
            made.append(number)
            return super().batch(number)

    ahead = Counted(corpus, CONFIG, 1).from_batch(3)
    next(ahead)
    ahead.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert made == list(range(3, 3 + len(made))) and len(made) <= PREFETCH + 1


def test_an_error_while_reading_ahead_reaches_the_reader(
    corpus: TokenizedCorpus,
) -> None:
    class Broken(TrainBatches):
        def batch(self, number: int) -> Batch:
            raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        next(Broken(corpus, CONFIG, 1).from_batch(0))


def test_a_sentence_longer_than_the_budget_is_refused(corpus: TokenizedCorpus) -> None:
    longest = int(corpus.lengths().max())
    fits = BatchConfig(tokens=2 * longest, buckets=3, row_multiple=2)
    assert TrainBatches(corpus, fits, 0).batches_per_epoch
    short = BatchConfig(tokens=2 * longest - 1, buckets=3, row_multiple=2)
    with pytest.raises(ConfigError, match=rf"set it to {2 * longest} or more"):
        TrainBatches(corpus, short, 0)


def test_a_shape_takes_in_other_pairs_each_epoch(tmp_path: pathlib.Path) -> None:
    """13 short pairs, batches of 10: three go to the large shape, others each time."""
    pairs: list[Pair] = [((100 + i,) * 3, (5, 6, 7)) for i in range(13)]
    pairs += [((200 + i,) * 6, (5,) * 6) for i in range(7)]
    corpus = write_corpus(tmp_path / "train", pairs)
    shapes = [Shape(10, 4, 4), Shape(10, 7, 7)]
    batches = TrainBatches(corpus, CONFIG, 0, shapes)
    assert batches.batches_per_epoch == 2
    assert batches.padding == pytest.approx(1 - (13 * 8 + 7 * 14) / (10 * (8 + 14)))
    moved, places = set(), set()
    for epoch in range(20):
        for batch in epoch_of(batches, epoch):
            found = pairs_in(batch)
            assert len(found) == 10
            if shape_of(batch) == shapes[1]:
                short = [i for i, pair in enumerate(found) if len(pair[0]) == 3]
                assert len(short) == 3
                places |= set(short)
                moved |= {found[i][0][0] for i in short}
    assert len(moved) == 13 and len(places) == 10  # any pair, in any row


def test_shapes_are_kept_and_read_again(tmp_path: pathlib.Path) -> None:
    assert read_shapes(tmp_path) is None
    shapes = [Shape(8, 3, 4), Shape(16, 5, 6)]
    write_shapes(tmp_path, shapes)
    assert read_shapes(tmp_path) == shapes
    (tmp_path / "shapes.json").write_text("[[1, 2]]")
    with pytest.raises(DataError, match=r"shapes\.json holds no batch shapes.*restore"):
        read_shapes(tmp_path)


def test_shapes_that_hold_not_all_pairs_are_refused(corpus: TokenizedCorpus) -> None:
    with pytest.raises(DataError, match="do not hold its corpus"):
        TrainBatches(corpus, CONFIG, 0, [Shape(2, 3, 3)])


# --- Validation -----------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 7, 50])
@pytest.mark.parametrize("tokens", [64, 10])
def test_evaluation_has_every_pair_once_whatever_its_length(
    tmp_path: pathlib.Path, corpus: TokenizedCorpus, size: int, tokens: int
) -> None:
    shapes = TrainBatches(corpus, CONFIG, 0).shapes
    longest = int(corpus.lengths().max())
    pairs = random_pairs(1, size, longest=40)
    pairs[0] = ((7,) * (3 * longest), (8, 9))  # longer than every shape of training
    pairs += [((6,), (8,) * (2 * longest)), ((), ()), ((5,), ())]
    found = list(eval_batches(write_corpus(tmp_path / "e", pairs), shapes, tokens))
    assert sorted(p for b in found for p in pairs_in(b)) == sorted(pairs)
    # One more shape than in training, within the budget where that holds one row.
    used = {shape_of(b) for b in found}
    (more,) = used - set(shapes)
    assert more.source == max(len(p[0]) for p in pairs) + 1
    assert more.rows == max(1, tokens // max(more.source, more.target))


def test_evaluation_of_short_pairs_adds_no_shape(
    tmp_path: pathlib.Path, corpus: TokenizedCorpus
) -> None:
    shapes = TrainBatches(corpus, CONFIG, 0).shapes
    short = write_corpus(tmp_path / "e", [((5,), (6,))] * 3)
    (batch,) = eval_batches(short, shapes, 64)
    assert batch.source.shape == (shapes[0].rows, shapes[0].source)
    assert pairs_in(batch) == [((5,), (6,))] * 3


def test_evaluation_does_not_change_the_shapes_it_is_given(
    tmp_path: pathlib.Path, corpus: TokenizedCorpus
) -> None:
    shapes = TrainBatches(corpus, CONFIG, 0).shapes
    before = list(shapes)
    long = write_corpus(tmp_path / "e", [((5,) * 99, (6,))])
    (one,) = eval_batches(long, shapes, 64)
    (same,) = eval_batches(long, shapes, 64)
    assert shapes == before and equal(one, same)
