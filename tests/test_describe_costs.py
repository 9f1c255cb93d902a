"""FLOPs against the model's products, bytes against what differentiation keeps."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend import core
from variants import ALL_AWAY, TINY, VARIANTS, make_config, param_shapes

from transformer_jax import describe as describe_module
from transformer_jax.config import ACTIVATIONS, Config
from transformer_jax.config_file import load
from transformer_jax.data.batching import Batch
from transformer_jax.describe import describe
from transformer_jax.model.transformer import Transformer
from transformer_jax.train import loss
from transformer_jax.train.optimizer import make_optimizer
from transformer_jax.train.step import batch_loss, init_state

# --- FLOPs ----------------------------------------------------------------------


def test_flops_of_base_by_hand():
    flops = describe(make_config()).flops
    # Encoder layer: projections, FFN, attention to 32 keys, and a decoder layer's K, V.
    source = 6 * (2_097_152 + 4_194_304 + 65_536 + 1_048_576)
    # Decoder layer: all of self-attention, Q and output of cross-attention; then V x d.
    target = 6 * (2_097_152 + 1_048_576 + 4_194_304 + 2 * 65_536) + 37_888_000
    assert flops.length == 32
    assert flops.forward_source_token == source == 44_433_408
    assert flops.forward_target_token == target == 82_714_624
    assert flops.update_tokens == 25_000
    assert flops.update == 9_536_102_400_000


def matrix_flops(jaxpr: core.Jaxpr) -> int:
    """2 FLOPs for every multiply-add of every matrix product in `jaxpr`."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape  # pyright: ignore
            inner = math.prod(shape[axis] for axis in contracted)
            total += 2 * inner * math.prod(equation.outvars[0].aval.shape)  # pyright: ignore
        for value in equation.params.values():
            inner_jaxpr = getattr(value, "jaxpr", value)
            if isinstance(inner_jaxpr, core.Jaxpr):
                total += matrix_flops(inner_jaxpr)
    return total


@pytest.mark.parametrize(
    "variant", [{}, VARIANTS[5], {"decoder_layers": 3}, *ALL_AWAY], ids=str
)
def test_flops_are_those_of_the_models_matrix_products(variant):
    rows, length = 3, 5
    config = make_config(29, rows * length, **TINY | variant)
    model = Transformer(config.model, 29)
    tokens = jnp.zeros((rows, length), jnp.int32)
    lengths = jnp.full((rows,), length, jnp.int32)
    params = param_shapes(config)

    def forward(params: Any) -> jax.Array:
        logits: Any = model.apply({"params": params}, tokens, lengths, tokens)
        return jnp.square(logits).sum()

    flops = describe(config, length=length).flops
    both = flops.forward_source_token + flops.forward_target_token
    assert matrix_flops(jax.make_jaxpr(forward)(params).jaxpr) == rows * length * both
    gradient = jax.make_jaxpr(jax.value_and_grad(forward))(params)
    assert matrix_flops(gradient.jaxpr) == flops.update == 3 * rows * length * both


def test_flops_of_gpt3_are_two_for_each_weight_but_those_looked_up():
    flops = describe(load("configs/gpt3_count.py"), length=2048).flops
    attention = 96 * 2 * (2 * 2048 * 96 * 128)  # scores and weighted sums, 96 layers
    assert flops.forward_target_token == (
        2 * (175_181_291_520 - 617_558_016) + attention
    )
    assert flops.forward_source_token == 0
    assert flops.update == 3 * 3_200_000 * flops.forward_target_token


# --- Memory ---------------------------------------------------------------------


def test_bytes_of_base_on_8_devices():
    description = describe(make_config(), devices=8)
    assert description.devices == 8
    memory = description.bytes_per_device
    assert dataclasses.asdict(memory) == {
        "parameters": 252_182_528,
        "optimizer": 504_365_056,
        "gradients": 252_182_528,
        "activations": 1_291_525_000,
        "logits": 75_776_000,  # 512 tokens
    }
    assert memory.total == 1_084_506_112 + 1_291_525_000
    per_token = description.activations
    assert per_token.dtype == "bfloat16"
    assert memory.activations == 3125 * (
        per_token.source_token + per_token.target_token
    )


def test_logits_of_fewer_tokens_than_a_chunk():
    memory = describe(make_config(1000, tokens=1001), devices=4).bytes_per_device
    assert memory.logits == 251 * 1000 * 4


def test_the_chunk_is_that_of_the_loss():
    assert describe_module.LOSS_CHUNK == loss.CHUNK


def test_bytes_are_those_of_the_train_state_without_its_counters():
    config = make_config(29, **TINY)
    optimizer = make_optimizer(config.train, config.model.d_model)
    state = jax.eval_shape(
        lambda: init_state(Transformer(config.model, 29), optimizer, seed=0)
    )
    leaves = jax.tree.leaves(state)
    arrays = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves if leaf.ndim)
    memory = describe(config).bytes_per_device
    assert memory.parameters + memory.optimizer == arrays


# --- Activations ----------------------------------------------------------------


def varying(jaxpr: core.Jaxpr, inputs: list[bool]) -> list[bool]:
    """Which outputs of `jaxpr` depend on the `inputs` that are True."""
    known = {var for var, varies in zip(jaxpr.invars, inputs, strict=True) if varies}
    for equation in jaxpr.eqns:
        given = [isinstance(v, core.Var) and v in known for v in equation.invars]
        outputs = [any(given)] * len(equation.outvars)
        if equation.primitive.name in ("jit", "pjit"):
            outputs = varying(equation.params["jaxpr"].jaxpr, given)
        pairs = zip(equation.outvars, outputs, strict=True)
        known |= {var for var, varies in pairs if varies}
    return [isinstance(v, core.Var) and v in known for v in jaxpr.outvars]


