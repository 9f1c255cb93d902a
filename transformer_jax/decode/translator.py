"""A trained model as a function from strings to strings, and to log-probabilities.

Sentences are sorted by length, padded to a few bucket lengths, searched in batches
that are split over the devices, and handed back in the order they came. What is
found for a sentence does not depend on what else is translated.
"""

import dataclasses
import functools
import pathlib
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import parallel
from transformer_jax.checkpoint import Loaded, load_params
from transformer_jax.config import Config, DecodeConfig, ModelConfig, read_workdir
from transformer_jax.data import batching
from transformer_jax.data.tokenizer import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    UNK_ID,
    Tokenizer,
)
from transformer_jax.decode.beam_search import IMPOSSIBLE, Hypotheses, beam_search
from transformer_jax.errors import DataError
from transformer_jax.model.transformer import Cache, Transformer

Warn = Callable[[str], None]

# Padded lengths: about a third apart, so that few shapes waste little.
BUCKETS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """One translation."""

    text: str
    score: float  # log_prob / ((5 + n) / 6)^alpha, n = number of pieces and EOS
    log_prob: float  # natural logarithm, sum over the pieces and EOS
    tokens: list[str]  # its pieces, without EOS


def bucket(length: int, most: int) -> int:
    """Returns the padded length for `length`: a bucket, or `most` if that is less."""
    for size in BUCKETS:
        if length <= size:
            return max(length, min(size, most))
    return max(length, most)


def is_blank(line: str) -> bool:
    """Returns whether a line holds only blanks, control and invisible characters."""
    return all(unicodedata.category(c)[0] in "ZC" and c != "\ufffd" for c in line)


