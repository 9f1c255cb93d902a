"""Search and decoding under odd settings, and what they cost in work and memory."""

import collections
import dataclasses
import doctest
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jaxprs import equations
from tables import (
    EOS,
    Found,
    Rules,
    assert_same,
    enumerate_all,
    log_probs_of,
    penalty,
    plain_search,
    read_all,
    search,
)

from transformer_jax import parallel
from transformer_jax.config import DecodeConfig, ModelConfig
from transformer_jax.data.batching import Batch
from transformer_jax.data.tokenizer import EOS_ID, Tokenizer
from transformer_jax.data.vocabularies import Vocabularies
from transformer_jax.decode import programs
from transformer_jax.decode import search as search_module
from transformer_jax.decode.choice import IMPOSSIBLE, Prefix, draw
from transformer_jax.decode.programs import DecodeBatch, make_score, make_search
from transformer_jax.decode.translator import Translator
from transformer_jax.errors import ConfigError, DataError
from transformer_jax.model.transformer import Transformer
from transformer_jax.train import loss
from transformer_jax.train.step import eval_step

SMALL = ModelConfig(
    num_layers=1, d_model=16, d_ff=24, num_heads=2, d_k=6, d_v=10, max_length=32
)


def test_the_example_of_the_search_runs() -> None:
    result = doctest.testmod(search_module)
    assert result.attempted > 5 and result.failed == 0


# --- Odd settings, on tables ----------------------------------------------------

V, L, HASHES = 6, 5, 61

ODD = [
    (4, Rules(min_length=L + 3)),  # no end within the limit
    (40, Rules(banned=(0, 2, 3, 4, 5))),  # only the end
    (4, Rules(banned=(0, 1, 2, 3, 4, 5))),  # nothing
    (1, Rules(banned=(0, 2, 3, 4, 5), min_length=1)),  # nothing to begin with
    (4, Rules(prefix=(3, 3), no_repeat_ngram=1)),  # a prefix that repeats itself
    (40, Rules(prefix=(3, 4, 3), no_repeat_ngram=2)),
    (1, Rules(prefix=(3, 4, 3), no_repeat_ngram=2)),
    (4, Rules(prefix=(2, 3, 4, 5, 2))),  # a prefix up to the limit and beyond
    (4, Rules(no_repeat_ngram=L + 1)),  # longer than there is room for
    (4, Rules(min_length=4, no_repeat_ngram=1)),
]


@pytest.mark.parametrize(("beam_size", "rules"), ODD)
def test_odd_rules_equal_the_plain_search(beam_size: int, rules: Rules) -> None:
    rows = 24
    rng = np.random.default_rng(beam_size)
    tables = rng.normal(scale=2.0, size=(rows, HASHES, V)).astype(np.float32)
    limits = (np.arange(rows) % L + 1).astype(np.int32)
    forced = jnp.zeros((rows, L), jnp.int32)
    forced = forced.at[:, : len(rules.prefix)].set(jnp.asarray(rules.prefix, int))
    hypotheses = {
        alpha: search(
            tables,
            limits,
            alpha,
            options=DecodeConfig(
                beam_size=beam_size,
                min_length=rules.min_length,
                no_repeat_ngram=rules.no_repeat_ngram,
            ),
            max_length=L,
            nbest=min(2, beam_size),
            banned=rules.banned,
            prefix=Prefix(forced, jnp.full(rows, len(rules.prefix))),
        )
        for alpha in (-1.0, 0.0, 0.6)
    }
    log_probs = log_probs_of(tables)
    for alpha, found_rows in hypotheses.items():
        for row, found in enumerate(read_all(found_rows)):
            expected = plain_search(
                log_probs[row],
                int(limits[row]),
                alpha,
                beam_size,
                min(2, beam_size),
                rules,
            )
            assert_same(found, expected)
            if len(rules.banned) >= V - 1:  # the end at once, or nothing at all
                ends = EOS not in rules.banned and not rules.min_length
                assert [f.tokens for f in found] == [(EOS,)] * ends


