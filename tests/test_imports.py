"""Imports go one way: config, then data and model, then train and decode, then cli."""

import ast
import pathlib

import pytest

PACKAGE = pathlib.Path(__file__).parents[1] / "transformer_jax"
EVERYWHERE = {"errors"}
BATCH = "data.batching"  # the contract between data, train and evaluate

# For each room, the rooms it may import, besides `errors`.
ALLOWED = {
    "errors": set(),
    "channel": set(),
    "hosts": {"channel"},
    "progress": set(),
    "machine": set(),
    "config": set(),
    "config_check": {"config"},
    "config_file": {"config", "config_check"},
    "data": {"config", "config_file", "data", "machine"},
    "model": {"config", "model"},
    "parallel": {"config", "machine", "model.axes"},
    "checkpoint": {"config"},
    "describe": {"config"},
    "chips": set(),
    "collectives": set(),
    "decode.mbr": set(),
    "decode.choice": {"config"},
    "decode.hypotheses": {"config", "decode.choice"},
    "decode.search": {"config", "decode.choice", "decode.hypotheses"},
    "decode.programs": {
        "config", "model", "decode.choice", "decode.hypotheses", "decode.search", BATCH,
        "data.tokenizer",
    },
    "decode.translator": {
        "config", "config_check", "config_file", "model", "parallel", "checkpoint",
        "decode", BATCH, "data.tokenizer", "data.vocabularies",
    },
    "evaluate": {"config", "decode.translator"},
    "paper_bleu": {"evaluate"},
    "compare": {"evaluate"},
    "train.loss": {"model.axes"},
    "train.optimizer": {"config"},
    "train.step": {"model", "train.loss", BATCH},
    "train.programs": {
        "config", "model", "parallel", "train.loss", "train.step", BATCH
    },
    "train.metrics": {"progress", "train.loss", "train.step"},
    "train.ending": {"config"},
    "train.origin": {"checkpoint", "config_file", "data.vocabularies"},
    "train.profiling": {"chips", "config", "describe", BATCH},
    "train.stops": {"hosts", "parallel", "train.ending"},
    "train.loop": {
        "config", "data", "model", "parallel", "checkpoint", "decode.translator",
        "evaluate", "hosts", "train",
    },
    "dry_run": {
        "chips", "collectives", "config", "describe", "model", "parallel", BATCH,
        "train.optimizer", "train.programs", "train.step",
    },
    "arguments": {"chips", "config", "config_check"},
    "streams": {"data.textfiles"},
    "cli": {
        "arguments", "streams", "config", "config_check", "config_file", "data",
        "decode.translator", "checkpoint", "evaluate", "paper_bleu", "compare",
        "describe", "hosts", "progress", "train.loop", "train.origin", "chips",
        "dry_run", "machine",
    },
    "__main__": {"cli"},
}  # fmt: skip


def imports(path: pathlib.Path) -> set[str]:
    """Returns all that a file imports, inside functions, too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own(path: pathlib.Path) -> set[str]:
    """Returns the modules of this package that a file imports."""
    modules = set()
    for name in imports(path):
        if name.startswith("transformer_jax."):
            parts = name.split(".")[1:]
            while not PACKAGE.joinpath(*parts).with_suffix(".py").exists():
                parts = parts[:-1]
                if not parts:
                    break
            modules.add(".".join(parts))
    return modules - {""}


FILES = [p for p in sorted(PACKAGE.rglob("*.py")) if p.name != "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    room = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    allowed = ALLOWED[room if room in ALLOWED else room.split(".")[0]]
    for module in own(path):
        fits = module in allowed | EVERYWHERE or module.split(".")[0] in allowed
        assert fits, f"{room} must not import {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_libraries_stay_in_their_rooms(path):
    room = path.relative_to(PACKAGE).parts[0]
    roots = {name.split(".")[0] for name in imports(path)}
    assert not roots & {"torch", "tensorflow", "pickle"}
    if room in (
        "data",
        "config.py",
        "config_check.py",
        "errors.py",
        "describe.py",
        "cli.py",
        "arguments.py",
    ):
        assert not roots & {"jax", "flax", "optax", "orbax"}
    if path.name != "corpora.py":
        assert "tensorflow_datasets" not in roots
    if path.name not in ("tokenizer.py",):
        assert "sentencepiece" not in roots
    if path.name != "paper_bleu.py":
        assert "sacremoses" not in roots
    if path.name != "parallel.py":
        assert "jax.pmap" not in path.read_text()


def test_the_package_alone_imports_nothing_heavy():
    assert imports(PACKAGE / "__init__.py") == set()


def test_every_room_named_here_exists():
    for room in ALLOWED:
        path = PACKAGE.joinpath(*room.split("."))
        assert path.is_dir() or path.with_suffix(".py").exists(), room
