"""Embedding, positions, feed-forward, residual-and-norm, and the two layers (Figure 1).

The legend of the shapes is at the head of `attention.py`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.model.attention import (
    KeysValues,
    MultiHeadAttention,
    matrix_product,
)
from transformer_jax.model.axes import split

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": nn.relu,
    "gelu": lambda x: nn.gelu(x, approximate=False),
    "gelu_tanh": nn.gelu,
    "gelu_sigmoid": lambda x: x * nn.sigmoid(1.702 * x),
    "swish": nn.silu,
    "tanh": jnp.tanh,
    "sigmoid": nn.sigmoid,
}


def sinusoid(length: int, config: ModelConfig) -> np.ndarray:
    """Returns the positional encoding `[length, d_model] float32` (section 3.5).

    `PE[t, 2i] = sin(t / 10000^(2i / d_model))`, `PE[t, 2i + 1]` the cosine, t from 0:
    interleaved as the paper writes it. Fields of `config` give what others have: all
    sines before all cosines, another first t, or the exponent i / (d_model / 2 - 1),
    whose last frequency is 1 / 10000 exactly.
    """
    half = config.d_model // 2
    steps = half - 1 if config.position_stretch else half
    t = config.position_offset + np.arange(length)
    angle = t[:, None] / 10000 ** (np.arange(half) / steps)
    axis = -1 if config.position_layout == "interleaved" else -2
    table = np.stack([np.sin(angle), np.cos(angle)], axis=axis)
    return table.reshape(length, config.d_model).astype(np.float32)


def segment_positions(segment: jax.Array) -> jax.Array:
    """Returns the positions in packed rows, which start anew in each segment.

    Args:
        segment: `[B, T] int32`, numbers of the segments, 0 for padding.

    Returns:
        `[B, T] int32`, 0 at padding.
    """
    place = jnp.arange(segment.shape[1])
    first = jnp.diff(segment, axis=1, prepend=-1) != 0
    start = jax.lax.cummax(jnp.where(first, place, 0), axis=1)
    return jnp.where(segment > 0, place - start, 0)


class Dropout(nn.Module):
    """Dropout whose mask for a row depends on the row's place in the global batch.

    So a batch gets the same masks on one device and split over many. With `data_axis`
    the module runs per device, and its rows follow those of the devices before it.
    """

    rate: float
    data_axis: str | None

    @nn.compact
    def __call__(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        """Zeroes elements of `x [B, ...]` at `rate` and scales the others up.

        `key` is random; None leaves `x` as it is.
        """
        if key is None or self.rate == 0.0:
            return x
        first = jax.lax.axis_index(self.data_axis) * len(x) if self.data_axis else 0
        dropped = round(self.rate * 2**32)
        keep = _random_bits(key, first, x.shape) >= jnp.uint32(dropped)
        return jnp.where(keep, x / (1.0 - self.rate), 0).astype(x.dtype)


# Compiled apart so that it is traced once for all layers of a shape.
@functools.partial(jax.jit, static_argnames="shape")
def _random_bits(
    key: jax.Array, first: jax.Array | int, shape: tuple[int, ...]
) -> jax.Array:
    """Returns `shape uint32`, rows numbered from `first` each drawn by their number.

    JAX's generator draws where a row starts and its stride; the elements are hashed
    from there (lowbias32 of C. Wellons' hash-prospector: each bit of the input turns
    each bit of the result with a probability near 1/2), which takes a fraction of the
    operations of drawing each.
    """
    rows, size = shape[0], math.prod(shape[1:])
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(first + jnp.arange(rows))
    seeds = jax.vmap(lambda key: jax.random.bits(key, (2, 1)))(keys)
    start, stride = seeds[:, 0], seeds[:, 1] | 1
    bits = start + stride * jnp.arange(size, dtype=jnp.uint32)
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x846CA68B)
    return (bits ^ (bits >> 16)).reshape(shape)


def split_key(key: jax.Array | None, count: int) -> list[jax.Array | None]:
    """Returns `count` different keys; no keys out of none."""
    if key is None:
        return [None] * count
    return [jax.random.fold_in(key, i) for i in range(count)]


class Embedding(nn.Module):
    """A table E of embeddings (section 3.4)."""

    config: ModelConfig
    vocab_size: int
    dtype: jnp.dtype

    def setup(self) -> None:
        """Declares the table `[V, D]`, drawn with standard deviation D^-0.5."""
        self.table: jax.Array = vocabulary_table(
            self, self.vocab_size, self.config.d_model
        )

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns sqrt(D) E[tokens], `[B, T, D]`, for `tokens [B, T] int32`."""
        scale = self.config.embedding_scale or self.config.d_model**0.5
        # The whole width of the table is gathered first, not that of every token.
        table = split(self.table, "vocab", None)
        x = (table[tokens] * jnp.float32(scale)).astype(self.dtype)
        return split(x, "batch", None, None)


