"""Bans, forced prefixes, coverage and sampling on tables of random logits."""

import itertools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tables import (
    EOS,
    Found,
    Rules,
    as_arrays,
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
from transformer_jax.decode.choice import repeats
from transformer_jax.decode.hypotheses import coverage_penalty

VOCAB, LONG, HASHES, ROWS = 11, 9, 97, 60


@pytest.fixture(scope="module")
def hashed() -> tuple[np.ndarray, np.ndarray]:
    """Tables for every hash of a prefix, and limits from 1 to LONG."""
    rng = np.random.default_rng(3)
    tables = rng.normal(scale=1.5, size=(ROWS, HASHES, VOCAB)).astype(np.float32)
    tables[..., EOS] += rng.normal(scale=2.0, size=(ROWS, 1)) - 0.5
    # The same tokens again and again, so that there is something to ban.
    tables[::2, :, [4, 7]] += 3
    limits = rng.integers(1, LONG + 1, ROWS).astype(np.int32)
    limits[: ROWS // 2] = LONG
    return tables, limits


def random_prefixes(limits: np.ndarray, seed: int) -> list[tuple[int, ...]]:
    """Returns a prefix a row: of other lengths, some empty, all below the limit."""
    rng = np.random.default_rng(seed)
    lengths = [int(rng.integers(0, min(5, limit))) for limit in limits]
    # Id 2 is banned below: it may be forced all the same.
    return [tuple(rng.choice([0, 2, 3, 4, 5, 7, 10], n).tolist()) for n in lengths]


# --- Constraints ----------------------------------------------------------------


CONSTRAINTS = {
    "banned": {"banned": (0, 2)},
    "min_length": {"min_length": 3},
    "unigrams": {"no_repeat_ngram": 1},
    "bigrams": {"no_repeat_ngram": 2},
    "trigrams": {"no_repeat_ngram": 3},
    "all": {"banned": (0, 2), "min_length": 2, "no_repeat_ngram": 2},
}


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_constraints_equal_the_plain_search(
    hashed: tuple[np.ndarray, np.ndarray], name: str, forced: bool
) -> None:
    tables, limits = hashed
    rules = Rules(**CONSTRAINTS[name])
    options = DecodeConfig(
        beam_size=4, min_length=rules.min_length, no_repeat_ngram=rules.no_repeat_ngram
    )
    prefixes = random_prefixes(limits, 5) if forced else [()] * ROWS
    hypotheses = search(
        tables,
        limits,
        0.6,
        options=options,
        max_length=LONG,
        banned=rules.banned,
        prefix=as_arrays(prefixes) if forced else None,
    )
    log_probs, changed = log_probs_of(tables), 0
    for row, found in enumerate(read_all(hypotheses)):
        settings = (log_probs[row], int(limits[row]), 0.6, 4)
        expected = plain_search(
            *settings, rules=rules._replace(prefix=tuple(prefixes[row]))
        )
        assert_same(found, expected)
        free = plain_search(*settings)
        changed += {f.tokens for f in expected} != {f.tokens for f in free}
    assert changed >= 5  # the rules do something


def test_a_beam_as_wide_as_the_space_finds_the_best_that_is_allowed() -> None:
    vocab_size, limit = 4, 4
    nodes, rows = (vocab_size + 1) ** (limit - 1), 100
    rng = np.random.default_rng(6)
    tables = rng.normal(scale=2.0, size=(rows, nodes, vocab_size)).astype(np.float32)
    limits = rng.integers(2, limit + 1, rows).astype(np.int32)
    prefixes = [
        tuple(rng.choice([0, 2, 3], int(rng.integers(0, min(3, n)))).tolist())
        for n in limits
    ]
    options = DecodeConfig(beam_size=81, min_length=1, no_repeat_ngram=2)
    rules = Rules(banned=(3,), min_length=1, no_repeat_ngram=2)
    log_probs = log_probs_of(tables)
    for alpha in (-0.5, 0.0, 0.6, 2.0):
        hypotheses = search(
            tables,
            limits,
            alpha,
            options=options,
            max_length=limit,
            nbest=81,
            banned=(3,),
            prefix=as_arrays(prefixes, 2),
        )
        for row, found in enumerate(read_all(hypotheses)):
            ruled = rules._replace(prefix=prefixes[row])
            expected = enumerate_all(log_probs[row], int(limits[row]), alpha, ruled)
            assert_same(found, expected)


def test_after_a_prefix_the_hypotheses_differ() -> None:
    """The beam opens once, from one copy, and nothing wins by ending at once."""
    rng = np.random.default_rng(7)
    tables = rng.normal(size=(1, HASHES, VOCAB)).astype(np.float32)
    tables[..., EOS] -= 2
    hypotheses = search(
        tables,
        np.asarray([LONG], np.int32),
        0.6,
        options=DecodeConfig(beam_size=4),
        max_length=LONG,
        nbest=4,
        prefix=as_arrays([(5, 2)]),
    )
    (found,) = read_all(hypotheses)
    assert len(found) == 4 == len({f.tokens for f in found})
    assert all(f.tokens[:2] == (5, 2) and len(f.tokens) > 2 for f in found)


def test_log_probabilities_stay_the_models_own(
    hashed: tuple[np.ndarray, np.ndarray],
) -> None:
    """What is banned or forced gives nothing to the others."""
    tables, limits = hashed
    prefixes = random_prefixes(limits, 8)
    options = DecodeConfig(beam_size=3, no_repeat_ngram=2, min_length=1)
    hypotheses = search(
        tables,
        limits,
        0.6,
        options=options,
        max_length=LONG,
        banned=(0, 2),
        prefix=as_arrays(prefixes),
    )
    log_probs = log_probs_of(tables)
    for row, found in enumerate(read_all(hypotheses)):
        each = np.asarray(hypotheses.token_log_probs[row])
        for beam, hypothesis in enumerate(found):
            for place, token in enumerate(hypothesis.tokens):
                node = node_of(hypothesis.tokens[:place], VOCAB, HASHES)
                assert each[beam, place] == pytest.approx(
                    log_probs[row, node, token], abs=1e-6
                )


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_repeats_are_those_that_a_search_through_the_string_finds(n: int) -> None:
    rng = np.random.default_rng(n)
    tokens = rng.integers(0, 3, (5, 4, 8)).astype(np.int32)
    for length in range(9):
        found = np.asarray(repeats(jnp.asarray(tokens), jnp.asarray(length), n, 3))
        for b, w, token in itertools.product(range(5), range(4), range(3)):
            text = "".join(map(str, tokens[b, w, :length]))
            ngram = (text + str(token))[-n:]
            assert found[b, w, token] == (len(ngram) == n and ngram in text)


def test_nothing_left_to_say_is_no_hypothesis() -> None:
    """Two words, none twice, and no end before the fourth."""
    options = DecodeConfig(beam_size=2, min_length=3, no_repeat_ngram=1)
    tables = np.zeros((1, 27, 4), np.float32)
    limits = np.asarray([4], np.int32)
    hypotheses = search(tables, limits, 0.6, options=options, max_length=4, banned=(0,))
    assert read_all(hypotheses) == [[]]


# --- Coverage -------------------------------------------------------------------


def coverage_by_hand(attention: np.ndarray, positions: list[int]) -> float:
    """GNMT, equation 14: `attention [T, S]` of one hypothesis."""
    return sum(math.log(min(attention[:, i].sum(), 1.0)) for i in positions)


def test_coverage_penalty_is_the_formula() -> None:
    rng = np.random.default_rng(0)
    attention = rng.dirichlet([0.3] * 5, size=(2, 3, 4))  # B, W, L, S
    attention[0, 1, 2:] = 0  # a hypothesis of two tokens
    mask = np.asarray([[True] * 5, [True, True, True, False, False]])
    arrays = jnp.asarray(attention, jnp.float32), jnp.asarray(mask)
    found = np.asarray(coverage_penalty(*arrays))
    for b, w in itertools.product(range(2), range(3)):
        expected = coverage_by_hand(attention[b, w], [0, 1, 2, 3, 4][: mask[b].sum()])
        assert found[b, w] == pytest.approx(expected, rel=1e-5)
    assert (found <= 0).all()


def covering() -> dict[str, Any]:
    """Two translations of two words: `3 EOS`, more probable, leaves word 1 out.

    `4 EOS` attends to both. S = 3, of which the last is padding.
    """
    table = np.full((1, 12**2, VOCAB), -30.0, np.float32)
    table[0, node_of((), VOCAB, 12**2), [3, 4]] = np.log([0.6, 0.4])
    for token in (3, 4):
        table[0, node_of((token,), VOCAB, 12**2), EOS] = 0.0
    attention = np.zeros((1, VOCAB, 3), np.float32)
    attention[0, :, 0] = 1.0  # the first step attends to word 0
    attention[0, 3] = [1.0, 0.0, 0.0]
    attention[0, 4] = [0.1, 0.9, 0.0]
    return {
        "tables": table,
        "limits": np.asarray([3], np.int32),
        "max_length": 3,
        "attends": True,
        "attention": jnp.asarray(attention),
        "source_mask": jnp.asarray([[True, True, False]]),
        "nbest": 2,
    }


def test_coverage_ranks_the_one_that_covers_first() -> None:
    settings = covering()

    def run(coverage: float) -> list[Found]:
        options = DecodeConfig(beam_size=2, coverage=coverage)
        return read_all(search(alpha=0.6, options=options, **settings))[0]

    plain = {f.tokens: f.score for f in run(0.0)}
    assert list(plain)[:2] == [(3, EOS), (4, EOS)]
    gap = math.log(0.6 / 0.4) / penalty(2, 0.6) / (math.log(0.9) - math.log(1e-9))
    for coverage, best in ((0.9 * gap, (3, EOS)), (1.1 * gap, (4, EOS))):
        found = run(coverage)
        assert found[0].tokens == best
        scores = {f.tokens: f.score for f in found}
        # Both attend to word 0 enough; word 1 gets 1e-9 (nothing) or 0.9.
        for tokens, share in (((3, EOS), 1e-9), ((4, EOS), 0.9)):
            expected = plain[tokens] + coverage * math.log(share)
            assert scores[tokens] == pytest.approx(expected, rel=1e-4)


def test_attention_follows_its_beam() -> None:
    rng = np.random.default_rng(9)
    tables = rng.normal(size=(8, HASHES, VOCAB)).astype(np.float32)
    attention = rng.dirichlet([1.0] * 6, size=(8, VOCAB)).astype(np.float32)
    hypotheses = search(
        tables,
        np.full(8, LONG, np.int32),
        0.6,
        options=DecodeConfig(beam_size=4),
        max_length=LONG,
        attends=True,
        attention=jnp.asarray(attention),
    )
    found = np.asarray(hypotheses.attention)
    for b, rows in enumerate(read_all(hypotheses)):
        for w, hypothesis in enumerate(rows):
            before = [9, *hypothesis.tokens[:-1]]  # what each step was given
            expected = attention[b, before]
            np.testing.assert_array_equal(found[b, w, : len(before)], expected)
            assert not found[b, w, len(before) :].any()
