"""Lines that are no clean text: refused, left out, replaced or cleaned; and counted."""

import json
import pathlib
import re
import unicodedata

import pytest
import tiny
from texts import one_line, write

from transformer_jax import config_check, config_file
from transformer_jax.config import DataConfig
from transformer_jax.data import corpora, doctor, findings
from transformer_jax.data.cleaning import Cleaner
from transformer_jax.data.prepare import open_split, prepare
from transformer_jax.errors import ConfigError, DataError

SOURCE = b"one\ntw\xe9o\nthree\nfo\xffur \xe2\x82\nfive\r\nsix"
TARGET = b"eins\nzwei\n\xc3\nvi\xe9r\nf\0nf\nsechs\n"


def read(folder: pathlib.Path, split: str, **rules: str) -> corpora.Pairs:
    files = {
        f"{split}_source": write(folder / "a.en", SOURCE),
        f"{split}_target": write(folder / "a.de", TARGET),
    }
    return corpora.read_pairs(DataConfig(**files, **rules), split)


def replaced() -> list[tuple[str, str]]:
    sides = (x.decode("utf-8", "replace").split("\n") for x in (SOURCE, TARGET))
    pairs = list(zip(*sides, strict=False))
    return [(source.removesuffix("\r"), target) for source, target in pairs]


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_invalid_utf8_is_an_error_that_names_the_options(tmp_path, split):
    pairs = read(tmp_path, split)
    assert next(pairs) == ("one", "eins")
    with pytest.raises(DataError) as error:
        next(pairs)
    message = one_line(error)
    assert f"{tmp_path}/a.en is not UTF-8: line 2, byte offset 6" in message
    assert "0xE9" in message
    assert "config.data.invalid_utf8 to skip or replace" in message


def test_skipped_pairs_are_those_with_a_broken_side(tmp_path):
    pairs = read(tmp_path, "train", invalid_utf8="skip")
    assert list(pairs) == [replaced()[i] for i in (0, 4, 5)]
    assert pairs.cleaner.skipped == 3  # line 4 is broken on both sides
    assert pairs.cleaner.found() == {"not_utf8": 4, "nul": 1}


@pytest.mark.parametrize(
    ("split", "rule"),
    [("train", "replace"), ("valid", "replace"), ("valid", "skip"), ("test", "skip")],
)
def test_nothing_but_training_pairs_is_ever_left_out(tmp_path, split, rule):
    pairs = read(tmp_path, split, invalid_utf8=rule)
    assert list(pairs) == replaced()
    assert pairs.cleaner.skipped == 0
    assert pairs.cleaner.found() == {"not_utf8": 4, "nul": 1}


def test_control_characters_are_those_of_unicode():
    cleaner = Cleaner(DataConfig(control="remove"), "train")
    for code in range(0x3000):
        text, kept = f"a{chr(code)}b", chr(code)
        if unicodedata.category(chr(code)) == "Cc" and chr(code) != "\t":
            kept = " " if chr(code).isspace() else ""
        assert cleaner.decode(text.encode(), "file", 1) == f"a{kept}b", hex(code)
    assert cleaner.found() == {"nul": 1, "removed": 64}
    for config, split in (
        (DataConfig(control="remove"), "valid"),
        (DataConfig(control="remove"), "test"),
        (DataConfig(), "train"),
    ):
        keeper = Cleaner(config, split)
        assert keeper.decode(b"a\0\x01b\r", "file", 1) == "a\0\x01b\r"
        assert keeper.found() == {"nul": 1}


def test_rules_make_other_data_and_the_default_does_not(tmp_path):
    def fingerprint(split: str = "train", **rules: str) -> str:
        config = read_config(tmp_path, **rules)
        return json.dumps(corpora.fingerprint(config, split))

    plain = fingerprint()
    assert "invalid" not in plain and "control" not in plain  # as older runs have it
    others = [
        fingerprint(invalid_utf8="skip"),
        fingerprint(invalid_utf8="replace"),
        fingerprint(control="remove"),
        fingerprint(invalid_utf8="skip", control="remove"),
    ]
    assert len({plain, *others}) == 5
    skip, replace = (fingerprint("valid", invalid_utf8=x) for x in ("skip", "replace"))
    assert skip == replace != fingerprint("valid")
    assert fingerprint("valid") == fingerprint("valid", control="remove")


def read_config(folder: pathlib.Path, **rules: str) -> DataConfig:
    names = {
        "source": write(folder / "b.en", b"a"),
        "target": write(folder / "b.de", b"b"),
    }
    files = {
        f"{split}_{side}": n
        for split in ("train", "valid")
        for side, n in names.items()
    }
    return DataConfig(**files, **rules)


