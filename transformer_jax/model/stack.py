"""A stack of layers: one by one, or so that it takes less memory or compile time."""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.model.layers import split_key


def run_layers(
    layers: Sequence[nn.Module],
    method: Callable[..., jax.Array],
    x: jax.Array,
    key: jax.Array | None,
    *inputs: jax.Array,
    remat: bool,
    scan: bool,
) -> jax.Array:
    """Runs layers of one kind after another.

    Args:
        layers: bound modules.
        method: of their class: a function of layer, x, key and `inputs` to the next x.
        x: `[B, T, D]`.
        key: of dropout, or None for none.
        inputs: the same for all layers.
        remat: each layer's activations are not kept for the backward pass but computed
            again there.
        scan: one layer is compiled and run in a loop over the stacked parameters, so
            compiling takes no longer for more layers. The parameters stay as they are.

    Returns:
        `[B, T, D]`, the same in all cases.
    """
    keys = split_key(key, len(layers))
    if layers[0].is_initializing() or not (remat or scan):
        for layer, layer_key in zip(layers, keys, strict=True):
            x = method(layer, x, layer_key, *inputs)
        return x
    alone = layers[0].clone(parent=None, name=None)

    def apply(x: jax.Array, params: Any, key: jax.Array | None) -> jax.Array:
        return alone.apply({"params": params}, x, key, *inputs, method=method)  # pyright: ignore

    if remat:
        apply = jax.checkpoint(apply, prevent_cse=not scan)  # pyright: ignore
    params = [layer.variables["params"] for layer in layers]
    if not scan:
        for layer_params, layer_key in zip(params, keys, strict=True):
            x = apply(x, layer_params, layer_key)
        return x

    def body(x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        return apply(x, *layer), None

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)
    stacked_keys = None if key is None else jnp.stack(keys)  # pyright: ignore
    return jax.lax.scan(body, x, (stacked, stacked_keys))[0]
