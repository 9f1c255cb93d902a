"""The costs of an update, against closed forms and against arrays that are there."""

import dataclasses
import functools
import json
import math
import os
import pathlib
import subprocess
import sys

import jax
import pytest
import tiny

from transformer_jax import dry_run, parallel
from transformer_jax.config import (
    BatchConfig,
    Config,
    ModelConfig,
    ParallelConfig,
    TokenizerConfig,
    TrainConfig,
)
from transformer_jax.data.batching import Shape
from transformer_jax.describe import describe
from transformer_jax.errors import ConfigError
from transformer_jax.model.transformer import Transformer
from transformer_jax.train.optimizer import make_optimizer
from transformer_jax.train.step import init_state, state_axes

MODEL = ModelConfig(
    num_layers=1, d_model=128, d_ff=256, num_heads=4, d_k=16, d_v=32, max_length=32
)
VOCAB_SIZE = 1000
SUMS = 16  # bytes of two float32 and two int32
COUNTERS = 20  # bytes of the step, two counts of bad updates, and two of Adam's


def make_config(accumulate: int = 1, **fields: object) -> Config:
    return Config(
        tokenizer=TokenizerConfig(vocab_size=VOCAB_SIZE),
        batch=BatchConfig(tokens=700, row_multiple=4, buckets=3),
        model=dataclasses.replace(MODEL, **fields),  # pyright: ignore
        train=TrainConfig(accumulate=accumulate),
    )


def on_mesh(*sizes: int) -> Config:
    return dataclasses.replace(make_config(), parallel=ParallelConfig("mesh", *sizes))


@functools.cache
def found(config: Config) -> dry_run.DryRun:
    return dry_run.dry_run(config)


PARAMETERS = describe(make_config()).parameters


def test_copies_on_every_device() -> None:
    """20 rows, so 3 a device; `auto` is bfloat16, as on chips."""
    one = found(make_config())
    assert (one.layout, one.devices, one.dtype) == ("pmap over 8", 8, "bfloat16")
    assert one.parameters == PARAMETERS
    assert (one.shape, one.rows) == (Shape(20, 32, 32), 24)
    assert one.parameter_bytes == 4 * PARAMETERS
    assert one.optimizer_bytes == 8 * PARAMETERS + COUNTERS
    batch = 3 * 4 * (3 * 32 + 2)
    assert one.memory.held == 12 * PARAMETERS + COUNTERS + batch
    (sums,) = one.collectives
    assert (sums.kind, sums.devices) == ("all-reduce", 8)
    assert sums.bytes_sent == 2 * 7 / 8 * (4 * PARAMETERS + SUMS) == one.bytes_sent


def test_flops_are_those_of_the_compiler() -> None:
    """Each device's tokens are one chunk of the loss, which is a loop."""
    one = found(make_config())
    forward = describe(make_config(), length=32).flops
    token = forward.forward_source_token + forward.forward_target_token
    assert one.flops == 3 * 3 * 32 * token
    assert one.flops == pytest.approx(one.compiler_flops, rel=0.1)
    assert one.flops < one.compiler_flops  # which counts more than products


@pytest.mark.slow
def test_a_mesh_of_data_alone_sends_a_little_more_than_pmap() -> None:
    """The table's three gradients, of source, target and output, are sent each."""
    one, other = found(on_mesh(8, 1, 1)), found(make_config())
    assert one.parameter_bytes == other.parameter_bytes
    assert one.optimizer_bytes == other.optimizer_bytes
    numbers = PARAMETERS + 2 * VOCAB_SIZE * MODEL.d_model
    assert one.bytes_sent == pytest.approx(2 * 7 / 8 * 4 * numbers, rel=0.01)
    assert one.flops == other.flops


def test_parts_on_a_mesh() -> None:
    """The bytes are those of the arrays of a state that is really placed."""
    config = on_mesh(2, 2, 2)
    one, layout = found(config), parallel.make_layout(config.parallel)
    model = Transformer(config.model, VOCAB_SIZE)
    optimizer = make_optimizer(config.train, MODEL.d_model)
    fresh = jax.device_get(init_state(model, optimizer, 0))
    state = layout.place(fresh, state_axes(model, optimizer))

    def held(tree: object) -> int:
        return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))

    assert one.parameter_bytes == held(state.params) < PARAMETERS * 4 / 3
    assert one.optimizer_bytes == held(state.replace(params=None))
    batch = 5 * 4 * (3 * 32 + 2)  # 20 rows over data and fsdp
    assert one.memory.held == held(state) + batch
    assert one.rows == 20 and one.flops == found(make_config()).flops * 20 // 24
    # Gradients are summed over data and fsdp; all else goes along one axis.
    found_groups = {(each.kind, each.devices) for each in one.collectives}
    assert found_groups == {("all-reduce", 2), ("all-reduce", 4), ("all-gather", 2)}
    assert one.memory.peak < found(make_config()).memory.peak


