"""The paper's BLEU against Perl, against its arithmetic, and beside sacreBLEU."""

import collections
import json
import math
import random
import shutil
import subprocess

import pytest
import tiny

from transformer_jax.errors import DataError
from transformer_jax.paper_bleu import moses, multi_bleu, paper_score, split_compounds

HYPOTHESES = [
    "Die Deutsch-Englisch-Übersetzung eines CDU-Politikers war gut gemeint.",
    "Er sagte: „Das E-Mail-Konto ist seit 10 Jahren leer.“",
    "Der 35-jährige Vize-Präsident fuhr nach Baden-Württemberg.",
]
REFERENCES = [
    "Die deutsch-englische Übersetzung eines CDU-Politikers war gut gemeint.",
    'Er sagte: "Das E-Mail-Postfach ist seit 10 Jahren leer."',
    "Der 35-jährige Vize-Präsident reiste nach Baden-Baden.",
]

# What normalize-punctuation.perl and tokenizer.perl 1.1 of Moses make of a line.
MOSES = {
    "Am 3. Oktober kostete es z.B. 1.234,56 Euro (ca. 5 %), sagte Dr. Müller.": (
        "Am 3. Oktober kostete es z.B. 1.234,56 Euro ( ca. 5 % ) , sagte Dr. Müller ."
    ),
    "Das ist \"Peters' Haus\"; gib's mir...": (
        "Das ist &quot; Peters &apos; Haus &quot; ; gib &apos; s mir ..."
    ),
    "Nr. 5 usw. & so weiter | [x] <y>": (
        "Nr. 5 usw. &amp; so weiter &#124; &#91; x &#93; &lt; y &gt;"
    ),
    "30% von U.S.A. 10-jährige T-Shirts": "30 % von U.S.A. 10-jährige T-Shirts",
    "Das war am 24. Dezember. Und so.": "Das war am 24. Dezember . Und so .",
    "Er sagte: „Das Konto ist leer.“": (
        "Er sagte : &quot; Das Konto ist leer &quot; ."
    ),
}


@pytest.mark.parametrize("line", MOSES)
def test_tokens_are_those_of_moses(line):
    assert moses("de")(line) == MOSES[line]


def test_tokens_of_other_languages():
    assert moses("en")("Mr. Smith's 5% can't.") == "Mr. Smith &apos;s 5 % can &apos;t ."
    assert moses("fr")("L'eau, c'est bon.") == "L&apos; eau , c&apos; est bon ."
    # Moses has no list for this one, and takes the English.
    assert moses("xx")("Mr. Smith") == "Mr. Smith"


@pytest.mark.parametrize("line", ["", " ", "\t\u00a0", "\0", "\u2028x\u0085y"])
def test_odd_lines(line):
    assert moses("de")(line) == "x y"[: 3 * ("x" in line)]


@pytest.mark.parametrize(
    ("tokens", "split"),
    [
        ("rich-text format", "rich ##AT##-##AT## text format"),
        ("a-b-c", "a ##AT##-##AT## b-c"),
        ("a-ü-c", "a ##AT##-##AT## ü ##AT##-##AT## c"),
        ("ab-cd-ef", "ab ##AT##-##AT## cd ##AT##-##AT## ef"),
        ("- a -b c- --", "- a -b c- --"),
        ("x---y", "x ##AT##-##AT## --y"),
    ],
)
def test_compounds(tokens, split):
    assert split_compounds(tokens) == split


@pytest.mark.skipif(not shutil.which("perl"), reason="there is no perl")
def test_compounds_as_perl_splits_them():
    rng = random.Random(1)
    lines = ["".join(rng.choices("ab-- ü\u00dfÅ…1.", k=30)) for _ in range(500)]
    done = subprocess.run(
        ["perl", "-ple", r"s{(\S)-(\S)}{$1 ##AT##-##AT## $2}g"],
        input="".join(line + "\n" for line in lines).encode(),
        capture_output=True,
        check=True,
    )
    expected = done.stdout.decode().split("\n")[:-1]
    assert [split_compounds(line) for line in lines] == expected
    assert any("AT" in line for line in expected)


def by_hand(hypotheses: list[str], references: list[list[str]]) -> float:
    """The arithmetic of multi-bleu.perl, written again."""
    matched, total, length, closest = [0] * 4, [0] * 4, 0, 0
    for hypothesis, *others in zip(hypotheses, *references, strict=True):
        words, *sets = (line.split() for line in (hypothesis, *others))
        length += len(words)
        closest += min((abs(len(words) - len(s)), len(s)) for s in sets)[1]
        for n in range(4):

            def ngrams(words: list[str], n: int = n) -> collections.Counter:
                grams = (tuple(words[i : i + n + 1]) for i in range(len(words) - n))
                return collections.Counter(grams)

            most = collections.Counter()
            for reference in sets:
                most |= ngrams(reference)
            matched[n] += (ngrams(words) & most).total()
            total[n] += ngrams(words).total()
    if not all(matched):
        return 0.0
    logs = sum(math.log(m / t) for m, t in zip(matched, total, strict=True))
    return 100 * min(1, math.exp(1 - closest / length)) * math.exp(logs / 4)


