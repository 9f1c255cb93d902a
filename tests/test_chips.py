"""Which chip a device is."""

import pytest

from transformer_jax.chips import CHIPS, chip_of


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5e", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA A100 80GB PCIe", "A100-80"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
    ],
)
def test_what_jax_calls_them(kind: str, name: str) -> None:
    assert chip_of(kind) is CHIPS[name]


@pytest.mark.parametrize(
    "kind", ["cpu", "TPU v4 lite", "NVIDIA H100 PCIe", "NVIDIA GH200 480GB", "TPU v7"]
)
def test_others_are_not_guessed(kind: str) -> None:
    assert chip_of(kind) is None


def test_the_data_sheets() -> None:
    found = {n: (c.memory / 1e9, c.flops / 1e12) for n, c in CHIPS.items()}
    assert found == {
        "v4": (34.359738368, 275),  # 32 GiB
        "v5e": (16, 197),
        "v5p": (95, 459),
        "v6e": (32, 918),
        "A100-40": (40, 312),
        "A100-80": (80, 312),
        "H100": (80, 989),
        "H200": (141, 989),
    }
