"""Model, loss, gradients and updates against PyTorch's own Transformer and Adam.

`tests/golden/make_torch_golden.py` made the numbers and says what they are. PyTorch
computed them in float64; differences are those of float32 on this side.
"""

import dataclasses
import functools
import pathlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.config import ModelConfig, TrainConfig
from transformer_jax.data.batching import Batch
from transformer_jax.model.transformer import Transformer
from transformer_jax.train.loss import LossSums
from transformer_jax.train.optimizer import make_optimizer
from transformer_jax.train.step import TrainState, batch_loss, train_step

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "torch_transformer.npz"
VOCAB, SMOOTHING = 23, 0.1
STACKS = ("encoder", "decoder")
CONFIG = ModelConfig(
    num_layers=2,
    d_model=12,
    d_ff=17,
    num_heads=3,
    d_k=4,
    d_v=4,
    dropout=0.0,
    attention_bias=True,
    dtype="float32",
)
VARIANTS: dict[str, dict[str, Any]] = {
    "post": {},
    "pre": {"norm": "pre"},
    "gelu": {
        "activation": "gelu",
        "norm_epsilon": 1e-5,
        "final_norm": "on",
        "share_embeddings": False,
        "tie_output": False,
        "output_bias": True,
    },
}
TRAIN = TrainConfig(learning_rate=0.05, warmup_steps=2)

Params = dict[str, Any]


@functools.cache
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN, allow_pickle=False) as arrays:
        return dict(arrays)


def batch() -> Batch:
    return Batch(**{field: golden()[f"batch/{field}"] for field in Batch._fields[:5]})


def model_of(case: str) -> Any:
    return Transformer(dataclasses.replace(CONFIG, **VARIANTS[case]), VOCAB)


# --- PyTorch's parameters under this package's names ----------------------------


def named(case: str, vector: np.ndarray) -> dict[str, np.ndarray]:
    """Cuts a vector of all parameters, or their gradients, into PyTorch's arrays."""
    arrays, start = {}, 0
    names, shapes = golden()[f"{case}/names"], golden()[f"{case}/shapes"]
    for name, shape in zip(names.tolist(), shapes, strict=True):
        shape = shape[shape > 0]
        stop = start + int(shape.prod())
        arrays[name], start = vector[start:stop].reshape(shape), stop
    assert start == vector.size
    return arrays


def to_params(case: str, vector: np.ndarray) -> Params:
    """Returns the tree of a vector, every array of which goes to one place only."""
    arrays = named(case, vector)
    take = arrays.pop  # a second time it would raise
    model, heads = CONFIG.d_model, CONFIG.num_heads

    def norm(name: str) -> Params:
        return {"scale": take(f"{name}.weight"), "bias": take(f"{name}.bias")}

    def dense(name: str) -> Params:
        return {"kernel": take(f"{name}.weight").T, "bias": take(f"{name}.bias")}

    def attention(name: str) -> Params:
        kernels = np.split(take(f"{name}.in_proj_weight"), 3)
        biases = np.split(take(f"{name}.in_proj_bias"), 3)
        output = dense(f"{name}.out_proj")
        output["kernel"] = output["kernel"].reshape(heads, -1, model)
        inputs = {
            part: {
                "kernel": kernel.T.reshape(model, heads, -1),
                "bias": bias.reshape(heads, -1),
            }
            for part, kernel, bias in zip(
                ("query", "key", "value"), kernels, biases, strict=True
            )
        }
        return {**inputs, "output": output}

    def layer(name: str, attentions: dict[str, str]) -> Params:
        tree = {}
        for number, (ours, theirs) in enumerate(attentions.items(), 1):
            tree[ours] = attention(f"{name}.{theirs}")
            tree[f"{ours}_residual"] = {"norm": norm(f"{name}.norm{number}")}
        last = norm(f"{name}.norm{len(attentions) + 1}")
        up, down = dense(f"{name}.linear1"), dense(f"{name}.linear2")
        tree["feed_forward"] = {"up": up, "down": down}
        tree["feed_forward_residual"] = {"norm": last}
        return tree

    def stack(name: str, attentions: dict[str, str]) -> Params:
        tree = {
            f"layer_{i}": layer(f"{name}.layers.{i}", attentions)
            for i in range(CONFIG.num_layers)
        }
        return tree | ({"norm": norm(f"{name}.norm")} if case != "post" else {})

    own = {"self_attention": "self_attn"}
    cross = {"cross_attention": "multihead_attn"}
    params = {
        "embedding": {"table": take("target_table.weight")},
        "encoder": stack("encoder", own),
        "decoder": stack("decoder", own | cross),
    }
    if case == "gelu":
        params["source_embedding"] = {"table": take("source_table.weight")}
        params["output"] = {"table": take("output.weight"), "bias": take("output.bias")}
    assert not arrays
    return params


def weights_of(case: str) -> Params:
    return to_params(case, golden()[f"{case}/weights"])


# A softmax does not see the keys' biases: they add the same to all scores of a query.
NO_GRADIENT = "['key']['bias']"


