"""Prefixes, samples, ensembles, minimum Bayes risk, attention: what Translator adds."""

import dataclasses
import functools
import random
from typing import Any

import jax
import numpy as np
import pytest
import sacrebleu
import tiny

from transformer_jax import parallel
from transformer_jax.config import DecodeConfig
from transformer_jax.data import batching
from transformer_jax.decode.translator import Translator, load_translator
from transformer_jax.errors import DataError

DECODE = DecodeConfig(beam_size=3, max_extra_length=16, batch_size=16)
SAMPLE = DecodeConfig(sample=True, max_extra_length=16, batch_size=16)


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return [source for source, _ in tiny.sentences(12, 21)]


@pytest.fixture(scope="module")
def translator(trained) -> Translator:
    return load_translator([trained], "last", print)[0]


@pytest.fixture(scope="module")
def ensemble(trained) -> Translator:
    """The same run at two steps, as one translator."""
    last = load_translator([trained], "last", print)[0]
    first = load_translator([trained], "4", print)[0]
    configs = [model.config for model in (*last.models, *first.models)]
    params = last.params + first.params
    return Translator(configs, last.vocabularies, params, parallel.Replicated())


def texts(found) -> list[list[str]]:
    return [[h.text for h in hypotheses] for hypotheses in found]


# --- Scores agree with forced scoring -------------------------------------------

SETTINGS = {
    "beam": DECODE,
    "wide": dataclasses.replace(DECODE, beam_size=6),
    "length": dataclasses.replace(DECODE, penalty="length", alpha=1.0),
    "rules": dataclasses.replace(DECODE, no_repeat_ngram=2, min_length=3),
    "coverage": dataclasses.replace(DECODE, coverage=0.3),
    "sample": SAMPLE,
}


@pytest.mark.parametrize("name", SETTINGS)
def test_score_finds_the_log_probability_that_decoding_found(translator, lines, name):
    decode = SETTINGS[name]
    nbest = min(3, decode.beam_size)
    found = translator.translate(lines, decode, nbest)
    pairs = [
        (line, h)
        for line, hypotheses in zip(lines, found, strict=True)
        for h in hypotheses
        if h.finished
    ]
    assert len(pairs) > 3
    sources, targets = zip(*((s, " ".join(h.tokens)) for s, h in pairs), strict=True)
    scores = translator.score(sources, targets, 16, pieces=True)
    for score, (_, h) in zip(scores, pairs, strict=True):
        assert h.log_prob == pytest.approx(score, abs=1e-5)
        assert sum(h.token_log_probs) == pytest.approx(h.log_prob, abs=1e-5)
        assert len(h.token_log_probs) == len(h.tokens) + 1
        n, penalty = len(h.token_log_probs), ((5 + len(h.token_log_probs)) / 6) ** 0.6
        penalty = n if name == "length" else penalty
        if name != "coverage":
            assert h.score == pytest.approx(h.log_prob / penalty, abs=1e-5)


def test_rules_hold_for_pieces(translator, lines):
    decode = SETTINGS["rules"]
    free = translator.translate(lines, DECODE, 3)
    assert any(len(h.tokens) < 3 for found in free for h in found)
    for found in translator.translate(lines, decode, 3):
        for h in found:
            bigrams = list(zip(h.tokens, h.tokens[1:], strict=False))
            assert len(h.tokens) >= 3 and len(set(bigrams)) == len(bigrams)
    short = dataclasses.replace(DECODE, max_length=3)
    for found in translator.translate(lines, short, 3):
        assert all(len(h.token_log_probs) <= 3 for h in found)


# --- Prefixes -------------------------------------------------------------------


