"""Corpora: what is read, in which direction, and what bad input answers."""

import dataclasses
import gzip
import http.server
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from transformer_jax.config import DataConfig
from transformer_jax.data import corpora, phrases, textfiles
from transformer_jax.errors import ConfigError, DataError

NAME = "wmt14_translate/de-en"


def one_line(error: pytest.ExceptionInfo[Exception]) -> str:
    message = str(error.value)
    assert message and "\n" not in message
    return message


def write(path: pathlib.Path, content: bytes) -> str:
    packed = gzip.compress(content) if path.name.endswith(".gz") else content
    path.write_bytes(packed)
    return str(path)


# --- read_lines -----------------------------------------------------------------

LINES = [
    (b"", []),
    (b"\xef\xbb\xbf", []),
    (b"\n", [""]),
    (b"\xef\xbb\xbf\n", [""]),
    (b"a\nb\n", ["a", "b"]),
    (b"a\nb", ["a", "b"]),
    (b"a\n\n", ["a", ""]),
    (b"a\r\nb\r\n", ["a", "b"]),
    (b"a\r\r\nb\rc\n", ["a\r", "b\rc"]),
    (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", ["a", "\ufeffb"]),
    (
        b"a\xc2\x85b\xe2\x80\xa8c\td\x00e\x0cf\x0bg\x1ch\n",
        ["a\x85b\u2028c\td\0e\ff\vg\x1ch"],
    ),
    (" Grüße \U0001f600 \n".encode(), [" Grüße \U0001f600 "]),
]


@pytest.mark.parametrize("name", ["t.txt", "t.gz"])
@pytest.mark.parametrize(("content", "expected"), LINES)
def test_lines_end_at_newlines_only(tmp_path, name, content, expected):
    path = write(tmp_path / name, content)
    assert list(corpora.read_lines(path)) == expected
    assert textfiles.count_lines(path) == len(expected)


def test_lines_and_counts_agree_across_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(textfiles, "_BLOCK", 3)  # every place of a block's border
    for shift in range(4):
        content = b"x" * shift + b"\nab\xef\xbb\xbf\n\n\xef\xbb\xbf"
        path = write(tmp_path / "t", content)
        assert textfiles.count_lines(path) == 4
        assert len(list(corpora.read_lines(path))) == 4


def test_lines_are_streamed(tmp_path):
    path = tmp_path / "t"
    path.write_bytes(b"first\n" + b"x\n" * 100_000 + b"\xff\n")
    lines = corpora.read_lines(str(path))
    assert next(lines) == "first"  # the fault at the end is not yet met


@pytest.mark.parametrize(
    ("content", "line", "offset", "byte"),
    [
        (b"ab\nc\xe9d\n", 2, 4, "0xE9"),
        (b"ab\r\nc\xe9", 2, 5, "0xE9"),
        (b"\xef\xbb\xbfab\nc\xe9d\n", 2, 7, "0xE9"),
        (b"\xef\xbb\xbfa\x80\n", 1, 4, "0x80"),
        (b"\xff\xfea\x00\n\x00", 1, 0, "0xFF"),  # UTF-16
        (b"a\n\n\xed\xa0\x80\n", 3, 3, "0xED"),  # a surrogate
        (b"a\n\xc3", 2, 2, "0xC3"),
    ],
)
@pytest.mark.parametrize("name", ["t.txt", "t.gz"])
def test_invalid_utf8_names_file_line_and_byte(
    tmp_path, name, content, line, offset, byte
):
    path = write(tmp_path / name, content)
    with pytest.raises(DataError) as error:
        list(corpora.read_lines(path))
    message = one_line(error)
    assert path in message and byte in message
    assert f"line {line}, byte offset {offset}:" in message


def test_missing_file_and_directory(tmp_path):
    for path, reason in (
        (tmp_path / "none.txt", "No such file"),
        (tmp_path / "none.gz", "No such file"),
        (tmp_path, "directory"),
    ):
        for read in (lambda p: list(corpora.read_lines(p)), textfiles.count_lines):
            with pytest.raises(DataError, match=reason) as error:
                read(str(path))
            assert str(path) in one_line(error)


def test_no_permission(tmp_path, monkeypatch):
    path = write(tmp_path / "t", b"a\n")

    def refuse(*_):
        raise PermissionError(13, "Permission denied", path)

    # Root may read all, so a mode of 0 would not fail in every place.
    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(DataError) as error:
        list(corpora.read_lines(path))
    assert f"{path} cannot be read: Permission denied" in one_line(error)


def test_broken_gzip(tmp_path):
    whole = gzip.compress("".join(f"line {i}\n" for i in range(9999)).encode())
    broken = {
        "plain.gz": b"plain text\n",
        "cut.gz": whole[: len(whole) // 2],
        "no_end.gz": whole[:-3],
        "changed.gz": whole[:-8] + b"\0\0\0\0" + whole[-4:],  # the checksum
        "garbled.gz": whole[:200] + b"\xff" * 200 + whole[400:],
    }
    for name, content in broken.items():
        path = tmp_path / name
        path.write_bytes(content)
        for read in (lambda p: list(corpora.read_lines(p)), textfiles.count_lines):
            with pytest.raises(DataError, match="not a whole gzip file") as error:
                read(str(path))
            assert str(path) in one_line(error)


def test_split_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert corpora.split_paths("", "/r") == []
    assert corpora.split_paths("a.en", "") == ["a.en"]
    assert corpora.split_paths("a.en, b/c.gz,/d,", "/r") == [
        "/r/a.en",
        "/r/b/c.gz",
        "/d",
    ]
    assert corpora.split_paths("~/a,b", "~/r") == ["/home/me/a", "/home/me/r/b"]


# --- text -----------------------------------------------------------------------


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


# --- TFDS -----------------------------------------------------------------------

# Made in a process of its own: the name of the builder is one that TFDS has, too.
MAKE = """
import sys
import tensorflow_datasets as tfds

class Wmt14Translate(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    VERSION = tfds.core.Version("1.0.0")
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name="de-en", version=VERSION)]

    def _info(self):
        features = tfds.features.Translation(languages=["de", "en"])
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, _):
        return {
            "train": [(i, {"de": f"Satz {i}", "en": f"line {i}"}) for i in range(5)],
            "validation": [(0, {"de": "Grüße\\u2028\\n", "en": ""})],
            "test": [(0, {"de": b"gut", "en": b"caf\\xe9"})],
        }

    def _generate_examples(self):
        raise NotImplementedError

class PrivateSet(Wmt14Translate, skip_registration=True):
    BUILDER_CONFIGS = []

for builder in Wmt14Translate, PrivateSet:
    builder(data_dir=sys.argv[1]).download_and_prepare(file_format="array_record")
"""

# A TensorFlow that ends the process which imports it.
TRAP = "import os\nos._exit(97)\n"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("tfds")
    made = subprocess.run(
        [sys.executable, "-c", MAKE, str(folder)], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    return folder


def tfds_config(folder: pathlib.Path, **changes: str) -> DataConfig:
    config = DataConfig(corpus="tfds", tfds_name=NAME, tfds_dir=str(folder))
    return dataclasses.replace(config, **changes)


@pytest.fixture
def copied(prepared, tmp_path) -> pathlib.Path:
    return shutil.copytree(prepared, tmp_path / "copy")


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Keeps a test from ever downloading a corpus."""
    monkeypatch.setattr(corpora, "_reachable", lambda url: False)


def test_tfds_languages_pick_the_sides(prepared):
    english = tfds_config(prepared, source_lang="en", target_lang="de")
    german = tfds_config(prepared, source_lang="de", target_lang="en")
    pairs = list(corpora.read_pairs(english, "train"))
    assert sorted(pairs) == [
        ("line 0", "Satz 0"),
        ("line 1", "Satz 1"),
        ("line 2", "Satz 2"),
        ("line 3", "Satz 3"),
        ("line 4", "Satz 4"),
    ]
    reverse = list(corpora.read_pairs(german, "train"))
    assert reverse == [(de, en) for en, de in pairs]
    valid = list(corpora.read_pairs(german, "valid"))
    assert valid == [("Grüße\u2028\n", "")]


def test_tfds_blocks_lose_nothing(prepared, monkeypatch):
    whole = list(corpora.read_pairs(tfds_config(prepared), "train"))
    for records in (1, 2, 5):
        monkeypatch.setattr(corpora, "_TFDS_RECORDS", records)
        assert list(corpora.read_pairs(tfds_config(prepared), "train")) == whole


def test_tfds_without_the_builder_class(prepared):
    config = tfds_config(prepared, tfds_name="private_set")
    assert list(corpora.read_pairs(config, "valid")) == [("", "Grüße\u2028\n")]


def test_tfds_folder_of_the_data_itself(prepared):
    folder = prepared / "wmt14_translate" / "de-en" / "1.0.0"
    for name in (NAME, f"{NAME}:1.0.0", "wmt14_translate"):
        config = tfds_config(folder, tfds_name=name)
        assert len(list(corpora.read_pairs(config, "train"))) == 5
    for name in ("wmt14_translate/fr-en", "wmt14", f"{NAME}:2.0.0"):
        with pytest.raises(DataError, match="the folder holds wmt14_translate/de-en"):
            corpora.read_pairs(tfds_config(folder, tfds_name=name), "train")


def test_tfds_bad_text_names_the_example(prepared):
    with pytest.raises(
        DataError, match=r"de-en in .*, split test, example 0:.*0xe9"
    ) as error:
        list(corpora.read_pairs(tfds_config(prepared), "test"))
    one_line(error)


def test_tfds_missing_language(prepared):
    for changes in ({"source_lang": "fr"}, {"target_lang": "fr"}):
        config = tfds_config(prepared, **changes)
        with pytest.raises(DataError) as error:
            corpora.read_pairs(config, "train")
        message = one_line(error)
        assert f"config.data.{next(iter(changes))} is 'fr'" in message
        assert message.endswith("there are: de, en")


def test_tfds_splits_and_fingerprint(copied):
    config = tfds_config(copied)
    assert all(corpora.has_split(config, s) for s in ("train", "valid", "test"))
    printed = corpora.fingerprint(config, "valid")
    assert printed.pop("bytes") > 0
    assert printed == {
        "corpus": "tfds",
        "split": "valid",
        "name": NAME,
        "version": "1.0.0",
        "examples": 1,
        "direction": ["en", "de"],
    }
    info = copied / NAME / "1.0.0" / "dataset_info.json"
    values = json.loads(info.read_text())
    values["splits"] = [s for s in values["splits"] if s["name"] == "train"]
    info.write_text(json.dumps(values))
    assert not corpora.has_split(config, "valid")
    with pytest.raises(DataError, match="no split validation; there are: train"):
        corpora.read_pairs(config, "valid")


def test_tfds_other_format(copied):
    info = copied / NAME / "1.0.0" / "dataset_info.json"
    info.write_text(info.read_text().replace('"array_record"', '"tfrecord"'))
    with pytest.raises(DataError) as error:
        corpora.read_pairs(tfds_config(copied), "train")
    message = one_line(error)
    assert "is prepared as ['tfrecord'], but is read as array_record" in message
    assert f"tfds build {NAME} --file_format=array_record" in message


def test_tfds_damage(copied):
    (shard,) = copied.glob(f"{NAME}/1.0.0/*-train.array_record-*")
    content = shard.read_bytes()
    for damage in (content[: len(content) // 2], b""):
        shard.write_bytes(damage)
        with pytest.raises(DataError, match=NAME) as error:
            list(corpora.read_pairs(tfds_config(copied), "train"))
        assert str(copied) in one_line(error)
    shard.unlink()
    with pytest.raises(DataError, match="No such file") as error:
        list(corpora.read_pairs(tfds_config(copied), "train"))
    one_line(error)
    (copied / NAME / "1.0.0" / "dataset_info.json").write_text("{")
    with pytest.raises(DataError, match=NAME) as error:
        corpora.read_pairs(tfds_config(copied), "train")
    one_line(error)
    (copied / NAME / "1.0.0" / "dataset_info.json").unlink()  # half a copy
    with pytest.raises(DataError, match=NAME) as error:
        corpora.read_pairs(tfds_config(copied), "train")
    one_line(error)


def test_tfds_not_prepared(tmp_path):
    start = time.monotonic()
    with pytest.raises(DataError) as error:
        corpora.read_pairs(tfds_config(tmp_path / "none"), "train")
    assert time.monotonic() - start < 10
    message = one_line(error)
    assert f"{NAME} is not prepared in {tmp_path / 'none'}" in message
    assert f"tfds build {NAME} --file_format=array_record --data_dir=FOLDER" in message
    assert "--config.data.tfds_dir=FOLDER" in message
    assert not (tmp_path / "none").exists()


def test_tfds_looks_in_its_own_folder_by_default(tmp_path):
    code = f"""
    from transformer_jax.config import DataConfig
    from transformer_jax.data import corpora
    corpora._reachable = lambda url: False
    corpora.has_split(DataConfig(corpus="tfds", tfds_name="{NAME}"), "train")
    """
    environment = os.environ | {"TFDS_DATA_DIR": str(tmp_path / "default")}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env=environment,
    )
    last = done.stderr.splitlines()[-1]
    assert last.startswith("transformer_jax.errors.DataError: ")
    assert str(tmp_path / "default") in last


def test_tfds_names(prepared):
    with pytest.raises(ConfigError, match=r"config\.data\.tfds_name"):
        corpora.read_pairs(tfds_config(prepared, tfds_name=""), "train")
    for name in ("no_such_set/de-en", "wmt14_translate/xx-en", "a/b/c/d", "x:y:z"):
        with pytest.raises(DataError) as error:
            corpora.read_pairs(tfds_config(prepared, tfds_name=name), "train")
        message = one_line(error)
        assert name in message and str(prepared) in message and len(message) < 1000


def test_tfds_prepares_where_it_can(tmp_path, monkeypatch, capsys):
    import tensorflow_datasets as tfds

    class Fresh(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = tfds.features.Translation(languages=["de", "en"])
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, dl_manager):
            return {"train": [(0, {"de": "neu", "en": "new"})]}

        def _generate_examples(self):
            raise NotImplementedError

    monkeypatch.setattr(tfds, "builder", lambda _, data_dir: Fresh(data_dir=data_dir))
    config = tfds_config(tmp_path, tfds_name="fresh")
    assert list(corpora.read_pairs(config, "train")) == [("new", "neu")]
    assert capsys.readouterr().out == ""  # stdout is for results


def test_tfds_without_network_does_not_try(tmp_path, monkeypatch):
    import tensorflow_datasets as tfds

    class Remote:
        def __init__(self):
            urls = ("http://a.invalid/1", "http://a.invalid/2", "ftp://b/3")
            self.url_infos = dict.fromkeys(urls)

        def is_prepared(self):
            return False

        def download_and_prepare(self, **_):
            raise AssertionError("tried")

    monkeypatch.setattr(tfds, "builder", lambda *_, **__: Remote())
    with pytest.raises(DataError) as error:
        corpora.read_pairs(tfds_config(tmp_path), "train")
    assert "no network: cannot reach a.invalid, b;" in one_line(error)
    monkeypatch.setattr(corpora, "_reachable", lambda url: url == "ftp://b/3")
    with pytest.raises(DataError, match="AssertionError: tried"):
        corpora.read_pairs(tfds_config(tmp_path), "train")


class NotFound(http.server.BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.send_error(404)

    def log_message(self, format, *args):
        pass


def test_reachable_is_whatever_answers(monkeypatch):
    monkeypatch.undo()  # the real one
    monkeypatch.setenv("no_proxy", "*")
    server = http.server.HTTPServer(("127.0.0.1", 0), NotFound)
    url = f"http://127.0.0.1:{server.server_port}/x.tgz"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        assert corpora._reachable(url)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert not corpora._reachable(url)


def test_neither_jax_nor_tensorflow_is_imported(prepared, tmp_path):
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text(TRAP)
    code = f"""
    import sys
    from transformer_jax.config import DataConfig
    from transformer_jax.data import corpora
    assert "tensorflow_datasets" not in sys.modules
    config = DataConfig(corpus="tfds", tfds_name="{NAME}", tfds_dir="{prepared}")
    assert len(list(corpora.read_pairs(config, "train"))) == 5
    print(corpora.fingerprint(config, "train")["examples"])
    assert "tensorflow_datasets" in sys.modules
    for name in ("jax", "flax", "tensorflow"):
        assert name not in sys.modules, name
    """
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}

    def run(text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", textwrap.dedent(text)],
            capture_output=True,
            text=True,
            env=environment,
        )

    assert run("import tensorflow").returncode == 97  # the trap is set
    done = run(code)
    assert (done.returncode, done.stdout) == (0, "5\n"), done.stderr
    assert not re.search("Traceback", done.stderr)
