"""The update: the same on 1, 2 and 8 devices, and safe against non-finite numbers."""

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest

from transformer_jax import parallel
from transformer_jax.config import ModelConfig, TrainConfig
from transformer_jax.data.batching import Batch, Shape, make_batch
from transformer_jax.model.transformer import Transformer
from transformer_jax.train import step as step_module
from transformer_jax.train.optimizer import make_optimizer
from transformer_jax.train.step import (
    TrainState,
    first_bad_output,
    init_state,
    train_step,
    value_names,
)

CONFIG = ModelConfig(
    num_layers=1, d_model=12, d_ff=20, num_heads=2, d_k=5, d_v=7, dropout=0.2
)
VOCAB_SIZE = 23
OPTIMIZER = make_optimizer(TrainConfig(warmup_steps=5), CONFIG.d_model)


def batches(count: int, rows: int = 6) -> list[Batch]:
    rng = np.random.default_rng(0)

    def ids() -> list[np.ndarray]:
        return [rng.integers(4, VOCAB_SIZE, rng.integers(1, 7)) for _ in range(rows)]

    return [make_batch(ids(), ids(), Shape(rows, 8, 9)) for _ in range(count)]


def step_function(
    axis_name: str | None, model: ModelConfig = CONFIG, optimizer=OPTIMIZER
):
    return functools.partial(
        train_step,
        model=Transformer(model, VOCAB_SIZE, axis_name),
        optimizer=optimizer,
        smoothing=0.1,
        seed=3,
        axis_name=axis_name,
    )


@functools.cache
def plain_step():
    return jax.jit(step_function(None))


@pytest.fixture(scope="module")
def fresh() -> TrainState:
    return init_state(Transformer(CONFIG, VOCAB_SIZE), OPTIMIZER, 0)


def run_plain(state, batches):
    metrics = None
    for batch in batches:
        state, metrics = plain_step()(state, batch)
    return jax.device_get((state, metrics))


def close(found, expected, tolerance):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "count",
    [*(pytest.param(count, marks=pytest.mark.slow) for count in (1, 2)), 3, 8],
)
def test_devices_do_not_change_the_update(monkeypatch, fresh, count):
    """Dropout is on; 6 rows do not divide over 8 devices, so some get padding only."""
    chosen = jax.devices()[:count]
    monkeypatch.setattr(parallel, "devices", lambda: chosen)
    layout = parallel.Replicated()
    step = layout.compile(step_function(parallel.DATA_AXIS), donate=True)
    state = layout.place(jax.device_get(fresh))
    metrics = None
    for batch in batches(3):
        state, metrics = step(state, layout.split_rows(batch))
    expected_state, expected_metrics = run_plain(fresh, batches(3))
    close(layout.fetch(state), expected_state, 5e-6)
    close(layout.fetch(metrics), expected_metrics, 2e-5)
    assert int(layout.fetch(state).step) == 3
    # every device holds the same state
    for leaf in jax.tree.leaves(state):
        copies = np.asarray(leaf)
        assert (copies == copies[:1]).all()


def test_the_update_is_adam_on_the_mean_loss_of_the_batch(fresh):
    """Gradient by finite differences of the summed loss, then Adam's first step."""
    still = TrainConfig(warmup_steps=5)
    model = Transformer(
        ModelConfig(num_layers=1, d_model=12, d_ff=20, num_heads=2, dropout=0.0),
        VOCAB_SIZE,
    )
    optimizer = make_optimizer(still, 12)
    state = init_state(model, optimizer, 0)
    batch = batches(1)[0]
    step = functools.partial(
        train_step,
        model=model,
        optimizer=optimizer,
        smoothing=0.0,
        seed=0,
        axis_name=None,
    )
    new, metrics = jax.jit(step)(state, batch)

    def mean_loss(params):
        inputs = batch.source, batch.source_length, batch.target_in
        logits: Any = model.apply({"params": params}, *inputs)
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, batch.target_out
        )
        real = np.arange(batch.target_out.shape[1]) < batch.target_length[:, None]
        return (losses * real).sum() / batch.target_length.sum()

    value, gradients = jax.jit(jax.value_and_grad(mean_loss))(state.params)
    tokens = float(metrics.sums.tokens)
    assert tokens == batch.target_length.sum()
    assert float(metrics.sums.loss) / tokens == pytest.approx(float(value), rel=1e-5)
    whole = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(gradients)])
    norm = np.linalg.norm(whole.astype(np.float64))
    assert float(metrics.gradient_norm) == pytest.approx(norm, rel=1e-5)
    rate = 12**-0.5 * 5**-1.5  # the schedule's first step
    for old, now, gradient in zip(
        *(jax.tree.leaves(t) for t in (state.params, new.params, gradients)),
        strict=True,
    ):
        # Adam's first step is lr g / (|g| + eps); tiny gradients are left out
        large = np.abs(gradient) > 1e-5
        expected = np.asarray(old - rate * np.sign(gradient))
        np.testing.assert_allclose(
            np.asarray(now)[large], expected[large], rtol=1e-3, atol=1e-5
        )


