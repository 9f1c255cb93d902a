"""Parallel corpora: the embedded phrases, the user's text files, and TFDS data sets.

Whatever the corpus, `read_pairs` yields `(source, target)` in the direction that the
config names. TFDS is imported only where it is read, and TensorFlow never: TFDS works
without it as long as the data lie in ArrayRecord files.
"""

import contextlib
import hashlib
import importlib
import itertools
import json
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

from transformer_jax.config import SPLITS, DataConfig
from transformer_jax.data import phrases
from transformer_jax.data.cleaning import Cleaner
from transformer_jax.data.textfiles import count_lines, describe_file, split_paths
from transformer_jax.errors import ConfigError, DataError

_TFDS_SPLITS = {"train": "train", "valid": "validation", "test": "test"}
_TFDS_FORMAT = "array_record"  # the one format that needs no TensorFlow
_TFDS_RECORDS = 1024  # read at once: twice as fast as one by one
_TFDS_MEND = (
    "where there are network and TensorFlow, run `tfds build {} --file_format="
    "array_record --data_dir=FOLDER`, then set --config.data.tfds_dir=FOLDER"
)


class Pairs(Iterator[tuple[str, str]]):
    """An iterator that tells how many pairs it was made for, and what was unclean."""

    def __init__(
        self, pairs: Iterator[tuple[str, str]], count: int, cleaner: Cleaner
    ) -> None:
        """`cleaner` counts as the pairs are read."""
        self._pairs, self._count = pairs, count
        self.cleaner = cleaner

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return self._pairs  # as fast as it is

    def __next__(self) -> tuple[str, str]:
        return next(self._pairs)

    def __length_hint__(self) -> int:
        return self._count


def read_pairs(config: DataConfig, split: str) -> Pairs:
    """Reads one split of the corpus, in the config's direction.

    The call itself checks fields, files, line counts and languages, before any pair.

    Args:
        config: names the corpus and the languages.
        split: train, valid or test.

    Returns:
        An iterator over `(source, target)`, in the order of the corpus, cleaned as the
        config asks. It tells their number to `operator.length_hint`.

    Raises:
        ConfigError: a field is missing or contradicts another one.
        DataError: the files or the data set are missing, damaged or do not fit.
    """
    _check_split(split)
    cleaner = Cleaner(config, split)
    if config.corpus == "phrases":
        pairs = _phrase_pairs(config, split)
        return Pairs(iter(pairs), len(pairs), cleaner)
    if config.corpus == "text":
        return _read_text(text_files(config, split), cleaner)
    return _read_tfds(config, split, cleaner)


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
    return config.corpus == "phrases" or bool(text_files(config, split, False))


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
    described |= Cleaner(config, split).rules()  # none by default, as in older runs
    if config.corpus == "phrases":
        text = json.dumps(_phrase_pairs(config, split))
        described["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    elif config.corpus == "text":
        files = text_files(config, split)
        described["files"] = [[describe_file(side) for side in pair] for pair in files]
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


def text_files(
    config: DataConfig, split: str, required: bool = True
) -> list[tuple[str, str]]:
    """Returns (source file, target file) of a split, not yet looked at.

    Raises:
        ConfigError: a side is not named, or one names more files than the other.
    """
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


def unequal(source: str, lines: int, target: str, target_lines: int) -> str:
    """Returns what is said about two files that are not parallel."""
    return (
        f"{source} has {lines} lines, but {target} has {target_lines} lines; "
        "line i of the one must be the translation of line i of the other"
    )


def _read_text(files: list[tuple[str, str]], cleaner: Cleaner) -> Pairs:
    total = 0
    for source, target in files:
        counts = count_lines(source), count_lines(target)
        if counts[0] != counts[1]:
            raise DataError(unequal(source, counts[0], target, counts[1]))
        total += counts[0]
    pairs = itertools.chain.from_iterable(
        cleaner.both(zip(cleaner.read(source), cleaner.read(target), strict=True))
        for source, target in files
    )
    return Pairs(pairs, total, cleaner)


# --- TFDS -----------------------------------------------------------------------


def _read_tfds(config: DataConfig, split: str, cleaner: Cleaner) -> Pairs:
    builder = _open_tfds(config)
    name = _tfds_split(config, builder.info, split)
    data = _tfds_call(
        config, lambda: builder.as_data_source(name, file_format=_TFDS_FORMAT)
    )
    sides = config.source_lang, config.target_lang

    def rows() -> Iterator[tuple[str | None, str | None]]:
        for start in range(0, len(data), _TFDS_RECORDS):
            block = list(range(start, min(start + _TFDS_RECORDS, len(data))))
            records = _tfds_call(config, lambda keys=block: data.__getitems__(keys))
            for index, record in zip(block, records, strict=True):
                try:
                    row = [cleaner.decode(record[s], name, index + 1) for s in sides]
                except (UnicodeDecodeError, AttributeError) as error:
                    raise DataError(
                        f"{config.tfds_name} in {_tfds_folder(config)}, split {name}, "
                        f"example {index}: no UTF-8 text: {error}; prepare it anew"
                    ) from error
                yield row[0], row[1]

    return Pairs(cleaner.both(rows()), len(data), cleaner)


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
