"""Counts of parameters against PAPER.md and the real model; FLOPs against its jaxpr."""

import dataclasses
import json
import math
import re
import subprocess
import sys
from collections import Counter
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.extend import core

from transformer_jax import describe as describe_module
from transformer_jax.config import Config
from transformer_jax.describe import as_dict, as_text, describe
from transformer_jax.errors import ConfigError
from transformer_jax.model.transformer import Transformer
from transformer_jax.train import loss
from transformer_jax.train.optimizer import make_optimizer
from transformer_jax.train.step import init_state

BIG: dict[str, Any] = {"d_model": 1024, "d_ff": 4096, "num_heads": 16}


def make_config(vocab_size: int = 37_000, tokens: int = 25_000, **model: Any) -> Config:
    config = Config()
    return dataclasses.replace(
        config,
        tokenizer=dataclasses.replace(config.tokenizer, vocab_size=vocab_size),
        batch=dataclasses.replace(config.batch, tokens=tokens),
        model=dataclasses.replace(config.model, **model),
    )


# --- Parameters -----------------------------------------------------------------

BASE_ROWS = [
    ("Embedding = output", "37000 x 512", 18_944_000),
    ("Query", "512 x 8 x 64, 18 times", 4_718_592),
    ("Key", "512 x 8 x 64, 18 times", 4_718_592),
    ("Value", "512 x 8 x 64, 18 times", 4_718_592),
    ("Output", "8 x 64 x 512, 18 times", 4_718_592),
    ("FFN up", "512 x 2048, 12 times", 12_582_912),
    ("FFN down", "2048 x 512, 12 times", 12_582_912),
    ("FFN biases", "2048 + 512, 12 times", 30_720),
    ("LayerNorm", "2 x 512, 30 times", 30_720),
]
BIG_ROWS = [
    ("Embedding = output", "37000 x 1024", 37_888_000),
    ("Query", "1024 x 16 x 64, 18 times", 18_874_368),
    ("Key", "1024 x 16 x 64, 18 times", 18_874_368),
    ("Value", "1024 x 16 x 64, 18 times", 18_874_368),
    ("Output", "16 x 64 x 1024, 18 times", 18_874_368),
    ("FFN up", "1024 x 4096, 12 times", 50_331_648),
    ("FFN down", "4096 x 1024, 12 times", 50_331_648),
    ("FFN biases", "4096 + 1024, 12 times", 61_440),
    ("LayerNorm", "2 x 1024, 30 times", 61_440),
]


@pytest.mark.parametrize(
    ("model", "rows", "total"),
    [({}, BASE_ROWS, 63_045_632), (BIG, BIG_ROWS, 214_171_648)],
)
def test_rows_of_the_paper(model, rows, total):
    description = describe(make_config(**model))
    assert [dataclasses.astuple(row) for row in description.components] == rows
    assert description.parameters == total


@pytest.mark.parametrize(("model", "total"), [({}, 60_485_632), (BIG, 209_051_648)])
def test_totals_with_32000_entries(model, total):
    assert describe(make_config(32_000, **model)).parameters == total


@pytest.mark.parametrize(
    ("model", "total"),
    [
        ({}, 65_110_016),
        ({"num_heads": 1, "d_k": 512, "d_v": 512}, 65_110_016),
        ({"num_heads": 4, "d_k": 128, "d_v": 128}, 65_110_016),
        ({"num_heads": 16, "d_k": 32, "d_v": 32}, 65_110_016),
        ({"num_heads": 32, "d_k": 16, "d_v": 16}, 65_110_016),
        ({"d_k": 16}, 58_018_304),
        ({"d_k": 32}, 60_382_208),
        ({"num_layers": 2}, 35_684_352),
        ({"num_layers": 4}, 50_397_184),
        ({"num_layers": 8}, 79_822_848),
        ({"d_model": 256, "d_k": 32, "d_v": 32}, 27_848_704),
        ({"d_model": 1024, "d_k": 128, "d_v": 128}, 167_944_192),
        ({"d_ff": 1024}, 52_514_816),
        ({"d_ff": 4096}, 90_300_416),
        (BIG, 218_300_416),
    ],
)
def test_totals_of_table_3_as_the_authors_counted(model, total):
    config = make_config(40_960, attention_bias=True, **model)
    assert describe(config).parameters == total


def test_rows_of_the_variants():
    config = make_config(
        attention_bias=True, positions="learned", norm="pre", d_k=16, max_length=100
    )
    rows = [dataclasses.astuple(row) for row in describe(config).components]
    assert rows[1] == ("Query", "512 x 8 x 16, 18 times", 1_179_648)
    assert rows[9:] == [
        ("Attention biases", "2 x 8 x 16 + 8 x 64 + 512, 18 times", 23_040),
        ("Position tables", "100 x 512, 2 times", 102_400),
        ("Final LayerNorm", "2 x 512, 2 times", 2_048),
    ]


