"""Greedy and beam search over any step function; knows no model and no tokenizer.

    def step(tokens, state):      # tokens [B * W] int32, the last token of each beam
        return logits, state      # logits [B * W, V], of the next token

`state` is any tree of arrays. Arrays with axes have B * W rows first and follow their
beam when beams are reordered; scalars are shared. What never changes, such as the
encoder's output, is closed over by `step` and is not copied per beam.

A hypothesis of n tokens, EOS included, scores log P / ((5 + n) / 6)^alpha, the length
penalty of Wu et al. 2016 (equation 14). The same formula holds for one that is cut at
its limit without EOS; such a one is used only where no hypothesis finished.
"""

from collections.abc import Callable, Sequence
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

# Log-probability of what does not exist: dead beams and banned tokens. Finite, so that
# sums and quotients of it stay ordered and free of NaN.
IMPOSSIBLE = -1e30

State = Any
StepFn = Callable[[jax.Array, State], tuple[jax.Array, State]]


class Hypotheses(flax.struct.PyTreeNode):
    """Hypotheses of each source, best first. B sources, W beams, L positions."""

    tokens: jax.Array  # [B, W, L] int32
    length: jax.Array  # [B, W] int32, EOS included
    log_prob: jax.Array  # [B, W] float32, sum over the tokens, EOS included
    score: jax.Array  # [B, W] float32; IMPOSSIBLE or less where there is none

    def best(self, count: int) -> "Hypotheses":
        """Returns the `count` of highest score, earlier ones first on ties."""
        _, order = jax.lax.top_k(self.score, count)
        return self.take(order)

    def take(self, index: jax.Array) -> "Hypotheses":
        """Returns the hypotheses at `index [B, K]` of each source."""
        return jax.tree.map(lambda x: take_beams(x, index), self)


def take_beams(x: jax.Array, index: jax.Array) -> jax.Array:
    """Returns `x[b, index[b]]` of each b: `[B, W, ...]`, `[B, K]` to `[B, K, ...]`."""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 2)), 1)


def length_penalty(length: jax.Array | int, alpha: float) -> jax.Array:
    """Returns ((5 + length) / 6)^alpha, float32."""
    return ((5.0 + jnp.asarray(length, jnp.float32)) / 6.0) ** alpha


def best_possible(
    log_prob: jax.Array, length: jax.Array, limit: jax.Array, alpha: float
) -> jax.Array:
    """Returns the highest score that a live hypothesis can still end with.

    It can lose log-probability only, and end at any length from `length + 1` to
    `limit`. A log-probability is negative, so the largest penalty gives the best
    score: the one at the limit if alpha is positive, at `length + 1` if negative.
    """
    largest = jnp.maximum(
        length_penalty(length + 1, alpha), length_penalty(limit, alpha)
    )
    return log_prob / largest


class _Search(flax.struct.PyTreeNode):
    """State of the loop. `live` has no EOS yet; its scores are log-probabilities."""

    length: jax.Array  # [] int32, tokens of each live hypothesis
    live: Hypotheses
    finished: Hypotheses
    done: jax.Array  # [B] bool
    state: State


def beam_search(
    step: StepFn,
    state: State,
    limits: jax.Array,
    *,
    beam_size: int,
    max_length: int,
    alpha: float,
    bos_id: int,
    eos_id: int,
    banned_ids: Sequence[int] = (),
    nbest: int = 1,
) -> Hypotheses:
    """Searches for the hypotheses of highest score; jit it whole.

    A source is done when its `nbest` finished hypotheses cannot be beaten any more by
    a live one. Ties go to the lower beam, then to the lower token id. With one beam it
    is greedy search: the most probable token at each step, until that is EOS.

    Args:
        step: maps the last tokens and the state to logits and the next state.
        state: of no tokens yet, with `B * beam_size` rows.
        limits: `[B] int32`, most tokens of each source's output, EOS included; at least
            1 and at most `max_length`.
        beam_size: W, live hypotheses of each source.
        max_length: L, length of the arrays.
        alpha: exponent of the length penalty; 0 ranks by log-probability.
        bos_id: what `step` is given first.
        eos_id: the token that ends a hypothesis.
        banned_ids: tokens that are never generated.
        nbest: how many hypotheses will be read, at most `beam_size`.

    Returns:
        `beam_size` hypotheses of each source, best first, all different. The score of
        those beyond what exists is at most IMPOSSIBLE.
    """
    sources = limits.shape[0]
    search = _start(sources, beam_size, max_length, state)
    banned = jnp.asarray(list(banned_ids), jnp.int32)

    def unfinished(search: _Search) -> jax.Array:
        return ~search.done.all()

    def advance(search: _Search) -> _Search:
        before = jnp.maximum(search.length - 1, 0)
        last = jnp.where(search.length == 0, bos_id, _column(search.live, before))
        logits, state = step(last.reshape(-1), search.state)
        log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
        log_probs = log_probs.at[:, banned].set(IMPOSSIBLE)

        candidates, parents = _extend(search, log_probs, beam_size)
        ended = _column(candidates, search.length) == eos_id
        finished = _finish(search.finished, candidates, ended, alpha)
        going_on = jnp.where(ended, IMPOSSIBLE, candidates.log_prob)
        _, order = jax.lax.top_k(going_on, beam_size)
        live = candidates.replace(log_prob=going_on).take(order)
        if beam_size > 1:
            state = _follow(state, take_beams(parents, order))

        length, best_live = search.length + 1, live.log_prob[:, 0]
        bound = best_possible(best_live, length, limits, alpha)
        beaten = finished.score[:, nbest - 1] >= bound
        done = beaten | (best_live <= IMPOSSIBLE) | (length >= limits)
        # A source that was done stays as it was, whatever else is in the batch.
        return _Search(
            length=length,
            live=_select(search.done, search.live, live),
            finished=_select(search.done, search.finished, finished),
            done=search.done | done,
            state=state,
        )

    search = jax.lax.while_loop(unfinished, advance, search)
    cut = search.live.replace(score=_score(search.live, alpha))
    any_finished = search.finished.score[:, 0] > IMPOSSIBLE
    return _select(any_finished, search.finished, cut)


