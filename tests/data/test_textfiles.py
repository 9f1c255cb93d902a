"""Lines of text files: where they end, and what broken ones answer."""

import gzip

import pytest
from texts import one_line, write

from transformer_jax.data import textfiles
from transformer_jax.errors import DataError

LINES = [
    (b"", []),
    (b"\xef\xbb\xbf", []),
    (b"\n", [""]),
    (b"\xef\xbb\xbf\n", [""]),
    (b"a\nb\n", ["a", "b"]),
    (b"a\nb", ["a", "b"]),
    (b"a\n\n", ["a", ""]),
    (b"a\r\nb\r\n", ["a", "b"]),
    (b"a\r\r\nb\rc\n", ["a\r", "b\rc"]),
    (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", ["a", "\ufeffb"]),
    (
        b"a\xc2\x85b\xe2\x80\xa8c\td\x00e\x0cf\x0bg\x1ch\n",
        ["a\x85b\u2028c\td\0e\ff\vg\x1ch"],
    ),
    (" Grüße \U0001f600 \n".encode(), [" Grüße \U0001f600 "]),
]


@pytest.mark.parametrize("name", ["t.txt", "t.gz"])
@pytest.mark.parametrize(("content", "expected"), LINES)
def test_lines_end_at_newlines_only(tmp_path, name, content, expected):
    path = write(tmp_path / name, content)
    assert list(textfiles.read_lines(path)) == expected
    assert textfiles.count_lines(path) == len(expected)


def test_lines_and_counts_agree_across_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(textfiles, "_BLOCK", 3)  # every place of a block's border
    for shift in range(4):
        content = b"x" * shift + b"\nab\xef\xbb\xbf\n\n\xef\xbb\xbf"
        path = write(tmp_path / "t", content)
        assert textfiles.count_lines(path) == 4
        assert len(list(textfiles.read_lines(path))) == 4


def test_lines_are_streamed(tmp_path):
    path = tmp_path / "t"
    path.write_bytes(b"first\n" + b"x\n" * 100_000 + b"\xff\n")
    lines = textfiles.read_lines(str(path))
    assert next(lines) == "first"  # the fault at the end is not yet met


@pytest.mark.parametrize(
    ("content", "line", "offset", "byte"),
    [
        (b"ab\nc\xe9d\n", 2, 4, "0xE9"),
        (b"ab\r\nc\xe9", 2, 5, "0xE9"),
        (b"\xef\xbb\xbfab\nc\xe9d\n", 2, 7, "0xE9"),
        (b"\xef\xbb\xbfa\x80\n", 1, 4, "0x80"),
        (b"\xff\xfea\x00\n\x00", 1, 0, "0xFF"),  # UTF-16
        (b"a\n\n\xed\xa0\x80\n", 3, 3, "0xED"),  # a surrogate
        (b"a\n\xc3", 2, 2, "0xC3"),
    ],
)
@pytest.mark.parametrize("name", ["t.txt", "t.gz"])
def test_invalid_utf8_names_file_line_and_byte(
    tmp_path, name, content, line, offset, byte
):
    path = write(tmp_path / name, content)
    with pytest.raises(DataError) as error:
        list(textfiles.read_lines(path))
    message = one_line(error)
    assert path in message and byte in message
    assert f"line {line}, byte offset {offset}:" in message


def test_missing_file_and_directory(tmp_path):
    for path, reason in (
        (tmp_path / "none.txt", "No such file"),
        (tmp_path / "none.gz", "No such file"),
        (tmp_path, "directory"),
    ):
        for read in (lambda p: list(textfiles.read_lines(p)), textfiles.count_lines):
            with pytest.raises(DataError, match=reason) as error:
                read(str(path))
            assert str(path) in one_line(error)


def test_no_permission(tmp_path, monkeypatch):
    path = write(tmp_path / "t", b"a\n")

    def refuse(*_):
        raise PermissionError(13, "Permission denied", path)

    # Root may read all, so a mode of 0 would not fail in every place.
    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(DataError) as error:
        list(textfiles.read_lines(path))
    assert f"{path} cannot be read: Permission denied" in one_line(error)


def test_broken_gzip(tmp_path):
    whole = gzip.compress("".join(f"line {i}\n" for i in range(9999)).encode())
    broken = {
        "plain.gz": b"plain text\n",
        "cut.gz": whole[: len(whole) // 2],
        "no_end.gz": whole[:-3],
        "changed.gz": whole[:-8] + b"\0\0\0\0" + whole[-4:],  # the checksum
        "garbled.gz": whole[:200] + b"\xff" * 200 + whole[400:],
    }
    for name, content in broken.items():
        path = tmp_path / name
        path.write_bytes(content)
        for read in (lambda p: list(textfiles.read_lines(p)), textfiles.count_lines):
            with pytest.raises(DataError, match="not a whole gzip file") as error:
                read(str(path))
            assert str(path) in one_line(error)


def test_split_paths(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert textfiles.split_paths("", "/r") == []
    assert textfiles.split_paths("a.en", "") == ["a.en"]
    assert textfiles.split_paths("a.en, b/c.gz,/d,", "/r") == [
        "/r/a.en",
        "/r/b/c.gz",
        "/d",
    ]
    assert textfiles.split_paths("~/a,b", "~/r") == ["/home/me/a", "/home/me/r/b"]
