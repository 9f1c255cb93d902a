"""The model against a float64 NumPy reference written from the paper's section 3."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.config import ModelConfig
from transformer_jax.model.attention import MultiHeadAttention, attention_weights
from transformer_jax.model.layers import (
    Dropout,
    Embedding,
    FeedForward,
    layer_norm,
    sinusoid,
)
from transformer_jax.model.transformer import Transformer

# All sizes differ, so that no two axes can be taken for one another.
BATCH, SOURCE, TARGET, VOCAB = 3, 8, 7, 17
CONFIG = ModelConfig(
    num_layers=2,
    d_model=10,
    d_ff=13,
    num_heads=3,
    d_k=4,
    d_v=5,
    dropout=0.3,
    max_length=11,
    dtype="float32",
)
# Dropout and several layers are slow to compile; one layer has all there is to see.
ONE_LAYER = dataclasses.replace(CONFIG, num_layers=1)
VARIANTS = {
    "paper": CONFIG,
    "pre": dataclasses.replace(ONE_LAYER, norm="pre"),
    "learned": dataclasses.replace(ONE_LAYER, positions="learned", d_model=9),
    "bias": dataclasses.replace(ONE_LAYER, attention_bias=True),
    "all": dataclasses.replace(
        ONE_LAYER, norm="pre", positions="learned", attention_bias=True
    ),
}
Params = dict[str, Any]


def ids(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(4, VOCAB, shape).astype(np.int32)


LENGTHS = np.asarray([5, SOURCE, 1], np.int32)
SOURCES, TARGETS = ids(0, BATCH, SOURCE), ids(1, BATCH, TARGET)


def make_params(config: ModelConfig, scale: float = 0.4) -> Params:
    """Returns parameters drawn at random, biases and norms included."""
    model: Any = Transformer(config, VOCAB)
    init = functools.partial(model.init, jax.random.key(0))
    shapes = nn.unbox(jax.eval_shape(init, SOURCES, LENGTHS, TARGETS))["params"]
    rng = np.random.default_rng(2)
    return jax.tree.map(
        lambda x: jnp.asarray(scale * rng.normal(size=x.shape), jnp.float32), shapes
    )


@functools.cache
def params_of(variant: str) -> Params:
    return make_params(VARIANTS[variant])


@functools.cache
def jitted(config: ModelConfig, method: str = "__call__") -> Callable[..., Any]:
    """Returns a method of the model, compiled, as a function of (params, ...)."""
    model: Any = Transformer(config, VOCAB)

    @jax.jit
    def apply(params: Params, *args: Any) -> Any:
        return model.apply({"params": params}, *args, method=method)

    return apply


def logits_of(variant: str, *args: Any) -> np.ndarray:
    return np.asarray(jitted(VARIANTS[variant])(params_of(variant), *args))


# --- The reference: the equations of section 3, in float64 ----------------------


class Reference:
    """Section 3 in NumPy; `drop(path, x)` is dropout at the module of that path."""

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        drop: Callable[[str, np.ndarray], np.ndarray] = lambda path, x: x,
    ) -> None:
        self.config, self.drop = config, drop
        self.params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

    def embed(self, side: str, tokens: np.ndarray) -> np.ndarray:
        """sqrt(d_model) E[token] + PE, then dropout (sections 3.4, 3.5, 5.4)."""
        d = self.config.d_model
        x = math.sqrt(d) * self.params["embedding"]["table"][tokens]
        for t in range(tokens.shape[1]):
            if self.config.positions == "learned":
                x[:, t] += self.params[side]["positions"]["table"][t]
                continue
            for i in range(d // 2):
                x[:, t, 2 * i] += math.sin(t / 10000 ** (2 * i / d))
                x[:, t, 2 * i + 1] += math.cos(t / 10000 ** (2 * i / d))
        return self.drop(f"{side}/positions/Dropout_0", x)

    def norm(self, p: Params, x: np.ndarray) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        variance = (centred**2).mean(-1, keepdims=True)
        return p["scale"] * centred / np.sqrt(variance + 1e-6) + p["bias"]

    def attention(
        self, p: Params, x: np.ndarray, memory: np.ndarray, mask: np.ndarray
    ) -> np.ndarray:
        """MultiHead(Q, K, V), head by head (section 3.2); `mask [B, T, S]`."""

        def project(name: str, x: np.ndarray, head: int) -> np.ndarray:
            bias = p[name]["bias"][head] if self.config.attention_bias else 0
            return x @ p[name]["kernel"][:, head] + bias

        bias = p["output"]["bias"] if self.config.attention_bias else 0
        total = np.zeros_like(x) + bias
        for head in range(self.config.num_heads):
            q, k = project("query", x, head), project("key", memory, head)
            scores = q @ np.swapaxes(k, 1, 2) / math.sqrt(self.config.d_k)
            scores = np.where(mask, scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            context = weights @ project("value", memory, head)
            total = total + context @ p["output"]["kernel"][head]
        return total

    def feed_forward(self, p: Params, x: np.ndarray) -> np.ndarray:
        up = np.maximum(0, x @ p["up"]["kernel"] + p["up"]["bias"])
        return up @ p["down"]["kernel"] + p["down"]["bias"]

    def residual(
        self, layer: str, name: str, x: np.ndarray, f: Callable[..., np.ndarray]
    ) -> np.ndarray:
        side, number = layer.split("/")
        p = self.params[side][number][f"{name}_residual"]["norm"]
        path = f"{layer}/{name}_residual/dropout"
        if self.config.norm == "post":
            return self.norm(p, x + self.drop(path, f(x)))
        return x + self.drop(path, f(self.norm(p, x)))

    def stack(
        self,
        side: str,
        x: np.ndarray,
        mask: np.ndarray,
        memory: np.ndarray | None = None,
        memory_mask: np.ndarray | None = None,
    ) -> np.ndarray:
        for i in range(self.config.num_layers):
            layer, p = f"{side}/layer_{i}", self.params[side][f"layer_{i}"]

            def attend(y: np.ndarray, p: Params = p) -> np.ndarray:
                return self.attention(p["self_attention"], y, y, mask)

            def cross(y: np.ndarray, p: Params = p) -> np.ndarray:
                assert memory is not None and memory_mask is not None
                return self.attention(p["cross_attention"], y, memory, memory_mask)

            def feed(y: np.ndarray, p: Params = p) -> np.ndarray:
                return self.feed_forward(p["feed_forward"], y)

            x = self.residual(layer, "self_attention", x, attend)
            if memory is not None:
                x = self.residual(layer, "cross_attention", x, cross)
            x = self.residual(layer, "feed_forward", x, feed)
        if self.config.norm == "pre":
            x = self.norm(self.params[side]["norm"], x)
        return x

    def logits(
        self, source: np.ndarray, lengths: np.ndarray, target_in: np.ndarray
    ) -> np.ndarray:
        positions = np.arange(source.shape[1])
        keys = (positions < lengths[:, None])[:, None, :]
        memory = self.stack("encoder", self.embed("encoder", source), keys)
        later = np.arange(target_in.shape[1])
        causal = (later[:, None] >= later)[None]
        x = self.embed("decoder", target_in)
        x = self.stack("decoder", x, causal, memory, keys)
        return x @ self.params["embedding"]["table"].T


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_the_equations(variant: str) -> None:
    reference = Reference(VARIANTS[variant], params_of(variant))
    expected = reference.logits(SOURCES, LENGTHS, TARGETS)
    found = logits_of(variant, SOURCES, LENGTHS, TARGETS)
    assert found.shape == (BATCH, TARGET, VOCAB) and found.dtype == np.float32
    assert expected.std() > 0.3  # else 1e-4 would say little
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


# --- Positions, embedding, attention alone --------------------------------------


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


def test_learned_positions_have_a_limit_and_say_so() -> None:
    with pytest.raises(ValueError, match=r"12 positions, but model\.max_length is 11"):
        jax.eval_shape(
            Transformer(VARIANTS["learned"], VOCAB).init,
            jax.random.key(0),
            ids(0, 1, 12),
            np.asarray([12]),
            ids(0, 1, 2),
        )


def test_embedding_scales_on_the_way_in_only() -> None:
    table = jnp.asarray(np.random.default_rng(0).normal(size=(5, 9)), jnp.float32)
    embedding: Any = Embedding(5, 9, jnp.dtype("float32"))
    variables = {"params": {"table": table}}
    found = embedding.apply(variables, jnp.asarray([[4, 0]]))
    np.testing.assert_allclose(found, 3 * table[jnp.asarray([[4, 0]])], rtol=1e-6)
    x = jnp.ones((1, 2, 9))
    logits = embedding.apply(variables, x, method="logits")
    expected = np.broadcast_to(table.sum(axis=1), (1, 2, 5))
    np.testing.assert_allclose(logits, expected, rtol=1e-5)


def test_layer_norm_has_the_epsilon_of_the_papers_code() -> None:
    x = 1e-3 * jnp.asarray([[-1.0, 1.0, 3.0, -3.0]])  # variance 5e-6
    norm: Any = layer_norm(CONFIG, jnp.dtype("float32"))
    weights = {"scale": jnp.asarray([1.0, 2.0, 1.0, 1.0]), "bias": jnp.ones(4)}
    expected = np.asarray([-1, 2, 3, -3]) / math.sqrt(5 + 1) + 1
    found = norm.apply({"params": weights}, x)
    np.testing.assert_allclose(found[0], expected, rtol=1e-4)


def test_attention_weights_are_a_softmax_over_visible_keys() -> None:
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(2, 3, 2, 5)), rng.normal(size=(2, 4, 2, 5))
    mask = rng.random((2, 3, 4)) < 0.5
    mask[0, 0] = [False, True, False, False]
    mask[1, 2] = False  # sees nothing
    weights = np.asarray(attention_weights(*map(jnp.asarray, (query, key, mask))))
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
    model: Any = Transformer(CONFIG, VOCAB)
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


def test_a_row_without_tokens_stays_finite() -> None:
    lengths = np.asarray([0, SOURCE, 0], np.int32)
    for variant in ("paper", "pre"):
        assert np.isfinite(logits_of(variant, SOURCES, lengths, TARGETS)).all()


# --- Invariants -----------------------------------------------------------------


def padding_of_sources() -> np.ndarray:
    return np.arange(SOURCE) >= LENGTHS[:, None]


@pytest.mark.parametrize("variant", VARIANTS)
def test_contents_of_padding_change_nothing(variant: str) -> None:
    expected = logits_of(variant, SOURCES, LENGTHS, TARGETS)
    for seed in range(5):
        other = np.where(padding_of_sources(), ids(100 + seed, *SOURCES.shape), SOURCES)
        assert not np.array_equal(other, SOURCES)
        found = logits_of(variant, other, LENGTHS, TARGETS)
        np.testing.assert_array_equal(found, expected)
    # The test can fail: a real token does change the row, and only its row.
    other = SOURCES.copy()
    other[0, 2] = other[0, 2] % (VOCAB - 1) + 1
    changed = logits_of(variant, other, LENGTHS, TARGETS) != expected
    assert changed[0].any() and not changed[1:].any()


@pytest.mark.parametrize("variant", ["bias", "all"])
def test_more_padding_changes_nothing(variant: str) -> None:
    expected = logits_of(variant, SOURCES, LENGTHS, TARGETS)
    source = np.concatenate([SOURCES, ids(3, BATCH, 3)], axis=1)
    target = np.concatenate([TARGETS, ids(4, BATCH, 4)], axis=1)
    found = logits_of(variant, source, LENGTHS, target)[:, :TARGET]
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_later_target_tokens_change_no_earlier_logit(variant: str) -> None:
    expected = logits_of(variant, SOURCES, LENGTHS, TARGETS)
    for t in range(1, TARGET):
        other = TARGETS.copy()
        other[:, t:] = other[:, t:] % (VOCAB - 1) + 1  # every one another id
        found = logits_of(variant, SOURCES, LENGTHS, other)
        np.testing.assert_array_equal(found[:, :t], expected[:, :t])
        assert (found[:, t:] != expected[:, t:]).any(axis=-1).all()


def test_a_row_does_not_depend_on_the_others() -> None:
    expected = logits_of("bias", SOURCES, LENGTHS, TARGETS)
    order = np.asarray([2, 0, 1])
    found = logits_of("bias", SOURCES[order], LENGTHS[order], TARGETS[order])
    np.testing.assert_allclose(found, expected[order], atol=1e-6)
    alone = logits_of("bias", SOURCES[:1], LENGTHS[:1], TARGETS[:1])
    np.testing.assert_allclose(alone, expected[:1], atol=1e-6)


# --- Step by step ---------------------------------------------------------------

BEAMS = 2


@pytest.mark.parametrize("variant", ["paper", "all"])
def test_decode_step_equals_the_teacher_forced_pass(variant: str) -> None:
    config, params = VARIANTS[variant], params_of(variant)
    memory = jitted(config, "encode")(params, SOURCES, LENGTHS)
    targets = ids(5, BATCH * BEAMS, TARGET)
    expected = np.asarray(jitted(config, "decode")(params, targets, memory))
    # Each beam is what it would be as the only target of its source.
    for beam in range(BEAMS):
        one = logits_of(variant, SOURCES, LENGTHS, targets[beam::BEAMS])
        np.testing.assert_allclose(expected[beam::BEAMS], one, atol=1e-5)

    model: Any = Transformer(config, VOCAB)
    cache = model.init_cache(memory, BEAMS, config.max_length)  # more than needed
    step = jitted(config, "decode_step")
    for t in range(TARGET):
        assert int(cache.index) == t
        logits, cache = step(params, targets[:, t], cache)
        assert logits.shape == (BATCH * BEAMS, VOCAB) and logits.dtype == jnp.float32
        np.testing.assert_allclose(logits, expected[:, t], atol=1e-4)
    assert cache.past[0][0].shape == (6, config.max_length, config.num_heads, 4)
    assert cache.past[0][1].shape == (6, config.max_length, config.num_heads, 5)


def test_beams_may_be_reordered_between_steps() -> None:
    params, turn = params_of("paper"), 4
    memory = jitted(CONFIG, "encode")(params, SOURCES, LENGTHS)
    targets = ids(6, BATCH * BEAMS, TARGET)
    parents = np.asarray([1, 0, 2, 2, 5, 5])  # rows stay with their source
    joined = np.concatenate([targets[parents, :turn], targets[:, turn:]], axis=1)
    expected = jitted(CONFIG, "decode")(params, joined, memory)

    cache = Transformer(CONFIG, VOCAB).init_cache(memory, BEAMS, CONFIG.max_length)
    step = jitted(CONFIG, "decode_step")
    for t in range(TARGET):
        if t == turn:
            past = jax.tree.map(lambda x: x[parents], cache.past)
            cache = cache.replace(past=past)
        logits, cache = step(params, targets[:, t], cache)
        if t >= turn:
            np.testing.assert_allclose(logits, expected[:, t], atol=1e-4)


# --- Parameters and options -----------------------------------------------------


def paths(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    model: Any = Transformer(config, VOCAB)
    init = functools.partial(model.init, jax.random.key(0))
    shapes = nn.unbox(jax.eval_shape(init, SOURCES, LENGTHS, TARGETS))["params"]
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    return {"/".join(key.key for key in path): leaf.shape for path, leaf in leaves}


def test_parameters_are_named_by_the_paper() -> None:
    attention = {
        "query/kernel": (10, 3, 4),
        "key/kernel": (10, 3, 4),
        "value/kernel": (10, 3, 5),
        "output/kernel": (3, 5, 10),
    }
    parts = ("norm/scale", "norm/bias")
    norm = dict.fromkeys(parts, (10,))
    feed_forward = {
        "up/kernel": (10, 13),
        "up/bias": (13,),
        "down/kernel": (13, 10),
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
    more = {
        f"{side}/{part}": (10,) for side in ("encoder", "decoder") for part in parts
    }
    assert paths(dataclasses.replace(CONFIG, norm="pre")) == expected | more
    assert params_of("paper")["decoder"]["layer_0"]["cross_attention"]["query"]


# Another value of every field, on top of learned positions, whose table has a length.
OTHER = {
    "num_layers": 2,
    "d_model": 10,
    "d_ff": 14,
    "num_heads": 2,
    "d_k": 3,
    "d_v": 4,
    "dropout": 0.1,
    "norm": "pre",
    "positions": "sinusoidal",
    "attention_bias": True,
    "max_length": 12,
    "dtype": "bfloat16",
}


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(ModelConfig)])
def test_every_option_changes_the_parameters(field: str) -> None:
    config = VARIANTS["learned"]
    if field == "positions":
        config = dataclasses.replace(config, d_model=10)
    changed = paths(dataclasses.replace(config, **{field: OTHER[field]}))
    # These two change what is computed instead, as tests further down say.
    assert (changed == paths(config)) == (field in ("dropout", "dtype"))


def test_initial_values() -> None:
    config = ModelConfig(d_model=64, d_ff=96, num_heads=3, d_k=8, attention_bias=True)
    key, dtype = jax.random.key(0), jnp.dtype("float32")

    def init(module: nn.Module, *args: Any, **kwargs: Any) -> Params:
        return nn.unbox(module.init(key, *args, **kwargs))["params"]

    table = init(Embedding(1000, 64, dtype), TARGETS)["table"]
    assert np.std(table) == pytest.approx(1 / 8, rel=0.02)
    x = jnp.ones((1, 2, 64))
    feed = init(FeedForward(config, dtype), x)
    attention = init(
        MultiHeadAttention(config, dtype), x, method=lambda m, x: m.project(x)
    )
    # Xavier uniform, all heads taken together.
    for layer, fans in ((feed["up"], 64 + 96), (attention["key"], 64 + 3 * 8)):
        bound = math.sqrt(6 / fans)
        assert 0.97 * bound < np.abs(layer["kernel"]).max() <= bound
        assert not np.any(layer["bias"])
    norm = init(layer_norm(dtype), x)
    assert np.all(norm["scale"] == 1) and not np.any(norm["bias"])


# --- bfloat16 -------------------------------------------------------------------


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yields every equation of a jaxpr, those of inner ones included."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def types(jaxpr: Any, primitive: str) -> set[Any]:
    """Returns the types that a primitive is given."""
    found = [e for e in equations(jaxpr) if e.primitive.name == primitive]
    assert found, f"no {primitive} in the jaxpr"
    return {v.aval.dtype for e in found for v in e.invars if hasattr(v, "aval")}


def test_bfloat16_computes_softmax_norms_and_logits_in_float32() -> None:
    config = dataclasses.replace(CONFIG, dtype="bfloat16")
    model: Any = Transformer(config, VOCAB)
    shapes = jax.eval_shape(model.init, jax.random.key(0), SOURCES, LENGTHS, TARGETS)
    assert {x.dtype for x in jax.tree.leaves(shapes)} == {jnp.dtype("float32")}

    def whole(params: Params) -> Any:
        return model.apply({"params": params}, SOURCES, LENGTHS, TARGETS)

    def steps(params: Params) -> Any:
        variables = {"params": params}
        memory = model.apply(variables, SOURCES, LENGTHS, method="encode")
        cache = model.init_cache(memory, BEAMS, 3)
        assert cache.past[0][0].dtype == jnp.bfloat16
        tokens = TARGETS[:, :BEAMS].reshape(-1)
        return model.apply(variables, tokens, cache, method="decode_step")

    for function in (whole, steps):
        jaxpr, shape = jax.make_jaxpr(function, return_shape=True)(params_of("paper"))
        logits = shape if function is whole else shape[0]
        assert logits.dtype == jnp.float32
        for primitive in ("exp", "div", "rsqrt"):
            assert types(jaxpr.jaxpr, primitive) == {jnp.dtype("float32")}, primitive
        products = [
            e for e in equations(jaxpr.jaxpr) if e.primitive.name == "dot_general"
        ]
        inputs = {v.aval.dtype for e in products for v in e.invars}
        assert inputs == {jnp.dtype("bfloat16")}  # so the option is no mere word
        # The logits and each attention's scores come out in float32 at once.
        exact = [e for e in products if e.outvars[0].aval.dtype == jnp.float32]
        assert len(exact) == 1 + 6


def test_bfloat16_is_near_float32() -> None:
    config = dataclasses.replace(VARIANTS["bias"], dtype="bfloat16")
    found = jitted(config)(params_of("bias"), SOURCES, LENGTHS, TARGETS)
    difference = np.abs(found - logits_of("bias", SOURCES, LENGTHS, TARGETS))
    assert 1e-3 < difference.max() < 0.15
    assert difference.mean() < 0.02


def test_large_scores_do_not_overflow() -> None:
    table = jnp.full((1, 2, 1, 4), 1e18, jnp.bfloat16)
    weights = attention_weights(table, table, jnp.ones((1, 2, 2), bool))
    np.testing.assert_allclose(weights, 0.5)


# --- Dropout --------------------------------------------------------------------


ONES = jnp.ones((8, 5, 9))


def drop(
    rate: float, x: Any, seed: int = 0, axis: str | None = None, off: bool = False
) -> jax.Array:
    rngs = {"dropout": jax.random.key(seed)}
    module: Any = Dropout(rate, axis)
    return module.apply({}, x, off, rngs=rngs)


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
    # Neighbours are independent: the two halves of a random word, too.
    flat = kept.reshape(64, -1).astype(float) - (1 - rate)
    both = (flat[:, 1:] * flat[:, :-1]).mean() / (rate * (1 - rate))
    assert abs(both) < 5 / math.sqrt(flat.size)


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
    module: Any = Dropout(0.3, None)
    np.testing.assert_array_equal(module.apply({}, x, True), x)  # and needs no key


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


DROPOUT_BATCH = (ids(8, 4, SOURCE), np.asarray([8, 3, 1, 5]), ids(9, 4, TARGET))


def train_mode(
    config: ModelConfig, data_axis: str | None
) -> Callable[..., tuple[jax.Array, dict[str, jax.Array]]]:
    """Returns a function to logits and what each dropout multiplied with, by path."""
    model: Any = Transformer(config, VOCAB, data_axis)

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
