"""The benchmark drivers: what they count, against closed forms and the text itself."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from tiny import FIELDS, sentences

from transformer_jax.config_file import load
from transformer_jax.data.tokenizer import Tokenizer

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"
CONFIG = str(BENCHMARKS / "shapes.py")
FACTS = {"date", "commit", "machine", "cores", "load", "python", "versions", "settings"}


@pytest.fixture
def own(monkeypatch):
    """The modules that the drivers share; the folder is no package."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import corpus
    import measure
    import shapes

    return corpus, measure, shapes


def start(driver, *flags):
    """Runs a driver in its own process, which sees one device."""
    quickly = "--xla_backend_optimization_level=0"
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{driver}.py"), *flags],
        env=os.environ | {"XLA_FLAGS": quickly},
        capture_output=True,
        text=True,
    )


def lines(done):
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("name", ["tiny", "base"])
def test_lengths_are_those_of_multi30k(own, name):
    corpus, _, _ = own
    counts = corpus.lengths(corpus.PAIRS[name])
    assert len(counts) == 29_000 and counts.min() == 4 and counts.max() == 38
    mean = counts.mean(axis=0) + 1
    assert np.all((mean > 14.5) & (mean < 16.0))


def test_every_word_is_one_piece(own, tmp_path):
    corpus, _, _ = own
    corpus.write(tmp_path, 60, 50)
    tokenizer = Tokenizer.load(tmp_path / "vocabulary.model")
    assert tokenizer.vocab_size == 60
    for side, counts in zip(("source", "target"), corpus.lengths(50).T, strict=True):
        text = (tmp_path / f"train.{side}").read_text().splitlines()
        ids = tokenizer.encode(text)
        assert [len(each) for each in ids] == counts.tolist()
        assert min(min(each) for each in ids) >= 4  # none unknown
        assert [tokenizer.decode(each) for each in ids] == text
    fixed = (tmp_path / "fixed.source").read_text().split("\n")[:-1]
    assert {len(line.split()) for line in fixed} == {14}
    # They are the words of the sources, cut in another way.
    sources = (tmp_path / "train.source").read_text().split()
    assert " ".join(fixed).split() == sources[: 14 * len(fixed)]
    numbered = (tmp_path / "vocabulary.yml").read_text().splitlines()
    assert numbered[:3] == ['"</s>": 0', '"<unk>": 1', '"4": 2'] and len(numbered) == 58


def forward(config, vocab_size, source, target, beams=1, cached=False):
    """Counts products one by one: 2 x rows x columns x inner width of each."""
    m, total = config.model, 0
    d, f, heads = m.d_model, m.d_ff, m.num_heads
    inner = heads * m.d_k
    for _ in range(m.num_layers):
        total += 2 * source * d * inner * 4 + 2 * source * d * f * 2
        total += 2 * source * source * inner * 2
        total += 2 * source * d * inner * 2  # keys and values for the decoder
        past = target * (target + 1) // 2 if cached else target * target
        total += beams * (2 * target * d * inner * 6 + 2 * target * d * f * 2)
        total += beams * 2 * (past + target * source) * inner * 2
    return total + beams * 2 * target * d * vocab_size


@pytest.mark.parametrize("name", ["tiny", "base"])
def test_flops_are_those_of_each_product(own, name):
    _, measure, _ = own
    config = load(f"{CONFIG}:{name}")
    source, target = np.array([[5, 14, 39], [6, 13, 30]])
    pairs = list(zip(source.tolist(), target.tolist(), strict=True))
    expected = 3 * sum(forward(config, 777, *pair) for pair in pairs)
    assert measure.update_flops(config, 777, source, target) == expected
    expected = sum(forward(config, 777, *pair, 4, True) for pair in pairs)
    assert measure.search_flops(config, 777, source, target, 4) == expected


def test_a_mistake_is_one_line():
    done = start("train_speed", "--shape=smoke", "--steps=3")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "train_speed.py: unknown option --steps=3; see " + (
        "train_speed.py --help\n"
    )


@pytest.mark.slow
def test_training_counts_every_token_of_an_epoch(own):
    corpus, _, shapes = own
    epoch = 14  # updates, of 200 pairs
    done = start("train_speed", "--shape=smoke", f"--updates={epoch}", "--repeats=2")
    (found,) = lines(done)
    assert found["updates_per_epoch"] == epoch
    counts = corpus.lengths(corpus.PAIRS["smoke"])
    assert found["pairs"] == len(counts)
    assert found["source_tokens"] == counts[:, 0].sum() + len(counts)
    assert found["target_tokens"] == counts[:, 1].sum() + len(counts)
    config = load(f"{CONFIG}:smoke")
    size = shapes.SHAPES["smoke"]["tokenizer.vocab_size"]
    pairs = (counts + 1).tolist()
    assert found["flops"] == 3 * sum(forward(config, size, *pair) for pair in pairs)
    assert 1 < found["shapes_taken"] == found["shapes"]
    assert len(found["repeats"]) == 2 and min(found["repeats"]) > 0
    assert found["peak_memory"] >= found["peak_memory_compiled"] > 100e6
    assert found["compile_seconds"] > 0 and found["devices"] == 1
    assert set(found["product_gflops"]) == {"numpy", "jax"} and set(found) >= FACTS
    best = max(rate["best"] for rate in found["product_gflops"].values())
    assert found["fraction"] == pytest.approx(found["gflops"] / best)


@pytest.mark.slow
@pytest.mark.parametrize("beam", [1, 4])
def test_forced_steps_are_taken(own, beam):
    flags = "--shape=smoke", "--steps=30", f"--beam={beam}", "--sentences=5"
    others = "--beside=echo $((20 + 2))", "--beside=false"
    done = start("decode_speed", *flags, "--batch=4", "--repeats=3", *others)
    (found,) = lines(done)
    told = [line.partition(":")[0] for line in done.stderr.splitlines()]
    theirs = ["echo $((20 + 2))", "22", "ended with 0"], ["false", "ended with 1"]
    assert told == ["repeat 1", *theirs[0], "repeat 2", *theirs[1], "repeat 3"]
    assert found["shortest_output"] == found["longest_output"] == 30
    assert found["output_tokens"] == 5 * 30 and found["source_tokens"] == 5 * 15
    config = load(f"{CONFIG}:smoke")
    assert found["flops"] == 5 * forward(config, 60, 15, 30, beam, True)
    assert found["sentences_per_second"] > 0 and set(found) >= FACTS


@pytest.mark.slow
@pytest.mark.parametrize("steps", ["natural", "40"])
def test_a_trained_run_decodes_to_its_ends_or_to_forced_ones(trained, tmp_path, steps):
    text = tmp_path / "text.en"
    text.write_text("".join(f"{source}\n" for source, _ in sentences(9, 5)))
    flags = f"--steps={steps}", f"--workdir={trained}", f"--input={text}"
    (found,) = lines(start("decode_speed", *flags, "--sentences=9", "--repeats=1"))
    most = 32 + FIELDS["decode.max_extra_length"]
    assert 1 <= found["shortest_output"] <= found["longest_output"] <= max(most, 40)
    assert (found["shortest_output"] == 40) == (steps == "40")
    assert found["shape"] is None


@pytest.mark.slow
def test_a_warm_cache_is_measured_beside_a_cold_one():
    cold, warm = lines(start("growth", "--what=start", "--shape=smoke", "--repeats=1"))
    assert (cold["cache"], warm["cache"]) == ("cold", "warm")
    assert 0 < min(cold["first_update_seconds"], warm["first_update_seconds"])
