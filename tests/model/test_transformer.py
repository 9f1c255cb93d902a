"""The whole model against the float64 reference, its invariants, step by step."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference import (
    BATCH,
    CONFIG,
    LENGTHS,
    PAIRS,
    SOURCE,
    SOURCE_VOCAB,
    SOURCES,
    TARGET,
    TARGETS,
    VARIANTS,
    VOCAB,
    Params,
    Reference,
    ids,
    jitted,
    logits_of,
    model_of,
    params_of,
)

from transformer_jax.config import ModelConfig
from transformer_jax.data.batching import Batch
from transformer_jax.model.transformer import with_room
from transformer_jax.train.loss import LossSums
from transformer_jax.train.step import batch_loss

SMOOTHING = 0.1


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_the_equations(variant: str) -> None:
    reference = Reference(VARIANTS[variant], params_of(variant))
    expected = reference.logits(SOURCES, LENGTHS, TARGETS)
    found = logits_of(variant, SOURCES, LENGTHS, TARGETS)
    assert found.shape == (BATCH, TARGET, VOCAB) and found.dtype == np.float32
    assert expected.std() > 0.3  # else the next line would say little
    error = np.abs(found - expected).max()
    assert error <= 1e-5 * np.abs(expected).max()


def test_one_variant_has_every_field_away_from_its_default() -> None:
    default, foreign = ModelConfig(), VARIANTS["foreign"]
    same = [
        field.name
        for field in dataclasses.fields(ModelConfig)
        if getattr(default, field.name) == getattr(foreign, field.name)
    ]
    assert same == ["positions"]  # "learned" has the other value


# --- Loss and gradients ---------------------------------------------------------


@functools.cache
def loss_and_gradients(variant: str) -> Callable[..., tuple[LossSums, Params]]:
    """Returns a compiled function of (params, batch); smoothed, without dropout."""
    model = model_of(VARIANTS[variant])

    def loss(params: Params, batch: Batch) -> tuple[jax.Array, LossSums]:
        x = model.apply({"params": params}, *batch[:3], method="hidden")
        sums = batch_loss(params, x, batch, SMOOTHING)
        return sums.loss, sums

    @jax.jit
    def run(params: Params, batch: Batch) -> tuple[LossSums, Params]:
        (_, sums), gradients = jax.value_and_grad(loss, has_aux=True)(params, batch)
        return sums, gradients

    return run


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradients_equal_the_equations(variant: str) -> None:
    """Each array's gradient along a random direction, so every entry of it counts."""
    config, params = VARIANTS[variant], params_of(variant)
    sums, gradients = loss_and_gradients(variant)(params, PAIRS)
    expected = Reference(config, params).loss(PAIRS, SMOOTHING)
    assert abs(float(sums.loss) / expected - 1) < 1e-5
    assert int(sums.tokens) == PAIRS.target_length.sum()

    leaves, structure = jax.tree.flatten(params)
    leaves = [np.asarray(leaf, np.float64) for leaf in leaves]
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    whole = float(optax.tree.norm(gradients))
    rng, step = np.random.default_rng(0), 1e-6
    for i, gradient in enumerate(jax.tree.leaves(gradients)):
        direction = rng.normal(size=leaves[i].shape)

        def loss(shift: np.ndarray, i: int = i) -> float:
            moved = [*leaves[:i], leaves[i] + shift, *leaves[i + 1 :]]
            tree = jax.tree.unflatten(structure, moved)
            return Reference(config, tree).loss(PAIRS, SMOOTHING)

        slope = (loss(step * direction) - loss(-step * direction)) / (2 * step)
        size = max(float(np.linalg.norm(gradient)), 0.001 * whole)
        error = abs((np.asarray(gradient) * direction).sum() - slope)
        assert error <= 2e-5 * size, jax.tree_util.keystr(paths[i])


