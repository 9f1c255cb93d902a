"""One update and one evaluation, as pure functions of arrays.

With `axis_name` they run per device inside `pmap`: sums of loss, tokens and gradients
cross devices before anything is divided, so the update depends on the global batch
alone. With None they are functions of whole arrays, on one device or on a mesh.

An update of several batches adds up `batch_sums` and then takes `apply_sums`.
"""

import functools
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax

from transformer_jax.data.batching import Batch
from transformer_jax.model.transformer import Transformer, output_weights
from transformer_jax.train.loss import LossSums, cross_entropy

Params = Any


class TrainState(flax.struct.PyTreeNode):
    """All that an update changes; float32 throughout."""

    step: jax.Array  # [] int32, batches taken so far, so also the number of the next
    params: Params
    opt_state: optax.OptState
    bad_in_a_row: jax.Array  # [] int32, skipped updates since the last good one
    bad_total: jax.Array  # [] int32, skipped updates of the whole run


class StepMetrics(flax.struct.PyTreeNode):
    """What one update reports."""

    sums: LossSums  # of the global batch
    gradient_norm: jax.Array  # [] float32, global L2 norm
    first_bad: jax.Array  # [] int32, which of `value_names` is not finite first, or -1
    bad_in_a_row: jax.Array  # [] int32, as in the state
    bad_total: jax.Array


# Compiled, so that values, shapes and axes come of one trace.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _init(
    model: Transformer, optimizer: optax.GradientTransformation, key: jax.Array
) -> TrainState:
    """Returns the state before the first update, its parameters boxed with axes."""
    tokens, length = jnp.zeros((1, 2), jnp.int32), jnp.ones((1,), jnp.int32)
    params = model.init(key, tokens, length, tokens)["params"]
    none = jnp.zeros((), jnp.int32)
    return TrainState(none, params, optimizer.init(params), none, none)


def init_state(
    model: Transformer, optimizer: optax.GradientTransformation, seed: int
) -> TrainState:
    """Returns the state before the first update, parameters drawn by `seed`."""
    return nn.unbox(_init(model, optimizer, jax.random.key(seed)))


def state_shapes(
    model: Transformer, optimizer: optax.GradientTransformation
) -> TrainState:
    """Returns shape and dtype of every array of the state."""
    return nn.unbox(_init.eval_shape(model, optimizer, jax.random.key(0)))


def state_axes(
    model: Transformer, optimizer: optax.GradientTransformation
) -> TrainState:
    """Returns the logical axis names of every array of the state, as PartitionSpecs."""
    return nn.get_partition_spec(_init.eval_shape(model, optimizer, jax.random.key(0)))


def sums_axes(state: TrainState) -> "BatchSums":
    """Returns the logical axis names of `BatchSums`, given those of the state."""
    none = state.step
    return BatchSums(none, LossSums(none, none, none, none), state.params)


def sum_over(tree: Any, axis_name: str | None) -> Any:
    """Adds up `tree` over devices; that of one device is the sum already."""
    if axis_name is None or jax.lax.axis_size(axis_name) == 1:
        return tree  # `psum` over one device would copy it
    return jax.lax.psum(tree, axis_name)


class BatchSums(flax.struct.PyTreeNode):
    """Sums over the batches of an update, of this device's rows; nothing is divided."""

    batches: jax.Array  # [] int32, how many
    losses: LossSums
    gradients: Params  # of the summed loss


def zero_sums(state: TrainState) -> tuple[BatchSums, None]:
    """Returns the sums of no batch."""
    zero, none = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
    losses = LossSums(zero, zero, none, none)
    return BatchSums(none, losses, jax.tree.map(jnp.zeros_like, state.params)), None


def model_inputs(batch: Batch) -> tuple[Any, ...]:
    """Returns what `Transformer.hidden` takes of a batch, packed or not."""
    segments = batch.source_segment, batch.target_segment
    return batch.source, batch.source_length, batch.target_in, *segments


def batch_loss(
    params: Params, x: Any, batch: Batch, smoothing: float, shards: int = 1
) -> LossSums:
    """Returns the sums of a batch from the decoder's output `x [R, T, D]`."""
    table, bias = output_weights(params)
    targets = batch.target_out, batch.target_length
    return cross_entropy(x, table, *targets, smoothing, bias, shards)


