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
    """Corpus scores on the scale from 0 to 100."""

    bleu: float
    bleu_signature: str
    bleu_detail: str  # precisions, brevity penalty, lengths
    chrf: float
    chrf_signature: str
    sentences: int
    references: int


def score_text(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Score:
    """Scores hypotheses.

    Args:
        hypotheses: one string a sentence.
        references: one or more whole sets, each as long as `hypotheses`.

    Returns:
        The scores with their signatures.

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
    bleu, chrf = sacrebleu.BLEU(), sacrebleu.CHRF()
    sets = [list(reference) for reference in references]
    bleu_score = bleu.corpus_score(list(hypotheses), sets)
    chrf_score = chrf.corpus_score(list(hypotheses), sets)
    return Score(
        bleu=bleu_score.score,
        bleu_signature=str(bleu.get_signature()),
        bleu_detail=str(bleu_score),
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
) -> tuple[Score, list[str]]:
    """Translates `sources`, every one of them, and scores the result.

    Returns:
        The score and the hypotheses, in order.
    """
    found = translator.translate(sources, decode, warn=warn)
    hypotheses = [best[0].text for best in found]
    return score_text(hypotheses, references), hypotheses


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