def test_coverage_finds_the_optimum_of_a_whole_tree() -> None:
    """A wide beam, against every hypothesis scored by the formula."""
    vocab_size, limit, rows = 4, 3, 80
    nodes = (vocab_size + 1) ** (limit - 1)
    rng = np.random.default_rng(12)
    tables = rng.normal(scale=2.0, size=(rows, nodes, vocab_size)).astype(np.float32)
    attention = rng.dirichlet([0.5] * 3, size=(rows, vocab_size)).astype(np.float32)
    mask = np.asarray([[True, True, row % 2 == 0] for row in range(rows)])
    limits = np.full(rows, limit, np.int32)
    log_probs, changed = log_probs_of(tables), 0

    def scored(row: int, found: Found, alpha: float, weight: float) -> Found:
        # Each step attends by the token that it was given, the first by BOS, 9.
        given = [9 % vocab_size, *found.tokens[:-1]]
        covered = np.minimum(attention[row, given].sum(axis=0), 1.0)[mask[row]]
        score = found.log_prob / penalty(len(found.tokens), alpha)
        return found._replace(score=score + weight * float(np.log(covered).sum()))

    for weight in (0.0, 1.0):
        for alpha in (-0.5, 0.6, 2.0):
            hypotheses = search(
                tables,
                limits,
                alpha,
                options=DecodeConfig(beam_size=27, coverage=weight),
                max_length=limit,
                nbest=3,
                attends=True,
                attention=jnp.asarray(attention),
                source_mask=jnp.asarray(mask),
            )
            for row, found in enumerate(read_all(hypotheses)):
                ended = enumerate_all(log_probs[row], limit, alpha)
                expected = [scored(row, f, alpha, weight) for f in ended]
                expected.sort(key=lambda f: -f.score)
                assert_same(found[:3], expected[:3])
                if weight == 0:
                    assert_same(found[:3], ended[:3])  # nothing is changed
                changed += found[0].tokens != ended[0].tokens
    assert changed > 20


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(1e-30, 1.0), (1e-30, 0.5), (1e30, 1.0), (1e6, 1e-30)]
)
def test_at_no_temperature_is_what_is_banned_drawn(
    temperature: float, top_p: float
) -> None:
    options = DecodeConfig(sample=True, temperature=temperature, top_p=top_p)
    log_probs = jnp.log(jnp.asarray([0.3, 0.1, 0.2, 0.4, 0.0]))
    allowed = jnp.broadcast_to(log_probs.at[0].set(IMPOSSIBLE), (400, 5, 5))
    keys = jax.random.split(jax.random.key(0), 400)
    drawn = np.bincount(
        np.asarray(draw(keys, allowed, jnp.asarray(0), options)).reshape(-1),
        minlength=5,
    )
    assert drawn[0] == drawn[4] == 0
    if temperature < 1 or top_p < 0.1:
        assert drawn[3] == 2000  # the most probable of those that are left
    else:
        assert drawn[1:4].min() > 500  # as good as uniform


def test_more_hypotheses_than_beams_are_refused() -> None:
    tables, limits = np.zeros((1, HASHES, V), np.float32), np.asarray([L], np.int32)
    for nbest in (0, 3):
        with pytest.raises(ValueError, match=f"nbest is {nbest}"):
            search(
                tables,
                limits,
                0.6,
                options=DecodeConfig(beam_size=2),
                max_length=L,
                nbest=nbest,
            )


# --- Models without training ----------------------------------------------------


def weights(config: ModelConfig, vocab_size: int, seed: int) -> Any:
    """Returns random parameters of the model; nothing is compiled."""
    tokens, length = jnp.zeros((1, 2), jnp.int32), jnp.ones(1, jnp.int32)
    model, key = Transformer(config, vocab_size), jax.random.key(0)
    shapes = jax.eval_shape(model.init, key, tokens, length, tokens)["params"]
    rng = np.random.default_rng(seed)

    def fill(x: Any) -> np.ndarray:
        return rng.normal(scale=0.4, size=x.shape).astype(np.float32)

    return jax.tree.map(fill, nn.unbox(shapes))