class Output(nn.Module):
    """What the output product has of its own: a table, a bias, both or neither."""

    config: ModelConfig
    vocab_size: int

    def setup(self) -> None:
        """Declares the table `[V, D]` if it is not tied, and the bias `[V]` if any."""
        if not self.config.tie_output:
            self.table: jax.Array = vocabulary_table(
                self, self.vocab_size, self.config.d_model
            )
        if self.config.output_bias:
            self.bias: Any = self.param(
                "bias",
                nn.with_logical_partitioning(nn.initializers.zeros, ("vocab",)),
                (self.vocab_size,),
            )


def vocabulary_table(module: nn.Module, vocab_size: int, d_model: int) -> Any:
    """Declares the parameter `table` `[V, D]` of `module`."""
    init = nn.with_logical_partitioning(
        nn.initializers.normal(d_model**-0.5), ("vocab", "embed")
    )
    return module.param("table", init, (vocab_size, d_model))


class Positions(nn.Module):
    """Adds position encodings, sinusoidal or learned, and drops out (section 3.5)."""

    config: ModelConfig
    data_axis: str | None

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        key: jax.Array | None,
        index: jax.Array | None = None,
        length: int | None = None,
        packed: jax.Array | None = None,
    ) -> jax.Array:
        """Adds encodings to `x [B, T, D]`.

        Args:
            x: embeddings of positions 0 to T - 1, or, with `index`, of one position.
            key: of dropout, or None for none.
            index: `[] int32`, the position of `x [B, 1, D]` in step-by-step decoding.
            length: with `index`, an upper bound of the positions.
            packed: `[B, T] int32`, the positions in packed rows; learned ones are below
                `max_length`, however long the rows are.

        Raises:
            ValueError: learned positions, and more of them than `max_length`.
        """
        config = self.config
        length = x.shape[1] if length is None else length
        if config.positions == "learned":
            if packed is not None:
                length = min(length, config.max_length)
            if length > config.max_length:
                raise ValueError(
                    f"{length} positions, but model.max_length is {config.max_length}"
                )
            learned: Any = self.param(
                "table",
                nn.with_logical_partitioning(
                    nn.initializers.normal(config.d_model**-0.5), ("position", "embed")
                ),
                (config.max_length, config.d_model),
            )
            table = learned[:length]
        else:
            table = jnp.asarray(sinusoid(length, config))
        if index is not None:
            table = jax.lax.dynamic_slice_in_dim(table, index, 1)
        if packed is not None:
            table = table[packed]
        x = x + table.astype(x.dtype)
        return Dropout(config.dropout, self.data_axis)(x, key)


