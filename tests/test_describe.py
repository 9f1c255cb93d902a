"""Counts of parameters against the paper and the real model, and what is printed."""

import dataclasses
import json
import math
import pathlib
import re
import subprocess
import sys
from collections import Counter

import jax
import pytest
import tiny
from variants import ALL_AWAY, BIG, TINY, VARIANTS, make_config, param_shapes

from transformer_jax.config import Config, TokenizerConfig
from transformer_jax.config_file import load
from transformer_jax.describe import as_dict, as_text, describe
from transformer_jax.errors import ConfigError

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


GPT3_ROWS = [
    ("Query", "12288 x 96 x 128, 96 times", 14_495_514_624),
    ("Key", "12288 x 96 x 128, 96 times", 14_495_514_624),
    ("Value", "12288 x 96 x 128, 96 times", 14_495_514_624),
    ("Output", "96 x 128 x 12288, 96 times", 14_495_514_624),
    ("FFN up", "12288 x 49152, 96 times", 57_982_058_496),
    ("FFN down", "49152 x 12288, 96 times", 57_982_058_496),
]
GPT3_TABLE = ("50257 x 12288", 617_558_016)


def test_rows_of_gpt3():
    untied = describe(load("configs/gpt3_count.py"))
    assert [dataclasses.astuple(row) for row in untied.components] == [
        ("Embedding", *GPT3_TABLE),
        *GPT3_ROWS,
        ("Unembedding", *GPT3_TABLE),
    ]
    assert untied.parameters == 175_181_291_520
    tied = describe(load("configs/gpt3_count.py:tied"))
    assert [dataclasses.astuple(row) for row in tied.components] == [
        ("Embedding = output", *GPT3_TABLE),
        *GPT3_ROWS,
    ]
    assert tied.parameters == 174_563_733_504


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


def test_rows_of_a_decoder_of_another_depth_and_separate_tables():
    config = make_config(
        decoder_layers=2, share_embeddings=False, tie_output=False, output_bias=True
    )
    rows = [dataclasses.astuple(row) for row in describe(config).components]
    assert rows == [
        ("Source embedding", "37000 x 512", 18_944_000),
        ("Target embedding", "37000 x 512", 18_944_000),
        ("Query", "512 x 8 x 64, 10 times", 2_621_440),
        ("Key", "512 x 8 x 64, 10 times", 2_621_440),
        ("Value", "512 x 8 x 64, 10 times", 2_621_440),
        ("Output", "8 x 64 x 512, 10 times", 2_621_440),
        ("FFN up", "512 x 2048, 8 times", 8_388_608),
        ("FFN down", "2048 x 512, 8 times", 8_388_608),
        ("Unembedding", "37000 x 512", 18_944_000),
        ("FFN biases", "2048 + 512, 8 times", 20_480),
        ("LayerNorm", "2 x 512, 18 times", 18_432),
        ("Output bias", "37000", 37_000),
    ]


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