def test_padding_rows_and_columns_change_nothing(fresh):
    """Without dropout: its bits depend on the shape."""
    model = ModelConfig(num_layers=1, d_model=12, d_ff=20, num_heads=2, d_k=5, d_v=7)
    step = jax.jit(
        step_function(None, model=ModelConfig(**{**model.__dict__, "dropout": 0.0}))
    )
    batch = batches(1)[0]
    wide = Batch(
        *(
            np.pad(x, [(0, 2)] + [(0, 3)] * (x.ndim - 1), constant_values=value)
            for x, value in zip(batch[:5], (9, 0, 8, 7, 0), strict=True)
        )
    )
    one, other = step(fresh, batch), step(fresh, wide)
    close(other, one, 2e-6)


def test_dropout_differs_by_step_and_seed(fresh):
    batch = batches(1)[0]
    first = plain_step()(fresh, batch)[1].sums.loss
    again = plain_step()(fresh, batch)[1].sums.loss
    later = plain_step()(fresh.replace(step=fresh.step + 1), batch)[1].sums.loss
    assert first == again != later


def test_a_bad_update_is_skipped_and_counted(fresh):
    good, bad = batches(2)
    poisoned = jax.tree.map(lambda x: x, fresh)
    table = poisoned.params["embedding"]["table"]
    token = int(bad.source[0, 0])
    poisoned.params["embedding"]["table"] = table.at[token, 0].set(np.inf)
    state, metrics = plain_step()(poisoned, bad)
    assert int(metrics.bad_in_a_row) == int(metrics.bad_total) == 1
    assert value_names(poisoned.params)[int(metrics.first_bad)] == "the loss"
    close(state.params, poisoned.params, 0)
    close(state.opt_state, poisoned.opt_state, 0)
    assert int(state.step) == 1  # the batch is used up
    state, metrics = plain_step()(state, bad)
    assert int(metrics.bad_in_a_row) == 2
    mended = state.replace(params=fresh.params)
    state, metrics = plain_step()(mended, good)
    assert (int(metrics.bad_in_a_row), int(metrics.bad_total)) == (0, 2)
    assert any(
        (np.asarray(a) != np.asarray(b)).any()
        for a, b in zip(
            jax.tree.leaves(state.params), jax.tree.leaves(fresh.params), strict=True
        )
    )


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_an_infinite_gradient_is_named_and_skipped(fresh, monkeypatch, clip_norm):
    """The loss is finite: the square root of a bias, 0, has an infinite slope.

    Clipping by the norm would make each other entry 0, and this one not a number.
    """
    config = TrainConfig(warmup_steps=5, clip_norm=clip_norm)
    optimizer = make_optimizer(config, CONFIG.d_model)
    fresh = fresh.replace(opt_state=optimizer.init(fresh.params))
    plain = step_module.batch_loss

    def steep(params, *args):
        sums = plain(params, *args)
        bias = params["decoder"]["layer_0"]["feed_forward"]["up"]["bias"]
        return sums.replace(loss=sums.loss + jax.numpy.sqrt(bias[3]))

    monkeypatch.setattr(step_module, "batch_loss", steep)
    step = jax.jit(step_function(None, optimizer=optimizer))
    state, metrics = step(fresh, batches(1)[0])
    assert np.isfinite(metrics.sums.loss) and int(metrics.bad_total) == 1
    name = value_names(fresh.params)[int(metrics.first_bad)]
    assert name == "the gradient of decoder/layer_0/feed_forward/up/bias"
    close(state.params, fresh.params, 0)
    close(state.opt_state, fresh.opt_state, 0)


def test_the_module_that_overflows_first_is_named(fresh):
    model, batch = Transformer(CONFIG, VOCAB_SIZE), batches(1)[0]
    assert first_bad_output(fresh.params, batch, model) is None
    for side in ("decoder", "encoder"):
        path = f"{side}/layer_0/feed_forward/up"
        params = jax.tree.map(lambda x: x, fresh.params)
        up = params[side]["layer_0"]["feed_forward"]["up"]
        up["kernel"] = up["kernel"] * 1e30 * 1e30
        assert first_bad_output(params, batch, model) == path


def test_state_is_float32(fresh):
    bfloat16 = ModelConfig(
        num_layers=1, d_model=12, d_ff=20, num_heads=2, d_k=5, d_v=7, dtype="bfloat16"
    )
    state, metrics = jax.eval_shape(step_function(None, bfloat16), fresh, batches(1)[0])
    for leaf in jax.tree.leaves((state.params, state.opt_state, metrics)):
        assert leaf.dtype in (np.float32, np.int32)
