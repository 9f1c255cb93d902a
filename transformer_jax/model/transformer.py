"""The encoder-decoder Transformer (section 3.1): `encode`, `decode`, `decode_step`.

The legend of the shapes is at the head of `attention.py`.
"""

import functools
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from transformer_jax.config import ModelConfig
from transformer_jax.model.attention import KeysValues
from transformer_jax.model.layers import (
    DecoderLayer,
    Embedding,
    EncoderLayer,
    Output,
    Positions,
    layer_norm,
    segment_positions,
    split_key,
)
from transformer_jax.model.masks import (
    cache_mask,
    causal_mask,
    padding_mask,
    segment_mask,
)
from transformer_jax.model.stack import run_layers


def compute_dtype(config: ModelConfig) -> jnp.dtype:
    """Returns the compute type: `auto` is bfloat16 on TPU and GPU, float32 on CPU."""
    if config.dtype != "auto":
        return jnp.dtype(config.dtype)
    return jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")


class Memory(flax.struct.PyTreeNode):
    """What the decoder needs of a source, computed once and shared by its beams."""

    keys_values: tuple[KeysValues, ...]  # a layer: [B, H, K, S], [B, H, S, E]
    mask: jax.Array  # [B, 1, S] bool
    table: jax.Array  # [D, V], the output's, turned and cast once and not at each step


class Cache(flax.struct.PyTreeNode):
    """State of step-by-step decoding.

    The W beams of a source share its keys and values. Where beams are reordered, only
    `slots` follows: nothing large is copied.
    """

    memory: Memory
    past: tuple[KeysValues, ...]  # a layer: [B, H, K, L * W], [B, H, L * W, E]
    slots: jax.Array  # [N, L] int32, below W: the beam that each position is read from
    index: jax.Array  # [] int32, the position of the next token


class Encoder(nn.Module):
    """A stack of encoder layers; a last norm where norms come first."""

    config: ModelConfig
    dtype: jnp.dtype
    data_axis: str | None
    remat: bool
    scan: bool

    def setup(self) -> None:
        """Declares positions, layers and, if there is one, the last norm."""
        self.positions = Positions(self.config, self.data_axis)
        self.layer = [
            EncoderLayer(self.config, self.dtype, self.data_axis)
            for _ in range(self.config.num_layers)
        ]
        if self.config.ends_in_norm:
            self.norm = layer_norm(self.config, self.dtype)

    def __call__(
        self,
        x: jax.Array,
        key: jax.Array | None,
        mask: jax.Array,
        packed: jax.Array | None = None,
    ) -> jax.Array:
        """Maps embeddings `x [B, S, D]` to the encoder output `[B, S, D]`.

        `key` is of dropout, None for none; `packed` are the positions `[B, S] int32` in
        packed rows.
        """
        first, key = split_key(key, 2)
        x = self.positions(x, first, packed=packed)
        how = {"remat": self.remat, "scan": self.scan}
        x = run_layers(self.layer, EncoderLayer.__call__, x, key, mask, **how)
        return self.norm(x) if self.config.ends_in_norm else x


class Decoder(nn.Module):
    """A stack of decoder layers; a last norm where norms come first."""

    config: ModelConfig
    dtype: jnp.dtype
    data_axis: str | None
    remat: bool
    scan: bool

    def setup(self) -> None:
        """Declares positions, layers and, if there is one, the last norm."""
        self.positions = Positions(self.config, self.data_axis)
        self.layer = [
            DecoderLayer(self.config, self.dtype, self.data_axis)
            for _ in range(self.config.decoder_depth)
        ]
        if self.config.ends_in_norm:
            self.norm = layer_norm(self.config, self.dtype)

    def project_memory(self, output: jax.Array) -> tuple[KeysValues, ...]:
        """Projects the encoder output `[B, S, D]` to every layer's keys and values."""
        return tuple(layer.project_memory(output) for layer in self.layer)

    def whole(
        self,
        x: jax.Array,
        key: jax.Array | None,
        output: jax.Array,
        source_mask: jax.Array,
        segment: jax.Array | None = None,
    ) -> jax.Array:
        """Maps embeddings of whole targets `x [B, T, D]` to `[B, T, D]`.

        Args:
            x: `[B, T, D]`.
            key: of dropout, or None for none.
            output: of the encoder, `[B, S, D]`.
            source_mask: `[B, 1 or T, S] bool`.
            segment: `[B, T] int32`, that of each token in packed rows.
        """
        mask, packed = causal_mask(x.shape[1]), None
        if segment is not None:
            mask &= segment_mask(segment, segment)
            packed = segment_positions(segment)
        first, key = split_key(key, 2)
        x = self.positions(x, first, packed=packed)
        inputs = mask, output, source_mask
        how = {"remat": self.remat, "scan": self.scan}
        x = run_layers(self.layer, DecoderLayer.whole, x, key, *inputs, **how)
        return self.norm(x) if self.config.ends_in_norm else x

    def __call__(
        self, x: jax.Array, memory: Memory, cache: Cache | None = None
    ) -> tuple[jax.Array, tuple[KeysValues, ...]]:
        """Maps embeddings `x [N, T, D]` to as much; with `cache`, `x [B, W, D]`."""
        if cache is None:
            mask, index, length = causal_mask(x.shape[1]), None, None
            past: tuple[KeysValues | None, ...] = (None,) * len(self.layer)
        else:
            past, index, length = cache.past, cache.index, cache.slots.shape[1]
            mask = cache_mask(index, cache.slots.reshape(*x.shape[:2], length))
        x = self.positions(x, None, index, length)
        kept = []
        for layer, kv, layer_past in zip(
            self.layer, memory.keys_values, past, strict=True
        ):
            x, new = layer(x, None, mask, kv, memory.mask, layer_past, index)
            kept.append(new)
        return self.norm(x) if self.config.ends_in_norm else x, tuple(kept)


