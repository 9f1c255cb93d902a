"""Activations computed again, and layers run in a loop: other costs, same numbers."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import equations

from transformer_jax.config import ModelConfig, TrainConfig
from transformer_jax.data.batching import Shape, make_batch
from transformer_jax.model.layers import Dropout
from transformer_jax.model.stack import run_layers
from transformer_jax.model.transformer import Transformer
from transformer_jax.train.optimizer import make_optimizer
from transformer_jax.train.step import batch_sums, init_state, train_step

MODEL = ModelConfig(
    num_layers=2, d_model=12, d_ff=20, num_heads=2, d_k=5, d_v=7, dropout=0.3
)
VOCAB_SIZE = 23
OPTIMIZER = make_optimizer(TrainConfig(warmup_steps=5), MODEL.d_model)
WAYS = [(True, False), (False, True), (True, True)]  # remat, scan
PRE = dataclasses.replace(MODEL, norm="pre", decoder_layers=3)


def batch_of(rows: int, length: int) -> Any:
    rng = np.random.default_rng(0)
    source, target = rng.integers(4, VOCAB_SIZE, (2, rows, length))
    return make_batch(list(source), list(target), Shape(rows, length + 1, length + 1))


def sums_of(config: ModelConfig, remat: bool, scan: bool) -> Any:
    model = Transformer(config, VOCAB_SIZE, remat=remat, scan=scan)
    return functools.partial(batch_sums, model=model, smoothing=0.1, seed=3)


@pytest.mark.parametrize(
    ("config", "remat", "scan"),
    [
        pytest.param(MODEL, True, False, marks=pytest.mark.slow),
        pytest.param(MODEL, False, True, marks=pytest.mark.slow),
        (PRE, True, True),
    ],
)
def test_loss_and_gradients_are_the_same(config, remat, scan) -> None:
    """Dropout is on, and the decoder may have other layers than the encoder."""
    state = init_state(Transformer(config, VOCAB_SIZE), OPTIMIZER, 0)
    number, batch = jnp.asarray(5), batch_of(6, 7)
    plain, found = (
        jax.jit(sums_of(config, *how))(state, number, batch)
        for how in ((False, False), (remat, scan))
    )
    np.testing.assert_allclose(found.losses.loss, plain.losses.loss, rtol=1e-5)
    pairs = zip(
        jax.tree.leaves(found.gradients), jax.tree.leaves(plain.gradients), strict=True
    )
    for a, b in pairs:
        np.testing.assert_allclose(a, b, atol=1e-5 * float(np.abs(b).max()) + 1e-6)


def test_they_start_from_the_same_parameters() -> None:
    states = [
        init_state(Transformer(MODEL, VOCAB_SIZE, remat=r, scan=s), OPTIMIZER, 0)
        for r, s in [(False, False), *WAYS]
    ]
    for state in states[1:]:
        for a, b in zip(*map(jax.tree.leaves, (states[0], state)), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("layers", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_loop_has_one_layer_of_each_stack(layers) -> None:
    """The number of products in the program does not grow with the layers."""
    config = dataclasses.replace(MODEL, num_layers=layers)
    state = init_state(Transformer(config, VOCAB_SIZE), OPTIMIZER, 0)

    def products(scan: bool) -> int:
        run = sums_of(config, False, scan)
        jaxpr = jax.make_jaxpr(run)(state, jnp.asarray(0), batch_of(2, 3))
        return sum(e.primitive.name == "dot_general" for e in equations(jaxpr.jaxpr))

    shallow = dataclasses.replace(MODEL, num_layers=1)
    one = jax.make_jaxpr(sums_of(shallow, False, False))(
        init_state(Transformer(shallow, VOCAB_SIZE), OPTIMIZER, 0),
        jnp.asarray(0),
        batch_of(2, 3),
    )
    count = sum(e.primitive.name == "dot_general" for e in equations(one.jaxpr))
    assert products(scan=True) == count
    assert products(scan=False) > count


def test_less_is_kept_for_the_backward_pass() -> None:
    """Of a layer its input alone, where remat is on; counted by autodiff itself."""
    state = init_state(Transformer(MODEL, VOCAB_SIZE), OPTIMIZER, 0)
    batch = batch_of(8, 15)

    def kept(remat: bool) -> int:
        model = Transformer(MODEL, VOCAB_SIZE, remat=remat)

        def hidden(params: Any) -> Any:
            return model.apply(
                {"params": params},
                *batch[:3],
                deterministic=False,
                rngs={"dropout": jax.random.key(0)},
                method="hidden",
            )

        _, backward = jax.vjp(hidden, state.params)
        arrays = [x for x in jax.tree.leaves(backward) if hasattr(x, "nbytes")]
        parameters = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(state.params)}
        return sum(
            x.nbytes
            for x in arrays
            if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            and x.unsafe_buffer_pointer() not in parameters
        )

    layer = 8 * 16 * MODEL.d_model * 4  # bytes of one layer's input
    assert kept(remat=False) > 40 * layer
    assert kept(remat=True) < 20 * layer


class Doubling(nn.Module):
    """Doubles, adds its own number, and drops out."""

    @nn.compact
    def __call__(self, x: jax.Array, key: jax.Array | None, add: jax.Array) -> Any:
        own = self.param("own", nn.initializers.normal(), (1,))
        return Dropout(0.5, None)(2 * x + own + add, key)


@pytest.mark.parametrize(("remat", "scan"), [(False, False), *WAYS])
def test_a_stack_runs_its_layers_in_order(remat, scan) -> None:
    class Stack(nn.Module):
        def setup(self) -> None:
            self.layer = [Doubling() for _ in range(3)]

        def __call__(self, x: jax.Array, key: jax.Array | None, add: jax.Array) -> Any:
            how = {"remat": remat, "scan": scan}
            return run_layers(self.layer, Doubling.__call__, x, key, add, **how)

    x, add = jnp.ones((2, 3, 4)), jnp.asarray(10.0)
    variables: Any = Stack().init(jax.random.key(1), x, None, add)
    own = [float(variables["params"][f"layer_{i}"]["own"][0]) for i in range(3)]
    expected = 2 * (2 * (2 * 1 + own[0] + 10) + own[1] + 10) + own[2] + 10
    found: Any = Stack().apply(variables, x, None, add)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    dropped: Any = Stack().apply(variables, x, jax.random.key(2), add)
    assert 0 < (np.asarray(dropped) == 0).sum() < x.size


# --- bfloat16 -------------------------------------------------------------------


def test_bfloat16_learns_as_float32_does() -> None:
    """After 100 updates of a task that can be learned: copying the source.

    At five times the rate runs in float32 that add in another order end 4 % apart.
    """
    rng = np.random.default_rng(1)
    pairs = [rng.integers(4, VOCAB_SIZE, 5) for _ in range(32)]
    batch = make_batch(pairs, pairs, Shape(32, 6, 6))

    def losses(dtype: str) -> list[float]:
        config = dataclasses.replace(MODEL, num_layers=1, dropout=0.0, dtype=dtype)
        model = Transformer(config, VOCAB_SIZE)
        optimizer = make_optimizer(
            TrainConfig(warmup_steps=50, learning_rate=0.1), config.d_model
        )
        step = jax.jit(
            functools.partial(
                train_step,
                model=model,
                optimizer=optimizer,
                smoothing=0.1,
                seed=0,
                axis_name=None,
            )
        )
        state, found = init_state(model, optimizer, 0), []
        for _ in range(100):
            state, metrics = step(state, batch)
            found.append(float(metrics.sums.loss) / float(metrics.sums.tokens))
        assert all(x.dtype != jnp.bfloat16 for x in jax.tree.leaves(state))
        return found

    exact, rounded = losses("float32"), losses("bfloat16")
    assert exact[-1] < 0.8 * exact[0]
    assert rounded[-1] == pytest.approx(exact[-1], rel=0.01)
    assert rounded[-1] != exact[-1]