class FeedForward(nn.Module):
    """FFN(x) = max(0, x W1 + b1) W2 + b2 (section 3.3), or another activation."""

    config: ModelConfig
    dtype: jnp.dtype

    def setup(self) -> None:
        """Declares the two projections with their biases."""
        self.up = self._dense(self.config.d_ff, ("embed", "mlp"))
        self.down = self._dense(self.config.d_model, ("mlp", "embed"))

    def _dense(self, features: int, names: tuple[str, str]) -> nn.Dense:
        return nn.Dense(
            features,
            dtype=self.dtype,
            dot_general=matrix_product,
            kernel_init=nn.with_logical_partitioning(
                nn.initializers.xavier_uniform(), names
            ),
            bias_init=nn.with_logical_partitioning(nn.initializers.zeros, names[1:]),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `x [B, T, D]` to `[B, T, D]`, each position alone."""
        hidden = split(self.up(x), "batch", None, "mlp")
        return self.down(ACTIVATIONS[self.config.activation](hidden))


def layer_norm(
    config: ModelConfig, dtype: jnp.dtype, name: str | None = None
) -> nn.LayerNorm:
    """Returns a LayerNorm over D with scale and bias; its statistics are float32."""
    return nn.LayerNorm(
        epsilon=config.norm_epsilon,
        dtype=dtype,
        scale_init=nn.with_logical_partitioning(nn.initializers.ones, ("embed",)),
        bias_init=nn.with_logical_partitioning(nn.initializers.zeros, ("embed",)),
        name=name,
    )


class Residual(nn.Module):
    """Residual connection, dropout and norm around a sub-layer (section 3.1, 5.4).

    post: LayerNorm(x + Dropout(Sublayer(x))), the paper's;
    pre: x + Dropout(Sublayer(LayerNorm(x))).
    """

    config: ModelConfig
    dtype: jnp.dtype
    data_axis: str | None

    def setup(self) -> None:
        """Declares the norm and the dropout."""
        self.norm = layer_norm(self.config, self.dtype)
        self.dropout = Dropout(self.config.dropout, self.data_axis)

    def __call__(
        self,
        x: jax.Array,
        sublayer: Callable[[jax.Array], jax.Array],
        key: jax.Array | None,
    ) -> jax.Array:
        """Wraps `sublayer` around `x [B, T, D]`; `key` is of dropout."""
        y = sublayer(x if self.config.norm == "post" else self.norm(x))
        y = split(y, "batch", None, None)
        x = x + self.dropout(y, key)
        return self.norm(x) if self.config.norm == "post" else x


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward (Figure 1, left)."""

    config: ModelConfig
    dtype: jnp.dtype
    data_axis: str | None

    def setup(self) -> None:
        """Declares the sub-layers, each with its residual."""
        residual = (self.config, self.dtype, self.data_axis)
        self.self_attention = MultiHeadAttention(self.config, self.dtype)
        self.self_attention_residual = Residual(*residual)
        self.feed_forward = FeedForward(self.config, self.dtype)
        self.feed_forward_residual = Residual(*residual)

    def __call__(
        self, x: jax.Array, key: jax.Array | None, mask: jax.Array
    ) -> jax.Array:
        """Maps `x [B, S, D]` to `[B, S, D]`.

        `key` is of dropout, None for none; `mask [B, 1 or S, S] bool` says what is
        seen.
        """

        def attend(y: jax.Array) -> jax.Array:
            return self.self_attention(y, self.self_attention.project(y), mask)

        keys = split_key(key, 2)
        x = self.self_attention_residual(x, attend, keys[0])
        return self.feed_forward_residual(x, self.feed_forward, keys[1])


class DecoderLayer(nn.Module):
    """Causal self-attention, attention over the encoder's output, feed-forward."""

    config: ModelConfig
    dtype: jnp.dtype
    data_axis: str | None

    def setup(self) -> None:
        """Declares the sub-layers, each with its residual."""
        residual = (self.config, self.dtype, self.data_axis)
        self.self_attention = MultiHeadAttention(self.config, self.dtype)
        self.self_attention_residual = Residual(*residual)
        self.cross_attention = MultiHeadAttention(self.config, self.dtype)
        self.cross_attention_residual = Residual(*residual)
        self.feed_forward = FeedForward(self.config, self.dtype)
        self.feed_forward_residual = Residual(*residual)

    def project_memory(self, memory: jax.Array) -> KeysValues:
        """Returns the cross-attention's keys and values of `memory [B, S, D]`."""
        return self.cross_attention.project(memory)

    def whole(
        self,
        x: jax.Array,
        key: jax.Array | None,
        self_mask: jax.Array,
        source: jax.Array,
        memory_mask: jax.Array,
    ) -> jax.Array:
        """Maps whole targets `x [B, T, D]` to `[B, T, D]`.

        `source [B, S, D]` is the encoder's output; the others are as in `__call__`.
        """
        memory = self.project_memory(source)
        return self(x, key, self_mask, memory, memory_mask)[0]

    def __call__(
        self,
        x: jax.Array,
        key: jax.Array | None,
        self_mask: jax.Array,
        memory: KeysValues,
        memory_mask: jax.Array,
        past: KeysValues | None = None,
        index: jax.Array | None = None,
    ) -> tuple[jax.Array, KeysValues]:
        """Maps whole targets `x [N, T, D]`, or one position of W beams `x [B, W, D]`.

        Args:
            x: `[N, T, D]`; N is a multiple of B, beams of a source being neighbours.
                With `past` `[B, W, D]`, the same position of all beams.
            key: of dropout, or None for none.
            self_mask: `[1 or B, T, T] bool`, with `past` `[B, W, L * W]`.
            memory: of the encoder output, keys `[B, H, K, S]`, values `[B, H, S, E]`.
            memory_mask: `[B, 1 or T, S] bool`.
            past: keys `[B, H, K, L * W]` and values `[B, H, L * W, E]` of all beams,
                those of a position being neighbours.
            index: `[] int32`, the position of `x` in `past`.

        Returns:
            The output, as `x`, and the self-attention's keys and values: those of `x`,
            or `past` with those of `x` written at `index`.
        """
        kv: KeysValues | None = None

        def self_attend(y: jax.Array) -> jax.Array:
            nonlocal kv
            kv = self.self_attention.project(y)
            if past is not None and index is not None:
                at = index * y.shape[1]
                kv = (
                    jax.lax.dynamic_update_slice_in_dim(past[0], kv[0], at, axis=3),
                    jax.lax.dynamic_update_slice_in_dim(past[1], kv[1], at, axis=2),
                )
            return self.self_attention(y, kv, self_mask)

        def cross_attend(y: jax.Array) -> jax.Array:
            # The beams of one source become more queries to one set of keys.
            beams = y.reshape(memory[0].shape[0], -1, y.shape[-1])
            return self.cross_attention(beams, memory, memory_mask).reshape(y.shape)

        keys = split_key(key, 3)
        x = self.self_attention_residual(x, self_attend, keys[0])
        x = self.cross_attention_residual(x, cross_attend, keys[1])
        x = self.feed_forward_residual(x, self.feed_forward, keys[2])
        assert kv is not None
        return x, kv
