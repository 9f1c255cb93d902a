"""What a run would cost on so many devices, by compiling its update without data.

The devices are simulated: this machine's processor stands in for each of them, and no
array of the model is ever made. Sizes and collectives are those of the program that the
compiler makes for the processor. A chip's compiler lays arrays out in its own way, so
memory is an estimate: the processor computes bfloat16 in float32, and fuses less.
"""

import dataclasses
import math
import time
from typing import Any

import jax

from transformer_jax import parallel
from transformer_jax.chips import CHIPS
from transformer_jax.collectives import Traffic, traffic
from transformer_jax.config import BatchConfig, Config
from transformer_jax.data.batching import Shape, make_batch
from transformer_jax.describe import aligned, describe, rounded
from transformer_jax.errors import ConfigError
from transformer_jax.model.transformer import Transformer
from transformer_jax.train.optimizer import make_optimizer
from transformer_jax.train.programs import Programs
from transformer_jax.train.step import state_axes, state_shapes

# What makes compiling quick; sizes and collectives are the same without it.
_QUICKLY = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on every device while a program runs; the last two by the compiler."""

    held: int  # the state and the batch; the sums of an update of several batches
    outputs: int  # those that do not take the place of an argument
    temporaries: int

    @property
    def peak(self) -> int:
        """All of them together."""
        return self.held + self.outputs + self.temporaries


@dataclasses.dataclass(frozen=True)
class DryRun:
    """What `dry_run` finds; bytes and FLOPs are those of one device."""

    layout: str
    devices: int
    dtype: str  # compute type
    parameters: int  # of the model
    vocab_size: int
    shape: Shape  # what was compiled
    rows: int  # of the shape with those that make them divide over the devices
    shapes: int  # that a run compiles at the most
    accumulate: int  # batches of this shape an update
    parameter_bytes: int
    optimizer_bytes: int  # both moments and the counters
    memory: Memory  # of the program that needs most
    flops: int  # of an update's matrix products, in closed form
    compiler_flops: float  # of an update, the body of each loop counted once
    collectives: tuple[Traffic, ...]  # of an update
    seconds: float  # that compiling took

    @property
    def bytes_sent(self) -> float:
        """What all collectives of an update send."""
        return sum(each.bytes_sent for each in self.collectives)


def simulate(devices: int) -> None:
    """Lets JAX see so many devices; before it is used for anything else."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_enable_compilation_cache", False)


def dry_run(config: Config) -> DryRun:
    """Compiles the update of `config` for all devices that JAX sees.

    The vocabulary has `config.tokenizer.vocab_size` entries, and the compute type
    `auto` is bfloat16, as it is on accelerators.

    Raises:
        ConfigError: sizes do not divide over the devices, or no sentence fits.
    """
    if config.model.dtype == "auto":
        model_config = dataclasses.replace(config.model, dtype="bfloat16")
        config = dataclasses.replace(config, model=model_config)
    vocab_size, model_config = config.tokenizer.vocab_size, config.model
    source_size = config.tokenizer.source_size
    sizes = {vocab_size, source_size}
    parallel.require_divisible(config.parallel, model_config, sizes)
    layout = parallel.make_layout(config.parallel)
    model = Transformer(model_config, vocab_size, source_vocab_size=source_size)
    optimizer = make_optimizer(config.train, model_config.d_model)
    axes = state_axes(model, optimizer)
    fresh = state_shapes(model, optimizer)
    shape = longest_shape(config.batch, model_config.max_length)
    batch = make_batch([], [], shape)
    if config.batch.packing:
        segments = {"source_segment": batch.source, "target_segment": batch.target_in}
        batch = batch._replace(**segments)
    started = time.monotonic()
    programs = Programs(config, layout, model, optimizer, axes)
    compiled = [
        (times, program.compile(compiler_options=_QUICKLY))
        for times, program in programs.lower(batch)
    ]
    seconds = time.monotonic() - started
    state = programs.state
    devices = len(layout.devices)
    split = layout.split_rows(batch)
    parts = devices if layout.axis_name else layout.batch_shards
    held = device_bytes(state) + sum(x.nbytes for x in jax.tree.leaves(split)) // parts
    held += device_bytes(programs.total) if config.train.accumulate > 1 else 0
    rows = split.source.size // shape.source
    forward = describe(config, length=shape.source).flops
    a_pair = forward.forward_source_token + forward.forward_target_token
    flops = 3 * config.train.accumulate * rows * shape.source * a_pair
    return DryRun(
        layout=str(layout),
        devices=devices,
        dtype=model_config.dtype,
        parameters=sum(math.prod(x.shape) for x in jax.tree.leaves(fresh.params)),
        vocab_size=vocab_size,
        shape=shape,
        rows=rows,
        shapes=1 if config.batch.packing else config.batch.buckets,
        accumulate=config.train.accumulate,
        parameter_bytes=device_bytes(state.params),
        optimizer_bytes=device_bytes(state.replace(params=None)),
        memory=max((_memory(p, held) for _, p in compiled), key=lambda m: m.peak),
        flops=flops // devices,
        compiler_flops=sum(n * p.cost_analysis()["flops"] for n, p in compiled),
        collectives=_add_up(compiled, devices),
        seconds=seconds,
    )


