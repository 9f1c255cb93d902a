"""Greedy search, beam search and sampling over any step function, in one loop.

Knows no model and no tokenizer, only what a step does:

    def step(tokens, state):      # tokens [B * W] int32, the last token of each beam
        return logits, state      # logits [B * W, V], of the next token

`state` is any tree of arrays. Those of B * W rows follow their beam when beams are
reordered; all others are shared by the beams of a source and stay as they are. What
never changes, such as the encoder's output, is closed over by `step`.

What a hypothesis scores is said in `hypotheses.py`. One that is cut at its limit
without EOS is used only where no hypothesis finished.

A whole example, with a table of what follows what as the model. Token 0 begins and ends
every sequence, of which there is one "source" here:

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from transformer_jax.config import DecodeConfig
    >>> from transformer_jax.decode.search import search
    >>> follows = jnp.log(
    ...     jnp.asarray([[0.1, 0.6, 0.3], [0.5, 0.1, 0.4], [0.9, 0.1, 0.0]])
    ... )
    >>> def step(tokens, state):  # counts its steps, as a cache would
    ...     return follows[tokens], state + 1
    >>> def run(limits):
    ...     options = DecodeConfig(beam_size=2, alpha=0.0)
    ...     ends = {"max_length": 5, "bos_id": 0, "eos_id": 0}
    ...     return search(step, jnp.zeros(()), limits, options, **ends, nbest=2)
    >>> found = jax.jit(run)(jnp.asarray([5]))
    >>> for tokens, n, score in zip(found.tokens[0], found.length[0], found.score[0]):
    ...     print(tokens[:n].tolist(), f"{jnp.exp(score):.3f}")
    [1, 0] 0.300
    [2, 0] 0.270

For what a Transformer's step and cache look like see `decode/programs.py`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from transformer_jax.config import DecodeConfig
from transformer_jax.decode.choice import IMPOSSIBLE, Prefix, allow, draw
from transformer_jax.decode.hypotheses import (
    Hypotheses,
    best_possible,
    hypothesis_scores,
    join,
    no_hypotheses,
    select,
    take_beams,
    tokens_at,
)

ROOM = 32  # tokens that a state first has room for
BLOCK = 256  # most entries that are first compared by their maximum alone

State = Any
StepFn = Callable[[jax.Array, State], tuple[jax.Array, State]]
GrowFn = Callable[[State, int], State]
NarrowFn = Callable[[jax.Array], tuple[StepFn, Callable[[State], State]]]


class _Sources(flax.struct.PyTreeNode):
    """What `search` is told of each source."""

    limits: jax.Array
    prefix: Prefix | None
    keys: jax.Array | None
    source_mask: jax.Array | None


# --- The loop -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Rules:
    """What `search` is told of all sources."""

    options: DecodeConfig
    bos_id: int
    eos_id: int
    banned_ids: Sequence[int]
    nbest: int
    attention: Callable[[State], jax.Array] | None


class _Search(flax.struct.PyTreeNode):
    """State of the loop. `live` has no EOS yet; its scores are log-probabilities."""

    length: jax.Array  # [] int32, tokens of each live hypothesis
    live: Hypotheses
    finished: Hypotheses
    done: jax.Array  # [B] bool
    state: State


def rooms(max_length: int) -> list[int]:
    """Returns for how many tokens a state has room, one time after another.

    A step costs as much as its state has room, whatever is in it. So room doubles, from
    ROOM to `max_length`; each time the loop is compiled anew.
    """
    found = []
    while 2 * max_length > 3 * (ROOM << len(found)):
        found.append(ROOM << len(found))
    return [*found, max_length]


def width(options: DecodeConfig, nbest: int) -> int:
    """Returns W, the beams or samples of each source that `search` works on."""
    return nbest if options.sample else options.beam_size


def search(
    step: StepFn,
    state: State,
    limits: jax.Array,
    options: DecodeConfig,
    *,
    max_length: int,
    bos_id: int,
    eos_id: int,
    banned_ids: Sequence[int] = (),
    nbest: int = 1,
    grow: GrowFn | None = None,
    few: int = 0,
    narrow: NarrowFn | None = None,
    prefix: Prefix | None = None,
    keys: jax.Array | None = None,
    attention: Callable[[State], jax.Array] | None = None,
    source_mask: jax.Array | None = None,
) -> Hypotheses:
    """Searches for the hypotheses of highest score, or draws samples; jit it whole.

    Beam search: a source is done when its `nbest` finished hypotheses cannot be beaten
    any more by a live one. Ties go to the lower beam, then to the lower token id. With
    one beam it is greedy: the most probable token at each step, until that is EOS.
    With `early_stop` an ending counts only among the `beam_size` best candidates of its
    step, and a source is done at `beam_size` endings, as in other toolkits.
    Sampling: `nbest` independent draws of each source.

    Args:
        step: maps the last tokens and the state to logits and the next state.
        state: of no tokens yet, with `B * width(options, nbest)` rows.
        limits: `[B] int32`, most tokens of each source's output, EOS included; at least
            1 and at most `max_length`.
        options: beam size, penalties, constraints, sampling.
        max_length: L, length of the arrays.
        bos_id: what `step` is given first.
        eos_id: the token that ends a hypothesis.
        banned_ids: tokens that are never generated.
        nbest: how many hypotheses will be read, at most the beam size.
        grow: gives a state more room; `state` has it for the first of `rooms`. None
            where `state` has room for `max_length` tokens.
        few: as soon as no more sources than these are left, they go on alone; 0: never.
        narrow: maps `[few]` indices of sources to the step function of these alone, and
            to a function that gives their part of a state, with room for `max_length`.
        prefix: what each source's hypotheses must begin with.
        keys: `[B]` random keys, one of each source; for sampling only.
        attention: reads off a state how the last step attended, `[B * W, S]`, rows
            summing to 1; needed for coverage, else for `Hypotheses.attention` only.
        source_mask: `[B, S] bool`, real source positions; needed for coverage.

    Returns:
        Beam search: `beam_size` hypotheses of each source, best first, all different.
        Sampling: `nbest` in the order they were drawn. The score of those beyond what
        exists is at most IMPOSSIBLE.
    """
    beams = width(options, nbest)
    if not 1 <= nbest <= beams:
        raise ValueError(
            f"nbest is {nbest}; it must be from 1 to the beam size {beams}"
        )
    sources = _Sources(limits, prefix, keys, source_mask)
    rules = _Rules(options, bos_id, eos_id, banned_ids, nbest, attention)
    begin = _begin(state, len(limits), max_length, rules)
    room = rooms(max_length) if grow else [max_length]

    def leave(search: _Search) -> tuple[Hypotheses, Hypotheses, Any]:
        if narrow is None:
            return search.live, search.finished, None
        left = jnp.argsort(search.done, stable=True)[:few]
        take = narrow(left)[1]
        part = jax.tree.map(lambda x: x[left], search.replace(length=None, state=None))
        part = part.replace(length=search.length, state=take(search.state))
        return search.live, search.finished, (left, part)

    advance = functools.partial(_advance, step, sources, rules)
    live, finished, rest = _advance_till_few(advance, begin, room, grow, few, leave)
    if narrow is not None:
        left, part = rest
        few_sources = jax.tree.map(lambda x: x[left], sources)
        advance = functools.partial(_advance, narrow(left)[0], few_sources, rules)
        part = jax.lax.while_loop(lambda s: ~s.done.all(), advance, part)
        live, finished = jax.tree.map(
            lambda whole, x: whole.at[left].set(x),
            (live, finished),
            (part.live, part.finished),
        )
    is_there = finished.score > IMPOSSIBLE
    if not options.sample:
        is_there = is_there.any(axis=1, keepdims=True)
    live = live.replace(score=hypothesis_scores(live, sources.source_mask, options))
    return select(is_there, finished, live)


def _begin(state: State, sources: int, max_length: int, rules: _Rules) -> _Search:
    """Returns a search before its first step."""
    options, attention = rules.options, rules.attention
    beams = width(options, rules.nbest)
    attends = None if attention is None else jax.eval_shape(attention, state).shape[-1]
    nothing = no_hypotheses(sources, beams, max_length, attends)
    # One live beam to begin with, or all would be the same; but each sample is its own.
    start = nothing.log_prob.at[:, : beams if options.sample else 1].set(0.0)
    live, done = nothing.replace(log_prob=start), jnp.zeros(sources, bool)
    return _Search(jnp.zeros((), jnp.int32), live, nothing, done, state)


def _advance_till_few(
    advance: Callable[[_Search], _Search],
    search: _Search,
    room: Sequence[int],
    grow: GrowFn | None,
    few: int,
    leave: Callable[[_Search], Any],
) -> Any:
    """Advances until no more than `few` sources are left, and returns `leave` of that.

    The state has room for the first of `room`, and gets the next when it needs it.
    """

    def goes_on(search: _Search) -> jax.Array:
        return ((~search.done).sum() > few) & (search.length < room[0])

    def go_on(search: _Search) -> Any:
        assert grow is not None
        search = search.replace(state=grow(search.state, room[1]))
        return _advance_till_few(advance, search, room[1:], grow, few, leave)

    search = jax.lax.while_loop(goes_on, advance, search)
    if len(room) == 1:
        return leave(search)
    return jax.lax.cond((~search.done).sum() > few, go_on, leave, search)


def _advance(
    step: StepFn, sources: _Sources, rules: _Rules, search: _Search
) -> _Search:
    """Makes one step of all sources."""
    options, beams = rules.options, search.live.log_prob.shape[1]
    before = jnp.maximum(search.length - 1, 0)
    last = jnp.where(search.length == 0, rules.bos_id, tokens_at(search.live, before))
    logits, state = step(last.reshape(-1), search.state)
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
    log_probs = log_probs.reshape(*last.shape, -1)
    allowed = allow(
        log_probs,
        search.live.tokens,
        search.length,
        options,
        rules.eos_id,
        rules.banned_ids,
    )
    if sources.prefix is not None:
        allowed = sources.prefix.force(allowed, log_probs, search.length)
    attended = rules.attention(state) if rules.attention else None

    if options.sample:
        assert sources.keys is not None
        tokens = draw(sources.keys, allowed, search.length, options)
        parents = jnp.broadcast_to(jnp.arange(beams), tokens.shape)
    else:
        parents, tokens = _best_extensions(search.live, allowed)
    candidates = _extend(search, allowed, attended, parents, tokens)
    is_eos = tokens_at(candidates, search.length) == rules.eos_id
    alive = jnp.where(is_eos, IMPOSSIBLE, candidates.log_prob)
    ended = is_eos
    if options.early_stop:
        ended &= jnp.arange(ended.shape[1]) < beams
    score = hypothesis_scores(candidates, sources.source_mask, options)
    score = jnp.where(ended, score, IMPOSSIBLE)
    candidates = candidates.replace(score=score)
    if options.sample:
        live = candidates.replace(log_prob=alive)
        finished = select(score > IMPOSSIBLE, candidates, search.finished)
    else:
        order = jax.lax.top_k(alive, beams)[1]
        live = candidates.replace(log_prob=alive).take(order)
        if beams > 1:
            state = _follow(state, take_beams(parents, order))
        finished = join(search.finished, candidates).best(beams)

    length = search.length + 1
    best_live = live.log_prob.max(axis=1)
    done = (best_live <= IMPOSSIBLE) | (length >= sources.limits)
    if not options.sample:
        bound = best_possible(best_live, length, sources.limits, options)
        done |= finished.score[:, rules.nbest - 1] >= bound
    if options.early_stop:
        done |= (finished.score > IMPOSSIBLE).all(axis=1)
    # A source that was done stays as it was, whatever else is in the batch.
    stays = search.done[:, None]
    return _Search(
        length=length,
        live=select(stays, search.live, live),
        finished=select(stays, search.finished, finished),
        done=search.done | done,
        state=state,
    )


# --- Its pieces -----------------------------------------------------------------


def _best_extensions(
    live: Hypotheses, log_probs: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns parents and tokens of the best extensions by one token, `[B, C]` each.

    Twice the beam is kept, so that ended ones cannot starve the live ones; for greedy
    search one, so that it ends where EOS is most probable.
    """
    _, beams, vocab_size = log_probs.shape
    count = max(min(2 * beams if beams > 1 else 1, beams * vocab_size), beams)
    flat = _top(live.log_prob[..., None] + log_probs, count)
    return flat // vocab_size, (flat % vocab_size).astype(jnp.int32)


