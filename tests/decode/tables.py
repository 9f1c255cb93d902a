"""Search over tables of logits, and a plain search written from the definition.

A table gives the logits after every prefix, so a model without a model: small enough
to enumerate all it can say.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.config import DecodeConfig
from transformer_jax.decode.choice import IMPOSSIBLE, Prefix
from transformer_jax.decode.hypotheses import Hypotheses
from transformer_jax.decode.search import search as run_search
from transformer_jax.decode.search import width

EOS, BOS = 1, 9
ALPHAS = (-0.5, 0.0, 0.6, 1.0, 2.0)


class Found(NamedTuple):
    """A hypothesis."""

    tokens: tuple[int, ...]
    log_prob: float
    score: float


# --- Logits as a function of the prefix -----------------------------------------


def weights_of(vocab_size: int, length: int, nodes: int) -> np.ndarray:
    """Returns what each position counts in the number of a prefix's node."""
    return np.asarray([pow(vocab_size + 1, i, nodes) for i in range(length)], np.int64)


def node_of(prefix: Sequence[int], vocab_size: int, nodes: int) -> int:
    """Returns the table entry of a prefix; injective where there are enough nodes."""
    weights = weights_of(vocab_size, len(prefix), nodes)
    return int(sum((v + 1) * w for v, w in zip(prefix, weights, strict=True)) % nodes)


@functools.partial(
    jax.jit, static_argnames=("options", "max_length", "nbest", "banned", "attends")
)
def search(
    tables: jax.Array,
    limits: jax.Array,
    alpha: jax.Array,
    *,
    options: DecodeConfig,
    max_length: int,
    nbest: int = 1,
    banned: tuple[int, ...] = (),
    prefix: Prefix | None = None,
    keys: jax.Array | None = None,
    attends: bool = False,
    attention: jax.Array | None = None,
    source_mask: jax.Array | None = None,
) -> Hypotheses:
    """Searches `tables [B, nodes, V]`; the state is the whole prefix, as in a cache.

    So a beam that got another one's state gets wrong logits. `alpha` takes the place
    of the options' own: it is traced, so that it is compiled only once. A beam that
    has `tokens` attends to the source by `attention[b, last token]`, `[B, V, S]`. The
    last half of the sources goes on alone.
    """
    sources, nodes, vocab_size = tables.shape
    beams = width(options, nbest)
    weights = jnp.asarray(weights_of(vocab_size, max_length, nodes), jnp.int32)

    def step_of(source: jax.Array) -> Any:
        row = jnp.repeat(source, beams)

        def step(tokens: jax.Array, state: Any) -> tuple[jax.Array, Any]:
            past, index, _ = state  # [N, L, 1], []
            past = jax.lax.dynamic_update_index_in_dim(past, tokens[:, None], index, 1)
            prefix = past[:, 1:, 0] + 1
            seen = jnp.arange(max_length - 1) < index
            node = jnp.where(seen, prefix * weights[: max_length - 1], 0).sum(axis=1)
            node = jnp.where(past[:, 0, 0] == BOS, node % nodes, -1)
            logits = jnp.where(node[:, None] >= 0, tables[row, node], jnp.nan)
            return logits, (past, index + 1, attended(row, tokens % vocab_size))

        return step

    def attended(row: jax.Array, token: jax.Array | int) -> jax.Array | None:
        return None if attention is None else attention[row, token]

    def narrow(source: jax.Array) -> tuple[Any, Any]:
        rows = (source[:, None] * beams + jnp.arange(beams)).reshape(-1)

        def take(state: Any) -> Any:
            return jax.tree.map(lambda x: x[rows] if x.ndim else x, state)

        return step_of(source), take

    every = jnp.arange(sources)
    past = jnp.zeros((sources * beams, max_length, 1), jnp.int32)
    start = past, jnp.zeros((), jnp.int32), attended(jnp.repeat(every, beams), 0)
    return run_search(
        step_of(every),
        start,
        limits,
        dataclasses.replace(options, alpha=alpha),
        max_length=max_length,
        bos_id=BOS,
        eos_id=EOS,
        banned_ids=banned,
        nbest=nbest,
        few=sources // 2,
        narrow=narrow if sources > 1 else None,
        prefix=prefix,
        keys=keys,
        attention=(lambda state: state[2]) if attends else None,
        source_mask=source_mask,
    )


def as_arrays(prefixes: list[tuple[int, ...]], longest: int = 5) -> Prefix:
    """Returns prefixes of other lengths as what the search takes."""
    tokens = np.zeros((len(prefixes), longest), np.int32)
    for row, prefix in zip(tokens, prefixes, strict=True):
        row[: len(prefix)] = prefix
    lengths = np.asarray([len(p) for p in prefixes], np.int32)
    return Prefix(jnp.asarray(tokens), jnp.asarray(lengths))


def read(hypotheses: Hypotheses, row: int) -> list[Found]:
    """Returns the hypotheses that exist; those that do not must come last."""
    scores = np.asarray(hypotheses.score[row])
    exists = scores > IMPOSSIBLE
    assert np.all(np.diff(exists.astype(int)) <= 0) and np.all(np.diff(scores) <= 0)
    found = []
    for beam in range(int(exists.sum())):
        length = int(hypotheses.length[row, beam])
        log_probs = np.asarray(hypotheses.token_log_probs[row, beam])
        found.append(
            Found(
                tuple(np.asarray(hypotheses.tokens[row, beam, :length]).tolist()),
                float(hypotheses.log_prob[row, beam]),
                float(scores[beam]),
            )
        )
        assert log_probs.sum() == pytest.approx(found[-1].log_prob, rel=1e-5, abs=1e-6)
        assert not log_probs[length:].any()
    assert len({f.tokens for f in found}) == len(found)  # no copies
    return found


