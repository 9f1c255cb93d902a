#!/usr/bin/env python3
"""Generated parallel text with lengths like Multi30k's, and its vocabulary.

Every word is one piece, so that other toolkits, given the words as they stand, see the
same number of tokens. Written into a folder:

    train.source, train.target   29,000 pairs of 4 to 38 words
    fixed.source                 lines of 14 words, for decoding with forced steps
    vocabulary.model             for SentencePiece; the special ids are ours
    vocabulary.txt               the words alone, one a line
    vocabulary.yml               the words, </s> and <unk>, as Marian numbers them

Example: benchmarks/corpus.py --shape=tiny --out=runs/benchmark
"""

import io
import pathlib
from collections.abc import Sequence

import measure
import numpy as np
import sentencepiece
import shapes

from transformer_jax.data.tokenizer import BOS_ID, EOS_ID, PAD_ID, SPECIAL_IDS, UNK_ID

PAIRS = {"tiny": 29_000, "base": 29_000, "smoke": 200}
FIXED_WORDS = 14  # of a source that is decoded with forced steps
FIXED_LINES = 1000  # at the most


def lengths(pairs: int) -> np.ndarray:
    """Returns how many words the sides of each pair have, `[pairs, 2] int64`.

    The sources are log-normal about 13.5 words; each target is about as long as its
    source, give or take 15 %. With the end of the sentence both are 15 on average.
    """
    # A generator whose numbers stay the same in all versions of NumPy.
    rng = np.random.RandomState(0)
    source = np.clip(np.round(np.exp(rng.normal(2.6, 0.3, pairs))), 4, 38)
    target = np.clip(np.round(source * np.exp(rng.normal(0, 0.15, pairs))), 4, 38)
    return np.stack([source, target], axis=1).astype(np.int64)


def words(vocab_size: int) -> list[str]:
    """Returns the words of a vocabulary, which are numbers."""
    return [str(i) for i in range(len(SPECIAL_IDS), vocab_size)]


def sentences(counts: np.ndarray, vocab_size: int, seed: int) -> list[list[str]]:
    """Draws sentences of `counts` words; word n has weight 1 / (n + 10).

    The words of a seed are the same for any division into sentences.
    """
    known = np.asarray(words(vocab_size))
    weights = 1.0 / np.arange(10, 10 + len(known))
    share = weights / weights.sum()
    drawn = np.random.RandomState(seed).choice(known, counts.sum(), p=share)
    return [part.tolist() for part in np.split(drawn, counts.cumsum()[:-1])]


def vocabulary(vocab_size: int) -> bytes:
    """Returns a SentencePiece model in which every word is a piece."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(words(vocab_size)),
        model_writer=model,
        model_type="word",
        vocab_size=vocab_size,
        character_coverage=1.0,
        normalization_rule_name="identity",
        pad_id=PAD_ID,
        eos_id=EOS_ID,
        unk_id=UNK_ID,
        bos_id=BOS_ID,
        minloglevel=2,
    )
    return model.getvalue()


def write(folder: pathlib.Path, vocab_size: int, pairs: int) -> None:
    """Writes all files into an existing folder."""
    counts = lengths(pairs)
    for seed, side in enumerate(("source", "target"), 1):
        drawn = sentences(counts[:, seed - 1], vocab_size, seed)
        _write_lines(folder / f"train.{side}", map(" ".join, drawn))
    lines = min(FIXED_LINES, int(counts[:, 0].sum()) // FIXED_WORDS)
    fixed = sentences(np.full(lines, FIXED_WORDS), vocab_size, seed=1)
    _write_lines(folder / "fixed.source", map(" ".join, fixed))
    (folder / "vocabulary.model").write_bytes(vocabulary(vocab_size))
    known = words(vocab_size)
    _write_lines(folder / "vocabulary.txt", known)
    _write_lines(
        folder / "vocabulary.yml",
        [f'"{word}": {i}' for i, word in enumerate(["</s>", "<unk>", *known])],
    )


def overrides(folder: pathlib.Path) -> list[str]:
    """Returns the flags that let a config read what `write` wrote."""
    return [
        f"--config.data.train_source={folder / 'train.source'}",
        f"--config.data.train_target={folder / 'train.target'}",
        f"--config.tokenizer.model_path={folder / 'vocabulary.model'}",
    ]


def _write_lines(path: pathlib.Path, lines: Sequence[str] | map) -> None:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def main() -> None:
    """Writes the corpus of a shape for other toolkits."""
    parser = measure.Parser(description="Write the generated corpus of a shape.")
    parser.add_argument("--shape", choices=tuple(shapes.SHAPES), default="tiny")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    size = shapes.SHAPES[args.shape]["tokenizer.vocab_size"]
    write(args.out, size, PAIRS[args.shape])


if __name__ == "__main__":
    measure.run(main)
