"""Text to ids, in order, by as many processes as pay.

A short corpus is encoded where it is read. From `ALONE` chunks on, processes of their
own do it: each loads the vocabularies once, is given chunks and gives back flat arrays.
What comes out is the same for any number of them.
"""

import collections
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

import numpy as np

from transformer_jax.data.tokenizer import Tokenizer, count_characters
from transformer_jax.data.vocabularies import Vocabularies
from transformer_jax.errors import DataError
from transformer_jax.machine import cores

Pair = tuple[str, str]

CHUNK = 10_000  # pairs encoded at a time
ALONE = 10  # chunks encoded before other processes are started, which takes a second
MOST = 16  # processes; more would wait for the one that reads and writes


class Encoded(NamedTuple):
    """Sentences as ids without BOS and EOS, end to end."""

    ids: np.ndarray  # [pieces], in the smallest type that holds the vocabulary
    lengths: np.ndarray  # [sentences] int64
    characters: np.ndarray  # [sentences] int64, blanks left out


def encode(vocabulary: Tokenizer, lines: Sequence[str], threads: int = -1) -> Encoded:
    """Encodes lines by `threads` threads; -1 is one a core."""
    found = vocabulary.encode(lines, threads)
    lengths = np.fromiter(map(len, found), np.int64, len(found))
    pieces = itertools.chain.from_iterable(found)
    ids = np.fromiter(pieces, vocabulary.dtype, lengths.sum())
    return Encoded(ids, lengths, count_characters(lines))


def _encode_sides(
    vocabularies: Vocabularies, chunk: list[Pair], threads: int = -1
) -> list[Encoded]:
    sides = zip(vocabularies, zip(*chunk, strict=True), strict=True)
    return [encode(vocabulary, lines, threads) for vocabulary, lines in sides]


def encode_pairs(
    pairs: Iterable[Pair], vocabularies: Vocabularies, workers: int = 0
) -> Iterator[tuple[list[Pair], list[Encoded]]]:
    """Encodes both sides of a corpus of any size.

    Args:
        pairs: source and target sentences; no more than a few chunks are held.
        vocabularies: what they are encoded with.
        workers: processes; 0 is one for each core this process may use.

    Yields:
        Some pairs, and both their sides encoded, in the order of `pairs`.

    Raises:
        DataError: a process was killed.
    """
    workers = workers or min(MOST, cores())
    chunks = _chunks(pairs, CHUNK)
    alone = chunks if workers == 1 else itertools.islice(chunks, ALONE)
    for chunk in alone:
        yield chunk, _encode_sides(vocabularies, chunk)
    first = next(chunks, None)
    if first is not None:
        yield from _in_processes(
            itertools.chain([first], chunks), vocabularies, workers
        )


def _in_processes(
    chunks: Iterable[list[Pair]], vocabularies: Vocabularies, workers: int
) -> Iterator[tuple[list[Pair], list[Encoded]]]:
    # Not fork: threads and JAX may be running. A new process imports neither.
    models = tuple(each.model for each in dict.fromkeys(vocabularies))
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), _start, models
    )
    ahead: collections.deque[tuple[list[Pair], Future[list[Encoded]]]]
    ahead = collections.deque()
    try:
        for chunk in chunks:
            ahead.append((chunk, pool.submit(_encode_chunk, chunk)))
            if len(ahead) > 2 * workers:
                done, future = ahead.popleft()
                yield done, future.result()
        while ahead:
            done, future = ahead.popleft()
            yield done, future.result()
    except BrokenProcessPool as error:
        raise DataError(
            f"one of the {workers} processes that tokenise could not start or was "
            "killed, as is done where memory runs out; free some, and give the same "
            "command again: nothing half-made is used"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_vocabularies: Vocabularies  # of a worker, loaded when it starts


def _start(*models: bytes) -> None:
    """Makes this process a worker; it ends with the one that started it."""
    global _vocabularies
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    loaded = [Tokenizer(model, "the vocabulary") for model in models]
    _vocabularies = Vocabularies(loaded[0], loaded[-1])


def _end_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os._exit(1)


def _encode_chunk(chunk: list[Pair]) -> list[Encoded]:
    return _encode_sides(_vocabularies, chunk, 1)


def _chunks(pairs: Iterable[Pair], size: int) -> Iterator[list[Pair]]:
    iterator = iter(pairs)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk
