"""Which tokens may come next, and how one is drawn: bans, forced prefixes, sampling.

Shapes: B sources, W beams, V vocabulary, L positions, P positions of a prefix.
"""

from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import DecodeConfig

# Log-probability of what does not exist: dead beams and banned tokens. Finite, so that
# sums and quotients of it stay ordered and free of NaN.
IMPOSSIBLE = -1e30


def allow(
    log_probs: jax.Array,
    tokens: jax.Array,
    length: jax.Array,
    options: DecodeConfig,
    eos_id: int,
    banned_ids: Sequence[int],
) -> jax.Array:
    """Returns `log_probs` with IMPOSSIBLE in place of every token that is banned.

    Nothing is renormalised: what is left keeps the model's log-probability.

    Args:
        log_probs: `[B, W, V]`, of the next token.
        tokens: `[B, W, L] int32`, the hypotheses so far.
        length: `[] int32`, how many tokens they have.
        options: for `min_length` and `no_repeat_ngram`.
        eos_id: banned while a hypothesis is shorter than `min_length`.
        banned_ids: always banned.
    """
    ids = np.arange(log_probs.shape[-1])
    banned = jnp.asarray(np.isin(ids, list(banned_ids)))
    if options.min_length:
        banned |= (ids == eos_id) & (length < options.min_length)
    log_probs = jnp.where(banned, IMPOSSIBLE, log_probs)
    if 0 < options.no_repeat_ngram <= tokens.shape[-1]:
        repeated = repeats(tokens, length, options.no_repeat_ngram, log_probs.shape[-1])
        log_probs = jnp.where(repeated, IMPOSSIBLE, log_probs)
    return log_probs


def repeats(tokens: jax.Array, length: jax.Array, n: int, vocab_size: int) -> jax.Array:
    """Returns which next tokens would complete an n-gram that is there already.

    Args:
        tokens: `[B, W, L] int32`.
        length: `[] int32`, how many of them count.
        n: size of the n-gram, at most L.
        vocab_size: V.

    Returns:
        `[B, W, V] bool`.
    """
    start = jnp.maximum(length - (n - 1), 0)
    context = jax.lax.dynamic_slice_in_dim(tokens, start, n - 1, axis=2)
    last = tokens[..., n - 1 :]  # the n-th token of the n-gram that begins at 0, 1, ...
    places = last.shape[-1]
    matches = jnp.broadcast_to(jnp.arange(places) + n - 1 < length, last.shape)
    for k in range(n - 1):
        matches &= tokens[..., k : k + places] == context[..., k : k + 1]

    def mark(last: jax.Array, matches: jax.Array) -> jax.Array:
        return jnp.zeros(vocab_size, bool).at[last].max(matches)

    return jax.vmap(jax.vmap(mark))(last, matches)


class Prefix(flax.struct.PyTreeNode):
    """The tokens that the hypotheses of each source must begin with."""

    tokens: jax.Array  # [B, P] int32
    length: jax.Array  # [B] int32, real tokens; 0 for a free source

    def force(
        self, allowed: jax.Array, log_probs: jax.Array, length: jax.Array
    ) -> jax.Array:
        """Leaves, within a prefix, its next token alone, even if it is banned.

        Args:
            allowed: `[B, W, V]`, from `allow`.
            log_probs: `[B, W, V]`, before it.
            length: `[] int32`, tokens of the hypotheses so far.
        """
        last = self.tokens.shape[1] - 1
        token = jax.lax.dynamic_index_in_dim(
            self.tokens, jnp.minimum(length, last), 1, keepdims=False
        )
        is_token = jnp.arange(log_probs.shape[-1]) == token[:, None, None]
        only = jnp.where(is_token, log_probs, IMPOSSIBLE)
        return jnp.where((length < self.length)[:, None, None], only, allowed)


def draw(
    keys: jax.Array, log_probs: jax.Array, length: jax.Array, options: DecodeConfig
) -> jax.Array:
    """Draws a token of each hypothesis from softmax(log_probs / temperature).

    First only the `top_k` most probable tokens are kept, then of these the fewest whose
    probabilities reach `top_p` together (nucleus sampling, Holtzman et al. 2020). What
    a source draws depends on its key alone, not on the other sources.

    Args:
        keys: `[B]` random keys, one of each source.
        log_probs: `[B, W, V]`.
        length: `[] int32`, folded into the keys.
        options: for `temperature`, `top_k` (0: all) and `top_p` (1: all).

    Returns:
        `[B, W] int32`.
    """
    beams, vocab_size = log_probs.shape[1:]
    count = min(options.top_k or vocab_size, vocab_size)
    # What is banned stays so at any temperature, and the best finite.
    gaps = log_probs - log_probs.max(axis=-1, keepdims=True)
    possible = log_probs > IMPOSSIBLE
    values, ids = jnp.where(possible, gaps / options.temperature, IMPOSSIBLE), None
    if count < vocab_size or options.top_p < 1.0:
        values, ids = jax.lax.top_k(values, count)
    if options.top_p < 1.0:
        probs = jax.nn.softmax(values)
        before = jnp.cumsum(probs, axis=-1) - probs
        values = jnp.where(before < options.top_p, values, IMPOSSIBLE)

    def noise(key: jax.Array, beam: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(key, beam), length)
        return jax.random.gumbel(key, (count,))

    by_beam = jax.vmap(noise, in_axes=(None, 0))
    by_source = jax.vmap(by_beam, in_axes=(0, None))
    choice = jnp.argmax(values + by_source(keys, jnp.arange(beams)), axis=-1)
    if ids is not None:
        choice = jnp.take_along_axis(ids, choice[..., None], axis=-1)[..., 0]
    return choice.astype(jnp.int32)
