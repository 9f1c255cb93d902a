"""The program: what each verb prints, and one line with exit code 2 for bad input."""

import errno
import gzip
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import sacrebleu
import tiny

import transformer_jax
from transformer_jax import cli, streams
from transformer_jax.data.tokenizer import Tokenizer

LINES = ["a b c", "", "h g f e d c b a", " \t", "a", "\u00a0\u200b", "e f"]


@pytest.fixture
def stdin(monkeypatch, tmp_path):
    """Gives the program a standard input, as a file."""

    def give(content: bytes) -> None:
        path = tmp_path / "stdin"
        path.write_bytes(content)
        monkeypatch.setattr(streams, "STDIN", str(path))

    return give


def one_line(capsys) -> str:
    """Returns the error, and checks that it is one line without a traceback."""
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    errors = [line for line in lines if line.startswith("transformer-jax: ")]
    assert len(errors) == 1 and "Traceback" not in captured.err
    assert lines[-1] == errors[0]
    return errors[0]


def text(path: pathlib.Path, lines: list[str]) -> str:
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


# --- Help -----------------------------------------------------------------------


def test_help_is_quick_and_has_an_example():
    code = (
        "import sys\nfrom transformer_jax import cli\n"
        "try:\n    cli.main(sys.argv[1:])\nexcept SystemExit as stop:\n"
        "    assert stop.code == 0\n"
        "heavy = {'jax', 'flax', 'sacrebleu', 'sacremoses', 'tensorflow_datasets'}\n"
        "assert not heavy & set(sys.modules)"
    )
    verbs = "prepare train evaluate bleu translate score average describe".split()
    for arguments in ([], *([verb] for verb in verbs)):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments, "--help"],
            capture_output=True,
            text=True,
            check=True,
        )
        example = ["transformer-jax", *(arguments or ["train"]), "--"]
        assert "Example: " + " ".join(example) in " ".join(done.stdout.split())
        for verb in verbs if not arguments else []:
            assert f"\n    {verb}" in done.stdout


def test_version(capsys):
    with pytest.raises(SystemExit):
        tiny.run("--version")
    assert capsys.readouterr().out.strip() == transformer_jax.__version__


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "VERB"),
        (["trian"], "trian"),
        (["train", "--config=x.py"], "--workdir"),
        (["translate", "--workdir=w", "--beam_sise=4"], "did you mean --beam_size?"),
        (["translate", "--workdir=w", "--beam_size=0"], "above 0"),
        (["translate", "--workdir=w", "--alpha=x"], "--alpha"),
        (["translate", "--workdir=w", "file.en"], "file.en"),
        (["translate", "--workdir=w", "--config.train.steps=1"], "unknown option"),
        (["evaluate", "--workdir=w", "--split=tset"], "tset"),
        (["evaluate", "--workdir=w", "--source=a"], "--reference"),
        (["train", "--config=none.py", "--workdir=w"], "none.py does not exist"),
        (["translate", "--workdir=nowhere"], "nowhere holds no config.json"),
        (["average", "--workdir=nowhere"], "nowhere"),
        (["bleu", "--hypothesis=nofile", "--reference=nofile"], "nofile"),
        (["bleu", "--hypothesis=a", "--reference=b", "--lang=de"], "--paper"),
        (["bleu", "--hypothesis=a", "--reference=b", "--seed=1"], "--compare"),
        (["bleu", "--hypothesis=a", "--reference=b", "--samples=0"], "above 0"),
    ],
)
def test_mistakes_on_the_command_line(capsys, arguments, named):
    assert tiny.run(*arguments) == 2
    assert named in one_line(capsys)


def test_an_override_may_be_a_word_of_its_own(tmp_path, capsys):
    config = tiny.write_config(tmp_path)
    flags = ["describe", "--config", config, "--config.model.d_ff", "48", "--json"]
    assert tiny.run(*flags) == 0
    wide = json.loads(capsys.readouterr().out)["parameters"]
    assert tiny.run("describe", "--config", config, "--json") == 0
    narrow = json.loads(capsys.readouterr().out)["parameters"]
    assert wide - narrow == 2 * (2 * 16 * 24 + 24)


