"""The paper's BLEU, to compare with it: on tokens of Moses, with compounds split.

It is another measure than sacreBLEU's and never stands alone. What is done to every
line of both sides, in this order:

1. Lower-cased, where asked for.
2. Punctuation normalised, as `normalize-punctuation.perl -l LANG` does: all quotes
   become straight ones, dashes hyphens, blanks are tidied. The references of the
   published WMT14 numbers came so.
3. Tokenised, as `tokenizer.perl -l LANG` does, special characters escaped.
4. German only: compounds split at their hyphens, as Tensor2Tensor's
   `get_ende_bleu.sh` does.

What `multi-bleu.perl` computes follows: n-grams up to four, no smoothing, the closest
reference length, the shorter one of two as close.

The same without step 4 is the measure of published Multi30k numbers, which are
lower-cased, normalised and tokenised (in that order), with compounds left whole. In
languages other than German the two are one.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from importlib import metadata

import sacrebleu
import sacremoses
from sacrebleu.metrics.bleu import BLEUScore

from transformer_jax.evaluate import check_sets

_COMPOUND = re.compile(rb"(\S)-(\S)")


@dataclasses.dataclass(frozen=True)
class PaperScore:
    """Tokenised corpus BLEU on the scale from 0 to 100."""

    paper_bleu: float
    paper_recipe: str
    paper_detail: str  # precisions, brevity penalty, lengths
    tokenised_bleu: float  # compounds left whole
    tokenised_recipe: str
    tokenised_detail: str


def moses(lang: str) -> Callable[[str], str]:
    """Returns a function from a line to its normalised tokens, blanks between.

    Args:
        lang: two letters; where Moses has no list of abbreviations for the language, it
            takes the English one.
    """
    normalizer = sacremoses.MosesPunctNormalizer(lang=lang)
    tokenizer = sacremoses.MosesTokenizer(lang=lang)

    def tokenise(line: str) -> str:
        # Perl's lines end in a newline, which is what its rule for a quote behind the
        # last full stop waits for.
        normalized = normalizer.normalize(line + "\n")
        return str(tokenizer.tokenize(normalized, return_str=True))

    return tokenise


def split_compounds(tokens: str) -> str:
    """Splits words at hyphens, from left to right and without overlap, as Perl does.

    `rich-text format` becomes `rich ##AT##-##AT## text format`, but of `a-b-c` only the
    first hyphen is split: the `b` is used up.
    """
    # In bytes, as Perl reads them: a letter of two is never used up by one match.
    return _COMPOUND.sub(rb"\1 ##AT##-##AT## \2", tokens.encode()).decode()


def multi_bleu(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]]
) -> BLEUScore:
    """Returns what `multi-bleu.perl` computes of tokenised lines, case kept."""
    # `force` keeps the library from warning that the text is tokenised.
    bleu = sacrebleu.BLEU(tokenize="none", smooth_method="none", force=True)
    return bleu.corpus_score(hypotheses, references)


def paper_score(
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    lang: str,
    lowercase: bool = False,
) -> PaperScore:
    """Scores detokenised hypotheses by the paper's protocol.

    Args:
        hypotheses: one string a sentence.
        references: one or more whole sets, each as long as `hypotheses`.
        lang: of the text, two letters.
        lowercase: both sides, before all else.

    Returns:
        The scores with their recipes.

    Raises:
        DataError: no sentence, no reference set, or sets of other lengths.
    """
    check_sets(hypotheses, references)
    tokenise, german = moses(lang), lang == "de"
    sets = [
        [tokenise(line.lower() if lowercase else line) for line in lines]
        for lines in (hypotheses, *references)
    ]
    whole = multi_bleu(sets[0], sets[1:])
    if german:
        sets = [[split_compounds(line) for line in lines] for lines in sets]
    paper = multi_bleu(sets[0], sets[1:])
    recipe = (
        f"nrefs:{len(references)}|case:{'lc' if lowercase else 'mixed'}|norm:moses|"
        f"tok:moses-{lang}|compounds:{{}}|smooth:none|"
        f"sacremoses:{metadata.version('sacremoses')}|version:{sacrebleu.__version__}"
    )
    return PaperScore(
        paper_bleu=paper.score,
        paper_recipe=recipe.format("split" if german else "whole"),
        paper_detail=str(paper),
        tokenised_bleu=whole.score,
        tokenised_recipe=recipe.format("whole"),
        tokenised_detail=str(whole),
    )
