"""Draws have the distribution that they should, and depend on their key alone."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import EOS, as_arrays, log_probs_of, node_of, penalty, read_all, search

from transformer_jax.config import DecodeConfig
from transformer_jax.decode.choice import IMPOSSIBLE, draw

DRAWS = 100_000


def chi_square_bound(degrees: int) -> float:
    """Returns what chi-square exceeds by chance once in about 10^7 times.

    The cube root of chi-square is nearly normal (Wilson and Hilferty 1931).
    """
    v = 2 / (9 * degrees)
    return degrees * (1 - v + 5.2 * math.sqrt(v)) ** 3


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    """Returns the statistic, after checking that what cannot come did not."""
    assert counts[probs == 0].sum() == 0
    expected = probs[probs > 0] * counts.sum()
    assert expected.min() > 5
    return float(((counts[probs > 0] - expected) ** 2 / expected).sum())


LOGITS = np.asarray([1.2, -0.5, 0.3, 2.0, -1.5, 0.9, 0.0, -0.2], np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    exps = np.exp(x.astype(np.float64) - x.max())
    return exps / exps.sum()


def filtered(temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """The distribution by the definition: sort, cut at k, then at the share p."""
    probs = softmax(LOGITS / temperature)
    order = np.argsort(-probs)
    kept = list(order[:top_k] if top_k else order)
    total, nucleus = probs[kept].sum(), []
    for token in kept:
        if sum(probs[nucleus]) / total < top_p:
            nucleus.append(token)
    result = np.zeros_like(probs)
    result[nucleus] = probs[nucleus] / probs[nucleus].sum()
    return result


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, 0, 1.0),
        (0.5, 0, 1.0),
        (2.0, 0, 1.0),
        (1.0, 3, 1.0),
        (1.0, 1000, 1.0),
        (1.0, 0, 0.75),
        (0.7, 5, 0.9),
        (1.0, 1, 1.0),
        (1.0, 0, 1e-6),
    ],
)
def test_draws_have_the_distribution(
    temperature: float, top_k: int, top_p: float
) -> None:
    options = DecodeConfig(
        sample=True, temperature=temperature, top_k=top_k, top_p=top_p
    )
    keys = jax.random.split(jax.random.key(1), DRAWS // 10)
    log_probs = jnp.broadcast_to(jnp.asarray(LOGITS), (len(keys), 10, len(LOGITS)))
    tokens = draw(keys, jax.nn.log_softmax(log_probs), jnp.asarray(3), options)
    counts = np.bincount(np.asarray(tokens).reshape(-1), minlength=len(LOGITS))
    probs = filtered(temperature, top_k, top_p)
    degrees = max(1, (probs > 0).sum() - 1)
    assert chi_square(counts, probs) < chi_square_bound(degrees)


def test_the_chi_square_test_can_fail() -> None:
    counts = np.round(softmax(LOGITS) * DRAWS)
    wrong = softmax(LOGITS / 1.05)
    assert chi_square(counts, softmax(LOGITS)) < 1
    assert chi_square(counts, wrong) > chi_square_bound(len(LOGITS) - 1)


def test_whole_samples_have_the_distribution() -> None:
    """Every sequence of a small tree, EOS, limit, ban and prefix included."""
    vocab_size, limit, beams, rows = 4, 3, 500, 200
    nodes = (vocab_size + 1) ** (limit - 1)
    rng = np.random.default_rng(4)
    table = rng.normal(size=(nodes, vocab_size)).astype(np.float32)
    tables = np.broadcast_to(table, (rows, nodes, vocab_size))
    prefixes: list[tuple[int, ...]] = [() if row % 2 else (2,) for row in range(rows)]
    hypotheses = search(
        tables,
        np.full(rows, limit, np.int32),
        0.6,
        options=DecodeConfig(sample=True),
        max_length=limit,
        nbest=beams,
        banned=(0,),
        prefix=as_arrays(prefixes, 1),
        keys=jax.random.split(jax.random.key(2), rows),
    )
    arrays = jax.tree.map(np.asarray, hypotheses)
    log_probs = log_probs_of(table)

    def chances(prefix: tuple[int, ...]) -> dict[tuple[int, ...], float]:
        result, stack = {}, [(prefix, 1.0)]
        while stack:
            tokens, chance = stack.pop()
            if len(tokens) == limit or EOS in tokens:
                result[tokens] = chance
                continue
            probs = np.exp(log_probs[node_of(tokens, vocab_size, nodes), 1:])
            for token, p in zip((1, 2, 3), probs / probs.sum(), strict=True):
                stack.append(((*tokens, token), chance * float(p)))
        return result

    for start, prefix in ((0, (2,)), (1, ())):
        expected = chances(prefix)
        counts = dict.fromkeys(expected, 0)
        for row in range(start, rows, 2):
            for beam in range(beams):
                length = arrays.length[row, beam]
                counts[tuple(arrays.tokens[row, beam, :length].tolist())] += 1
        statistic = chi_square(
            np.asarray(list(counts.values())), np.asarray(list(expected.values()))
        )
        assert statistic < chi_square_bound(len(expected) - 1)
    # Scores are the model's, by the same formula as in a search.
    row, beam = 1, 7
    tokens = arrays.tokens[row, beam, : arrays.length[row, beam]].tolist()
    total = sum(
        log_probs[node_of(tokens[:i], vocab_size, nodes), token]
        for i, token in enumerate(tokens)
    )
    assert arrays.log_prob[row, beam] == pytest.approx(total, rel=1e-5)
    expected_score = total / penalty(len(tokens), 0.6)
    assert arrays.score[row, beam] == pytest.approx(expected_score, rel=1e-5)


def test_a_sample_depends_on_its_key_alone() -> None:
    rng = np.random.default_rng(3)
    tables = rng.normal(size=(60, 97, 11)).astype(np.float32)
    limits = rng.integers(1, 10, 60).astype(np.int32)
    keys = jax.random.split(jax.random.key(5), 60)
    run = functools.partial(
        search, options=DecodeConfig(sample=True, top_p=0.9), max_length=9, nbest=3
    )
    expected = jax.tree.map(np.asarray, run(tables, limits, 0.6, keys=keys))
    order = np.random.default_rng(0).permutation(60)
    shuffled = run(tables[order], limits[order], 0.6, keys=keys[order])
    np.testing.assert_array_equal(shuffled.tokens, expected.tokens[order])
    assert len({row.tobytes() for row in expected.tokens[0]}) > 1  # draws differ


def test_a_wide_beam_and_a_large_k_on_a_small_vocabulary() -> None:
    tables = np.random.default_rng(0).normal(size=(1, 97, 5)).astype(np.float32)
    limits = np.asarray([3], np.int32)
    wide = search(
        tables, limits, 0.6, options=DecodeConfig(beam_size=20), max_length=3, nbest=20
    )
    (found,) = read_all(wide)
    assert 5 < len(found) <= 20 and all(f.tokens[-1] == EOS for f in found)
    sampled = search(
        tables,
        limits,
        0.6,
        options=DecodeConfig(sample=True, top_k=1000),
        max_length=3,
        keys=jax.random.split(jax.random.key(0), 1),
    )
    assert float(sampled.score[0, 0]) > IMPOSSIBLE
