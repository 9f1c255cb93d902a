"""Beam search on tables of random logits, against enumeration and a plain search."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import (
    ALPHAS,
    BOS,
    EOS,
    Found,
    assert_same,
    enumerate_all,
    log_probs_of,
    node_of,
    penalty,
    plain_search,
    read_all,
    search,
)

from transformer_jax.config import DecodeConfig
from transformer_jax.decode import search as search_module
from transformer_jax.decode.hypotheses import best_possible, length_penalty
from transformer_jax.decode.search import search as run_search

FOUR = DecodeConfig(beam_size=4)


# --- Closed forms ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "length", "alpha", "expected"),
    [
        ("gnmt", 1, 0.6, 1.0),
        ("gnmt", 7, 1.0, 2.0),
        ("gnmt", 7, 2.0, 4.0),
        ("gnmt", 19, -0.5, 0.5),
        ("gnmt", 31, 0.0, 1.0),
        ("gnmt", 3, 0.6, (8 / 6) ** 0.6),
        ("length", 7, 1.0, 7.0),
        ("length", 16, 0.5, 4.0),
        ("length", 9, 0.0, 1.0),
    ],
)
def test_length_penalty(kind: str, length: int, alpha: float, expected: float) -> None:
    options = DecodeConfig(penalty=kind, alpha=alpha)
    assert float(length_penalty(length, options)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", ["gnmt", "length"])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_best_possible_is_the_best_length_still_to_come(
    alpha: float, kind: str
) -> None:
    options = DecodeConfig(penalty=kind, alpha=alpha)
    for log_prob in (0.0, -0.3, -70.0):
        for length in range(1, 8):
            for limit in range(length + 1, 10):
                ends = range(length + 1, limit + 1)
                expected = max(log_prob / penalty(m, alpha, kind) for m in ends)
                arrays = [jnp.asarray(x) for x in (log_prob, length, limit)]
                found = best_possible(arrays[0], arrays[1], arrays[2], options)
                assert float(found) == pytest.approx(expected, rel=1e-6)


# --- A beam as wide as the space: enumeration -----------------------------------

V, L = 4, 4
WIDE = (V - 1) ** L  # all prefixes of L tokens
NODES = (V + 1) ** (L - 1)  # one for every prefix that is extended
TABLES = 200

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
    options = DecodeConfig(beam_size=WIDE)
    counts = set()
    for alpha in ALPHAS:
        hypotheses = search(
            tables, limits, alpha, options=options, max_length=L, nbest=nbest
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
    options = DecodeConfig(beam_size=WIDE)
    hypotheses = search(tables, limits, 0.6, options=options, max_length=L, nbest=4)
    found = read_all(hypotheses)[0]
    assert [f.tokens for f in found] == [(b, EOS), (a, EOS), (a, a, EOS)]
    expected = [
        math.log(0.4) / (7 / 6) ** 0.6,
        math.log(0.3) / (7 / 6) ** 0.6,
        math.log(0.15) / (8 / 6) ** 0.6,  # ended before the limit, and pays for 3 only
    ]
    assert [f.score for f in found] == pytest.approx(expected, abs=1e-5)
    each = np.asarray(hypotheses.token_log_probs)[0, 2]
    np.testing.assert_allclose(each, np.log([0.6, 0.5, 0.5, 1.0]), atol=1e-6)


# --- Narrow beams: a plain search -----------------------------------------------

VOCAB, LONG, HASHES, ROWS = 11, 9, 97, 42


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
    ("beam_size", "nbest", "kind"),
    [
        (1, 1, "gnmt"),
        (2, 2, "gnmt"),
        (4, 1, "gnmt"),
        (4, 4, "length"),
        (VOCAB + 2, 3, "gnmt"),
    ],
)
def test_narrow_beams_equal_the_plain_search(
    hashed: tuple[np.ndarray, np.ndarray], beam_size: int, nbest: int, kind: str
) -> None:
    lengths, cut = set(), 0
    options = DecodeConfig(beam_size=beam_size, penalty=kind)
    for alpha, tables, limits in zip(ALPHAS, *hashed, strict=True):
        log_probs = log_probs_of(tables)
        hypotheses = search(
            tables, limits, alpha, options=options, max_length=LONG, nbest=nbest
        )
        for row, found in enumerate(read_all(hypotheses)):
            limit = int(limits[row])
            settings = (log_probs[row], limit, alpha, beam_size, nbest)
            assert_same(found, plain_search(*settings, kind=kind))
            lengths.add((limit, len(found[0].tokens)))
            ended = [f.tokens[-1] == EOS for f in found]
            assert all(ended) or not any(ended)  # cut ones only where none finished
            if not ended[0]:
                cut += 1
                assert {len(f.tokens) for f in found} == {limit}
            assert all(EOS not in f.tokens[:-1] for f in found)
            assert all(len(f.tokens) <= limit for f in found)
            # To stop early changes none of those that will be read.
            whole = plain_search(*settings, kind=kind, stop=False)
            assert_same(found[:nbest], whole[:nbest])
    assert cut > 10  # cut at their limit
    assert sum(limit > length for limit, length in lengths) > 10  # limit not reached


@pytest.mark.parametrize("beam_size", [1, 4])
def test_early_stop_equals_the_plain_search(
    hashed: tuple[np.ndarray, np.ndarray], beam_size: int
) -> None:
    options, changed = DecodeConfig(beam_size=beam_size, early_stop=True), 0
    for alpha, tables, limits in zip(ALPHAS, *hashed, strict=True):
        log_probs = log_probs_of(tables)
        hypotheses = search(
            tables, limits, alpha, options=options, max_length=LONG, nbest=beam_size
        )
        for row, found in enumerate(read_all(hypotheses)):
            settings = (log_probs[row], int(limits[row]), alpha, beam_size, beam_size)
            expected = plain_search(*settings, stop=False, early_stop=True)
            assert_same(found, expected)
            changed += expected != plain_search(*settings)
    assert changed > 10 or beam_size == 1


@pytest.mark.parametrize(
    ("length", "expected"),
    [(1, [1]), (48, [48]), (49, [32, 49]), (100, [32, 64, 100]), (128, [32, 64, 128])],
)
def test_room_doubles_but_for_the_last(length: int, expected: list[int]) -> None:
    assert search_module.rooms(length) == expected


def test_one_beam_is_greedy(hashed: tuple[np.ndarray, np.ndarray]) -> None:
    tables, limits = hashed[0][2], hashed[1][2]
    log_probs = log_probs_of(tables)
    greedy = DecodeConfig(beam_size=1)
    hypotheses = search(tables, limits, 0.6, options=greedy, max_length=LONG)
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
            search(tables, limits, alpha, options=FOUR, max_length=LONG, nbest=nbest)
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
        found = read_all(search(tables, limits, alpha, options=FOUR, max_length=LONG))
        for row in range(4):
            expected = plain_search(log_probs[row], int(limits[row]), alpha, 4)
            assert [f.tokens for f in found[row]] == [e.tokens for e in expected]
        assert found[0][0].tokens == (EOS,)


def test_a_row_does_not_depend_on_the_others(
    hashed: tuple[np.ndarray, np.ndarray],
) -> None:
    tables, limits = hashed[0][2], hashed[1][2]
    run = functools.partial(search, options=FOUR, max_length=LONG)
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
    table, run = hashed[0][2, 7], functools.partial(search, options=FOUR)
    tables = np.repeat(table[None], ROWS, axis=0)  # one where EOS is rare
    limits = (np.arange(ROWS) % LONG + 1).astype(np.int32)
    found = read_all(run(tables, limits, 0.6, max_length=LONG))
    assert [len(f[0].tokens) for f in found] == limits.tolist()
    for row in range(LONG, ROWS):
        assert found[row] == found[row - LONG]


def test_search_stops_as_soon_as_nothing_better_can_come() -> None:
    steps: list[int] = []

    def step(tokens: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        jax.debug.callback(lambda n: steps.append(int(n)), state)
        ends = jnp.log(jnp.asarray([0.01, 0.96, 0.02, 0.01]))
        goes_on = jnp.log(jnp.asarray([0.01, 0.0, 0.98, 0.01]))
        logits = jnp.where(state >= 2, ends, goes_on)
        return jnp.broadcast_to(logits, (len(tokens), 4)), state + 1

    limits = jnp.asarray([40, 50], jnp.int32)
    run = functools.partial(
        run_search, step, jnp.zeros((), jnp.int32), limits, DecodeConfig(beam_size=2)
    )
    settings = {"max_length": 50, "bos_id": BOS, "eos_id": EOS}
    found = jax.jit(functools.partial(run, **settings))()
    jax.effects_barrier()
    assert read_all(found)[0][0].tokens == (2, 2, EOS)
    # -0.08 at length 3, against at best -4 over the penalty at 50, which is 3.8.
    assert sorted(steps) == [0, 1, 2]


@pytest.mark.parametrize("distinct", [1, 3, 20, 10**6])
@pytest.mark.parametrize("shape", [(5, 1, 40), (3, 4, 50), (2, 3, 37)])
def test_the_best_by_blocks_are_those_of_a_stable_sort(monkeypatch, shape, distinct):
    """With few distinct values nearly all is ties, which go to the lower index."""
    monkeypatch.setattr(search_module, "BLOCK", 5)
    values = np.random.default_rng(distinct).integers(0, distinct, shape)
    flat = values.reshape(shape[0], -1)
    for count in (1, 2, 8):
        found = search_module._top(jnp.asarray(values, jnp.float32), count)
        expected = np.argsort(-flat, axis=1, kind="stable")[:, :count]
        np.testing.assert_array_equal(found, expected)
