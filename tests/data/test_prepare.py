"""Preparation: ids that are the text, found again, never half, bound to the run."""

import dataclasses
import hashlib
import json
import pathlib
import shutil

import numpy as np
import pytest
import tiny

from transformer_jax import config_check, config_file
from transformer_jax.data import corpora, workers
from transformer_jax.data import prepare as preparing
from transformer_jax.data.prepare import open_split, prepare
from transformer_jax.data.tokenized import TokenizedCorpus
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.errors import ConfigError, DataError


def run(path: str, workdir: pathlib.Path, *overrides: str) -> list[str]:
    """Prepares; returns what was made, a line each."""
    made: list[str] = []
    prepare(config_file.load(path, overrides), workdir, made.append)
    return made


ALL = ["training the vocabulary", "tokenising train", "tokenising valid"]
ALL = [*ALL, "tokenising test"]


def test_ids_are_the_text(tmp_path):
    path = tiny.write_config(tmp_path)
    prepared = prepare(config_file.load(path), tmp_path / "run", print)
    pairs = tiny.sentences(60, 0)
    train = prepared.splits["train"]
    assert len(train) == 60
    for i, (source, target) in enumerate(pairs):
        assert prepared.vocabularies.source.decode(train.source[i].tolist()) == source
        assert prepared.vocabularies.target.decode(train.target[i].tolist()) == target
    lengths = [[len(train.source[i]) + 1, len(train.target[i]) + 1] for i in range(60)]
    np.testing.assert_array_equal(train.lengths(), lengths)
    assert isinstance(train.source.ids, np.memmap)
    valid = prepared.splits["valid"].text()
    assert list(zip(*valid, strict=True)) == tiny.sentences(7, 1)


def test_direction(tmp_path):
    path = tiny.write_config(
        tmp_path, data__corpus="phrases", tokenizer__vocab_size=400
    )
    english = prepare(config_file.load(path), tmp_path / "en", print)
    turned = ["--config.data.source_lang=de", "--config.data.target_lang=en"]
    german = prepare(config_file.load(path, turned), tmp_path / "de", print)
    there, back = english.splits["test"].text(), german.splits["test"].text()
    assert there == back[::-1] and there[0] != there[1]


def test_found_again_by_itself_and_by_another_run(tmp_path):
    cache = f"--config.data.cache_dir={tmp_path / 'cache'}"
    path = tiny.write_config(tmp_path)
    assert run(path, tmp_path / "one", cache) == ALL
    assert run(path, tmp_path / "one", cache) == []
    assert run(path, tmp_path / "two", cache) == ALL[:1]
    assert run(path, tmp_path / "three") == ALL
    # other settings are other data
    other = run(path, tmp_path / "four", cache, "--config.model.max_length=31")
    assert other == ["training the vocabulary", "tokenising train"]
    other = run(path, tmp_path / "five", cache, "--config.tokenizer.vocab_size=280")
    assert other == ALL


def test_moved_or_touched_files_are_the_same_data(tmp_path):
    path = tiny.write_config(tmp_path / "corpus")
    assert run(path, tmp_path / "run") == ALL
    shutil.copytree(tmp_path / "corpus", tmp_path / "moved")
    again = tiny.write_config(tmp_path / "moved")
    assert run(again, tmp_path / "run") == []


def test_changed_files_are_other_data(tmp_path):
    path = tiny.write_config(tmp_path)
    assert run(path, tmp_path / "run") == ALL
    source = tmp_path / "train.en"
    source.write_text(source.read_text().replace("a", "h"))
    assert run(path, tmp_path / "run") == ALL
    assert run(path, tmp_path / "run") == []


def test_half_written_work_is_not_taken_for_whole(tmp_path):
    path = tiny.write_config(tmp_path)
    run(path, tmp_path / "run")
    (train,) = (tmp_path / "run" / "data").glob("train-*")
    train.rename(train.with_name(train.name + ".partial"))
    (train.with_name(train.name + ".partial") / "manifest.json").unlink()
    assert run(path, tmp_path / "run") == ["tokenising train"]
    assert len(TokenizedCorpus(train)) == 60


@pytest.mark.parametrize("writes", range(4))
def test_a_vocabulary_never_stands_for_another_recipe(tmp_path, monkeypatch, writes):
    """Ends a preparation after so many writes; then the first config comes back."""
    path, workdir = tiny.write_config(tmp_path), tmp_path / "run"
    run(path, workdir)
    first = (workdir / "tokenizer.model").read_bytes()
    left, write = writes, preparing._write_atomically

    def stop_or_write(file: pathlib.Path, content: bytes) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        write(file, content)

    other = "--config.tokenizer.vocab_size=280"
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(preparing, "_write_atomically", stop_or_write)
        run(path, workdir, other)
    made = run(path, workdir)
    assert made == (ALL[:1] if writes else [])
    assert (workdir / "tokenizer.model").read_bytes() == first
    assert Tokenizer.load(workdir / "tokenizer.model").vocab_size == 290


