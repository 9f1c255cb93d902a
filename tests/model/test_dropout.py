"""Dropout alone, and where it stands in the model."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import (
    ONE_LAYER,
    SOURCE,
    TARGET,
    Params,
    Reference,
    ids,
    jitted,
    make_params,
    model_of,
)

from transformer_jax.config import ModelConfig
from transformer_jax.model.layers import Dropout, _random_bits

ONES = jnp.ones((8, 5, 9))


def drop(
    rate: float, x: Any, seed: int = 0, axis: str | None = None, off: bool = False
) -> jax.Array:
    module: Any = Dropout(rate, axis)
    return module.apply({}, x, None if off else jax.random.key(seed))


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.5, 0.9])
def test_dropout_keeps_its_rate_and_its_scale(rate: float) -> None:
    x = jnp.ones((64, 41, 25))  # an odd number of elements a row
    y = np.asarray(drop(rate, x))
    kept = y != 0
    np.testing.assert_allclose(y[kept], 1 / (1 - rate), rtol=2e-4)
    assert len(np.unique(y[kept])) == 1
    error = 5 * math.sqrt(rate * (1 - rate) / y.size)
    assert abs(kept.mean() - (1 - rate)) < error
    # By place in the row and by row, each rate again within its bound.
    for axes, count in (((1, 2), 41 * 25), (0, 64)):
        error = 6 * math.sqrt(rate * (1 - rate) / count)
        assert np.abs(kept.mean(axis=axes) - (1 - rate)).max() < error
    # Neighbours are independent.
    flat = kept.reshape(64, -1).astype(float) - (1 - rate)
    both = (flat[:, 1:] * flat[:, :-1]).mean() / (rate * (1 - rate))
    assert abs(both) < 5 / math.sqrt(flat.size)


@pytest.mark.parametrize("seed", [0, 1])
def test_random_bits_are_even_and_independent(seed: int) -> None:
    """Of every bit, of neighbours a few places apart, of rows, and of keys."""
    shape = (128, 2048)
    one, other = (
        np.asarray(_random_bits(jax.random.fold_in(jax.random.key(seed), i), 0, shape))
        for i in range(2)
    )
    ones = [((one >> bit) & 1).mean() for bit in range(32)]
    assert np.abs(np.asarray(ones) - 0.5).max() < 6 * 0.5 / math.sqrt(one.size)
    # Chi-squared of 256 cells, by the four upper bits of both of a pair.
    lags = [(one[:, :-lag], one[:, lag:]) for lag in (1, 2, 3, 7, 64, 512)]
    rows = [(one[:-lag], one[lag:]) for lag in (1, 2, 64)]
    for a, b in [*lags, *rows, (one, other), (one, one << 16)]:
        cells = np.bincount(((a >> 28) * 16 + (b >> 28)).ravel(), minlength=256)
        expected = a.size / 256
        chi_squared = ((cells - expected) ** 2 / expected).sum()
        assert abs(chi_squared - 255) < 6 * math.sqrt(2 * 255)


def test_dropout_scales_what_is_there() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=ONES.shape), jnp.float32)
    y = drop(0.25, x)
    np.testing.assert_array_equal(y[y != 0], (x / 0.75)[y != 0])
    assert 0 < (y == 0).sum() < x.size
    assert drop(0.25, x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_dropout_without_randomness_is_the_identity() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 7)), jnp.float32)
    np.testing.assert_array_equal(drop(0.3, x, off=True), x)
    np.testing.assert_array_equal(drop(0.0, x), x)


def test_dropout_masks_differ_by_row_and_by_key() -> None:
    masks = [np.asarray(drop(0.5, ONES, seed)) for seed in (0, 1)]
    rows = {row.tobytes() for mask in masks for row in mask}
    assert len(rows) == 2 * len(ONES)
    np.testing.assert_array_equal(drop(0.5, ONES), drop(0.5, ONES))


def test_dropout_of_a_row_does_not_depend_on_the_split() -> None:
    whole = np.asarray(drop(0.4, ONES))
    np.testing.assert_array_equal(drop(0.4, ONES[:3]), whole[:3])
    run = jax.pmap(
        lambda x: drop(0.4, x, axis="data"),
        axis_name="data",
        devices=jax.devices()[:4],
    )
    split = np.asarray(run(ONES.reshape(4, 2, *ONES.shape[1:])))
    np.testing.assert_array_equal(split.reshape(whole.shape), whole)


DROPOUT_BATCH = (ids(8, 4, SOURCE), np.asarray([SOURCE, 3, 1, 5]), ids(9, 4, TARGET))


def train_mode(
    config: ModelConfig, data_axis: str | None
) -> Callable[..., tuple[jax.Array, dict[str, jax.Array]]]:
    """Returns a function to logits and what each dropout multiplied with, by path."""
    model = model_of(config, data_axis)

    def apply(params: Params, *batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        factors: dict[str, jax.Array] = {}

        def spy(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            result = call(*args, **kwargs)
            if isinstance(context.module, Dropout):
                path = "/".join(context.module.path)
                assert path not in factors
                factors[path] = result / args[0]
            return result

        rngs = {"dropout": jax.random.key(7)}
        with nn.intercept_methods(spy):
            logits = model.apply({"params": params}, *batch, False, rngs=rngs)
        return logits, factors

    return apply


@functools.cache
def run_with_dropout(
    norm: str,
) -> tuple[ModelConfig, Params, np.ndarray, dict[str, np.ndarray]]:
    """Returns config, parameters, logits and factors on a single device."""
    config = dataclasses.replace(ONE_LAYER, norm=norm)
    params = make_params(config)
    found = jax.jit(train_mode(config, None))(params, *DROPOUT_BATCH)
    return config, params, *jax.tree.map(np.asarray, found)


def test_training_logits_do_not_depend_on_the_split() -> None:
    config, params, whole, factors = run_with_dropout("post")
    run = jax.pmap(
        train_mode(config, "data"),
        axis_name="data",
        in_axes=(None, 0, 0, 0),
        devices=jax.devices()[:2],
    )
    batch = (x.reshape(2, 2, *x.shape[1:]) for x in DROPOUT_BATCH)
    split_logits, split_factors = run(params, *batch)
    found = np.asarray(split_logits).reshape(whole.shape)
    np.testing.assert_allclose(found, whole, atol=1e-5)
    for path, factor in factors.items():
        kept = np.asarray(split_factors[path]).reshape(factor.shape) > 0
        np.testing.assert_array_equal(kept, factor > 0)
    assert not np.allclose(jitted(config)(params, *DROPOUT_BATCH), whole, atol=0.1)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_dropout_stands_where_the_paper_has_it(norm: str) -> None:
    """After the sum of embedding and position, and on each sub-layer's output."""
    config, params, found, factors = run_with_dropout(norm)
    assert len(factors) == 2 + 2 + 3
    masks = set()
    for factor in factors.values():
        values = np.unique(factor.round(3))
        np.testing.assert_allclose(values, [0, 1 / 0.7], atol=1e-3)
        masks.add((factor[:, : min(SOURCE, TARGET)] > 0).tobytes())
    assert len(masks) == len(factors)  # no two of them the same
    used = set()

    def drop(path: str, x: np.ndarray) -> np.ndarray:
        used.add(path)
        return factors[path] * x

    expected = Reference(config, params, drop).logits(*DROPOUT_BATCH)
    assert used == set(factors)
    np.testing.assert_allclose(found, expected, atol=2e-4)