def bytes_kept(config: Config, rows: int, length: int) -> int:
    """Bytes of the residuals of a training step, as automatic differentiation has them.

    The leaves of the function that `jax.vjp` returns are what it keeps. Those that
    depend neither on the batch nor on the dropout key are parameters and constants.
    The loss keeps gradients of the output's table and bias, which `describe` counts
    with the gradients.
    """
    vocab_size = config.tokenizer.vocab_size
    model = Transformer(config.model, vocab_size)
    tokens = jnp.zeros((rows, length), jnp.int32)
    lengths = jnp.full((rows,), length, jnp.int32)
    batch = Batch(tokens, lengths, tokens, tokens, lengths)  # pyright: ignore

    def kept(params: Any, batch: Batch, key: jax.Array) -> Any:
        def loss_of(params: Any) -> jax.Array:
            inputs = batch.source, batch.source_length, batch.target_in
            x = model.apply(
                {"params": params},
                *inputs,
                deterministic=False,
                rngs={"dropout": key},
                method="hidden",
            )
            return batch_loss(params, x, batch, 0.1).loss

        return jax.vjp(loss_of, params)[1]

    params = param_shapes(config)
    jaxpr = jax.make_jaxpr(kept)(params, batch, jax.random.key(0)).jaxpr
    constant = len(jax.tree.leaves(params))
    inputs = [i >= constant for i in range(len(jaxpr.invars))]
    # An array kept in two shapes is one in memory.
    same = {
        e.outvars[0]: e.invars[0] for e in jaxpr.eqns if str(e.primitive) == "reshape"
    }
    leaves = {}
    for leaf, varies in zip(jaxpr.outvars, varying(jaxpr, inputs), strict=True):
        if not varies:
            continue
        while leaf in same:
            leaf = same[leaf]
        leaves[leaf] = leaf.aval
    gradients = [(vocab_size, config.model.d_model), (vocab_size,)]
    return sum(
        a.size * a.dtype.itemsize
        for a in leaves.values()
        if a.shape not in gradients  # pyright: ignore
    )


BFLOAT16 = {"dtype": "bfloat16"}
KEPT: list[tuple[dict[str, Any], int]] = [  # variant, length
    *(({"activation": name}, 5) for name in ACTIVATIONS),
    *((variant, length) for variant in ALL_AWAY for length in (3, 13)),
    ({}, 2),
    ({"max_length": 256}, 200),
    ({"dropout": 0.0}, 7),
    ({"norm": "pre"}, 7),
    ({"norm": "pre", "dropout": 0.0, "max_length": 100}, 60),
    ({"d_k": 30, "d_v": 3}, 7),
    ({"d_k": 3, "d_v": 30, **BFLOAT16}, 7),
    ({"d_ff": 300, "num_heads": 1, **BFLOAT16}, 16),
    ({"d_model": 64, **BFLOAT16}, 16),
    ({"num_heads": 5, "norm": "pre", **BFLOAT16}, 16),
    ({"num_layers": 1, "decoder_layers": 4, "dropout": 0.0, **BFLOAT16}, 9),
    ({"num_layers": 4, "decoder_layers": 1, "final_norm": "on"}, 9),
    ({"share_embeddings": False, "tie_output": False, "output_bias": True}, 9),
]


@pytest.mark.parametrize(("variant", "length"), KEPT, ids=str)
def test_activations_are_what_differentiation_keeps(variant, length):
    rows = 3
    config = make_config(29, rows * length, **TINY | variant)
    estimate = describe(config, length=length).bytes_per_device.activations
    # Of gelu_tanh, releases of JAX keep one array more or less.
    near = 0.1 if config.model.activation == "gelu_tanh" else 0.01
    assert estimate == pytest.approx(bytes_kept(config, rows, length), rel=near)


def test_activations_of_base_are_what_differentiation_keeps():
    config = make_config(tokens=25_600, dtype="bfloat16")
    estimate = describe(config, length=32).bytes_per_device.activations
    assert estimate == pytest.approx(bytes_kept(config, 800, 32), rel=0.01)


def test_auto_counts_as_bfloat16():
    auto, half, full = (
        describe(make_config(dtype=dtype)).activations
        for dtype in ("auto", "bfloat16", "float32")
    )
    assert auto == half
    assert full.dtype == "float32" and full.target_token > half.target_token


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_language_models_layers_are_an_encoders(variant):
    """But for attention: only an encoder's keys may be padding, a byte each."""
    variant = TINY | variant | {"num_layers": 3, "decoder_layers": 3}
    both = describe(make_config(29, **variant), length=7)
    alone = describe(make_config(29, decoder_only=True, **variant), length=7)
    model = make_config(**variant).model
    numbers = model.num_heads * (model.d_k + model.d_v)  # a token's keys and values
    width = 2 if model.dtype == "bfloat16" else 4
    assert alone.activations.source_token == alone.flops.forward_source_token == 0
    assert both.activations.source_token == (
        alone.activations.target_token + 3 * (7 * model.num_heads) + 3 * width * numbers
    )
    assert both.flops.forward_source_token == (
        alone.flops.forward_target_token
        - 2 * 29 * model.d_model
        + 3 * 2 * model.d_model * numbers
    )