@pytest.mark.parametrize("references", [1, 2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_arithmetic(references, seed):
    rng = random.Random(seed)
    words = ["a", "b", "B", "##AT##-##AT##"]

    def lines() -> list[str]:
        return [" ".join(rng.choices(words, k=rng.randint(0, 14))) for _ in range(200)]

    hypotheses, sets = lines(), [lines() for _ in range(references)]
    expected = by_hand(hypotheses, sets)
    assert multi_bleu(hypotheses, sets).score == pytest.approx(expected, abs=1e-9)
    assert 0 < expected < 100


def test_no_smoothing_and_no_warning(caplog, capfd):
    lines, other = ["a b c ."] * 200, ["a b c !"] * 200
    assert multi_bleu(lines, [other]).score == by_hand(lines, [other]) == 0
    assert paper_score(lines, [lines], "de").paper_bleu == pytest.approx(100)
    short = ["a b ."] * 200  # no n-gram of four
    assert paper_score(short, [short], "de").paper_bleu == by_hand(short, [short]) == 0
    assert not caplog.records and capfd.readouterr() == ("", "")


def test_golden_values():
    """Made with the Perl scripts of Moses and the arithmetic above."""
    score = paper_score(HYPOTHESES, [REFERENCES], "de")
    assert score.paper_bleu == pytest.approx(69.81466691950516, abs=1e-9)
    assert score.tokenised_bleu == pytest.approx(61.32427302940786, abs=1e-9)
    assert (
        "compounds:split" in score.paper_recipe and "case:mixed" in score.paper_recipe
    )
    assert "compounds:whole" in score.tokenised_recipe
    assert "69.81" in score.paper_detail and "61.32" in score.tokenised_detail


def test_only_german_compounds_are_split():
    english = ["a well-known face in town", "the rich-text format it has"]
    score = paper_score(english, [english[::-1]], "en")
    assert score.paper_bleu == score.tokenised_bleu
    assert score.paper_recipe == score.tokenised_recipe
    assert "tok:moses-en|compounds:whole" in score.paper_recipe


def test_lowercase_is_for_both_sides():
    upper = [line.upper() for line in REFERENCES]
    for one, other in ((upper, REFERENCES), (REFERENCES, upper)):
        score = paper_score(one, [other], "de", lowercase=True)
        assert score.paper_bleu == pytest.approx(100)
        assert "case:lc" in score.paper_recipe
        assert paper_score(one, [other], "de").paper_bleu < 50


def test_wrong_shapes():
    with pytest.raises(DataError, match=r"2 hypotheses.*\[1\]"):
        paper_score(["a", "b"], [["a"]], "de")


def test_the_verb_prints_both_measures(tmp_path, capsys):
    hypothesis, reference = tmp_path / "h", tmp_path / "r"
    for path, lines in ((hypothesis, HYPOTHESES), (reference, REFERENCES)):
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    base = ["bleu", f"--hypothesis={hypothesis}", f"--reference={reference}"]
    assert tiny.run(*base, "--paper", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["bleu"] == pytest.approx(52.72858597124474, abs=1e-9)
    assert report["paper_bleu"] == pytest.approx(69.81466691950516, abs=1e-9)
    assert tiny.run(*base, "--paper") == 0
    lines = capsys.readouterr().out.splitlines()
    for line, start, recipe in zip(
        lines,
        (
            "BLEU = 52.73 ",
            "chrF2 = 74.76 ",
            "paper BLEU = 69.81",
            "tokenised BLEU = 61",
        ),
        ("bleu_signature", "chrf_signature", "paper_recipe", "tokenised_recipe"),
        strict=True,
    ):
        assert line.startswith(start) and line.endswith(f"  [{report[recipe]}]")
    assert tiny.run(*base) == 0
    assert "paper" not in capsys.readouterr().out
    assert tiny.run(*base, "--paper", "--lang=en", "--lowercase", "--json") == 0
    english = json.loads(capsys.readouterr().out)
    assert "tok:moses-en|compounds:whole" in english["paper_recipe"]
    for name in ("bleu_signature", "chrf_signature", "paper_recipe"):
        assert "case:lc" in english[name]
