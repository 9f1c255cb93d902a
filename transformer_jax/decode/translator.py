"""Trained models as a function from strings to strings, and to log-probabilities.

Sentences are sorted by length, padded to a few bucket lengths, decoded in batches that
are split over the devices, and handed back in the order they came. What is found for a
sentence does not depend on what else is translated. Several models with the same
vocabularies are an ensemble: the mean of their probabilities counts.
"""

import dataclasses
import functools
import pathlib
import unicodedata
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from transformer_jax import parallel
from transformer_jax.checkpoint import Loaded, load_params
from transformer_jax.config import Config, DecodeConfig, ModelConfig
from transformer_jax.config_check import check_decode
from transformer_jax.config_file import read_workdir
from transformer_jax.data import batching
from transformer_jax.data.tokenizer import EOS_ID
from transformer_jax.data.vocabularies import SIDES, Vocabularies, model_files
from transformer_jax.decode.choice import IMPOSSIBLE
from transformer_jax.decode.hypotheses import Hypotheses
from transformer_jax.decode.mbr import expected_utilities
from transformer_jax.decode.programs import DecodeBatch, make_score, make_search
from transformer_jax.errors import ConfigError, DataError
from transformer_jax.model.transformer import Transformer, param_axes
from transformer_jax.parallel import Layout

Warn = Callable[[str], None]

# Padded lengths: about a third apart, so that few shapes waste little.
BUCKETS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """One translation."""

    text: str
    score: float  # log_prob / length penalty, and the coverage penalty if there is one
    log_prob: float  # natural logarithm, sum over the pieces and EOS
    tokens: list[str]  # its pieces, without EOS
    token_log_probs: list[float]  # of each piece and, if finished, of EOS
    finished: bool  # ended by EOS, not by the limit
    attention: list[list[float]] | None  # a row for each of token_log_probs, see there
    utility: float | None = None  # mean chrF against all samples, for mbr


_EMPTY = Hypothesis("", 0.0, 0.0, [], [], True, None)