class Translator:
    """Translates and scores text with one set of parameters."""

    def __init__(
        self, config: ModelConfig, tokenizer: Tokenizer, replicated_params: Any
    ) -> None:
        """Takes a model's parts; nothing is compiled yet.

        Args:
            config: of the model.
            tokenizer: its vocabulary.
            replicated_params: parameters with a leading axis of devices, as
                `parallel.replicate` gives them.
        """
        self.config = config
        self.tokenizer = tokenizer
        self.params = replicated_params
        self.model = Transformer(config, tokenizer.vocab_size)
        self._compiled_search = functools.cache(self._make_search)

    def translate(
        self,
        lines: Sequence[str],
        decode: DecodeConfig,
        nbest: int = 1,
        warn: Warn = lambda message: None,
        first_line: int = 1,
    ) -> list[list[Hypothesis]]:
        """Translates each line.

        Args:
            lines: source sentences.
            decode: search settings.
            nbest: hypotheses a line, at most the beam size.
            warn: is told about lines that are too long.
            first_line: number of `lines[0]`, for warnings.

        Returns:
            For each line its hypotheses, best first; one empty one for a blank line.
        """
        results: list[list[Hypothesis]] = [[_EMPTY] for _ in lines]
        sources = {}
        for i, ids in enumerate(self.tokenizer.encode(lines)):
            if ids and not is_blank(lines[i]):
                sources[i] = self._cut(ids, first_line + i, warn)
        order = sorted(sources, key=lambda i: -len(sources[i]))
        for chunk in _chunks(order, decode.batch_size):
            found = self._search([sources[i] for i in chunk], decode, nbest)
            for row, i in enumerate(chunk):
                results[i] = self._read(found, row, nbest)
        return results

    def _cut(self, ids: list[int], line: int, warn: Warn) -> list[int]:
        most = self.config.max_length - 1  # EOS needs a place, too
        if len(ids) > most:
            warn(
                f"line {line} has {len(ids)} pieces; only its first {most} are "
                f"translated (config.model.max_length = {self.config.max_length})"
            )
        return ids[:most]

    def _search(
        self, sources: list[list[int]], decode: DecodeConfig, nbest: int
    ) -> Hypotheses:
        """Searches one batch; returns NumPy arrays of its rows."""
        longest = max(map(len, sources)) + 1
        length = bucket(longest, self.config.max_length)
        rows = _row_bucket(len(sources), decode.batch_size)
        target = self._target_length(length - 1 + decode.max_extra_length)
        source = [np.append(ids, EOS_ID) for ids in sources]
        limits = np.ones(rows, np.int32)
        limits[: len(source)] = [
            self._target_length(len(ids) + decode.max_extra_length) for ids in sources
        ]
        lengths = np.zeros(rows, np.int32)
        lengths[: len(source)] = [len(ids) for ids in source]
        search = self._compiled_search(decode.beam_size, decode.alpha, target, nbest)
        batch = (batching.pad(source, rows, length), lengths, limits)
        # Rows added to fill the devices have limit 0: done after their first step.
        found = search(self.params, *parallel.split_rows(batch))
        return parallel.join_rows(found, len(sources))

    def _target_length(self, wanted: int) -> int:
        """Returns the longest output: `wanted`, or as many as there are positions."""
        if self.config.positions == "learned":
            wanted = min(wanted, self.config.max_length)
        return max(1, wanted)

    def _make_search(
        self, beam_size: int, alpha: float, length: int, nbest: int
    ) -> Any:
        model = self.model

        def search(params: Any, source: Any, lengths: Any, limits: Any) -> Hypotheses:
            variables = {"params": params}

            def call(method: str, *args: Any) -> Any:
                return model.apply(variables, *args, method=method)

            memory = call("encode", source, lengths)
            cache: Cache = call("init_cache", memory, beam_size, length)

            def step(tokens: jax.Array, state: Any) -> tuple[jax.Array, Any]:
                past, index = state
                new: Cache
                logits, new = call(
                    "decode_step", tokens, cache.replace(past=past, index=index)
                )
                return logits, (new.past, new.index)

            return beam_search(
                step,
                (cache.past, cache.index),
                limits,
                beam_size=beam_size,
                max_length=length,
                alpha=alpha,
                bos_id=BOS_ID,
                eos_id=EOS_ID,
                banned_ids=(PAD_ID, UNK_ID, BOS_ID),
                nbest=nbest,
            )

        return parallel.over_devices(search)

    def _read(self, found: Hypotheses, row: int, nbest: int) -> list[Hypothesis]:
        hypotheses = []
        for beam in range(nbest):
            if found.score[row, beam] <= IMPOSSIBLE:
                break
            generated = found.tokens[row, beam, : found.length[row, beam]]
            ids = [int(i) for i in generated if i != EOS_ID]
            hypotheses.append(
                Hypothesis(
                    text=self.tokenizer.decode(ids),
                    score=float(found.score[row, beam]),
                    log_prob=float(found.log_prob[row, beam]),
                    tokens=self.tokenizer.pieces(ids),
                )
            )
        return hypotheses

    def score(
        self, sources: Sequence[str], targets: Sequence[str], batch_size: int
    ) -> list[float]:
        """Returns log P(target | source) of each pair, EOS included, teacher-forced.

        Args:
            sources: source sentences.
            targets: as many target sentences.
            batch_size: pairs a batch, over all devices.

        Raises:
            DataError: a sentence is longer than the model takes.
        """
        pairs = [self.tokenizer.encode(side) for side in (sources, targets)]
        pairs = list(zip(*pairs, strict=True))
        most = self.config.max_length - 1
        for i, pair in enumerate(pairs):
            if max(map(len, pair)) > most:
                raise DataError(
                    f"line {i + 1} has a side of {max(map(len, pair))} pieces, more "
                    f"than the model's {most} (config.model.max_length); leave it out"
                )
        results = np.zeros(len(pairs), np.float64)
        order = sorted(
            range(len(pairs)), key=lambda i: [len(s) for s in pairs[i]][::-1]
        )
        for chunk in _chunks(order, batch_size):
            sides = zip(*(pairs[i] for i in chunk), strict=True)
            source, target = [[np.asarray(s, np.int32) for s in side] for side in sides]
            shape = batching.Shape(
                _row_bucket(len(chunk), batch_size),
                bucket(max(map(len, source)) + 1, most + 1),
                bucket(max(map(len, target)) + 1, most + 1),
            )
            batch = parallel.split_rows(batching.make_batch(source, target, shape))
            found = self._compiled_score(self.params, batch)
            results[chunk] = parallel.join_rows(found, len(chunk))
        return results.tolist()

    @functools.cached_property
    def _compiled_score(self) -> Any:
        def score(params: Any, batch: batching.Batch) -> jax.Array:
            inputs = batch.source, batch.source_length, batch.target_in
            logits: Any = self.model.apply({"params": params}, *inputs)
            log_probs = jax.nn.log_softmax(logits)
            chosen = jnp.take_along_axis(log_probs, batch.target_out[..., None], -1)
            length = batch.target_out.shape[1]
            real = jnp.arange(length) < batch.target_length[:, None]
            return jnp.where(real, chosen[..., 0], 0).sum(axis=-1)

        return parallel.over_devices(score)


def load_translator(
    workdir: pathlib.Path, which: str, report: Warn
) -> tuple[Translator, Config, Loaded]:
    """Opens a run for decoding; its folder is all that is needed.

    Args:
        workdir: the run's folder.
        which: `best`, `last`, `average` or a step.
        report: is warned of damaged checkpoints.

    Returns:
        The translator, the run's config, and which checkpoint it is.

    Raises:
        UserError: the run, its tokenizer or the checkpoint is missing or damaged.
    """
    parallel.cache_compilations()
    config = read_workdir(workdir)
    tokenizer = Tokenizer.load(workdir / "tokenizer.model")
    loaded = load_params(workdir, which, report)
    params = parallel.replicate(loaded.params)
    return Translator(config.model, tokenizer, params), config, loaded


_EMPTY = Hypothesis(text="", score=0.0, log_prob=0.0, tokens=[])


def _row_bucket(rows: int, most: int) -> int:
    """Returns the padded number of rows: a power of two, or `most`."""
    return min(most, 1 << (rows - 1).bit_length())


def _chunks(items: Sequence[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(items), size):
        yield list(items[start : start + size])