def test_a_vocabulary_is_not_made_twice(tmp_path, monkeypatch):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    path = tiny.write_config(tmp_path)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(preparing, "write_split", stop)
        run(path, tmp_path / "run")
    assert run(path, tmp_path / "run") == ALL[1:]
    assert run(path, tmp_path / "run") == []


def test_left_out_pairs_are_counted(tmp_path):
    tiny.write_corpus(tmp_path)
    for side, extra in (("en", "\na\n" + "b " * 40 + "\n"), ("de", "A\n\nB\n")):
        file = tmp_path / f"train.{side}"
        file.write_text(extra + file.read_text())
    path = tiny.write_config(tmp_path)
    run(path, tmp_path / "run")
    corpus = open_split(tmp_path / "run", "train")
    counts = {"read": 63, "kept": 60, "empty": 2, "too_long": 1}
    assert corpus.manifest["counts"] == counts
    assert corpus.lengths().max() <= 32


EXTRA = {"train": [("a ж b", "B A")], "test": [("a 😀", "Я жж A")], "valid": []}
ALL_PAIRS = {
    split: tiny.sentences(count, seed) + EXTRA[split]
    for seed, (split, count) in enumerate({"train": 60, "valid": 7, "test": 9}.items())
}


def with_rare_letters(folder: pathlib.Path) -> None:
    """Writes the corpus with one rare letter in train and three in test."""
    tiny.write_corpus(folder)
    for split, pairs in EXTRA.items():
        for side, lines in zip(("en", "de"), zip(*pairs, strict=True), strict=False):
            with (folder / f"{split}.{side}").open("a", encoding="utf-8") as file:
                file.write("".join(line + "\n" for line in lines))


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
@pytest.mark.parametrize("byte_fallback", [True, False])
def test_unknown_pieces_and_bytes_are_counted(
    tmp_path, capsys, monkeypatch, model_type, byte_fallback
):
    monkeypatch.setattr(workers, "CHUNK", 7)
    with_rare_letters(tmp_path)
    path = tiny.write_config(
        tmp_path,
        tokenizer__model_type=model_type,
        tokenizer__byte_fallback=byte_fallback,
        tokenizer__vocab_size=2000,
        tokenizer__hard_vocab_limit=False,
        tokenizer__character_coverage=0.998,
    )
    workdir = tmp_path / "run"
    assert tiny.run("prepare", f"--config={path}", f"--workdir={workdir}") == 0
    err = capsys.readouterr().err
    kind, other = ("bytes", "unknown") if byte_fallback else ("unknown", "bytes")
    expected = {  # ж and Я have two bytes, 😀 four; two unknown in a row are one
        "train": {"source": 2 if byte_fallback else 1, "target": 0},
        "valid": {"source": 0, "target": 0},
        "test": {
            "source": 4 if byte_fallback else 1,
            "target": 6 if byte_fallback else 2,
        },
    }
    spelled_out = {"train": (1, 0), "valid": (0, 0), "test": (1, 3)}  # ж, 😀, Я, ...
    vocabulary = Tokenizer.load(workdir / "tokenizer.model")
    for split, sides in expected.items():
        corpus = open_split(workdir, split)
        for side, count in sides.items():
            ids = getattr(corpus, side).ids
            counts = {"all": len(ids), kind: count, other: 0}
            assert corpus.manifest["pieces"][side] == counts
            share = f"{count} ({count / len(ids):.2%})" if count else "0"
            assert f"{side} {len(ids)} pieces" in corpus.spelling()
            assert f"{share} {kind}" in corpus.spelling()
            # Every piece of the corpus is one of the vocabulary.
            assert ids.max() < vocabulary.vocab_size
            assert len(vocabulary.pieces(ids.tolist())) == len(ids)
        assert corpus.spelling() in err
        texts = list(zip(*ALL_PAIRS[split], strict=True))
        for side, lines, count in zip(sides, texts, spelled_out[split], strict=True):
            total = len("".join(lines).replace(" ", ""))
            characters = {"all": total, "covered": total - count}
            assert corpus.manifest["characters"][side] == characters
        assert ("coverage 100%" in corpus.spelling()) == (split != "test")
    assert f"vocabulary  {vocabulary.vocab_size} pieces, 2,000 asked for" in err


def test_a_corpus_whose_pieces_were_not_counted_is_used_as_it_is(tmp_path, capsys):
    path = tiny.write_config(tmp_path)
    run(path, tmp_path / "run")
    for file in (tmp_path / "run" / "data").glob("*/manifest.json"):
        manifest = json.loads(file.read_text())
        del manifest["pieces"]
        file.write_text(json.dumps(manifest))
    assert open_split(tmp_path / "run", "test").spelling() == ""
    verb = ("prepare", f"--config={path}", f"--workdir={tmp_path / 'run'}")
    assert tiny.run(*verb) == 0
    err = capsys.readouterr().err
    assert "unknown" not in err and "tokenising" not in err


