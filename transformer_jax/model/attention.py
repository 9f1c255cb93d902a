"""Scaled dot-product and multi-head attention (section 3.2).

Legend of shapes, here and in the rest of `model`: B batch rows, N rows of a decoder
(B, or B times the beams), S source length, T target or query length, D d_model,
H num_heads, K d_k, E d_v, V vocabulary, L positions of a cache.
"""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.config import ModelConfig
from transformer_jax.model.axes import split

# Added nowhere and selected instead: a finite value keeps a row without any visible
# key (a padded batch row) finite, where minus infinity would give NaN.
MASKED = -1e9

KeysValues = tuple[jax.Array, jax.Array]


def attention_weights(query: jax.Array, key: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns softmax(Q K^T / sqrt(d_k)) over the visible keys (equation 1).

    Args:
        query: `[B, T, H, K]`, any float dtype.
        key: `[B, H, K, S]`.
        mask: `[B or 1, T or 1, S] bool`, True where a query may attend.

    Returns:
        `[B, H, T, S] float32`; rows sum to 1.
    """
    scores = jnp.einsum(
        "bthk,bhks->bhts", query, key, preferred_element_type=jnp.float32
    )
    scores = scores / jnp.sqrt(jnp.float32(query.shape[-1]))
    return jax.nn.softmax(jnp.where(mask[:, None], scores, MASKED), axis=-1)


def matrix_product(
    x: jax.Array, kernel: jax.Array, dimensions: Any, **options: Any
) -> jax.Array:
    """Contracts the last axes of `x` with the first ones of `kernel`, as two matrices.

    It takes the place of `dot_general` in a layer: the same sums, and for a gradient a
    CPU's compiler then turns none of its operands around. Elsewhere `dot_general` it
    is: a TPU pads the last two axes, so there another shape may be a copy.
    """
    if jax.default_backend() != "cpu":
        return jax.lax.dot_general(x, kernel, dimensions, **options)
    (contracted, _), _ = dimensions
    kept = x.ndim - len(contracted)
    inner = math.prod(x.shape[kept:])
    y = jnp.matmul(x.reshape(-1, inner), kernel.reshape(inner, -1), **options)
    return y.reshape(*x.shape[:kept], *kernel.shape[len(contracted) :])


class MultiHeadAttention(nn.Module):
    """MultiHead(Q, K, V) = Concat(head_1, ..., head_h) W^O (section 3.2.2).

    d_k and d_v are independent. There is no dropout on the attention weights.
    """

    config: ModelConfig
    dtype: jnp.dtype

    def setup(self) -> None:
        """Declares the four projections W^Q, W^K, W^V and W^O."""
        config = self.config

        def heads(width: int) -> nn.DenseGeneral:
            return self._dense((config.num_heads, width), -1, ("embed", "heads", "kv"))

        self.query = heads(config.d_k)
        self.key = heads(config.d_k)
        self.value = heads(config.d_v)
        self.output = self._dense(config.d_model, (-2, -1), ("heads", "kv", "embed"))

    def _dense(
        self, features: int | tuple[int, ...], axis: int | tuple[int, ...], names: tuple
    ) -> nn.DenseGeneral:
        by_head = isinstance(features, tuple)
        outputs = names[1:] if by_head else names[-1:]
        # Xavier uniform; of W^Q, W^K and W^V with half the variance, as if the three
        # were one matrix: post-norm is slow to begin to look at the source otherwise.
        scale = 0.5 if by_head else 1.0
        return nn.DenseGeneral(
            features=features,
            axis=axis,
            dot_general=matrix_product,
            use_bias=self.config.attention_bias,
            dtype=self.dtype,
            kernel_init=nn.with_logical_partitioning(
                nn.initializers.variance_scaling(scale, "fan_avg", "uniform"), names
            ),
            bias_init=nn.with_logical_partitioning(nn.initializers.zeros, outputs),
        )

    def project(self, x: jax.Array) -> KeysValues:
        """Returns keys `[B, H, K, S]` and values `[B, H, S, E]` of `x [B, S, D]`.

        They lie as the products with them want it: a cache is written once and read at
        every step.
        """
        keys, values = _by_head(self.key(x)), _by_head(self.value(x))
        return keys.transpose(0, 2, 3, 1), values.swapaxes(1, 2)

    def __call__(self, x: jax.Array, kv: KeysValues, mask: jax.Array) -> jax.Array:
        """Lets `x` attend to projected keys and values.

        Args:
            x: `[B, T, D]`, whose projections are the queries.
            kv: keys `[B, H, K, S]` and values `[B, H, S, E]`, from `project`.
            mask: `[B or 1, T or 1, S] bool`.

        Returns:
            `[B, T, D]`. The weights `[B, H, T, S]` are sown as `intermediates/weights`
            and cost nothing unless that collection is asked for.
        """
        keys, values = kv
        weights = attention_weights(_by_head(self.query(x)), keys, mask)
        self.sow("intermediates", "weights", weights)
        context = weights.astype(self.dtype) @ values  # [B, H, T, E]
        return self.output(_by_head(context.swapaxes(1, 2)))


def _by_head(x: jax.Array) -> jax.Array:
    """Says that `x [B, T, H, ...]` is split by head over a mesh, if there is one."""
    return split(x, "batch", None, "heads", None)
