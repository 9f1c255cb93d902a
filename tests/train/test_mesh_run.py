"""Whole runs on a mesh are those by pmap, and their checkpoints know no layout."""

import json
import pathlib

import jax
import numpy as np
import pytest
import tiny

from transformer_jax import parallel
from transformer_jax.checkpoint import load_params
from transformer_jax.config import DecodeConfig
from transformer_jax.decode.translator import load_translator

MESH = (
    "--config.parallel.strategy=mesh",
    "--config.parallel.fsdp=2",
    "--config.parallel.tensor=2",
)
LINES = ["a b c", "h g f e d c b a", "d", ""]


def rows(workdir: pathlib.Path, kind: str) -> list[dict]:
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def use_devices(monkeypatch, count: int) -> None:
    chosen = jax.devices()[:count]
    monkeypatch.setattr(parallel, "devices", lambda: chosen)


def differ(one: pathlib.Path, other: pathlib.Path) -> float:
    """Returns the largest difference of two runs' last parameters."""
    trees = [jax.tree.leaves(load_params(d, "8", print).params) for d in (one, other)]
    pairs = zip(*trees, strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


@pytest.fixture(scope="module")
def meshed(trained, tmp_path_factory) -> pathlib.Path:
    """The run `trained`, on a mesh of 2 x 2 x 2."""
    workdir = tmp_path_factory.mktemp("meshed") / "run"
    config = str(trained.parent / "corpus" / "config.py")
    assert tiny.train(config, workdir, MESH) == 0
    return workdir


def test_a_run_on_a_mesh_is_the_run_by_pmap(trained, meshed):
    assert differ(trained, meshed) < 2e-4
    for kind, names in (("train", ["loss", "nll"]), ("valid", ["nll", "bleu", "chrf"])):
        for one, other in zip(rows(trained, kind), rows(meshed, kind), strict=True):
            for name in names:
                assert one[name] == pytest.approx(other[name], rel=1e-4), name


@pytest.mark.parametrize(
    ("first", "then"),
    [(MESH, ()), pytest.param((), MESH, marks=pytest.mark.slow)],
)
def test_a_run_goes_on_in_another_layout(
    trained, tmp_path, monkeypatch, capsys, first, then
):
    """From 8 devices to 3 by pmap, and from 3 to a mesh of 8."""
    config = str(trained.parent / "corpus" / "config.py")
    use_devices(monkeypatch, 8 if first else 3)
    assert tiny.train(config, tmp_path / "run", [*first, "--config.train.steps=5"]) == 0
    use_devices(monkeypatch, 8 if then else 3)
    assert tiny.train(config, tmp_path / "run", then) == 0
    assert "resuming    at step 5" in capsys.readouterr().err
    assert differ(trained, tmp_path / "run") < 2e-4


@pytest.mark.parametrize("beam", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_mesh_decodes_what_one_device_does(meshed, monkeypatch, beam):
    """Where the mesh cannot be made, every device holds the whole model."""
    decode = DecodeConfig(beam_size=beam, batch_size=6, max_extra_length=4)

    def found(devices: int) -> tuple[str, list, list[float]]:
        use_devices(monkeypatch, devices)
        translator = load_translator([meshed], "last", print)[0]
        best = translator.translate(LINES, decode, nbest=beam)
        flat = [hypothesis for line in best for hypothesis in line]
        scores = translator.score(LINES[:3], [line[0].text for line in best[:3]], 4)
        scores += [hypothesis.log_prob for hypothesis in flat]
        return str(translator._layout), [h.tokens for h in flat], scores

    layout, texts, scores = found(8)
    assert layout == "mesh data 2 x fsdp 2 x tensor 2"
    other, wanted, wanted_scores = found(1)
    assert other == "pmap over 1"
    assert texts == wanted
    assert scores == pytest.approx(wanted_scores, abs=1e-4)


def test_a_vocabulary_that_does_not_divide_is_refused(trained, tmp_path, capsys):
    config = str(trained.parent / "corpus" / "config.py")
    flags = "--config.tokenizer.vocab_size=291", *MESH
    assert tiny.train(config, tmp_path / "run", flags) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert (
        "vocab_size) is 291, which config.parallel.tensor = 2 does not divide" in said
    )
