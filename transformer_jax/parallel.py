"""The only file that knows about devices: where arrays lie, and what runs where.

A step is a pure function of (state, batch); here it is put on all devices, by one of
two layouts. `Replicated` is `pmap`: every device holds the whole state and some rows of
the batch, and sums cross devices by the axis name `DATA_AXIS`. `Sharded` is `jit` over
a mesh with the axes data, fsdp and tensor: functions see whole arrays, of which every
device holds its part as the logical axis names of the model say. Neither the layout nor
the number of devices changes what is computed.
"""

import contextlib
import functools
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import spmd
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer_jax import machine
from transformer_jax.config import ModelConfig, ParallelConfig
from transformer_jax.errors import ConfigError
from transformer_jax.model.axes import on_mesh

DATA_AXIS = "data"

MOST_CORES = 8  # so that each has rows enough

# Which axes of the mesh a logical axis is split over. Those of parameters: vocab,
# embed (d_model), heads and mlp (d_ff); those of activations: batch, vocab, heads, mlp.
RULES = (
    ("batch", ("data", "fsdp")),
    ("vocab", "tensor"),
    ("heads", "tensor"),
    ("mlp", "tensor"),
    ("embed", "fsdp"),
)


def cache_compilations() -> None:
    """Keeps compiled programs in the user's cache folder, so a second start is quick.

    `JAX_COMPILATION_CACHE_DIR` names another folder.
    """
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        caches = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
        folder = caches.expanduser() / "transformer_jax" / "compiled"
        jax.config.update("jax_compilation_cache_dir", str(folder))


def cores_as_devices() -> None:
    """Makes each core of the processor a device, up to MOST_CORES, before JAX begins.

    The products of a step of decoding are small: a core for each part of the rows is
    quicker than all cores for each product. A number in `XLA_FLAGS` or
    `JAX_NUM_CPU_DEVICES` stands.
    """
    named = "JAX_NUM_CPU_DEVICES" in os.environ
    named |= "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not named:
        cores = min(machine.cores(), MOST_CORES)
        with contextlib.suppress(RuntimeError):  # JAX has begun, with its devices
            jax.config.update("jax_num_cpu_devices", cores)


def devices() -> list[Any]:
    """Returns all devices that there are."""
    return jax.devices()


def largest(numbers: Sequence[int]) -> jax.Array:
    """Starts to find the largest of what all processes give.

    Args:
        numbers: of this process; as many in each.

    Returns:
        `[numbers] int32`, the same in each process; to read it is to wait for it.
    """
    chosen = tuple(devices())
    mesh = Mesh(np.asarray(chosen), (DATA_AXIS,))
    split, own = (
        NamedSharding(mesh, PartitionSpec(DATA_AXIS)),
        np.array([numbers], np.int32),
    )
    shape = len(chosen), len(numbers)
    given = jax.make_array_from_callback(shape, split, lambda index: own)
    return _find_largest(mesh)(given)


@functools.cache
def _find_largest(mesh: Mesh) -> Any:
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(functools.partial(jnp.max, axis=0), out_shardings=everywhere)


def _put(x: Any, sharding: NamedSharding) -> jax.Array:
    """Puts a host array, the same in all processes, on the devices of this one."""
    host = np.asarray(x)
    return jax.make_array_from_callback(host.shape, sharding, host.__getitem__)


