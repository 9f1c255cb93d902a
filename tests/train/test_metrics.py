"""The metrics file: rows of before a resume, without what a crash left behind."""

import pathlib
import struct
import time

import pytest
from tensorboardX.proto.event_pb2 import (
    Event,  # pyright: ignore[reportAttributeAccessIssue]
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)

from transformer_jax.train.metrics import MetricsWriter, read_rows


def test_what_is_no_row_is_left_out(tmp_path):
    good = b'{"kind": "train", "step": 1, "loss": 2.0}\n'
    later = b'{"kind": "train", "step": 9, "loss": 1.0}\n'
    damaged = [b"\x80\xff\n", b"\x00" * 40 + b"\n", b"[1]\n", b"{}\n", b'{"kind": "tr']
    (tmp_path / "metrics.jsonl").write_bytes(good + b"".join([later, *damaged]))
    assert [row["step"] for row in read_rows(tmp_path, 9)] == [1, 9]
    MetricsWriter(tmp_path, 8).close()
    assert (tmp_path / "metrics.jsonl").read_bytes() == good
    assert read_rows(tmp_path / "elsewhere", 8) == []


def test_tensorboard_holds_the_same_values_and_where_a_run_went_on(tmp_path):
    for step in (4, 6):
        writer = MetricsWriter(tmp_path, step)
        writer.write("train", step + 1, {"loss": 2.5, "note": "no number"})
        writer.close()
        time.sleep(1.1)  # files are named by the second
    events = []
    for file in sorted((tmp_path / "tensorboard").iterdir()):
        content = file.read_bytes()
        while content:
            (size,) = struct.unpack("Q", content[:8])
            events.append(Event.FromString(content[12 : 12 + size]))
            content = content[16 + size :]
    starts = [e.step for e in events if e.session_log.status == SessionLog.START]
    assert starts == [5, 7]
    values = [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]
    assert values == [(5, "train/loss", 2.5), (7, "train/loss", 2.5)]


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_an_error_at_once(tmp_path):
    """It once ended a thread, for which the run then waited for ever."""
    writer = MetricsWriter(tmp_path, 0)
    writer._file.close()
    writer._file = open("/dev/full", "w")
    with pytest.raises(OSError, match="No space left"):
        writer.write("train", 1, {"loss": 1.0})
    with pytest.raises(OSError, match="No space left"):
        writer._file.close()
    writer._file, board = (tmp_path / "elsewhere").open("w"), writer._board
    board.close()
    board._py_recordio_writer._writer = open("/dev/full", "wb", buffering=0)
    with pytest.raises(OSError, match="No space left"):
        writer.write("train", 1, {"loss": 1.0})
    board._py_recordio_writer._writer.close()
    writer._file.close()
