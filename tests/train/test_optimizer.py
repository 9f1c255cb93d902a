"""Schedule and Adam against the paper's figures and formulas (section 5.3)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.config import TrainConfig
from transformer_jax.train.optimizer import learning_rate, make_optimizer

BASE, BIG = 512, 1024  # d_model


def rate(config: TrainConfig, d_model: int, step: int) -> float:
    """Returns the rate of step `step`, counted from 1 as in the paper."""
    return float(jnp.asarray(learning_rate(config, d_model)(step - 1)))


def test_peaks_are_those_of_the_paper() -> None:
    assert f"{rate(TrainConfig(), BASE, 4000):.2e}" == "6.99e-04"
    assert f"{rate(TrainConfig(), BIG, 4000):.2e}" == "4.94e-04"


@pytest.mark.parametrize("d_model", [BASE, BIG])
@pytest.mark.parametrize(
    ("step", "shape"),
    [
        (1, 4000**-1.5),
        (2, 2 * 4000**-1.5),
        (2000, 2000 * 4000**-1.5),
        (3999, 3999 * 4000**-1.5),
        (4000, 4000**-0.5),
        (4001, 4001**-0.5),
        (16_000, 4000**-0.5 / 2),
        (100_000, 100_000**-0.5),
    ],
)
def test_schedule_at_named_steps(d_model: int, step: int, shape: float) -> None:
    expected = d_model**-0.5 * shape
    assert rate(TrainConfig(), d_model, step) == pytest.approx(expected, rel=1e-6)


def test_schedule_rises_to_the_end_of_warmup_and_falls_from_there() -> None:
    config = TrainConfig(warmup_steps=10)
    rates = [rate(config, BASE, step) for step in range(1, 40)]
    assert np.all(np.diff(rates[:10]) > 0)
    assert np.all(np.diff(rates[9:]) < 0)


def test_factor_scales_the_schedule() -> None:
    twice = TrainConfig(learning_rate=2.0)
    for step in (1, 4000, 9000):
        expected = 2 * rate(TrainConfig(), BASE, step)
        assert rate(twice, BASE, step) == pytest.approx(expected, rel=1e-6)


def test_schedule_can_be_traced() -> None:
    schedule = learning_rate(TrainConfig(), BASE)
    traced = jax.jit(schedule)(3999)
    assert traced.dtype == jnp.float32
    assert float(traced) == pytest.approx(rate(TrainConfig(), BASE, 4000), rel=1e-6)


CONFIG = TrainConfig(
    learning_rate=0.7,
    warmup_steps=3,
    adam_beta1=0.8,
    adam_beta2=0.95,
    adam_epsilon=1e-3,
)


def run_adam(
    config: TrainConfig, d_model: int, params: Any, gradients: list[Any]
) -> list[Any]:
    """Returns the parameters after each of `gradients`."""
    optimizer = make_optimizer(config, d_model)
    state, seen = optimizer.init(params), []
    for gradient in gradients:
        updates, state = optimizer.update(gradient, state, params)
        params = jax.tree.map(lambda p, u: p + u, params, updates)
        seen.append(params)
    return seen


def test_adam_updates_equal_the_formulas() -> None:
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(3, 5)), "b": rng.normal(size=5)}
    # From far below epsilon, where its place matters, to sizes that clipping would cut.
    scales = [1e-4, 1e-3, 1.0, 1e4]
    gradients = [
        {name: scale * rng.normal(size=p.shape) for name, p in params.items()}
        for scale in scales
    ]
    found = run_adam(CONFIG, 7, jax.tree.map(jnp.float32, params), gradients)
    for name in params:
        p, m, v = params[name], 0.0, 0.0
        for t, gradient in enumerate(gradients, start=1):
            g = gradient[name]
            m = 0.8 * m + 0.2 * g
            v = 0.95 * v + 0.05 * g**2
            m_hat, v_hat = m / (1 - 0.8**t), v / (1 - 0.95**t)
            alpha = 0.7 * 7**-0.5 * min(t**-0.5, t * 3**-1.5)
            p = p - alpha * m_hat / (np.sqrt(v_hat) + 1e-3)
            np.testing.assert_allclose(found[t - 1][name], p, rtol=2e-5, atol=2e-6)


def test_first_update_is_the_rate_times_the_sign() -> None:
    gradient = {"w": jnp.asarray([1e-3, -2.0, 5e6])}
    (after,) = run_adam(TrainConfig(), BASE, {"w": jnp.zeros(3)}, [gradient])
    expected = -rate(TrainConfig(), BASE, 1) * np.sign(gradient["w"])
    np.testing.assert_allclose(after["w"], expected, rtol=1e-4)


def test_zero_gradient_moves_nothing() -> None:
    params = {"w": jnp.asarray([3.0, -4.0])}
    (after,) = run_adam(CONFIG, BASE, params, [{"w": jnp.zeros(2)}])
    np.testing.assert_array_equal(after["w"], params["w"])  # so there is no decay


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", 0.9),
        ("warmup_steps", 2),
        ("adam_beta1", 0.5),
        ("adam_beta2", 0.5),
        ("adam_epsilon", 0.1),
    ],
)
def test_every_setting_changes_the_update(field: str, value: float) -> None:
    gradients = [{"w": jnp.asarray([0.1, -0.3])}, {"w": jnp.asarray([0.7, 0.2])}]
    params = {"w": jnp.ones(2)}
    changed = dataclasses.replace(CONFIG, **{field: value})
    before = run_adam(CONFIG, BASE, params, gradients)[-1]
    after = run_adam(changed, BASE, params, gradients)[-1]
    assert not np.allclose(before["w"], after["w"], rtol=1e-6, atol=0)


def test_state_is_float32() -> None:
    state = make_optimizer(CONFIG, BASE).init({"w": jnp.ones(2, jnp.float32)})
    moments = [x for x in jax.tree.leaves(state) if x.ndim]
    assert moments and all(x.dtype == jnp.float32 for x in moments)


def test_a_long_gradient_is_scaled_to_the_norm_and_a_short_one_kept() -> None:
    """Adam with a large epsilon: the first update is nearly a multiple of g."""
    config = dataclasses.replace(CONFIG, clip_norm=0.5, adam_epsilon=1e6)
    rng = np.random.default_rng(1)
    direction = {
        name: rng.normal(size=n).astype("f") for name, n in (("a", 4), ("b", 3))
    }
    length = np.sqrt(sum((x**2).sum() for x in direction.values()))
    params = {name: jnp.zeros_like(x) for name, x in direction.items()}
    for norm in (0.01, 0.49, 0.51, 3.0, 1e6):
        gradient = {name: x * (norm / length) for name, x in direction.items()}
        (after,) = run_adam(config, BASE, params, [gradient])
        scale = -rate(config, BASE, 1) * min(norm, 0.5) / length / 1e6
        for name, x in direction.items():
            np.testing.assert_allclose(after[name], scale * x, rtol=1e-4)


def test_without_a_norm_nothing_is_clipped_and_the_state_is_adam_alone() -> None:
    params = {"w": jnp.ones(2)}
    plain, clipped = (
        make_optimizer(dataclasses.replace(CONFIG, clip_norm=norm), BASE).init(params)
        for norm in (0.0, 1.0)
    )
    # Runs of before clipping was there go on: their state has this form.
    assert [type(part).__name__ for part in plain] == [  # pyright: ignore
        "ScaleByAdamState",
        "ScaleByScheduleState",
    ]
    assert jax.tree.structure(plain) != jax.tree.structure(clipped)