class Transformer(nn.Module):
    """The model, from token ids to logits.

    Attributes:
        config: sizes and variants.
        vocab_size: entries of the target's table, which the source and the output
            share unless the config says otherwise.
        data_axis: name of the device axis the batch is split over, inside `pmap`.
        source_vocab_size: entries of the source's table if it is not shared and has
            another size.
        remat: activations of a layer are computed again in the backward pass.
        scan: one layer of each stack is compiled, and run in a loop.
    """

    config: ModelConfig
    vocab_size: int
    data_axis: str | None = None
    source_vocab_size: int | None = None
    remat: bool = False
    scan: bool = False

    def setup(self) -> None:
        """Declares the tables and the two stacks."""
        config, dtype = self.config, compute_dtype(self.config)
        self.embedding = Embedding(config, self.vocab_size, dtype)
        if not config.share_embeddings:
            source_size = self.source_vocab_size or self.vocab_size
            self.source_embedding = Embedding(config, source_size, dtype)
        if config.output_bias or not config.tie_output:
            self.output = Output(config, self.vocab_size)
        how = config, dtype, self.data_axis, self.remat, self.scan
        self.encoder = Encoder(*how)
        self.decoder = Decoder(*how)

    def encode(self, source: jax.Array, source_length: jax.Array) -> Memory:
        """Encodes sources, to be decoded.

        Args:
            source: `[B, S] int32` token ids, EOS last, then padding of any value.
            source_length: `[B] int32`, real tokens of each row.

        Returns:
            All that the decoder needs for any number of steps.
        """
        mask = padding_mask(source_length, source.shape[1])
        output = self.encoder(self._embed_source(source), None, mask)
        keys_values = self.decoder.project_memory(output)
        return Memory(keys_values, mask, self._output_table(output.dtype).T)

    def decode(self, target_in: jax.Array, memory: Memory) -> jax.Array:
        """Returns logits `[N, T, V] float32` of every next token, teacher-forced.

        Args:
            target_in: `[N, T] int32`, the target shifted right, BOS first.
            memory: from `encode`.
        """
        return self.logits(self.decoder(self._embed(target_in), memory)[0])

    def hidden(
        self,
        source: jax.Array,
        source_length: jax.Array,
        target_in: jax.Array,
        source_segment: jax.Array | None = None,
        target_segment: jax.Array | None = None,
        deterministic: bool = True,
    ) -> jax.Array:
        """Returns the decoder's output `[B, T, D]`, of which x E^T are the logits.

        Args:
            source: `[B, S] int32`, as `encode` takes it.
            source_length: `[B] int32`.
            target_in: `[B, T] int32`, as `decode` takes it.
            source_segment: `[B, S] int32`, where rows are packed: the number of each
                token's segment, from 1 on, 0 for padding. A pair has the same number
                on both sides, and sees and is seen by nothing else in its row.
            target_segment: `[B, T] int32`, likewise.
            deterministic: no dropout; False needs the random stream `dropout`.
        """
        key = None if deterministic else self.make_rng("dropout")
        encoder_key, decoder_key = split_key(key, 2)
        mask, packed = padding_mask(source_length, source.shape[1]), None
        seen, position = mask, None  # what the decoder sees of the source
        if source_segment is not None and target_segment is not None:
            mask = segment_mask(source_segment, source_segment)
            packed = segment_positions(source_segment)
            seen = segment_mask(target_segment, source_segment)
            position = segment_positions(target_segment)[:, :, None]
        x = self._embed_source(source)
        output = self.encoder(x, encoder_key, mask, packed)
        x = self._embed(target_in, position)
        return self.decoder.whole(x, decoder_key, output, seen, target_segment)

    def __call__(
        self,
        source: jax.Array,
        source_length: jax.Array,
        target_in: jax.Array,
        deterministic: bool = True,
    ) -> jax.Array:
        """Returns logits `[B, T, V] float32` for a batch of pairs."""
        x = self.hidden(source, source_length, target_in, deterministic=deterministic)
        return self.logits(x)

    def _embed_source(self, source: jax.Array) -> jax.Array:
        shared = self.config.share_embeddings
        return (self.embedding if shared else self.source_embedding)(source)

    def _embed(self, target: jax.Array, index: jax.Array | None = None) -> jax.Array:
        """Embeds `target [N, T]` of the positions from 0 on, or of those of `index`.

        `index` is one position, `[]`, or that of each token, `[N, T, 1]`.
        """
        x = self.embedding(target)
        if not self.config.zero_start:
            return x
        position = jnp.arange(target.shape[1])[:, None] if index is None else index
        return jnp.where(position == 0, jnp.zeros_like(x), x)

    def logits(self, x: jax.Array) -> jax.Array:
        """Returns x E^T plus the bias, `[B, T, V] float32`, for `x [B, T, D]`."""
        table = self._output_table(x.dtype)
        return self._biased(
            jnp.einsum("btd,vd->btv", x, table, preferred_element_type=jnp.float32)
        )

    def _output_table(self, dtype: jnp.dtype) -> jax.Array:
        """Returns E `[V, D]` of the output product."""
        module = self.embedding if self.config.tie_output else self.output
        return module.table.astype(dtype)

    def _biased(self, logits: jax.Array) -> jax.Array:
        return logits + self.output.bias if self.config.output_bias else logits

    def init_cache(self, memory: Memory, beams: int, length: int) -> Cache:
        """Returns an empty cache of `beams` targets a source and `length` positions.

        Rows are ordered source by source: row b * beams + w is beam w of source b.
        """
        dtype = compute_dtype(self.config)
        places = length * beams
        past = tuple(
            (
                jnp.zeros((*keys.shape[:3], places), dtype),
                jnp.zeros((*values.shape[:2], places, values.shape[3]), dtype),
            )
            for keys, values in memory.keys_values
        )
        rows = memory.mask.shape[0] * beams
        slots = jnp.zeros((rows, length), jnp.int32)
        return Cache(memory, past, slots, jnp.zeros((), jnp.int32))

    def decode_step(self, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Decodes one position.

        Args:
            tokens: `[N] int32`, the token before it (BOS at position 0).
            cache: from `init_cache` or the step before.

        Returns:
            Logits of the next token, `[N, V] float32`, and the cache one longer.

        Raises:
            ValueError: `tokens` has another shape; a prefix is fed token by token.
        """
        rows, sources = cache.slots.shape[0], cache.memory.mask.shape[0]
        if tokens.shape != (rows,):
            raise ValueError(
                f"decode_step takes one token a row, [{rows}], not {tokens.shape}"
            )
        beams = rows // sources
        own = (jnp.arange(rows, dtype=jnp.int32) % beams)[:, None]
        slots = jax.lax.dynamic_update_slice_in_dim(cache.slots, own, cache.index, 1)
        cache = cache.replace(slots=slots)
        x = self._embed(tokens.reshape(sources, beams), cache.index)
        x, past = self.decoder(x, cache.memory, cache)
        table = cache.memory.table
        logits = jnp.matmul(x, table, preferred_element_type=jnp.float32)
        logits = self._biased(logits).reshape(rows, -1)
        return logits, cache.replace(past=past, index=cache.index + 1)


def with_room(cache: Cache, length: int) -> Cache:
    """Returns `cache` with `length` positions, which is at least as many as it has."""
    rows, positions = cache.slots.shape
    beams = rows // cache.memory.mask.shape[0]

    def pad(x: jax.Array, axis: int, size: int) -> jax.Array:
        return jnp.pad(x, [(0, size * (i == axis)) for i in range(x.ndim)])

    more = length - positions
    past = tuple(
        (pad(keys, 3, more * beams), pad(values, 2, more * beams))
        for keys, values in cache.past
    )
    return cache.replace(past=past, slots=pad(cache.slots, 1, more))


def of_sources(cache: Cache, index: jax.Array) -> Cache:
    """Returns the part of `cache` that is of the sources at `index [K]`."""
    memory = cache.memory

    def take(tree: Any) -> Any:
        return jax.tree.map(lambda x: x[index], tree)

    slots = cache.slots.reshape(len(memory.mask), -1, cache.slots.shape[1])
    return cache.replace(
        memory=memory.replace(
            keys_values=take(memory.keys_values), mask=take(memory.mask)
        ),
        past=take(cache.past),
        slots=take(slots).reshape(-1, slots.shape[2]),
    )


def param_axes(model: Transformer) -> Any:
    """Returns the logical axis names of every parameter, as PartitionSpecs."""
    tokens, length = jnp.zeros((1, 2), jnp.int32), jnp.ones((1,), jnp.int32)
    init = functools.partial(model.init, jax.random.key(0))
    variables = jax.eval_shape(init, tokens, length, tokens)
    return nn.get_partition_spec(variables)["params"]


def output_weights(params: Any) -> tuple[jax.Array, jax.Array | None]:
    """Returns the output product's table `[V, D]` and its bias `[V]`, if it has one."""
    own = params.get("output", {})
    table = own["table"] if "table" in own else params["embedding"]["table"]
    return table, own.get("bias")
