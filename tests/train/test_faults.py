"""Faults of disk and files in mid-run: one line, exit code 2, nothing on disk lost."""

import contextlib
import hashlib
import itertools
import pathlib
import shutil
import subprocess
from collections.abc import Callable, Iterator

import jax
import numpy as np
import pytest
import tiny

from transformer_jax import checkpoint
from transformer_jax.train import loop

# Of a save that fails, Orbax leaves coroutines behind.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)

STEPS = ["--config.train.steps=14"]  # six more than the finished run has


def mounted(*arguments: str) -> bool:
    return (
        subprocess.run(["mount", *arguments], stderr=subprocess.DEVNULL).returncode == 0
    )


@pytest.fixture
def disk(tmp_path: pathlib.Path, trained: pathlib.Path) -> Iterator[pathlib.Path]:
    """A copy of the finished run; its checkpoints lie on a small disk of their own."""
    workdir = tmp_path / "run"
    shutil.copytree(trained, workdir)
    folder = workdir / "checkpoints"
    if not mounted("-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)):
        pytest.skip("nothing can be mounted here")
    shutil.copytree(trained / "checkpoints", folder, dirs_exist_ok=True)
    try:
        yield workdir
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture(scope="module")
def longer(
    trained: pathlib.Path, tmp_path_factory: pytest.TempPathFactory
) -> list[np.ndarray]:
    """The parameters at the end of the run without a fault."""
    workdir = tmp_path_factory.mktemp("longer") / "run"
    shutil.copytree(trained, workdir)
    assert tiny.train(str(trained.parent / "corpus" / "config.py"), workdir, STEPS) == 0
    return params_of(workdir)


def params_of(workdir: pathlib.Path) -> list[np.ndarray]:
    params = checkpoint.load_params(workdir, "last", print).params
    return [np.asarray(leaf) for leaf in jax.tree.leaves(params)]


def hashes(workdir: pathlib.Path) -> dict[pathlib.Path, str]:
    """Returns those of all files, but for what is half written."""
    return {
        p.relative_to(workdir): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in workdir.rglob("*")
        if p.is_file() and "tmp" not in str(p.relative_to(workdir))
    }


@pytest.fixture
def train(trained: pathlib.Path, monkeypatch, capsys) -> Callable:
    """Returns a function that goes on with a run, where `fault` comes at update 11.

    It returns the exit code and the last line.
    """
    config = str(trained.parent / "corpus" / "config.py")
    update = loop.Trainer.update

    def run(workdir: pathlib.Path, fault: Callable[[], object] | None = None):
        numbers = itertools.count(9)

        def faulty(self, state, batch):
            if next(numbers) == 11 and fault:
                self.checkpoints.wait()
                fault()
            return update(self, state, batch)

        monkeypatch.setattr(loop.Trainer, "update", faulty)
        code = tiny.train(config, workdir, STEPS)
        error = capsys.readouterr().err
        assert "Traceback" not in error
        return code, error.strip().splitlines()[-1]

    return run


@pytest.mark.slow
def test_a_full_disk(disk, train, longer):
    fill_file = disk / "checkpoints" / "fill"

    def fill() -> None:
        with contextlib.suppress(OSError), open(fill_file, "wb") as file:
            while True:
                file.write(bytes(4096))
                file.flush()

    code, message = train(disk, fill)
    assert code == 2 and "No space left on device" in message
    saved = hashes(disk)
    assert any("/10/" in path.as_posix() for path in saved)
    fill_file.unlink()
    assert train(disk)[0] == 0
    assert all(map(np.array_equal, params_of(disk), longer))


@pytest.mark.slow
def test_a_folder_that_becomes_read_only(disk, train, longer):
    def lock() -> None:
        assert mounted("-o", "remount,ro", str(disk / "checkpoints"))

    code, message = train(disk, lock)
    assert code == 2 and "Read-only file system" in message
    assert mounted("-o", "remount,rw", str(disk / "checkpoints"))
    assert train(disk)[0] == 0
    assert all(map(np.array_equal, params_of(disk), longer))


@pytest.mark.slow
def test_a_read_only_folder_at_the_start(disk, train):
    before = hashes(disk / "checkpoints")
    assert mounted("-o", "remount,ro", str(disk / "checkpoints"))
    code, message = train(disk)
    assert code == 2 and "Read-only file system" in message
    assert mounted("-o", "remount,rw", str(disk / "checkpoints"))
    assert hashes(disk / "checkpoints") == before


@pytest.mark.slow
def test_checkpoints_deleted_in_mid_run(trained, tmp_path, train):
    workdir = tmp_path / "run"
    shutil.copytree(trained, workdir)
    code, message = train(workdir, lambda: shutil.rmtree(workdir / "checkpoints"))
    assert code == 2 and "the folder is gone" in message


@pytest.mark.slow
@pytest.mark.parametrize("change", ["shorter", "gone"])
def test_a_corpus_that_changed(trained, tmp_path, train, change):
    """The corpus of the fixture itself is put back before anybody else looks."""
    workdir, source = tmp_path / "run", trained.parent / "corpus" / "train.en"
    shutil.copytree(trained, workdir)
    before, text = hashes(workdir), source.read_text()
    try:
        if change == "gone":
            source.unlink()
        else:
            for file in (source, source.with_suffix(".de")):
                lines = file.read_text().splitlines(keepends=True)
                file.with_suffix(file.suffix + ".old").write_text("".join(lines))
                file.write_text("".join(lines[:40]))
        code, message = train(workdir)
    finally:
        source.write_text(text)
        for old in source.parent.glob("*.old"):
            old.replace(old.with_suffix(""))
    assert code == 2 and hashes(workdir) == before
    wanted = "train.en cannot be read" if change == "gone" else "--init_from"
    assert wanted in message


BROKEN = {
    "config.json": (b"", "config.json is not JSON"),
    "data.json": (b"{", "data.json is not JSON"),
    "shapes.json": (b"[", "shapes.json holds no batch shapes"),
    "tokenizer.model": (b"\x80", "tokenizer.model is not a SentencePiece model"),
    "data/train-*/manifest.json": (b"", "are damaged: "),
    "data/train-*/source.ids.npy": (b"", "are damaged: "),
    "data/train-*/target.offsets.npy": (b"\x93NUMPY", "are damaged: "),
    "data/valid-*/target.txt": (b"one\n", "7 and 1 lines of text, not 7"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("how", ["written over", "cut in half", "gone"])
def test_a_broken_file_of_the_run(trained, tmp_path, train, name, how):
    workdir = tmp_path / "run"
    shutil.copytree(trained, workdir)
    (file,) = workdir.glob(name)
    content, wanted = BROKEN[name]
    if how == "cut in half":
        content = file.read_bytes()[: file.stat().st_size // 2]
        lines = len(content.removesuffix(b"\n").split(b"\n"))
        wanted = wanted.replace("1 lines", f"{lines} lines")
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(content)
    if how == "gone" and name in ("shapes.json", "data/train-*/manifest.json"):
        assert train(workdir)[0] == 0  # chosen, or made, again
        return
    saved = {p: h for p, h in hashes(workdir).items() if "checkpoints" in str(p)}
    code, message = train(workdir)
    assert code == 2, message
    if how != "gone":
        assert wanted in message
    assert saved.items() <= hashes(workdir).items()
