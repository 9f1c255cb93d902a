"""One run on one device, by pmap, and on meshes: the same numbers.

The update on one device is a plain jitted function, without any layout.
"""

import dataclasses
import functools
import re
from typing import Any

import jax
import numpy as np
import pytest

from transformer_jax import parallel
from transformer_jax.config import Config, ModelConfig, ParallelConfig, TrainConfig
from transformer_jax.data.batching import Batch, Shape, make_batch
from transformer_jax.errors import ConfigError
from transformer_jax.model.transformer import Transformer
from transformer_jax.train.optimizer import make_optimizer
from transformer_jax.train.programs import Programs
from transformer_jax.train.step import init_state, state_axes, train_step

MODEL = ModelConfig(
    num_layers=1, d_model=16, d_ff=48, num_heads=8, d_k=3, d_v=5, dropout=0.2
)
TRAIN = TrainConfig(warmup_steps=5, seed=3)
VOCAB_SIZE = 40
OPTIMIZER = make_optimizer(TRAIN, MODEL.d_model)
SHAPE = Shape(12, 7, 9)
STEPS = 10


def mesh(data: int, fsdp: int, tensor: int) -> ParallelConfig:
    return ParallelConfig("mesh", data, fsdp, tensor)


LAYOUTS = {
    "pmap 1": (1, ParallelConfig()),
    "pmap 2": (2, ParallelConfig()),
    "pmap 8": (8, ParallelConfig()),
    "mesh 1x1x1": (1, mesh(1, 1, 1)),
    "mesh 8x1x1": (8, mesh(8, 1, 1)),
    "mesh 2x4x1": (8, mesh(2, 4, 1)),
    "mesh 1x1x8": (8, mesh(1, 1, 8)),
    "mesh 2x2x2": (8, mesh(2, 2, 2)),
}
# In the slow tests.
RARE = ("pmap 1", "pmap 2", "mesh 1x1x1", "mesh 8x1x1", "mesh 1x1x8")


def batches(count: int) -> list[Batch]:
    """12 rows do not divide over 8 devices, and 2 of them are empty."""
    rng = np.random.default_rng(0)

    def ids(longest: int) -> list[np.ndarray]:
        lengths = rng.integers(1, longest, 10)
        return [rng.integers(4, VOCAB_SIZE, length) for length in lengths]

    return [make_batch(ids(7), ids(9), SHAPE) for _ in range(count)]


@pytest.fixture(scope="module")
def fresh() -> Any:
    """The state before the first update, on the host."""
    return jax.device_get(init_state(Transformer(MODEL, VOCAB_SIZE), OPTIMIZER, 0))


@pytest.fixture(scope="module")
def expected(fresh) -> list[tuple[Any, Any]]:
    """States and metrics after each of the ten updates on one device."""
    step = jax.jit(
        functools.partial(
            train_step,
            model=Transformer(MODEL, VOCAB_SIZE),
            optimizer=OPTIMIZER,
            smoothing=0.1,
            seed=3,
            axis_name=None,
        )
    )
    state, found = fresh, []
    for batch in batches(STEPS):
        state, metrics = step(state, batch)
        found.append(jax.device_get((state, metrics)))
    return found


