"""A run with a vocabulary for each side, from training to its scores."""

import contextlib
import dataclasses
import io
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sentencepiece
import tiny
from variants import TINY

from transformer_jax.checkpoint import load_params
from transformer_jax.config import ModelConfig
from transformer_jax.config_file import read_workdir
from transformer_jax.data.batching import Batch
from transformer_jax.decode.translator import load_translator
from transformer_jax.model.transformer import Transformer
from transformer_jax.train.step import batch_loss, init_state

FIELDS = {
    "tokenizer__joint": False,
    "tokenizer__vocab_size": 275,
    "tokenizer__source_vocab_size": 270,
    "model__share_embeddings": False,
}
NAMES = ("tokenizer.source.model", "tokenizer.target.model")


@pytest.fixture(scope="module")
def separate(tmp_path_factory) -> pathlib.Path:
    """A finished run; tests leave it as it is. Beside it lies what it said."""
    folder = tmp_path_factory.mktemp("separate")
    config = tiny.write_config(folder / "corpus", **FIELDS)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        assert tiny.train(config, folder / "run") == 0
    (folder / "said").write_text(said.getvalue())
    return folder / "run"


def out(capsys, *arguments: str) -> str:
    capsys.readouterr()
    assert tiny.run(*arguments) == 0
    return capsys.readouterr().out


def refused(capsys, *arguments: str) -> str:
    capsys.readouterr()
    assert tiny.run(*arguments) == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_every_table_has_the_rows_of_its_vocabulary(separate):
    params = load_params(separate, "last", print).params
    assert params["source_embedding"]["table"].shape == (270, 16)
    assert params["embedding"]["table"].shape == (275, 16)
    assert "output" not in params  # the product takes the target's table
    said = (separate.parent / "said").read_text()
    count = sum(x.size for x in jax.tree.leaves(params))
    assert f"{count:,} parameters, vocabulary 270 source + 275 target" in said
    assert said.count("coverage 100%") == 6  # two sides of three splits
    for side in ("source", "target"):
        assert f"training the {side} vocabulary" in said


def test_translate_and_score_agree_with_the_model_by_hand(separate, capsys, tmp_path):
    """The ids by SentencePiece itself, the log-probabilities by the whole model."""
    lines = [source for source, _ in tiny.sentences(6, 8)]
    source = tmp_path / "in.en"
    source.write_text("".join(line + "\n" for line in lines))
    where = f"--workdir={separate}", "--checkpoint=last"
    rows = out(capsys, "translate", *where, f"--input={source}", "--json").splitlines()
    found = [json.loads(row)["hypotheses"][0] for row in rows]
    kept = [i for i, each in enumerate(found) if each["finished"]]
    assert len(kept) > 2
    source_model, target_model = (
        sentencepiece.SentencePieceProcessor(str(separate / name)) for name in NAMES
    )
    config = dataclasses.replace(read_workdir(separate).model, dtype="float32")
    apply = jax.jit(Transformer(config, 275, source_vocab_size=270).apply)
    variables = {"params": load_params(separate, "last", print).params}
    for i in kept:
        target = [target_model.piece_to_id(piece) for piece in found[i]["tokens"]]
        assert target_model.decode(target) == found[i]["text"]
        ids = np.asarray([[*source_model.encode(lines[i]), 1]])
        target_in, target_out = np.asarray([[3, *target]]), np.asarray([*target, 1])
        logits = apply(variables, ids, np.asarray([ids.shape[1]]), target_in)
        log_probs = jax.nn.log_softmax(jnp.asarray(logits)[0])
        expected = float(log_probs[np.arange(len(target_out)), target_out].sum())
        assert found[i]["log_prob"] == pytest.approx(expected, abs=1e-4)
    pieces = tmp_path / "out.de"
    pieces.write_text("".join(" ".join(each["tokens"]) + "\n" for each in found))
    sides = f"--source={source}", f"--target={pieces}", "--pieces"
    scores = out(capsys, "score", *where, *sides).split()
    for i in kept:
        assert float(scores[i]) == pytest.approx(found[i]["log_prob"], abs=1e-4)


def test_a_prefix_is_of_the_targets_pieces(separate):
    translator, config, _ = load_translator([separate], "last", print)
    (found,) = translator.translate(["a b"], config.decode, prefixes=["B A"])
    assert found[0].text.startswith("B A")
    assert not set(found[0].tokens[:2]) & {f"<0x{i:02X}>" for i in range(256)}