def _whole(x: jax.Array) -> np.ndarray:
    """Fetches an array of which this process may hold only a part."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return np.asarray(x)
    return multihost_utils.process_allgather(x, tiled=True)


class Replicated:
    """The whole state on every device, the rows of a batch split over them: `pmap`.

    Arrays on devices have a leading axis, one entry a device, also those of other
    processes.
    """

    axis_name: str | None = DATA_AXIS
    batch_shards = 1  # parts of the batch that lie on other devices, within a function

    def __init__(self) -> None:
        """Takes all devices."""
        self.devices = devices()
        self._mesh = Mesh(np.asarray(self.devices), (DATA_AXIS,))
        self._sharding = NamedSharding(self._mesh, PartitionSpec(DATA_AXIS))
        self._alone = jax.process_count() == 1

    def __str__(self) -> str:
        """Says what runs where."""
        return f"pmap over {len(self.devices)}"

    def place(self, tree: Any, axes: Any = None) -> Any:
        """Copies host arrays `[...]` to every device: `[devices, ...]`."""
        sharding, count = self._sharding, len(self.devices)

        def copy(x: Any) -> jax.Array:
            copies = np.broadcast_to(x, (count, *np.shape(x)))
            if self._alone:
                return jax.device_put(copies, sharding)
            # Copied: a device of the CPU may use the memory that it is given, and the
            # first update overwrites it.
            return _put(copies.copy(), sharding)

        return jax.tree.map(copy, tree)

    def outline(self, tree: Any, axes: Any) -> Any:
        """Returns shapes, types and places of what `place` would give; no arrays."""
        sharding, count = self._sharding, len(self.devices)

        def copy(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((count, *x.shape), x.dtype, sharding=sharding)

        return jax.tree.map(copy, tree)

    def fetch(self, tree: Any) -> Any:
        """Fetches one device's copy of every array of `tree`, as NumPy arrays."""
        shards = jax.tree.map(lambda x: x.addressable_shards[0].data, tree)
        return jax.tree.map(lambda x: np.asarray(x)[0], jax.device_get(shards))

    def split_rows(self, tree: Any) -> Any:
        """Splits `[rows, ...]` over devices: `[devices, rows per device, ...]`.

        Where the rows do not divide, zero rows are added at the end: they have length 0
        and count for nothing.
        """
        count = len(self.devices)

        def split(x: np.ndarray) -> Any:
            x = _fill_rows(x, count)
            x = x.reshape(count, len(x) // count, *x.shape[1:])
            return x if self._alone else _put(x, self._sharding)

        return jax.tree.map(split, tree)

    def join_rows(self, tree: Any, rows: int) -> Any:
        """Undoes `split_rows`: NumPy arrays `[rows, ...]`, without what it added."""

        def join(x: jax.Array) -> np.ndarray:
            host = _whole(x)
            return host.reshape(-1, *host.shape[2:])[:rows]

        return jax.tree.map(join, tree)

    def compile(
        self, function: Callable[..., Any], axes: Any = None, donate: bool = False
    ) -> Any:
        """Compiles `function` to run on every device, with sums over `DATA_AXIS`.

        Args:
            function: takes one device's arrays.
            axes: where it returns a pair, the logical axes of the first.
            donate: whether the first argument's buffers are used for the results.

        Returns:
            A function of arrays as `place` and `split_rows` give them.
        """
        donated = (0,) if donate else ()
        if self._alone:
            return jax.pmap(
                function,
                axis_name=DATA_AXIS,
                devices=self.devices,
                donate_argnums=donated,
            )
        # What pmap is made of. Itself, it would give each process the part of its own
        # devices as another array, which a compiled program does not take.
        rows = PartitionSpec(DATA_AXIS)

        def on_device(*args: Any) -> Any:
            found = function(*jax.tree.map(lambda x: x[0], args))
            return jax.tree.map(lambda x: jnp.expand_dims(x, 0), found)

        mapped = jax.shard_map(
            on_device, mesh=self._mesh, in_specs=rows, out_specs=rows, check_vma=False
        )
        return jax.jit(mapped, donate_argnums=donated)


class Sharded:
    """State, batch and activations split over a mesh (data, fsdp, tensor): `jit`."""

    axis_name: str | None = None

    def __init__(self, config: ParallelConfig) -> None:
        """Makes the mesh of all devices.

        Raises:
            ConfigError: their number is not the product of the mesh's axes.
        """
        self.devices = devices()
        count, inner = len(self.devices), config.fsdp * config.tensor
        data = config.data or max(1, count // inner)
        if data * inner != count:
            raise ConfigError(
                f"config.parallel.data x fsdp x tensor = {data} x {config.fsdp} x "
                f"{config.tensor} = {data * inner}, but there are {count} devices; "
                "change one of the three (data = 0 takes those that are left)"
            )
        shape = data, config.fsdp, config.tensor
        self.mesh = Mesh(np.asarray(self.devices).reshape(shape), _MESH_AXES)
        self.batch_shards = data * config.fsdp

    def __str__(self) -> str:
        """Says what runs where."""
        sizes = " x ".join(f"{name} {n}" for name, n in self.mesh.shape.items())
        return f"mesh {sizes}"

    def shardings(self, axes: Any) -> Any:
        """Returns where arrays of these logical `axes` lie; None is on every device."""
        return spmd.logical_to_mesh_sharding(axes, self.mesh, RULES)

    def place(self, tree: Any, axes: Any = None) -> Any:
        """Gives every device its part of host arrays, as their logical `axes` say."""
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        if axes is None:
            return jax.tree.map(lambda x: _put(x, everywhere), tree)
        return jax.tree.map(_put, tree, self.shardings(axes))

    def outline(self, tree: Any, axes: Any) -> Any:
        """Returns shapes, types and places of what `place` would give; no arrays."""

        def part(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        return jax.tree.map(part, tree, self.shardings(axes))

    def fetch(self, tree: Any) -> Any:
        """Fetches whole arrays, as NumPy arrays; all processes do so together."""
        if jax.process_count() == 1:
            return jax.device_get(tree)
        return jax.tree.map(_whole, tree)

    def split_rows(self, tree: Any) -> Any:
        """Splits `[rows, ...]` over the devices that hold other rows.

        Where the rows do not divide, zero rows are added at the end: they have length 0
        and count for nothing.
        """
        sharding = NamedSharding(self.mesh, PartitionSpec(("data", "fsdp")))

        def split(x: np.ndarray) -> jax.Array:
            return _put(_fill_rows(x, self.batch_shards), sharding)

        return jax.tree.map(split, tree)

    def join_rows(self, tree: Any, rows: int) -> Any:
        """Undoes `split_rows`: NumPy arrays `[rows, ...]`, without what it added."""
        return jax.tree.map(lambda x: x[:rows], self.fetch(tree))

    def compile(
        self, function: Callable[..., Any], axes: Any = None, donate: bool = False
    ) -> Any:
        """Compiles `function` for the mesh; arguments as in `Replicated.compile`."""

        def traced(*args: Any) -> Any:
            with on_mesh(lambda axes: self.shardings(PartitionSpec(*axes))):
                return function(*args)

        donated = (0,) if donate else ()
        if axes is None:
            return jax.jit(traced, donate_argnums=donated)
        outputs = (self.shardings(axes), NamedSharding(self.mesh, PartitionSpec()))
        return jax.jit(traced, donate_argnums=donated, out_shardings=outputs)


Layout = Replicated | Sharded

_MESH_AXES = ("data", "fsdp", "tensor")


def make_layout(config: ParallelConfig) -> Layout:
    """Returns the layout that `config` asks for; ConfigError if it cannot be."""
    return Sharded(config) if config.strategy == "mesh" else Replicated()


def decoding_layout(config: ParallelConfig) -> Layout:
    """Returns the layout that a run's parameters are decoded with.

    It is the run's, or the replicated one where its mesh cannot be made of the devices
    that are here.
    """
    try:
        return make_layout(config)
    except ConfigError:
        return Replicated()


def require_divisible(
    config: ParallelConfig, model: ModelConfig, vocab_sizes: Iterable[int]
) -> None:
    """Checks that what the mesh splits divides.

    Args:
        config: of the mesh.
        model: its sizes.
        vocab_sizes: of its tables.

    Raises:
        ConfigError: a size does not divide; it names both fields.
    """
    sizes = [
        ("config.model.num_heads", model.num_heads, "tensor", config.tensor),
        ("config.model.d_ff", model.d_ff, "tensor", config.tensor),
        ("config.model.d_model", model.d_model, "fsdp", config.fsdp),
    ]
    sizes += [
        ("the vocabulary (config.tokenizer.vocab_size)", size, "tensor", config.tensor)
        for size in vocab_sizes
    ]
    for name, size, axis, parts in sizes:
        if size % parts:
            raise ConfigError(
                f"{name} is {size}, which config.parallel.{axis} = {parts} does not "
                "divide; change one of them"
            )


def _fill_rows(x: np.ndarray, count: int) -> np.ndarray:
    """Adds zero rows until `count` divides them."""
    missing = -len(x) % count
    if not missing:
        return x
    return np.concatenate([x, np.zeros((missing, *x.shape[1:]), x.dtype)])
