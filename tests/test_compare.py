"""The paired tests: what theory says, and what the program sacrebleu prints."""

import json
import os
import random
import re
import subprocess
import sys

import pytest
import tiny

from transformer_jax.compare import as_text, compare
from transformer_jax.errors import DataError
from transformer_jax.evaluate import score_text

WORDS = "der Hund die Katze sieht heute ein rotes Haus am Fluss und geht weg .".split()


def lines(wrong: float, seed: int) -> list[str]:
    """Returns 60 lines, of which a part of the words is another one."""
    rng, noise = random.Random(0), random.Random(seed)
    right = [rng.choices(WORDS, k=rng.randint(5, 14)) for _ in range(60)]
    return [
        " ".join(noise.choice(WORDS) if noise.random() < wrong else w for w in words)
        for words in right
    ]


REFERENCE = lines(0, 0)
SYSTEMS = {"h1": lines(0.3, 1), "h2": lines(0.28, 2), "h3": lines(0.6, 3)}


def test_a_system_does_not_differ_from_itself():
    system = SYSTEMS["h1"]
    for compared in compare(
        [("a", system), ("a", list(system))], [REFERENCE], samples=50
    ).values():
        first, second = compared.systems
        assert first.difference is first.p_bootstrap is first.p_randomisation is None
        assert second.difference == 0
        assert second.p_bootstrap == second.p_randomisation == 1
        assert (first.mean, first.interval) == (second.mean, second.interval)


def test_a_clearly_better_system():
    found = compare([(n, SYSTEMS[n]) for n in ("h3", "h1")], [REFERENCE], samples=200)
    score = score_text(SYSTEMS["h1"], [REFERENCE])
    for compared, expected in (
        (found["bleu"], score.bleu),
        (found["chrf"], score.chrf),
    ):
        worse, better = compared.systems
        assert better.score == expected and better.difference == expected - worse.score
        assert better.score > worse.score + 10
        assert better.p_bootstrap == better.p_randomisation == pytest.approx(1 / 201)
        assert abs(better.mean - better.score) < better.interval


def test_seed_and_samples(monkeypatch):
    systems = [(name, SYSTEMS[name]) for name in ("h1", "h2")]
    once = compare(systems, [REFERENCE], samples=30)
    monkeypatch.setenv("SACREBLEU_SEED", "none")
    assert compare(systems, [REFERENCE], samples=30) == once
    assert os.environ["SACREBLEU_SEED"] == "none"
    assert "bs:30|seed:12345" in once["bleu"].bootstrap_signature
    assert "ar:30|seed:12345" in once["chrf"].randomisation_signature
    monkeypatch.delenv("SACREBLEU_SEED")
    assert compare(systems, [REFERENCE], samples=30, seed=7) != once
    assert "SACREBLEU_SEED" not in os.environ
    with pytest.raises(ValueError, match="seed is 0"):
        compare(systems, [REFERENCE], seed=0)


def test_default_samples_are_those_of_sacrebleu():
    few = [("a", ["a b c d", "e"]), ("b", ["a b c e", "e"])]
    found = compare(few, [["a b c d", "e"]])["bleu"]
    assert "|bs:1000|" in found.bootstrap_signature
    assert "|ar:10000|" in found.randomisation_signature


def test_lowercase():
    upper = [line.upper() for line in REFERENCE]
    systems = [("a", upper), ("b", REFERENCE)]
    found = compare(systems, [REFERENCE], lowercase=True, samples=10)["bleu"]
    assert found.systems[0].score == found.systems[1].score == pytest.approx(100)
    assert "case:lc" in found.bootstrap_signature


def test_wrong_shapes_name_the_file():
    with pytest.raises(DataError, match=r"other: 1 hypotheses.*\[60\]"):
        compare([("h1", SYSTEMS["h1"]), ("other", ["a"])], [REFERENCE])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("systems")
    for name, content in (*SYSTEMS.items(), ("ref", REFERENCE)):
        (folder / name).write_text("".join(line + "\n" for line in content))
    return folder


def sacrebleu_p_values(files, kind: str) -> list[float]:
    """Returns the program's p-values, for each system of BLEU and of chrF."""
    # Its JSON cannot print what the bootstrap finds for chrF.
    command = f"ref -i h1 h2 h3 -m bleu chrf -f text --paired-{kind} "
    command += f"--paired-{kind}-n 100"
    done = subprocess.run(
        [sys.executable, "-m", "sacrebleu", *command.split()],
        cwd=files,
        env=os.environ | {"SACREBLEU_SEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    return [float(p) for p in re.findall(r"\(p = ([\d.]+)\)", done.stdout)]


def test_the_verb_agrees_with_the_program(files, capsys):
    base = ["bleu", f"--hypothesis={files / 'h1'}", f"--reference={files / 'ref'}"]
    base += [f"--compare={files / 'h2'},{files / 'h3'}", "--samples=100", "--seed=7"]
    assert tiny.run(*base, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    for kind, name in (("bs", "p_bootstrap"), ("ar", "p_randomisation")):
        ours = [
            report["compared"][metric]["systems"][i][name]
            for i in (1, 2)
            for metric in ("bleu", "chrf")
        ]
        assert ours == pytest.approx(sacrebleu_p_values(files, kind), abs=5e-5)
    assert len({*ours}) > 2
    assert report["compared"]["bleu"]["systems"][0]["score"] == report["bleu"]
    assert tiny.run(*base) == 0
    printed = capsys.readouterr().out
    for metric in ("bleu", "chrf"):
        compared = report["compared"][metric]
        assert f"bootstrap      [{compared['bootstrap_signature']}]" in printed
        assert f"randomisation  [{compared['randomisation_signature']}]" in printed
        for system in compared["systems"]:
            assert any(
                system["name"] in line and f" {system['score']:.2f} " in line
                for line in printed.splitlines()
            )


def test_table():
    found = compare([(n, SYSTEMS[n]) for n in ("h1", "h3")], [REFERENCE], samples=99)
    table = as_text(found).split("\n\n")[0].splitlines()
    assert [cell.strip() for cell in table[0].split("|")] == [
        "system", "BLEU", "mean, 95 %", "difference", "p bootstrap", "p random.",
    ]  # fmt: skip
    assert len({len(line) for line in table[:4]}) == 1
    difference = found["bleu"].systems[1].difference
    cells = [cell.strip() for cell in table[3].split("|")]
    assert cells[3:] == [f"{difference:+.2f}", "0.0100", "0.0100"]
