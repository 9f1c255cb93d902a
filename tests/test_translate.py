"""The verbs `translate` and `score` with the options of the search."""

import io
import json
import pathlib
import shutil

import pytest
import tiny

from transformer_jax.config import TokenizerConfig
from transformer_jax.data import tokenizer

LINES = ["a b c", "", "d e f g h", "b", "c a"]


@pytest.fixture
def source(tmp_path: pathlib.Path) -> str:
    path = tmp_path / "source.en"
    path.write_text("".join(line + "\n" for line in LINES))
    return str(path)


def translate(trained, capsys, source: str, *options: str) -> list[str]:
    code = tiny.run(
        "translate",
        f"--workdir={trained}",
        "--checkpoint=last",
        f"--input={source}",
        *options,
    )
    out, err = capsys.readouterr()
    assert code == 0, err
    assert "programs compiled: " in err
    return out.splitlines()


def refused(capsys, *arguments: str) -> str:
    assert tiny.run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("transformer-jax: ")
    return err


def test_scores_stand_before_the_text(trained, capsys, source):
    plain = translate(trained, capsys, source)
    rows = [line.split("\t") for line in translate(trained, capsys, source, "--scores")]
    assert [text for _, text in rows] == plain and len(plain) == len(LINES)
    assert all(float(score) <= 0 for score, _ in rows)


def test_pieces_go_to_score(trained, capsys, source, tmp_path):
    flags = ("--pieces", "--scores", "--alpha=0")
    rows = [line.split("\t") for line in translate(trained, capsys, source, *flags)]
    keep = [i for i, (_, pieces) in enumerate(rows) if pieces]
    target, kept = tmp_path / "pieces", tmp_path / "kept.en"
    target.write_text("".join(rows[i][1] + "\n" for i in keep))
    kept.write_text("".join(LINES[i] + "\n" for i in keep))
    verb = ("score", f"--workdir={trained}", f"--source={kept}", f"--target={target}")
    verb = (*verb, "--checkpoint=last")
    assert tiny.run(*verb, "--pieces") == 0
    found = [float(line) for line in capsys.readouterr().out.splitlines()]
    rows_json = translate(trained, capsys, source, "--json", "--alpha=0")
    for i, score in zip(keep, found, strict=True):
        best = json.loads(rows_json[i])["hypotheses"][0]
        if best["finished"]:
            assert score == pytest.approx(float(rows[i][0]), abs=1e-5)
    target.write_text("no piece\n" * len(keep))
    assert "line 1: 'no' is no piece" in refused(capsys, *verb, "--pieces")


def test_json_has_all_of_a_hypothesis(trained, capsys, source):
    rows = translate(trained, capsys, source, "--json", "--nbest=2", "--beam_size=3")
    assert [json.loads(row)["line"] for row in rows] == [1, 2, 3, 4, 5]
    for line, text in enumerate(rows):
        row = json.loads(text)
        if not LINES[line]:
            assert [h["text"] for h in row["hypotheses"]] == [""]
            continue
        assert 1 <= len(row["hypotheses"]) <= 2
        for h in row["hypotheses"]:
            steps = len(h["token_log_probs"])
            assert steps == len(h["tokens"]) + h["finished"]
            assert sum(h["token_log_probs"]) == pytest.approx(h["log_prob"], abs=1e-4)
            assert len(h["attention"]) == steps
            for weights in h["attention"]:
                assert len(weights) == len(row["source_tokens"]) + 1
                assert sum(weights) == pytest.approx(1, abs=1e-4)


def test_typed_marks_are_text(trained, capsys, tmp_path):
    """Nothing that is typed ends, cuts or drops a line."""
    path = tmp_path / "marks.en"
    path.write_text("a </s> b <pad> <unk> <2de>\n</s>\na\n")
    rows = [json.loads(row) for row in translate(trained, capsys, str(path), "--json")]
    assert [row["line"] for row in rows] == [1, 2, 3]
    for row in rows:
        shown = {*row["source_tokens"], *row["hypotheses"][0]["tokens"]}
        assert not shown & {"</s>", "<pad>", "<unk>", "<s>"}
        # A row of attention goes to every source piece and to the one end mark.
        width = len(row["hypotheses"][0]["attention"][0])
        assert width == len(row["source_tokens"]) + 1
    assert len(rows[0]["source_tokens"]) > 20


def test_config_vocabulary_and_checkpoints_are_enough(
    trained, capsys, source, tmp_path
):
    alone = tmp_path / "elsewhere" / "run"
    alone.mkdir(parents=True)
    for name in ("config.json", "tokenizer.model"):
        shutil.copy(trained / name, alone)
    shutil.copytree(trained / "checkpoints", alone / "checkpoints")
    config = json.loads((alone / "config.json").read_text())
    for name in [
        name for name in config["data"] if name.endswith(("source", "target"))
    ]:
        config["data"][name] = "/nowhere/text"
    (alone / "config.json").write_text(json.dumps(config))
    found = translate(alone, capsys, source, "--scores")
    assert found == translate(trained, capsys, source, "--scores")


