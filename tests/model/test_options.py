"""Names of parameters; that every field of the config does something; types."""

import dataclasses
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import equations, types
from reference import (
    CONFIG,
    LENGTHS,
    ONE_LAYER,
    SOURCE_VOCAB,
    SOURCES,
    TARGETS,
    VARIANTS,
    VOCAB,
    Params,
    Reference,
    make_params,
    model_of,
    params_of,
    shapes_of,
)

from transformer_jax import config_check
from transformer_jax.config import Config, ModelConfig
from transformer_jax.model.attention import MultiHeadAttention, attention_weights
from transformer_jax.model.layers import Embedding, FeedForward, Output, layer_norm

BFLOAT16, FLOAT32 = jnp.dtype("bfloat16"), jnp.dtype("float32")


def paths(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(shapes_of(config))
    return {"/".join(key.key for key in path): leaf.shape for path, leaf in leaves}


def test_parameters_are_named_by_the_paper() -> None:
    attention = {
        "query/kernel": (10, 4, 5),
        "key/kernel": (10, 4, 5),
        "value/kernel": (10, 4, 11),
        "output/kernel": (4, 11, 10),
    }
    parts = ("norm/scale", "norm/bias")
    norm = dict.fromkeys(parts, (10,))
    feed_forward = {
        "up/kernel": (10, 15),
        "up/bias": (15,),
        "down/kernel": (15, 10),
        "down/bias": (10,),
    }
    expected: dict[str, tuple[int, ...]] = {"embedding/table": (VOCAB, 10)}
    for side, blocks in (
        ("encoder", ("self_attention",)),
        ("decoder", ("self_attention", "cross_attention")),
    ):
        for i in range(2):
            layer = f"{side}/layer_{i}"
            for block in (*blocks, "feed_forward"):
                shapes = feed_forward if block == "feed_forward" else attention
                expected |= {f"{layer}/{block}/{k}": v for k, v in shapes.items()}
                expected |= {
                    f"{layer}/{block}_residual/{k}": v for k, v in norm.items()
                }
    assert paths(CONFIG) == expected
    # What a field adds, by name.
    last_norms: dict[str, tuple[int, ...]] = {
        f"{side}/{part}": (10,) for side in ("encoder", "decoder") for part in parts
    }
    added: list[tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = [
        ({"norm": "pre"}, last_norms),
        ({"final_norm": "on"}, last_norms),
        ({"share_embeddings": False}, {"source_embedding/table": (SOURCE_VOCAB, 10)}),
        ({"tie_output": False}, {"output/table": (VOCAB, 10)}),
        ({"output_bias": True}, {"output/bias": (VOCAB,)}),
    ]
    for changes, more in added:
        assert paths(dataclasses.replace(CONFIG, **changes)) == expected | more
    assert params_of("paper")["decoder"]["layer_0"]["cross_attention"]["query"]


# --- Every field ----------------------------------------------------------------

# For each field: another value than in ONE_LAYER, and what else must be changed, in
# both models, for the field to have a meaning.
Changes = dict[str, Any]
OTHERS: dict[str, list[tuple[Any, Changes]]] = {
    "num_layers": [(2, {}), (2, {"decoder_layers": 1})],
    "d_model": [(12, {})],
    "d_ff": [(14, {})],
    "num_heads": [(2, {})],
    "d_k": [(3, {})],
    "d_v": [(4, {})],
    "dropout": [(0.1, {})],
    "norm": [
        ("pre", {}),
        ("pre", {"final_norm": "on"}),
        ("pre", {"final_norm": "off"}),
    ],
    "positions": [("learned", {})],
    "attention_bias": [(True, {})],
    "max_length": [(12, {"positions": "learned"})],
    "dtype": [("bfloat16", {})],
    "decoder_layers": [(2, {})],
    "final_norm": [("on", {}), ("off", {"norm": "pre"})],
    "norm_epsilon": [(0.02, {}), (0.02, {"norm": "pre"})],
    "activation": [(name, {}) for name in ("gelu_tanh", "tanh", "sigmoid")],
    "share_embeddings": [(False, {})],
    "tie_output": [(False, {}), (False, {"share_embeddings": False})],
    "output_bias": [(True, {}), (True, {"tie_output": False})],
    "embedding_scale": [(1.7, {})],
    "zero_start": [(True, {})],
    "position_layout": [("halves", {})],
    "position_offset": [(1, {})],
    "position_stretch": [(True, {})],
}
# These leave the parameters as they are, at least in some of the cases above.
NOT_THE_PARAMETERS = {
    "dropout", "norm", "dtype", "norm_epsilon", "activation", "embedding_scale",
    "zero_start", "position_layout", "position_offset", "position_stretch",
}  # fmt: skip


# These make arrays of another size, or more of them. That the computation follows is
# seen by the variants, in which all sizes differ; it is slow to see here.
SIZES = {"num_layers", "d_model", "d_ff", "num_heads", "d_k", "d_v", "max_length"}


def output(config: ModelConfig, params: Params, dropout: bool = False) -> np.ndarray:
    """Returns logits; not compiled, which is quicker for a single call."""
    return np.asarray(
        model_of(config).apply(
            {"params": params},
            *(SOURCES, LENGTHS, TARGETS),
            deterministic=not dropout,
            rngs={"dropout": jax.random.key(3)},
        )
    )


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(ModelConfig)])
def test_every_field_changes_the_model(field: str) -> None:
    """Its parameters or its output, and as the equations say."""
    assert field in OTHERS, f"give another value of {field} in OTHERS"
    only_output = 0
    for value, context in OTHERS[field]:
        base = dataclasses.replace(ONE_LAYER, **context)
        assert getattr(base, field) != value
        config = dataclasses.replace(base, **{field: value})
        assert not config_check.check(Config(model=config))
        params = make_params(config)
        if field in SIZES:
            assert paths(config) != paths(base)
            continue
        found = output(config, params)
        if paths(config) == paths(base):
            only_output += 1
            if field == "dropout":
                np.testing.assert_array_equal(found, output(base, params))
                dropped = output(config, params, True), output(base, params, True)
                assert np.abs(dropped[0] - dropped[1]).max() > 0.1
            else:
                assert np.abs(found - output(base, params)).max() > 2e-4
        if field != "dtype":
            expected = Reference(config, params).logits(SOURCES, LENGTHS, TARGETS)
            error = np.abs(found - expected).max()
            assert error <= 1e-5 * np.abs(expected).max(), context
    assert (only_output > 0) == (field in NOT_THE_PARAMETERS)


