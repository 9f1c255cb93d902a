"""Batches and their shapes: the docstring's example, and what holds for any corpus."""

import dataclasses
import itertools
import re

import numpy as np
import pytest

from transformer_jax.config import BatchConfig
from transformer_jax.data.batching import (
    Shape,
    Share,
    assign,
    choose_shapes,
    make_batch,
    pad,
    share_out,
)
from transformer_jax.data.tokenizer import BOS_ID, EOS_ID, PAD_ID
from transformer_jax.errors import ConfigError


def test_target_is_shifted_right_as_in_the_docstring() -> None:
    batch = make_batch([np.asarray([5, 6, 9])], [np.asarray([7, 8])], Shape(1, 5, 4))
    assert batch.target_in.tolist() == [[BOS_ID, 7, 8, PAD_ID]]
    assert batch.target_out.tolist() == [[7, 8, EOS_ID, PAD_ID]]
    assert batch.target_length.tolist() == [3]
    assert batch.source.tolist() == [[5, 6, 9, EOS_ID, PAD_ID]]
    assert batch.source_length.tolist() == [4]


def test_rows_that_only_fill_have_length_0() -> None:
    # Ids as the memory map gives them, in their narrow type.
    sources = [np.asarray(ids, np.uint8) for ids in ([5], [200, 201])]
    targets = [np.asarray(ids, np.uint8) for ids in ([], [255])]
    batch = make_batch(sources, targets, Shape(4, 3, 3))
    assert batch.source.tolist() == [[5, 1, 0], [200, 201, 1], [0] * 3, [0] * 3]
    assert batch.source_length.tolist() == [2, 3, 0, 0]
    assert batch.target_in.tolist() == [[3, 0, 0], [3, 255, 0], [0] * 3, [0] * 3]
    assert batch.target_out.tolist() == [[1, 0, 0], [255, 1, 0], [0] * 3, [0] * 3]
    assert batch.target_length.tolist() == [1, 2, 0, 0]
    assert all(array.dtype == np.int32 for array in batch[:5])


def test_batches_hold_their_pairs_whatever_the_sizes() -> None:
    rng = np.random.default_rng(0)
    for rows in range(1, 20):
        count = int(rng.integers(1, rows + 1))
        lengths = rng.integers(0, 9, (count, 2))
        sides = [[rng.integers(4, 99, n) for n in side] for side in lengths.T]
        batch = make_batch(sides[0], sides[1], Shape(rows, 10, 9))
        for i in range(count):
            source, target = (side[i].tolist() for side in sides)
            n, m = batch.source_length[i], batch.target_length[i]
            assert batch.source[i, :n].tolist() == [*source, EOS_ID]
            assert batch.target_out[i, :m].tolist() == [*target, EOS_ID]
            assert batch.target_in[i, :m].tolist() == [BOS_ID, *target]
            assert not batch.source[i, n:].any() and not batch.target_in[i, m:].any()
            assert not batch.target_out[i, m:].any()
        assert not any(array[count:].any() for array in batch[:5])


def test_what_does_not_fit_is_an_error_not_cut() -> None:
    with pytest.raises(ValueError):
        make_batch([np.asarray([5, 6])], [np.asarray([7])], Shape(1, 2, 2))
    with pytest.raises(ValueError):
        pad([np.arange(3)], 1, 2)


def random_lengths(seed: int, pairs: int) -> np.ndarray:
    """Returns lengths as a corpus has them: both sides alike, a few very long."""
    rng = np.random.default_rng(seed)
    source = rng.gamma(2.0, 6.0, pairs)
    target = source * rng.uniform(0.5, 1.6, pairs)
    return np.stack([source, target], axis=1).astype(np.int64).clip(0, 90) + 1


def padded(lengths: np.ndarray, shapes: list[Shape]) -> int:
    """Returns the padded tokens of all pairs, each in its shape."""
    return sum(
        shapes[i].source + shapes[i].target for i in assign(lengths, shapes).tolist()
    )