def make_translator(tokenizer: Tokenizer, *models: tuple[ModelConfig, Any]):
    configs, params = zip(*models, strict=True)
    both, layout = Vocabularies(tokenizer, tokenizer), parallel.Replicated()
    return Translator(configs, both, [layout.place(p) for p in params], layout)


@pytest.fixture(scope="module")
def tokenizer(trained) -> Tokenizer:
    return Tokenizer.load(trained / "tokenizer.model")


def test_what_repeats_for_ever_stops_at_its_limit(tokenizer: Tokenizer) -> None:
    """At source + max_extra_length, or where learned positions end."""
    config = dataclasses.replace(SMALL, output_bias=True, positions="learned")
    params = weights(config, tokenizer.vocab_size, 0)
    (again,) = tokenizer.encode(["A"])[0][-1:]
    bias = np.zeros(tokenizer.vocab_size, np.float32)
    bias[again], bias[EOS_ID] = 100, -1e6
    params = {**params, "output": {**params["output"], "bias": bias}}
    translator = make_translator(tokenizer, (config, params))
    decode = DecodeConfig(beam_size=2, max_extra_length=5, batch_size=8)
    lines = ["a", "b c", "a b c", " ".join("abcdefgh" * 4)]
    sources = [len(pieces) for pieces in translator.source_pieces(lines)]
    assert min(sources) < 4 and max(sources) == 31
    for line, pieces, (found,) in zip(
        lines, sources, translator.translate(lines, decode), strict=True
    ):
        limit = min(pieces + 5, config.max_length)
        assert found.tokens == tokenizer.pieces([again]) * limit, line
        assert len(found.token_log_probs) == limit and not found.finished
        expected = sum(found.token_log_probs) / penalty(limit, 0.6)
        assert found.score == pytest.approx(expected, abs=1e-5)


def test_an_ensemble_may_be_of_models_of_any_size(tokenizer: Tokenizer) -> None:
    other = ModelConfig(
        num_layers=2,
        decoder_layers=1,
        d_model=12,
        d_ff=8,
        num_heads=3,
        d_k=4,
        d_v=5,
        norm="pre",
        positions="learned",
        tie_output=False,
        max_length=20,
        output_bias=True,
    )
    models = [
        (c, weights(c, tokenizer.vocab_size, i)) for i, c in enumerate((SMALL, other))
    ]
    models[1][1]["output"]["bias"][EOS_ID] += 8
    both = make_translator(tokenizer, *models)
    warnings: list[str] = []
    lines = [source for source, _ in tiny.sentences(6, 4)] + ["a b " * 16]
    decode = DecodeConfig(beam_size=3, coverage=0.1, batch_size=8)
    found = both.translate(lines, decode, 2, warnings.append, attention=True)
    assert len(warnings) == 1 and "line 7" in warnings[0] and "first 19" in warnings[0]
    best = [hypotheses[0] for hypotheses in found]
    for source, h in zip(both.source_pieces(lines), best, strict=True):
        assert len(h.token_log_probs) <= 20  # the learned positions of one of them
        attention = np.asarray(h.attention)
        np.testing.assert_allclose(attention.sum(axis=1), 1, atol=1e-5)
        assert attention.shape[1] == len(source) + 1
    ended = [i for i, h in enumerate(best[:-1]) if h.finished]
    assert len(ended) > 1
    targets = [" ".join(best[i].tokens) for i in ended]
    sources = [lines[i] for i in ended]
    scores = both.score(sources, targets, 8, pieces=True)
    assert scores == pytest.approx([best[i].log_prob for i in ended], abs=1e-4)