def test_an_update_of_several_batches() -> None:
    """Twice the work, one sum over devices, and the sums beside the state."""
    one, other = found(make_config(2)), found(make_config())
    assert one.flops == 2 * other.flops
    assert one.compiler_flops == pytest.approx(2 * other.compiler_flops, rel=0.1)
    assert one.bytes_sent == other.bytes_sent
    more = one.memory.held - other.memory.held
    assert more == 4 * PARAMETERS + SUMS + 4  # and their number
    assert one.memory.temporaries > other.memory.temporaries / 2


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (on_mesh(2, 2, 1), "2 x 2 x 1 = 4, but there are 8 devices"),
        (on_mesh(1, 1, 8), "num_heads is 4, which config.parallel.tensor = 8"),
        (make_config(max_length=180), "700 holds no 4 rows .* set it to 720 or more"),
    ],
)
def test_what_cannot_run_is_refused(config: Config, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        dry_run.dry_run(config)


# --- Output ---------------------------------------------------------------------


def test_text() -> None:
    one = dataclasses.replace(
        found(make_config()),
        memory=dry_run.Memory(30 * 10**9, 10**9, 9 * 10**9),
        flops=3 * 10**12,
        collectives=(dry_run.Traffic("all-reduce", 8, 3, 441e6),),
    )
    lines = dry_run.as_text(one, ["v5e", "A100-40"]).splitlines()
    said = {line.split("  ")[0]: line for line in lines}
    assert said["layout"].startswith("layout    pmap over 8, simulated; bfloat16")
    assert said["shape"].endswith("; 4 empty rows are added, to divide")
    assert "up to 3 in a run" in said["shapes"]
    said = [" ".join(line.split()) for line in lines]
    assert "peak memory 40.0 GB" in said and "of it temporary 9.0 GB" in said
    assert "  3 all-reduce among 8  441.0 MB" in lines
    assert lines[-2:] == [
        "  v5e      does not fit  250.0% of  16.0 GB    15.2 ms",
        "  A100-40  fits          100.0% of  40.0 GB     9.6 ms",
    ]
    values = dry_run.as_dict(one, ["v5e", "A100-40"])
    assert json.loads(json.dumps(values))["chips"] == values["chips"]
    assert values["memory"]["peak"] == 40 * 10**9
    assert values["chips"]["v5e"] == {
        "memory": 16 * 10**9,
        "fits": False,
        "least_seconds": pytest.approx(3e12 / 197e12),
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--devices=8"], "--devices is of no use without --dry_run"),
        (["--chip=v4"], "--chip is of no use without --dry_run"),
        (["--json"], "--json is of no use without --dry_run"),
        (["--dry_run", "--chip=v9"], "v9"),
        ([], "--workdir is missing"),
    ],
)
def test_mistakes(arguments: list[str], said: str, capsys) -> None:
    assert tiny.run("train", "--config=configs/base.py", *arguments) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line
    assert arguments != ["--dry_run", "--chip=v9"] or ("v5e" in line and "H200" in line)


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--dry_run", "--dry-run"])
def test_the_program_needs_no_data_and_writes_nothing(
    flag: str, tmp_path: pathlib.Path
) -> None:
    """In a process of its own, which has 4 devices though it was to have 8."""
    config = tiny.write_config(tmp_path / "corpus")
    for file in (tmp_path / "corpus").glob("*.??"):
        if file.suffix != ".py":
            file.unlink()
    (tmp_path / "here").mkdir()
    command = [sys.executable, "-m", "transformer_jax", "train", flag]
    command += [f"--config={config}", "--devices=4", "--chip=v4", "--json"]
    root = str(pathlib.Path(dry_run.__file__).parents[1])
    done = subprocess.run(
        command,
        cwd=tmp_path / "here",
        env=os.environ | {"HOME": str(tmp_path / "here"), "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=True,
    )
    values = json.loads(done.stdout)
    assert values["devices"] == 4 and values["layout"] == "pmap over 4"
    assert values["parameter_bytes"] == 4 * values["parameters"] and not done.stderr
    assert list(values["chips"]) == ["v4"] and values["chips"]["v4"]["fits"]
    assert math.isclose(values["bytes_sent"], values["parameters"] * 6, rel_tol=0.01)
    assert not list((tmp_path / "here").iterdir())
