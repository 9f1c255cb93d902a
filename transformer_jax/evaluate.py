"""Corpus BLEU and chrF of hypotheses and of a Translator over a whole split.

The number is sacreBLEU's on detokenised, cased text, with its signature beside it.
Training, `evaluate` and `bleu` all come here, so they cannot disagree.
"""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import sacrebleu

from transformer_jax.config import DecodeConfig
from transformer_jax.decode.translator import Translator, Warn
from transformer_jax.errors import DataError


@dataclasses.dataclass(frozen=True)
class Score:
    """Corpus scores on the scale from 0 to 100, and the counts that BLEU is made of.

    The counts of parts of a text add up to those of the whole text.
    """

    bleu: float
    bleu_signature: str
    bleu_detail: str  # precisions, brevity penalty, lengths
    bleu_matched: list[int]  # n-grams that are in a reference, n = 1 to 4
    bleu_ngrams: list[int]  # n-grams of the hypotheses, n = 1 to 4
    hypothesis_length: int  # in tokens of sacreBLEU
    reference_length: int  # likewise, of the reference closest in length
    chrf: float
    chrf_signature: str
    sentences: int
    references: int


def check_sets(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    """Checks that every reference set has a line for every hypothesis.

    Args:
        hypotheses: one string a sentence.
        references: one or more whole sets, each as long as `hypotheses`.

    Raises:
        DataError: no sentence, no reference set, or sets of other lengths.
    """
    counts = [len(reference) for reference in references]
    if not references or isinstance(references[0], str):
        raise DataError("references must be a list of whole sets, one list each")
    if any(count != len(hypotheses) for count in counts):
        raise DataError(
            f"{len(hypotheses)} hypotheses but references of {counts} lines; line N of "
            "each must belong together"
        )
    if not hypotheses:
        raise DataError("no sentence to score: the hypotheses are empty")


def score_text(
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    lowercase: bool = False,
    warn: Warn = lambda message: None,
) -> Score:
    """Scores hypotheses.

    Args:
        hypotheses: one string a sentence.
        references: one or more whole sets, each as long as `hypotheses`.
        lowercase: of both sides, by sacreBLEU; the signatures say so.
        warn: is told of empty reference lines, which count as they are.

    Returns:
        The scores with their signatures.

    Raises:
        DataError: no sentence, no reference set, or sets of other lengths.
    """
    check_sets(hypotheses, references)
    for number, reference in enumerate(references, 1):
        empty = [str(i) for i, line in enumerate(reference, 1) if not line.strip()]
        if empty:
            more = f" and {len(empty) - 10} more" if len(empty) > 10 else ""
            which = f"reference {number}" if len(references) > 1 else "the reference"
            warn(f"{which} is empty in line {', '.join(empty[:10])}{more}")
    bleu = sacrebleu.BLEU(lowercase=lowercase)
    chrf = sacrebleu.CHRF(lowercase=lowercase)
    sets = [list(reference) for reference in references]
    bleu_score = bleu.corpus_score(list(hypotheses), sets)
    chrf_score = chrf.corpus_score(list(hypotheses), sets)
    return Score(
        bleu=bleu_score.score,
        bleu_signature=str(bleu.get_signature()),
        bleu_detail=str(bleu_score),
        bleu_matched=bleu_score.counts,
        bleu_ngrams=bleu_score.totals,
        hypothesis_length=bleu_score.sys_len,
        reference_length=bleu_score.ref_len,
        chrf=chrf_score.score,
        chrf_signature=str(chrf.get_signature()),
        sentences=len(hypotheses),
        references=len(sets),
    )


def evaluate(
    translator: Translator,
    sources: Sequence[str],
    references: Sequence[Sequence[str]],
    decode: DecodeConfig,
    warn: Warn = lambda message: None,
    lowercase: bool = False,
) -> tuple[Score, list[str]]:
    """Translates `sources`, every one of them, and scores the result.

    Args:
        translator: of the model.
        sources: one string a sentence.
        references: one or more whole sets, each as long as `sources`.
        decode: settings of the search.
        warn: is told of sources that were cut, and of empty reference lines.
        lowercase: both sides before they are compared.

    Returns:
        The score and the hypotheses, in order.

    Raises:
        DataError: no sentence, no reference set, or sets of other lengths.
    """
    found = translator.translate(sources, decode, warn=warn)
    hypotheses = [best[0].text for best in found]
    return score_text(hypotheses, references, lowercase, warn), hypotheses


def write_report(
    folder: pathlib.Path, name: str, report: dict[str, Any], hypotheses: Sequence[str]
) -> pathlib.Path:
    """Writes `NAME.json`, the report, and `NAME.txt`, one hypothesis a line.

    Returns:
        The path of the report.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(line + "\n" for line in hypotheses)
    (folder / f"{name}.txt").write_text(text, encoding="utf-8", newline="\n")
    path = folder / f"{name}.json"
    path.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", "utf-8")
    return path
