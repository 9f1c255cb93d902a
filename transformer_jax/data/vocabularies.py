"""The vocabularies of both sides, and where a run keeps them.

WORKDIR/tokenizer.model          of both sides, or
        tokenizer.source.model   of the source
        tokenizer.target.model   of the target
"""

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from transformer_jax.data.tokenizer import Tokenizer

SIDES = ("source", "target")


class Vocabularies(NamedTuple):
    """The tokenizers of the two sides; a joint vocabulary is the same object twice."""

    source: Tokenizer
    target: Tokenizer

    @classmethod
    def load(cls, files: Sequence[str | pathlib.Path]) -> "Vocabularies":
        """Loads one model file for both sides, or the source's and the target's.

        Raises:
            DataError: a file is missing or broken.
        """
        loaded = [Tokenizer.load(file) for file in files]
        return cls(loaded[0], loaded[-1])

    @property
    def fingerprint(self) -> str:
        """A hash of the model, or of both where they differ."""
        return ",".join(dict.fromkeys(side.fingerprint for side in self))

    @property
    def sizes(self) -> str:
        """Says how many pieces there are, of each side where they are separate."""
        if self.source is self.target:
            return f"{self.target.vocab_size:,}"
        return f"{self.source.vocab_size:,} source + {self.target.vocab_size:,} target"


def model_files(workdir: pathlib.Path, joint: bool) -> list[pathlib.Path]:
    """Returns the files that a run keeps its vocabularies in: one, or one a side."""
    if joint:
        return [workdir / "tokenizer.model"]
    return [workdir / f"tokenizer.{side}.model" for side in SIDES]
