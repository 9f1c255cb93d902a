"""Cross-entropy against float64 NumPy written from the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import equations, types

from transformer_jax.train import loss
from transformer_jax.train.loss import cross_entropy


def reference(x, table, targets, lengths, smoothing, bias=None):
    """Sums, and the loss's gradients by x, table, bias, token by token in float64."""
    x, table = x.astype(np.float64), table.astype(np.float64)
    vocab_size = len(table)
    bias = np.zeros(vocab_size) if bias is None else bias.astype(np.float64)
    sums = dict(loss=0.0, nll=0.0, correct=0, tokens=0)
    by_x, by_table, by_bias = map(np.zeros_like, (x, table, bias))
    for row, length in enumerate(lengths):
        for t in range(length):
            logits = table @ x[row, t] + bias
            probabilities = np.exp(logits - logits.max())
            probabilities /= probabilities.sum()
            q = np.full(vocab_size, smoothing / (vocab_size - 1))
            q[targets[row, t]] = 1 - smoothing
            np.testing.assert_allclose(q.sum(), 1.0)
            sums["loss"] -= (q * np.log(probabilities)).sum()
            sums["nll"] -= np.log(probabilities[targets[row, t]])
            sums["correct"] += int(np.argmax(logits) == targets[row, t])
            sums["tokens"] += 1
            by_x[row, t] = table.T @ (probabilities - q)
            by_table += np.outer(probabilities - q, x[row, t])
            by_bias += probabilities - q
    return sums, (by_x, by_table, by_bias)


