"""What runs on a device in decoding: the search over models, and forced scoring.

Pure functions of parameters and a batch. Several models with one vocabulary are an
ensemble: the mean of their probabilities counts.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from transformer_jax.config import DecodeConfig, ModelConfig
from transformer_jax.data.batching import Batch
from transformer_jax.data.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID
from transformer_jax.decode.choice import Prefix
from transformer_jax.decode.hypotheses import Hypotheses
from transformer_jax.decode.search import (
    GrowFn,
    NarrowFn,
    StepFn,
    rooms,
    search,
    width,
)
from transformer_jax.model.masks import padding_mask
from transformer_jax.model.transformer import (
    Cache,
    Transformer,
    of_sources,
    with_room,
)

Params = Sequence[Any]  # of each model

# When so many times fewer sources are left, they go on alone; and least number of rows
# for which another loop is worth compiling.
SHRINK, WORTH = 4, 16


class DecodeBatch(NamedTuple):
    """R sources to be decoded. Those that only fill the batch have limit 1 or less."""

    source: Any  # [R, S] int32, EOS last
    source_length: Any  # [R] int32, EOS included
    limits: Any  # [R] int32, most tokens of the output, EOS included
    seeds: Any  # [R] uint32, for draws
    prefix: Any  # [R, P] int32; with P = 0 nothing is forced
    prefix_length: Any  # [R] int32


def make_search(
    models: Sequence[Transformer],
    options: DecodeConfig,
    max_length: int,
    nbest: int,
    with_attention: bool,
    batch_shards: int = 1,
) -> Callable[[Params, DecodeBatch], Hypotheses]:
    """Returns the search as a function of parameters and a batch.

    Args:
        models: one, or an ensemble.
        options: of the search.
        max_length: length of the output arrays.
        nbest: hypotheses that will be read.
        with_attention: whether hypotheses get their attention to the source: means over
            the heads of the last layer's cross-attention, and over the models.
        batch_shards: parts of the batch that lie on other devices.
    """
    attends = with_attention or options.coverage > 0

    def run(params: Params, batch: DecodeBatch) -> Hypotheses:
        rows = batch.source.shape[0]
        few = rows // SHRINK if rows >= WORTH else 0
        if few % batch_shards:
            few = 0
        caches = start(models, params, batch, width(options, nbest), max_length)
        steps = make_steps(models, params, caches, max_length, attends)
        forced = batch.prefix.shape[1] > 0
        found = search(
            steps.step,
            steps.state,
            batch.limits,
            options,
            grow=steps.grow,
            few=few,
            narrow=steps.narrow if few else None,
            max_length=max_length,
            bos_id=BOS_ID,
            eos_id=EOS_ID,
            banned_ids=(PAD_ID, UNK_ID, BOS_ID),
            nbest=nbest,
            prefix=Prefix(batch.prefix, batch.prefix_length) if forced else None,
            keys=jax.vmap(jax.random.key)(batch.seeds),
            attention=(lambda state: state[1]) if attends else None,
            source_mask=padding_mask(batch.source_length, batch.source.shape[1])[:, 0],
        )
        return found if with_attention else found.replace(attention=None)

    return run


def start(
    models: Sequence[Transformer],
    params: Params,
    batch: DecodeBatch,
    beams: int,
    max_length: int,
) -> list[Cache]:
    """Encodes the sources; returns each model's cache, with the first of its rooms."""
    caches, length = [], rooms(max_length)[0]
    for model, weights in zip(models, params, strict=True):
        variables, given = {"params": weights}, (batch.source, batch.source_length)
        memory = model.apply(variables, *given, method="encode")
        cache = model.apply(variables, memory, beams, length, method="init_cache")
        caches.append(cache)
    return caches


class Steps(NamedTuple):
    """A step of all models, as `search` wants it."""

    step: StepFn
    state: Any
    grow: GrowFn
    narrow: NarrowFn