def batch_sums(
    state: TrainState,
    number: jax.Array,
    batch: Batch,
    *,
    model: Transformer,
    smoothing: float,
    seed: int,
    shards: int = 1,
) -> BatchSums:
    """Returns loss and gradient of one batch, teacher-forced.

    Args:
        state: the same on every device.
        number: `[] int32`, of the batch in the run, for dropout.
        batch: this device's rows.
        model: its `data_axis` is the axis name of the devices.
        smoothing: label smoothing.
        seed: of dropout.
        shards: parts that the batch is split into within this function.
    """
    dropout = jax.random.fold_in(jax.random.key(seed), number)

    def loss_fn(params: Params) -> tuple[jax.Array, LossSums]:
        x = model.apply(
            {"params": params},
            *model_inputs(batch),
            deterministic=False,
            rngs={"dropout": dropout},
            method="hidden",
        )
        sums = batch_loss(params, x, batch, smoothing, shards)
        return sums.loss, sums

    (_, losses), gradients = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return BatchSums(jnp.ones((), jnp.int32), losses, gradients)


def add_batch(
    total: BatchSums,
    state: TrainState,
    batch: Batch,
    *,
    accumulate: int,
    **options: Any,
) -> tuple[BatchSums, None]:
    """Adds `batch_sums` of one of `accumulate` batches of an update to `total`."""
    number = state.step * accumulate + total.batches
    new = batch_sums(state, number, batch, **options)
    return jax.tree.map(jnp.add, total, new), None


def apply_sums(
    state: TrainState,
    total: BatchSums,
    *,
    optimizer: optax.GradientTransformation,
    axis_name: str | None,
) -> tuple[TrainState, StepMetrics]:
    """Takes one update by the mean gradient over all tokens.

    A non-finite loss or gradient leaves parameters, moments and schedule as they are
    and is counted.

    Args:
        state: the same on every device.
        total: of this device's rows.
        optimizer: the transformation that made `state.opt_state`.
        axis_name: of the devices, or None.

    Returns:
        The next state and the metrics, both the same on every device.
    """
    losses, gradients = sum_over((total.losses, total.gradients), axis_name)
    # Of the sums, so that the mean gradient is made where it is used, not stored.
    squares = [jnp.square(leaf).sum() for leaf in jax.tree.leaves(gradients)]
    norm = jnp.sqrt(sum(squares)) / losses.tokens
    gradients = jax.tree.map(lambda g: g / losses.tokens, gradients)
    bad = ~jnp.isfinite(jnp.stack([losses.loss, *squares]))
    good = ~bad.any()
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)

    def keep_if_good(new: Any, old: Any) -> Any:
        return jax.tree.map(lambda n, o: jnp.where(good, n, o), new, old)

    bad_in_a_row = jnp.where(good, 0, state.bad_in_a_row + 1)
    bad_total = state.bad_total + ~good
    new_state = TrainState(
        step=state.step + 1,
        params=keep_if_good(params, state.params),
        opt_state=keep_if_good(opt_state, state.opt_state),
        bad_in_a_row=bad_in_a_row,
        bad_total=bad_total,
    )
    first_bad = jnp.where(good, -1, jnp.argmax(bad)).astype(jnp.int32)
    return new_state, StepMetrics(losses, norm, first_bad, bad_in_a_row, bad_total)


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    optimizer: optax.GradientTransformation,
    axis_name: str | None,
    **options: Any,
) -> tuple[TrainState, StepMetrics]:
    """Takes one update with one batch; see `batch_sums` and `apply_sums`."""
    total = batch_sums(state, state.step, batch, **options)
    return apply_sums(state, total, optimizer=optimizer, axis_name=axis_name)


def value_names(params: Params) -> list[str]:
    """Returns the names that `StepMetrics.first_bad` counts."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    parts = ["/".join(key.key for key in path) for path in paths]
    return ["the loss", *(f"the gradient of {name}" for name in parts)]


def first_bad_output(params: Params, batch: Batch, model: Transformer) -> str | None:
    """Returns the first module, as the forward pass runs, with an output not finite.

    For the error message of a run that stops; without dropout, on one device.
    """
    names: list[str] = []

    def forward(params: Params) -> list[jax.Array]:
        finite = []

        def watch(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
            result = call(*args, **kwargs)
            if context.method_name == "__call__" and context.module.path:
                names.append("/".join(context.module.path))
                leaves = jax.tree.leaves(result)
                finite.append(jnp.stack([jnp.isfinite(x).all() for x in leaves]).all())
            return result

        inputs = model_inputs(batch)
        with nn.intercept_methods(watch):
            model.apply({"params": params}, *inputs, method="hidden")
        return finite

    finite = jax.device_get(jax.jit(forward)(params))
    return next((n for n, ok in zip(names, finite, strict=True) if not ok), None)


def eval_step(
    params: Params,
    batch: Batch,
    *,
    model: Transformer,
    axis_name: str | None,
    shards: int = 1,
) -> LossSums:
    """Returns the sums of a batch without dropout and smoothing, over all devices."""
    x = model.apply({"params": params}, *model_inputs(batch), method="hidden")
    return sum_over(batch_loss(params, x, batch, 0.0, shards), axis_name)