def leaves(tree: Params) -> dict[str, np.ndarray]:
    """Returns the leaves under their paths."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in found}


@pytest.mark.parametrize("case", VARIANTS)
def test_every_parameter_has_its_place(case: str) -> None:
    init = functools.partial(model_of(case).init, jax.random.key(0))
    shapes = nn.unbox(jax.eval_shape(init, *batch()[:3]))["params"]
    weights = weights_of(case)
    assert jax.tree.map(np.shape, weights) == jax.tree.map(lambda x: x.shape, shapes)
    for path, leaf in leaves(weights).items():
        assert np.unique(leaf).size == leaf.size, path  # no two could be exchanged
    for path, leaf in leaves(to_params(case, golden()[f"{case}/gradients"])).items():
        largest = np.abs(leaf).max()
        assert largest < 1e-15 if path.endswith(NO_GRADIENT) else largest > 1e-3, path


# --- The comparison -------------------------------------------------------------


@functools.cache
def computed(case: str) -> tuple[np.ndarray, LossSums, Params, Params]:
    """Returns logits, sums, intermediates and the gradients of loss / tokens."""

    def loss(params: Params) -> Any:
        logits, state = model_of(case).apply(
            {"params": params},
            *batch()[:3],
            capture_intermediates=lambda module, _: module.name in STACKS,
            mutable=["intermediates"],
        )
        kept = state["intermediates"]
        x = kept["decoder"]["whole"][0]
        sums = batch_loss(params, x, batch(), SMOOTHING)
        return sums.loss / batch().target_length.sum(), (logits, sums, kept)

    compiled = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (_, others), gradients = jax.device_get(compiled(weights_of(case)))
    return *others, gradients


def assert_close(
    found: np.ndarray, expected: np.ndarray, tolerance: float, where: str = ""
) -> None:
    """Compares up to a part of the largest expected number."""
    largest = np.abs(expected).max()
    assert largest > 1e-3, where
    np.testing.assert_allclose(
        found, expected, rtol=0, atol=tolerance * largest, err_msg=where
    )


@pytest.mark.parametrize("case", VARIANTS)
def test_logits_and_attention_weights(case: str) -> None:
    logits, _, kept, _ = computed(case)
    real = np.arange(logits.shape[1]) < batch().target_length[:, None]
    expected = golden()[f"{case}/logits"]
    assert expected.std() > 0.5
    assert_close(logits[real], expected[real], 5e-6)
    output = kept["encoder"]["__call__"][0]
    assert_close(output, golden()[f"{case}/encoder"], 5e-6)
    names = {"self_attn": "self_attention", "multihead_attn": "cross_attention"}
    keys = [key for key in golden() if key.startswith(f"{case}/attention/")]
    assert len(keys) == 3 * CONFIG.num_layers
    for key in keys:
        side, _, layer, name = key.split("/")[-1].split(".")
        weights = kept[side][f"layer_{layer}"][names[name]]["weights"][0]
        rows = slice(None) if side == "encoder" else real  # by query, then by head
        found, expected = (np.swapaxes(x, 1, 2)[rows] for x in (weights, golden()[key]))
        assert expected.std() > 0.1
        assert_close(found, expected, 5e-6, key)


@pytest.mark.parametrize("case", VARIANTS)
def test_loss_and_gradients(case: str) -> None:
    _, sums, _, gradients = computed(case)
    for name in ("loss", "nll", "correct"):
        expected = golden()[f"{case}/{name}"]
        np.testing.assert_allclose(getattr(sums, name), expected, rtol=1e-6)
    assert sums.tokens == batch().target_length.sum()
    expected = leaves(to_params(case, golden()[f"{case}/gradients"]))
    for path, found in leaves(gradients).items():
        if path.endswith(NO_GRADIENT):
            np.testing.assert_allclose(found, 0, atol=1e-7, err_msg=path)
        else:
            assert_close(found, expected[path], 5e-5, path)


def test_updates_of_adam() -> None:
    """Three whole updates; the largest move of a weight is about 0.02."""
    optimizer = make_optimizer(TRAIN, CONFIG.d_model)
    step, bad, worse = (jnp.zeros((), jnp.int32) for _ in range(3))
    params = weights_of("post")
    state = TrainState(step, params, optimizer.init(params), bad, worse)
    update = jax.jit(
        functools.partial(
            train_step,
            model=model_of("post"),
            optimizer=optimizer,
            smoothing=SMOOTHING,
            seed=0,
            axis_name=None,
        )
    )
    for loss, gradient in zip(
        golden()["post/adam/losses"], golden()["post/adam/gradients"], strict=True
    ):
        state, metrics = update(state, batch())
        np.testing.assert_allclose(metrics.sums.loss, loss, rtol=1e-6)
        norm = np.linalg.norm(gradient)
        np.testing.assert_allclose(metrics.gradient_norm, norm, rtol=1e-5)
    expected = leaves(to_params("post", golden()["post/adam/weights"]))
    start = leaves(params)
    for path, found in leaves(state.params).items():
        # Adam divides the rounding errors of a gradient of 0 by their own size.
        if not path.endswith(NO_GRADIENT):
            assert np.abs(expected[path] - start[path]).max() > 0.01
            np.testing.assert_allclose(found, expected[path], atol=1e-5, err_msg=path)


def test_adam_on_the_same_gradients() -> None:
    optimizer = make_optimizer(TRAIN, CONFIG.d_model)
    weights = jnp.asarray(golden()["post/weights"])
    state = optimizer.init(weights)
    for gradient in golden()["post/adam/gradients"]:
        updates, state = optimizer.update(jnp.asarray(gradient), state)
        weights = weights + updates  # pyright: ignore
    np.testing.assert_allclose(weights, golden()["post/adam/weights"], atol=3e-7)
