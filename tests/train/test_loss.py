"""Cross-entropy against float64 NumPy written from the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.train import loss
from transformer_jax.train.loss import cross_entropy


def reference(x, table, targets, lengths, smoothing):
    """Sums, and the gradient of the loss by x and table, token by token in float64."""
    x, table = x.astype(np.float64), table.astype(np.float64)
    vocab_size = len(table)
    sums = dict(loss=0.0, nll=0.0, correct=0, tokens=0)
    by_x, by_table = np.zeros_like(x), np.zeros_like(table)
    for row, length in enumerate(lengths):
        for t in range(length):
            logits = table @ x[row, t]
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
    return sums, by_x, by_table


def problem(rows=5, length=7, width=6, vocab_size=11, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, length, width)).astype(np.float32)
    table = rng.normal(size=(vocab_size, width)).astype(np.float32)
    targets = rng.integers(0, vocab_size, (rows, length)).astype(np.int32)
    lengths = rng.integers(0, length + 1, rows).astype(np.int32)
    targets[0, 0] = np.argmax(table @ x[0, 0])  # one is right for sure
    lengths[0] = max(lengths[0], 1)
    return x, table, targets, lengths


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("chunk", [512, 4])
def test_sums_and_gradients(monkeypatch, smoothing, chunk):
    monkeypatch.setattr(loss, "CHUNK", chunk)
    x, table, targets, lengths = problem(seed=chunk)
    expected, by_x, by_table = reference(x, table, targets, lengths, smoothing)

    def scaled(x, table):
        sums = cross_entropy(x, table, targets, lengths, smoothing)
        return sums.loss / 3, sums

    gradient = jax.value_and_grad(scaled, argnums=(0, 1), has_aux=True)
    (value, sums), found = gradient(jnp.asarray(x), jnp.asarray(table))
    assert value * 3 == pytest.approx(expected["loss"], rel=1e-5)
    for name, wanted in expected.items():
        assert float(getattr(sums, name)) == pytest.approx(wanted, rel=1e-5), name
    assert int(sums.correct) >= 1
    np.testing.assert_allclose(found[0], by_x / 3, atol=1e-5)
    np.testing.assert_allclose(found[1], by_table / 3, atol=1e-5)


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
    gradient = jax.grad(lambda x: value(x, wide_targets, wide_lengths).loss)
    by_x = np.asarray(gradient(jnp.asarray(wide_x)))
    assert np.abs(by_x[:, 7:]).max() == 0 and np.abs(by_x[5:]).max() == 0


def test_bfloat16_keeps_sums_in_float32():
    x, table, targets, lengths = problem()
    sums = cross_entropy(
        jnp.asarray(x, jnp.bfloat16), jnp.asarray(table), targets, lengths, 0.1
    )
    assert sums.loss.dtype == jnp.float32 and sums.tokens.dtype == jnp.int32
    expected = reference(x, table, targets, lengths, 0.1)[0]
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
