"""The vocabulary: special ids, round trips, byte pieces, and what bad input answers."""

import dataclasses
import io
import pathlib
import re
import unicodedata

import numpy as np
import pytest
import sentencepiece

from transformer_jax.config import TokenizerConfig
from transformer_jax.data import phrases
from transformer_jax.data.batching import Shape, make_batch
from transformer_jax.data.tokenizer import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    SPECIAL_IDS,
    UNK_ID,
    Tokenizer,
    train,
)
from transformer_jax.errors import DataError

CONFIG = TokenizerConfig(vocab_size=420)
LINES = [line for pair in phrases.pairs("valid") for line in pair]
PLAIN = "The old man buys a red bag."


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train(LINES, CONFIG, seed=0)


@pytest.fixture(scope="module")
def unigram() -> Tokenizer:
    return train(LINES, dataclasses.replace(CONFIG, model_type="unigram"), seed=0)


@pytest.fixture(scope="module")
def without_bytes() -> Tokenizer:
    config = dataclasses.replace(CONFIG, vocab_size=200, byte_fallback=False)
    return train(LINES, config, seed=0)


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


MARKS = "a </s> b <pad> <unk> <2de> <s> <0x41>"


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
@pytest.mark.parametrize("byte_fallback", [True, False])
def test_marks_in_the_training_text_are_text(
    model_type: str, byte_fallback: bool
) -> None:
    config = TokenizerConfig(
        vocab_size=1000,
        model_type=model_type,
        byte_fallback=byte_fallback,
        hard_vocab_limit=False,
    )
    tokenizer = train([*LINES[:20], *[MARKS] * 500], config, seed=0)
    ids = one(tokenizer, MARKS)
    # Their characters are learned, too, though they stand nowhere else.
    assert not set(ids) & {*SPECIAL_IDS, *tokenizer.byte_ids}
    assert tokenizer.decode(ids) == MARKS


def test_a_batch_has_one_end_mark_a_side(tokenizer: Tokenizer) -> None:
    lines = [MARKS, PLAIN, "", "</s>"]
    for _ in range(2):  # encoding leaves nothing behind
        ids = [np.asarray(i, np.int32) for i in tokenizer.encode(lines)]
        longest = max(map(len, ids)) + 1
        batch = make_batch(ids, ids, Shape(len(ids), longest, longest))
        for side, length in (
            (batch.source, batch.source_length),
            (batch.target_out, batch.target_length),
        ):
            assert (side == EOS_ID).sum(axis=1).tolist() == [1] * len(lines)
            assert (side[np.arange(len(ids)), length - 1] == EOS_ID).all()
        assert not (batch.target_in == EOS_ID).any()


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


@pytest.mark.parametrize("text", [*ODD, "a , b . c", "a\u00a0 b", '" a "'])
def test_odd_unicode_survives_a_unigram_model(unigram: Tokenizer, text: str) -> None:
    assert UNK_ID not in one(unigram, text)
    assert round_trip(unigram, text) == text
    assert round_trip(unigram, f"  {text}  . ") == f"{text} .".replace("  ", " ")


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


def test_byte_ids_are_the_256_bytes(
    tokenizer: Tokenizer, without_bytes: Tokenizer
) -> None:
    expected = byte_ids(tokenizer, bytes(range(256)))
    assert tokenizer.byte_ids == sorted(expected)
    assert without_bytes.byte_ids == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (PLAIN, PLAIN),
        ("a 😀 b", "a \ufffd b"),
        ("bag😀bag", "bag\ufffdbag"),
        ("😀", "\ufffd"),
        ("😀👍 bag 👍", "\ufffd bag \ufffd"),
        ("The 日本 bag", "The \ufffd bag"),
        ("a \ufffd b", "a \ufffd b"),
    ],
)
def test_without_byte_fallback_it_is_unknown_and_stays_so(
    without_bytes: Tokenizer, text: str, expected: str
) -> None:
    ids = one(without_bytes, text)
    assert (UNK_ID in ids) == ("\ufffd" in expected)
    assert without_bytes.decode(ids) == expected
    assert one(without_bytes, expected) == ids


def test_any_unknown_ids_change_no_further(
    tokenizer: Tokenizer, without_bytes: Tokenizer
) -> None:
    rng = np.random.default_rng(5)
    for model in (tokenizer, without_bytes):
        for _ in range(300):
            ids = rng.integers(0, model.vocab_size, 12)
            ids[rng.integers(0, 12, 4)] = UNK_ID
            text = model.decode(ids.tolist())
            assert "\ufffd" in text and "\u2047" not in text
            # Blanks side by side become one; nothing else may happen, once or ever.
            again = round_trip(model, text)
            assert again == re.sub(" +", " ", text).strip(" ")
            assert round_trip(model, again) == again


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