def test_translations_begin_with_their_prefix(translator, lines):
    rng = random.Random(3)
    prefixes = [" ".join(rng.choices("ABCDEFGHXY", k=rng.randint(0, 5))) for _ in lines]
    prefixes[2] = ""
    found = translator.translate(lines, DECODE, 3, prefixes=prefixes)
    forced = translator.vocabularies.target.encode(prefixes)
    for prefix, ids, hypotheses in zip(prefixes, forced, found, strict=True):
        pieces = translator.vocabularies.target.pieces(ids)
        assert len({tuple(h.tokens) for h in hypotheses}) == len(hypotheses)
        for h in hypotheses:
            assert h.tokens[: len(pieces)] == pieces
            assert h.text.startswith(prefix)
    assert max(map(len, found)) > 1
    alone = translator.translate([lines[2]], DECODE, 3)
    assert texts(found[2:3]) == texts(alone)
    # The same, one by one: lengths of prefixes in a batch do not matter.
    for i in (0, 1, 5):
        one = translator.translate([lines[i]], DECODE, 3, prefixes=[prefixes[i]])
        assert texts(one) == texts(found[i : i + 1])


def test_a_sample_begins_with_its_prefix(translator, lines):
    found = translator.translate(lines, SAMPLE, 4, prefixes=["X Y"] * len(lines))
    assert all(h.text.startswith("X Y") for each in found for h in each)


def test_a_long_prefix_is_named(translator):
    long = " ".join("ABCDEFGH" * 5)
    with pytest.raises(DataError, match=r"prefix of line 8 has \d+ pieces"):
        translator.translate(["a", "b"], DECODE, first_line=7, prefixes=["", long])
    short = dataclasses.replace(DECODE, max_length=2)
    with pytest.raises(DataError, match=r"prefix of line 1 .* no more than 2"):
        translator.translate(["a"], short, prefixes=["A B C"])


def test_a_prefix_longer_than_its_source_leaves_room(translator):
    prefix = "A B C D E F G H A B"
    decode = dataclasses.replace(DECODE, max_extra_length=4)
    (found,) = translator.translate(["a"], decode, prefixes=[prefix])
    pieces = translator.vocabularies.target.encode([prefix])[0]
    assert len(pieces) < len(found[0].token_log_probs) <= len(pieces) + 4


# --- Samples --------------------------------------------------------------------


def test_samples_depend_on_sentence_and_seed_alone(
    trained, translator, lines, monkeypatch
):
    expected = texts(translator.translate(lines, SAMPLE, 3))
    assert any(len(set(each)) > 1 for each in expected)
    small = dataclasses.replace(SAMPLE, batch_size=5)
    order = random.Random(0).sample(range(len(lines)), len(lines))
    shuffled = texts(translator.translate([lines[i] for i in order], small, 3))
    assert shuffled == [expected[i] for i in order]
    other = dataclasses.replace(SAMPLE, seed=1)
    assert texts(translator.translate(lines, other, 3)) != expected
    chosen = jax.devices()[:3]
    monkeypatch.setattr(parallel, "devices", lambda: chosen)
    moved = load_translator([trained], "last", print)[0]
    assert texts(moved.translate(lines, SAMPLE, 3)) == expected


def test_another_seed_compiles_nothing(translator, lines):
    translator.translate(lines, SAMPLE)
    before = translator.compilations
    translator.translate(lines, dataclasses.replace(SAMPLE, seed=7))
    assert translator.compilations == before


def test_mbr_takes_the_sample_most_like_all(translator, lines):
    decode = dataclasses.replace(SAMPLE, sample=False, mbr=6)
    samples = translator.translate(lines, SAMPLE, 6)
    for drawn, chosen in zip(
        samples, translator.translate(lines, decode, 2), strict=True
    ):
        utilities = {
            h.text: np.mean(
                [sacrebleu.sentence_chrf(h.text, [o.text]).score for o in drawn]
            )
            for h in drawn
        }
        best = sorted(utilities.values(), reverse=True)
        for h, utility in zip(chosen, best, strict=False):
            assert h.utility == pytest.approx(utility) == utilities[h.text]
        assert len(chosen) == min(2, len(utilities))


# --- Ensembles ------------------------------------------------------------------


def test_two_copies_are_the_model(trained, translator, lines):
    twice = load_translator([trained, trained], "last", print)[0]
    found, expected = (t.translate(lines, DECODE, 3) for t in (twice, translator))
    assert texts(found) == texts(expected)
    for one, other in zip(found, expected, strict=True):
        for a, b in zip(one, other, strict=True):
            assert a.score == pytest.approx(b.score, abs=1e-5)


