"""Memory and speed of accelerators, as their makers' data sheets say."""

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Chip:
    """One accelerator; a TPU of two cores that work as one device is one."""

    memory: int  # bytes
    flops: float  # bfloat16 operations a second, without sparsity
    kind: str  # pattern of what JAX calls the device


_GB = 10**9

CHIPS = {
    "v4": Chip(32 * 2**30, 275e12, "TPU v4"),
    "v5e": Chip(16 * _GB, 197e12, "TPU v5 lite|TPU v5e"),
    "v5p": Chip(95 * _GB, 459e12, "TPU v5p?"),
    "v6e": Chip(32 * _GB, 918e12, "TPU v6 lite|TPU v6e"),
    "A100-40": Chip(40 * _GB, 312e12, "NVIDIA A100.*40GB.*"),
    "A100-80": Chip(80 * _GB, 312e12, "NVIDIA A100.*80GB.*"),
    # Those on SXM boards: the PCIe and NVL ones of the same name are slower.
    "H100": Chip(80 * _GB, 989e12, "NVIDIA H100 80GB HBM3"),
    "H200": Chip(141 * _GB, 989e12, "NVIDIA H200"),
}


def chip_of(kind: str) -> Chip | None:
    """Returns the chip of JAX's `device_kind`, None where it is not in the table."""
    return next((c for c in CHIPS.values() if re.fullmatch(c.kind, kind)), None)
