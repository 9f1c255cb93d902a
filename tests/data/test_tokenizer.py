"""The vocabulary: special ids, round trips, byte pieces, and what bad input answers."""

import dataclasses
import io
import pathlib
import re
import unicodedata
from collections.abc import Iterator

import numpy as np
import pytest
import sentencepiece

from transformer_jax.config import TokenizerConfig
from transformer_jax.data import phrases
from transformer_jax.data.tokenizer import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    SPECIAL_IDS,
    UNK_ID,
    Tokenizer,
    sample_lines,
    train,
)
from transformer_jax.errors import DataError

CONFIG = TokenizerConfig(vocab_size=420)
LINES = [line for pair in phrases.pairs("valid") for line in pair]
PLAIN = "The old man buys a red bag."


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train(LINES, CONFIG, seed=0)


def one(tokenizer: Tokenizer, line: str) -> list[int]:
    (ids,) = tokenizer.encode([line])
    return ids


def round_trip(tokenizer: Tokenizer, line: str) -> str:
    return tokenizer.decode(one(tokenizer, line))


def byte_ids(tokenizer: Tokenizer, content: bytes) -> list[int]:
    """Returns the byte pieces that spell `content`."""
    pieces = tokenizer.pieces(range(tokenizer.vocab_size))
    return [pieces.index(f"<0x{byte:02X}>") for byte in content]


# --- Ids ------------------------------------------------------------------------


def test_special_ids(tokenizer: Tokenizer) -> None:
    assert (PAD_ID, EOS_ID, UNK_ID, BOS_ID) == (0, 1, 2, 3) == SPECIAL_IDS
    assert tokenizer.pieces(range(4)) == ["<pad>", "</s>", "<unk>", "<s>"]
    assert tokenizer.vocab_size == 420


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_text_has_no_special_ids_and_no_marks_are_added(model_type: str) -> None:
    config = dataclasses.replace(CONFIG, model_type=model_type)
    tokenizer = train(LINES, config, seed=0)
    for line, ids in zip(LINES, tokenizer.encode(LINES), strict=True):
        assert min(ids) > max(SPECIAL_IDS)
        assert tokenizer.decode(ids) == line
        assert len(ids) < len(line)  # more than letters were learned


@pytest.mark.parametrize("typed", ["</s>", "<pad>", "<s>", "<unk>", "<0x41>", "a</s>b"])
def test_typed_special_pieces_are_text(tokenizer: Tokenizer, typed: str) -> None:
    ids = one(tokenizer, typed)
    assert len(ids) > 1 and not set(ids) & set(SPECIAL_IDS)
    assert tokenizer.decode(ids) == typed


def test_decoding_leaves_special_ids_out(tokenizer: Tokenizer) -> None:
    ids = one(tokenizer, PLAIN)
    marked = [BOS_ID, *ids[:2], PAD_ID, *ids[2:], EOS_ID, PAD_ID, PAD_ID]
    assert tokenizer.decode(marked) == PLAIN
    assert tokenizer.decode(np.asarray(marked, np.int32)) == PLAIN  # pyright: ignore
    assert tokenizer.decode([BOS_ID, EOS_ID]) == tokenizer.decode([]) == ""


def test_lines_are_encoded_each_for_itself(tokenizer: Tokenizer) -> None:
    lines = [*LINES[:50], "", "  ", PLAIN]
    assert tokenizer.encode(lines) == [one(tokenizer, line) for line in lines]
    assert tokenizer.encode([]) == []
    assert one(tokenizer, "") == one(tokenizer, "  ") == []


# --- Round trips ----------------------------------------------------------------