def test_padding_adds_nothing_to_loss_and_gradients() -> None:
    """Two columns of padding on each side and a row of nothing else, of any content."""
    source, target = SOURCE - 2, TARGET - 2
    short = Batch(
        PAIRS.source[:2, :source],
        np.asarray([3, source]),
        PAIRS.target_in[:2, :target],
        PAIRS.target_out[:2, :target],
        np.asarray([target, 2]),
    )

    def padded(seed: int) -> Batch:
        batch = Batch(
            ids(seed, BATCH, SOURCE, vocab_size=SOURCE_VOCAB),
            np.append(short.source_length, 0),
            ids(seed + 1, BATCH, TARGET),
            ids(seed + 2, BATCH, TARGET),
            np.append(short.target_length, 0),
        )
        for wide, narrow in zip(batch[:5], short[:5], strict=True):
            if wide.ndim == 2:
                wide[:2, : narrow.shape[1]] = narrow
        return batch

    config, params = VARIANTS["foreign"], params_of("foreign")
    run = loss_and_gradients("foreign")
    sums, gradients = run(params, padded(10))
    for one, other in zip(
        jax.tree.leaves((sums, gradients)),
        jax.tree.leaves(run(params, padded(20))),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)

    def loss(shift: float) -> float:
        moved = jax.tree.map(lambda x, d: x + shift * d, exact, directions)
        return Reference(config, moved).loss(short, SMOOTHING)

    rng = np.random.default_rng(0)
    exact = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    directions = jax.tree.map(lambda x: rng.normal(size=x.shape), params)
    assert int(sums.tokens) == target + 2
    assert abs(float(sums.loss) / loss(0) - 1) < 1e-5
    products = jax.tree.map(
        lambda g, d: (np.asarray(g) * d).sum(), gradients, directions
    )
    slope = (loss(1e-6) - loss(-1e-6)) / 2e-6
    error = abs(sum(jax.tree.leaves(products)) - slope)
    assert error < 2e-5 * float(optax.tree.norm(gradients))
    logits = Reference(config, params).logits(*short[:3])
    right = logits.argmax(-1) == short.target_out
    real = np.arange(target) < short.target_length[:, None]
    assert int(sums.correct) == (right & real).sum()


# --- Invariants -----------------------------------------------------------------


def test_a_row_without_tokens_stays_finite() -> None:
    lengths = np.asarray([0, SOURCE, 0], np.int32)
    for variant in VARIANTS:
        assert np.isfinite(logits_of(variant, SOURCES, lengths, TARGETS)).all()


def other_padding(seed: int) -> np.ndarray:
    """Returns the sources with other ids in their padding."""
    padding = np.arange(SOURCE) >= LENGTHS[:, None]
    random = ids(seed, *SOURCES.shape, vocab_size=SOURCE_VOCAB)
    other = np.where(padding, random, SOURCES)
    assert not np.array_equal(other, SOURCES)
    return other


@pytest.mark.parametrize("variant", VARIANTS)
def test_contents_of_padding_change_nothing(variant: str) -> None:
    expected = logits_of(variant, SOURCES, LENGTHS, TARGETS)
    for seed in range(5):
        found = logits_of(variant, other_padding(100 + seed), LENGTHS, TARGETS)
        np.testing.assert_array_equal(found, expected)
    # The test can fail: a real token does change the row, and only its row.
    other = SOURCES.copy()
    other[0, 2] = other[0, 2] % (SOURCE_VOCAB - 1) + 1
    changed = logits_of(variant, other, LENGTHS, TARGETS) != expected
    assert changed[0].any() and not changed[1:].any()


def test_more_padding_changes_nothing() -> None:
    expected = logits_of("learned", SOURCES, LENGTHS, TARGETS)
    more = ids(3, BATCH, 3, vocab_size=SOURCE_VOCAB)
    source = np.concatenate([SOURCES, more], axis=1)
    target = np.concatenate([TARGETS, ids(4, BATCH, 4)], axis=1)
    found = logits_of("learned", source, LENGTHS, target)[:, :TARGET]
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_later_target_tokens_change_no_earlier_logit(variant: str) -> None:
    expected = logits_of(variant, SOURCES, LENGTHS, TARGETS)
    for t in range(1, TARGET):
        other = TARGETS.copy()
        other[:, t:] = other[:, t:] % (VOCAB - 1) + 1  # every one another id
        found = logits_of(variant, SOURCES, LENGTHS, other)
        np.testing.assert_array_equal(found[:, :t], expected[:, :t])
        assert (found[:, t:] != expected[:, t:]).any(axis=-1).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_first_target_token_counts_unless_the_start_is_zero(variant: str) -> None:
    other = TARGETS.copy()
    other[:, 0] = other[:, 0] % (VOCAB - 1) + 1
    changed = logits_of(variant, SOURCES, LENGTHS, other) != logits_of(
        variant, SOURCES, LENGTHS, TARGETS
    )
    assert changed.any() != VARIANTS[variant].zero_start