class _Job(NamedTuple):
    """A line that is to be decoded."""

    line: int
    source: list[int]  # ids, without EOS
    prefix: list[int]  # ids that the output begins with

    @property
    def room(self) -> int:
        """Positions that source and prefix need, EOS included."""
        return max(len(self.source), len(self.prefix)) + 1


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
    """Translates and scores text with one set of parameters, or with an ensemble."""

    def __init__(
        self,
        configs: Sequence[ModelConfig],
        vocabularies: Vocabularies,
        params: Sequence[Any],
        layout: Layout,
    ) -> None:
        """Takes the parts of one or more models; nothing is compiled yet.

        Args:
            configs: of each model.
            vocabularies: of all of them.
            params: of each model, as `layout.place` gives them.
            layout: where they lie, and what each device decodes.
        """
        self.vocabularies = vocabularies
        self.params = tuple(params)
        self._layout = layout
        source_size, size = (side.vocab_size for side in vocabularies)
        self.models = [
            Transformer(config, size, source_vocab_size=source_size)
            for config in configs
        ]
        self.max_length = min(config.max_length for config in configs)
        self._learned = any(config.positions == "learned" for config in configs)
        self._search = functools.cache(self._compile_search)
        self._score = layout.compile(make_score(self.models))
        self._programs: set[Any] = set()

    @property
    def compilations(self) -> int:
        """Programs compiled so far: with the same settings one a bucket at the most."""
        return len(self._programs)

    # --- Translation ------------------------------------------------------------

    def translate(
        self,
        lines: Sequence[str],
        decode: DecodeConfig,
        nbest: int = 1,
        warn: Warn = lambda message: None,
        first_line: int = 1,
        prefixes: Sequence[str] | None = None,
        attention: bool = False,
    ) -> list[list[Hypothesis]]:
        """Translates each line.

        Args:
            lines: source sentences.
            decode: search settings.
            nbest: hypotheses a line: at most the beam size, or `decode.mbr`.
            warn: is told about lines that are too long, or have fewer hypotheses.
            first_line: number of `lines[0]`, for messages.
            prefixes: what the translation of each line must begin with; "" for any.
            attention: whether hypotheses get their attention to the source: means over
                the heads of the last layer's cross-attention, columns being the source
                pieces and EOS.

        Returns:
            For each line its hypotheses, best first, samples in the order they were
            drawn; one empty one for a blank line.

        Raises:
            ConfigError: the settings are wrong, or `nbest` is more than they give.
            DataError: a prefix is longer than the output may be, or there are not as
                many prefixes as lines.
        """
        _check(decode, nbest)
        if prefixes is not None and len(prefixes) != len(lines):
            raise DataError(
                f"{len(lines)} lines but {len(prefixes)} prefixes; give one a line"
            )
        jobs = self._jobs(lines, prefixes, decode, warn, first_line)
        results: list[list[Hypothesis]] = [[_EMPTY] for _ in lines]
        for chunk in _chunks(jobs, decode.batch_size):
            forced = prefixes is not None
            found = self._decode(chunk, decode, nbest, forced, attention)
            for job, hypotheses in zip(chunk, found, strict=True):
                if len(hypotheses) < nbest:
                    warn(
                        f"line {job.line} has only {len(hypotheses)} different "
                        f"hypotheses, not {nbest}"
                    )
                results[job.line - first_line] = hypotheses or [_EMPTY]
        return results

    def source_pieces(self, lines: Sequence[str]) -> list[list[str]]:
        """Returns the pieces of each line that are translated, without EOS."""
        most = self.max_length - 1
        ids = self.vocabularies.source.encode(lines)
        return [self.vocabularies.source.pieces(each[:most]) for each in ids]

    def _jobs(
        self,
        lines: Sequence[str],
        prefixes: Sequence[str] | None,
        decode: DecodeConfig,
        warn: Warn,
        first_line: int,
    ) -> list[_Job]:
        """Returns what is to be decoded, the longest first; no blank lines."""
        sources = self.vocabularies.source.encode(lines)
        forced = self.vocabularies.target.encode(prefixes or [""] * len(lines))
        most = self.max_length - 1  # EOS needs a place, too
        jobs = []
        for i, (source, prefix) in enumerate(zip(sources, forced, strict=True)):
            line = first_line + i
            if len(prefix) > most:
                raise DataError(
                    f"prefix of line {line} has {len(prefix)} pieces, more than the "
                    f"model's {most} (config.model.max_length); shorten it"
                )
            if not source or is_blank(lines[i]):
                continue
            if len(source) > most:
                warn(
                    f"line {line} has {len(source)} pieces; only its first {most} are "
                    f"translated (config.model.max_length = {self.max_length})"
                )
            job = _Job(line, source[:most], prefix)
            if (limit := self._most(job.room - 1, decode)) <= len(prefix):
                raise DataError(
                    f"prefix of line {line} has {len(prefix)} pieces, and the output "
                    f"no more than {limit}; raise config.decode.max_length"
                )
            jobs.append(job)
        return sorted(jobs, key=lambda job: (-job.room, job.line))

    def _most(self, pieces: int, decode: DecodeConfig) -> int:
        """Returns the most pieces of an output, EOS included."""
        most = pieces + decode.max_extra_length
        if decode.max_length:
            most = min(most, decode.max_length)
        if self._learned:  # there are no more positions
            most = min(most, self.max_length)
        return max(1, most)

    def _decode(
        self,
        jobs: Sequence[_Job],
        decode: DecodeConfig,
        nbest: int,
        forced: bool,
        attention: bool,
    ) -> list[list[Hypothesis]]:
        """Decodes one batch, whose first job is the longest."""
        length = bucket(jobs[0].room, self.max_length)
        count = decode.mbr or nbest
        program = self._search(
            # What does not change the program must not compile it anew.
            dataclasses.replace(
                decode, sample=decode.sample or decode.mbr > 0, mbr=0, seed=0
            ),
            self._most(length - 1, decode),
            count,
            attention,
        )
        batch = self._batch(jobs, decode, length, forced)
        found = self._layout.join_rows(self._run(program, batch), len(jobs))
        hypotheses = [
            self._read(found, row, count, len(job.source) + 1)
            for row, job in enumerate(jobs)
        ]
        if decode.mbr:
            hypotheses = [_by_utility(drawn)[:nbest] for drawn in hypotheses]
        return hypotheses

    def _batch(
        self, jobs: Sequence[_Job], decode: DecodeConfig, length: int, forced: bool
    ) -> DecodeBatch:
        """Makes a batch of `decode.batch_size` rows; those left over have limit 1."""
        rows = decode.batch_size
        source = [np.append(job.source, EOS_ID).astype(np.int32) for job in jobs]
        prefix = [np.asarray(job.prefix, np.int32) for job in jobs]
        limits = [self._most(job.room - 1, decode) for job in jobs]
        # A sentence draws the same whatever it stands beside.
        seeds = [zlib.crc32(ids.tobytes(), decode.seed & 0xFFFFFFFF) for ids in source]
        return DecodeBatch(
            source=batching.pad(source, rows, length),
            source_length=_fill([len(ids) for ids in source], rows),
            limits=np.maximum(_fill(limits, rows), 1),
            seeds=_fill(seeds, rows, np.uint32),
            prefix=batching.pad(prefix if forced else [], rows, forced * length),
            prefix_length=_fill([len(ids) for ids in prefix], rows),
        )

    def _compile_search(self, *settings: Any) -> Any:
        shards = self._layout.batch_shards
        return self._layout.compile(
            make_search(self.models, *settings, batch_shards=shards)
        )

    def _run(self, program: Any, batch: Any) -> Any:
        """Runs a program on a batch that is split over the devices."""
        shapes = tuple(array.shape for array in batch if array is not None)
        self._programs.add((program, shapes))
        return program(self.params, self._layout.split_rows(batch))

    def _read(
        self, found: Hypotheses, row: int, count: int, source_length: int
    ) -> list[Hypothesis]:
        hypotheses = []
        for beam in range(count):
            if found.score[row, beam] <= IMPOSSIBLE:
                continue
            length = found.length[row, beam]
            ids = found.tokens[row, beam, :length].tolist()
            finished = ids[-1] == EOS_ID
            pieces = ids[:-1] if finished else ids
            attention = None
            if found.attention is not None:
                attention = found.attention[row, beam, :length, :source_length].tolist()
            hypotheses.append(
                Hypothesis(
                    text=self.vocabularies.target.decode(pieces),
                    score=float(found.score[row, beam]),
                    log_prob=float(found.log_prob[row, beam]),
                    tokens=self.vocabularies.target.pieces(pieces),
                    token_log_probs=found.token_log_probs[row, beam, :length].tolist(),
                    finished=finished,
                    attention=attention,
                )
            )
        return hypotheses

    # --- Scoring ----------------------------------------------------------------

    def score(
        self,
        sources: Sequence[str],
        targets: Sequence[str],
        batch_size: int,
        pieces: bool = False,
    ) -> list[float]:
        """Returns log P(target | source) of each pair, EOS included, teacher-forced.

        Args:
            sources: source sentences.
            targets: as many target sentences.
            batch_size: pairs a batch, over all devices.
            pieces: whether targets hold pieces with blanks between, not text.

        Raises:
            DataError: a sentence is longer than the model takes.
        """
        (source, target), most = self.vocabularies, self.max_length - 1
        target_ids = target.ids(targets) if pieces else target.encode(targets)
        pairs = list(zip(source.encode(sources), target_ids, strict=True))
        for i, pair in enumerate(pairs):
            if max(map(len, pair)) > most:
                raise DataError(
                    f"line {i + 1} has a side of {max(map(len, pair))} pieces, more "
                    f"than the model's {most} (config.model.max_length); leave it out"
                )
        results = np.zeros(len(pairs), np.float64)
        order = sorted(range(len(pairs)), key=lambda i: (-max(map(len, pairs[i])), i))
        for chunk in _chunks(order, batch_size):
            sides = zip(*(pairs[i] for i in chunk), strict=True)
            first, second = [[np.asarray(s, np.int32) for s in side] for side in sides]
            length = bucket(max(map(len, pairs[chunk[0]])) + 1, most + 1)
            shape = batching.Shape(batch_size, length, length)
            batch = batching.make_batch(first, second, shape)
            found = self._run(self._score, batch)
            results[chunk] = self._layout.join_rows(found, len(chunk))
        return results.tolist()


