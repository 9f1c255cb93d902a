"""The model in float64 NumPy, from the paper's section 3, and what tests share."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.data.batching import Batch
from transformer_jax.model.transformer import Transformer

Params = dict[str, Any]

# All sizes differ, so that no two axes can be taken for one another.
BATCH, SOURCE, TARGET, VOCAB, SOURCE_VOCAB = 3, 7, 8, 17, 13
CONFIG = ModelConfig(
    num_layers=2,
    d_model=10,
    d_ff=15,
    num_heads=4,
    d_k=5,
    d_v=11,
    dropout=0.3,
    max_length=14,
    dtype="float32",
)
# Dropout and several layers are slow to compile; one layer has all there is to see.
ONE_LAYER = dataclasses.replace(CONFIG, num_layers=1)
# Together they have both norms with and without a last one, and both tables shared or
# not with the output tied or not; "foreign" has no default left, positions excepted.
VARIANTS = {
    "paper": CONFIG,
    "learned": dataclasses.replace(
        ONE_LAYER,
        d_model=9,
        positions="learned",
        norm="pre",
        attention_bias=True,
        activation="swish",
        tie_output=False,
        zero_start=True,
    ),
    "bare": dataclasses.replace(
        ONE_LAYER,
        final_norm="on",
        activation="gelu_sigmoid",
        share_embeddings=False,
        output_bias=True,
        embedding_scale=1.0,
        position_layout="halves",
    ),
    "foreign": dataclasses.replace(
        ONE_LAYER,
        norm="pre",
        attention_bias=True,
        decoder_layers=2,
        final_norm="off",
        norm_epsilon=0.02,
        activation="gelu",
        share_embeddings=False,
        tie_output=False,
        output_bias=True,
        embedding_scale=1.7,
        zero_start=True,
        position_layout="halves",
        position_offset=3,
        position_stretch=True,
    ),
}


def ids(seed: int, *shape: int, vocab_size: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).integers(4, vocab_size, shape).astype(np.int32)


LENGTHS = np.asarray([4, SOURCE, 1], np.int32)
SOURCES = ids(0, BATCH, SOURCE, vocab_size=SOURCE_VOCAB)
TARGETS = ids(1, BATCH, TARGET)
PAIRS = Batch(SOURCES, LENGTHS, TARGETS, ids(2, BATCH, TARGET), np.asarray([8, 3, 5]))


def model_of(config: ModelConfig, data_axis: str | None = None) -> Any:
    """Returns the model; its source vocabulary is a smaller one if not shared."""
    return Transformer(config, VOCAB, data_axis, SOURCE_VOCAB)


def shapes_of(config: ModelConfig) -> Params:
    """Returns the tree of parameters as shapes."""
    init = functools.partial(model_of(config).init, jax.random.key(0))
    return nn.unbox(jax.eval_shape(init, SOURCES, LENGTHS, TARGETS))["params"]


def make_params(config: ModelConfig, scale: float = 0.4) -> Params:
    """Returns parameters drawn at random, biases and norms included."""
    rng = np.random.default_rng(2)
    return jax.tree.map(
        lambda x: jnp.asarray(scale * rng.normal(size=x.shape), jnp.float32),
        shapes_of(config),
    )


@functools.cache
def params_of(variant: str) -> Params:
    return make_params(VARIANTS[variant])


@functools.cache
def jitted(config: ModelConfig, method: str = "__call__") -> Callable[..., Any]:
    """Returns a method of the model, compiled, as a function of (params, ...)."""
    model = model_of(config)

    @jax.jit
    def apply(params: Params, *args: Any) -> Any:
        return model.apply({"params": params}, *args, method=method)

    return apply


def logits_of(variant: str, *args: Any) -> np.ndarray:
    return np.asarray(jitted(VARIANTS[variant])(params_of(variant), *args))


# --- The reference: the equations of section 3, in float64 ----------------------

ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "relu": lambda x: np.maximum(0, x),
    "gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: (
        x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
    ),
    "gelu_sigmoid": lambda x: x / (1 + np.exp(-1.702 * x)),
    "swish": lambda x: x / (1 + np.exp(-x)),
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}


def position(config: ModelConfig, row: int) -> np.ndarray:
    """Returns the encoding of one position, entry by entry (section 3.5)."""
    d, encoding = config.d_model, np.zeros(config.d_model)
    for i in range(d // 2):
        exponent = i / (d / 2 - 1) if config.position_stretch else 2 * i / d
        angle = (row + config.position_offset) / 10000**exponent
        halves = config.position_layout == "halves"
        encoding[i if halves else 2 * i] = math.sin(angle)
        encoding[d // 2 + i if halves else 2 * i + 1] = math.cos(angle)
    return encoding


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
        auto = config.norm == "pre"
        self.last_norm = {"auto": auto, "on": True, "off": False}[config.final_norm]

    def table(self, use: str) -> np.ndarray:
        """Returns the table of `encoder`, `decoder` or `output` (section 3.4)."""
        if use == "output" and not self.config.tie_output:
            return self.params["output"]["table"]
        own = use == "encoder" and not self.config.share_embeddings
        return self.params["source_embedding" if own else "embedding"]["table"]

    def embed(self, side: str, tokens: np.ndarray) -> np.ndarray:
        """sqrt(d_model) E[token] + PE, then dropout (sections 3.4, 3.5, 5.4)."""
        config = self.config
        scale = (
            config.embedding_scale if config.embedding_scale else config.d_model**0.5
        )
        x = scale * self.table(side)[tokens]
        if config.zero_start and side == "decoder":
            x[:, 0] = 0
        for t in range(tokens.shape[1]):
            if config.positions == "learned":
                x[:, t] += self.params[side]["positions"]["table"][t]
            else:
                x[:, t] += position(config, t)
        return self.drop(f"{side}/positions/Dropout_0", x)

    def norm(self, p: Params, x: np.ndarray) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        variance = (centred**2).mean(-1, keepdims=True)
        deviation = np.sqrt(variance + self.config.norm_epsilon)
        return p["scale"] * centred / deviation + p["bias"]

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
        activation = ACTIVATIONS[self.config.activation]
        up = activation(x @ p["up"]["kernel"] + p["up"]["bias"])
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
        depth = self.config.num_layers
        if side == "decoder" and self.config.decoder_layers:
            depth = self.config.decoder_layers
        for i in range(depth):
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
        return self.norm(self.params[side]["norm"], x) if self.last_norm else x

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
        bias = self.params["output"]["bias"] if self.config.output_bias else 0
        return x @ self.table("output").T + bias

    def loss(self, batch: Batch, smoothing: float) -> float:
        """The sum over real tokens of -sum_v q(v) log P(v) (section 5.4)."""
        logits = self.logits(batch.source, batch.source_length, batch.target_in)
        total, vocab_size = 0.0, logits.shape[-1]
        for row, length in enumerate(batch.target_length):
            for t in range(length):
                z = logits[row, t] - logits[row, t].max()
                log_probs = z - math.log(np.exp(z).sum())
                q = np.full(vocab_size, smoothing / (vocab_size - 1))
                q[batch.target_out[row, t]] = 1 - smoothing
                total -= q @ log_probs
        return total