# --- Verbs ----------------------------------------------------------------------


@pytest.mark.parametrize("final_newline", [True, False])
def test_translate_gives_a_line_for_a_line(trained, stdin, capsys, final_newline):
    content = "\n".join(LINES) + ("\n" if final_newline else "")
    stdin(content.encode())
    assert tiny.run("translate", f"--workdir={trained}") == 0
    lines = capsys.readouterr().out.split("\n")
    assert len(lines) == len(LINES) + 1 and lines[-1] == ""
    blank = [1, 3, 5]
    assert all(lines[i] == "" for i in blank)


def test_translate_files_json_and_nbest(trained, tmp_path, capsys):
    source = text(tmp_path / "in.en", LINES)
    output = tmp_path / "new" / "folder" / "out.de"
    base = ["translate", f"--workdir={trained}", f"--input={source}"]
    assert tiny.run(*base, f"--output={output}") == 0
    plain = output.read_text().split("\n")[:-1]
    assert not output.with_name("out.de.partial").exists()
    assert tiny.run(*base, "--json", "--nbest=3", "--beam_size=3") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["line"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    tokenizer = Tokenizer.load(trained / "tokenizer.model")
    for row in rows:
        scores = [h["score"] for h in row["hypotheses"]]
        assert scores == sorted(scores, reverse=True) and max(scores) <= 0
        tokens = [tuple(h["tokens"]) for h in row["hypotheses"]]
        assert len(set(tokens)) == len(tokens) >= 1
        for hypothesis in row["hypotheses"]:
            ids = [tokenizer._processor.piece_to_id(t) for t in hypothesis["tokens"]]
            assert tokenizer.decode(ids) == hypothesis["text"]
            assert not {0, 1, 2, 3} & set(ids)
    assert tiny.run(*base, "--nbest=2") == 0
    table = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    best = {}
    for line, score, hypothesis in table:
        best.setdefault(int(line), hypothesis)
        assert float(score) <= 0
    assert [best[i] for i in range(1, 8)] == plain


def test_nbest_needs_a_beam(trained, stdin, capsys):
    stdin(b"a\n")
    assert tiny.run("translate", f"--workdir={trained}", "--nbest=3") == 2
    assert "--beam_size=3" in one_line(capsys)


def test_a_long_line_is_cut_with_a_warning(trained, stdin, capsys):
    stdin(("a\n" + "b c " * 40 + "\nd\n").encode())
    assert tiny.run("translate", f"--workdir={trained}") == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 3
    assert "warning: line 2 has 80 pieces; only its first 31" in captured.err


def test_score_is_the_log_probability_that_translate_found(trained, tmp_path, capsys):
    lines = ["a b c", "h g f e d c b a", "a", "b a"]
    source = text(tmp_path / "in", lines)
    base = [f"--workdir={trained}"]
    # a negative alpha prefers short ones, so that some end before the limit
    search = ["--json", "--beam_size=4", "--nbest=4", "--alpha=-1"]
    assert tiny.run("translate", *base, f"--input={source}", *search) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = [(lines[row["line"] - 1], h) for row in rows for h in row["hypotheses"]]
    tokenizer = Tokenizer.load(trained / "tokenizer.model")

    def comparable(line: str, hypothesis: dict) -> bool:
        """Not cut at the limit (4 more than the source), and the same pieces again."""
        again = tokenizer.pieces(tokenizer.encode([hypothesis["text"]])[0])
        limit = len(tokenizer.encode([line])[0]) + 4
        return again == hypothesis["tokens"] and len(again) < limit

    pairs = [pair for pair in found if comparable(*pair)]
    assert len(pairs) >= 4
    source = text(tmp_path / "s", [line for line, _ in pairs])
    target = text(tmp_path / "t", [h["text"] for _, h in pairs])
    assert tiny.run("score", *base, f"--source={source}", f"--target={target}") == 0
    values = [float(line) for line in capsys.readouterr().out.splitlines()]
    for value, (_, hypothesis) in zip(values, pairs, strict=True):
        length = len(hypothesis["tokens"]) + 1
        expected = hypothesis["score"] * ((5 + length) / 6) ** -1
        assert value == pytest.approx(expected, abs=1e-5)


def test_score_wants_equal_counts(trained, tmp_path, capsys):
    source, target = text(tmp_path / "s", ["a", "b"]), text(tmp_path / "t", ["a"])
    flags = [f"--workdir={trained}", f"--source={source}", f"--target={target}"]
    assert tiny.run("score", *flags) == 2
    message = one_line(capsys)
    assert f"{source} has 2 lines" in message and f"{target} 1" in message


def test_evaluate_writes_what_it_prints(trained, tmp_path, capsys):
    workdir = tmp_path / "moved"
    shutil.copytree(trained, workdir)
    assert tiny.run("evaluate", f"--workdir={workdir}", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((workdir / "evaluate" / "test-best.json").read_text())
    hypotheses = (workdir / "evaluate" / "test-best.txt").read_text().split("\n")[:-1]
    references = [target for _, target in tiny.sentences(9, 2)]
    assert report["sentences"] == len(hypotheses) == 9
    expected = sacrebleu.corpus_bleu(hypotheses, [references])
    assert report["bleu"] == pytest.approx(expected.score, abs=1e-9)
    assert "tok:13a" in report["bleu_signature"]
    assert report["direction"] == "en-de"
    # the last checkpoint's validation BLEU is what training wrote down
    flags = [f"--workdir={workdir}", "--split=valid", "--checkpoint=8", "--json"]
    assert tiny.run("evaluate", *flags) == 0
    valid = json.loads(capsys.readouterr().out)["bleu"]
    rows = [json.loads(r) for r in (trained / "metrics.jsonl").read_text().splitlines()]
    assert [r["bleu"] for r in rows if r["kind"] == "valid"][-1] == valid
    # given files, the same sentences give the same score
    corpus = trained.parent / "corpus"
    files = [f"--source={corpus / 'test.en'}", f"--reference={corpus / 'test.de'}"]
    assert tiny.run("evaluate", f"--workdir={workdir}", *files, "--json") == 0
    assert json.loads(capsys.readouterr().out)["bleu"] == report["bleu"]


def test_bleu_is_sacrebleu(tmp_path, capsys):
    hypothesis = text(tmp_path / "h", ["the cat sat on the mat", "a dog"])
    one = text(tmp_path / "r1", ["the cat sat on a mat", "the dog"])
    two = text(tmp_path / "r2", ["a cat sat on the mat", "a dog barked"])
    base = ["bleu", f"--hypothesis={hypothesis}", f"--reference={one},{two}"]
    assert tiny.run(*base, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    done = subprocess.run(
        f"{sys.executable} -m sacrebleu {one} {two} -m bleu chrf -w 4 "
        f"-i {hypothesis}".split(),
        capture_output=True,
        text=True,
        check=True,
    )
    bleu, chrf = json.loads(done.stdout)
    assert report["bleu"] == pytest.approx(bleu["score"], abs=1e-4)
    assert report["chrf"] == pytest.approx(chrf["score"], abs=1e-4)
    assert report["references"] == 2
    assert tiny.run(*base) == 0
    printed = capsys.readouterr().out
    assert report["bleu_signature"] in printed and report["chrf_signature"] in printed


def test_bleu_wants_equal_counts(tmp_path, capsys):
    hypothesis, one = text(tmp_path / "h", ["a", "b"]), text(tmp_path / "r", ["a"] * 3)
    assert tiny.run("bleu", f"--hypothesis={hypothesis}", f"--reference={one}") == 2
    message = one_line(capsys)
    assert "2 hypotheses" in message and "[3]" in message
    empty = text(tmp_path / "e", [])
    assert tiny.run("bleu", f"--hypothesis={empty}", f"--reference={empty}") == 2
    assert "empty" in one_line(capsys)
    assert tiny.run("bleu", f"--hypothesis={empty}", f"--reference={one}") == 2
    assert "0 hypotheses" in one_line(capsys)
    flags = [f"--hypothesis={one}", f"--reference={one}", f"--compare={hypothesis}"]
    assert tiny.run("bleu", *flags) == 2
    assert f"{hypothesis}: 2 hypotheses" in one_line(capsys)


def test_bleu_warns_of_an_empty_reference_line(tmp_path, capsys):
    hypothesis = text(tmp_path / "h", ["a b c d", "e"])
    reference = text(tmp_path / "r", ["a b c d", ""])
    files = [f"--hypothesis={hypothesis}", f"--reference={reference}"]
    assert tiny.run("bleu", *files, "--paper") == 0
    captured = capsys.readouterr()
    assert captured.err == "warning: the reference is empty in line 2\n"
    assert captured.out.startswith("BLEU = ")


def test_average_and_decode_with_it(trained, tmp_path, capsys):
    workdir = tmp_path / "run"
    shutil.copytree(trained, workdir)
    evaluate = ["evaluate", f"--workdir={workdir}", "--checkpoint=average", "--json"]
    assert tiny.run(*evaluate) == 2
    assert "transformer-jax average" in one_line(capsys)
    assert tiny.run("average", f"--workdir={workdir}") == 2
    assert "config.train.average_last of the run is 0; say how many by --last" in (
        one_line(capsys)
    )
    assert tiny.run("average", f"--workdir={workdir}", "--last=9") == 2
    assert "config.train.keep_last" in one_line(capsys)
    assert tiny.run("average", f"--workdir={workdir}", "--last=2") == 0
    assert "steps 6, 8" in capsys.readouterr().err
    assert tiny.run(*evaluate) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["checkpoint_steps"] == [6, 8] and report["checkpoint"] == "average"
    config = json.loads((workdir / "config.json").read_text())
    config["train"]["average_last"] = 3
    (workdir / "config.json").write_text(json.dumps(config))
    assert tiny.run("average", f"--workdir={workdir}") == 0
    assert "steps 4, 6, 8" in capsys.readouterr().err
    assert tiny.run("evaluate", f"--workdir={workdir}", "--checkpoint=7") == 2
    message = one_line(capsys)
    assert "--checkpoint=7" in message and "4, 6, 8" in message


def test_describe(capsys):
    assert tiny.run("describe", "--config=configs/base.py", "--json") == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 63_045_632
    assert tiny.run("describe", "--config=configs/base.py") == 0
    assert "63,045,632" in capsys.readouterr().out


def test_prepare_finds_what_it_made(tmp_path, capsys):
    config = tiny.write_config(tmp_path)
    base = ["prepare", f"--config={config}", f"--workdir={tmp_path / 'run'}"]
    assert tiny.run(*base) == 0
    assert "tokenising train" in capsys.readouterr().err
    assert tiny.run(*base) == 0
    again = capsys.readouterr().err
    assert "tokenising" not in again and "60 read, 60 kept" in again


# --- Bad input ------------------------------------------------------------------


def broken(name: str, folder: pathlib.Path) -> tuple[dict[str, object], list[str]]:
    """Breaks the corpus in `folder`; returns config fields and what must be named."""
    source = folder / "train.en"
    lines = source.read_text().splitlines()
    fields: dict[str, object] = {}
    if name == "unequal":
        text(source, [*lines, "one more"])
        return fields, ["61", "60", "train.en", "train.de"]
    if name == "missing":
        source.unlink()
        return fields, ["train.en"]
    if name == "directory":
        return {"data.train_source": str(folder)}, [str(folder), "directory"]
    if name == "not gzip":
        packed = folder / "train.en.gz"
        packed.write_bytes(gzip.compress(source.read_bytes())[:-9])
        return {"data.train_source": str(packed)}, ["train.en.gz"]
    if name == "not utf-8":
        source.write_bytes(b"a\nb \xe9 c\n" + source.read_bytes())
        target = folder / "train.de"
        target.write_bytes(b"A\nB\n" + target.read_bytes())
        return fields, ["train.en", "line 2", "byte"]
    if name == "empty":
        for side in ("en", "de"):
            (folder / f"train.{side}").write_text("")
        return fields, ["empty"]
    if name == "all left out":
        text(source, ["a " * 40] * 60)
        return {"tokenizer.vocab_size": 270}, ["no usable pairs", "60 too_long"]
    if name == "vocabulary":
        return {"tokenizer.vocab_size": 5000}, ["config.tokenizer.vocab_size = 5000"]
    if name == "no train":
        return {"data.train_source": ""}, ["config.data.train_source"]
    assert name == "batch"
    return {"batch.tokens": 33, "batch.row_multiple": 8}, ["config.batch.tokens = 33"]


@pytest.mark.parametrize(
    "name",
    (
        "unequal,missing,directory,not gzip,not utf-8,empty,all left out,vocabulary,"
        "no train,batch"
    ).split(","),
)
def test_bad_corpora(tmp_path, capsys, name):
    tiny.write_corpus(tmp_path)
    fields, named = broken(name, tmp_path)
    config = tiny.write_config(
        tmp_path, **{k.replace(".", "__"): v for k, v in fields.items()}
    )
    assert tiny.train(config, tmp_path / "run") == 2
    message = one_line(capsys)
    for word in named:
        assert word in message
    assert not (tmp_path / "run" / "checkpoints").exists() or name == "batch"


def test_odd_lines_are_text(tmp_path, capsys):
    """CR LF, BOM, U+0085, U+2028, tab and NUL neither end a line nor the run."""
    tiny.write_corpus(tmp_path)
    odd = "\ufeffa\r\nb\u0085c\nd\u2028e\nf\tg\nh\0a\n\n".encode()
    for side in ("en", "de"):
        path = tmp_path / f"train.{side}"
        path.write_bytes(odd + path.read_bytes())
    config = tiny.write_config(tmp_path, tokenizer__vocab_size=280)
    flags = [f"--config={config}", f"--workdir={tmp_path / 'run'}"]
    assert tiny.run("prepare", *flags) == 0
    assert "66 read, 65 kept, 1 empty" in capsys.readouterr().err


def test_empty_and_long_test_lines_are_never_left_out(tmp_path, capsys):
    tiny.write_corpus(tmp_path)
    for side in ("en", "de"):
        text(tmp_path / f"test.{side}", ["", "a", "b " * 60])
    config = tiny.write_config(tmp_path)
    flags = [f"--config={config}", f"--workdir={tmp_path / 'run'}"]
    assert tiny.run("prepare", *flags) == 0
    assert "3 read, 3 kept, 0 empty" in capsys.readouterr().err


def test_a_full_disk_is_one_line(trained, tmp_path, monkeypatch, capsys):
    def full(self, *args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    config = tiny.write_config(tmp_path)
    monkeypatch.setattr(pathlib.Path, "write_bytes", full)
    assert tiny.train(config, tmp_path / "run") == 2
    message = one_line(capsys)
    assert "No space left on device" in message and "data.json" in message


def test_interrupted_outside_training(monkeypatch, capsys):
    def interrupted(args):
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.VERBS, "bleu", interrupted)
    assert tiny.run("bleu", "--hypothesis=a", "--reference=b") == 130


def test_a_reader_that_goes_away_is_no_error(trained, tmp_path):
    source = text(tmp_path / "in", ["a b"] * 300)
    command = f"{sys.executable} -m transformer_jax translate --workdir={trained} "
    command += f"--input={source} | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("\n") == 1
    assert done.stderr in ("", "programs compiled: 1, one a length bucket\n")


def test_scores_are_finite(trained, stdin, capsys):
    stdin("😀 unseen ▁ </s> <pad>\n".encode())
    assert tiny.run("translate", f"--workdir={trained}", "--json") == 0
    row = json.loads(capsys.readouterr().out)
    assert math.isfinite(row["hypotheses"][0]["score"])