def load_translator(
    workdirs: Sequence[pathlib.Path], which: str, report: Warn
) -> tuple[Translator, Config, list[Loaded]]:
    """Opens a run, or several as an ensemble, for decoding.

    Args:
        workdirs: folders of the runs; each is all that is needed.
        which: `best`, `last`, `average` or a step.
        report: is warned of damaged checkpoints.

    Returns:
        The translator, the first run's config, and which checkpoints they are.

    Raises:
        UserError: a run, its tokenizer or the checkpoint is missing or damaged, or the
            vocabularies differ.
    """
    parallel.cores_as_devices()
    parallel.cache_compilations()
    configs = [read_workdir(workdir) for workdir in workdirs]
    opened = [
        Vocabularies.load(model_files(workdir, config.tokenizer.joint))
        for workdir, config in zip(workdirs, configs, strict=True)
    ]
    for workdir, found in zip(workdirs, opened, strict=True):
        for side, own, first in zip(SIDES, found, opened[0], strict=True):
            if own.fingerprint != first.fingerprint:
                raise DataError(
                    f"{workdir} has another vocabulary of the {side} than "
                    f"{workdirs[0]}; an ensemble needs runs with the same"
                )
    loaded = [load_params(workdir, which, report) for workdir in workdirs]
    for workdir, found, each in zip(workdirs, opened, loaded, strict=True):
        _check_tables(workdir, found, each.params)
    layout = parallel.decoding_layout(configs[0].parallel)
    translator = Translator([c.model for c in configs], opened[0], [], layout)
    translator.params = tuple(
        layout.place(each.params, param_axes(model))
        for each, model in zip(loaded, translator.models, strict=True)
    )
    return translator, configs[0], loaded


