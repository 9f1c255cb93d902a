"""Tokenising by several processes: the same bytes, no JAX, and an end for every one."""

import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

import numpy as np
import pytest
import tiny

from transformer_jax import config_file
from transformer_jax.config import TokenizerConfig
from transformer_jax.data import workers
from transformer_jax.data.prepare import prepare
from transformer_jax.data.tokenized import TokenizedCorpus, write_split
from transformer_jax.data.tokenizer import Tokenizer, train
from transformer_jax.errors import DataError

PAIRS = [*tiny.sentences(90, 5), ("", "A"), ("a", ""), ("b " * 40, "C"), ("ж", "😀")]
PAIRS += tiny.sentences(7, 6)


@pytest.fixture(scope="module")
def vocabulary() -> Tokenizer:
    config = TokenizerConfig(vocab_size=290, character_coverage=0.99)
    return train([line for pair in PAIRS[:90] for line in pair], config, 0)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(workers, "CHUNK", 7)
    monkeypatch.setattr(workers, "ALONE", 1)


def written(vocabulary, training: bool, folder: pathlib.Path, count: int):
    """Writes PAIRS; returns all files and what was counted."""
    folder.mkdir()
    found = write_split(PAIRS, training, vocabulary, 32, folder, count)
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}, found


@pytest.mark.parametrize("training", [True, False])
def test_the_same_bytes_by_any_number_of_workers(
    vocabulary, tmp_path, small_chunks, training
):
    expected = written(vocabulary, training, tmp_path / "1", 1)
    for count in (2, 3) if training else (2,):
        assert written(vocabulary, training, tmp_path / f"{count}", count) == expected
    workers.CHUNK = 1000  # the fixture sets it back
    assert written(vocabulary, training, tmp_path / "whole", 2) == expected
    counts = expected[1]["counts"]
    assert counts["read"] == len(PAIRS)
    assert counts["empty"] == (2 if training else 0)
    assert counts["too_long"] == (1 if training else 0)


def test_the_files_are_those_of_numpy(vocabulary, tmp_path, small_chunks):
    files, found = written(vocabulary, True, tmp_path / "made", 1)
    kept = [p for p in PAIRS if p[0] and p[1] and len(p[0]) < 60]
    for side, texts in zip(("source", "target"), zip(*kept, strict=True), strict=True):
        ids = vocabulary.encode(texts)
        flat = np.asarray([i for sentence in ids for i in sentence], np.uint16)
        offsets = np.cumsum([0, *map(len, ids)])
        for name, array in ((f"{side}.ids", flat), (f"{side}.offsets", offsets)):
            np.save(tmp_path / name, array)
            assert (tmp_path / f"{name}.npy").read_bytes() == files[f"{name}.npy"]
        assert found["pieces"][side]["all"] == len(flat)


def test_pairs_are_read_as_they_are_needed(vocabulary, small_chunks):
    read = 0

    def pairs() -> Iterator[tuple[str, str]]:
        nonlocal read
        for pair in PAIRS * 4:
            read += 1
            yield pair

    texts, most = [], 0
    for chunk, _ in workers.encode_pairs(pairs(), vocabulary, 2):
        texts += chunk
        most = max(most, read - len(texts))
    assert texts == PAIRS * 4
    assert most <= 5 * workers.CHUNK


def test_a_short_corpus_starts_no_process(vocabulary, monkeypatch):
    monkeypatch.setattr(workers, "_in_processes", None)
    for count in (0, 1, 8):
        ((chunk, _),) = workers.encode_pairs(PAIRS, vocabulary, count)
        assert chunk == PAIRS


def die(chunk):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_ends_the_command(tmp_path, small_chunks, monkeypatch, capsys):
    monkeypatch.setattr(workers, "_encode_chunk", die)
    monkeypatch.setattr(workers, "_cores", lambda: 2)
    config = tiny.write_config(tmp_path)
    workdir = tmp_path / "run"
    flags = [f"--config={config}", f"--workdir={workdir}"]
    assert tiny.run("prepare", *flags) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("transformer-jax: one of the 2 processes")
    assert "same command again" in message
    assert not multiprocessing.active_children()
    assert [p.suffix for p in (workdir / "data").iterdir()] == [".partial"]
    monkeypatch.undo()
    assert tiny.run("prepare", *flags) == 0
    assert all(not p.suffix for p in (workdir / "data").iterdir())


def test_a_worker_that_cannot_start_is_one_line(vocabulary, small_chunks):
    broken = Tokenizer(vocabulary.model, "x")
    broken.model = b"broken"
    with pytest.raises(DataError, match="could not start"):
        list(workers.encode_pairs(PAIRS, broken, 2))


LOOK = """
    import sys
    from transformer_jax.data import workers
    from transformer_jax.data.tokenizer import Tokenizer

    def look(chunk):
        print(*sorted(sys.modules), file=sys.stderr, flush=True)
        return encode_chunk(chunk)

    encode_chunk, workers._encode_chunk = workers._encode_chunk, look
    workers.CHUNK, workers.ALONE = 1, 0

    if __name__ == "__main__":
        import jax
        for _ in workers.encode_pairs([("a", "b")], Tokenizer.load(sys.argv[1]), 2):
            pass
"""


def test_no_jax_in_workers(vocabulary, tmp_path):
    script = tmp_path / "look.py"
    script.write_text(textwrap.dedent(LOOK))
    (tmp_path / "model").write_bytes(vocabulary.model)
    command = [sys.executable, str(script), str(tmp_path / "model")]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    modules = {name.split(".")[0] for name in run.stderr.split()}
    assert "sentencepiece" in modules
    assert not modules & {"jax", "flax", "optax", "orbax", "tensorflow", "rich"}


ENDLESS = """
    import itertools, os, sys
    from transformer_jax.data import workers
    from transformer_jax.data.tokenizer import Tokenizer

    if __name__ == "__main__":
        workers.CHUNK, workers.ALONE = 1, 0
        pairs = itertools.repeat(("a", "b"))
        model = Tokenizer.load(sys.argv[1])
        for i, _ in enumerate(workers.encode_pairs(pairs, model, 2)):
            if i == 9:
                children = workers.multiprocessing.active_children()
                print(*[child.pid for child in children], flush=True)
"""


@pytest.mark.skipif(not os.path.exists("/proc"), reason="needs /proc")
def test_workers_end_with_a_killed_parent(vocabulary, tmp_path):
    script = tmp_path / "endless.py"
    script.write_text(textwrap.dedent(ENDLESS))
    (tmp_path / "model").write_bytes(vocabulary.model)
    command = [sys.executable, str(script), str(tmp_path / "model")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout
        pids = [int(word) for word in run.stdout.readline().split()]
        run.kill()
    assert pids
    for _ in range(200):
        if not any(map(_runs, pids)):
            return
        time.sleep(0.05)
    raise AssertionError(f"{pids} still run")


def _runs(pid: int) -> bool:
    try:
        return ") Z" not in pathlib.Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_a_corpus_prepared_by_workers_is_the_text(tmp_path, small_chunks, monkeypatch):
    monkeypatch.setattr(workers, "_cores", lambda: 2)
    config = config_file.load(tiny.write_config(tmp_path))
    made = prepare(config, tmp_path / "run", print)
    for split, count, seed in (("train", 60, 0), ("valid", 7, 1), ("test", 9, 2)):
        corpus: TokenizedCorpus = made.splits[split]
        sides = corpus.source, corpus.target
        texts = [
            tuple(made.tokenizer.decode(side[i].tolist()) for side in sides)
            for i in range(count)
        ]
        assert texts == tiny.sentences(count, seed)
