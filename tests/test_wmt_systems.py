"""Published scores of WMT systems, through our own code; slow, and needs the texts."""

import csv
import gzip
import io
import json
import pathlib

import pytest
import tiny

from transformer_jax.data.textfiles import read_lines
from transformer_jax.evaluate import score_text

DATA = pathlib.Path(__file__).resolve().parents[2] / "shared" / "data"
SYSTEMS, NEWSTEST = DATA / "wmt-systems", DATA / "wmt-newstest"
SETS = ("generaltest2022.en-de", "generaltest2022.de-en", "newstest2021.en-de")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SYSTEMS.is_dir(), reason=f"there is no {SYSTEMS}"),
]

# BLEU of tokenised outputs, cased and lower-cased.
LINGEVAL97 = {
    ("2014", "bpe2bpe"): (19.966, 20.429),
    ("2015", "bpe2bpe"): (23.025, 23.457),
    ("2016", "bpe2bpe"): (26.534, 27.047),
    ("2014", "sennrich2016"): (25.266, 25.783),
    ("2015", "sennrich2016"): (27.922, 28.386),
    ("2016", "sennrich2016"): (34.118, 34.738),
}


def lines(path: pathlib.Path) -> list[str]:
    return list(read_lines(str(path)))


def published(name: str) -> dict[str, dict[str, float]]:
    """Returns metric and score of each system of a set."""
    year, pair = name.split(".")
    text = gzip.decompress((SYSTEMS / f"{year}.scores.tsv.gz").read_bytes()).decode()
    found: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(io.StringIO(text), delimiter="\t"):
        if row["pair"] == pair:
            scores = found.setdefault(row["system"], {})
            scores[row["metric"]] = float(row["score"])
    return found


def hypothesis(name: str, system: str) -> pathlib.Path:
    return SYSTEMS / f"{name}.hyp.{system}.{name[-2:]}.gz"


def reference(name: str, letter: str) -> pathlib.Path:
    return SYSTEMS / f"{name}.ref{letter}.{name[-2:]}.gz"


@pytest.mark.parametrize("name", SETS)
def test_every_published_value(name):
    systems = published(name)
    assert len(systems) == (5 if name.startswith("newstest2021") else 9)
    differences: dict[tuple[str, str, str], float] = {}
    for system, scores in systems.items():
        hypotheses = lines(hypothesis(name, system))
        letters = sorted(m[-1] for m in scores if m.startswith("bleu") and len(m) == 6)
        assert len(letters) == (3 if name.startswith("newstest2021") else 2)
        sets = {letter: [lines(reference(name, letter))] for letter in letters}
        sets["all"] = [one for letter in letters for one in sets[letter]]
        for which, references in sets.items():
            found = score_text(hypotheses, references)
            for metric, value in (("bleu", found.bleu), ("chrf", found.chrf)):
                expected = scores.pop(f"{metric}-{which}")
                differences[system, metric, which] = abs(value - expected)
        assert not scores  # no published value is left over
    print(f"{name}: {len(differences)} values, off by {max(differences.values())}")
    assert {key: off for key, off in differences.items() if off > 1e-9} == {}


def test_the_verb(capsys):
    name, system = SETS[2], "Facebook-AI"
    references = ",".join(str(reference(name, letter)) for letter in "ACD")
    files = [f"--hypothesis={hypothesis(name, system)}", f"--reference={references}"]
    assert tiny.run("bleu", *files, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    scores = published(name)[system]
    assert report["bleu"] == pytest.approx(scores["bleu-all"], abs=1e-9)
    assert "nrefs:3|case:mixed" in report["bleu_signature"]


@pytest.mark.parametrize(("year", "system"), LINGEVAL97)
def test_lingeval97(year, system):
    name = f"newstest{year}.en-de"
    hypotheses = lines(hypothesis(name, f"lingeval97-{system}"))
    references = [lines(NEWSTEST / f"{name}.de.gz")]
    for lowercase, expected in enumerate(LINGEVAL97[year, system]):
        found = score_text(hypotheses, references, bool(lowercase))
        assert found.bleu == pytest.approx(expected, abs=5e-4)
        assert ("case:lc" in found.bleu_signature) == bool(lowercase)
