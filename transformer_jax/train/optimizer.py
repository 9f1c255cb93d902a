"""The paper's learning-rate schedule and Adam (section 5.3), and clipping."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from transformer_jax.config import TrainConfig


def learning_rate(
    config: TrainConfig, d_model: int
) -> Callable[[ArrayLike], jax.Array]:
    """Returns factor * d_model^-0.5 * min(s^-0.5, s * warmup^-1.5) (equation 3).

    Optax counts updates from 0, the paper counts steps s from 1: s is count + 1.
    """

    def schedule(count: ArrayLike) -> jax.Array:
        step = jnp.asarray(count, jnp.float32) + 1
        shape = jnp.minimum(step**-0.5, step * config.warmup_steps**-1.5)
        return config.learning_rate * d_model**-0.5 * shape

    return schedule


def make_optimizer(config: TrainConfig, d_model: int) -> optax.GradientTransformation:
    """Returns Adam under the schedule, without decay; clipped only where asked for."""
    adam = optax.adam(
        learning_rate(config, d_model),
        b1=config.adam_beta1,
        b2=config.adam_beta2,
        eps=config.adam_epsilon,
    )
    if not config.clip_norm:
        return adam
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adam)
