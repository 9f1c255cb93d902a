"""Text files: their lines, what is wrong with them, and how a file is recognised."""

import contextlib
import gzip
import hashlib
import io
import os
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from transformer_jax.errors import DataError

BOM = b"\xef\xbb\xbf"
_BLOCK = 1 << 20  # bytes read at once


def split_paths(value: str, root: str) -> list[str]:
    """Splits a comma-separated list of paths.

    Args:
        value: the list; blanks around a path, and empty items, are dropped.
        root: folder that relative paths start from; "" is the current one.

    Returns:
        The paths, in the order given; `~` is the home folder.
    """
    items = [item.strip() for item in value.split(",")]
    root = os.path.expanduser(root)
    return [os.path.join(root, os.path.expanduser(item)) for item in items if item]


def read_lines(path: str) -> Iterator[str]:
    r"""Reads the lines of one UTF-8 text file, one at a time.

    Only `\n` ends a line, and a `\r` right before it goes with it. A BOM at the start
    is dropped. All else, such as U+0085, U+2028, tabs and NUL, is text.

    Args:
        path: the file; it is decompressed where the name ends in .gz.

    Yields:
        The lines, without their ends.

    Raises:
        DataError: the file cannot be read, or is not gzip or not UTF-8.
    """
    for number, (start, line) in enumerate(raw_lines(path), start=1):
        try:
            yield without_end(line).decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(not_utf8(path, number, start, error)) from error


def raw_lines(path: str) -> Iterator[tuple[int, bytes]]:
    """Reads the lines of a file as bytes; a BOM at the start is left out.

    Yields:
        The byte offset at which a line begins, and the line with its end.

    Raises:
        DataError: the file cannot be read, or is not gzip.
    """
    offset = 0
    with opened(path) as file:
        for line in file:
            length = len(line)
            if not offset and line.startswith(BOM):
                line, offset = line[len(BOM) :], len(BOM)
                if not line:  # the file is a BOM and nothing else
                    return
                length = len(line)
            yield offset, line
            offset += length


def without_end(line: bytes) -> bytes:
    r"""Returns a line of `raw_lines` without its `\n`, and the `\r` before that."""
    if line.endswith(b"\n"):
        return line[: -2 if line.endswith(b"\r\n") else -1]
    return line


def not_utf8(path: str, number: int, start: int, error: UnicodeDecodeError) -> str:
    """Returns what is said about line `number`, which begins at byte `start`."""
    return (
        f"{path} is not UTF-8: line {number}, byte offset {start + error.start}: "
        f"{error.reason} (0x{error.object[error.start]:02X}); "
        "convert the file to UTF-8"
    )


@contextlib.contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """Opens a plain or gzip file; what fails while it is read becomes a DataError."""
    where = 0
    try:
        with open(path, "rb") as raw:
            if not path.endswith(".gz"):
                yield raw
                return
            # The buffer makes the loop over lines run in C.
            with io.BufferedReader(gzip.GzipFile(fileobj=raw), _BLOCK) as unzipped:
                try:
                    yield unzipped
                finally:
                    where = raw.tell()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path} is not a whole gzip file: {error} (within its first {where} "
            "bytes); make or copy it anew, or rename it where it is plain text"
        ) from error
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror or error}; mend it or the path"
        ) from error


def describe_file(path: str) -> dict[str, Any]:
    """Returns size and a hash of the two ends of a file.

    Raises:
        DataError: it cannot be read, or only once.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise DataError(
            f"{path} is a directory, a pipe or a device; a corpus is read several "
            "times, so give a file"
        )
    with opened(path):  # says what is wrong with it
        size = os.stat(path).st_size
    # Neither path nor time: a file that was only moved or copied is the same data.
    # Its two ends are read, so that a corpus of any size is recognised at once.
    with open(path, "rb") as file:
        ends = hashlib.sha256(file.read(_BLOCK))
        file.seek(max(0, size - _BLOCK))
        ends.update(file.read(_BLOCK))
    return {"size": size, "sha256_of_ends": ends.hexdigest()}


def count_lines(path: str) -> int:
    """Counts what `read_lines` would yield, many times faster."""
    describe_file(path)  # a pipe would be used up here
    lines, last = 0, b"\n"
    with opened(path) as file:
        block = file.read(_BLOCK).removeprefix(BOM)
        while block:
            lines += block.count(b"\n")
            last = block[-1:]
            block = file.read(_BLOCK)
    return lines + (last != b"\n")