ODD = [
    "Grüße aus Köln, \u017ftraße ẞ",
    unicodedata.normalize("NFD", "é ü ñ Å"),  # not composed
    "\ufb01 ① ² \uff21 ㎏",  # NFKC would rewrite each
    "שלום עולם مرحبا",
    "日本語 中文 한국어",
    "no-break\u00a0space\u3000wide\u2003em",
    "zero\u200bwidth\u200djoiner\u00adsoft",
    "\u202eright\u202c to left",
    "👩\u200d👩\u200d👧 🇩🇪 👍🏽 \U0001d518",
    "\u2028line\u2029paragraph\x85next",
    "\ttab\x00nul\x0bvt\x1f",
    "\ufeffbom \ufffd \U0010ffff",
]


@pytest.mark.parametrize("text", ODD)
def test_odd_unicode_survives(tokenizer: Tokenizer, text: str) -> None:
    ids = one(tokenizer, text)
    assert UNK_ID not in ids
    assert tokenizer.decode(ids) == text


def test_any_text_survives(tokenizer: Tokenizer) -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        codes = rng.integers(0x20, [0x80, 0x800, 0x10000, 0x110000], (12, 4)).ravel()
        text = "".join(map(chr, rng.choice(codes, 20)))
        text = re.sub(r"[\ud800-\udfff\u2581]", "", text)
        expected = re.sub(" +", " ", text).strip(" ")
        assert round_trip(tokenizer, text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a  b", "a b"),
        ("  a b ", "a b"),
        ("a     b   c", "a b c"),
        ("a\u2581b", "a b"),  # SentencePiece's mark for a blank
    ],
)
def test_runs_of_blanks_collapse(
    tokenizer: Tokenizer, text: str, expected: str
) -> None:
    assert round_trip(tokenizer, text) == expected


# --- Bytes ----------------------------------------------------------------------


def test_what_has_no_piece_is_spelled_in_bytes(tokenizer: Tokenizer) -> None:
    ids = one(tokenizer, "😀")
    assert ids[-4:] == byte_ids(tokenizer, "😀".encode())
    assert tokenizer.decode(ids) == "😀"


def test_without_byte_fallback_it_is_unknown() -> None:
    config = dataclasses.replace(CONFIG, vocab_size=200, byte_fallback=False)
    tokenizer = train(LINES, config, seed=0)
    assert UNK_ID in one(tokenizer, "a 😀 b")
    assert UNK_ID not in one(tokenizer, PLAIN)
    assert "⁇" in tokenizer.decode(one(tokenizer, "a 😀 b"))


def test_broken_bytes_become_the_replacement_character(tokenizer: Tokenizer) -> None:
    start, emoji = one(tokenizer, "bag"), byte_ids(tokenizer, "😀".encode())
    for kept in range(1, 4):  # cut at a length limit in the middle of a character
        text = tokenizer.decode([*start, *emoji[:kept]])
        assert re.fullmatch("bag\ufffd+", text)
        text.encode("utf-8")
    lone = byte_ids(tokenizer, b"\xff")
    assert tokenizer.decode([*start, *lone, *start]).count("\ufffd") == 1
    surrogate = tokenizer.decode(byte_ids(tokenizer, b"\xed\xa0\x80"))
    assert surrogate and set(surrogate) == {"\ufffd"}


@pytest.mark.parametrize("content", [b"\n", b"\r", b"\r\n", b"\n\n"])
def test_decoded_text_is_a_single_line(tokenizer: Tokenizer, content: bytes) -> None:
    start = one(tokenizer, "bag")
    text = tokenizer.decode([*start, *byte_ids(tokenizer, content), *start])
    assert text == "bag" + " " * len(content) + " bag"


def test_any_ids_decode_to_one_line_of_valid_text(tokenizer: Tokenizer) -> None:
    rng = np.random.default_rng(1)
    for _ in range(300):
        ids = rng.integers(0, tokenizer.vocab_size, rng.integers(0, 30)).tolist()
        text = tokenizer.decode(ids)
        assert "\n" not in text and "\r" not in text
        text.encode("utf-8")


# --- Training -------------------------------------------------------------------


