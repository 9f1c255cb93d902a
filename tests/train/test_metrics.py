"""The metrics file: rows of before a resume, without what a crash left behind."""

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
