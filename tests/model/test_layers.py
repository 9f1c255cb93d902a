"""Positions, embedding, output, norm, feed-forward and attention, each alone."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import (
    ACTIVATIONS,
    BATCH,
    CONFIG,
    LENGTHS,
    SOURCE,
    SOURCES,
    TARGET,
    TARGETS,
    VARIANTS,
    VOCAB,
    ids,
    model_of,
    params_of,
    position,
)

from transformer_jax import config as configs
from transformer_jax.config import ModelConfig
from transformer_jax.model import layers
from transformer_jax.model.attention import attention_weights, matrix_product
from transformer_jax.model.layers import Embedding, FeedForward, layer_norm, sinusoid
from transformer_jax.model.transformer import output_weights

FLOAT32 = jnp.dtype("float32")

# --- Positions ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("t", "column", "value"),
    [
        (0, 0, 0.0),
        (0, 1, 1.0),
        (0, 510, 0.0),
        (0, 511, 1.0),
        (1, 0, math.sin(1)),
        (1, 1, math.cos(1)),
        (1, 2, math.sin(10000 ** (-2 / 512))),
        (7, 256, math.sin(7 / 100)),  # half-way: 10000^(1/2)
        (7, 257, math.cos(7 / 100)),
        (49, 511, math.cos(49 / 10000 ** (510 / 512))),
    ],
)
def test_sinusoid_at_named_entries(t: int, column: int, value: float) -> None:
    table = sinusoid(50, ModelConfig())
    assert table.shape == (50, 512) and table.dtype == np.float32
    assert table[t, column] == pytest.approx(value, abs=1e-6)


def test_sinusoid_of_more_positions_starts_the_same() -> None:
    np.testing.assert_array_equal(sinusoid(5, CONFIG), sinusoid(9, CONFIG)[:5])


@pytest.mark.parametrize("layout", ["interleaved", "halves"])
@pytest.mark.parametrize("offset", [0, 1, 6])
@pytest.mark.parametrize("stretch", [False, True])
def test_sinusoid_of_other_toolkits(layout: str, offset: int, stretch: bool) -> None:
    config = ModelConfig(
        d_model=14,
        position_layout=layout,
        position_offset=offset,
        position_stretch=stretch,
    )
    found = sinusoid(29, config)
    expected = [position(config, row) for row in range(29)]
    np.testing.assert_allclose(found, expected, atol=1e-7)
    # Named entries: the first sine is of t, the last cosine of t by its frequency.
    last = 10000.0 ** (-1 if stretch else -12 / 14)
    for row in (0, 28):
        t = row + offset
        assert found[row, 0] == pytest.approx(math.sin(t), abs=1e-6)
        cosine = 7 if layout == "halves" else 1
        assert found[row, cosine] == pytest.approx(math.cos(t), abs=1e-6)
        assert found[row, 13] == pytest.approx(math.cos(t * last), abs=1e-6)


def test_learned_positions_have_a_limit_and_say_so() -> None:
    with pytest.raises(ValueError, match=r"15 positions, but model\.max_length is 14"):
        jax.eval_shape(
            model_of(VARIANTS["learned"]).init,
            jax.random.key(0),
            ids(0, 1, 15),
            np.asarray([15]),
            ids(0, 1, 2),
        )


# --- Embedding and output -------------------------------------------------------


@pytest.mark.parametrize(("scale", "factor"), [(0.0, 3.0), (1.0, 1.0), (0.7, 0.7)])
def test_embedding_scales_on_the_way_in_only(scale: float, factor: float) -> None:
    config = dataclasses.replace(CONFIG, d_model=9, embedding_scale=scale)
    table = jnp.asarray(np.random.default_rng(0).normal(size=(5, 9)), jnp.float32)
    embedding: Any = Embedding(config, 5, FLOAT32)
    variables = {"params": {"table": table}}
    tokens = jnp.asarray([[4, 0]])
    found = embedding.apply(variables, tokens)
    np.testing.assert_allclose(found, factor * table[tokens], rtol=1e-6)

    # Towards the output the table is taken as it is.
    table = jnp.asarray(np.random.default_rng(1).normal(size=(VOCAB, 9)), jnp.float32)
    x = jnp.asarray(np.random.default_rng(2).normal(size=(1, 2, 9)), jnp.float32)
    variables = {"params": {"embedding": {"table": table}}}
    logits = model_of(config).apply(variables, x, method="logits")
    np.testing.assert_allclose(logits, x @ table.T, atol=1e-5)


def test_output_weights_are_those_of_the_output() -> None:
    """Of each variant: shared and tied, tied to the target's, or its own; a bias."""
    expected = {
        "paper": ("embedding", False),
        "learned": ("output", False),
        "bare": ("embedding", True),
        "foreign": ("output", True),
    }
    for variant in VARIANTS:
        params = params_of(variant)
        table, bias = output_weights(params)
        name, has_bias = expected[variant]
        assert table is params[name]["table"], variant
        assert (bias is not None) == has_bias, variant
        if has_bias:
            assert bias is params["output"]["bias"], variant