def make_steps(
    models: Sequence[Transformer],
    params: Params,
    caches: Sequence[Cache],
    max_length: int,
    attends: bool,
) -> Steps:
    """Returns the step function, the state before it, and what changes the state.

    The state is the growing part of each model's cache and, if `attends`, how the last
    step attended to the source, `[R * beams, S]`.
    """

    def with_pasts(pasts: Any) -> list[Cache]:
        return [
            cache.replace(past=past, slots=slots, index=index)
            for cache, (past, slots, index) in zip(caches, pasts, strict=True)
        ]

    def step(tokens: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        logits, pasts, attention = [], [], []
        for model, weights, cache in zip(
            models, params, with_pasts(state[0]), strict=True
        ):
            (output, new), sown = model.apply(
                {"params": weights},
                tokens,
                cache,
                method="decode_step",
                mutable=["intermediates"] if attends else [],
            )
            logits.append(output)
            pasts.append(_past(new))
            if attends:
                attention.append(source_attention(model.config, sown["intermediates"]))
        attended = sum(attention) / len(models) if attends else None
        return mean_probability(logits), (tuple(pasts), attended)

    def grow(state: Any, room: int) -> Any:
        pasts, attended = state
        grown = tuple(_past(with_room(cache, room)) for cache in with_pasts(pasts))
        return grown, attended

    def narrow(index: jax.Array) -> tuple[StepFn, Callable[[Any], Any]]:
        part = [of_sources(cache, index) for cache in caches]
        steps = make_steps(models, params, part, max_length, attends)

        def take(state: Any) -> Any:
            taken = [of_sources(cache, index) for cache in with_pasts(state[0])]
            # How they attended is written anew by their next step.
            return steps.grow((tuple(map(_past, taken)), steps.state[1]), max_length)

        return steps.step, take

    rows, positions = caches[0].slots.shape[0], caches[0].memory.mask.shape[2]
    attended = jnp.zeros((rows, positions), jnp.float32) if attends else None
    return Steps(step, (tuple(map(_past, caches)), attended), grow, narrow)


def _past(cache: Cache) -> Any:
    """Returns the part of a cache that steps change."""
    return cache.past, cache.slots, cache.index


def make_score(models: Sequence[Transformer]) -> Callable[[Params, Batch], jax.Array]:
    """Returns log P(target | source) `[R] float32` as a function of a batch of pairs.

    EOS is included; the pass is teacher-forced. Logits, the largest array by far, are
    made a sentence at a time.
    """

    def score(params: Params, batch: Batch) -> jax.Array:
        inputs = batch.source, batch.source_length, batch.target_in
        hidden = [
            model.apply({"params": weights}, *inputs, method="hidden")
            for model, weights in zip(models, params, strict=True)
        ]

        def score_row(row: Any) -> jax.Array:
            hidden, targets, length = row  # [T, D] of each model, [T], []
            logits: Any = [
                model.apply({"params": weights}, x[None], method="logits")
                for model, weights, x in zip(models, params, hidden, strict=True)
            ]
            log_probs = jax.nn.log_softmax(mean_probability(logits))[0]
            chosen = jnp.take_along_axis(log_probs, targets[:, None], axis=1)[:, 0]
            return jnp.where(jnp.arange(len(targets)) < length, chosen, 0).sum()

        rows = hidden, jnp.asarray(batch.target_out), jnp.asarray(batch.target_length)
        return jax.lax.map(score_row, rows)

    return score


def source_attention(config: ModelConfig, sown: Any) -> jax.Array:
    """Returns how a step attended to the source, `[R * beams, S] float32`.

    Args:
        config: of the model.
        sown: the step's `intermediates`.
    """
    last = sown["decoder"][f"layer_{config.decoder_depth - 1}"]
    (weights,) = last["cross_attention"]["weights"]  # [R, H, beams, S]
    return weights.mean(axis=1).reshape(-1, weights.shape[-1])


def mean_probability(logits: Sequence[jax.Array]) -> jax.Array:
    """Returns logits of the mean of the distributions that `logits` give."""
    if len(logits) == 1:
        return logits[0]
    log_probs = jnp.stack([jax.nn.log_softmax(x) for x in logits])
    return jax.nn.logsumexp(log_probs, axis=0) - jnp.log(len(logits))