TINY: dict[str, Any] = {
    **{"num_layers": 2, "d_model": 8, "d_ff": 12, "num_heads": 2},
    **{"d_k": 4, "d_v": 4, "max_length": 16, "dtype": "float32"},
}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"norm": "pre"},
    {"positions": "learned"},
    {"attention_bias": True},
    {"d_k": 3, "d_v": 5},
    {"d_k": 5, "d_v": 3, "attention_bias": True},
    {"num_layers": 1, "num_heads": 1},
    {"num_layers": 3, "num_heads": 3, "d_ff": 7, "norm": "pre", "attention_bias": True},
    {"positions": "learned", "norm": "pre", "max_length": 5},
    {
        **{"positions": "learned", "norm": "pre", "attention_bias": True},
        **{"num_layers": 3, "d_model": 11, "d_ff": 17, "num_heads": 3},
        **{"d_k": 5, "d_v": 7, "max_length": 13},
    },
]


def component_of(path: str) -> str:
    """The row that a parameter of the model belongs to, by its path."""
    patterns = {
        r"embedding/table": "Embedding = output",
        r"(en|de)coder/positions/table": "Position tables",
        r"(en|de)coder/norm/(scale|bias)": "Final LayerNorm",
        r".*_residual/norm/(scale|bias)": "LayerNorm",
        r".*_attention/\w+/bias": "Attention biases",
        r".*_attention/query/kernel": "Query",
        r".*_attention/key/kernel": "Key",
        r".*_attention/value/kernel": "Value",
        r".*_attention/output/kernel": "Output",
        r".*/feed_forward/up/kernel": "FFN up",
        r".*/feed_forward/down/kernel": "FFN down",
        r".*/feed_forward/\w+/bias": "FFN biases",
    }
    (found,) = (name for regex, name in patterns.items() if re.fullmatch(regex, path))
    return found


def param_shapes(config: Config) -> Any:
    """The real model's parameters, of which only the shapes are made."""
    model = Transformer(config.model, config.tokenizer.vocab_size)
    tokens, lengths = jnp.zeros((1, 2), jnp.int32), jnp.ones((1,), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens, lengths, tokens)
    return nn.unbox(variables["params"])


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_counts_are_those_of_the_model(variant):
    config = make_config(29, **TINY | variant)
    counts: Counter[str] = Counter()
    for keys, leaf in jax.tree.leaves_with_path(param_shapes(config)):
        counts[component_of("/".join(key.key for key in keys))] += leaf.size
    description = describe(config)
    assert {row.component: row.count for row in description.components} == counts
    assert description.parameters == counts.total()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_dimensions_multiply_to_the_counts(variant):
    for row in describe(make_config(29, **TINY | variant)).components:
        each, _, times = row.dimensions.removesuffix(" times").partition(", ")
        products = (
            math.prod(map(int, term.split(" x "))) for term in each.split(" + ")
        )
        assert sum(products) * int(times or 1) == row.count


# --- FLOPs ----------------------------------------------------------------------


def test_flops_of_base_by_hand():
    flops = describe(make_config()).flops
    # Encoder layer: projections, FFN, attention to 32 keys, and a decoder layer's K, V.
    source = 6 * (2_097_152 + 4_194_304 + 65_536 + 1_048_576)
    # Decoder layer: all of self-attention, Q and output of cross-attention; then V x d.
    target = 6 * (2_097_152 + 1_048_576 + 4_194_304 + 2 * 65_536) + 37_888_000
    assert flops.length == 32
    assert flops.forward_source_token == source == 44_433_408
    assert flops.forward_target_token == target == 82_714_624
    assert flops.update_tokens == 25_000
    assert flops.update == 9_536_102_400_000