def _top(x: jax.Array, count: int) -> jax.Array:
    """Returns the indices `[B, count]` of `top_k` over all of each `x[b]`, `[W, V]`.

    Sorting is slow and maxima are fast: the greatest are in the `count` blocks of the
    greatest maxima. Ties go to the lower index, as in `top_k`.
    """
    x = x.reshape(len(x), -1)
    size = max(n for n in range(1, BLOCK + 1) if x.shape[1] % n == 0)
    if x.shape[1] // size <= count:
        return jax.lax.top_k(x, count)[1]
    blocks = x.reshape(len(x), -1, size)
    # Sorted, so that the order of equal ones is that of all.
    chosen = jnp.sort(jax.lax.top_k(blocks.max(axis=-1), count)[1])
    candidates = take_beams(blocks, chosen).reshape(len(x), -1)
    place = jax.lax.top_k(candidates, count)[1]
    return take_beams(chosen, place // size) * size + place % size


def _extend(
    search: _Search,
    log_probs: jax.Array,
    attended: jax.Array | None,
    parents: jax.Array,
    tokens: jax.Array,
) -> Hypotheses:
    """Returns the live hypotheses at `parents [B, C]` with `tokens [B, C]` appended."""
    sources, beams, vocab_size = log_probs.shape
    flat = log_probs.reshape(sources, beams * vocab_size)
    gains = jnp.take_along_axis(flat, parents * vocab_size + tokens, axis=1)
    extended = search.live.take(parents)

    def write(array: jax.Array, values: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(array, values, search.length, 2)

    if attended is not None and extended.attention is not None:
        attended = attended.reshape(sources, beams, -1)
        attended = write(extended.attention, take_beams(attended, parents))
    return extended.replace(
        tokens=write(extended.tokens, tokens),
        length=extended.length + 1,
        log_prob=jnp.maximum(extended.log_prob + gains, IMPOSSIBLE),
        token_log_probs=write(extended.token_log_probs, gains),
        attention=attended,
    )


def _follow(state: State, parents: jax.Array) -> State:
    """Reorders what has a row for each beam, so that each has its parent's."""
    sources, beams = parents.shape
    rows = (jnp.arange(sources)[:, None] * beams + parents).reshape(-1)
    return jax.tree.map(
        lambda x: x[rows] if x.ndim and len(x) == len(rows) else x, state
    )