def component_of(path: str, config: Config) -> str:
    """The row that a parameter of the model belongs to, by its path."""
    target = "Embedding" if config.model.share_embeddings else "Target embedding"
    patterns = {
        r"embedding/table": target + " = output" * config.model.tie_output,
        r"source_embedding/table": "Source embedding",
        r"output/table": "Unembedding",
        r"output/bias": "Output bias",
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


def counts_of_the_model(config: Config, left_out: str = "-") -> Counter[str]:
    """Sizes of the initialised parameters by row, but for paths with `left_out`."""
    counts: Counter[str] = Counter()
    for keys, leaf in jax.tree.leaves_with_path(param_shapes(config)):
        path = "/".join(key.key for key in keys)
        if not re.search(left_out, path):
            counts[component_of(path, config)] += leaf.size
    return counts


def test_some_variants_are_nothing_like_the_base_model():
    base = dataclasses.asdict(Config().model)
    changed = [TINY | variant for variant in ALL_AWAY]
    assert changed[0].keys() | changed[1].keys() == base.keys()
    for fields in changed:
        assert not [name for name, value in fields.items() if value == base[name]]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_counts_are_those_of_the_model(variant):
    config = make_config(29, **TINY | variant)
    counts = counts_of_the_model(config)
    description = describe(config)
    assert {row.component: row.count for row in description.components} == counts
    assert description.parameters == counts.total()


@pytest.mark.parametrize(
    "variant", [v for v in VARIANTS if not v.get("share_embeddings", True)], ids=str
)
def test_counts_of_two_vocabularies_are_those_of_the_model(variant):
    tokenizer = TokenizerConfig(vocab_size=29, joint=False, source_vocab_size=17)
    config = make_config(29, **TINY | variant)
    config = dataclasses.replace(config, tokenizer=tokenizer)
    counts = counts_of_the_model(config)
    assert {row.component: row.count for row in describe(config).components} == counts
    assert counts["Source embedding"] == 17 * config.model.d_model


def test_rows_and_flops_of_two_vocabularies():
    joint = make_config(36_000, share_embeddings=False)
    tokenizer = TokenizerConfig(vocab_size=36_000, joint=False)
    assert describe(dataclasses.replace(joint, tokenizer=tokenizer)) == describe(joint)
    tokenizer = dataclasses.replace(tokenizer, source_vocab_size=32_000)
    separate = describe(dataclasses.replace(joint, tokenizer=tokenizer))
    rows = [dataclasses.astuple(row) for row in separate.components[:2]]
    assert rows == [
        ("Source embedding", "32000 x 512", 16_384_000),
        ("Target embedding = output", "36000 x 512", 18_432_000),
    ]
    assert separate.flops == describe(joint).flops


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_language_model_has_the_decoder_without_its_cross_attention(variant):
    config = make_config(29, decoder_only=True, **TINY | variant)
    config_of_one_table = make_config(29, **TINY | variant | {"share_embeddings": True})
    counts = counts_of_the_model(config_of_one_table, "^encoder/|/cross_attention")
    found = {row.component: row.count for row in describe(config).components}
    assert found == counts


@pytest.mark.parametrize("decoder_only", [False, True])
@pytest.mark.parametrize("variant", ALL_AWAY, ids=str)
def test_weights_only_leaves_out_biases_norms_and_positions(variant, decoder_only):
    whole = make_config(29, decoder_only=decoder_only, **TINY | variant)
    weights = make_config(29, 1000, decoder_only, True, **TINY | variant)
    left_out = re.compile("bias|LayerNorm|Position")
    kept = [
        row for row in describe(whole).components if not left_out.search(row.component)
    ]
    assert list(describe(weights).components) == kept


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_dimensions_multiply_to_the_counts(variant):
    for row in describe(make_config(29, **TINY | variant)).components:
        each, _, times = row.dimensions.removesuffix(" times").partition(", ")
        products = (
            math.prod(map(int, term.split(" x "))) for term in each.split(" + ")
        )
        assert sum(products) * int(times or 1) == row.count


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
        *("components", "parameters", "flops", "activations", "devices"),
        "bytes_per_device",
    ]
    assert values["parameters"] == 63_045_632
    assert values["components"][1] == {
        "component": "Query",
        "dimensions": "512 x 8 x 64, 18 times",
        "count": 4_718_592,
    }
    assert values["flops"]["length"] == 20
    assert values["activations"]["length"] == 20
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
        "Bytes kept for the backward pass in bfloat16, with 32 tokens a sentence\n"
        "  a source token  178.8 kB\n"
        "  a target token  234.5 kB\n"
        "\n"
        "Bytes per device, of 1 device\n"
        "  parameters             252.2 MB\n"
        "  optimiser state        504.4 MB\n"
        "  gradients              252.2 MB\n"
        "  activations             10.3 GB\n"
        "  logits held at a time   75.8 MB\n"
        "  total                   11.4 GB"
    )


def test_text_of_a_giant_stays_aligned():
    config = make_config(250_000, tokens=10**9, d_model=100_000, num_layers=1000)
    lines = as_text(describe(config, devices=4096)).splitlines()
    table = lines[: lines.index("")]
    assert len({len(line) for line in table}) == 1
    assert "Bytes per device, of 4096 devices" in lines
    assert any("PFLOP" in line for line in lines)


def test_text_of_a_language_model_has_no_source():
    lines = as_text(describe(load("configs/gpt3_count.py"), length=2048)).splitlines()
    assert not any("source" in line or "target" in line for line in lines)
    assert lines[13:] == [
        "FLOPs of the matrix products, with 2,048 tokens a sentence",
        "  forward, a token              358.8 GFLOP",
        "  update of 3,200,000 tokens  3,444.4 PFLOP",
        "",
        "Bytes kept for the backward pass in bfloat16, with 2,048 tokens a sentence",
        "  a token  212.6 MB",
        "",
        "Bytes per device, of 1 device",
        "  parameters             700.7 GB",
        "  optimiser state          1.4 TB",
        "  gradients              700.7 GB",
        "  activations            680.3 TB",
        "  logits held at a time  102.9 MB",
        "  total                  683.1 TB",
    ]


@pytest.mark.parametrize("path", sorted(pathlib.Path("configs").glob("*.py")), ids=str)
def test_the_program_describes_every_config_file(path, capsys):
    base = ["describe", f"--config={path}", "--devices=8", "--length=40"]
    assert tiny.run(*base) == 0
    lines = capsys.readouterr().out.splitlines()
    assert tiny.run(*base, "--json") == 0
    expected = describe(load(str(path)), devices=8, length=40)
    assert lines == as_text(expected).splitlines()
    assert json.loads(capsys.readouterr().out) == as_dict(expected)
    assert all(line == line.rstrip() and len(line) <= 88 for line in lines)
    table = lines[: lines.index("")]
    assert len({len(line) for line in table}) == 1


@pytest.mark.parametrize("verb", ["train", "prepare"])
def test_what_is_for_counting_is_not_trained(verb, tmp_path, capsys):
    workdir = tmp_path / "run"
    config = "--config=configs/gpt3_count.py"
    assert tiny.run(verb, config, f"--workdir={workdir}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "config.describe.decoder_only" in line and "counting" in line
    assert not workdir.exists()


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