def read_all(hypotheses: Hypotheses) -> list[list[Found]]:
    arrays = jax.tree.map(np.asarray, hypotheses)
    return [read(arrays, row) for row in range(len(arrays.score))]


def log_probs_of(tables: np.ndarray) -> np.ndarray:
    return np.asarray(jax.nn.log_softmax(jnp.asarray(tables)))


def assert_same(found: list[Found], expected: list[Found]) -> None:
    """Compares two lists; those of equal score, but for rounding, in any order."""
    assert len(found) == len(expected)
    by_tokens = {e.tokens: e for e in expected}
    for f, e in zip(found, expected, strict=True):
        assert f.score == pytest.approx(e.score, rel=1e-5, abs=1e-6)
        assert f.tokens == e.tokens or abs(by_tokens[f.tokens].score - e.score) < 1e-5
        same = by_tokens[f.tokens]
        assert f.log_prob == pytest.approx(same.log_prob, rel=1e-5, abs=1e-6)


def penalty(length: int, alpha: float, kind: str = "gnmt") -> float:
    return ((5 + length) / 6) ** alpha if kind == "gnmt" else length**alpha


# --- The plain search -----------------------------------------------------------


class Rules(NamedTuple):
    """What a hypothesis may be, in the words of the definition."""

    banned: tuple[int, ...] = ()
    prefix: tuple[int, ...] = ()
    min_length: int = 0
    no_repeat_ngram: int = 0

    def allow(self, tokens: tuple[int, ...]) -> bool:
        """Returns whether the last of `tokens` may follow those before it."""
        place, last = len(tokens) - 1, tokens[-1]
        if place < len(self.prefix):
            return last == self.prefix[place]
        if last in self.banned or (last == EOS and place < self.min_length):
            return False
        n = self.no_repeat_ngram
        if n == 0 or len(tokens) < n:
            return True
        earlier = [tokens[i : i + n] for i in range(len(tokens) - n)]
        return tokens[-n:] not in earlier


FREE = Rules()


def plain_search(
    log_probs: np.ndarray,
    limit: int,
    alpha: float,
    beam_size: int,
    nbest: int = 1,
    rules: Rules = FREE,
    kind: str = "gnmt",
    stop: bool = True,
    early_stop: bool = False,
) -> list[Found]:
    """Beam search for one sentence, from the definition; sorts are stable.

    Args:
        log_probs: `[nodes, V]`, of the next token after a prefix.
        limit: most tokens.
        alpha: of the length penalty.
        beam_size: hypotheses that are kept.
        nbest: how many finished ones must be out of reach for the rest.
        rules: what is allowed.
        kind: of the length penalty.
        stop: False goes on to the limit.
        early_stop: endings count among the best `beam_size` candidates only, and as
            many of them are enough.
    """
    nodes, vocab_size = log_probs.shape
    live = [Found((), 0.0, 0.0)]
    finished: list[Found] = []
    for length in range(1, limit + 1):
        candidates = []
        for hypothesis in live:
            node = node_of(hypothesis.tokens, vocab_size, nodes)
            for token in range(vocab_size):
                tokens = (*hypothesis.tokens, token)
                gain = log_probs[node, token]
                if rules.allow(tokens) and gain > -math.inf:
                    total = float(np.float32(hypothesis.log_prob) + gain)
                    score = total / penalty(length, alpha, kind)
                    candidates.append(Found(tokens, total, score))
        candidates.sort(key=lambda c: -c.log_prob)
        candidates = candidates[: 2 * beam_size if beam_size > 1 else 1]
        counting = candidates[:beam_size] if early_stop else candidates
        finished += [c for c in counting if c.tokens[-1] == EOS]
        finished = sorted(finished, key=lambda c: -c.score)[:beam_size]
        live = [c for c in candidates if c.tokens[-1] != EOS][:beam_size]
        enough = early_stop and len(finished) == beam_size
        if not live or length == limit or enough:
            break
        ends = range(length + 1, limit + 1)
        best = max(live[0].log_prob / penalty(m, alpha, kind) for m in ends)
        if stop and len(finished) >= nbest and finished[nbest - 1].score >= best:
            break
    return finished or live


def enumerate_all(
    log_probs: np.ndarray,
    limit: int,
    alpha: float,
    rules: Rules = FREE,
    kind: str = "gnmt",
) -> list[Found]:
    """Returns every hypothesis, best first: those that end, or, if none, those cut."""
    nodes, vocab_size = log_probs.shape
    ended, cut = [], []

    def extend(prefix: tuple[int, ...], total: float) -> None:
        if len(prefix) == limit:
            cut.append(Found(prefix, total, total / penalty(limit, alpha, kind)))
            return
        for token in range(vocab_size):
            longer = (*prefix, token)
            more = float(log_probs[node_of(prefix, vocab_size, nodes), token])
            if more == -math.inf or not rules.allow(longer):
                continue
            if token == EOS:
                score = (total + more) / penalty(len(longer), alpha, kind)
                ended.append(Found(longer, total + more, score))
            else:
                extend(longer, total + more)

    extend((), 0.0)
    return sorted(ended or cut, key=lambda f: -f.score)
