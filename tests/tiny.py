"""A run small enough to be made in a test: 60 pairs, 4,000 parameters."""

import pathlib
import random
from collections.abc import Sequence

from transformer_jax.cli import main

FIELDS = {
    "data.corpus": "text",
    "tokenizer.vocab_size": 290,
    "batch.tokens": 256,
    "batch.buckets": 2,
    "batch.row_multiple": 1,
    "model.num_layers": 1,
    "model.d_model": 16,
    "model.d_ff": 24,
    "model.num_heads": 2,
    "model.d_k": 6,
    "model.d_v": 10,
    "model.max_length": 32,
    "train.steps": 8,
    "train.warmup_steps": 10,
    "train.log_every": 2,
    "train.eval_every": 4,
    "train.save_every": 2,
    "train.keep_last": 3,
    "decode.beam_size": 2,
    "decode.max_extra_length": 4,
    "decode.min_length": 3,
    "decode.batch_size": 16,
}


def sentences(count: int, seed: int) -> list[tuple[str, str]]:
    """Returns pairs of 1 to 8 letters and their capitals in reverse."""
    rng = random.Random(seed)
    sources = [rng.choices("abcdefgh", k=rng.randint(1, 8)) for _ in range(count)]
    return [(" ".join(s), " ".join(s[::-1]).upper()) for s in sources]


def write_corpus(folder: pathlib.Path) -> None:
    """Writes train, valid and test files of both sides."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (split, count) in enumerate((("train", 60), ("valid", 7), ("test", 9))):
        columns = zip(*sentences(count, seed), strict=True)
        for side, lines in zip(("en", "de"), columns, strict=True):
            text = "".join(line + "\n" for line in lines)
            (folder / f"{split}.{side}").write_text(text, encoding="utf-8")


def write_config(folder: pathlib.Path, **fields: object) -> str:
    """Writes the corpus and a config file that reads it; returns the config's path."""
    if not (folder / "valid.en").exists():
        write_corpus(folder)
    files = {
        f"data.{split}_{side}": str(folder / f"{split}.{lang}")
        for split in ("train", "valid", "test")
        for side, lang in (("source", "en"), ("target", "de"))
    }
    changed = {name.replace("__", "."): value for name, value in fields.items()}
    lines = [
        f"    config.{name} = {value!r}"
        for name, value in {**FIELDS, **files, **changed}.items()
    ]
    head = "from transformer_jax.config import default_config_dict\n\n\n"
    body = "def get_config():\n    config = default_config_dict()\n"
    path = folder / "config.py"
    path.write_text(head + body + "\n".join(lines) + "\n    return config\n")
    return str(path)


def run(*arguments: str) -> int:
    """Runs the program in this process; returns its exit code."""
    return main(arguments)


def train(config: str, workdir: pathlib.Path, overrides: Sequence[str] = ()) -> int:
    """Trains in this process; returns the exit code."""
    return run("train", f"--config={config}", f"--workdir={workdir}", *overrides)
