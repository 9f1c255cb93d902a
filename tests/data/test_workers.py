"""Tokenising by several processes: the same bytes, no JAX, and an end for every one."""

import dataclasses
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
from transformer_jax.data.vocabularies import Vocabularies
from transformer_jax.errors import DataError

PAIRS = [*tiny.sentences(90, 5), ("", "A"), ("a", ""), ("b " * 40, "C"), ("ж", "😀")]
PAIRS += tiny.sentences(7, 6)


@pytest.fixture(scope="module")
def vocabularies() -> Vocabularies:
    """Of other sizes, so that their ids are of other types."""
    config = TokenizerConfig(vocab_size=270, character_coverage=0.99)
    small = dataclasses.replace(config, vocab_size=20, byte_fallback=False)
    columns = zip(*PAIRS[:90], strict=True)
    return Vocabularies(*map(train, columns, (config, small), (0, 0)))


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(workers, "CHUNK", 7)
    monkeypatch.setattr(workers, "ALONE", 1)


def written(vocabularies, training: bool, folder: pathlib.Path, count: int):
    """Writes PAIRS; returns all files and what was counted."""
    folder.mkdir()
    found = write_split(PAIRS, training, vocabularies, 32, folder, count)
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir())}, found


@pytest.mark.parametrize("training", [True, False])
def test_the_same_bytes_by_any_number_of_workers(
    vocabularies, tmp_path, small_chunks, training
):
    expected = written(vocabularies, training, tmp_path / "1", 1)
    for count in (2, 3) if training else (2,):
        assert written(vocabularies, training, tmp_path / f"{count}", count) == expected
    workers.CHUNK = 1000  # the fixture sets it back
    assert written(vocabularies, training, tmp_path / "whole", 2) == expected
    counts = expected[1]["counts"]
    assert counts["read"] == len(PAIRS)
    assert counts["empty"] == (2 if training else 0)
    assert counts["too_long"] == (1 if training else 0)


def test_the_files_are_those_of_numpy(vocabularies, tmp_path, small_chunks):
    files, found = written(vocabularies, True, tmp_path / "made", 1)
    kept = [p for p in PAIRS if p[0] and p[1] and len(p[0]) < 60]
    for side, texts in zip(("source", "target"), zip(*kept, strict=True), strict=True):
        ids = getattr(vocabularies, side).encode(texts)
        dtype = np.uint16 if side == "source" else np.uint8
        flat = np.asarray([i for sentence in ids for i in sentence], dtype)
        offsets = np.cumsum([0, *map(len, ids)])
        for name, array in ((f"{side}.ids", flat), (f"{side}.offsets", offsets)):
            np.save(tmp_path / name, array)
            assert (tmp_path / f"{name}.npy").read_bytes() == files[f"{name}.npy"]
        assert found["pieces"][side]["all"] == len(flat)


def test_pairs_are_read_as_they_are_needed(vocabularies, small_chunks):
    read = 0

    def pairs() -> Iterator[tuple[str, str]]:
        nonlocal read
        for pair in PAIRS * 4:
            read += 1
            yield pair

    texts, most = [], 0
    for chunk, _ in workers.encode_pairs(pairs(), vocabularies, 2):
        texts += chunk
        most = max(most, read - len(texts))
    assert texts == PAIRS * 4
    assert most <= 5 * workers.CHUNK


def test_a_short_corpus_starts_no_process(vocabularies, monkeypatch):
    monkeypatch.setattr(workers, "_in_processes", None)
    for count in (0, 1, 8):
        ((chunk, _),) = workers.encode_pairs(PAIRS, vocabularies, count)
        assert chunk == PAIRS


def die(chunk):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_ends_the_command(tmp_path, small_chunks, monkeypatch, capsys):
    monkeypatch.setattr(workers, "_encode_chunk", die)
    monkeypatch.setattr(workers, "cores", lambda: 2)
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


def test_a_worker_that_cannot_start_is_one_line(vocabularies, small_chunks):
    broken = Tokenizer(vocabularies.source.model, "x")
    broken.model = b"broken"
    with pytest.raises(DataError, match="could not start"):
        list(workers.encode_pairs(PAIRS, Vocabularies(broken, broken), 2))


LOOK = """
    import sys
    from transformer_jax.data import workers
    from transformer_jax.data.vocabularies import Vocabularies

    def look(chunk):
        print(*sorted(sys.modules), file=sys.stderr, flush=True)
        return encode_chunk(chunk)

    encode_chunk, workers._encode_chunk = workers._encode_chunk, look
    workers.CHUNK, workers.ALONE = 1, 0

    if __name__ == "__main__":
        import jax
        both = Vocabularies.load(sys.argv[1:])
        for _ in workers.encode_pairs([("a", "b")], both, 2):
            pass
"""


def test_no_jax_in_workers(vocabularies, tmp_path):
    script = tmp_path / "look.py"
    script.write_text(textwrap.dedent(LOOK))
    (tmp_path / "model").write_bytes(vocabularies.source.model)
    command = [sys.executable, str(script), str(tmp_path / "model")]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    modules = {name.split(".")[0] for name in run.stderr.split()}
    assert "sentencepiece" in modules
    assert not modules & {"jax", "flax", "optax", "orbax", "tensorflow", "rich"}


ENDLESS = """
    import itertools, os, sys
    from transformer_jax.data import workers
    from transformer_jax.data.vocabularies import Vocabularies

    if __name__ == "__main__":
        workers.CHUNK, workers.ALONE = 1, 0
        pairs = itertools.repeat(("a", "b"))
        both = Vocabularies.load(sys.argv[1:])
        for i, _ in enumerate(workers.encode_pairs(pairs, both, 2)):
            if i == 9:
                children = workers.multiprocessing.active_children()
                print(*[child.pid for child in children], flush=True)
"""


@pytest.mark.skipif(not os.path.exists("/proc"), reason="needs /proc")
def test_workers_end_with_a_killed_parent(vocabularies, tmp_path):
    script = tmp_path / "endless.py"
    script.write_text(textwrap.dedent(ENDLESS))
    (tmp_path / "model").write_bytes(vocabularies.source.model)
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
    monkeypatch.setattr(workers, "cores", lambda: 2)
    config = config_file.load(tiny.write_config(tmp_path))
    made = prepare(config, tmp_path / "run", print)
    for split, count, seed in (("train", 60, 0), ("valid", 7, 1), ("test", 9, 2)):
        corpus: TokenizedCorpus = made.splits[split]
        sides = corpus.source, corpus.target
        both = list(zip(made.vocabularies, sides, strict=True))
        texts = [
            tuple(tokenizer.decode(side[i].tolist()) for tokenizer, side in both)
            for i in range(count)
        ]
        assert texts == tiny.sentences(count, seed)
