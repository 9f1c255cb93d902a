"""What a config costs before anything runs: parameters, FLOPs, bytes per device.

All of it is arithmetic on the config's numbers, so it needs no JAX and no device, and
a model far larger than this machine is described in an instant. The sizes are those of
the paper: N num_layers, d d_model, h num_heads, V vocabulary.
"""

import dataclasses
import math
from typing import Any

from transformer_jax.config import Config, ModelConfig
from transformer_jax.errors import ConfigError

FLOAT32_BYTES = 4  # parameters, gradients, moments and logits are float32
LOSS_CHUNK = 512  # CHUNK of train/loss.py, which imports JAX; a test compares them


@dataclasses.dataclass(frozen=True)
class Component:
    """One row of the table: the parameters of one kind, in all layers together."""

    component: str
    dimensions: str  # such as "512 x 8 x 64, 18 times"
    count: int


@dataclasses.dataclass(frozen=True)
class Flops:
    """Floating-point operations of the matrix products, 2 for each multiply-add."""

    length: int  # tokens of the source and of the target that attention looks at
    forward_source_token: int
    forward_target_token: int
    update_tokens: int  # of an update, on each side
    update: int  # forward and backward


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on every device in training; activations come on top."""

    parameters: int
    optimizer: int
    gradients: int
    logits: int  # of the tokens whose logits are held at the same time

    @property
    def total(self) -> int:
        """All of them together."""
        return self.parameters + self.optimizer + self.gradients + self.logits


@dataclasses.dataclass(frozen=True)
class Description:
    """What `describe` finds."""

    components: tuple[Component, ...]
    flops: Flops
    devices: int
    bytes_per_device: Memory

    @property
    def parameters(self) -> int:
        """Number of parameters, the shared embedding counted once."""
        return sum(row.count for row in self.components)


def describe(config: Config, devices: int = 1, length: int = 32) -> Description:
    """Counts parameters, FLOPs and bytes in closed form.

    The vocabulary has `config.tokenizer.vocab_size` entries; an existing tokenizer
    (`config.tokenizer.model_path`) is not opened, and may have another number.

    Args:
        config: of the run.
        devices: that the batch is split over; each holds the whole train state.
        length: tokens of each source and target, for the FLOPs of attention.

    Returns:
        The counts.

    Raises:
        ConfigError: `devices` or `length` is below 1.
    """
    for name, value in (("devices", devices), ("length", length)):
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
    components = _components(config.model, config.tokenizer.vocab_size)
    return Description(
        components=components,
        flops=_flops(config, length),
        devices=devices,
        bytes_per_device=_memory(config, sum(row.count for row in components), devices),
    )


# --- Parameters -----------------------------------------------------------------


def _component(name: str, *terms: tuple[int, ...], times: int = 1) -> Component:
    """Makes a row of `times` times a sum of products, each term being one product."""
    dimensions = " + ".join(" x ".join(map(str, term)) for term in terms)
    if times > 1:
        dimensions += f", {times} times"
    return Component(name, dimensions, times * sum(map(math.prod, terms)))


def _components(model: ModelConfig, vocab_size: int) -> tuple[Component, ...]:
    """Returns the rows in the order of the paper's description of the model.

    A decoder layer has two attentions and three norms, an encoder layer one and two.
    """
    d, d_ff, h = model.d_model, model.d_ff, model.num_heads
    attentions = 3 * model.num_layers
    feed_forwards = 2 * model.num_layers
    norms = 5 * model.num_layers
    rows = [
        _component("Embedding = output", (vocab_size, d)),
        _component("Query", (d, h, model.d_k), times=attentions),
        _component("Key", (d, h, model.d_k), times=attentions),
        _component("Value", (d, h, model.d_v), times=attentions),
        _component("Output", (h, model.d_v, d), times=attentions),
        _component("FFN up", (d, d_ff), times=feed_forwards),
        _component("FFN down", (d_ff, d), times=feed_forwards),
        _component("FFN biases", (d_ff,), (d,), times=feed_forwards),
        _component("LayerNorm", (2, d), times=norms),
    ]
    if model.attention_bias:
        biases = ((2, h, model.d_k), (h, model.d_v), (d,))  # query and key; value; out
        rows.append(_component("Attention biases", *biases, times=attentions))
    if model.positions == "learned":  # the encoder and the decoder have their own
        rows.append(_component("Position tables", (model.max_length, d), times=2))
    if model.norm == "pre":  # one after each stack
        rows.append(_component("Final LayerNorm", (2, d), times=2))
    return tuple(rows)


# --- FLOPs ----------------------------------------------------------------------


def _flops(config: Config, length: int) -> Flops:
    """Counts the matrix products, into which nearly all of the time goes.

    A token costs 2 FLOPs for every weight that it is multiplied by: the projections,
    the FFN and, on the target side, the output table; looking up an embedding costs
    none. The cross-attention projects keys and values of source tokens, queries and
    outputs of target tokens. On top come the products of attention with `length`
    keys and values; those that the causal mask hides are computed all the same.

    The backward pass takes two products for each one of the forward pass, for the
    gradients of either factor, so an update costs three forward passes. Its
    `batch.tokens` a side are a limit that includes padding.
    """
    model, tokens = config.model, config.batch.tokens
    key_width = model.num_heads * model.d_k
    value_width = model.num_heads * model.d_v
    half = model.d_model * (key_width + value_width)  # query, output; or key, value
    feed_forward = 2 * model.d_model * model.d_ff
    attend = length * (key_width + value_width)  # scores, then the weighted sum

    encoder_layer = 2 * half + attend + feed_forward
    decoder_layer = 2 * half + attend + (half + attend) + feed_forward
    source = 2 * model.num_layers * (encoder_layer + half)
    target = 2 * model.num_layers * decoder_layer
    target += 2 * model.d_model * config.tokenizer.vocab_size
    return Flops(
        length=length,
        forward_source_token=source,
        forward_target_token=target,
        update_tokens=tokens,
        update=3 * tokens * (source + target),
    )


# --- Memory ---------------------------------------------------------------------


def _memory(config: Config, parameters: int, devices: int) -> Memory:
    """Counts what every device holds: the state is replicated, the batch is split.

    Adam keeps two moments of every parameter. The loss takes a chunk of the device's
    tokens at a time, so one chunk's logits are held, not the whole batch's. Other
    activations depend on what the compiler keeps, and are left out.
    """
    tokens = -(-config.batch.tokens // devices)
    logits = min(LOSS_CHUNK, tokens) * config.tokenizer.vocab_size
    return Memory(
        parameters=FLOAT32_BYTES * parameters,
        optimizer=2 * FLOAT32_BYTES * parameters,
        gradients=FLOAT32_BYTES * parameters,
        logits=FLOAT32_BYTES * logits,
    )


# --- Output ---------------------------------------------------------------------


def as_dict(description: Description) -> dict[str, Any]:
    """Returns the description as plain dictionaries and exact numbers, for JSON."""
    memory = description.bytes_per_device
    return {
        "components": [dataclasses.asdict(row) for row in description.components],
        "parameters": description.parameters,
        "flops": dataclasses.asdict(description.flops),
        "devices": description.devices,
        "bytes_per_device": dataclasses.asdict(memory) | {"total": memory.total},
    }


def as_text(description: Description) -> str:
    """Returns the description as aligned lines of plain text, without a last newline.

    Parameters are exact, FLOPs and bytes rounded.
    """
    flops, memory = description.flops, description.bytes_per_device
    devices = f"{description.devices} device{'s' * (description.devices > 1)}"
    tokens = f"{flops.update_tokens:,}"
    costs = [
        ("forward, a source token", _rounded(flops.forward_source_token, "FLOP")),
        ("forward, a target token", _rounded(flops.forward_target_token, "FLOP")),
        (f"update of {tokens} + {tokens} tokens", _rounded(flops.update, "FLOP")),
    ]
    sizes = [
        ("parameters", _rounded(memory.parameters, "B")),
        ("optimiser state", _rounded(memory.optimizer, "B")),
        ("gradients", _rounded(memory.gradients, "B")),
        ("logits held at a time", _rounded(memory.logits, "B")),
        ("total", _rounded(memory.total, "B")),
    ]
    return "\n".join(
        [
            *_table(description),
            "",
            f"FLOPs of the matrix products, with {flops.length} tokens a sentence",
            *_aligned(costs),
            "",
            f"Bytes per device, of {devices}, without activations",
            *_aligned(sizes),
        ]
    )


def _table(description: Description) -> list[str]:
    rows = [
        (row.component, row.dimensions, f"{row.count:,}")
        for row in description.components
    ]
    head = ("component", "dimensions", "count")
    total = ("total", "", f"{description.parameters:,}")
    columns = zip(head, *rows, total, strict=True)
    first, second, third = (max(map(len, column)) for column in columns)
    rule = "-+-".join("-" * width for width in (first, second, third))

    def line(row: tuple[str, str, str]) -> str:
        return f"{row[0]:<{first}} | {row[1]:<{second}} | {row[2]:>{third}}"

    return [line(head), rule, *map(line, rows), rule, line(total)]


def _aligned(rows: list[tuple[str, str]]) -> list[str]:
    names, values = (max(map(len, column)) for column in zip(*rows, strict=True))
    return [f"  {name:<{names}}  {value:>{values}}" for name, value in rows]


def _rounded(value: float, unit: str) -> str:
    """Writes `value` with one decimal and a prefix: 252182528 B is 252.2 MB."""
    for prefix in ("", "k", "M", "G", "T"):
        # Not 1000: from there on, one decimal would round up to four digits.
        if value < 999.95:
            return f"{value:.1f} {prefix}{unit}"
        value /= 1000
    return f"{value:,.1f} P{unit}"