def test_settings_that_make_no_sense_are_refused(tokenizer: Tokenizer) -> None:
    translator = make_translator(tokenizer, (SMALL, {}))
    plain = DecodeConfig(beam_size=2)
    for changes, nbest, message in (
        ({}, 3, "nbest is 3; it must be from 1 to 2"),
        ({}, 0, "nbest is 0"),
        ({"mbr": 2}, 3, "nbest is 3; it must be from 1 to 2"),
        ({"beam_size": 0}, 1, "config.decode.beam_size is 0"),
        (
            {"alpha": float("nan")},
            1,
            "config.decode.alpha is nan; it must be a finite",
        ),
        ({"coverage": float("inf")}, 1, "config.decode.coverage is inf"),
        ({"sample": True, "temperature": float("inf")}, 1, "temperature is inf"),
    ):
        decode = dataclasses.replace(plain, **changes)
        with pytest.raises(ConfigError, match=message):
            translator.translate(["a"], decode, nbest)
    for prefixes in ([], ["A"], ["A", "B", "C"]):
        with pytest.raises(DataError, match=f"2 lines but {len(prefixes)} prefixes"):
            translator.translate(["a", "b"], plain, prefixes=prefixes)
    assert translator.translate([], plain) == []


def test_scoring_compiles_once_a_bucket_and_nothing_beside(
    tokenizer: Tokenizer,
) -> None:
    translator = make_translator(
        tokenizer, (SMALL, weights(SMALL, tokenizer.vocab_size, 3))
    )
    compiled = []

    def count(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        first = translator.score(["a", "b c"], ["A", "C B"], 8)
        assert len(compiled) == translator.compilations == 1
        again = translator.score(["b c", "a", "d"], ["C B", "A", "D"], 8)
        assert len(compiled) == 1
    finally:
        jax.monitoring.clear_event_listeners()
    assert again[:2] == pytest.approx(first[::-1], abs=1e-5)


# --- Work and memory ------------------------------------------------------------


def flops(equation: Any) -> int:
    """Returns the floating-point operations of a matrix product, 0 for all else."""
    if equation.primitive.name != "dot_general":
        return 0
    (contracted, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return (
        2 * equation.outvars[0].aval.size * int(np.prod([left[i] for i in contracted]))
    )


def products(jaxpr: Any) -> collections.Counter[int]:
    """Returns the work of every matrix product, inner ones included."""
    return +collections.Counter(n for e in equations(jaxpr) if (n := flops(e)))


def products_of_loop(loop: Any) -> collections.Counter[int]:
    """Returns the work of the products of one round."""
    return products(loop.params["body_jaxpr"].jaxpr)


def abstract(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def search_program(
    vocab_size: int, rows: int, beams: int, length: int, most: int
) -> tuple[Any, Any]:
    """Returns the program of a search, and of the encoder alone."""
    model = Transformer(SMALL, vocab_size)
    params = weights(SMALL, vocab_size, 0)
    batch = DecodeBatch(
        source=abstract(rows, length),
        source_length=abstract(rows),
        limits=abstract(rows),
        seeds=jax.ShapeDtypeStruct((rows,), jnp.uint32),
        prefix=abstract(rows, 0),
        prefix_length=abstract(rows),
    )
    run = make_search([model], DecodeConfig(beam_size=beams), most, 1, False)

    def encode(params: Any, source: Any, source_length: Any) -> Any:
        return model.apply({"params": params}, source, source_length, method="encode")

    whole = jax.make_jaxpr(run)([params], batch)
    return whole, jax.make_jaxpr(encode)(params, *batch[:2])


def test_a_step_works_on_the_new_token_alone() -> None:
    """But for attention; and the encoder runs once, before the first loop."""
    rows, beams, config = 2, 3, SMALL
    steps = {}
    for length, *room in ((8, 16), (8, 32, 80), (24, 16)):
        whole, encoder = search_program(50, rows, beams, length, room[-1])
        loops = [e for e in equations(whole) if e.primitive.name == "while"]
        rest = products(whole)
        for loop, most in zip(loops, room, strict=True):
            in_loop = products_of_loop(loop)
            rest -= in_loop
            steps[length, most] = sum(in_loop.elements())
        assert rest == products(encoder)
    # Scores and their mixture, of every head, for each position more; of the target
    # the queries of a beam meet the keys of all beams.
    position = 2 * rows * beams * config.num_heads * (config.d_k + config.d_v)
    assert steps[8, 16] > position * (8 + 16 * beams)
    assert steps[8, 32] - steps[8, 16] == position * (32 - 16) * beams
    assert steps[8, 80] - steps[8, 16] == position * (80 - 16) * beams
    assert steps[24, 16] - steps[8, 16] == position * (24 - 8)


def test_the_last_sources_go_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of 16; all that belongs to a source goes with them, and nothing changes."""
    rng, rows, length, vocab_size = np.random.default_rng(3), 16, 6, 50
    other = dataclasses.replace(SMALL, d_model=12, num_heads=3, num_layers=2)
    models = [Transformer(config, vocab_size) for config in (SMALL, other)]
    params = [weights(config, vocab_size, 1) for config in (SMALL, other)]
    last = np.arange(rows) % 5 == 2
    batch = DecodeBatch(
        source=rng.integers(4, vocab_size, (rows, length)).astype(np.int32),
        source_length=rng.integers(2, length + 1, rows).astype(np.int32),
        limits=np.where(last, 14, 6).astype(np.int32),
        seeds=np.arange(rows, dtype=np.uint32),
        prefix=rng.integers(4, vocab_size, (rows, 3)).astype(np.int32),
        prefix_length=rng.integers(0, 3, rows).astype(np.int32),
    )
    for options in (
        DecodeConfig(beam_size=3, min_length=10, coverage=0.2),
        DecodeConfig(sample=True, min_length=10),
    ):
        found = []
        for worth, loops in ((rows + 1, 1), (rows, 2)):
            monkeypatch.setattr(programs, "WORTH", worth)
            run = make_search(models, options, 14, 3, True)
            traced = jax.jit(run).trace(params, batch)
            whiles = [e for e in equations(traced.jaxpr) if e.primitive.name == "while"]
            assert sum(bool(products_of_loop(loop)) for loop in whiles) == loops
            search = traced.lower().compile()
            found.append(jax.device_get(search(params, batch)))
        together, alone = found
        assert (alone.length[last] >= 10).all() and alone.length[~last].max() == 6
        np.testing.assert_array_equal(alone.tokens, together.tokens)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-5),
            alone,
            together,
        )


def largest_with(vocab_size: int, jaxpr: Any) -> int:
    """Returns the entries, in tokens, of the largest array with an axis of V."""
    sizes = [
        v.aval.size // vocab_size
        for equation in equations(jaxpr)
        for v in equation.outvars
        if vocab_size in v.aval.shape or vocab_size * 3 in v.aval.shape
    ]
    return max(sizes)


def test_logits_of_more_than_a_chunk_are_never_held() -> None:
    """Vocabulary of 32,000: evaluation, search and scoring."""
    vocab_size, rows, length = 32_000, 16, 128
    model, params = Transformer(SMALL, vocab_size), weights(SMALL, vocab_size, 0)
    ids: Any = abstract(rows, length)
    counts: Any = abstract(rows)
    batch = Batch(ids, counts, ids, ids, counts)

    def evaluate(params: Any, batch: Batch) -> Any:
        return eval_step(params, batch, model=model, axis_name=None)

    assert rows * length > 2 * loss.CHUNK
    found = largest_with(vocab_size, jax.make_jaxpr(evaluate)(params, batch))
    assert found == loss.CHUNK
    score = jax.make_jaxpr(make_score([model, model]))([params, params], batch)
    assert largest_with(vocab_size, score) == 2 * length  # of one row, of both models
    whole, _ = search_program(vocab_size, rows, 3, length, length + 50)
    assert largest_with(vocab_size, whole) == rows * 3  # of one step
