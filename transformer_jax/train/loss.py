"""Label-smoothed cross-entropy (section 5.4) as sums, with the count of tokens."""

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class LossSums:
    """Sums over real target tokens; divide only after adding devices and batches up."""

    loss: jax.Array  # [] float32, smoothed cross-entropy in nats
    nll: jax.Array  # [] float32, -log P(true token), unsmoothed; its mean's exp is PPL
    correct: jax.Array  # [] int32, tokens whose arg-max is right
    tokens: jax.Array  # [] int32, real target tokens, EOS counted


def cross_entropy(
    logits: jax.Array, targets: jax.Array, lengths: jax.Array, smoothing: float
) -> LossSums:
    """Returns the sums of a batch.

    The target distribution has 1 - smoothing at the true token and smoothing / (V - 1)
    at each other entry of the vocabulary, special ids included, so it sums to 1.

    Args:
        logits: `[B, T, V] float32`.
        targets: `[B, T] int32`.
        lengths: `[B] int32`, real tokens of each row; what follows counts for nothing.
        smoothing: in [0, 1).

    Returns:
        The sums; with smoothing 0, `loss` equals `nll`.
    """
    vocab_size = logits.shape[-1]
    real = jnp.arange(targets.shape[1]) < lengths[:, None]
    log_normalizer = jax.nn.logsumexp(logits, axis=-1)
    true_logit = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    nll = log_normalizer - true_logit

    # -sum_v q(v) log p(v), with q written as `other` everywhere plus the rest at true.
    other = smoothing / (vocab_size - 1)
    mean_off = vocab_size * log_normalizer - logits.sum(axis=-1)
    loss = (1.0 - smoothing - other) * nll + other * mean_off

    correct = (jnp.argmax(logits, axis=-1) == targets) & real
    return LossSums(
        loss=jnp.where(real, loss, 0).sum(),
        nll=jnp.where(real, nll, 0).sum(),
        correct=correct.sum(dtype=jnp.int32),
        tokens=real.sum(dtype=jnp.int32),
    )
