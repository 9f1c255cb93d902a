"""Training a vocabulary: its size, its text, and what it costs."""

import dataclasses
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest

from transformer_jax.config import TokenizerConfig
from transformer_jax.data import phrases
from transformer_jax.data import tokenizer as tokenizer_module
from transformer_jax.data.tokenizer import Tokenizer, sample_lines, train
from transformer_jax.errors import DataError

CONFIG = TokenizerConfig(vocab_size=420)
SAMPLED = dataclasses.replace(CONFIG, train_lines=2000)
LINES = [line for pair in phrases.pairs("valid") for line in pair]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train(LINES, CONFIG, seed=0)


# --- Training -------------------------------------------------------------------


def test_same_text_gives_the_same_vocabulary(tokenizer: Tokenizer) -> None:
    again = train(iter(LINES), CONFIG, seed=0)
    assert again.model == tokenizer.model
    assert again.fingerprint == tokenizer.fingerprint
    other = train(LINES[:200], CONFIG, seed=0)
    assert other.fingerprint != tokenizer.fingerprint


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_lower_case_is_that_of_text_lowered_before(model_type: str) -> None:
    """Python lowers letter by letter but for a final sigma and the Turkish dotted I."""
    capitals = [line.title() for line in LINES] + ["ÄÖÜ ẞ ÇŁØ ЖЁ ΑΒΓ ԱԲ 𐐀 ǅ Ⓐ K"] * 20
    config = dataclasses.replace(CONFIG, model_type=model_type)
    lowering = dataclasses.replace(config, lowercase=True)
    found = train(capitals, lowering, seed=0)
    expected = train([line.lower() for line in capitals], config, seed=0)
    size = expected.vocab_size
    assert found.pieces(range(size)) == expected.pieces(range(size))
    for line in (*capitals[::50], "STRASSE Straße", "ÀÉ<s>", "ABC\u0130"):
        lowered = "".join(c if c == "\u0130" else c.lower() for c in line)
        assert found.encode([line]) == expected.encode([lowered])
        assert found.decode(found.encode([line])[0]) == lowered
    assert found.lowercase and not expected.lowercase
    assert train(capitals, lowering, seed=0).model == found.model
    assert b".tsv" not in found.model


def test_seed_matters_only_where_lines_are_drawn(tokenizer: Tokenizer) -> None:
    assert train(LINES, CONFIG, seed=1).model == tokenizer.model
    few = dataclasses.replace(CONFIG, train_lines=150)
    models = [train(LINES, few, seed=seed).model for seed in (0, 0, 1)]
    assert models[0] == models[1] != models[2]


def test_empty_lines_and_nul_do_no_harm(tokenizer: Tokenizer) -> None:
    assert train([*LINES, "", "   ", "\n"], CONFIG, 0).model == tokenizer.model
    for mark in ("\0", "\u2585"):  # SentencePiece's own ends and marks
        marked = train([line.replace(" ", mark) for line in LINES], CONFIG, 0)
        assert marked.encode(LINES) == tokenizer.encode(LINES)


def message_of(lines: list[str], config: TokenizerConfig) -> str:
    with pytest.raises(DataError) as error:
        train(lines, config, seed=0)
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
@pytest.mark.parametrize("byte_fallback", [True, False])
@pytest.mark.parametrize(("count", "size"), [(60, 37_000), (20, 32_000), (1, 400)])
def test_a_vocabulary_too_large_says_how_large_it_may_be(
    model_type: str, byte_fallback: bool, count: int, size: int
) -> None:
    lines = LINES[:count]
    config = TokenizerConfig(
        vocab_size=size, model_type=model_type, byte_fallback=byte_fallback
    )
    message = message_of(lines, config)
    wrong = f"config.tokenizer.vocab_size = {size} is too large for {count} lines"
    assert wrong in message
    found = re.search(r"set it to (\d+) or less", message)
    assert found
    most = dataclasses.replace(config, vocab_size=int(found.group(1)))
    largest = train(lines, most, seed=0)
    assert largest.vocab_size == most.vocab_size
    message_of(lines, dataclasses.replace(config, vocab_size=most.vocab_size + 1))
    # The other way that the message names: as many as there are.
    assert "config.tokenizer.hard_vocab_limit to false" in message
    soft = train(lines, dataclasses.replace(config, hard_vocab_limit=False), seed=0)
    assert soft.vocab_size == most.vocab_size
    assert soft.encode(LINES[:80]) == largest.encode(LINES[:80])
    within = dataclasses.replace(most, vocab_size=most.vocab_size - 1)
    same = dataclasses.replace(within, hard_vocab_limit=False)
    assert train(lines, same, 0).encode(lines) == train(lines, within, 0).encode(lines)


