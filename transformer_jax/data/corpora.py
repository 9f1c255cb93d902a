"""Parallel corpora: the embedded phrases, the user's text files, and TFDS data sets.

Whatever the corpus, `read_pairs` yields `(source, target)` in the direction that the
config names. TFDS is imported only where it is read, and TensorFlow never: TFDS works
without it as long as the data lie in ArrayRecord files.
"""

import contextlib
import gzip
import hashlib
import importlib
import io
import itertools
import json
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from transformer_jax.config import SPLITS, DataConfig
from transformer_jax.data import phrases
from transformer_jax.errors import ConfigError, DataError

_BOM = b"\xef\xbb\xbf"
_BLOCK = 1 << 20  # bytes read at once
_TFDS_SPLITS = {"train": "train", "valid": "validation", "test": "test"}
_TFDS_FORMAT = "array_record"  # the one format that needs no TensorFlow
_TFDS_RECORDS = 1024  # read at once: twice as fast as one by one
_TFDS_MEND = (
    "where there are network and TensorFlow, run `tfds build {} --file_format="
    "array_record --data_dir=FOLDER`, then set --config.data.tfds_dir=FOLDER"
)


def read_pairs(config: DataConfig, split: str) -> Iterator[tuple[str, str]]:
    """Reads one split of the corpus, in the config's direction.

    The call itself checks fields, files, line counts and languages, before any pair.

    Args:
        config: names the corpus and the languages.
        split: train, valid or test.

    Returns:
        An iterator over `(source, target)`, in the order of the corpus.

    Raises:
        ConfigError: a field is missing or contradicts another one.
        DataError: the files or the data set are missing, damaged or do not fit.
    """
    _check_split(split)
    if config.corpus == "phrases":
        return iter(_phrase_pairs(config, split))
    if config.corpus == "text":
        return _read_text(_text_files(config, split))
    return _read_tfds(config, split)


def has_split(config: DataConfig, split: str) -> bool:
    """Tells whether the corpus has a split.

    Args:
        config: names the corpus.
        split: train, valid or test.

    Returns:
        Whether `read_pairs` can be asked for the split.

    Raises:
        ConfigError: only one side of the split is named, or the data set is not named.
        DataError: the TFDS data set cannot be opened.
    """
    _check_split(split)
    if config.corpus == "tfds":
        return _TFDS_SPLITS[split] in _open_tfds(config).info.splits
    return config.corpus == "phrases" or bool(_text_files(config, split, False))


def fingerprint(config: DataConfig, split: str) -> dict[str, Any]:
    """Describes what a split is made of, without reading the text.

    Args:
        config: names the corpus and the languages.
        split: train, valid or test.

    Returns:
        A dictionary of plain JSON values, equal as long as the data are the same.

    Raises:
        ConfigError: a field is missing or contradicts another one.
        DataError: the files or the data set are missing.
    """
    _check_split(split)
    described: dict[str, Any] = {"corpus": config.corpus, "split": split}
    if config.corpus == "phrases":
        text = json.dumps(_phrase_pairs(config, split))
        described["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    elif config.corpus == "text":
        files = _text_files(config, split)
        described["files"] = [[_describe_file(side) for side in pair] for pair in files]
    else:
        info = _open_tfds(config).info
        part = info.splits[_tfds_split(config, info, split)]
        described |= {
            "name": config.tfds_name,
            "version": str(info.version),
            "examples": int(part.num_examples),
            "bytes": int(part.num_bytes),
            "direction": [config.source_lang, config.target_lang],
        }
    return described


def _check_split(split: str) -> None:
    if split not in SPLITS:
        raise ConfigError(f"split {split!r} does not exist; there are: {SPLITS}")


def _phrase_pairs(config: DataConfig, split: str) -> list[tuple[str, str]]:
    for field in ("source_lang", "target_lang"):
        if getattr(config, field) not in ("en", "de"):
            raise ConfigError(
                f"config.data.{field} is {getattr(config, field)!r}; the corpus "
                "phrases has en and de only"
            )
    pairs = phrases.pairs(split)
    return pairs if config.source_lang == "en" else [(de, en) for en, de in pairs]


# --- Text files -----------------------------------------------------------------


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
    offset = 0
    with _opened(path) as file:
        for number, raw in enumerate(file, start=1):
            line = raw.removeprefix(_BOM) if number == 1 else raw
            if not line:  # the file is a BOM and nothing else
                return
            start = offset + len(raw) - len(line)
            offset += len(raw)
            if line.endswith(b"\n"):
                line = line[: -2 if line.endswith(b"\r\n") else -1]
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path} is not UTF-8: line {number}, byte offset "
                    f"{start + error.start}: {error.reason} "
                    f"(0x{line[error.start]:02X}); convert the file to UTF-8"
                ) from error
            yield text