def test_a_row_does_not_depend_on_the_others() -> None:
    expected = logits_of("learned", SOURCES, LENGTHS, TARGETS)
    order = np.asarray([2, 0, 1])
    found = logits_of("learned", SOURCES[order], LENGTHS[order], TARGETS[order])
    np.testing.assert_allclose(found, expected[order], atol=1e-6)
    alone = logits_of("learned", SOURCES[:1], LENGTHS[:1], TARGETS[:1])
    np.testing.assert_allclose(alone, expected[:1], atol=1e-6)


# --- Step by step ---------------------------------------------------------------

BEAMS = 2


@pytest.mark.parametrize("variant", ["paper", "learned", "foreign"])
def test_decode_step_equals_the_teacher_forced_pass(variant: str) -> None:
    """So n single steps also equal a pass over n tokens at once: the last logits."""
    config, params = VARIANTS[variant], params_of(variant)
    memory = jitted(config, "encode")(params, SOURCES, LENGTHS)
    targets = ids(5, BATCH * BEAMS, TARGET)
    expected = np.asarray(jitted(config, "decode")(params, targets, memory))
    near = 1e-5 * max(1.0, float(np.abs(expected).max()))
    # Each beam is what it would be as the only target of its source.
    for beam in range(BEAMS):
        one = logits_of(variant, SOURCES, LENGTHS, targets[beam::BEAMS])
        np.testing.assert_allclose(expected[beam::BEAMS], one, atol=near)

    model, depth = model_of(config), config.decoder_layers or config.num_layers
    padded = jitted(config, "encode")(params, other_padding(7), LENGTHS)
    cache = model.init_cache(padded, BEAMS, 2)
    step = jitted(config, "decode_step")
    for t in range(TARGET):
        if t == 2:
            cache = with_room(cache, config.max_length)  # more than needed
        assert int(cache.index) == t
        logits, cache = step(params, targets[:, t], cache)
        assert logits.shape == (BATCH * BEAMS, VOCAB) and logits.dtype == jnp.float32
        np.testing.assert_allclose(logits, expected[:, t], atol=near)
    assert len(cache.past) == depth
    places, heads = config.max_length * BEAMS, config.num_heads
    assert cache.past[0][0].shape == (BATCH, heads, config.d_k, places)
    assert cache.past[0][1].shape == (BATCH, heads, places, config.d_v)


def test_several_tokens_a_step_are_refused() -> None:
    """A prefix is fed token by token, as the test above does it."""
    params = params_of("paper")
    memory = jitted(CONFIG, "encode")(params, SOURCES, LENGTHS)
    cache = model_of(CONFIG).init_cache(memory, 1, CONFIG.max_length)
    with pytest.raises(ValueError, match=r"one token a row.*\(3, 4\)"):
        jitted(CONFIG, "decode_step")(params, TARGETS[:, :4], cache)


def test_beams_may_be_reordered_between_steps() -> None:
    """Twice, so that slots follow slots."""
    params, turns = params_of("paper"), (3, 5)
    memory = jitted(CONFIG, "encode")(params, SOURCES, LENGTHS)
    targets = ids(6, BATCH * BEAMS, TARGET)
    parents = np.asarray([1, 0, 2, 2, 5, 5])  # rows stay with their source
    joined = targets
    for turn in turns:
        joined = np.concatenate([joined[parents, :turn], targets[:, turn:]], axis=1)
    expected = jitted(CONFIG, "decode")(params, joined, memory)

    cache = model_of(CONFIG).init_cache(memory, BEAMS, CONFIG.max_length)
    step = jitted(CONFIG, "decode_step")
    for t in range(TARGET):
        if t in turns:
            cache = cache.replace(slots=cache.slots[parents])
        logits, cache = step(params, targets[:, t], cache)
        if t >= turns[-1]:
            np.testing.assert_allclose(logits, expected[:, t], atol=1e-5)
