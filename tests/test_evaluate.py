"""Scores against sacreBLEU, of any split and device count, and bad references."""

import json

import jax
import pytest
import sacrebleu
import tiny

from transformer_jax import parallel
from transformer_jax.config import DecodeConfig
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.decode.translator import load_translator
from transformer_jax.errors import DataError
from transformer_jax.evaluate import evaluate, score_text

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
    one = score_text(HYPOTHESES, [REFERENCES])
    for sets in ([REFERENCES, HYPOTHESES], [HYPOTHESES, REFERENCES]):
        both = score_text(HYPOTHESES, sets)
        assert both.bleu > one.bleu and both.chrf > one.chrf
        assert both.bleu == sacrebleu.corpus_bleu(HYPOTHESES, sets).score
        assert both.chrf == sacrebleu.corpus_chrf(HYPOTHESES, sets).score


@pytest.mark.parametrize(("one", "other"), [("lower", "upper"), ("upper", "lower")])
def test_lowercase_is_for_both_sides(one, other):
    hypotheses = [getattr(line, one)() for line in REFERENCES]
    references = [getattr(line, other)() for line in REFERENCES]
    score = score_text(hypotheses, [references], lowercase=True)
    assert score.bleu == pytest.approx(100) and score.chrf == pytest.approx(100)
    assert "case:lc" in score.bleu_signature and "case:lc" in score.chrf_signature
    assert score_text(hypotheses, [references]).bleu < 50


def test_lowercase_is_that_of_the_library():
    score = score_text(HYPOTHESES, [REFERENCES], lowercase=True)
    expected = sacrebleu.corpus_bleu(HYPOTHESES, [REFERENCES], lowercase=True)
    assert score.bleu == expected.score


def test_counts_of_the_parts_add_up():
    """Three uneven parts: the mean of their scores is not the score of the whole."""
    lines = tiny.sentences(40, 3)
    hypotheses = [source.upper() for source, _ in lines]
    references = [target for _, target in lines]
    whole = score_text(hypotheses, [references])
    cuts = ((0, 3), (3, 20), (20, 40))
    parts = [score_text(hypotheses[i:j], [references[i:j]]) for i, j in cuts]
    matched, total = (
        [sum(counts) for counts in zip(*columns, strict=True)]
        for columns in (
            [part.bleu_matched for part in parts],
            [part.bleu_ngrams for part in parts],
        )
    )
    assert matched == whole.bleu_matched and total == whole.bleu_ngrams
    length = sum(part.hypothesis_length for part in parts)
    closest = sum(part.reference_length for part in parts)
    joined = sacrebleu.BLEU.compute_bleu(matched, total, length, closest, "exp")
    assert joined.score == whole.bleu > 0
    assert sum(part.bleu for part in parts) / 3 != pytest.approx(whole.bleu, abs=0.1)


def test_an_empty_reference_line_is_scored_with_a_warning():
    warnings = []
    hypotheses, references = ["a b c d", "e"], ["a b c d", ""]
    score = score_text(hypotheses, [references], warn=warnings.append)
    assert score.bleu == sacrebleu.corpus_bleu(hypotheses, [references]).score
    assert warnings == ["the reference is empty in line 2"]
    warnings.clear()
    sets = [["a", *[" "] * 12], ["a"] * 13, [*["b"] * 12, "\u00a0"]]
    score_text(["a"] * 13, sets, warn=warnings.append)
    assert warnings == [
        "reference 1 is empty in line 2, 3, 4, 5, 6, 7, 8, 9, 10, 11 and 2 more",
        "reference 3 is empty in line 13",
    ]


def test_nothing_but_empty_lines():
    score = score_text(["", " "], [["", "a"]])
    assert score.bleu == score.chrf == 0
    assert score_text(["a"], [[""]]).bleu == 0


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


