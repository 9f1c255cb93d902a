"""Corpora of text and phrases: what is read, in which direction, bad input."""

import dataclasses
import json
import os
import pathlib

import pytest
from texts import one_line, write

from transformer_jax.config import DataConfig
from transformer_jax.data import corpora, phrases
from transformer_jax.errors import ConfigError, DataError


@pytest.fixture
def text(tmp_path) -> DataConfig:
    write(tmp_path / "a.en", b"one\ntwo\n")
    write(tmp_path / "a.de", b"eins\r\nzwei")
    write(tmp_path / "b.en.gz", b"three\n")
    write(tmp_path / "b.de", "drei ü\n".encode())
    return DataConfig(
        root=str(tmp_path), train_source="a.en,b.en.gz", train_target="a.de, b.de"
    )


def test_text_pairs(text):
    assert list(corpora.read_pairs(text, "train")) == [
        ("one", "eins"),
        ("two", "zwei"),
        ("three", "drei ü"),
    ]
    assert corpora.has_split(text, "train")
    assert not corpora.has_split(text, "valid")
    valid = dataclasses.replace(text, valid_source="a.en", valid_target="a.de")
    assert corpora.has_split(valid, "valid")
    assert list(corpora.read_pairs(valid, "valid")) == [
        ("one", "eins"),
        ("two", "zwei"),
    ]


def test_empty_lines_and_files_stay(text):
    write(pathlib.Path(text.root, "a.en"), b"\nx\n")
    write(pathlib.Path(text.root, "b.en.gz"), b"")
    write(pathlib.Path(text.root, "b.de"), b"")
    assert list(corpora.read_pairs(text, "train")) == [("", "eins"), ("x", "zwei")]


def test_unequal_line_counts_come_before_any_pair(text):
    write(pathlib.Path(text.root, "b.de"), b"drei\nvier\nf\xfcnf")
    with pytest.raises(DataError) as error:
        corpora.read_pairs(text, "train")  # not even iterated
    message = one_line(error)
    assert f"{text.root}/b.en.gz has 1 lines" in message
    assert f"{text.root}/b.de has 3 lines" in message


def test_equal_totals_in_unequal_files_are_an_error(text):
    write(pathlib.Path(text.root, "a.de"), b"eins\n")
    write(pathlib.Path(text.root, "b.de"), b"zwei\ndrei\n")
    with pytest.raises(DataError, match=r"a\.en has 2 lines, but .*a\.de has 1 lines"):
        corpora.read_pairs(text, "train")


@pytest.mark.parametrize(
    ("changes", "split", "message"),
    [
        ({"train_source": "", "train_target": ""}, "train", "config.data.train_source"),
        ({"train_target": ""}, "train", "config.data.train_target"),
        ({"train_source": ""}, "train", "config.data.train_source"),
        ({"train_target": "a.de"}, "train", "config.data.train_target"),
        ({}, "valid", "config.data.valid_source"),
        ({"test_source": "a.en"}, "test", "config.data.test_target"),
        ({}, "dev", "train.*valid.*test"),
    ],
)
def test_missing_fields_are_named(text, changes, split, message):
    config = dataclasses.replace(text, **changes)
    for call in (corpora.read_pairs, corpora.fingerprint):
        with pytest.raises(ConfigError, match=message) as error:
            call(config, split)
        one_line(error)


def test_half_a_split_is_never_taken_for_none(text):
    config = dataclasses.replace(text, valid_source="a.en")
    with pytest.raises(ConfigError, match=r"config\.data\.valid_target names 0 files"):
        corpora.has_split(config, "valid")


@pytest.mark.parametrize("read", [corpora.read_pairs, corpora.fingerprint])
def test_missing_or_odd_corpus_file(text, read):
    missing = dataclasses.replace(text, train_source="a.en,none.en")
    with pytest.raises(DataError, match=r"none\.en cannot be read: No such file"):
        read(missing, "train")
    folder = dataclasses.replace(text, train_source="a.en,.")
    with pytest.raises(DataError, match="is a directory"):
        read(folder, "train")
    os.mkfifo(os.path.join(text.root, "pipe"))
    pipe = dataclasses.replace(text, train_source="a.en,pipe")
    with pytest.raises(DataError, match="pipe is a directory, a pipe or a device"):
        read(pipe, "train")  # and it does not wait for a writer


def test_text_fingerprint(text):
    first = corpora.fingerprint(text, "train")
    assert json.loads(json.dumps(first)) == first
    assert [[f["size"] for f in pair] for pair in first["files"]] == [
        [os.path.getsize(os.path.join(text.root, name)) for name in pair]
        for pair in (["a.en", "a.de"], ["b.en.gz", "b.de"])
    ]
    assert corpora.fingerprint(text, "train") == first
    os.utime(os.path.join(text.root, "b.de"), ns=(1, 1))
    assert corpora.fingerprint(text, "train") == first  # copied files are the same
    path = pathlib.Path(text.root, "b.de")
    content = path.read_bytes()
    path.write_bytes(content[:-2] + b"!\n")
    assert corpora.fingerprint(text, "train") != first
    path.write_bytes(content)
    assert corpora.fingerprint(text, "train") == first
    swapped = dataclasses.replace(
        text, train_source=text.train_target, train_target=text.train_source
    )
    assert corpora.fingerprint(swapped, "train") != corpora.fingerprint(text, "train")


# --- phrases --------------------------------------------------------------------


def test_phrases_in_both_directions(monkeypatch):
    table = {"train": [("the cat", "die Katze")], "valid": [("a", "ein")], "test": []}
    monkeypatch.setattr(phrases, "pairs", table.__getitem__)
    english = DataConfig(corpus="phrases", source_lang="en", target_lang="de")
    german = DataConfig(corpus="phrases", source_lang="de", target_lang="en")
    assert list(corpora.read_pairs(english, "train")) == [("the cat", "die Katze")]
    assert list(corpora.read_pairs(german, "train")) == [("die Katze", "the cat")]
    assert corpora.has_split(german, "test")
    prints = [
        corpora.fingerprint(config, split)
        for config in (english, german)
        for split in ("train", "valid")
    ]
    assert len({json.dumps(p) for p in prints}) == 4
    again = corpora.fingerprint(english, "train")
    table["train"] = [("the cat", "der Kater")]
    assert again == prints[0] != corpora.fingerprint(english, "train")


def test_the_real_phrases_start_in_english():
    config = DataConfig(corpus="phrases", source_lang="en", target_lang="de")
    pairs = list(corpora.read_pairs(config, "valid"))
    assert pairs == phrases.pairs("valid")
    assert sum("the" in source.lower().split() for source, _ in pairs) > 10
    assert not any("the" in target.lower().split() for _, target in pairs)


@pytest.mark.parametrize("field", ["source_lang", "target_lang"])
def test_phrases_have_two_languages(field):
    english = DataConfig(corpus="phrases", source_lang="en", target_lang="de")
    config = dataclasses.replace(english, **{field: "fr"})
    for call in (corpora.read_pairs, corpora.fingerprint):
        with pytest.raises(ConfigError, match=f"config.data.{field} is 'fr'"):
            call(config, "train")