def close(found: Any, expected: Any, tolerance: float) -> float:
    """Checks that arrays agree to `tolerance` of each one's largest number."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        scale = max(float(np.abs(b).max()), 1e-3)
        worst = max(worst, float(np.abs(np.asarray(a) - b).max()) / scale)
    assert worst <= tolerance
    return worst


@pytest.fixture
def programs(monkeypatch):
    """Returns a function: layout name and accumulation to layout, axes, programs."""

    def make(name: str, accumulate: int = 1) -> tuple[Any, Any, Programs]:
        count, config = LAYOUTS[name]
        chosen = jax.devices()[:count]
        monkeypatch.setattr(parallel, "devices", lambda: chosen)
        train = dataclasses.replace(TRAIN, accumulate=accumulate)
        layout = parallel.make_layout(config)
        model = Transformer(MODEL, VOCAB_SIZE)
        axes = state_axes(model, OPTIMIZER)
        whole = Config(model=MODEL, parallel=config, train=train)
        return layout, axes, Programs(whole, layout, model, OPTIMIZER, axes)

    return make


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in RARE else ())
        for name in LAYOUTS
    ],
)
def test_ten_updates_are_those_of_one_device(name, fresh, expected, programs):
    """Loss, gradient norm and state after each update; dropout is on."""
    layout, axes, found = programs(name)
    state = layout.place(fresh, axes)
    found.compile(batches(1)[0])
    for batch, (_, wanted) in zip(batches(STEPS), expected, strict=True):
        state, metrics = found.update(state, [batch])
        close(layout.fetch(metrics), wanted, 2e-5)
    close(layout.fetch(state), expected[-1][0], 2e-4)


@pytest.mark.parametrize("name", ["pmap 2", "mesh 2x2x2"])
def test_evaluation(name, fresh, programs):
    layout, axes, found = programs(name)
    batch = batches(1)[0]
    model = Transformer(MODEL, VOCAB_SIZE)
    inputs = batch.source, batch.source_length, batch.target_in
    logits: Any = model.apply({"params": fresh.params}, *inputs)
    log_probs = jax.nn.log_softmax(np.asarray(logits, np.float64))
    true = np.take_along_axis(np.asarray(log_probs), batch.target_out[..., None], 2)[
        ..., 0
    ]
    real = np.arange(SHAPE.target) < batch.target_length[:, None]
    sums = found.evaluate(layout.place(fresh, axes), batch)
    assert float(sums.nll) == pytest.approx(-(true * real).sum(), rel=1e-5)
    assert int(sums.tokens) == real.sum()


# --- Accumulation ---------------------------------------------------------------


def joined(parts: list[Batch]) -> Batch:
    arrays = zip(*(part[:5] for part in parts), strict=True)  # without segments
    return Batch(*(np.concatenate(each) for each in arrays))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("pmap 1", marks=pytest.mark.slow),
        pytest.param("pmap 8", marks=pytest.mark.slow),
        "mesh 2x2x2",
    ],
)
def test_an_update_of_several_batches_is_one_of_a_large_batch(
    name, fresh, programs, monkeypatch
):
    """The batches have other numbers of tokens; there is no dropout."""
    monkeypatch.setitem(globals(), "MODEL", dataclasses.replace(MODEL, dropout=0.0))
    layout, axes, found = programs(name, accumulate=3)
    parts = batches(6)
    assert len({int(part.target_length.sum()) for part in parts}) > 3
    state = layout.place(fresh, axes)
    found.compile(parts[0])
    _, _, whole = programs("pmap 1")
    whole_state = whole._layout.place(fresh)
    whole.compile(joined(parts[:3]))
    for some in (parts[:3], parts[3:]):
        state, metrics = found.update(state, some)
        whole_state, wanted = whole.update(whole_state, [joined(some)])
        close(layout.fetch(metrics), whole._layout.fetch(wanted), 1e-5)
    close(layout.fetch(state), whole._layout.fetch(whole_state), 2e-4)


def test_each_batch_of_an_update_drops_out_other_units(fresh, programs):
    """The same batch twice is not twice its gradient."""
    layout, axes, found = programs("pmap 1", accumulate=2)
    batch = batches(1)[0]
    state = layout.place(fresh, axes)
    found.compile(batch)
    zero = found._zero(state)[0]
    program = found._compiled[next(iter(found._compiled))]
    once, _ = program(zero, state, layout.split_rows(batch))
    first = layout.fetch(once)
    twice = layout.fetch(program(once, state, layout.split_rows(batch))[0])
    assert int(twice.batches) == 2
    assert abs(float(twice.losses.loss) / float(first.losses.loss) - 2) > 1e-3


# --- What lies where ------------------------------------------------------------


def device_shapes(text: str) -> set[tuple[int, ...]]:
    """Returns the shapes of all float arrays in a compiled program, on one device."""
    found = re.findall(r"\bf32\[([\d,]+)\]", text)
    return {tuple(map(int, dims.split(","))) for dims in found}


def test_state_and_activations_are_split_over_the_mesh(fresh, programs):
    layout, axes, found = programs("mesh 2x2x2")
    state = layout.place(fresh, axes)
    found.compile(batches(1)[0])
    (program,) = found._compiled.values()
    specs = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.sharding.spec
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }
    outputs = jax.tree.leaves(program.output_shardings[0])
    assert [s.spec for s in outputs] == list(specs.values())
    for name, spec in specs.items():
        split = {axis for axis in spec if axis}
        if name.endswith(("table", "query/kernel", "up/kernel", "down/kernel")):
            assert split == {"fsdp", "tensor"}, name
        if name.endswith(("scale", "down/bias")):
            assert split == {"fsdp"}, name
    moments = [name for name in specs if "mu" in name.split("/")]
    assert len(moments) == len(jax.tree.leaves(fresh.params))

    rows, source, target = SHAPE.rows // 4, SHAPE.source, SHAPE.target
    heads, hidden, width = MODEL.num_heads // 2, MODEL.d_ff // 2, MODEL.d_model
    shapes = device_shapes(program.as_text())
    assert (rows, source, hidden) in shapes
    assert (rows, target, width) in shapes
    assert {(rows, heads, target, source), (rows, target, heads, source)} & shapes
    # Nowhere is an array that holds what should be on other devices: all rows, all
    # heads, all of the feed-forward layer, all of the vocabulary.
    for shape in shapes:
        assert not (shape[0] == SHAPE.rows and len(shape) > 2), shape
        if len(shape) >= 3:
            assert MODEL.d_ff not in shape, shape
            assert VOCAB_SIZE not in shape, shape
        if len(shape) == 4:
            assert MODEL.num_heads not in shape, shape


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (mesh(3, 2, 1), "3 x 2 x 1 = 6, but there are 8 devices"),
        (mesh(0, 3, 1), "2 x 3 x 1 = 6, but there are 8 devices"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(config, said):
    with pytest.raises(ConfigError, match=said):
        parallel.make_layout(config)


@pytest.mark.parametrize(
    ("config", "vocab_size", "said"),
    [
        (mesh(1, 1, 16), 48, r"num_heads is 8, which config.parallel.tensor = 16"),
        (mesh(1, 1, 8), 41, r"vocab_size\) is 41, which config.parallel.tensor = 8"),
        (mesh(1, 3, 1), 48, r"d_model is 16, which config.parallel.fsdp = 3"),
    ],
)
def test_sizes_that_do_not_divide_are_named(config, vocab_size, said):
    with pytest.raises(ConfigError, match=said):
        parallel.require_divisible(config, MODEL, [vocab_size])