def batches_of(shapes: list[Shape], shares: list[Share]) -> list[int]:
    """Returns the number of batches of each shape in an epoch."""
    both = zip(shapes, shares, strict=True)
    return [-(-share.kept // shape.rows) for shape, share in both]


def shared(lengths: np.ndarray, shapes: list[Shape]) -> tuple[list[Share], int]:
    """Returns the shares of an epoch and its padded tokens, empty rows included."""
    pairs = np.bincount(assign(lengths, shapes), minlength=len(shapes)).tolist()
    shares = share_out(shapes, pairs)
    batches = batches_of(shapes, shares)
    places = sum(
        n * shape.rows * shape.width for n, shape in zip(batches, shapes, strict=True)
    )
    return shares, places


@pytest.mark.parametrize("seed", range(20))
def test_shapes_hold_every_pair_within_the_budget(seed: int) -> None:
    lengths = random_lengths(seed, 1 + 7 * seed**2)
    paddings = []
    for buckets in (1, 2, 5, 8):
        config = BatchConfig(tokens=800 + seed, buckets=buckets, row_multiple=8)
        shapes = choose_shapes(lengths, config)
        assert 1 <= len(shapes) <= buckets and len(set(shapes)) == len(shapes)
        index = assign(lengths, shapes)
        assert index.max() < len(shapes)  # so every pair has one
        for i, (source, target) in zip(index, lengths, strict=True):
            assert source <= shapes[i].source and target <= shapes[i].target
        for i, shape in enumerate(shapes):
            assert shape.rows >= 8 and shape.rows % 8 == 0
            assert shape.rows * max(shape.source, shape.target) <= config.tokens
            # No wider than the pairs need.
            assert tuple(lengths[index == i].max(axis=0)) == shape[1:]
        sizes = [shape.width for shape in shapes]
        assert sizes == sorted(sizes)
        paddings.append(shared(lengths, shapes)[1])
    if len(lengths) > 100:  # more shapes, less padding
        assert paddings == sorted(paddings, reverse=True)


@pytest.mark.parametrize("seed", range(6))
def test_no_shape_is_better_elsewhere(seed: int) -> None:
    """Each shape but the largest is moved to every other place of a small plane."""
    lengths = random_lengths(seed, 300).clip(1, 14)
    chosen = choose_shapes(lengths, BatchConfig(tokens=600, buckets=4, row_multiple=1))
    cost = padded(lengths, chosen)
    top = tuple(lengths.max(axis=0))
    for i, shape in enumerate(chosen):
        if shape[1:] == top:
            continue
        for source, target in itertools.product(range(1, 15), repeat=2):
            moved = [*chosen[:i], Shape(1, source, target), *chosen[i + 1 :]]
            moved.sort(key=lambda shape: shape.width)
            if (assign(lengths, moved) < len(moved)).all():
                assert padded(lengths, moved) >= cost


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("tokens", [400, 2000, 20_000])
def test_few_rows_stay_empty_and_updates_are_no_smaller(seed: int, tokens: int) -> None:
    lengths = random_lengths(seed, 3000)
    shapes = choose_shapes(lengths, BatchConfig(tokens, buckets=10, row_multiple=4))
    shares, places = shared(lengths, shapes)
    assert sum(share.kept for share in shares) == len(lengths)
    assert 0 <= places / padded(lengths, shapes) - 1 < 0.02
    # Nearly no more batches than if every pair stayed and all rows were used.
    full = [tokens // max(s.source, s.target) // 4 * 4 for s in shapes]
    pairs = np.bincount(assign(lengths, shapes)).tolist()
    most = [-(-n // rows) for n, rows in zip(pairs, full, strict=True)]
    batches = batches_of(shapes, shares)
    assert all(batches) and sum(batches) <= 1.1 * sum(most)


def test_pairs_left_over_move_where_that_costs_less() -> None:
    small, tall, large = Shape(10, 4, 4), Shape(10, 3, 9), Shape(10, 9, 9)
    shapes = [small, tall, large]
    # 4 pairs more take 72 places in the large shape, 80 in a batch of their own.
    assert share_out(shapes, [14, 1, 10]) == [(10, 2), (0, 2), (15, -1)]
    assert share_out(shapes, [15, 0, 10]) == [(15, 2), (0, 2), (10, -1)]
    # The first that holds all of it; `tall` is smaller, but not in its source.
    assert share_out([small, tall], [14, 7]) == [(14, -1), (7, -1)]
    assert share_out([small, Shape(10, 5, 4), large], [11, 0, 9]) == [
        (10, 1),
        (0, 2),
        (10, -1),
    ]


def test_shapes_of_clear_clusters_are_the_clusters() -> None:
    lengths = np.asarray([(4, 5)] * 50 + [(20, 3)] * 10 + [(6, 30)] * 5 + [(40, 41)])
    config = BatchConfig(tokens=400, buckets=4, row_multiple=2)
    assert choose_shapes(lengths, config) == [
        Shape(50, 4, 5),  # all in one batch; there is room for 80
        Shape(10, 20, 3),
        Shape(6, 6, 30),
        Shape(2, 40, 41),
    ]
    # With fewer, those are joined that lose least.
    config = dataclasses.replace(config, buckets=1)
    assert choose_shapes(lengths, config) == [Shape(8, 40, 41)]
    config = dataclasses.replace(config, buckets=9)
    assert len(choose_shapes(lengths, config)) == 4  # no empty ones


def test_equal_lengths_need_one_shape() -> None:
    config = BatchConfig(tokens=100, buckets=8, row_multiple=8)
    assert choose_shapes(np.full((30, 2), 3), config) == [Shape(32, 3, 3)]


def test_pairs_go_to_the_first_shape_that_holds_them() -> None:
    shapes = [Shape(1, 3, 3), Shape(1, 3, 9), Shape(1, 9, 9)]
    lengths = [(1, 1), (3, 3), (3, 4), (4, 3), (9, 9), (10, 1), (1, 10)]
    index = assign(np.asarray(lengths), shapes)
    assert index.tolist() == [0, 0, 1, 2, 2, 3, 3]


def test_a_budget_without_room_for_the_longest_sentence_says_what_to_set() -> None:
    lengths = np.asarray([(3, 4), (2, 13)])
    config = BatchConfig(tokens=103, buckets=2, row_multiple=8)
    with pytest.raises(ConfigError) as error:
        choose_shapes(lengths, config)
    message = str(error.value)
    assert "\n" not in message
    assert "config.batch.tokens = 103" in message
    assert "13 tokens" in message and "config.batch.row_multiple" in message
    # What it says to set is enough, and no more than enough.
    found = re.search(r"set it to (\d+) or more", message)
    assert found
    need = int(found.group(1))
    assert need == 104
    config = dataclasses.replace(config, tokens=need)
    assert choose_shapes(lengths, config) == [Shape(8, 3, 4), Shape(8, 2, 13)]
