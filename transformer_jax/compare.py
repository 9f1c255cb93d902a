"""Whether translations differ by more than chance: two paired tests, by sacreBLEU.

The first system is the baseline, and every other one is tested against it: by paired
bootstrap resampling (Koehn 2004) and by paired approximate randomisation (Riezler and
Maxwell 2005), for BLEU and chrF.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sacrebleu
from sacrebleu.significance import PairedTest

from transformer_jax.errors import DataError
from transformer_jax.evaluate import check_sets

SEED = 12345  # as in sacreBLEU


@dataclasses.dataclass(frozen=True)
class System:
    """One system's score, and how it stands against the baseline."""

    name: str
    score: float  # from 0 to 100
    mean: float  # of the bootstrap samples
    interval: float  # half of their 95 % confidence interval
    difference: float | None  # to the baseline; its own is None, as are its p-values
    p_bootstrap: float | None
    p_randomisation: float | None


@dataclasses.dataclass(frozen=True)
class Compared:
    """The systems by one metric, the baseline first, and the recipes of both tests."""

    systems: list[System]
    bootstrap_signature: str
    randomisation_signature: str


def compare(
    systems: Sequence[tuple[str, Sequence[str]]],
    references: Sequence[Sequence[str]],
    lowercase: bool = False,
    samples: int | None = None,
    seed: int = SEED,
) -> dict[str, Compared]:
    """Tests systems against the first one.

    The p-values are sacreBLEU's, but for a score equal to the baseline's: no sample can
    differ by less, so its p is 1, where sacreBLEU counts only larger differences and
    gives the smallest p there is.

    Args:
        systems: name and hypotheses of each, the baseline first.
        references: one or more whole sets, each as long as the hypotheses.
        lowercase: both sides before they are compared.
        samples: of each test; None is 1000 for the bootstrap and 10000 for the
            randomisation.
        seed: of both tests, above 0.

    Returns:
        The comparison by `bleu` and by `chrf`.

    Raises:
        DataError: no sentence, no reference set, or sets of other lengths.
        ValueError: the seed is not above 0.
    """
    if seed < 1:
        raise ValueError(f"seed is {seed}; below 1 the tests would not repeat")
    for name, hypotheses in systems:
        try:
            check_sets(hypotheses, references)
        except DataError as error:
            raise DataError(f"{name}: {error}") from error
    found = [
        _run(kind, systems, references, lowercase, samples, seed)
        for kind in ("bs", "ar")  # bootstrap, approximate randomisation
    ]
    return {name: _join(name, *found) for name in _metrics(lowercase)}


# Signatures and results by metric, as sacreBLEU returns them.
_Found = tuple[Mapping[str, Any], Mapping[str, Any]]


def _metrics(lowercase: bool) -> dict[str, Any]:
    return {
        "bleu": sacrebleu.BLEU(lowercase=lowercase),
        "chrf": sacrebleu.CHRF(lowercase=lowercase),
    }


def _run(
    kind: str,
    systems: Sequence[tuple[str, Sequence[str]]],
    references: Sequence[Sequence[str]],
    lowercase: bool,
    samples: int | None,
    seed: int,
) -> _Found:
    with _sacrebleu_seed(seed):
        test = PairedTest(
            list(systems), _metrics(lowercase), references, kind, samples or 0
        )
    return test()


@contextlib.contextmanager
def _sacrebleu_seed(seed: int) -> Iterator[None]:
    """Sets the environment variable that alone gives sacreBLEU its seed."""
    before = os.environ.get("SACREBLEU_SEED")
    os.environ["SACREBLEU_SEED"] = str(seed)
    try:
        yield
    finally:
        del os.environ["SACREBLEU_SEED"]
        if before is not None:
            os.environ["SACREBLEU_SEED"] = before


def _join(metric: str, bootstrap: _Found, randomisation: _Found) -> Compared:
    """Puts both tests' results by one metric together."""
    key = {"bleu": "BLEU", "chrf": "chrF2"}[metric]
    (bs_signatures, bs), (ar_signatures, ar) = bootstrap, randomisation
    baseline = bs[key][0].score
    joined = []
    for name, one, other in zip(bs["System"], bs[key], ar[key], strict=True):
        difference = one.score - baseline if joined else None
        p = (1.0, 1.0) if difference == 0 else (one.p_value, other.p_value)
        mean, interval = float(one.mean), float(one.ci)
        joined.append(System(name, one.score, mean, interval, difference, *p))
    return Compared(joined, str(bs_signatures[key]), str(ar_signatures[key]))


def as_text(compared: Mapping[str, Compared]) -> str:
    """Returns a table for each metric, with the recipes of the tests below."""
    blocks = []
    for metric, title in (("bleu", "BLEU"), ("chrf", "chrF2")):
        head = "system", title, "mean, 95 %", "difference", "p bootstrap", "p random."
        rows = [head, *map(_cells, compared[metric].systems)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            " | ".join(
                [row[0].ljust(widths[0])]
                + [cell.rjust(n) for cell, n in zip(row[1:], widths[1:], strict=True)]
            )
            for row in rows
        ]
        lines.insert(1, "-+-".join("-" * width for width in widths))
        lines.append(f"bootstrap      [{compared[metric].bootstrap_signature}]")
        lines.append(f"randomisation  [{compared[metric].randomisation_signature}]")
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _cells(system: System) -> tuple[str, ...]:
    tests = "", "", ""
    if system.difference is not None:
        p_values = (system.p_bootstrap, system.p_randomisation)
        tests = f"{system.difference:+.2f}", *(f"{p:.4f}" for p in p_values)
    spread = f"{system.mean:.2f} ± {system.interval:.2f}"
    return system.name, f"{system.score:.2f}", spread, *tests
