"""Label-smoothed cross-entropy (section 5.4) as sums, with the count of tokens.

The product with the output table is part of the loss: logits of a vocabulary of 37,000
are the largest array of the whole step, so they are made a chunk of tokens at a time,
and the gradient of a chunk is taken while its logits are at hand. Never is more than
one chunk of at most `[CHUNK, V]` held, forward or backward.
"""

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from transformer_jax.model.axes import split

CHUNK = 512  # tokens; larger ones were no faster, on a CPU slower


class LossSums(flax.struct.PyTreeNode):
    """Sums over real target tokens; divide only after adding devices and batches up."""

    loss: jax.Array  # [] float32, smoothed cross-entropy in nats
    nll: jax.Array  # [] float32, -log P(true token), unsmoothed; its mean's exp is PPL
    correct: jax.Array  # [] int32, tokens whose most probable entry is the true one
    tokens: jax.Array  # [] int32, real target tokens, EOS counted


def cross_entropy(
    x: jax.Array,
    table: jax.Array,
    targets: ArrayLike,
    lengths: ArrayLike,
    smoothing: float,
    bias: jax.Array | None = None,
    shards: int = 1,
) -> LossSums:
    """Returns the sums of a batch, for the logits x E^T + bias.

    The target distribution has 1 - smoothing at the true token and smoothing / (V - 1)
    at each other entry of the vocabulary, special ids included, so it sums to 1.
    Only `loss` has a gradient, with respect to `x`, `table` and `bias`.

    Args:
        x: `[B, T, D]`, the decoder's output in the compute dtype.
        table: `[V, D] float32`, the output table E.
        targets: `[B, T] int32`.
        lengths: `[B] int32`, real tokens of each row; what follows counts for nothing.
        smoothing: in [0, 1).
        bias: `[V] float32`, or None for none.
        shards: devices of a mesh that the rows are split over, each holding the same
            number of them; each makes its own chunks.

    Returns:
        The sums; with smoothing 0, `loss` equals `nll`.
    """
    targets, lengths = jnp.asarray(targets), jnp.asarray(lengths)
    real = jnp.arange(targets.shape[1]) < lengths[:, None]
    flat = x.reshape(-1, x.shape[-1]), targets.reshape(-1), real.reshape(-1)
    return _sums((table, bias), *flat, smoothing, shards)


def chunk_sums(
    logits: jax.Array, targets: jax.Array, real: jax.Array, smoothing: float
) -> tuple[LossSums, jax.Array]:
    """Returns the sums of some tokens, and d loss / d logits.

    Args:
        logits: `[..., V] float32`.
        targets: `[...] int32`.
        real: `[...] bool`, False for padding.
        smoothing: in [0, 1).

    Returns:
        The sums and the gradient, `[..., V] float32`: softmax(logits) minus the target
        distribution, zero at padding.
    """
    vocab_size = logits.shape[-1]
    other = smoothing / (vocab_size - 1)
    true = 1.0 - smoothing - other  # what the true token has beyond the others

    largest = logits.max(axis=-1, keepdims=True)
    exponentials = jnp.exp(logits - largest)
    normalizer = exponentials.sum(axis=-1, keepdims=True)
    log_normalizer = (largest + jnp.log(normalizer))[..., 0]
    true_logit = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    nll = log_normalizer - true_logit
    all_nll = vocab_size * log_normalizer - logits.sum(axis=-1)
    loss = true * nll + other * all_nll

    is_true = jnp.arange(vocab_size) == targets[..., None]
    gradient = exponentials / normalizer - other - jnp.where(is_true, true, 0.0)
    sums = LossSums(
        loss=jnp.where(real, loss, 0.0).sum(),
        nll=jnp.where(real, nll, 0.0).sum(),
        correct=(real & (true_logit >= largest[..., 0])).sum(dtype=jnp.int32),
        tokens=real.sum(dtype=jnp.int32),
    )
    return sums, jnp.where(real[..., None], gradient, 0.0)


Weights = tuple[jax.Array, jax.Array | None]  # table [V, D], bias [V]


def _over_chunks(
    weights: Weights,
    x: jax.Array,
    targets: jax.Array,
    real: jax.Array,
    smoothing: float,
    shards: int,
    with_gradient: bool,
) -> tuple[LossSums, tuple[Weights, jax.Array] | None]:
    """Adds up the sums of all chunks; with gradients of weights and `x` if asked."""
    count, width = x.shape[0] // shards, x.shape[1]
    chunks = -(-count // CHUNK)
    chunk = -(-count // chunks)  # as many tokens in each: hardly one is padding

    def cut(array: jax.Array) -> jax.Array:
        """Cuts `[tokens, ...]` to `[chunks, shards, chunk, ...]`."""
        array = array.reshape(shards, count, *array.shape[1:])
        missing = [(0, 0), (0, chunks * chunk - count)] + [(0, 0)] * (array.ndim - 2)
        array = jnp.pad(array, missing)
        array = array.reshape(shards, chunks, chunk, *array.shape[2:])
        return split(array.swapaxes(0, 1), None, "batch", *[None] * (array.ndim - 2))

    table, bias = split(weights[0].astype(x.dtype), "vocab", None), weights[1]
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

    def body(total: Any, inputs: Any) -> tuple[Any, Any]:
        sums, (table_gradient, bias_gradient) = total
        x, targets, real = inputs
        logits = split(product("snd,vd->snv", x, table), "batch", None, "vocab")
        if bias is not None:
            logits += bias
        new, gradient = chunk_sums(logits, targets, real, smoothing)
        sums = jax.tree.map(jnp.add, sums, new)
        if not with_gradient:
            return (sums, (None, None)), None
        if bias is not None:
            bias_gradient += gradient.sum(axis=1)
        gradient = gradient.astype(x.dtype)
        # Devices add up what is theirs; only the last sum crosses them.
        table_gradient += product("snv,snd->svd", gradient, x)
        x_gradient = product("snv,vd->snd", gradient, table)
        return (sums, (table_gradient, bias_gradient)), x_gradient

    def zeros(weight: jax.Array) -> jax.Array:
        zero = jnp.zeros((shards, *weight.shape), jnp.float32)
        return split(zero, "batch", "vocab", *[None] * (weight.ndim - 1))

    zero, none = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
    start = (
        LossSums(zero, zero, none, none),
        jax.tree.map(zeros, weights) if with_gradient else (None, None),
    )
    inputs = (cut(x), cut(targets), cut(real))
    (sums, weight_gradients), x_gradient = jax.lax.scan(body, start, inputs)
    if not with_gradient:
        return sums, None
    weight_gradients = jax.tree.map(lambda g: g.sum(axis=0), weight_gradients)
    x_gradient = x_gradient.swapaxes(0, 1).reshape(shards, -1, width)[:, :count]
    return sums, (weight_gradients, x_gradient.reshape(x.shape).astype(x.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _sums(
    weights: Weights,
    x: jax.Array,
    targets: jax.Array,
    real: jax.Array,
    smoothing: float,
    shards: int,
) -> LossSums:
    return _over_chunks(weights, x, targets, real, smoothing, shards, False)[0]


def _forward(
    weights: Any, x: Any, targets: Any, real: Any, smoothing: float, shards: int
) -> Any:
    return _over_chunks(weights, x, targets, real, smoothing, shards, True)


def _backward(smoothing: float, shards: int, gradients: Any, cotangent: Any) -> Any:
    scale = cotangent.loss
    scaled = jax.tree.map(lambda g: g * scale.astype(g.dtype), gradients)
    return *scaled, None, None


_sums.defvjp(_forward, _backward)