@contextlib.contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
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


def _describe_file(path: str) -> dict[str, Any]:
    if os.path.exists(path) and not os.path.isfile(path):
        raise DataError(
            f"{path} is a directory, a pipe or a device; a corpus is read several "
            "times, so give a file"
        )
    with _opened(path):  # says what is wrong with it
        size = os.stat(path).st_size
    # Neither path nor time: a file that was only moved or copied is the same data.
    # Its two ends are read, so that a corpus of any size is recognised at once.
    with open(path, "rb") as file:
        ends = hashlib.sha256(file.read(_BLOCK))
        file.seek(max(0, size - _BLOCK))
        ends.update(file.read(_BLOCK))
    return {"size": size, "sha256_of_ends": ends.hexdigest()}


def _count_lines(path: str) -> int:
    """Counts what `read_lines` would yield, many times faster."""
    _describe_file(path)  # a pipe would be used up here
    lines, last = 0, b"\n"
    with _opened(path) as file:
        block = file.read(_BLOCK).removeprefix(_BOM)
        while block:
            lines += block.count(b"\n")
            last = block[-1:]
            block = file.read(_BLOCK)
    return lines + (last != b"\n")


def _text_files(
    config: DataConfig, split: str, required: bool = True
) -> list[tuple[str, str]]:
    """Returns (source file, target file) of a split, not yet looked at."""
    fields = [f"config.data.{split}_{side}" for side in ("source", "target")]
    values = [getattr(config, field.removeprefix("config.data.")) for field in fields]
    source, target = (split_paths(value, config.root) for value in values)
    if required and not source and not target:
        raise ConfigError(f"{fields[0]} and {fields[1]} are empty; name the files")
    if len(source) != len(target):
        raise ConfigError(
            f"{fields[0]} names {len(source)} files, but {fields[1]} names "
            f"{len(target)} files; the i-th of the one must belong to the i-th of the "
            "other"
        )
    return list(zip(source, target, strict=True))


