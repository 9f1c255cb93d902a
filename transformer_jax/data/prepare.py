"""Text to token ids on disk, once: flat memory-mapped arrays with offsets.

    FOLDER/SPLIT-HASH/source.ids.npy       all ids of the source side, end to end
                      source.offsets.npy   where each sentence starts, and the end
                      target.ids.npy, target.offsets.npy
                      source.txt, target.txt   the text (valid and test)
                      manifest.json        what made it, and what was counted
    WORKDIR/tokenizer.model                the vocabulary
            splits.json                    which folder each split of the run is in

The hash is of everything the content depends on, so the same corpus prepared by the
same settings is found again. The folder is written under another name and renamed, so
a half-written one is never taken for a whole one.
"""

import dataclasses
import hashlib
import itertools
import json
import pathlib
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from transformer_jax.config import SPLITS, Config
from transformer_jax.data import corpora, tokenizer
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.errors import DataError

CHUNK = 10_000  # pairs tokenised at a time

Report = Callable[[str], None]


class TokenizedSide:
    """One side of a tokenised corpus; `side[i]` is a view of sentence i's ids."""

    def __init__(self, folder: pathlib.Path, name: str) -> None:
        """Maps the arrays of side `name` of `folder`."""
        self.ids = np.load(folder / f"{name}.ids.npy", mmap_mode="r")
        self.offsets = np.load(folder / f"{name}.offsets.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.ids[self.offsets[index] : self.offsets[index + 1]]


class TokenizedCorpus:
    """A split as token ids, without BOS and EOS."""

    def __init__(self, folder: pathlib.Path) -> None:
        """Opens the folder of a prepared split."""
        self.folder = folder
        self.manifest: dict[str, Any] = json.loads(
            (folder / "manifest.json").read_text(encoding="utf-8")
        )
        self.source = TokenizedSide(folder, "source")
        self.target = TokenizedSide(folder, "target")

    def __len__(self) -> int:
        return len(self.source)

    def lengths(self) -> np.ndarray:
        """Returns source and target lengths with EOS, `[pairs, 2] int64`."""
        sides = (self.source, self.target)
        return np.stack([np.diff(side.offsets) + 1 for side in sides], axis=1)

    def text(self) -> tuple[list[str], list[str]]:
        """Returns the sentences of both sides as they were read (valid and test)."""
        return tuple(  # pyright: ignore[reportReturnType]
            list(corpora.read_lines(str(self.folder / f"{side}.txt")))
            for side in ("source", "target")
        )


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Everything training and evaluation need of the data."""

    tokenizer: Tokenizer
    splits: dict[str, TokenizedCorpus]


def prepare(config: Config, workdir: pathlib.Path, report: Report) -> Prepared:
    """Makes, or finds, the tokenizer and every split that the corpus has.

    Args:
        config: the run's config.
        workdir: where `tokenizer.model` and, without `data.cache_dir`, the data go.
        report: is told, in a line, about each thing that is made.

    Returns:
        The tokenizer and the splits.

    Raises:
        DataError: a file is missing or broken, sides differ in length, or nothing
            usable is left.
    """
    vocabulary = make_tokenizer(config, workdir, report)
    folder = pathlib.Path(config.data.cache_dir or workdir / "data")
    recorded = _recorded_splits(workdir)
    splits = {}
    for split in SPLITS:
        if split == "train" or corpora.has_split(config.data, split):
            splits[split] = tokenize(config, split, vocabulary, folder, report)
            _require_unchanged(split, recorded.get(split), splits[split].folder)
    names = {split: str(corpus.folder) for split, corpus in splits.items()}
    text = json.dumps(names, indent=2) + "\n"
    write_atomically(workdir / "splits.json", text.encode())
    return Prepared(vocabulary, splits)


def open_split(workdir: pathlib.Path, split: str) -> TokenizedCorpus:
    """Opens a split of a run; the files that it was made of are not needed.

    Raises:
        DataError: the run has no such split, or its folder is gone.
    """
    recorded = _recorded_splits(workdir)
    if split not in recorded:
        raise DataError(
            f"{workdir} has no split {split!r}; there are: "
            f"{', '.join(recorded) or 'none'}; give --source and --reference"
        )
    # A run that was moved holds its own data; data elsewhere stay where they were.
    inside = workdir / "data" / pathlib.Path(recorded[split]).name
    for folder in (inside, pathlib.Path(recorded[split])):
        if (folder / "manifest.json").exists():
            return TokenizedCorpus(folder)
    raise DataError(
        f"the tokenised {split} data {recorded[split]} are gone; run transformer-jax "
        f"prepare --config=FILE --workdir={workdir}"
    )


def _recorded_splits(workdir: pathlib.Path) -> dict[str, str]:
    file = workdir / "splits.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def _require_unchanged(split: str, recorded: str | None, now: pathlib.Path) -> None:
    """Raises DataError where a run would go on with other data than it began with."""
    if recorded is not None and pathlib.Path(recorded).name != now.name:
        raise DataError(
            f"the {split} data are not those this run began with; restore the files, "
            "or start a new run in another --workdir"
        )


def make_tokenizer(config: Config, workdir: pathlib.Path, report: Report) -> Tokenizer:
    """Loads `WORKDIR/tokenizer.model`; copies or trains it first where missing."""
    path = workdir / "tokenizer.model"
    if not path.exists():
        if config.tokenizer.model_path:
            made = Tokenizer.load(config.tokenizer.model_path)
        else:
            report("training the vocabulary")
            pairs = corpora.read_pairs(config.data, "train")
            lines = itertools.chain.from_iterable(pairs)
            made = tokenizer.train(lines, config.tokenizer, config.train.seed)
        workdir.mkdir(parents=True, exist_ok=True)
        write_atomically(path, made.model)
    return Tokenizer.load(path)


def write_atomically(path: pathlib.Path, content: bytes) -> None:
    """Writes a file beside `path` and renames it, so that no half file is ever seen."""
    beside = path.with_name(path.name + ".partial")
    beside.write_bytes(content)
    beside.replace(path)


def tokenize(
    config: Config,
    split: str,
    vocabulary: Tokenizer,
    folder: pathlib.Path,
    report: Report,
) -> TokenizedCorpus:
    """Returns the tokenised `split`, made first where `folder` does not hold it."""
    recipe = {
        "split": split,
        "corpus": corpora.fingerprint(config.data, split),
        "source_lang": config.data.source_lang,
        "target_lang": config.data.target_lang,
        "tokenizer": vocabulary.fingerprint,
        "max_length": config.model.max_length if split == "train" else None,
    }
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()
    final = folder / f"{split}-{digest[:12]}"
    if not (final / "manifest.json").exists():
        report(f"tokenising {split}")
        partial = folder / f"{final.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        pairs = corpora.read_pairs(config.data, split)
        counts = _write(pairs, split, vocabulary, config.model.max_length, partial)
        manifest = {"recipe": recipe, "counts": counts}
        (partial / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
        partial.rename(final)
    corpus = TokenizedCorpus(final)
    if not len(corpus):
        reasons = [f"{n} {why}" for why, n in corpus.manifest["counts"].items()]
        raise DataError(f"no usable pairs in {split}: {', '.join(reasons)}")
    return corpus


def _write(
    pairs: Iterable[tuple[str, str]],
    split: str,
    vocabulary: Tokenizer,
    max_length: int,
    folder: pathlib.Path,
) -> dict[str, int]:
    """Writes a split's arrays; returns what was read, kept and left out, by reason.

    Only training pairs are ever left out, and only training needs no text afterwards.
    """
    counts = Counter(read=0, kept=0, empty=0, too_long=0)
    sides = [_SideWriter(folder, name, vocabulary) for name in ("source", "target")]
    for chunk in _chunks(pairs, CHUNK):
        counts["read"] += len(chunk)
        encoded = [vocabulary.encode(texts) for texts in zip(*chunk, strict=True)]
        for text, ids in zip(chunk, zip(*encoded, strict=True), strict=True):
            if split == "train":
                if not (ids[0] and ids[1]):
                    counts["empty"] += 1
                    continue
                if max(map(len, ids)) >= max_length:  # EOS needs a place, too
                    counts["too_long"] += 1
                    continue
            counts["kept"] += 1
            for side, line, sentence in zip(sides, text, ids, strict=True):
                side.add(line if split != "train" else None, sentence)
    for side in sides:
        side.close()
    return dict(counts)


class _SideWriter:
    """Appends ids to a raw file, so that a corpus of any size needs little memory."""

    def __init__(self, folder: pathlib.Path, name: str, vocabulary: Tokenizer) -> None:
        self.folder, self.name = folder, name
        self.dtype = np.min_scalar_type(vocabulary.vocab_size - 1)
        self.raw = folder / f"{name}.raw"
        self.ids = self.raw.open("wb")
        self.text = (folder / f"{name}.txt").open("w", encoding="utf-8", newline="\n")
        self.offsets = [0]

    def add(self, line: str | None, ids: list[int]) -> None:
        if line is not None:
            self.text.write(line + "\n")
        self.ids.write(np.asarray(ids, self.dtype).tobytes())
        self.offsets.append(self.offsets[-1] + len(ids))

    def close(self) -> None:
        self.ids.close()
        self.text.close()
        ids = np.lib.format.open_memmap(
            self.folder / f"{self.name}.ids.npy", "w+", self.dtype, (self.offsets[-1],)
        )
        with self.raw.open("rb") as raw:
            for start in range(0, len(ids), 1 << 24):
                part = ids[start : start + (1 << 24)]
                part[:] = np.fromfile(raw, self.dtype, len(part))
        ids.flush()
        self.raw.unlink()
        offsets = np.asarray(self.offsets, np.int64)
        np.save(self.folder / f"{self.name}.offsets.npy", offsets)


def _chunks(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk
