"""SentencePiece: train, load, encode, decode. The special ids are defined here only.

Text is encoded as it stands, but for white space: runs of blanks become one and blanks
at the ends go, as SentencePiece does it, whose own mark U+2581 counts as a blank, too.
No Unicode normalisation. Where the config says so text is lower-cased, by the model
itself, so that whoever encodes with it gets the same pieces.

Special ids never come out of text: a typed `</s>` is spelled like any other characters.
Only the unknown id does, where a vocabulary without byte fallback has no piece for a
character. Its text is U+FFFD, in place, without blanks, so that what is encoded and
decoded again stays as it is.
"""

import contextlib
import functools
import hashlib
import io
import itertools
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import sentencepiece

from transformer_jax.config import TokenizerConfig
from transformer_jax.errors import DataError

PAD_ID = 0
EOS_ID = 1
UNK_ID = 2
BOS_ID = 3
SPECIAL_IDS = (PAD_ID, EOS_ID, UNK_ID, BOS_ID)

DRAWN = 1 << 14  # places of lines drawn at once; the same as one by one

UNKNOWN = "\ufffd"  # the text of UNK_ID
BLANK = "\u2581"  # SentencePiece's mark for a blank

# What SentencePiece would take for its own marks in the text it learns from.
_MARKS = re.compile(r"<(?=(?:/?s|pad|unk|0x[0-9A-F]{2})>)")


class Tokenizer:
    """A trained SentencePiece model with our special ids."""

    def __init__(self, model: bytes, origin: str) -> None:
        """Loads a serialised model.

        Args:
            model: the bytes of a SentencePiece model file.
            origin: its file, for messages.

        Raises:
            DataError: not a SentencePiece model, or one with other special ids.
        """
        self.model = model
        try:
            self._processor = sentencepiece.SentencePieceProcessor()
            self._processor.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise DataError(
                f"{origin} is not a SentencePiece model; restore it, or name another"
            ) from error
        found = (
            self._processor.pad_id(),
            self._processor.eos_id(),
            self._processor.unk_id(),
            self._processor.bos_id(),
        )
        if found != SPECIAL_IDS:
            raise DataError(
                f"{origin} has pad, eos, unk, bos = {found}, not {SPECIAL_IDS}; train "
                "it with --pad_id=0 --eos_id=1 --unk_id=2 --bos_id=3"
            )

    @classmethod
    def load(cls, path: str | pathlib.Path) -> "Tokenizer":
        """Loads the model file at `path`; DataError where it is missing or broken."""
        try:
            return cls(pathlib.Path(path).read_bytes(), str(path))
        except OSError as error:
            raise DataError(f"tokenizer {path}: {error.strerror}") from error

    @property
    def vocab_size(self) -> int:
        """Number of pieces, special ids included."""
        return self._processor.get_piece_size()

    @functools.cached_property
    def byte_ids(self) -> list[int]:
        """The pieces that stand for a single byte."""
        return [i for i in range(self.vocab_size) if self._processor.is_byte(i)]

    @functools.cached_property
    def spelled(self) -> np.ndarray:
        """Characters that each piece spells, blanks left out, `[pieces] int64`.

        Special pieces and single bytes spell none.
        """
        lengths = count_characters(self.pieces(range(self.vocab_size)))
        lengths[[*SPECIAL_IDS, *self.byte_ids]] = 0
        return lengths

    @functools.cached_property
    def lowercase(self) -> bool:
        """Whether text is lower-cased, so that no text that comes out has capitals."""
        return "a" in self._processor.Normalize("A")

    @property
    def fingerprint(self) -> str:
        """A hash of the model."""
        return hashlib.sha256(self.model).hexdigest()

    @property
    def dtype(self) -> np.dtype:
        """The smallest type that holds every id."""
        return np.min_scalar_type(self.vocab_size - 1)

    def encode(self, lines: Sequence[str], threads: int = -1) -> list[list[int]]:
        """Returns the ids of each line, without BOS or EOS; an empty line has none."""
        return self._processor.encode(list(lines), num_threads=threads)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of `ids`, special ids left out, as a single line.

        Byte pieces join to characters; bytes that are no UTF-8 become U+FFFD, as do
        unknown pieces, which are one where they stand in a row.
        """
        plain = [int(i) for i in ids if int(i) not in (PAD_ID, EOS_ID, BOS_ID)]
        text = "" if UNK_ID in plain else self._processor.decode(plain)
        if UNK_ID in plain:
            for unknown, part in itertools.groupby(plain, lambda i: i == UNK_ID):
                text += UNKNOWN if unknown else self._decode_part(list(part), not text)
        return re.sub(r"[\r\n]", " ", text)

    def _decode_part(self, ids: list[int], first: bool) -> str:
        """Decodes what stands between unknown pieces, the blanks before it included."""
        text = self._processor.decode(ids)
        spelled = "".join(self.pieces(ids))
        blanks = len(spelled) - len(spelled.lstrip(BLANK))
        return text if first else " " * blanks + text.lstrip(" ")

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Returns the piece of each id."""
        return [self._processor.id_to_piece(int(i)) for i in ids]

    def ids(self, lines: Sequence[str]) -> list[list[int]]:
        """Returns the ids of lines that hold pieces with blanks between.

        Raises:
            DataError: a piece is none of the vocabulary's, or a special one.
        """
        found = []
        for number, line in enumerate(lines, 1):
            pieces = line.split(" ") if line else []
            found.append([self._processor.piece_to_id(piece) for piece in pieces])
            for piece, piece_id in zip(pieces, found[-1], strict=True):
                if piece_id in SPECIAL_IDS:
                    raise DataError(
                        f"line {number}: {piece!r} is no piece of the vocabulary; give "
                        "pieces with one blank between, as translate --pieces writes"
                    )
        return found


