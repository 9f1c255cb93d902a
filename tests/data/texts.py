"""What tests of reading share."""

import gzip
import pathlib

import pytest


def one_line(error: pytest.ExceptionInfo[Exception]) -> str:
    message = str(error.value)
    assert message and "\n" not in message
    return message


def write(path: pathlib.Path, content: bytes) -> str:
    packed = gzip.compress(content) if path.name.endswith(".gz") else content
    path.write_bytes(packed)
    return str(path)