def matrix_flops(jaxpr: core.Jaxpr) -> int:
    """2 FLOPs for every multiply-add of every matrix product in `jaxpr`."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape  # pyright: ignore
            inner = math.prod(shape[axis] for axis in contracted)
            total += 2 * inner * math.prod(equation.outvars[0].aval.shape)  # pyright: ignore
        for value in equation.params.values():
            inner_jaxpr = getattr(value, "jaxpr", value)
            if isinstance(inner_jaxpr, core.Jaxpr):
                total += matrix_flops(inner_jaxpr)
    return total


@pytest.mark.parametrize("variant", [{}, VARIANTS[5], VARIANTS[-1]], ids=str)
def test_flops_are_those_of_the_models_matrix_products(variant):
    rows, length = 3, 5
    config = make_config(29, rows * length, **TINY | variant)
    model = Transformer(config.model, 29)
    tokens = jnp.zeros((rows, length), jnp.int32)
    lengths = jnp.full((rows,), length, jnp.int32)
    params = param_shapes(config)

    def forward(params: Any) -> jax.Array:
        logits: Any = model.apply({"params": params}, tokens, lengths, tokens)
        return jnp.square(logits).sum()

    flops = describe(config, length=length).flops
    both = flops.forward_source_token + flops.forward_target_token
    assert matrix_flops(jax.make_jaxpr(forward)(params).jaxpr) == rows * length * both
    gradient = jax.make_jaxpr(jax.value_and_grad(forward))(params)
    assert matrix_flops(gradient.jaxpr) == flops.update == 3 * rows * length * both


# --- Memory ---------------------------------------------------------------------


def test_bytes_of_base_on_8_devices():
    description = describe(make_config(), devices=8)
    assert description.devices == 8
    memory = description.bytes_per_device
    assert dataclasses.asdict(memory) == {
        "parameters": 252_182_528,
        "optimizer": 504_365_056,
        "gradients": 252_182_528,
        "logits": 75_776_000,  # 512 tokens
    }
    assert memory.total == 1_084_506_112


def test_logits_of_fewer_tokens_than_a_chunk():
    memory = describe(make_config(1000, tokens=1001), devices=4).bytes_per_device
    assert memory.logits == 251 * 1000 * 4


def test_the_chunk_is_that_of_the_loss():
    assert describe_module.LOSS_CHUNK == loss.CHUNK


def test_bytes_are_those_of_the_train_state_without_its_counters():
    config = make_config(29, **TINY)
    optimizer = make_optimizer(config.train, config.model.d_model)
    state = jax.eval_shape(
        lambda: init_state(Transformer(config.model, 29), optimizer, seed=0)
    )
    leaves = jax.tree.leaves(state)
    arrays = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves if leaf.ndim)
    memory = describe(config).bytes_per_device
    assert memory.parameters + memory.optimizer == arrays


# --- Arguments and output -------------------------------------------------------


@pytest.mark.parametrize("name", ["devices", "length"])
def test_a_number_below_one_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name} is 0; it must be at least 1"):
        describe(Config(), **{name: 0})


def test_dict_survives_json():
    description = describe(make_config(), devices=2, length=20)
    values = as_dict(description)
    assert json.loads(json.dumps(values)) == values
    assert list(values) == [
        *("components", "parameters", "flops", "devices", "bytes_per_device")
    ]
    assert values["parameters"] == 63_045_632
    assert values["components"][1] == {
        "component": "Query",
        "dimensions": "512 x 8 x 64, 18 times",
        "count": 4_718_592,
    }
    assert values["flops"]["length"] == 20
    assert values["devices"] == 2
    memory = values["bytes_per_device"]
    assert memory.pop("total") == sum(memory.values())


def test_text_of_base():
    assert as_text(describe(make_config())) == (
        "component          | dimensions             |      count\n"
        "-------------------+------------------------+-----------\n"
        "Embedding = output | 37000 x 512            | 18,944,000\n"
        "Query              | 512 x 8 x 64, 18 times |  4,718,592\n"
        "Key                | 512 x 8 x 64, 18 times |  4,718,592\n"
        "Value              | 512 x 8 x 64, 18 times |  4,718,592\n"
        "Output             | 8 x 64 x 512, 18 times |  4,718,592\n"
        "FFN up             | 512 x 2048, 12 times   | 12,582,912\n"
        "FFN down           | 2048 x 512, 12 times   | 12,582,912\n"
        "FFN biases         | 2048 + 512, 12 times   |     30,720\n"
        "LayerNorm          | 2 x 512, 30 times      |     30,720\n"
        "-------------------+------------------------+-----------\n"
        "total              |                        | 63,045,632\n"
        "\n"
        "FLOPs of the matrix products, with 32 tokens a sentence\n"
        "  forward, a source token           44.4 MFLOP\n"
        "  forward, a target token           82.7 MFLOP\n"
        "  update of 25,000 + 25,000 tokens   9.5 TFLOP\n"
        "\n"
        "Bytes per device, of 1 device, without activations\n"
        "  parameters             252.2 MB\n"
        "  optimiser state        504.4 MB\n"
        "  gradients              252.2 MB\n"
        "  logits held at a time   75.8 MB\n"
        "  total                    1.1 GB"
    )


def test_text_of_a_giant_stays_aligned():
    config = make_config(250_000, tokens=10**9, d_model=100_000, num_layers=1000)
    lines = as_text(describe(config, devices=4096)).splitlines()
    table = lines[: lines.index("")]
    assert len({len(line) for line in table}) == 1
    assert "Bytes per device, of 4096 devices, without activations" in lines
    assert any("PFLOP" in line for line in lines)


def test_describe_needs_no_jax():
    program = (
        "import sys; from transformer_jax.config import Config; "
        "from transformer_jax.describe import as_text, describe; "
        "as_text(describe(Config())); "
        "print(sorted({'jax', 'flax', 'optax'} & sys.modules.keys()))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "[]"
