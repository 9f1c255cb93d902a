"""A new run from old parameters."""

import json
import pathlib
import shutil

import jax
import numpy as np
import tiny

from transformer_jax import checkpoint
from transformer_jax.train import loop


def files(folder: pathlib.Path) -> dict[pathlib.Path, bytes]:
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def params_of(workdir: pathlib.Path, which: str) -> list[np.ndarray]:
    return jax.tree.leaves(checkpoint.load_params(workdir, which, print).params)


def equal(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_run_from_old_parameters_is_new_and_leaves_the_old(
    trained, tmp_path, monkeypatch, capsys
):
    """The updates themselves are left out; the state before them is looked at."""
    states = []
    monkeypatch.setattr(loop, "_run", lambda _, state, *__: states.append(state))
    model = f"--config.tokenizer.model_path={trained / 'tokenizer.model'}"
    config = tiny.write_config(tmp_path / "corpus", train__seed=5)
    before, best = files(trained), params_of(trained, "best")
    command = [model, f"--init_from={trained}"]
    assert tiny.train(config, tmp_path / "run", command) == 0
    assert files(trained) == before
    (state,) = states
    assert int(state.step) == 0 and equal(jax.tree.leaves(state.params), best)
    assert not any(np.any(x) for x in jax.tree.leaves(state.opt_state))
    record = json.loads((tmp_path / "run" / "init_from.json").read_text())
    assert record["workdir"] == str(trained) and record["checkpoint"] == "best"
    assert f"of {trained}, best (step {record['steps'][0]})" in capsys.readouterr().err
    # It is in the new folder; the same command and one without the flag go on.
    assert equal(params_of(tmp_path / "run", "0"), best)
    for again in (command, [model]):
        assert tiny.train(config, tmp_path / "run", again) == 0
        assert equal(jax.tree.leaves(states.pop().params), best)
    assert capsys.readouterr().err.count("is of no effect: the run goes on") == 1
    # Killed before step 0 was saved, it still begins there.
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert tiny.train(config, tmp_path / "run", [model]) == 0
    assert equal(jax.tree.leaves(states.pop().params), best)
    # Another origin is refused, there and where a run began without one.
    for workdir, origin in ((tmp_path / "run", tmp_path), (trained, tmp_path / "run")):
        assert tiny.train(config, workdir, [f"--init_from={origin}"]) == 2
        assert "leave --init_from out to go on" in capsys.readouterr().err
    assert files(trained) == before


def test_old_parameters_must_fit(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loop, "_run", lambda *_: None)
    config = tiny.write_config(tmp_path / "corpus")
    (tmp_path / "corpus" / "train.en").write_text("z y x w v\n" * 60)
    flags = [f"--init_from={trained}", "--config.tokenizer.vocab_size=280"]
    assert tiny.train(config, tmp_path / "run", flags) == 2
    theirs = trained / "tokenizer.model"
    message = capsys.readouterr().err
    assert f"set config.tokenizer.model_path to {theirs}" in message
    flags = [flags[0], f"--config.tokenizer.model_path={theirs}"]
    assert tiny.train(config, tmp_path / "run", [*flags, "--config.model.d_ff=30"]) == 2
    message = capsys.readouterr().err
    assert "is of another model: decoder/layer_0/" in message and "30" in message
    assert not list((tmp_path / "run" / "checkpoints").glob("[0-9]*"))
    assert not (tmp_path / "run" / "init_from.json").exists()
    assert tiny.train(config, tmp_path / "run", [*flags, "--init_checkpoint=77"]) == 2
    assert "there are best, last, average" in capsys.readouterr().err
    assert tiny.train(config, tmp_path / "run", ["--init_checkpoint=last"]) == 2
    assert "of no use without --init_from" in capsys.readouterr().err