# --- Norm and feed-forward ------------------------------------------------------


@pytest.mark.parametrize("epsilon", [1e-6, 3e-6])
def test_layer_norm_adds_epsilon_to_the_variance(epsilon: float) -> None:
    assert ModelConfig().norm_epsilon == 1e-6  # of the paper's code
    x = 1e-3 * jnp.asarray([[-1.0, 1.0, 3.0, -3.0]])  # variance 5e-6
    config = dataclasses.replace(CONFIG, norm_epsilon=epsilon)
    norm: Any = layer_norm(config, FLOAT32)
    weights = {"scale": jnp.asarray([1.0, 2.0, 1.0, 1.0]), "bias": jnp.ones(4)}
    expected = np.asarray([-1, 2, 3, -3]) / math.sqrt(5 + 1e6 * epsilon) + 1
    found = norm.apply({"params": weights}, x)
    np.testing.assert_allclose(found[0], expected, rtol=1e-4)


@pytest.mark.parametrize("activation", configs.ACTIVATIONS)
def test_feed_forward_has_the_activation(activation: str) -> None:
    """Weights of one, so that what goes in and comes out is the function itself."""
    config = dataclasses.replace(CONFIG, d_model=3, d_ff=3, activation=activation)
    one = {"kernel": jnp.eye(3), "bias": jnp.zeros(3)}
    module: Any = FeedForward(config, FLOAT32)
    x = np.linspace(-9, 9, 3 * 61).reshape(1, 61, 3)
    found = module.apply({"params": {"up": one, "down": one}}, jnp.asarray(x))
    expected = ACTIVATIONS[activation](x)
    np.testing.assert_allclose(found, expected, atol=2e-6)
    # No other one is as near: the three kinds of GELU differ by 5e-4 and more.
    for name, function in ACTIVATIONS.items():
        other = np.abs(found - function(x)).max()
        assert other > 4e-4 or name == activation, name


def test_every_activation_has_its_equation() -> None:
    assert set(configs.ACTIVATIONS) == set(layers.ACTIVATIONS) == set(ACTIVATIONS)


# --- Attention alone ------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "kernel", "axes"),
    [((2, 3, 4), (4, 5), 1), ((2, 3, 4), (4, 5, 6), 1), ((2, 3, 4, 5), (4, 5, 6), 2)],
)
def test_products_of_layers_are_tensor_contractions(
    x: tuple[int, ...], kernel: tuple[int, ...], axes: int
) -> None:
    rng = np.random.default_rng(0)
    inputs, weights = rng.normal(size=x), rng.normal(size=kernel)
    dimensions = (tuple(range(len(x) - axes, len(x))), tuple(range(axes))), ((), ())
    y = matrix_product(jnp.asarray(inputs), jnp.asarray(weights), dimensions)
    expected = np.tensordot(inputs, weights, axes)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


def test_attention_weights_are_a_softmax_over_visible_keys() -> None:
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(2, 3, 2, 5)), rng.normal(size=(2, 4, 2, 5))
    mask = rng.random((2, 3, 4)) < 0.5
    mask[0, 0] = [False, True, False, False]
    mask[1, 2] = False  # sees nothing
    turned = key.transpose(0, 2, 3, 1)
    weights = np.asarray(attention_weights(*map(jnp.asarray, (query, turned, mask))))
    assert weights.shape == (2, 2, 3, 4) and weights.dtype == np.float32
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
    np.testing.assert_array_equal(weights[0, :, 0], [[0, 1, 0, 0]] * 2)
    seen = np.broadcast_to(mask[:, None], weights.shape).copy()
    seen[1, :, 2] = True
    assert np.all(weights[~seen] == 0)
    b, h, t = 0, 1, 2
    scores = [query[b, t, h] @ key[b, s, h] / math.sqrt(5) for s in range(4)]
    exps = np.exp(scores) * mask[b, t]
    np.testing.assert_allclose(weights[b, h, t], exps / exps.sum(), atol=1e-6)


def test_sown_weights_are_those_of_every_attention() -> None:
    model = model_of(CONFIG)
    apply = functools.partial(model.apply, mutable=["intermediates"])
    variables = {"params": params_of("paper")}
    _, state = jax.eval_shape(apply, variables, SOURCES, LENGTHS, TARGETS)
    layer = state["intermediates"]["decoder"]["layer_1"]
    (own,), (cross,) = (
        layer[f"{name}_attention"]["weights"] for name in ("self", "cross")
    )
    heads = CONFIG.num_heads
    assert own.shape == (BATCH, heads, TARGET, TARGET)
    assert cross.shape == (BATCH, heads, TARGET, SOURCE)