@pytest.mark.parametrize(
    ("field", "there"),
    [("invalid_utf8", "error, skip, replace"), ("control", "keep, remove")],
)
def test_unknown_rules_are_errors(field, there):
    with pytest.raises(
        ConfigError, match=f"config.data.{field} is 'x'; there are: {there}"
    ):
        config_check.from_dict({"data": {field: "x"}})


# --- A whole preparation ----------------------------------------------------------


def dirty(folder: pathlib.Path, **fields: object) -> str:
    """Writes a corpus with NUL, a broken line, and one of nothing but controls."""
    tiny.write_corpus(folder)
    for name, broken in (("train.en", b"a \xe9 b"), ("valid.de", b"\xff")):
        lines = (folder / name).read_bytes().split(b"\n")
        if name == "train.en":
            lines[2] += b"\0\0 c\x01"
            lines[4] += b"\0"
            lines[8] = b"\x02 \x03"
        lines[6] = broken
        (folder / name).write_bytes(b"\n".join(lines))
    return tiny.write_config(folder, **fields)


def say(path: str, workdir: pathlib.Path, *overrides: str) -> list[str]:
    said: list[str] = []
    prepare(config_file.load(path, overrides), workdir, said.append)
    return [line for line in said if not re.match("train|tokenis", line)]


def test_nul_is_warned_of_once_and_trains(tmp_path):
    path = dirty(tmp_path, data__invalid_utf8="replace")
    said = say(path, tmp_path / "run")
    assert len(said) == 1 and said[0].startswith("warning: 2 lines hold NUL")
    assert f"the first is {tmp_path}/train.en line 3;" in said[0]
    assert "config.data.control" in said[0]
    train, valid = (open_split(tmp_path / "run", x) for x in ("train", "valid"))
    assert train.manifest["counts"]["kept"] == 60
    assert train.manifest["unclean"] == {"not_utf8": 1, "nul": 2}
    assert train.unclean() == "1 lines not UTF-8, 2 lines with NUL"
    assert valid.manifest["unclean"] == {"not_utf8": 1}
    assert valid.text()[1][6] == "\ufffd"
    assert say(path, tmp_path / "run") == []


def test_what_is_cleaned_and_left_out_is_counted(tmp_path, capsys):
    path = dirty(tmp_path, data__invalid_utf8="skip", data__control="remove")
    assert say(path, tmp_path / "run") == []
    prepared = prepare(config_file.load(path), tmp_path / "run", print)
    train = prepared.splits["train"]
    counts = {"read": 60, "kept": 58, "empty": 1, "too_long": 0, "not_utf8": 1}
    assert train.manifest["counts"] == counts
    assert train.manifest["unclean"] == {"not_utf8": 1, "nul": 2, "removed": 3}
    clean = tiny.sentences(60, 0)
    clean[2] = f"{clean[2][0]} c", clean[2][1]
    del clean[8], clean[6]
    texts = [
        prepared.vocabularies.source.decode(train.source[i].tolist()) for i in range(58)
    ]
    assert texts == [source for source, _ in clean]
    assert len(prepared.splits["valid"]) == 7
    assert tiny.run("prepare", f"--config={path}", f"--workdir={tmp_path / 'run'}") == 0
    shown = capsys.readouterr().err
    assert "60 read, 58 kept, 1 empty, 0 too_long, 1 not_utf8" in shown
    assert "3 lines with control characters removed" in shown


@pytest.mark.parametrize("rule", ["skip", "replace"])
def test_the_doctor_knows_the_rules(tmp_path, rule):
    path = dirty(tmp_path, data__invalid_utf8=rule, data__control="remove")
    say(path, tmp_path / "run")
    report = doctor.check(config_file.load(path), tmp_path / "run")
    assert findings.stops(report) == ""
    examined = report["splits"]["train"]
    made = open_split(tmp_path / "run", "train").manifest["counts"]
    assert examined["counts"]["usable"] == made["kept"] == 59 - (rule == "skip")
    assert examined["counts"].get("not_utf8", 0) == (rule == "skip")
    found = {f["kind"]: (f["count"], f["lines"]) for f in examined["findings"]}
    del found["copy"]  # of such short sentences
    assert found == {
        "not_utf8": (1, [7]),
        "nul": (2, [3, 5]),
        "control": (2, [3, 9]),
        "empty": (1, [9]),
    }
    assert report["splits"]["valid"]["counts"]["pairs"] == 7
    shown = findings.as_text(report)
    assert ("0 too long, 1 not UTF-8" in shown) == (rule == "skip")