def _check_tables(workdir: pathlib.Path, found: Vocabularies, params: Any) -> None:
    """Raises DataError where a table has not a row for each piece of its vocabulary."""
    tables = {"embedding": found.target, "source_embedding": found.source}
    for name, vocabulary in tables.items():
        rows = len(params[name]["table"]) if name in params else vocabulary.vocab_size
        if rows != vocabulary.vocab_size:
            raise DataError(
                f"{workdir} has a vocabulary of {vocabulary.vocab_size:,} pieces where "
                f"its model's table {name} has {rows:,} rows; restore its tokenizer "
                "files"
            )


def _check(decode: DecodeConfig, nbest: int) -> None:
    most = decode.mbr or (nbest if decode.sample else decode.beam_size)
    faults = check_decode(decode)
    if not 1 <= nbest <= most:
        faults.append(f"nbest is {nbest}; it must be from 1 to {most}")
    if faults:
        raise ConfigError("; ".join(faults))


def _by_utility(samples: Sequence[Hypothesis]) -> list[Hypothesis]:
    """Returns the different ones of `samples`, of highest expected utility first."""
    first = {sample.text: sample for sample in reversed(samples)}
    utilities = expected_utilities([sample.text for sample in samples])
    return [
        dataclasses.replace(first[text], utility=value)
        for text, value in utilities.items()
    ]


def _fill(values: Sequence[int], rows: int, dtype: Any = np.int32) -> np.ndarray:
    """Returns `values` as an array of `rows`, with zeros behind them."""
    array = np.zeros(rows, dtype)
    array[: len(values)] = values
    return array


def _chunks(items: Sequence[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield list(items[start : start + size])
