"""Hypotheses of a search: what they hold, what they are worth, and how they are picked.

A hypothesis of n tokens, EOS included, scores log P / penalty(n), with the penalty
((5 + n) / 6)^alpha of Wu et al. 2016 (equation 14) or n^alpha, plus coverage times
sum_i log min(1, sum_j a_ij) if source positions i are to be attended to. The same
formula holds for one that is cut at its limit without EOS. log P is always the model's
own, whatever is banned, forced or left out of a draw.
"""

import flax.struct
import jax
import jax.numpy as jnp

from transformer_jax.config import DecodeConfig
from transformer_jax.decode.choice import IMPOSSIBLE


class Hypotheses(flax.struct.PyTreeNode):
    """Hypotheses of each source. B sources, W beams, L positions, S source positions.

    What lies beyond a hypothesis's length is zero.
    """

    tokens: jax.Array  # [B, W, L] int32
    length: jax.Array  # [B, W] int32, EOS included
    log_prob: jax.Array  # [B, W] float32, sum over the tokens, EOS included
    score: jax.Array  # [B, W] float32; IMPOSSIBLE or less where there is none
    token_log_probs: jax.Array  # [B, W, L] float32, whose sum is log_prob
    attention: jax.Array | None  # [B, W, L, S] float32, if it was asked for

    def best(self, count: int) -> "Hypotheses":
        """Returns the `count` of highest score, earlier ones first on ties."""
        _, order = jax.lax.top_k(self.score, count)
        return self.take(order)

    def take(self, index: jax.Array) -> "Hypotheses":
        """Returns the hypotheses at `index [B, K]` of each source."""
        return jax.tree.map(lambda x: take_beams(x, index), self)


def take_beams(x: jax.Array, index: jax.Array) -> jax.Array:
    """Returns `x[b, index[b]]` of each b: `[B, W, ...]`, `[B, K]` to `[B, K, ...]`."""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), 1)


def tokens_at(hypotheses: Hypotheses, position: jax.Array) -> jax.Array:
    """Returns the tokens at `position`, `[B, W] int32`."""
    return jax.lax.dynamic_index_in_dim(hypotheses.tokens, position, 2, keepdims=False)


def select(condition: jax.Array, one: Hypotheses, other: Hypotheses) -> Hypotheses:
    """Returns `one` where `condition [B, W or 1]` holds, else `other`."""
    return jax.tree.map(
        lambda a, b: jnp.where(
            condition.reshape(*condition.shape, *(1,) * (a.ndim - 2)), a, b
        ),
        one,
        other,
    )


def join(one: Hypotheses, other: Hypotheses) -> Hypotheses:
    """Returns both, the first ones first: `[B, W]`, `[B, K]` to `[B, W + K]`."""
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), one, other)


def no_hypotheses(
    sources: int, beams: int, max_length: int, attends: int | None
) -> Hypotheses:
    """Returns hypotheses that do not exist."""
    shape = (sources, beams)
    impossible = jnp.full(shape, IMPOSSIBLE, jnp.float32)
    return Hypotheses(
        tokens=jnp.zeros((*shape, max_length), jnp.int32),
        length=jnp.zeros(shape, jnp.int32),
        log_prob=impossible,
        score=impossible,
        token_log_probs=jnp.zeros((*shape, max_length), jnp.float32),
        attention=None if attends is None else jnp.zeros((*shape, max_length, attends)),
    )


# --- Scores ---------------------------------------------------------------------


def length_penalty(length: jax.Array | int, options: DecodeConfig) -> jax.Array:
    """Returns ((5 + length) / 6)^alpha, or length^alpha, float32."""
    n = jnp.asarray(length, jnp.float32)
    return (n if options.penalty == "length" else (5.0 + n) / 6.0) ** options.alpha


def coverage_penalty(attention: jax.Array, source_mask: jax.Array) -> jax.Array:
    """Returns sum_i log min(1, sum_j a_ij) over real source positions, at most 0.

    Args:
        attention: a, `[B, W, L, S] float32`, zero beyond a hypothesis's length.
        source_mask: `[B, S] bool`, the positions that are to be covered.

    Returns:
        `[B, W] float32` (Wu et al. 2016, equation 14).
    """
    # Attention that underflows to 0 would give minus infinity.
    covered = jnp.clip(attention.sum(axis=2), 1e-9, 1.0)
    return jnp.where(source_mask[:, None], jnp.log(covered), 0.0).sum(axis=-1)


def hypothesis_scores(
    hypotheses: Hypotheses, source_mask: jax.Array | None, options: DecodeConfig
) -> jax.Array:
    """Returns what each is worth, `[B, W] float32`; IMPOSSIBLE what does not exist.

    `source_mask [B, S] bool` is needed for coverage.
    """
    value = hypotheses.log_prob / length_penalty(hypotheses.length, options)
    if options.coverage:
        assert hypotheses.attention is not None and source_mask is not None
        covered = coverage_penalty(hypotheses.attention, source_mask)
        value += options.coverage * covered
    return jnp.where(hypotheses.log_prob > IMPOSSIBLE, value, IMPOSSIBLE)


def best_possible(
    log_prob: jax.Array, length: jax.Array, limit: jax.Array, options: DecodeConfig
) -> jax.Array:
    """Returns the highest score that a live hypothesis can still end with.

    It can lose log-probability only, and end at any length from `length + 1` to
    `limit`. A log-probability is negative, so the largest penalty gives the best
    score: the one at the limit if alpha is positive, at `length + 1` if negative.
    Coverage never adds to a score.
    """
    largest = jnp.maximum(
        length_penalty(length + 1, options), length_penalty(limit, options)
    )
    return log_prob / largest