def test_initial_values() -> None:
    config = ModelConfig(d_model=64, d_ff=96, num_heads=3, d_k=8, attention_bias=True)
    key = jax.random.key(0)

    def init(module: nn.Module, *args: Any, **kwargs: Any) -> Params:
        return nn.unbox(module.init(key, *args, **kwargs))["params"]

    table = init(Embedding(config, 1000, FLOAT32), TARGETS)["table"]
    assert np.std(table) == pytest.approx(1 / 8, rel=0.02)
    own = dataclasses.replace(config, tie_output=False, output_bias=True)
    own_output = init(Output(own, 1000), method=lambda m: (m.table, m.bias))
    assert np.std(own_output["table"]) == pytest.approx(1 / 8, rel=0.02)
    assert not np.any(own_output["bias"])
    x = jnp.ones((1, 2, 64))
    feed = init(FeedForward(config, FLOAT32), x)
    attention = init(
        MultiHeadAttention(config, FLOAT32),
        x,
        method=lambda m, x: m(x, m.project(x), jnp.ones((1, 2, 2), bool)),
    )
    # Xavier uniform, all heads taken together; half the variance on the way in.
    heads = 64 + 3 * 8
    layers = [(feed["up"], 6 / (64 + 96)), (attention["output"], 6 / (64 + 3 * 64))]
    layers += [(attention[name], 3 / heads) for name in ("query", "key")]
    for layer, square in [*layers, (attention["value"], 3 / (64 + 3 * 64))]:
        bound = math.sqrt(square)
        assert 0.97 * bound < np.abs(layer["kernel"]).max() <= bound
        assert not np.any(layer["bias"])
    norm = init(layer_norm(config, FLOAT32), x)
    assert np.all(norm["scale"] == 1) and not np.any(norm["bias"])