def evaluation(workdir, capsys, *flags: str) -> dict:
    assert tiny.run("evaluate", f"--workdir={workdir}", *flags, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    del report["command"]
    return report


def test_training_and_evaluate_find_the_same_number(trained, capsys):
    """The tiny run's BLEU is small, but chrF tells its checkpoints apart."""
    text = (trained / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    valid = {row["step"]: row for row in rows if "chrf" in row}
    assert list(valid) == [4, 8] and valid[4]["chrf"] != valid[8]["chrf"]
    for step, row in valid.items():
        flags = "--split=valid", f"--checkpoint={step}"
        report = evaluation(trained, capsys, *flags)
        assert (row["bleu"], row["chrf"]) == (report["bleu"], report["chrf"])
        assert report["checkpoint_steps"] == [step] and report["sentences"] == 7
    assert valid[8]["chrf"] > 0


@pytest.mark.parametrize("count", [1, 5, 16])
def test_every_translation_is_scored_at_its_place(trained, count):
    """Whatever is left over in the last batch, blank lines included."""
    translator, _, _ = load_translator([trained], "last", print)
    lines = [source for source, _ in tiny.sentences(count, 31)]
    lines[0] = "" if count > 1 else lines[0]
    decode = DecodeConfig(sample=True, min_length=3, batch_size=4)  # all kinds of text
    references = [line.upper() for line in lines]
    score, found = evaluate(translator, lines, [references], decode)
    alone = [translator.translate([line], decode)[0][0].text for line in lines]
    assert found == alone and found[-1] and len(set(found)) == count
    assert score.bleu == sacrebleu.corpus_bleu(alone, [references]).score
    assert score.chrf == sacrebleu.corpus_chrf(alone, [references]).score
    assert score.sentences == count


def test_what_is_called_bleu_is_bleu(trained):
    for line in (trained / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        names = {name for name in row if "bleu" in name.lower() or "chrf" in name}
        assert names in (set(), {"bleu", "chrf"})
        assert all(0 <= row[name] <= 100 for name in names)


@pytest.mark.parametrize(
    "split", ["valid", pytest.param("test", marks=pytest.mark.slow)]
)
def test_every_sentence_counts_once_on_any_devices(trained, capsys, monkeypatch, split):
    """7 and 9 sentences, in batches of 4."""
    devices, reports = jax.devices(), []
    for count, size in ((1, 1), (2, 4), (3, 4), (8, 4)):
        chosen = devices[:count]
        monkeypatch.setattr(parallel, "devices", lambda chosen=chosen: chosen)
        flags = f"--split={split}", f"--batch_size={size}", "--checkpoint=8"
        reports.append(evaluation(trained, capsys, *flags))
        assert reports[-1].pop("decode")["batch_size"] == size
    assert all(report == reports[0] for report in reports)
    assert reports[0]["sentences"] == {"valid": 7, "test": 9}[split]


def test_lowercase_where_the_vocabulary_is(trained, capsys, monkeypatch):
    """No hypothesis has capitals then, so those of references count for nothing."""
    flags = "--split=test", "--checkpoint=8", "--paper"
    asked = evaluation(trained, capsys, *flags, "--lowercase")
    monkeypatch.setattr(Tokenizer, "lowercase", True)
    assert evaluation(trained, capsys, *flags) == asked


def test_evaluate_with_the_papers_number(trained, tmp_path, capsys):
    """The tiny corpus has capitals as its German, so the references are lowered."""
    corpus, reference = trained.parent / "corpus", tmp_path / "test.de"
    reference.write_text((corpus / "test.de").read_text().lower())
    flags = f"--source={corpus / 'test.en'}", f"--reference={reference}"
    plain = evaluation(trained, capsys, *flags, "--checkpoint=8")
    report = evaluation(
        trained, capsys, *flags, "--checkpoint=8", "--paper", "--lowercase"
    )
    assert report["chrf"] > 1 > plain["chrf"]
    assert "tok:moses-de|compounds:split" in report["paper_recipe"]
    for name in ("bleu_signature", "chrf_signature", "paper_recipe"):
        assert "case:lc" in report[name]
    assert "case:mixed" in plain["bleu_signature"] and "paper_bleu" not in plain
    saved = json.loads((trained / "evaluate" / "test.en-8.json").read_text())
    assert saved["paper_bleu"] == report["paper_bleu"]