def test_same_text_gives_the_same_vocabulary(tokenizer: Tokenizer) -> None:
    again = train(iter(LINES), CONFIG, seed=0)
    assert again.model == tokenizer.model
    assert again.fingerprint == tokenizer.fingerprint
    other = train(LINES[:200], CONFIG, seed=0)
    assert other.fingerprint != tokenizer.fingerprint


def test_seed_matters_only_where_lines_are_drawn(tokenizer: Tokenizer) -> None:
    assert train(LINES, CONFIG, seed=1).model == tokenizer.model
    few = dataclasses.replace(CONFIG, train_lines=150)
    models = [train(LINES, few, seed=seed).model for seed in (0, 0, 1)]
    assert models[0] == models[1] != models[2]


def test_empty_lines_and_nul_do_no_harm(tokenizer: Tokenizer) -> None:
    assert train([*LINES, "", "   ", "\n"], CONFIG, 0).model == tokenizer.model
    nul = [line.replace(" ", "\0") for line in LINES]
    assert round_trip(train(nul, CONFIG, 0), PLAIN) == PLAIN


def message_of(lines: list[str], config: TokenizerConfig) -> str:
    with pytest.raises(DataError) as error:
        train(lines, config, seed=0)
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
@pytest.mark.parametrize("byte_fallback", [True, False])
def test_a_vocabulary_too_large_says_how_large_it_may_be(
    model_type: str, byte_fallback: bool
) -> None:
    config = TokenizerConfig(
        vocab_size=37_000, model_type=model_type, byte_fallback=byte_fallback
    )
    message = message_of(LINES[:60], config)
    assert "config.tokenizer.vocab_size = 37000 is too large for 60 lines" in message
    found = re.search(r"set it to (\d+) or less", message)
    assert found
    most = dataclasses.replace(config, vocab_size=int(found.group(1)))
    assert train(LINES[:60], most, seed=0).vocab_size == most.vocab_size
    message_of(LINES[:60], dataclasses.replace(config, vocab_size=most.vocab_size + 1))


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


# --- Loading --------------------------------------------------------------------


def test_a_saved_model_is_the_same(
    tokenizer: Tokenizer, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(tokenizer.model)
    loaded = Tokenizer.load(path)
    assert loaded.fingerprint == tokenizer.fingerprint
    assert loaded.encode(LINES) == tokenizer.encode(LINES)


def test_a_model_with_other_special_ids_is_refused(tmp_path: pathlib.Path) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(  # SentencePiece's own defaults
        sentence_iterator=iter(LINES),
        model_writer=model,
        vocab_size=100,
        minloglevel=2,
    )
    path = tmp_path / "other.model"
    path.write_bytes(model.getvalue())
    with pytest.raises(DataError) as error:
        Tokenizer.load(path)
    message = str(error.value)
    assert str(path) in message and "\n" not in message
    assert "(-1, 2, 0, 1), not (0, 1, 2, 3)" in message
    assert "--pad_id=0 --eos_id=1 --unk_id=2 --bos_id=3" in message


@pytest.mark.parametrize("content", [b"", b"not a model", b"\0" * 100])
def test_what_is_no_model_is_refused(tmp_path: pathlib.Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{path} is not a SentencePiece model"):
        Tokenizer.load(path)


def test_half_a_model_is_refused(tokenizer: Tokenizer) -> None:
    for size in (1, 100, len(tokenizer.model) // 2, len(tokenizer.model) - 1):
        with pytest.raises(DataError, match=r"cut\.model is not a SentencePiece model"):
            Tokenizer(tokenizer.model[:size], "cut.model")


def test_a_missing_model_is_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.model: No such file"):
        Tokenizer.load(tmp_path / "nowhere.model")


# --- Sampling -------------------------------------------------------------------


def numbered(count: int) -> Iterator[str]:
    return (str(i) for i in range(count))


def test_few_lines_are_all_kept_in_order() -> None:
    for count in range(6):
        assert sample_lines(numbered(count), 5, 0) == list(numbered(count))


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
