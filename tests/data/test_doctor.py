"""The data doctor: every finding, with its lines; nothing is changed on disk."""

import gzip
import json
import pathlib
from typing import Any

import pytest
import tiny

from transformer_jax import config_file
from transformer_jax.config import DataConfig
from transformer_jax.data import corpora, doctor, findings
from transformer_jax.data.cleaning import Cleaner
from transformer_jax.errors import DataError


def write(folder: pathlib.Path, name: str, *lines: str | bytes) -> None:
    packed = [x.encode() if isinstance(x, str) else x for x in lines]
    content = b"".join(line + b"\n" for line in packed)
    path = folder / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)


def write_pairs(folder: pathlib.Path, split: str, *pairs: tuple[str, str]) -> None:
    for side, column in zip(("en", "de"), zip(*pairs, strict=True), strict=True):
        write(folder, f"{split}.{side}", *column)


def examine(folder: pathlib.Path, *overrides: str, **fields: object) -> dict[str, Any]:
    """Examines the corpus in `folder` and leaves all of it as it was."""
    config = config_file.load(tiny.write_config(folder, **fields), overrides)
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    report = doctor.check(config, folder / "run")
    assert before == {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    findings.as_text(report)
    return json.loads(json.dumps(report))


def found(report: dict[str, Any], split: str = "train") -> dict[str, Any]:
    """Returns {kind and file: (count, lines, notes)} of a split."""
    return {
        f"{f['kind']} {pathlib.Path(f['file']).name}": (
            f["count"],
            f["lines"],
            f["notes"],
        )
        for f in report["splits"][split]["findings"]
    }


def only(report: dict[str, Any], split: str, kind: str) -> Any:
    """Returns count, lines and notes of the one finding of a kind."""
    values = found(report, split).items()
    (value,) = [value for name, value in values if name.split()[0] == kind]
    return value


@pytest.fixture
def corpus(tmp_path) -> pathlib.Path:
    tiny.write_corpus(tmp_path)
    return tmp_path


PLAIN = [("a b", "B A"), ("c", "C"), ("d e f", "F E D")]


def test_a_sound_corpus(corpus):
    write_pairs(corpus, "train", *PLAIN)
    write_pairs(corpus, "valid", ("h", "H"))
    write_pairs(corpus, "test", ("g", "G"))
    report = examine(corpus)
    assert report["vocabulary"] is None and list(report["splits"]) == [
        "train", "valid", "test",
    ]  # fmt: skip
    train = report["splits"]["train"]
    assert not train["findings"] and not train["stops"]
    assert train["counts"] == {"pairs": 3, "usable": 3, "empty": 0, "too_long": 0}
    assert [f["lines"] for f in train["files"]] == [3]
    assert train["lengths"]["source words"] == {
        "lines": [0, 1, 2], "total": 6, "longest": 3,
    }  # fmt: skip
    assert train["lengths"]["target characters"] == {
        "lines": [0, 1, 1, 1], "total": 9, "longest": 5,
    }  # fmt: skip
    assert findings.stops(report) == ""
    shown = findings.as_text(report)  # all that was looked for is named
    assert all(wording in shown for wording in findings.KINDS.values())


@pytest.mark.parametrize("chunk", [1, 2, 1000])
def test_characters(corpus, monkeypatch, chunk):
    monkeypatch.setattr(doctor, "CHUNK", chunk)
    write(
        corpus,
        "train.en",
        b"\xef\xbb\xbfa\r", "b\ufeff", "c\rd\r", "d\0\0e", "e\u0085f", "f\u2028g",
        "g\u2029h", "h\vi", "i\fj", "j\tk", "k\x1cl", "l\x9fm", "m\x7f", "n\x0eo",
        "\t", "\u00a0 \u3000", "\u200b", "o",
    )  # fmt: skip
    write(corpus, "train.de", *[f"{i}" for i in range(17)], "x\0")
    report = examine(corpus)
    assert found(report) == {
        "white train.en": (3, [15, 16, 17], []),
        "bom train.en": (1, [1], []),
        "inner_bom train.en": (1, [2], []),
        "cr_end train.en": (2, [1, 3], []),
        "cr train.en": (1, [3], []),
        "nul train.en": (1, [4], []),
        "nul train.de": (1, [18], []),
        "separator train.en": (5, [5, 6, 7, 8, 9], []),
        "tab train.en": (2, [10, 15], []),
        "control train.en": (4, [11, 12, 13, 14], []),
    }
    assert report["splits"]["train"]["counts"]["usable"] == 18
    assert findings.stops(report) == ""


def test_a_table_of_millions_keeps_its_columns():
    every = findings.Lengths()
    every.add([3] * 5)
    every.lines[2] *= 3_000_000
    split = {
        "counts": {
            "pairs": 15_000_000,
            "usable": 15_000_000,
            "empty": 0,
            "too_long": 0,
        },
        "files": [],
        "lengths": {"source words": {**vars(every), "lines": [*every.lines] * 2}},
        "findings": [],
        "stops": [],
    }
    shown = findings.as_text({"vocabulary": None, "splits": {"train": split}})
    (row,) = [line for line in shown.splitlines() if "source words" in line]
    assert row.split()[2:8] == [".", ".", "15,000,000", ".", ".", "15,000,000"]


def test_left_out_pairs(corpus):
    long = "a " * 31
    pairs = [("a", ""), *PLAIN, ("  ", "B"), (long, "C"), (long + "b", "D"), ("", "")]
    write_pairs(corpus, "train", *pairs, ("\u2581 ", "E"))
    write_pairs(corpus, "valid", ("", "E"), ("x", long + "b"), ("a", "A"))
    report = examine(corpus)
    assert only(report, "train", "empty") == (4, [1, 5, 8, 9], [])
    assert only(report, "train", "too_long") == (1, [7], [])  # 32 words, and the end
    counts = {"pairs": 9, "usable": 4, "empty": 4, "too_long": 1}
    assert report["splits"]["train"]["counts"] == counts
    assert only(report, "valid", "empty") == (1, [1], [])
    assert only(report, "valid", "too_long") == (1, [2], [])
    assert findings.stops(report) == ""
    shown = findings.as_text(report)
    assert "left out: 4 empty, 1 too long" in shown
    assert "kept all the same: 1 empty, 1 too long" in shown


def test_with_a_vocabulary_lengths_are_those_of_training(corpus):
    config = tiny.write_config(corpus)
    workdir, first = corpus / "run", corpus / "first"
    flags = ["prepare", f"--config={config}"]
    assert tiny.run(*flags, f"--workdir={first}") == 0
    pairs = [*tiny.sentences(60, 0), ("", "A"), ("😀" * 7, "B"), ("😀" * 8, "C")]
    write_pairs(corpus, "train", *pairs)
    flags += [f"--config.tokenizer.model_path={first / 'tokenizer.model'}"]
    assert tiny.run(*flags, f"--workdir={workdir}") == 0
    report = examine(corpus)
    assert report["vocabulary"] == str(workdir / "tokenizer.model")
    (manifest,) = workdir.glob("data/train-*/manifest.json")
    counts = json.loads(manifest.read_text())["counts"]
    assert report["splits"]["train"]["counts"] == {
        "pairs": counts["read"],
        "usable": counts["kept"],
        "empty": counts["empty"],
        "too_long": counts["too_long"],
    }
    assert only(report, "train", "too_long") == (1, [63], [])
    # at most one piece a byte, and the blank before the first
    assert report["splits"]["train"]["lengths"]["source pieces"]["longest"] == 33
    given = f"--config.tokenizer.model_path={workdir / 'tokenizer.model'}"
    other = doctor.check(config_file.load(config, [given]), corpus / "none")
    assert other["splits"] == report["splits"]
    with pytest.raises(DataError, match="nowhere"):
        nowhere = "--config.tokenizer.model_path=/nowhere/x.model"
        doctor.check(config_file.load(config, [nowhere]), corpus)


def test_copies(corpus):
    pairs = [
        ("a", "A"), ("b", "B"), ("a", "A"), ("a", "X"), ("", "B"), ("", "B"),
        ("a", "X"), ("b", "B"), ("c", "B"), ("a", "Y"), ("same", " same"),
    ]  # fmt: skip
    write_pairs(corpus, "train", *pairs)
    write_pairs(corpus, "valid", ("b", "B"), ("a", "Z"), ("z", "A"), ("b", "B"))
    write_pairs(corpus, "test", ("", "B"), ("q", "Q"))
    report = examine(corpus)
    train = found(report)
    copies = ["line 1", "line 4", "line 2"]
    assert train["copy train.en"] == (3, [3, 7, 8], copies)
    assert train["other_target train.en"] == (2, [4, 10], ["line 1", "line 1"])
    assert train["untranslated train.en"] == (1, [11], [])
    name = corpus / "train.en"
    valid = found(report, "valid")
    assert valid["in_train valid.en"] == (2, [1, 4], [f"{name} line 2"] * 2)
    assert valid["source_in_train valid.en"] == (1, [2], [f"{name} line 1"])
    assert valid["copy valid.en"] == (1, [4], ["line 1"])
    assert list(found(report, "test")) == ["empty test.en"]


def test_several_files_and_many_lines(corpus):
    write_pairs(corpus, "train", ("a", "A"), ("b", "B"))
    write(corpus, "more.en.gz", "c", *["b"] * 12)
    write(corpus, "more.de.gz", "C", *["B"] * 12)
    both = {
        f"data__train_{side}": f"{corpus}/train.{lang},{corpus}/more.{lang}.gz"
        for side, lang in (("source", "en"), ("target", "de"))
    }
    report = examine(corpus, **both)
    count, lines, notes = only(report, "train", "copy")
    assert count == 12 and lines == list(range(2, 12)) == [*range(2, 12)]
    assert notes == [f"{corpus / 'train.en'} line 2"] * 10
    assert [f["lines"] for f in report["splits"]["train"]["files"]] == [2, 13]
    assert "more.en.gz: 2 (" in findings.as_text(report)
    assert ", ...\n" in findings.as_text(report)


def test_lengths_far_apart(corpus):
    plain = [("word " * 8, f"{'wort ' * 8}{i}") for i in range(40)]
    odd = [("a", "b" * 18), ("a", "b" * 40), ("word " * 12, "ja")]
    write_pairs(corpus, "train", *plain, *odd)
    report = examine(corpus)
    notes = ["1 and 40 characters", "60 and 2 characters"]
    assert only(report, "train", "far_lengths") == (2, [42, 43], notes)


def test_not_utf8_goes_on_and_would_stop_a_run(corpus, capsys):
    write(corpus, "train.en", b"\xef\xbb\xbfa", b"b \xe9 c", "d", b"\xff", "e")
    write(corpus, "train.de", "A", "B", "C", "D\0", b"\xc3")
    report = examine(corpus)
    invalid = found(report)
    assert invalid["not_utf8 train.en"] == (2, [2, 4], ["byte 7", "byte 13"])
    assert invalid["not_utf8 train.de"] == (1, [5], ["byte 9"])
    assert invalid["nul train.de"] == (1, [4], [])
    assert report["splits"]["train"]["counts"]["pairs"] == 5
    stops = report["splits"]["train"]["stops"]
    assert len(stops) == 2  # the first of each file, in the words of training
    for path, stop in zip(("en", "de"), stops, strict=True):
        with pytest.raises(DataError) as error:
            name = str(corpus / f"train.{path}")
            list(Cleaner(DataConfig(), "train").read(name))
        assert stop == str(error.value)
    config = f"--config={corpus / 'config.py'}"
    flags = ["prepare", config, f"--workdir={corpus / 'run'}", "--check"]
    assert tiny.run(*flags) == 2
    captured = capsys.readouterr()
    assert captured.err == f"transformer-jax: {stops[0]} (and 1 more reasons)\n"
    assert "2  not UTF-8" in captured.out and "stops a training run" in captured.out
    assert not (corpus / "run").exists()


def test_unequal_counts(corpus):
    write(corpus, "valid.en", "a", "b", "c")
    write(corpus, "valid.de", "A", "B", "C", "D\0")
    report = examine(corpus)
    files = report["splits"]["valid"]["files"]
    assert [(f["lines"], f["target_lines"]) for f in files] == [(3, 4)]
    assert report["splits"]["valid"]["counts"]["pairs"] == 3
    assert only(report, "valid", "nul") == (1, [4], [])
    fields = {
        f"train_{side}": str(corpus / f"valid.{lang}")
        for side, lang in (("source", "en"), ("target", "de"))
    }
    with pytest.raises(DataError) as error:
        corpora.read_pairs(DataConfig(**fields), "train")
    assert report["splits"]["valid"]["stops"] == [str(error.value)]


@pytest.mark.parametrize("name", ["missing", "cut", "empty", "folder"])
def test_unreadable_files_do_not_hide_the_rest(corpus, name):
    fields = {}
    if name == "missing":
        (corpus / "train.de").unlink()
    elif name == "cut":
        packed = gzip.compress((corpus / "train.de").read_bytes())
        (corpus / "train.de.gz").write_bytes(packed[:-9])
        fields["data__train_target"] = str(corpus / "train.de.gz")
    elif name == "folder":
        fields["data__train_target"] = str(corpus)
    else:
        for side in ("en", "de"):
            write(corpus, f"train.{side}")
    write_pairs(corpus, "test", ("a\0", "A"))
    report = examine(corpus, **fields)
    (stop,) = report["splits"]["train"]["stops"]
    assert ("no usable pairs" if name == "empty" else "train.de") in stop or (
        name == "folder" and str(corpus) in stop
    )
    assert report["splits"]["valid"]["counts"]["pairs"] == 7
    assert only(report, "test", "nul") == (1, [1], [])


def test_command(corpus, capsys):
    config = tiny.write_config(corpus)
    flags = ["prepare", f"--config={config}", f"--workdir={corpus / 'run'}"]
    assert tiny.run(*flags, "--check") == 0
    captured = capsys.readouterr()
    assert "train  60 pairs, 60 usable" in captured.out and not captured.err
    assert tiny.run(*flags, "--check", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["splits"]["test"]["counts"]["pairs"] == 9
    assert not (corpus / "run").exists()
    assert tiny.run(*flags, "--json") == 2
    assert "--check" in capsys.readouterr().err


def test_a_corpus_without_files(corpus):
    report = examine(corpus, data__corpus="phrases")
    assert report["splits"]["train"]["counts"]["pairs"] > 1000
    assert not report["splits"]["train"]["stops"]
    assert "in_train test" not in found(report, "test")
