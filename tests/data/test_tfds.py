"""TFDS sets, read without TensorFlow: directions, damage, what is not there."""

import dataclasses
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
from texts import one_line

from transformer_jax.config import DataConfig
from transformer_jax.data import corpora
from transformer_jax.errors import ConfigError, DataError

NAME = "wmt14_translate/de-en"

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


def test_tfds_bad_text_can_be_replaced(prepared):
    for rule in ("replace", "skip"):  # nothing is left out of a test set
        pairs = corpora.read_pairs(tfds_config(prepared, invalid_utf8=rule), "test")
        ((source, target),) = pairs
        assert "\ufffd" in source + target and pairs.cleaner.found() == {"not_utf8": 1}


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
