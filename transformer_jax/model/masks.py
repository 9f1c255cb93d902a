"""Boolean attention masks: True means "may attend". Nobody else builds one."""

import jax
import jax.numpy as jnp


def padding_mask(lengths: jax.Array, length: int) -> jax.Array:
    """Returns which keys are real: `[B, 1, length] bool`, the same for every query.

    Args:
        lengths: `[B] int32`, number of real tokens of each row; they come first.
        length: padded length of the rows.
    """
    return (jnp.arange(length) < lengths[:, None])[:, None, :]


def causal_mask(length: int) -> jax.Array:
    """Returns `[1, length, length] bool`: query t sees keys 0 to t (section 3.2.3).

    It hides padding, too, as far as it matters: padding comes after every real token.
    """
    return jnp.tril(jnp.ones((1, length, length), bool))


def segment_mask(queries: jax.Array, keys: jax.Array) -> jax.Array:
    """Returns `[B, T, S] bool`: in packed rows, a token sees its own segment only.

    Args:
        queries: `[B, T] int32`, the segment of each token, 0 for padding.
        keys: `[B, S] int32`, likewise.
    """
    return queries[:, :, None] == keys[:, None, :]


def cache_mask(index: jax.Array, slots: jax.Array) -> jax.Array:
    """Returns `[B, W, L * W] bool`: what W beams see of the keys that they share.

    A beam sees, of each position up to its own, the key of the one beam that its own
    hypothesis went through there.

    Args:
        index: `[] int32`, position of the token being decoded, itself visible.
        slots: `[B, W, L] int32`, that beam, for each position.
    """
    sources, beams, length = slots.shape
    there = jnp.arange(length) <= index
    own = slots[..., None] == jnp.arange(beams)
    return (own & there[:, None]).reshape(sources, beams, length * beams)
