#!/usr/bin/env python3
"""Draws the curves of a run: loss, validation loss and validation BLEU by update.

Example: scripts/plot_metrics.py runs/phrases/metrics.jsonl curves.png

Needs matplotlib: pip install 'transformer_jax[plot]'.
"""

import argparse
import json
import pathlib

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def read(path: pathlib.Path, kind: str) -> dict[str, list[float]]:
    """Returns the columns of all rows of a kind."""
    columns: dict[str, list[float]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["kind"] == kind:
            for name, value in row.items():
                columns.setdefault(name, []).append(value)
    return columns


def draw(metrics: pathlib.Path, picture: pathlib.Path, title: str) -> None:
    """Draws `metrics`, a `metrics.jsonl`, into the PNG `picture`."""
    train, valid = read(metrics, "train"), read(metrics, "valid")
    figure, (losses, scores) = pyplot.subplots(1, 2, figsize=(10, 4))
    losses.plot(train["step"], train["nll"], color="0.6", label="train (dropout on)")
    if valid:
        losses.plot(valid["step"], valid["nll"], "o-", label="validation")
        scores.plot(valid["step"], valid["bleu"], "o-", label="sacreBLEU")
        scores.plot(valid["step"], valid["chrf"], "s--", label="chrF2")
        scores.legend()
    losses.set(xlabel="update", ylabel="nats a token, unsmoothed", title=title)
    losses.legend()
    scores.set(xlabel="update", ylabel="score", title="validation, real decodes")
    for axes in (losses, scores):
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


def main() -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description="Draws the curves of a run.")
    parser.add_argument("metrics", type=pathlib.Path, help="a run's metrics.jsonl")
    parser.add_argument("picture", type=pathlib.Path, help="the PNG to write")
    parser.add_argument("--title", default="loss")
    args = parser.parse_args()
    draw(args.metrics, args.picture, args.title)


if __name__ == "__main__":
    main()
