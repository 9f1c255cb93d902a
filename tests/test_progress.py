"""What is shown of long work: lines in a log, a bar on a terminal, nothing if short."""

import os
import pty
import subprocess
import sys
import textwrap

import pytest
import tiny

from transformer_jax import progress
from transformer_jax.config import DataConfig
from transformer_jax.data import corpora
from transformer_jax.progress import Progress, clock


def test_short_work_says_nothing_in_a_log(capsys):
    shown = Progress()
    assert list(shown.track("abc", "reading")) == ["a", "b", "c"]
    shown.close()
    assert capsys.readouterr() == ("", "")


def test_long_work_says_how_far_it_is(monkeypatch, capsys):
    seconds = iter(range(0, 1000, 4))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(seconds))
    monkeypatch.setattr(progress, "LOOK", 2)
    shown = Progress()
    assert list(shown.track(range(14), "reading")) == list(range(14))
    assert list(shown.track((c for c in "abcdefgh"), "on")) == list("abcdefgh")
    shown.close()
    assert capsys.readouterr().err.splitlines() == [
        "reading  6/14  0/s  left 0:00:16",
        "reading  12/14  0/s  left 0:00:04",
        "on  6  0/s",
    ]


def test_names_are_shown_as_they_are(capsys):
    shown = Progress()
    shown.say("a [red]b[/red] :smile: 12")
    shown.close()
    assert capsys.readouterr().err == "a [red]b[/red] :smile: 12\n"


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00:00"), (3725.4, "1:02:05")])
def test_clock(seconds, text):
    assert clock(seconds) == text and clock(-1) == "0:00:00"


def test_a_corpus_tells_its_size(tmp_path):
    tiny.write_corpus(tmp_path)
    files = {"train_source": "train.en,test.en", "train_target": "train.de,test.de"}
    pairs = corpora.read_pairs(DataConfig(root=str(tmp_path), **files), "train")
    assert pairs.__length_hint__() == 69  # pyright: ignore
    assert next(pairs) == tiny.sentences(60, 0)[0] and len(list(pairs)) == 68


BAR = """
    from transformer_jax import progress
    progress.LOOK = 1
    shown = progress.Progress()
    for i in shown.track(range(3), "tokenising train"):
        shown.say(f"line {i}")
    shown.close()
"""


def test_a_bar_on_a_terminal(tmp_path):
    script = tmp_path / "bar.py"
    script.write_text(textwrap.dedent(BAR))
    ours, theirs = pty.openpty()
    subprocess.run([sys.executable, str(script)], stderr=theirs, check=True)
    os.close(theirs)
    text = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "tokenising train" in text and "line 2" in text and "\x1b[" in text
