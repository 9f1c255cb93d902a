"""A sentence's translation depends on the sentence alone."""

import dataclasses
import random

import jax
import numpy as np
import pytest
import tiny

from transformer_jax import parallel
from transformer_jax.config import DecodeConfig
from transformer_jax.decode import translator as translators
from transformer_jax.decode.translator import Translator, bucket, is_blank
from transformer_jax.errors import DataError

DECODE = DecodeConfig(beam_size=3, max_extra_length=4, batch_size=40)


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return [source for source, _ in tiny.sentences(40, 9)]


@pytest.fixture(scope="module")
def translator(trained) -> Translator:
    return translators.load_translator([trained], "last", print)[0]


@pytest.fixture(scope="module")
def expected(translator, lines):
    return translator.translate(lines, DECODE, nbest=2)


def same(found, expected) -> None:
    for one, other in zip(found, expected, strict=True):
        assert [h.text for h in one] == [h.text for h in other]
        for a, b in zip(one, other, strict=True):
            assert a.score == pytest.approx(b.score, abs=1e-5)


@pytest.mark.parametrize("batch_size", [1, 3, 7])
def test_batch_size(translator, lines, expected, batch_size):
    decode = dataclasses.replace(DECODE, batch_size=batch_size)
    same(translator.translate(lines, decode, nbest=2), expected)


def test_order(translator, lines, expected):
    order = list(range(len(lines)))
    random.Random(1).shuffle(order)
    found = translator.translate([lines[i] for i in order], DECODE, nbest=2)
    same(found, [expected[i] for i in order])


@pytest.mark.parametrize(
    "count", [*(pytest.param(count, marks=pytest.mark.slow) for count in (1, 2)), 3]
)
def test_device_count(trained, monkeypatch, lines, expected, count):
    chosen = jax.devices()[:count]
    monkeypatch.setattr(parallel, "devices", lambda: chosen)
    translator = translators.load_translator([trained], "last", print)[0]
    same(translator.translate(lines, DECODE, nbest=2), expected)
    targets = [h[0].text for h in expected]
    scores = translator.score(lines, targets, 16)
    monkeypatch.undo()
    whole = translators.load_translator([trained], "last", print)[0]
    assert scores == pytest.approx(whole.score(lines, targets, 7), abs=1e-5)


def test_longer_padding(translator, monkeypatch, lines, expected):
    monkeypatch.setattr(translators, "BUCKETS", (31, 32))
    same(translator.translate(lines, DECODE, nbest=2), expected)


def test_the_best_does_not_depend_on_how_many_are_asked_for(
    translator, lines, expected
):
    best = translator.translate(lines, DECODE)
    same(best, [found[:1] for found in expected])


def test_a_second_file_compiles_nothing(translator, lines):
    compiled = []

    def count(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    decode = dataclasses.replace(DECODE, batch_size=5, beam_size=2)
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        translator.translate(lines, decode)
        first = len(compiled)
        translator.translate(lines[::-1], decode)
    finally:
        jax.monitoring.clear_event_listeners()
    assert 0 < first == len(compiled)


def test_limits_are_those_of_the_source(translator):
    decode = dataclasses.replace(DECODE, max_extra_length=2, beam_size=1)
    for line in ("a", "a b c d e"):
        pieces = len(translator.vocabularies.source.encode([line])[0])
        found = translator.translate([line], decode)[0][0]
        assert len(found.tokens) <= pieces + 2


def test_scoring_names_a_line_that_is_too_long(translator):
    with pytest.raises(DataError, match=r"line 2 has a side of \d+ pieces.*31"):
        translator.score(["a", "a"], ["A", "A" + " B" * 40], 4)


@pytest.mark.parametrize(
    "line", ["", " ", "\t", "\u00a0", "\u3000", "\u200b", "\ufeff \x00"]
)
def test_blank_lines(translator, line):
    assert is_blank(line)
    (found,) = translator.translate([line], DECODE)
    assert [h.text for h in found] == [""]


def test_what_is_not_blank():
    assert not any(
        is_blank(line) for line in ("a", ".", " x", "\u2581", "\ufffd", "😀")
    )


def test_buckets_hold_and_are_few():
    assert all(bucket(n, 256) >= n for n in range(1, 257))
    assert {bucket(n, 100) for n in range(1, 101)} == {8, 16, 24, 32, 48, 64, 96, 100}
    assert bucket(5000, 5000) == 5000


def test_unknown_and_special_pieces_never_come_out(translator, lines):
    for found in translator.translate(lines, DECODE, nbest=3):
        for hypothesis in found:
            assert not {"<pad>", "</s>", "<unk>", "<s>"} & set(hypothesis.tokens)
            assert np.isfinite(hypothesis.score) and hypothesis.score <= 0