def test_an_ensemble_is_the_mean_of_the_probabilities(ensemble, lines):
    found = [f[0] for f in ensemble.translate(lines, DECODE)]
    vocabularies, model = ensemble.vocabularies, ensemble.models[0]
    targets = [" ".join(h.tokens) for h in found]
    sides: list[Any] = [
        [np.asarray(ids, np.int32) for ids in side]
        for side in (
            vocabularies.source.encode(lines),
            vocabularies.target.ids(targets),
        )
    ]
    shape = batching.Shape(len(lines), 32, 32)
    batch = batching.make_batch(sides[0], sides[1], shape)
    apply: Any = jax.jit(model.apply)
    size = vocabularies.target.vocab_size
    total = np.zeros((*batch.target_out.shape, size), np.float32)
    for params in ensemble.params:
        variables = {"params": parallel.Replicated().fetch(params)}
        logits = apply(variables, batch.source, batch.source_length, batch.target_in)
        total += np.asarray(jax.nn.softmax(logits)) / 2
    chosen = np.take_along_axis(total, batch.target_out[..., None], 2)[..., 0]
    scores = ensemble.score(lines, targets, 16, pieces=True)
    finished = [i for i, h in enumerate(found) if h.finished]
    assert len(finished) > 3
    for i in finished:
        expected = np.log(chosen[i, : batch.target_length[i]])
        np.testing.assert_allclose(found[i].token_log_probs, expected, atol=1e-5)
        assert scores[i] == pytest.approx(found[i].log_prob, abs=1e-5)


# --- Attention ------------------------------------------------------------------


def test_attention_has_a_row_a_token_and_sums_to_one(translator, ensemble, lines):
    pieces = translator.source_pieces(lines)
    plain = translator.translate(lines, DECODE, 2)
    for model in (translator, ensemble):
        found = model.translate(lines, DECODE, 2, attention=True)
        for source, hypotheses in zip(pieces, found, strict=True):
            for h in hypotheses:
                attention = np.asarray(h.attention)
                assert attention.shape == (len(h.token_log_probs), len(source) + 1)
                np.testing.assert_allclose(attention.sum(axis=1), 1, atol=1e-5)
        if model is translator:
            assert texts(found) == texts(plain)
    assert plain[0][0].attention is None


def test_attention_is_the_mean_over_heads_of_the_last_layer(translator, lines):
    (found,) = translator.translate(lines[:1], DECODE, attention=True)
    ids = translator.vocabularies.target.ids([" ".join(found[0].tokens)])[0]
    source = np.asarray([[*translator.vocabularies.source.encode(lines[:1])[0], 1]])
    forced = np.asarray([[3, *ids]])[:, : len(found[0].token_log_probs)]
    variables = {"params": parallel.Replicated().fetch(translator.params[0])}
    apply = functools.partial(translator.models[0].apply, mutable=["intermediates"])
    lengths = np.asarray([source.shape[1]])
    _, sown = jax.jit(apply)(variables, source, lengths, forced)
    layer = sown["intermediates"]["decoder"]["layer_0"]
    weights = layer["cross_attention"]["weights"][0][0].mean(axis=0)
    np.testing.assert_allclose(found[0].attention, weights, atol=1e-5)


# --- Compilations ---------------------------------------------------------------


def test_programs_are_bounded_by_the_buckets(trained):
    """Lines of 31 lengths, three times, in any batches: 4 buckets up to 32."""
    translator = load_translator([trained], "last", print)[0]
    letters = [" ".join("abcdefgh"[i % 8] for i in range(n)) for n in range(1, 16)]
    decode = dataclasses.replace(DECODE, batch_size=3, beam_size=2)
    compiled = []

    def count(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        translator.translate(letters, decode)
        first = len(compiled)
        assert 1 < translator.compilations <= 4
        assert first == translator.compilations
        translator.translate(letters[::-1][:7], decode)
        translator.translate(letters * 2, decode)
        assert len(compiled) == first == translator.compilations
    finally:
        jax.monitoring.clear_event_listeners()
