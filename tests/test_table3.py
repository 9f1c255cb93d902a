"""The presets of Table 3: what each changes of base, and how many parameters it has.

What is expected was typed out from the paper.
"""

import dataclasses
import pathlib
import re
from typing import Any

import jax
import pytest
from variants import param_shapes

from transformer_jax.config import Config
from transformer_jax.config_check import from_dict
from transformer_jax.config_file import differences, load
from transformer_jax.describe import describe
from transformer_jax.errors import ConfigError

PATH = "configs/table3.py"

# Row, perplexity, BLEU, and what is not as in base.
PAPER: list[tuple[str, float, float, dict[str, tuple[Any, Any]]]] = [
    ("base", 4.92, 25.8, {}),
    ("A-h1", 5.29, 24.9, {"num_heads": (8, 1), "d_k": (64, 512), "d_v": (64, 512)}),
    ("A-h4", 5.00, 25.5, {"num_heads": (8, 4), "d_k": (64, 128), "d_v": (64, 128)}),
    ("A-h16", 4.91, 25.8, {"num_heads": (8, 16), "d_k": (64, 32), "d_v": (64, 32)}),
    ("A-h32", 5.01, 25.4, {"num_heads": (8, 32), "d_k": (64, 16), "d_v": (64, 16)}),
    ("B-dk16", 5.16, 25.1, {"d_k": (64, 16)}),
    ("B-dk32", 5.01, 25.4, {"d_k": (64, 32)}),
    ("C-N2", 6.11, 23.7, {"num_layers": (6, 2)}),
    ("C-N4", 5.19, 25.3, {"num_layers": (6, 4)}),
    ("C-N8", 4.88, 25.5, {"num_layers": (6, 8)}),
    ("C-d256", 5.75, 24.5, {"d_model": (512, 256), "d_k": (64, 32), "d_v": (64, 32)}),
    (
        *("C-d1024", 4.66, 26.0),
        {"d_model": (512, 1024), "d_k": (64, 128), "d_v": (64, 128)},
    ),
    ("C-ff1024", 5.12, 25.4, {"d_ff": (2048, 1024)}),
    ("C-ff4096", 4.75, 26.2, {"d_ff": (2048, 4096)}),
    ("D-dropout0.0", 5.77, 24.6, {"dropout": (0.1, 0.0)}),
    ("D-dropout0.2", 4.95, 25.5, {"dropout": (0.1, 0.2)}),
    ("D-smoothing0.0", 4.67, 25.3, {"label_smoothing": (0.1, 0.0)}),
    ("D-smoothing0.2", 5.47, 25.7, {"label_smoothing": (0.1, 0.2)}),
    ("E", 4.92, 25.7, {"positions": ("sinusoidal", "learned")}),
    (
        *("big", 4.33, 26.4),
        {
            **{"d_model": (512, 1024), "d_ff": (2048, 4096), "num_heads": (8, 16)},
            **{"dropout": (0.1, 0.3), "steps": (100_000, 300_000)},
        },
    ),
]
ROWS = [row for row, *_ in PAPER]
OF_TRAIN = ("label_smoothing", "steps")


def as_the_authors_counted(config: Config) -> Config:
    """The vocabulary padded as theirs, and biases in attention."""
    return dataclasses.replace(
        config,
        tokenizer=dataclasses.replace(config.tokenizer, vocab_size=40_960),
        model=dataclasses.replace(config.model, attention_bias=True),
    )


@pytest.mark.parametrize(("row", "ppl", "bleu", "changes"), PAPER, ids=ROWS)
def test_a_row_differs_from_base_as_the_paper_says(row, ppl, bleu, changes):
    expected = {
        f"{'train' if name in OF_TRAIN else 'model'}.{name}: {old!r} -> {new!r}"
        for name, (old, new) in changes.items()
    }
    base = dataclasses.asdict(load("configs/base.py"))
    base["train"]["average_last"] = 0  # Table 3 was scored without averaging
    found = differences(from_dict(base), load(f"{PATH}:{row}"))
    assert set(found) == expected and len(found) == len(expected)


def test_the_head_of_the_file_has_the_papers_table():
    head = pathlib.Path(PATH).read_text().split('"""')[1]
    printed = re.findall(r"(\S+) +(\d\.\d\d)  (\d\d\.\d)(?= |$)", head, re.MULTILINE)
    expected = [(row, f"{ppl:.2f}", f"{bleu:.1f}") for row, ppl, bleu, _ in PAPER]
    assert sorted(printed) == sorted(expected)


@pytest.mark.parametrize(
    ("row", "total"),
    [
        ("base", 65_110_016),
        ("B-dk16", 58_018_304),
        ("B-dk32", 60_382_208),
        ("C-N2", 35_684_352),
        ("C-N4", 50_397_184),
        ("C-N8", 79_822_848),
        ("C-d256", 27_848_704),
        ("C-d1024", 167_944_192),
        ("C-ff1024", 52_514_816),
        ("C-ff4096", 90_300_416),
    ],
)
def test_the_ten_counts_of_the_papers_column(row, total):
    config = as_the_authors_counted(load(f"{PATH}:{row}"))
    assert describe(config).parameters == total


@pytest.mark.parametrize(("row", "total"), [("base", 63_045_632), ("big", 214_171_648)])
def test_totals_with_37000_entries(row, total):
    assert describe(load(f"{PATH}:{row}")).parameters == total


@pytest.mark.parametrize("row", ROWS)
def test_counts_are_those_of_the_model(row):
    config = load(f"{PATH}:{row}")
    sizes = sum(leaf.size for leaf in jax.tree.leaves(param_shapes(config)))
    assert describe(config).parameters == sizes


def test_an_unknown_row_is_one_line_that_lists_them():
    with pytest.raises(ConfigError) as error:
        load(f"{PATH}:C-N6")
    message = str(error.value)
    assert "\n" not in message and "table3.py:C-N6" in message
    listed = message.split("there are ")[1]
    assert sorted(listed.split(", ")) == sorted(ROWS)


def test_without_a_row_it_is_base():
    assert load(PATH) == load(f"{PATH}:base")