def test_prefixes_belong_to_lines(trained, capsys, source, tmp_path):
    prefix = tmp_path / "prefix.de"
    wanted = ["X", "Y", "", "A B C D", "H"]
    prefix.write_text("".join(line + "\n" for line in wanted))
    found = translate(trained, capsys, source, f"--prefix={prefix}")
    free = translate(trained, capsys, source)
    assert found[1] == "" and found[2] == free[2]
    assert all(found[i].startswith(wanted[i]) for i in (0, 3, 4))
    prefix.write_text("X\n")
    message = refused(
        capsys,
        "translate",
        f"--workdir={trained}",
        f"--input={source}",
        f"--prefix={prefix}",
    )
    assert f"{source} has 5 lines, {prefix} 1" in message


def test_samples_and_minimum_bayes_risk(trained, capsys, source):
    flags = ("--sample", "--nbest=4", "--top_k=20", "--temperature=0.8")
    rows = translate(trained, capsys, source, *flags)
    assert len(rows) == 4 * 4 + 1
    assert translate(trained, capsys, source, *flags) == rows
    assert translate(trained, capsys, source, *flags, "--seed=3") != rows
    chosen = translate(trained, capsys, source, "--mbr=4", *flags[2:])
    drawn = [row.split("\t")[2] for row in rows if row.startswith("1\t")]
    assert chosen[0] in drawn


def test_an_ensemble_of_copies_is_the_model(trained, capsys, source, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    one = translate(trained, capsys, source, "--scores")
    two = translate(f"{trained},{copy}", capsys, source, "--scores")
    assert [t.split("\t")[1] for t in one] == [t.split("\t")[1] for t in two]


def test_an_ensemble_needs_one_vocabulary(trained, capsys, source, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(trained, other)
    vocabulary = tokenizer.train(["a b c d"], TokenizerConfig(vocab_size=265), 0)
    (other / "tokenizer.model").write_bytes(vocabulary.model)
    for verb in (
        ("translate", f"--input={source}"),
        ("score", f"--source={source}", f"--target={source}"),
        ("evaluate",),
    ):
        message = refused(
            capsys, *verb, f"--workdir={trained},{other}", "--checkpoint=last"
        )
        assert "another vocabulary" in message and str(other) in message


def test_evaluate_takes_an_ensemble_and_every_setting(trained, capsys, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    flags = ("--no_repeat_ngram=2", "--beam_size=1", "--penalty=length", "--json")
    code = tiny.run(
        "evaluate", f"--workdir={run},{trained}", "--checkpoint=last", *flags
    )
    report = json.loads(capsys.readouterr().out)
    assert code == 0 and report["checkpoint"] == "last+last"
    assert report["decode"]["no_repeat_ngram"] == 2
    assert report["decode"]["penalty"] == "length"
    assert (run / "evaluate" / "test-last+last.json").is_file()


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--top_p=1.5", "--sample"], "--top_p is 1.5"),
        (["--temperature=0", "--sample"], "--temperature is 0"),
        (["--temperature=0.5"], "--temperature is 0.5; it is for draws"),
        (["--top_k=5"], "--top_k is 5; it is for draws"),
        (["--penalty=none"], "--penalty is 'none'; there are: gnmt, length"),
        (["--coverage=-1"], "--coverage is -1"),
        (["--min_length=-1"], "not a whole number"),
        (["--sample", "--beam_size=4"], "--beam_size is for a search"),
        (["--nbest=9"], "give --beam_size=9 or more"),
        (["--mbr=2", "--nbest=3"], "give --mbr=3 or more"),
        (["--no_repeat_ngrams=2"], "did you mean --no_repeat_ngram?"),
        (["--top-k=2"], "did you mean --top_k?"),
    ],
)
def test_settings_that_make_no_sense(trained, capsys, source, flags, named):
    message = refused(
        capsys, "translate", f"--workdir={trained}", f"--input={source}", *flags
    )
    assert named in message


def test_fewer_hypotheses_than_asked_for_are_no_copies(
    trained, capsys, monkeypatch, tmp_path
):
    """One piece at most: no more outputs than the end and the letters."""
    monkeypatch.setattr("sys.stdin", io.StringIO("a\n"))
    path = tmp_path / "one.en"
    path.write_text("a\n")
    rows = translate(
        trained,
        capsys,
        str(path),
        "--nbest=9",
        "--beam_size=9",
        "--max_length=1",
        "--min_length=0",
    )
    assert len({row.split("\t")[2] for row in rows}) == len(rows) < 9
