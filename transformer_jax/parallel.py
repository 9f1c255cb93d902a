"""The only file that knows about devices: replicate, split rows, pmap.

A step is a pure function of (state, batch) on one device; here it is put on all of
them. The state is replicated, the rows of the batch are split, and sums cross devices
by the axis name `DATA_AXIS`. The number of devices never changes what is computed.
"""

import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

DATA_AXIS = "data"


def cache_compilations() -> None:
    """Keeps compiled programs in the user's cache folder, so a second start is quick.

    `JAX_COMPILATION_CACHE_DIR` names another folder.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        caches = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
        folder = caches.expanduser() / "transformer_jax" / "compiled"
        jax.config.update("jax_compilation_cache_dir", str(folder))


def devices() -> list[Any]:
    """Returns the devices that the batch is split over."""
    return jax.devices()


def device_count() -> int:
    """Returns their number."""
    return len(devices())


def replicate(tree: Any) -> Any:
    """Copies `tree` to every device: each array `[...]` becomes `[devices, ...]`."""
    mesh = Mesh(np.asarray(devices()), (DATA_AXIS,))
    sharding = NamedSharding(mesh, PartitionSpec(DATA_AXIS))
    count = device_count()

    def copy(x: Any) -> jax.Array:
        return jax.device_put(np.broadcast_to(x, (count, *np.shape(x))), sharding)

    return jax.tree.map(copy, tree)


def unreplicate(tree: Any) -> Any:
    """Fetches one device's copy of every array of `tree`, as NumPy arrays."""
    shards = jax.tree.map(lambda x: x.addressable_shards[0].data, tree)
    return jax.tree.map(lambda x: np.asarray(x)[0], jax.device_get(shards))


def split_rows(tree: Any) -> Any:
    """Splits `[rows, ...]` over devices: `[devices, rows per device, ...]`.

    Where the rows do not divide, zero rows are added at the end: they have length 0
    and count for nothing.
    """
    count = device_count()

    def split(x: np.ndarray) -> np.ndarray:
        missing = -len(x) % count
        if missing:
            x = np.concatenate([x, np.zeros((missing, *x.shape[1:]), x.dtype)])
        return x.reshape(count, len(x) // count, *x.shape[1:])

    return jax.tree.map(split, tree)


def join_rows(tree: Any, rows: int) -> Any:
    """Undoes `split_rows`: NumPy arrays `[rows, ...]`, without the rows it added."""

    def join(x: jax.Array) -> np.ndarray:
        host = np.asarray(x)
        return host.reshape(-1, *host.shape[2:])[:rows]

    return jax.tree.map(join, tree)


def over_devices(function: Callable[..., Any], donate_first: bool = False) -> Any:
    """Compiles `function` to run on every device, with sums over `DATA_AXIS`.

    Args:
        function: takes per-device arrays.
        donate_first: its first argument's buffers are reused for the result.

    Returns:
        A function of arrays with a leading axis of devices.
    """
    donated = (0,) if donate_first else ()
    return jax.pmap(
        function, axis_name=DATA_AXIS, devices=devices(), donate_argnums=donated
    )
