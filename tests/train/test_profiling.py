"""Speed against the chip's, device memory, and traces that programs can open."""

import gzip
import json
import pathlib
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.config import Config, DescribeConfig, ModelConfig, TrainConfig
from transformer_jax.config_file import changes_the_run
from transformer_jax.data.batching import Batch, Shape, make_batch
from transformer_jax.train.metrics import TrainProgress
from transformer_jax.train.profiling import Meter, Trace

MODEL = ModelConfig(num_layers=1, d_model=4, d_ff=8, num_heads=1, d_k=2, d_v=2)
VOCAB_SIZE = 10


def device(kind: str, peak: int | None = None) -> SimpleNamespace:
    stats = None if peak is None else {"peak_bytes_in_use": peak, "bytes_in_use": 1}
    return SimpleNamespace(
        device_kind=kind, memory_stats=lambda: stats, process_index=0
    )


def batch(source: list[int], target: list[int]) -> Batch:
    """Sentences of so many tokens, EOS included, in a shape with padding."""

    def ids(counts: list[int]) -> list[np.ndarray]:
        return [np.full(count - 1, 7) for count in counts]

    return make_batch(ids(source), ids(target), Shape(8, 9, 9))


def meter(devices: list[SimpleNamespace], **fields: Any) -> Meter:
    return Meter(Config(model=MODEL, **fields), VOCAB_SIZE, devices)


# Multiply-adds at 5 tokens a sentence. A layer has 4 x 8 weights of projections, 64 of
# the feed-forward layer, and 5 x (2 + 2) in attention.
SOURCE = (32 + 64 + 20) + 16  # and keys and values for the decoder
TARGET = (32 + 64 + 20) + (16 + 20) + 40  # and the cross-attention, and the output
FLOPS = 3 * 2 * (15 * SOURCE + 15 * TARGET)  # of 15 tokens each, forward and backward


def test_the_share_of_the_chips_speed() -> None:
    """Real tokens only, of all batches; the next call begins anew."""
    found = meter([device("TPU v4")] * 4)
    found.add([batch([4, 5], [5, 5]), batch([6], [5])])
    values = found.take(updates=2, seconds=3.0)
    assert values["step_seconds"] == 1.5
    assert values["mfu"] == pytest.approx(FLOPS / (3.0 * 4 * 275e12))
    assert values.keys() == {"step_seconds", "mfu"}
    found.add([batch([4, 5, 6], [5, 5, 5])])
    again = found.take(updates=1, seconds=0.1)
    assert again["mfu"] == pytest.approx(30 * values["mfu"])
    assert "mfu" not in found.take(updates=1, seconds=1.0)  # of no sentence


def test_what_describe_is_to_count_changes_nothing() -> None:
    found = meter([device("TPU v4")] * 4, describe=DescribeConfig(decoder_only=True))
    found.add([batch([4, 5, 6], [5, 5, 5])])
    assert found.take(1, 1.0)["mfu"] == pytest.approx(FLOPS / (4 * 275e12))


def test_an_unknown_chip_has_no_share() -> None:
    found = meter([device("cpu")])
    found.add([batch([4], [5])])
    assert found.take(4, 2.0) == {"step_seconds": 0.5}


def test_memory_is_that_of_the_fullest_device() -> None:
    found = meter([device("cpu", 5), device("cpu", 9), device("cpu"), device("cpu", 7)])
    assert found.take(1, 1.0) == {"step_seconds": 1.0, "device_memory": 9}


def test_the_share_is_shown_where_it_is_known(capsys: pytest.CaptureFixture) -> None:
    values = {"loss": 1.0, "tokens_per_second": 2.0, "learning_rate": 0.1}
    progress = TrainProgress(0, 4)
    progress.log(1, 1.0, values | {"data_wait": 0.0})
    progress.log(1, 1.0, values | {"data_wait": 0.0, "mfu": 0.4567})
    progress.close()
    plain, known = capsys.readouterr().err.splitlines()
    assert "MFU" not in plain and "data wait 0.0%  MFU 45.7%  left" in known


def test_a_run_may_go_on_with_a_profile() -> None:
    profiled = Config(train=TrainConfig(profile_steps=3))
    assert changes_the_run(Config(), profiled) == []


# --- Traces ---------------------------------------------------------------------


def traced(workdir: pathlib.Path, updates: int, steps: range) -> tuple[list, list]:
    """Returns the steps that a trace names, and the lines reported."""
    lines: list[str] = []
    trace, step = Trace(workdir, steps.start - 1, updates, lines.append), 0
    work = jax.jit(lambda x: jnp.sin(x) + 1)
    state = work(jnp.zeros(3))
    for step in steps:
        with trace.update(step, state):
            state = work(state)
        trace.end(state)
    trace.close()
    named = []
    for file in workdir.rglob("*.trace.json.gz"):
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        assert len(events) > 10
        assert not any(e.get("name", "").startswith("$") for e in events)  # of Python
        named += [e["args"]["step_num"] for e in events if e.get("name") == "update"]
    return sorted(map(int, named)), lines


def test_updates_after_the_first_five(tmp_path: pathlib.Path) -> None:
    named, lines = traced(tmp_path, 3, range(21, 41))
    assert named == [26, 27, 28]
    assert lines == [f"profile of updates 26 to 28 is in {tmp_path / 'profile'}"]
    assert list(tmp_path.rglob("*.xplane.pb"))  # which TensorBoard reads


def test_a_run_that_ends_within(tmp_path: pathlib.Path) -> None:
    named, lines = traced(tmp_path, 30, range(1, 9))
    assert named == [6, 7, 8]
    assert lines == [f"profile of updates 6 to 8 is in {tmp_path / 'profile'}"]


def test_a_run_that_ends_before(tmp_path: pathlib.Path) -> None:
    assert traced(tmp_path, 3, range(1, 6)) == (
        [],
        ["no profile: update 6 was to be its first"],
    )


def test_without_one_nothing_is_written_and_nothing_waits(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[Any] = []
    monkeypatch.setattr(jax, "block_until_ready", waits.append)
    assert traced(tmp_path, 0, range(1, 20)) == ([], [])
    assert not list(tmp_path.iterdir()) and not waits


def test_it_waits_at_both_ends_only(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[Any] = []
    monkeypatch.setattr(jax, "block_until_ready", waits.append)
    traced(tmp_path, 3, range(1, 20))
    assert len(waits) == 2