def test_a_run_from_before_a_field_was_added_goes_on(trained, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(trained, workdir)
    values = json.loads((workdir / "config.json").read_text())
    for name, value in preparing.ADDED.items():
        assert values["tokenizer"].pop(name) == value
    (workdir / "config.json").write_text(json.dumps(values))
    path = str(trained.parent / "corpus" / "config.py")
    config = config_file.load(path)
    settings = dataclasses.asdict(config.tokenizer)
    for name in ("hard_vocab_limit", "joint", "lowercase", "source_vocab_size"):
        del settings[name]
    corpus = corpora.fingerprint(config.data, "train")
    made_of = json.dumps([corpus, settings, config.train.seed], sort_keys=True)
    recorded = json.loads((workdir / "data.json").read_text())["tokenizer"]
    assert recorded == hashlib.sha256(made_of.encode()).hexdigest()
    assert run(path, workdir) == []
    soft = "--config.tokenizer.hard_vocab_limit=false"
    with pytest.raises(ConfigError, match="hard_vocab_limit: True -> False"):
        run(path, workdir, soft)


def test_a_run_keeps_its_vocabulary_whatever_the_sample(trained, tmp_path):
    """The default of `train_lines` was 5 million once."""
    workdir = tmp_path / "run"
    shutil.copytree(trained, workdir)
    values = json.loads((workdir / "config.json").read_text())
    values["tokenizer"]["train_lines"] = 5_000_000
    old = config_check.from_dict(values)
    (workdir / "config.json").write_text(old.to_json())
    record = json.loads((workdir / "data.json").read_text())
    settings = dataclasses.asdict(old.tokenizer)
    for name in ("hard_vocab_limit", "joint", "lowercase", "source_vocab_size"):
        del settings[name]
    corpus = corpora.fingerprint(old.data, "train")
    made_of = json.dumps([corpus, settings, old.train.seed], sort_keys=True)
    record["tokenizer"] = hashlib.sha256(made_of.encode()).hexdigest()
    (workdir / "data.json").write_text(json.dumps(record))
    model = (workdir / "tokenizer.model").read_bytes()
    path = str(trained.parent / "corpus" / "config.py")
    for _ in range(2):
        (said,) = run(path, workdir)
        assert "train_lines = 5000000" in said and "stays that of the run" in said
        assert (workdir / "tokenizer.model").read_bytes() == model
        assert config_file.read_workdir(workdir).tokenizer.train_lines == 5_000_000
    assert run(path, workdir, "--config.tokenizer.train_lines=5000000") == []


def test_before_the_first_checkpoint_all_may_change(tmp_path):
    path = tiny.write_config(tmp_path)
    with pytest.raises(DataError, match="vocab_size"):
        run(path, tmp_path / "run", "--config.tokenizer.vocab_size=9999")
    assert run(path, tmp_path / "run") == ALL
    assert run(path, tmp_path / "run", "--config.tokenizer.vocab_size=280") == ALL
    # the first vocabulary again, and a split once made is found again
    assert run(path, tmp_path / "run", "--config.model.d_ff=48") == ALL[:1]
    saved = config_file.read_workdir(tmp_path / "run")
    assert saved.model.d_ff == 48


def test_after_it_nothing_may(trained, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(trained, workdir)
    path = str(trained.parent / "corpus" / "config.py")
    assert run(path, workdir) == []
    with pytest.raises(ConfigError, match="vocab_size: 290 -> 280"):
        run(path, workdir, "--config.tokenizer.vocab_size=280")
    record = json.loads((workdir / "data.json").read_text())
    record["tokenizer"] = "another"
    (workdir / "data.json").write_text(json.dumps(record))
    with pytest.raises(DataError, match="not those this run began with"):
        run(path, workdir)


def test_a_run_can_be_moved(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    assert open_split(tmp_path / "run", "test").folder.parent.parent == tmp_path / "run"
    with pytest.raises(DataError, match="has no split 'dev'; there are: train, valid"):
        open_split(tmp_path / "run", "dev")


def test_an_existing_model_is_used_as_it_is(trained, tmp_path):
    path = tiny.write_config(tmp_path)
    model = f"--config.tokenizer.model_path={trained / 'tokenizer.model'}"
    assert run(path, tmp_path / "run", model) == ALL[1:]
    given = (trained / "tokenizer.model").read_bytes()
    assert (tmp_path / "run" / "tokenizer.model").read_bytes() == given
    missing = "--config.tokenizer.model_path=/nowhere/x.model"
    with pytest.raises(DataError, match=r"/nowhere/x\.model"):
        run(path, tmp_path / "other", missing)
