"""What a config costs before anything runs: parameters, FLOPs, bytes per device.

All of it is arithmetic on the config's numbers, so it needs no JAX and no device, and
a model far larger than this machine is described in an instant. The sizes are those of
the paper: N num_layers, d d_model, h num_heads, V vocabulary.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from transformer_jax.config import Config
from transformer_jax.errors import ConfigError

FLOAT32_BYTES = 4  # parameters, gradients, moments and logits are float32
COMPUTE_BYTES = {"float32": 4, "bfloat16": 2}
LOSS_CHUNK = 512  # CHUNK of train/loss.py, which imports JAX; a test compares them

# Arrays [B, T, F] that differentiation keeps of a feed-forward layer, by activation.
# Of gelu_tanh, JAX 0.12 keeps 5.
FEED_FORWARD_ARRAYS = {
    **{"relu": 1, "tanh": 2, "sigmoid": 2},
    **{"swish": 4, "gelu": 4, "gelu_sigmoid": 4, "gelu_tanh": 6},
}


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
    forward_source_token: int  # 0 where there is no encoder
    forward_target_token: int
    update_tokens: int  # of an update, on each side
    update: int  # forward and backward


@dataclasses.dataclass(frozen=True)
class Activations:
    """Bytes a token that are kept from the forward to the backward pass."""

    dtype: str  # compute type
    length: int  # tokens of the source and of the target that attention looks at
    source_token: int  # 0 where there is no encoder
    target_token: int


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on every device in training."""

    parameters: int
    optimizer: int
    gradients: int
    activations: int  # of the device's tokens
    logits: int  # of the tokens whose logits are held at the same time

    @property
    def total(self) -> int:
        """All of them together."""
        return sum(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class Description:
    """What `describe` finds."""

    components: tuple[Component, ...]
    flops: Flops
    activations: Activations
    devices: int
    bytes_per_device: Memory

    @property
    def parameters(self) -> int:
        """Number of parameters, a shared table counted once."""
        return sum(row.count for row in self.components)


def describe(config: Config, devices: int = 1, length: int = 32) -> Description:
    """Counts parameters, FLOPs and bytes in closed form.

    The vocabularies have the sizes of `config.tokenizer`; an existing tokenizer
    (`config.tokenizer.model_path`) is not opened, and may have another.

    Args:
        config: of the run.
        devices: that the batch is split over; each holds the whole train state.
        length: tokens of each source and target, for attention's FLOPs and bytes.

    Returns:
        The counts.

    Raises:
        ConfigError: `devices` or `length` is below 1.
    """
    for name, value in (("devices", devices), ("length", length)):
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
    components = _components(config)
    parameters = sum(row.count for row in components)
    activations = _activations(config, length)
    return Description(
        components=components,
        flops=_flops(config, length),
        activations=activations,
        devices=devices,
        bytes_per_device=_memory(config, parameters, activations, devices),
    )


# --- Parameters -----------------------------------------------------------------


def _layers(config: Config) -> tuple[int, int, int]:
    """Returns the layers of the encoder, of the decoder, and those that attend across.

    All of a decoder's do, unless there is no encoder.
    """
    encoder, decoder = config.model.num_layers, config.model.decoder_depth
    if config.describe.decoder_only:
        return 0, decoder, 0
    return encoder, decoder, decoder


def _component(name: str, *terms: tuple[int, ...], times: int = 1) -> Component:
    """Makes a row of `times` times a sum of products, each term being one product."""
    dimensions = " + ".join(" x ".join(map(str, term)) for term in terms)
    if times > 1:
        dimensions += f", {times} times"
    return Component(name, dimensions, times * sum(map(math.prod, terms)))


def _components(config: Config) -> tuple[Component, ...]:
    """Returns the rows in the order of the paper's description of the model.

    A layer has a norm for every attention and one for the feed-forward.
    """
    model, counted = config.model, config.describe
    d, d_ff, h = model.d_model, model.d_ff, model.num_heads
    encoder, decoder, across = _layers(config)
    attentions, feed_forwards = encoder + decoder + across, encoder + decoder
    stacks = 1 if counted.decoder_only else 2

    table = (config.tokenizer.vocab_size, d)
    tied = " = output" if model.tie_output else ""
    if model.share_embeddings or counted.decoder_only:
        rows = [_component(f"Embedding{tied}", table)]
    else:
        rows = [
            _component("Source embedding", (config.tokenizer.source_size, d)),
            _component(f"Target embedding{tied}", table),
        ]
    rows += [
        _component("Query", (d, h, model.d_k), times=attentions),
        _component("Key", (d, h, model.d_k), times=attentions),
        _component("Value", (d, h, model.d_v), times=attentions),
        _component("Output", (h, model.d_v, d), times=attentions),
        _component("FFN up", (d, d_ff), times=feed_forwards),
        _component("FFN down", (d_ff, d), times=feed_forwards),
    ]
    if not model.tie_output:
        rows.append(_component("Unembedding", table))
    if counted.weights_only:
        return tuple(rows)
    rows.append(_component("FFN biases", (d_ff,), (d,), times=feed_forwards))
    rows.append(_component("LayerNorm", (2, d), times=attentions + feed_forwards))
    if model.attention_bias:
        biases = ((2, h, model.d_k), (h, model.d_v), (d,))  # query and key; value; out
        rows.append(_component("Attention biases", *biases, times=attentions))
    if model.positions == "learned":  # the encoder and the decoder have their own
        rows.append(_component("Position tables", (model.max_length, d), times=stacks))
    if model.ends_in_norm:  # one after each stack
        rows.append(_component("Final LayerNorm", (2, d), times=stacks))
    if model.output_bias:
        rows.append(_component("Output bias", table[:1]))
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
    encoder, decoder, across = _layers(config)
    key_width = model.num_heads * model.d_k
    value_width = model.num_heads * model.d_v
    half = model.d_model * (key_width + value_width)  # query, output; or key, value
    feed_forward = 2 * model.d_model * model.d_ff
    attend = length * (key_width + value_width)  # scores, then the weighted sum

    layer = 2 * half + attend + feed_forward  # of self-attention and feed-forward
    source = 2 * (encoder * layer + across * half)
    target = 2 * (decoder * layer + across * (half + attend))
    target += 2 * model.d_model * config.tokenizer.vocab_size
    return Flops(
        length=length,
        forward_source_token=source,
        forward_target_token=target,
        update_tokens=tokens,
        update=3 * tokens * (source + target),
    )


# --- Memory ---------------------------------------------------------------------


def _activations(config: Config, length: int) -> Activations:
    """Counts what JAX's differentiation of the model keeps, array by array.

    A product keeps its inputs: those of queries, keys and values are one array, as are
    those of all cross-attentions' keys and values. A norm keeps three float32 arrays,
    the centred input, what that is multiplied by, and the derivative of the square, and
    four numbers a token. Softmax keeps its exponentials in float32, the weights, a byte
    where a key may be padding, and two numbers a query and head. Dropout keeps a byte
    an element.

    The dtype `auto` counts as bfloat16, as it is on accelerators. Left out are copies
    of the parameters in the compute type. The compiler may compute an array again
    instead of keeping it, and needs room to work: on a CPU, for small float32 models,
    XLA's own count of all temporary bytes was a third above these and the gradients.
    """
    model = config.model
    encoder, decoder, across = _layers(config)
    dtype = "bfloat16" if model.dtype == "auto" else model.dtype
    number, h, d = COMPUTE_BYTES[dtype], model.num_heads, model.d_model
    keys_values = query_context = number * h * (model.d_k + model.d_v)
    mask = d if model.dropout else 0
    norm = 3 * FLOAT32_BYTES * d + 4 * FLOAT32_BYTES

    def sublayer(inner: int) -> int:
        return number * d + inner + mask + norm

    def attention(keys_may_be_padding: bool) -> int:
        weight = FLOAT32_BYTES + number + keys_may_be_padding
        return query_context + h * (length * weight + 2 * FLOAT32_BYTES)

    feed_forward = number * model.d_ff * FEED_FORWARD_ARRAYS[model.activation]
    if model.activation == "relu":
        feed_forward += model.d_ff  # where it is positive, a byte each
    # The token's id, dropout of its embedding, the output of the stack, a last norm.
    ends = 4 + mask + number * d + (norm if model.ends_in_norm else 0)

    layer = keys_values + sublayer(feed_forward)
    source = encoder * (layer + sublayer(attention(True))) + across * keys_values
    target = decoder * (layer + sublayer(attention(False)))
    target += across * sublayer(attention(True))
    return Activations(
        dtype=dtype,
        length=length,
        source_token=source + ends if encoder else 0,
        target_token=target + ends,
    )


def _memory(
    config: Config, parameters: int, activations: Activations, devices: int
) -> Memory:
    """Counts what every device holds: the state is replicated, the batch is split.

    Adam keeps two moments of every parameter. The loss takes a chunk of the device's
    tokens at a time, so one chunk's logits are held, not the whole batch's.
    """
    tokens = -(-config.batch.tokens // devices)
    logits = min(LOSS_CHUNK, tokens) * config.tokenizer.vocab_size
    return Memory(
        parameters=FLOAT32_BYTES * parameters,
        optimizer=2 * FLOAT32_BYTES * parameters,
        gradients=FLOAT32_BYTES * parameters,
        activations=tokens * (activations.source_token + activations.target_token),
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
        "activations": dataclasses.asdict(description.activations),
        "devices": description.devices,
        "bytes_per_device": dataclasses.asdict(memory) | {"total": memory.total},
    }


def as_text(description: Description) -> str:
    """Returns the description as aligned lines of plain text, without a last newline.

    Parameters are exact, FLOPs and bytes rounded.
    """
    flops, memory = description.flops, description.bytes_per_device
    activations, tokens = description.activations, f"{flops.update_tokens:,}"
    devices = f"{description.devices} device{'s' * (description.devices > 1)}"
    sentence = f"with {flops.length:,} tokens a sentence"
    source, target = "a source token", "a target token"
    costs = [
        (f"forward, {source}", flops.forward_source_token),
        (f"forward, {target}", flops.forward_target_token),
        (f"update of {tokens} + {tokens} tokens", flops.update),
    ]
    kept = [(source, activations.source_token), (target, activations.target_token)]
    if not flops.forward_source_token:  # a language model
        costs = [
            ("forward, a token", flops.forward_target_token),
            (f"update of {tokens} tokens", flops.update),
        ]
        kept = [("a token", activations.target_token)]
    sizes = [
        ("parameters", memory.parameters),
        ("optimiser state", memory.optimizer),
        ("gradients", memory.gradients),
        ("activations", memory.activations),
        ("logits held at a time", memory.logits),
        ("total", memory.total),
    ]
    return "\n".join(
        [
            *_table(description),
            "",
            f"FLOPs of the matrix products, {sentence}",
            *aligned(costs, "FLOP"),
            "",
            f"Bytes kept for the backward pass in {activations.dtype}, {sentence}",
            *aligned(kept, "B"),
            "",
            f"Bytes per device, of {devices}",
            *aligned(sizes, "B"),
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


def aligned(rows: Sequence[tuple[str, float]], unit: str) -> list[str]:
    """Returns a line for each name and value, rounded, one below the other."""
    names = max(len(name) for name, _ in rows)
    values = [rounded(value, unit) for _, value in rows]
    width = max(map(len, values))
    return [
        f"  {name:<{names}}  {value:>{width}}"
        for (name, _), value in zip(rows, values, strict=True)
    ]


def rounded(value: float, unit: str) -> str:
    """Writes `value` with one decimal and a prefix: 252182528 B is 252.2 MB."""
    for prefix in ("", "k", "M", "G", "T"):
        # Not 1000: from there on, one decimal would round up to four digits.
        if value < 999.95:
            return f"{value:.1f} {prefix}{unit}"
        value /= 1000
    return f"{value:,.1f} P{unit}"
