"""Beam search on tables of random logits, against enumeration and a plain search.

The plain search is written from the definition, one sentence at a time, with lists.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.decode.beam_search import (
    IMPOSSIBLE,
    Hypotheses,
    beam_search,
    best_possible,
    length_penalty,
)

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
    jax.jit, static_argnames=("beam_size", "max_length", "nbest", "banned")
)
def search(
    tables: jax.Array,
    limits: jax.Array,
    alpha: jax.Array,
    *,
    beam_size: int,
    max_length: int,
    nbest: int = 1,
    banned: tuple[int, ...] = (),
) -> Hypotheses:
    """Searches `tables [B, nodes, V]`; the state is the whole prefix, as in a cache.

    So a beam that got another one's state gets wrong logits.
    """
    sources, nodes, vocab_size = tables.shape
    row = jnp.arange(sources * beam_size) // beam_size
    weights = jnp.asarray(weights_of(vocab_size, max_length, nodes), jnp.int32)

    def step(tokens: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        past, index = state  # [N, L, 1], []
        past = jax.lax.dynamic_update_index_in_dim(past, tokens[:, None], index, 1)
        prefix = past[:, 1:, 0] + 1
        seen = jnp.arange(max_length - 1) < index
        node = jnp.where(seen, prefix * weights[: max_length - 1], 0).sum(axis=1)
        node = jnp.where(past[:, 0, 0] == BOS, node % nodes, -1)
        logits = jnp.where(node[:, None] >= 0, tables[row, node], jnp.nan)
        return logits, (past, index + 1)

    past = jnp.zeros((sources * beam_size, max_length, 1), jnp.int32)
    return beam_search(
        step,
        (past, jnp.zeros((), jnp.int32)),
        limits,
        beam_size=beam_size,
        max_length=max_length,
        alpha=alpha,  # pyright: ignore - traced, so that it is compiled only once
        bos_id=BOS,
        eos_id=EOS,
        banned_ids=banned,
        nbest=nbest,
    )


def read(hypotheses: Hypotheses, row: int) -> list[Found]:
    """Returns the hypotheses that exist; those that do not must come last."""
    scores = np.asarray(hypotheses.score[row])
    exists = scores > IMPOSSIBLE
    assert np.all(np.diff(exists.astype(int)) <= 0) and np.all(np.diff(scores) <= 0)
    found = []
    for beam in range(int(exists.sum())):
        length = int(hypotheses.length[row, beam])
        found.append(
            Found(
                tuple(np.asarray(hypotheses.tokens[row, beam, :length]).tolist()),
                float(hypotheses.log_prob[row, beam]),
                float(scores[beam]),
            )
        )
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


def penalty(length: int, alpha: float) -> float:
    return ((5 + length) / 6) ** alpha


# --- Closed forms ---------------------------------------------------------------


def test_length_penalty() -> None:
    assert float(length_penalty(1, 0.6)) == 1.0
    assert float(length_penalty(7, 1.0)) == 2.0
    assert float(length_penalty(7, 2.0)) == 4.0
    assert float(length_penalty(19, -0.5)) == 0.5
    assert float(length_penalty(31, 0.0)) == 1.0
    assert float(length_penalty(3, 0.6)) == pytest.approx((8 / 6) ** 0.6)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_best_possible_is_the_best_length_still_to_come(alpha: float) -> None:
    for log_prob in (0.0, -0.3, -70.0):
        for length in range(1, 8):
            for limit in range(length + 1, 10):
                ends = range(length + 1, limit + 1)
                expected = max(log_prob / penalty(m, alpha) for m in ends)
                found = best_possible(
                    jnp.asarray(log_prob),
                    jnp.asarray(length),
                    jnp.asarray(limit),
                    alpha,
                )
                assert float(found) == pytest.approx(expected, rel=1e-6)


# --- A beam as wide as the space: enumeration -----------------------------------

V, L = 4, 4
WIDE = (V - 1) ** L  # all prefixes of L tokens
NODES = (V + 1) ** (L - 1)  # one for every prefix that is extended
TABLES = 200


def enumerate_all(log_probs: np.ndarray, limit: int, alpha: float) -> list[Found]:
    """Returns every hypothesis, best first: those that end, or, if none, those cut."""
    ended, cut = [], []

    def extend(prefix: tuple[int, ...], total: float) -> None:
        if len(prefix) == limit:
            cut.append(Found(prefix, total, total / penalty(limit, alpha)))
            return
        for token in range(V):
            more = float(log_probs[node_of(prefix, V, NODES), token])
            if more == -math.inf:
                continue
            longer = (*prefix, token)
            if token == EOS:
                score = (total + more) / penalty(len(longer), alpha)
                ended.append(Found(longer, total + more, score))
            else:
                extend(longer, total + more)

    extend((), 0.0)
    return sorted(ended or cut, key=lambda f: -f.score)


Tree = tuple[np.ndarray, np.ndarray, dict[float, list[list[Found]]]]


@pytest.fixture(scope="module")
def trees() -> Tree:
    """Tables for every prefix, limits, and for each alpha all there is to be found.

    In some rows EOS is rare, in some it never comes.
    """
    rng = np.random.default_rng(0)
    tables = rng.normal(scale=2.0, size=(TABLES, NODES, V)).astype(np.float32)
    tables[:, :, EOS] += rng.normal(scale=2.0, size=(TABLES, 1))
    tables[::2, :, EOS][rng.random((TABLES // 2, NODES)) < 0.6] = -np.inf
    tables[::10, :, EOS] = -np.inf
    limits = rng.integers(1, L + 1, TABLES).astype(np.int32)
    log_probs = log_probs_of(tables)
    expected = {
        alpha: [
            enumerate_all(log_probs[row], int(limits[row]), alpha)
            for row in range(TABLES)
        ]
        for alpha in ALPHAS
    }
    return tables, limits, expected


@pytest.mark.parametrize("nbest", [1, 4, WIDE])
def test_a_beam_as_wide_as_the_space_finds_the_optimum(trees: Tree, nbest: int) -> None:
    tables, limits, all_expected = trees
    counts = set()
    for alpha in ALPHAS:
        hypotheses = search(
            tables, limits, alpha, beam_size=WIDE, max_length=L, nbest=nbest
        )
        found_rows = read_all(hypotheses)
        for found, expected in zip(found_rows, all_expected[alpha], strict=True):
            counts.add(len(expected))
            assert_same(found[:nbest], expected[:nbest])
    # All that exist, at limit 1 one only, and where none ends all 81 that are cut.
    assert {1, 40, WIDE} <= counts


def test_scores_of_a_known_tree_by_hand() -> None:
    """P(a) = 0.6 and P(b) = 0.4, then EOS for sure after b, 0.5 after a and a a."""
    a, b = 2, 3
    table = np.full((NODES, V), -np.inf, np.float32)
    chances = {
        (): {a: 0.6, b: 0.4},
        (a,): {EOS: 0.5, a: 0.5},
        (b,): {EOS: 1.0},
        (a, a): {EOS: 0.5, b: 0.5},
        (a, a, b): {a: 1.0},
    }
    for prefix, tokens in chances.items():
        for token, p in tokens.items():
            table[node_of(prefix, V, NODES), token] = math.log(p)
    tables = np.repeat(table[None], TABLES, axis=0)
    limits = np.full(TABLES, L, np.int32)
    hypotheses = search(tables, limits, 0.6, beam_size=WIDE, max_length=L, nbest=4)
    found = read_all(hypotheses)[0]
    assert [f.tokens for f in found] == [(b, EOS), (a, EOS), (a, a, EOS)]
    expected = [
        math.log(0.4) / (7 / 6) ** 0.6,
        math.log(0.3) / (7 / 6) ** 0.6,
        math.log(0.15) / (8 / 6) ** 0.6,  # ended before the limit, and pays for 3 only
    ]
    assert [f.score for f in found] == pytest.approx(expected, abs=1e-5)


# --- Narrow beams: a plain search -----------------------------------------------

VOCAB, LONG, HASHES, ROWS = 11, 9, 97, 42


def plain_search(
    log_probs: np.ndarray,
    limit: int,
    alpha: float,
    beam_size: int,
    nbest: int,
    banned: tuple[int, ...] = (),
    stop: bool = True,
) -> list[Found]:
    """Beam search for one sentence, from the definition; sorts are stable."""
    live = [Found((), 0.0, 0.0)]
    finished: list[Found] = []
    for length in range(1, limit + 1):
        candidates = []
        for hypothesis in live:
            node = node_of(hypothesis.tokens, VOCAB, HASHES)
            for token in range(VOCAB):
                if token not in banned and log_probs[node, token] > -math.inf:
                    total = float(
                        np.float32(hypothesis.log_prob) + log_probs[node, token]
                    )
                    tokens = (*hypothesis.tokens, token)
                    score = total / penalty(length, alpha)
                    candidates.append(Found(tokens, total, score))
        candidates.sort(key=lambda c: -c.log_prob)
        candidates = candidates[: 2 * beam_size if beam_size > 1 else 1]
        finished += [c for c in candidates if c.tokens[-1] == EOS]
        finished = sorted(finished, key=lambda c: -c.score)[:beam_size]
        live = [c for c in candidates if c.tokens[-1] != EOS][:beam_size]
        if not live or length == limit:
            break
        ends = range(length + 1, limit + 1)
        best = max(live[0].log_prob / penalty(m, alpha) for m in ends)
        if stop and len(finished) >= nbest and finished[nbest - 1].score >= best:
            break
    return finished or live


@pytest.fixture(scope="module")
def hashed() -> tuple[np.ndarray, np.ndarray]:
    """For each alpha: tables for every hash of a prefix, and limits from 1 to LONG."""
    rng = np.random.default_rng(1)
    shape = (len(ALPHAS), ROWS, HASHES, VOCAB)
    tables = rng.normal(scale=1.5, size=shape).astype(np.float32)
    # From EOS nearly everywhere to EOS nearly nowhere.
    tables[..., EOS] += rng.normal(scale=2.0, size=(len(ALPHAS), ROWS, 1)) - 1
    tables[:, ::7, :, EOS] = -30
    tables[:, ::14, :, EOS] = -np.inf
    limits = rng.integers(1, LONG + 1, shape[:2]).astype(np.int32)
    limits[:, : ROWS // 2] = LONG
    return tables, limits


@pytest.mark.parametrize(
    ("beam_size", "nbest"), [(1, 1), (2, 2), (4, 1), (4, 4), (VOCAB + 2, 3)]
)
def test_narrow_beams_equal_the_plain_search(
    hashed: tuple[np.ndarray, np.ndarray], beam_size: int, nbest: int
) -> None:
    lengths, cut = set(), 0
    for alpha, tables, limits in zip(ALPHAS, *hashed, strict=True):
        log_probs = log_probs_of(tables)
        hypotheses = search(
            tables, limits, alpha, beam_size=beam_size, max_length=LONG, nbest=nbest
        )
        for row, found in enumerate(read_all(hypotheses)):
            limit = int(limits[row])
            settings = (log_probs[row], limit, alpha, beam_size, nbest)
            assert_same(found, plain_search(*settings))
            lengths.add((limit, len(found[0].tokens)))
            ended = [f.tokens[-1] == EOS for f in found]
            assert all(ended) or not any(ended)  # cut ones only where none finished
            if not ended[0]:
                cut += 1
                assert {len(f.tokens) for f in found} == {limit}
            assert all(EOS not in f.tokens[:-1] for f in found)
            assert all(len(f.tokens) <= limit for f in found)
            # To stop early changes none of those that will be read.
            assert_same(found[:nbest], plain_search(*settings, stop=False)[:nbest])
    assert cut > 10  # cut at their limit
    assert sum(limit > length for limit, length in lengths) > 10  # limit not reached


def test_one_beam_is_greedy(hashed: tuple[np.ndarray, np.ndarray]) -> None:
    tables, limits = hashed[0][2], hashed[1][2]
    log_probs = log_probs_of(tables)
    hypotheses = search(tables, limits, 0.6, beam_size=1, max_length=LONG)
    for row, (found,) in enumerate(read_all(hypotheses)):
        tokens: list[int] = []
        total = 0.0
        while len(tokens) < limits[row] and EOS not in tokens:
            at = log_probs[row, node_of(tokens, VOCAB, HASHES)]
            tokens.append(int(at.argmax()))
            total += float(at.max())
        assert found.tokens == tuple(tokens)
        score = total / penalty(len(tokens), 0.6)
        assert found.score == pytest.approx(score, rel=1e-5, abs=1e-6)


def test_the_best_does_not_depend_on_how_many_are_read(
    hashed: tuple[np.ndarray, np.ndarray],
) -> None:
    for alpha, tables, limits in zip(ALPHAS, *hashed, strict=True):
        one, four = (
            search(tables, limits, alpha, beam_size=4, max_length=LONG, nbest=nbest)
            for nbest in (1, 4)
        )
        for a, b in zip(read_all(one), read_all(four), strict=True):
            assert a[0] == b[0]


def test_ties_go_to_the_lower_beam_then_to_the_lower_token() -> None:
    # All logits equal; all equal but for EOS; the same two best tokens everywhere.
    tables = np.zeros((ROWS, HASHES, VOCAB), np.float32)
    tables[1, :, EOS] = -3
    tables[2, :, [3, 5]] = 1
    limits = np.asarray([LONG, 4, 3, *[1] * (ROWS - 3)], np.int32)
    log_probs = log_probs_of(tables)
    for alpha in (0.0, 0.6):
        found = read_all(search(tables, limits, alpha, beam_size=4, max_length=LONG))
        for row in range(4):
            settings = (log_probs[row], int(limits[row]), alpha, 4, 1)
            expected = plain_search(*settings)
            assert [f.tokens for f in found[row]] == [e.tokens for e in expected]
        assert found[0][0].tokens == (EOS,)


def test_a_row_does_not_depend_on_the_others(
    hashed: tuple[np.ndarray, np.ndarray],
) -> None:
    tables, limits = hashed[0][2], hashed[1][2]
    run = functools.partial(search, beam_size=4, max_length=LONG)
    expected = read_all(run(tables, limits, 0.6))
    order = np.random.default_rng(2).permutation(ROWS)
    shuffled = read_all(run(tables[order], limits[order], 0.6))
    assert shuffled == [expected[i] for i in order]
    # Alone it ends with its own last step, among the others it waits for theirs.
    for i in (0, 1, 7, ROWS - 1):
        (alone,) = read_all(run(tables[i : i + 1], limits[i : i + 1], 0.6))
        assert alone == expected[i]


def test_limits_are_those_of_each_sentence(
    hashed: tuple[np.ndarray, np.ndarray],
) -> None:
    """One that could go on does not profit from room that only others have."""
    table, run = hashed[0][2, 7], functools.partial(search, beam_size=4)
    tables = np.repeat(table[None], ROWS, axis=0)  # one where EOS is rare
    limits = (np.arange(ROWS) % LONG + 1).astype(np.int32)
    found = read_all(run(tables, limits, 0.6, max_length=LONG))
    assert [len(f[0].tokens) for f in found] == limits.tolist()
    for row in range(LONG, ROWS):
        assert found[row] == found[row - LONG]


def test_banned_tokens_never_come(hashed: tuple[np.ndarray, np.ndarray]) -> None:
    banned = (0, 2)
    tables, limits = hashed[0][2].copy(), hashed[1][2]
    tables[::2, :, banned] += 5  # even where they are the most probable
    log_probs = log_probs_of(tables)
    hypotheses = search(
        tables, limits, 0.6, beam_size=4, max_length=LONG, banned=banned
    )
    for row, found in enumerate(read_all(hypotheses)):
        assert not any(token in f.tokens for f in found for token in banned)
        # Their probability is not given to the others.
        settings = (log_probs[row], int(limits[row]), 0.6, 4, 1, banned)
        assert_same(found, plain_search(*settings))


def test_search_stops_as_soon_as_nothing_better_can_come() -> None:
    steps: list[int] = []

    def step(tokens: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        jax.debug.callback(lambda n: steps.append(int(n)), state)
        ends = jnp.log(jnp.asarray([0.01, 0.96, 0.02, 0.01]))
        goes_on = jnp.log(jnp.asarray([0.01, 0.0, 0.98, 0.01]))
        logits = jnp.where(state >= 2, ends, goes_on)
        return jnp.broadcast_to(logits, (len(tokens), 4)), state + 1

    limits = jnp.asarray([40, 50], jnp.int32)
    run = functools.partial(beam_search, step, jnp.zeros((), jnp.int32), limits)
    settings = {"max_length": 50, "alpha": 0.6, "bos_id": BOS, "eos_id": EOS}
    found = jax.jit(functools.partial(run, beam_size=2, **settings))()
    jax.effects_barrier()
    assert read_all(found)[0][0].tokens == (2, 2, EOS)
    # -0.08 at length 3, against at best -4 over the penalty at 50, which is 3.8.
    assert sorted(steps) == [0, 1, 2]