def test_the_workdir_alone_is_evaluated(separate, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(separate, run)
    report = json.loads(
        out(capsys, "evaluate", f"--workdir={run}", "--checkpoint=last", "--json")
    )
    assert report["sentences"] == 9
    for name in ("data", "data.json", "metrics.jsonl"):
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    files = [separate.parent / "corpus" / f"test.{side}" for side in ("en", "de")]
    flags = f"--source={files[0]}", f"--reference={files[1]}", "--json"
    again = out(capsys, "evaluate", f"--workdir={run}", "--checkpoint=last", *flags)
    assert json.loads(again)["bleu_detail"] == report["bleu_detail"]


def test_swapped_or_foreign_files_are_refused(separate, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(separate, run)
    for name, other in (NAMES, NAMES[::-1]):
        shutil.copy(separate / other, run / name)
    message = refused(capsys, "translate", f"--workdir={run}", "--input=/dev/null")
    assert "vocabulary of 270 pieces" in message and "embedding has 275" in message
    message = refused(capsys, "evaluate", f"--workdir={separate},{run}")
    assert f"{run} has another vocabulary of the source than {separate}" in message
    shutil.copy(separate / NAMES[0], run / NAMES[0])
    message = refused(capsys, "evaluate", f"--workdir={separate},{run}")
    assert f"{run} has another vocabulary of the target than {separate}" in message
    config = separate.parent / "corpus" / "config.py"
    message = refused(capsys, "train", f"--config={config}", f"--workdir={run}")
    assert "not those this run began with" in message


def test_a_run_that_has_begun_keeps_its_kind(separate, tmp_path, capsys):
    config = f"--config={separate.parent / 'corpus' / 'config.py'}"
    joint = ["--config.tokenizer.joint=true", "--config.tokenizer.source_vocab_size=0"]
    message = refused(capsys, "train", config, f"--workdir={separate}", *joint)
    assert "tokenizer.joint: False -> True" in message


@pytest.mark.slow
def test_a_run_that_was_stopped_ends_as_one_that_was_not(separate, tmp_path):
    config = str(separate.parent / "corpus" / "config.py")
    for steps in (4, 8):
        flags = [f"--config.train.steps={steps}"]
        assert tiny.train(config, tmp_path / "run", flags) == 0
    trees = [
        load_params(run, "8", print).params for run in (separate, tmp_path / "run")
    ]
    jax.tree.map(np.testing.assert_array_equal, *trees)


def test_two_equal_tables_are_one_shared_table():
    """The same loss; the shared table's gradient is the sum of the two tables'."""
    shared = ModelConfig(**TINY, dropout=0.0)
    apart = dataclasses.replace(shared, share_embeddings=False)
    one, two = Transformer(shared, 29), Transformer(apart, 29, source_vocab_size=29)
    rng = np.random.default_rng(0)
    source, target = rng.integers(4, 29, (2, 3, 5)).astype(np.int32)
    target_in = np.concatenate([np.full((3, 1), 3, np.int32), target[:, :-1]], axis=1)
    lengths = np.asarray([5, 3, 4], np.int32)
    batch = Batch(source, lengths, target_in, target, lengths)

    def loss(params, model):
        x = model.apply({"params": params}, source, lengths, target_in, method="hidden")
        return batch_loss(params, x, batch, 0.1).loss

    params = init_state(one, optax.sgd(1.0), 0).params
    both = params | {"source_embedding": params["embedding"]}
    expected = jax.tree.map(jnp.shape, init_state(two, optax.sgd(1.0), 0).params)
    assert jax.tree.map(jnp.shape, both) == expected
    gradient = jax.jit(jax.value_and_grad(loss), static_argnums=1)
    value, of_one = gradient(params, one)
    other, of_two = gradient(both, two)
    assert float(value) == float(other)
    tables = [of_two.pop("source_embedding"), of_two["embedding"]]
    assert min(float(jnp.abs(each["table"]).max()) for each in tables) > 1e-3
    of_two["embedding"] = jax.tree.map(jnp.add, *tables)
    for a, b in zip(jax.tree.leaves(of_one), jax.tree.leaves(of_two), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