@pytest.mark.parametrize("byte_fallback", [True, False])
def test_a_vocabulary_too_small_says_how_small_it_may_be(byte_fallback: bool) -> None:
    config = TokenizerConfig(vocab_size=20, byte_fallback=byte_fallback)
    message = message_of(LINES, config)
    assert "config.tokenizer.vocab_size = 20 has no room" in message
    assert "config.tokenizer.character_coverage" in message
    found = re.search(r"set it to (\d+) or more", message)
    assert found
    least = dataclasses.replace(config, vocab_size=int(found.group(1)))
    assert train(LINES, least, seed=0).vocab_size == least.vocab_size
    message_of(LINES, dataclasses.replace(config, vocab_size=least.vocab_size - 1))


@pytest.mark.parametrize("lines", [[], [""], ["  ", "\t", "\n"]])
def test_no_text_at_all(lines: list[str]) -> None:
    assert "no text to train a vocabulary on" in message_of(lines, CONFIG)


# --- Sampling -------------------------------------------------------------------


def numbered(count: int) -> Iterator[str]:
    return (str(i) for i in range(count))


def test_few_lines_are_all_kept_in_order() -> None:
    for count in range(6):
        assert sample_lines(numbered(count), 5, 0) == list(numbered(count))


@pytest.mark.parametrize("lines", [5, 6, 11, 12, 13, 500])
def test_drawing_in_blocks_is_drawing_one_by_one(monkeypatch, lines: int) -> None:
    monkeypatch.setattr(tokenizer_module, "DRAWN", 7)
    rng, kept = np.random.default_rng(2), list(numbered(5))
    for i in range(5, lines):
        if (place := int(rng.integers(i + 1))) < 5:
            kept[place] = str(i)
    assert sample_lines(numbered(lines), 5, 2) == kept


def test_a_sample_is_drawn_without_repeats_and_by_its_seed() -> None:
    first = sample_lines(numbered(1000), 50, 3)
    assert len(first) == len(set(first)) == 50
    assert sample_lines(numbered(1000), 50, 3) == first
    assert sample_lines(numbered(1000), 50, 4) != first


def test_every_line_has_the_same_chance() -> None:
    lines, kept, draws = 20, 5, 3000
    counts = np.zeros(lines)
    for seed in range(draws):
        counts[[int(line) for line in sample_lines(numbered(lines), kept, seed)]] += 1
    chance = kept / lines
    error = np.sqrt(draws * chance * (1 - chance))
    assert np.abs(counts - draws * chance).max() < 4.5 * error


def test_a_sample_of_many_lines_needs_little_memory() -> None:
    """What is held is what is kept: 20,000 lines of 1 kB are 20 MB."""
    tracemalloc.start()
    try:
        kept = sample_lines((f"{i:01000}" for i in range(20_000)), 500, 0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(set(kept)) == 500 and peak < 2e6


def test_the_sample_is_not_held_while_sentencepiece_learns(monkeypatch) -> None:
    """It keeps its own copy: 2,000 lines of 1 kB are 2 MB on our side before it."""
    held: list[int] = []

    def learn(sentence_iterator: Iterator[str], **_: object) -> None:
        for number, line in enumerate(sentence_iterator):
            assert len(line) == 1000
            if number % 500 == 499:
                held.append(tracemalloc.get_traced_memory()[0])
        raise RuntimeError("enough")

    monkeypatch.setattr(
        tokenizer_module.sentencepiece.SentencePieceTrainer, "train", learn
    )
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="enough"):
            train((f"{i:01000}" for i in range(9000)), SAMPLED, 0)
    finally:
        tracemalloc.stop()
    assert len(held) == 4 and held[0] > 1.4e6
    assert held[1] < 1.2e6 and held[2] < 0.7e6 and held[3] < 0.2e6


MILLION = """
import resource, sys, time
from transformer_jax.config import TokenizerConfig
from transformer_jax.data.tokenizer import train

def lines(count):
    for i in range(count):
        yield " ".join(f"word{i * k % 9973}" for k in range(1, 12))

def usage():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

config = TokenizerConfig(vocab_size=1000, train_lines=10_000)
train(lines(10_000), config, 0)  # all that is needed for the sample
before, started = usage(), time.process_time()
for _ in lines(1_000_000):
    pass
made = time.process_time() - started
train(lines(1_000_000), config, 0)
print(usage() - before, time.process_time() - started - 2 * made)
"""


@pytest.mark.slow
def test_a_vocabulary_of_a_million_lines_costs_what_its_sample_costs() -> None:
    """A hundred MB of text, of which 10,000 lines are drawn."""
    found = subprocess.run(
        [sys.executable, "-c", MILLION], capture_output=True, text=True, check=True
    )
    kilobytes, seconds = map(float, found.stdout.split())
    assert kilobytes < 60_000 and seconds < 60