def _column(hypotheses: Hypotheses, position: jax.Array) -> jax.Array:
    """Returns the tokens at `position`, `[B, W] int32`."""
    return jax.lax.dynamic_index_in_dim(hypotheses.tokens, position, 2, keepdims=False)


def _select(condition: jax.Array, one: Hypotheses, other: Hypotheses) -> Hypotheses:
    """Returns `one` for the sources where `condition [B]` holds, else `other`."""
    return jax.tree.map(
        lambda a, b: jnp.where(condition.reshape(-1, *(1,) * (a.ndim - 1)), a, b),
        one,
        other,
    )


def _score(hypotheses: Hypotheses, alpha: float) -> jax.Array:
    """Returns the penalised scores `[B, W]`; IMPOSSIBLE where there is nothing."""
    score = hypotheses.log_prob / length_penalty(hypotheses.length, alpha)
    return jnp.where(hypotheses.log_prob > IMPOSSIBLE, score, IMPOSSIBLE)


def _finish(
    finished: Hypotheses, candidates: Hypotheses, ended: jax.Array, alpha: float
) -> Hypotheses:
    """Returns the best of `finished` and of those `candidates` that `ended`."""
    score = jnp.where(ended, _score(candidates, alpha), IMPOSSIBLE)
    both = jax.tree.map(
        lambda a, b: jnp.concatenate([a, b], axis=1),
        finished,
        candidates.replace(score=score),
    )
    return both.best(finished.score.shape[1])


def _start(sources: int, beam_size: int, max_length: int, state: State) -> _Search:
    """Returns the state before the first token: one live beam, the others dead."""
    shape = (sources, beam_size)
    nothing = Hypotheses(
        tokens=jnp.zeros((*shape, max_length), jnp.int32),
        length=jnp.zeros(shape, jnp.int32),
        log_prob=jnp.full(shape, IMPOSSIBLE, jnp.float32),
        score=jnp.full(shape, IMPOSSIBLE, jnp.float32),
    )
    live = nothing.replace(log_prob=nothing.log_prob.at[:, 0].set(0.0))
    done = jnp.zeros(sources, bool)
    return _Search(jnp.zeros((), jnp.int32), live, nothing, done, state)


def _extend(
    search: _Search, log_probs: jax.Array, beam_size: int
) -> tuple[Hypotheses, jax.Array]:
    """Returns the best extensions by one token, and the beam each comes from.

    Twice the beam is kept, so that ended ones cannot starve the live ones; for greedy
    search one, so that it ends where EOS is most probable.
    """
    sources, vocab_size = search.done.shape[0], log_probs.shape[-1]
    log_probs = log_probs.reshape(sources, beam_size, vocab_size)
    total = search.live.log_prob[..., None] + log_probs
    count = min(2 * beam_size if beam_size > 1 else 1, beam_size * vocab_size)
    count = max(count, beam_size)
    best, flat = jax.lax.top_k(total.reshape(sources, -1), count)
    parents, tokens = flat // vocab_size, (flat % vocab_size).astype(jnp.int32)
    extended = search.live.take(parents)
    return extended.replace(
        tokens=jax.lax.dynamic_update_index_in_dim(
            extended.tokens, tokens, search.length, 2
        ),
        length=extended.length + 1,
        log_prob=jnp.maximum(best, IMPOSSIBLE),
    ), parents


def _follow(state: State, parents: jax.Array) -> State:
    """Reorders the rows of `state` so that each beam has its parent's."""
    sources, beams = parents.shape
    rows = (jnp.arange(sources)[:, None] * beams + parents).reshape(-1)
    return jax.tree.map(lambda x: x[rows] if x.ndim else x, state)