def problem(rows=5, length=7, width=6, vocab_size=11, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, length, width)).astype(np.float32)
    table = rng.normal(size=(vocab_size, width)).astype(np.float32)
    targets = rng.integers(0, vocab_size, (rows, length)).astype(np.int32)
    lengths = rng.integers(0, length + 1, rows).astype(np.int32)
    targets[0, 0] = np.argmax(table @ x[0, 0])  # one is right for sure
    lengths[0] = max(lengths[0], 1)
    return x, table, targets, lengths


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("chunk", [512, 4])
def test_sums_and_gradients(monkeypatch, smoothing, chunk, with_bias):
    """Whole, and in chunks of which the last is not full."""
    monkeypatch.setattr(loss, "CHUNK", chunk)
    x, table, targets, lengths = problem(seed=chunk)
    rng = np.random.default_rng(chunk)
    bias = 2 * rng.normal(size=len(table)).astype(np.float32) if with_bias else None
    targets[0, 0] = np.argmax(table @ x[0, 0] + (bias if with_bias else 0))
    given = targets, lengths, smoothing
    expected, expected_gradients = reference(x, table, *given, bias)

    def scaled(x, table, bias=None):
        sums = cross_entropy(x, table, targets, lengths, smoothing, bias)
        return sums.loss / 3, sums

    arrays = [jnp.asarray(array) for array in (x, table, bias) if array is not None]
    which = tuple(range(len(arrays)))
    gradient = jax.value_and_grad(scaled, argnums=which, has_aux=True)
    (value, sums), found = gradient(*arrays)
    assert value * 3 == pytest.approx(expected["loss"], rel=1e-5)
    for name, wanted in expected.items():
        assert float(getattr(sums, name)) == pytest.approx(wanted, rel=1e-5), name
    assert int(sums.correct) >= 1
    for one, other in zip(found, expected_gradients, strict=False):
        np.testing.assert_allclose(one, other / 3, atol=2e-6)
    assert len(found) == 2 + with_bias
    # As a function without gradients, it gives the same sums.
    again = scaled(*arrays)[1]
    for name in expected:
        assert float(getattr(again, name)) == float(getattr(sums, name)), name


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_smoothed_target_of_five_entries(smoothing):
    """All other entries share the mass evenly, special ids as well."""
    logits = np.random.default_rng(0).normal(size=(5, 5)).astype(np.float32)
    targets, real = jnp.arange(5), jnp.ones(5, bool)
    _, gradient = loss.chunk_sums(jnp.asarray(logits), targets, real, smoothing)
    target = np.asarray(jax.nn.softmax(logits) - gradient)
    np.testing.assert_allclose(target.sum(axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(target.min(axis=1), smoothing / 4, atol=1e-6)
    np.testing.assert_allclose(np.diag(target), 1 - smoothing, atol=1e-6)
    others = target[~np.eye(5, dtype=bool)]
    np.testing.assert_allclose(others, smoothing / 4, atol=1e-6)


def test_uniform_logits_cost_log_v():
    x, table = jnp.zeros((2, 3, 4)), jnp.ones((9, 4))
    targets, lengths = jnp.zeros((2, 3), jnp.int32), jnp.array([3, 1])
    sums = cross_entropy(x, table, targets, lengths, 0.1)
    assert float(sums.loss) == pytest.approx(4 * np.log(9), rel=1e-6)
    assert int(sums.tokens) == 4


def test_padding_counts_for_nothing():
    x, table, targets, lengths = problem()
    wide_x = np.concatenate([x, np.full((5, 3, 6), 7.0, np.float32)], axis=1)
    wide_x = np.concatenate([wide_x, np.ones((2, 10, 6), np.float32)])
    wide_targets = np.pad(targets, ((0, 2), (0, 3)), constant_values=3)
    wide_lengths = np.append(lengths, [0, 0]).astype(np.int32)

    def value(x, targets, lengths):
        return cross_entropy(x, jnp.asarray(table), targets, lengths, 0.1)

    one = value(jnp.asarray(x), targets, lengths)
    other = value(jnp.asarray(wide_x), wide_targets, wide_lengths)
    for name in ("loss", "nll", "correct", "tokens"):
        expected = float(getattr(one, name))
        assert float(getattr(other, name)) == pytest.approx(expected, rel=1e-6)

    def gradients(x, targets, lengths):
        def run(x, table, bias):
            return cross_entropy(x, table, targets, lengths, 0.1, bias).loss

        arrays = jnp.asarray(x), jnp.asarray(table), jnp.ones(len(table))
        return jax.grad(run, argnums=(0, 1, 2))(*arrays)

    by_x, by_table, by_bias = gradients(wide_x, wide_targets, wide_lengths)
    assert np.abs(by_x[:, 7:]).max() == 0 and np.abs(by_x[5:]).max() == 0
    expected = gradients(x, targets, lengths)
    for one, other in zip((by_x[:5, :7], by_table, by_bias), expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_bfloat16_computes_exponentials_and_logarithms_in_float32():
    x, table, targets, lengths = problem()

    def run(x, table, bias):
        return cross_entropy(x, table, targets, lengths, 0.1, bias).loss

    arguments = jnp.asarray(x, jnp.bfloat16), jnp.asarray(table), jnp.ones(len(table))
    jaxpr = jax.make_jaxpr(jax.grad(run, argnums=(0, 1, 2)))(*arguments).jaxpr
    for primitive in ("exp", "log", "div"):
        assert types(jaxpr, primitive) == {jnp.dtype("float32")}, primitive
    products = [e for e in equations(jaxpr) if e.primitive.name == "dot_general"]
    assert {v.aval.dtype for e in products for v in e.invars} == {jnp.dtype("bfloat16")}
    assert {e.outvars[0].aval.dtype for e in products} == {jnp.dtype("float32")}


def test_bfloat16_keeps_sums_in_float32():
    x, table, targets, lengths = problem()
    sums = cross_entropy(
        jnp.asarray(x, jnp.bfloat16), jnp.asarray(table), targets, lengths, 0.1
    )
    assert sums.loss.dtype == jnp.float32 and sums.tokens.dtype == jnp.int32
    expected, _ = reference(x, table, targets, lengths, 0.1)
    assert float(sums.loss) == pytest.approx(expected["loss"], rel=0.02)


def test_never_more_than_a_chunk_of_logits():
    vocab_size, tokens = 1000, 4 * loss.CHUNK
    x = jnp.zeros((4, loss.CHUNK, 8))
    table = jnp.zeros((vocab_size, 8))
    targets, lengths = jnp.zeros((4, loss.CHUNK), jnp.int32), jnp.full(4, loss.CHUNK)
    gradient = jax.grad(
        lambda x, t: cross_entropy(x, t, targets, lengths, 0.1).loss, (0, 1)
    )
    text = jax.jit(gradient).lower(x, table).as_text()
    assert f"{loss.CHUNK}x{vocab_size}xf32" in text
    assert f"{tokens}x{vocab_size}x" not in text
    assert f"4x{loss.CHUNK}x{vocab_size}x" not in text