# --- bfloat16 -------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["paper", "bare"])
def test_bfloat16_computes_softmax_norms_and_logits_in_float32(variant: str) -> None:
    config = dataclasses.replace(VARIANTS[variant], dtype="bfloat16")
    model, params = model_of(config), params_of(variant)
    assert {x.dtype for x in jax.tree.leaves(shapes_of(config))} == {FLOAT32}

    def whole(params: Params) -> Any:
        return model.apply({"params": params}, SOURCES, LENGTHS, TARGETS)

    def steps(params: Params) -> Any:
        variables = {"params": params}
        memory = model.apply(variables, SOURCES, LENGTHS, method="encode")
        cache = model.init_cache(memory, 2, 3)
        assert cache.past[0][0].dtype == BFLOAT16
        tokens = TARGETS[:, :2].reshape(-1)
        return model.apply(variables, tokens, cache, method="decode_step")

    attentions = 3 * config.num_layers
    for function in (whole, steps):
        jaxpr, shape = jax.make_jaxpr(function, return_shape=True)(params)
        logits = shape if function is whole else shape[0]
        assert logits.dtype == FLOAT32
        for primitive in ("exp", "div", "rsqrt"):
            assert types(jaxpr.jaxpr, primitive) == {FLOAT32}, primitive
        products = [
            e for e in equations(jaxpr.jaxpr) if e.primitive.name == "dot_general"
        ]
        inputs = {v.aval.dtype for e in products for v in e.invars}
        assert inputs == {BFLOAT16}  # so the option is no mere word
        # The logits and each attention's scores come out in float32 at once.
        exact = [e for e in products if e.outvars[0].aval.dtype == FLOAT32]
        assert len(exact) == 1 + attentions


def test_bfloat16_is_near_float32() -> None:
    params = make_params(ONE_LAYER)
    found = output(dataclasses.replace(ONE_LAYER, dtype="bfloat16"), params)
    difference = np.abs(found - output(ONE_LAYER, params))
    assert 1e-3 < difference.max() < 0.15
    assert difference.mean() < 0.02


def test_large_scores_do_not_overflow() -> None:
    table = jnp.full((1, 2, 1, 4), 1e18, jnp.bfloat16)
    keys = table.transpose(0, 2, 3, 1)
    weights = attention_weights(table, keys, jnp.ones((1, 2, 2), bool))
    np.testing.assert_allclose(weights, 0.5)


def test_activations_beyond_float16_stay_finite() -> None:
    """Feed-forward outputs of 1e6 and more; the norm after them brings them back."""
    config = dataclasses.replace(ONE_LAYER, dtype="bfloat16")
    params = make_params(ONE_LAYER)
    for side in ("encoder", "decoder"):
        for part in ("up", "down"):
            projection = params[side]["layer_0"]["feed_forward"][part]
            projection["kernel"] = 1000 * projection["kernel"]
    sizes: list[float] = []

    class Measuring(Reference):
        def feed_forward(self, p: Params, x: np.ndarray) -> np.ndarray:
            sizes.append(np.abs(y := super().feed_forward(p, x)).max())
            return y

    expected = Measuring(ONE_LAYER, params).logits(SOURCES, LENGTHS, TARGETS)
    assert max(sizes) > 1e6 > 65504
    found = output(config, params)
    assert np.abs(found - expected).max() < 0.1 * np.abs(expected).max()
