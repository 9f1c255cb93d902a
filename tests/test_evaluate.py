"""Scores against sacreBLEU, and references of the wrong shape."""

import pytest
import sacrebleu

from transformer_jax.errors import DataError
from transformer_jax.evaluate import score_text

HYPOTHESES = ["the cat is on the mat .", "There is a dog", "Ein Haus"]
REFERENCES = ["the cat sat on the mat .", "There is a small dog", "Das Haus"]


def test_scores_are_those_of_the_library():
    score = score_text(HYPOTHESES, [REFERENCES])
    bleu = sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES])
    assert score.bleu == bleu.score and 0 < score.bleu < 100
    assert score.chrf == sacrebleu.corpus_chrf(HYPOTHESES, [REFERENCES]).score
    assert "case:mixed" in score.bleu_signature and "tok:13a" in score.bleu_signature
    assert f"{bleu.score:.2f}" in score.bleu_detail


def test_perfect_and_case():
    assert score_text(REFERENCES, [REFERENCES]).bleu == pytest.approx(100)
    upper = [line.upper() for line in REFERENCES]
    assert score_text(upper, [REFERENCES]).bleu < 50


def test_more_references_never_lower_the_score():
    one = score_text(HYPOTHESES, [REFERENCES]).bleu
    assert score_text(HYPOTHESES, [REFERENCES, HYPOTHESES]).bleu > one


def test_an_empty_reference_line_is_scored():
    score = score_text(["a b c d", "e"], [["a b c d", ""]])
    assert (
        score.bleu == sacrebleu.corpus_bleu(["a b c d", "e"], [["a b c d", ""]]).score
    )


@pytest.mark.parametrize(
    ("hypotheses", "references", "named"),
    [
        (["a", "b"], [["a"], ["b"]], r"2 hypotheses.*\[1, 1\]"),  # transposed
        (["a", "b"], ["a", "b"], "list of whole sets"),
        (["a"], [], "list of whole sets"),
        ([], [[]], "empty"),
    ],
)
def test_wrong_shapes(hypotheses, references, named):
    with pytest.raises(DataError, match=named):
        score_text(hypotheses, references)