def longest_shape(config: BatchConfig, length: int) -> Shape:
    """Returns the shape of the longest sentences, which needs the most memory.

    Raises:
        ConfigError: they do not fit into the token budget.
    """
    multiple = config.row_multiple
    rows = config.tokens // length // multiple * multiple
    if not rows:
        raise ConfigError(
            f"config.batch.tokens = {config.tokens} holds no {multiple} rows "
            f"(config.batch.row_multiple) of config.model.max_length = {length}; set "
            f"it to {length * multiple} or more, or lower config.model.max_length"
        )
    return Shape(rows, length, length)


def device_bytes(outline: Any) -> int:
    """Returns the bytes that each device holds of arrays that a layout outlined."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(outline)
    )


def _memory(program: Any, held: int) -> Memory:
    # What a program does not read, such as moments while gradients are added up, is no
    # argument of it, but on the device all the same.
    found = program.memory_analysis()
    return Memory(
        held,
        found.output_size_in_bytes - found.alias_size_in_bytes,
        found.temp_size_in_bytes,
    )


def _add_up(compiled: list[tuple[int, Any]], devices: int) -> tuple[Traffic, ...]:
    """Returns the collectives of an update, of all its programs together."""
    found: dict[tuple[str, int], Traffic] = {}
    for times, program in compiled:
        for each in traffic(program.as_text(), devices):
            key = each.kind, each.devices
            before = found.get(key, Traffic(*key, 0, 0.0))
            count = before.count + times * each.count
            sent = before.bytes_sent + times * each.bytes_sent
            found[key] = Traffic(*key, count, sent)
    return tuple(sorted(found.values(), key=lambda t: -t.bytes_sent))


# --- Output ---------------------------------------------------------------------


def as_dict(found: DryRun, chips: list[str]) -> dict[str, Any]:
    """Returns plain dictionaries and exact numbers, for JSON."""
    values = dataclasses.asdict(found)
    values["shape"] = found.shape._asdict()
    values["memory"]["peak"] = found.memory.peak
    values["bytes_sent"] = found.bytes_sent
    values["chips"] = {
        name: {
            "memory": CHIPS[name].memory,
            "fits": found.memory.peak <= CHIPS[name].memory,
            "least_seconds": found.flops / CHIPS[name].flops,
        }
        for name in chips
    }
    return values


def as_text(found: DryRun, chips: list[str]) -> str:
    """Returns lines of plain text, without a last newline; numbers are rounded."""
    shape, memory, filling = found.shape, found.memory, found.rows - found.shape.rows
    times = f", {found.accumulate} times an update" if found.accumulate > 1 else ""
    sizes = [
        ("parameters", found.parameter_bytes),
        ("optimiser state", found.optimizer_bytes),
        ("peak memory", memory.peak),
        ("  of it state, batch", memory.held),
        ("  of it results apart", memory.outputs),
        ("  of it temporary", memory.temporaries),
    ]
    flops = [
        ("matrix products, in closed form", found.flops),
        ("all, by the compiler, a loop's body once", found.compiler_flops),
    ]
    sent = [
        (f"{each.count} {each.kind} among {each.devices}", each.bytes_sent)
        for each in found.collectives
    ]
    return "\n".join(
        [
            f"layout    {found.layout}, simulated; {found.dtype} compute, "
            f"JAX {jax.__version__}",
            f"model     {found.parameters:,} parameters, vocabulary "
            f"{found.vocab_size:,}",
            f"shape     {shape.rows}x({shape.source}+{shape.target}), the longest "
            f"sentences{times}"
            + (f"; {filling} empty rows are added, to divide" if filling else ""),
            f"shapes    up to {found.shapes} in a run, chosen by its lengths; "
            "only this one was compiled",
            f"compiled  in {found.seconds:.1f} s",
            "",
            f"Bytes per device, of {found.devices}",
            *aligned(sizes, "B"),
            "",
            "FLOPs per device, an update",
            *aligned(flops, "FLOP"),
            "",
            "Bytes that a device sends, an update",
            *aligned([*sent, ("total", found.bytes_sent)], "B"),
            "",
            "Chips, by that peak memory, and the time that the matrix products take at "
            "least",
            *(_chip_line(found, name) for name in chips),
        ]
    )


def _chip_line(found: DryRun, name: str) -> str:
    chip = CHIPS[name]
    fits = "fits" if found.memory.peak <= chip.memory else "does not fit"
    share, seconds = found.memory.peak / chip.memory, found.flops / chip.flops
    return (
        f"  {name:8} {fits:12}  {share:6.1%} of {rounded(chip.memory, 'B'):>8}  "
        f"{1000 * seconds:6.1f} ms"
    )