def _read_text(files: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    for source, target in files:
        counts = _count_lines(source), _count_lines(target)
        if counts[0] != counts[1]:
            raise DataError(
                f"{source} has {counts[0]} lines, but {target} has {counts[1]} lines; "
                "line i of the one must be the translation of line i of the other"
            )
    return itertools.chain.from_iterable(
        zip(read_lines(source), read_lines(target), strict=True)
        for source, target in files
    )


# --- TFDS -----------------------------------------------------------------------


def _read_tfds(config: DataConfig, split: str) -> Iterator[tuple[str, str]]:
    builder = _open_tfds(config)
    name = _tfds_split(config, builder.info, split)
    data = _tfds_call(
        config, lambda: builder.as_data_source(name, file_format=_TFDS_FORMAT)
    )
    sides = config.source_lang, config.target_lang

    def pairs() -> Iterator[tuple[str, str]]:
        for start in range(0, len(data), _TFDS_RECORDS):
            block = list(range(start, min(start + _TFDS_RECORDS, len(data))))
            records = _tfds_call(config, lambda keys=block: data.__getitems__(keys))
            for index, record in zip(block, records, strict=True):
                try:
                    source, target = (record[side].decode("utf-8") for side in sides)
                except (UnicodeDecodeError, AttributeError) as error:
                    raise DataError(
                        f"{config.tfds_name} in {_tfds_folder(config)}, split {name}, "
                        f"example {index}: no UTF-8 text: {error}; prepare it anew"
                    ) from error
                yield source, target

    return pairs()


def _tfds_split(config: DataConfig, info: Any, split: str) -> str:
    name = _TFDS_SPLITS[split]
    if name not in info.splits:
        there = ", ".join(info.splits)
        raise DataError(f"{config.tfds_name} has no split {name}; there are: {there}")
    return name


def _tfds_call(config: DataConfig, call: Callable[[], Any]) -> Any:
    """Calls TFDS, which fails with almost any exception, and many lines of text."""
    try:
        return call()
    except Exception as error:
        raise DataError(
            f"TFDS cannot read {config.tfds_name} in {_tfds_folder(config)}: "
            f"{_one_line(error)}; mend config.data.tfds_name or config.data.tfds_dir"
        ) from error


def _one_line(error: Exception) -> str:
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return words if len(words) <= 300 else words[:300] + " ..."


def _tfds_folder(config: DataConfig) -> str:
    from tensorflow_datasets.core import constants

    return os.path.expanduser(config.tfds_dir) or constants.get_default_data_dir()


def _open_tfds(config: DataConfig) -> Any:
    """Returns the builder of a prepared data set that has both languages."""
    if not config.tfds_name:
        raise ConfigError("config.data.tfds_name is empty; name a TFDS data set")
    builder = _tfds_call(config, lambda: _find_tfds(config))
    if not _tfds_call(config, builder.is_prepared):
        _prepare_tfds(config, builder)
    formats = sorted(form.value for form in builder.info.available_file_formats())
    if _TFDS_FORMAT not in formats:
        raise DataError(
            f"{config.tfds_name} in {_tfds_folder(config)} is prepared as {formats}, "
            f"but is read as {_TFDS_FORMAT}; {_TFDS_MEND.format(config.tfds_name)}"
        )
    languages = list(getattr(builder.info.features, "keys", list)())
    for field in ("source_lang", "target_lang"):
        if getattr(config, field) not in languages:
            raise DataError(
                f"config.data.{field} is {getattr(config, field)!r}, which "
                f"{config.tfds_name} lacks; there are: {', '.join(languages)}"
            )
    return builder


def _find_tfds(config: DataConfig) -> Any:
    """Returns a builder; `tfds_dir` may also be the very folder of the data."""
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import registered

    # Without TensorFlow TFDS does not register these builders by itself.
    importlib.import_module("tensorflow_datasets.translate")
    folder = _tfds_folder(config)
    if (tfds.core.Path(folder) / "dataset_info.json").exists():
        builder = tfds.builder_from_directory(folder)
        full_name = builder.info.full_name
        if not f"{full_name}/".startswith(config.tfds_name.replace(":", "/") + "/"):
            raise ValueError(f"the folder holds {full_name}")
        return builder
    try:
        return tfds.builder(config.tfds_name, data_dir=config.tfds_dir or None)
    except registered.DatasetNotFoundError:  # it goes on to list every data set
        raise LookupError("neither prepared there nor known to TFDS") from None


def _prepare_tfds(config: DataConfig, builder: Any) -> None:
    """Downloads and prepares a data set, or says in one line why that cannot be."""
    import tensorflow_datasets as tfds

    try:
        # TFDS would try again and again for minutes where there is no network.
        urls = {urllib.parse.urlsplit(u).netloc: u for u in builder.url_infos or ()}
        if urls and not any(map(_reachable, list(urls.values())[:3])):
            raise ConnectionError(f"no network: cannot reach {', '.join(urls)}")
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for results
            builder.download_and_prepare(
                file_format=_TFDS_FORMAT,
                download_config=tfds.download.DownloadConfig(try_download_gcs=False),
            )
    except Exception as error:
        name, folder = config.tfds_name, _tfds_folder(config)
        raise DataError(
            f"{name} is not prepared in {folder}, and cannot be prepared here: "
            f"{_one_line(error)}; {_TFDS_MEND.format(name)}"
        ) from error


def _reachable(url: str) -> bool:
    request = urllib.request.Request(url, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=10).close()
    except OSError as error:
        return isinstance(error, urllib.error.HTTPError)  # an answer, whatever it says
    return True