def count_characters(texts: Sequence[str]) -> np.ndarray:
    """Returns how many characters of each text are no blanks, `[texts] int64`."""
    counts = (len(text) - text.count(" ") - text.count(BLANK) for text in texts)
    return np.fromiter(counts, np.int64, len(texts))


def sample_lines(lines: Iterable[str], count: int, seed: int) -> list[str]:
    """Draws at most `count` lines uniformly, in one pass (reservoir sampling).

    Args:
        lines: any number of lines.
        count: how many are kept at the most.
        seed: the same seed draws the same lines.

    Returns:
        The drawn lines; all of them, in order, where there are no more than `count`.
    """
    lines = iter(lines)
    rng, kept = np.random.default_rng(seed), list(itertools.islice(lines, count))
    start, number = count + 1, DRAWN
    while number == DRAWN:  # else the lines have ended
        # Line n takes any of n places, if it is one of those kept.
        places, number = rng.integers(np.arange(start, start + DRAWN)).tolist(), 0
        for place, line in zip(places, lines, strict=False):
            number += 1
            if place < count:
                kept[place] = line
        start += DRAWN
    return kept


def train(
    lines: Iterable[str], config: TokenizerConfig, seed: int, side: str = ""
) -> Tokenizer:
    """Trains a vocabulary.

    Args:
        lines: text of both languages, or of one side's.
        config: sizes, algorithm and limits.
        seed: of the sample, where there are more than `config.train_lines` lines.
        side: `source` or `target`, where it is the vocabulary of that side alone.

    Returns:
        The tokenizer.

    Raises:
        DataError: the text is too small for the vocabulary, or empty.
    """
    sample = sample_lines(filter(str.strip, lines), config.train_lines, seed)
    if not sample:
        raise DataError("no text to train a vocabulary on: every line is empty")
    model, drawn = io.BytesIO(), len(sample)
    size = config.source_size if side == "source" else config.vocab_size
    try:
        with _normalization(config.lowercase) as normalization:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=map(_readable, _hand_over(sample)),
                model_writer=model,
                model_type=config.model_type,
                vocab_size=size,
                character_coverage=config.character_coverage,
                byte_fallback=config.byte_fallback,
                hard_vocab_limit=config.hard_vocab_limit,
                max_sentence_length=1 << 16,
                pad_id=PAD_ID,
                eos_id=EOS_ID,
                unk_id=UNK_ID,
                bos_id=BOS_ID,
                minloglevel=2,
                **normalization,
            )
    except RuntimeError as error:
        raise _explain(error, config, drawn, side) from error
    found = model.getvalue()
    if config.lowercase:
        found = _without_path(found)
    return Tokenizer(found, "the new vocabulary")


@contextlib.contextmanager
def _normalization(lowercase: bool) -> Iterator[dict[str, Any]]:
    """Gives the trainer's options; its rules are a file, which is gone afterwards."""
    if not lowercase:
        yield {"normalization_rule_name": "identity"}
        return
    with tempfile.NamedTemporaryFile("w", suffix=".tsv", encoding="ascii") as rules:
        for letter in map(chr, range(sys.maxunicode + 1)):
            lower = letter.lower()
            if lower != letter and len(lower) == 1:  # all but the Turkish dotted I
                rules.write(f"{ord(letter):X}\t{ord(lower):X}\n")
        rules.flush()
        yield {"normalization_rule_tsv": rules.name}


def _without_path(model: bytes) -> bytes:
    """Takes out the file of rules, so that the same text gives the same model."""
    from sentencepiece.sentencepiece_model_pb2 import (
        ModelProto,  # pyright: ignore[reportAttributeAccessIssue]
    )

    parsed = ModelProto.FromString(model)
    parsed.normalizer_spec.ClearField("normalization_rule_tsv")
    return parsed.SerializeToString()


def _hand_over(lines: list[str]) -> Iterator[str]:
    """Yields the lines, last first, and forgets them: SentencePiece keeps its own."""
    while lines:
        yield lines.pop()


def _readable(line: str) -> str:
    """Returns a line of which SentencePiece learns all that is not a blank.

    NUL would end its C strings, lines with U+2585 would be left out, and what looks
    like one of its own marks would be cut out.
    """
    return _MARKS.sub("< ", line.replace("\0", " ").replace("\u2585", " "))


def _explain(
    error: RuntimeError, config: TokenizerConfig, lines: int, side: str
) -> DataError:
    """Turns SentencePiece's complaint about the size into one with a mend."""
    size = f"config.tokenizer.vocab_size = {config.vocab_size}"
    if side == "source":
        size = f"config.tokenizer.source_vocab_size = {config.source_size}"
    text = f"{side} text".strip()
    if most := re.search(r"<= (\d+)", str(error)):
        return DataError(
            f"{size} is too large for {lines} lines of {text}; set it to "
            f"{most.group(1)} or less, or config.tokenizer.hard_vocab_limit to false "
            "for as many as there are"
        )
    if least := re.search(r"required_chars\W+\d+ vs (\d+)", str(error)):
        return DataError(
            f"{size} has no room for the special ids, bytes and characters of the "
            f"{text}; set it to {least.group(1)} or more, or lower "
            "config.tokenizer.character_coverage"
        )
    return DataError(f"SentencePiece could not train a vocabulary with {size}: {error}")
