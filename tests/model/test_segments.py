"""Packed rows in the model: each pair is as if it were alone in its row."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxprs import equations
from reference import (
    CONFIG,
    ONE_LAYER,
    SOURCE_VOCAB,
    VARIANTS,
    VOCAB,
    Params,
    make_params,
    model_of,
)

from transformer_jax import parallel
from transformer_jax.data.batching import Batch, Shape, make_batch
from transformer_jax.data.packing import pack
from transformer_jax.model.layers import segment_positions
from transformer_jax.train.loss import LossSums
from transformer_jax.train.step import (
    batch_loss,
    first_bad_output,
    init_state,
    model_inputs,
    train_step,
)

SMOOTHING = 0.1
COUNTS = (3, 1, 4, 2, 1)  # pairs of each row; the third fills its row to the last token
PACKED = {
    **VARIANTS,
    "pre": dataclasses.replace(ONE_LAYER, norm="pre"),
    "zero": dataclasses.replace(CONFIG, zero_start=True),
    "learned, post": dataclasses.replace(ONE_LAYER, positions="learned", max_length=9),
}


def pairs() -> tuple[Batch, Batch]:
    """Returns eleven pairs of 1 to 6 tokens a side, alone and packed in 6 rows."""
    rng = np.random.default_rng(7)
    count = sum(COUNTS)

    def ids(vocab_size: int) -> list[np.ndarray]:
        found = [rng.integers(4, vocab_size, n) for n in rng.integers(0, 6, count)]
        return (
            found[:4] + [rng.integers(4, vocab_size, 4) for _ in range(4)] + found[8:]
        )

    alone = make_batch(ids(SOURCE_VOCAB), ids(VOCAB), Shape(count, 9, 9))
    return alone, pack(alone, COUNTS, Shape(6, 20, 20))


ALONE, ROWS = pairs()


@functools.cache
def loss_and_gradients(variant: str) -> Callable[..., tuple[LossSums, Params]]:
    """Returns a function of (params, batch); smoothed, without dropout."""
    model = model_of(PACKED[variant])

    def loss(params: Params, batch: Batch) -> tuple[jax.Array, LossSums]:
        x = model.apply({"params": params}, *model_inputs(batch), method="hidden")
        sums = batch_loss(params, x, batch, SMOOTHING)
        return sums.loss, sums

    @jax.jit
    def run(params: Params, batch: Batch) -> tuple[LossSums, Params]:
        (_, sums), gradients = jax.value_and_grad(loss, has_aux=True)(params, batch)
        return sums, gradients

    return run


@functools.cache
def outputs(variant: str) -> Callable[[Params, Batch], Any]:
    model = model_of(PACKED[variant])
    return jax.jit(
        lambda params, batch: model.apply(
            {"params": params}, *model_inputs(batch), method="hidden"
        )
    )


def test_positions_start_anew_in_each_segment() -> None:
    segment = jnp.asarray([[1, 1, 1, 2, 3, 3, 0, 0], [0] * 8, [1] * 8])
    found = segment_positions(segment)
    assert found.dtype == jnp.int32
    assert found.tolist() == [[0, 1, 2, 0, 0, 1, 0, 0], [0] * 8, list(range(8))]


@pytest.mark.parametrize("variant", PACKED)
def test_loss_and_gradients_are_those_of_the_pairs_alone(variant: str) -> None:
    params = make_params(PACKED[variant])
    run = loss_and_gradients(variant)
    (one, by_one), (other, by_other) = run(params, ALONE), run(params, ROWS)
    assert int(one.tokens) == int(other.tokens) == ALONE.target_length.sum()
    assert int(one.correct) == int(other.correct)
    for name in ("loss", "nll"):
        expected = float(getattr(one, name))
        assert abs(float(getattr(other, name)) / expected - 1) < 1e-5
    scale = float(optax.tree.norm(by_one))
    for a, b in zip(jax.tree.leaves(by_one), jax.tree.leaves(by_other), strict=True):
        assert np.abs(a - b).max() <= 1e-5 * min(scale, 1e-2 * scale + np.abs(a).max())


@pytest.mark.parametrize("variant", ["paper", "learned", "zero"])
def test_each_pair_has_the_output_it_has_alone(variant: str) -> None:
    params = make_params(PACKED[variant])
    alone, packed = (np.asarray(outputs(variant)(params, b)) for b in (ALONE, ROWS))
    pair = 0
    assert ROWS.target_segment is not None
    for row, count in enumerate(COUNTS):
        for number in range(1, count + 1):
            found = packed[row, ROWS.target_segment[row] == number]
            expected = alone[pair, : len(found)]
            assert len(found) == ALONE.target_length[pair]
            np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)
            pair += 1
    assert pair == len(alone)


@pytest.mark.parametrize("variant", ["paper", "learned"])
def test_a_segment_neither_sees_nor_is_seen_by_others(variant: str) -> None:
    """Other tokens in a segment, on either side, change it alone, and not by a bit."""
    params = make_params(PACKED[variant])
    before = np.asarray(outputs(variant)(params, ROWS))
    for side, low, high in (("source", 4, SOURCE_VOCAB), ("target_in", 4, VOCAB)):
        segment = ROWS.source_segment if side == "source" else ROWS.target_segment
        inside = ROWS.target_segment
        assert segment is not None and inside is not None
        tokens = getattr(ROWS, side)
        for number in (1, 2, 4):
            mine = segment == number
            other = np.where(mine, low + (tokens - low + 1) % (high - low), tokens)
            after = outputs(variant)(params, ROWS._replace(**{side: other}))
            same = (np.asarray(after) == before).all(axis=-1)
            assert same[inside != number].all() and not same[inside == number].all()
    # Nor what lies in the padding.
    filled = ROWS._replace(
        source=np.where(ROWS.source_segment == 0, 5, ROWS.source),
        target_in=np.where(ROWS.target_segment == 0, 6, ROWS.target_in),
    )
    same = (np.asarray(outputs(variant)(params, filled)) == before).all(axis=-1)
    assert same[ROWS.target_segment != 0].all()


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize(
    "variant", [pytest.param("pre", marks=pytest.mark.slow), "learned, post"]
)
def test_an_update_is_that_of_the_pairs_alone(monkeypatch, count, variant) -> None:
    """Plain gradient descent, which hides no small difference as Adam would."""
    config = dataclasses.replace(PACKED[variant], dropout=0.0)
    chosen = jax.devices()[:count]
    monkeypatch.setattr(parallel, "devices", lambda: chosen)
    optimizer = optax.sgd(1.0)
    state = jax.device_get(init_state(model_of(config), optimizer, 0))
    fields = {"optimizer": optimizer, "smoothing": SMOOTHING, "seed": 0}

    def step(axis_name: str | None) -> Any:
        model = model_of(config, axis_name)
        return functools.partial(train_step, model=model, axis_name=axis_name, **fields)

    expected, metrics = jax.jit(step(None))(state, ALONE)
    layout = parallel.Replicated()
    over = layout.compile(step(parallel.DATA_AXIS))
    found = over(layout.place(state), layout.split_rows(ROWS))
    found, other = map(layout.fetch, found)
    moved = 0.0
    trees = (expected.params, found.params, state.params)
    for a, b, start in zip(*map(jax.tree.leaves, trees), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
        moved = max(moved, float(np.abs(a - start).max()))
    assert moved > 0.01
    assert abs(float(other.sums.loss) / float(metrics.sums.loss) - 1) < 1e-5


def test_the_module_that_overflows_is_found_in_packed_rows() -> None:
    params = make_params(CONFIG)
    assert first_bad_output(params, ROWS, model_of(CONFIG)) is None


def test_rows_that_are_not_packed_pay_nothing() -> None:
    """No running maximum for positions, and no mask that differs by query."""

    def primitives(batch: Batch) -> set[str]:
        model, params = model_of(CONFIG), make_params(CONFIG)
        run = functools.partial(model.apply, {"params": params}, method="hidden")
        return {e.primitive.name for e in equations(jax.make_jaxpr(run)(*batch).jaxpr)}

    inputs = model_inputs(ROWS)
    assert {"cummax", "eq"} <= primitives(inputs)  # pyright: ignore
    assert not {"cummax", "eq"} & primitives(model_inputs(ALONE))  # pyright: ignore
