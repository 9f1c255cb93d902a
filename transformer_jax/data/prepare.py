"""A run's data: the vocabulary and every split as token ids, made once.

    WORKDIR/config.json       the config; binding from the first checkpoint on
            tokenizer.model   the vocabulary; of separate ones see `vocabularies`
            data.json         what made it, and the folder of each split
            data/SPLIT-HASH/  the tokenised splits, or `data.cache_dir/SPLIT-HASH/`

The hash is of everything the content depends on, so the same corpus prepared by the
same settings is found again, also by another run. A folder is written under another
name and renamed, so a half-written one is never taken for a whole one.
"""

import dataclasses
import hashlib
import itertools
import json
import pathlib
import shutil
from collections.abc import Callable, Iterable
from typing import Any

from transformer_jax.config import SPLITS, Config
from transformer_jax.config_file import changes_the_run, read_workdir
from transformer_jax.data import corpora, tokenizer
from transformer_jax.data.tokenized import TokenizedCorpus, write_split
from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.data.vocabularies import SIDES, Vocabularies, model_files
from transformer_jax.errors import ConfigError, DataError

Report = Callable[[str], None]
Track = Callable[[Iterable[Any], str], Iterable[Any]]  # given what is done with pairs

# Tokenizer fields that older runs have not, by the value that does as those did.
ADDED = {
    "hard_vocab_limit": True,
    "joint": True,
    "lowercase": False,
    "source_vocab_size": 0,
}


def unwatched(pairs: Iterable[Any], what: str) -> Iterable[Any]:
    """Returns `pairs`: nobody is told how far they are read."""
    return pairs


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Everything training and evaluation need of the data."""

    vocabularies: Vocabularies
    splits: dict[str, TokenizedCorpus]


def prepare(
    config: Config,
    workdir: pathlib.Path,
    report: Report,
    track: Track = unwatched,
) -> Prepared:
    """Makes, or finds, the vocabularies and every split that the corpus has.

    A large corpus is tokenised by several processes, so a script that calls this has
    its own work under `if __name__ == "__main__":`.

    Args:
        config: the run's config; it is written to `WORKDIR/config.json`.
        workdir: the run's folder.
        report: is told, in a line, about each thing that is made.
        track: watches pairs as they are read.

    Returns:
        The vocabularies and the splits.

    Raises:
        ConfigError: the workdir holds checkpoints of another config, or the config is
            for counting only.
        DataError: a file is missing or broken, sides differ in length, nothing usable
            is left, or the data are not those the run began with.
    """
    if config.describe.decoder_only:
        raise ConfigError(
            "config.describe.decoder_only is true: such a config is for counting, by "
            "`transformer-jax describe`; only encoder-decoder models are trained"
        )
    if workdir.exists() and not workdir.is_dir():
        raise ConfigError(f"--workdir={workdir} is a file; name a folder")
    begun = _has_begun(workdir)
    if begun:
        config = _of_same_run(config, workdir, report)
    workdir.mkdir(parents=True, exist_ok=True)
    recorded = _read_record(workdir)
    vocabularies, recipe = _make_vocabularies(
        config, workdir, recorded, begun, report, track
    )
    folder = pathlib.Path(config.data.cache_dir or workdir / "data")
    splits = {}
    for split in SPLITS:
        if split == "train" or corpora.has_split(config.data, split):
            splits[split] = _tokenize(
                config, split, vocabularies, folder, report, track
            )
            before = recorded["splits"].get(split)
            if (
                begun
                and before
                and pathlib.Path(before).name != splits[split].folder.name
            ):
                raise _changed(split)
    folders = {split: str(corpus.folder) for split, corpus in splits.items()}
    _write_record(workdir, recipe, folders)
    _write_atomically(workdir / "config.json", config.to_json().encode())
    return Prepared(vocabularies, splits)


def fingerprints(config: Config) -> dict[str, str]:
    """Returns a hash of what each part of the data is made of, not yet made.

    Raises:
        UserError: a file is missing.
    """
    found = {
        split: _digest(corpora.fingerprint(config.data, split))[:12]
        for split in SPLITS
        if split == "train" or corpora.has_split(config.data, split)
    }
    models = [Tokenizer.load(path).fingerprint for path in config.tokenizer.model_paths]
    return found | ({"tokenizer": _digest(models)[:12]} if models else {})


def open_split(workdir: pathlib.Path, split: str) -> TokenizedCorpus:
    """Opens a split of a run; the files that it was made of are not needed.

    Raises:
        DataError: the run has no such split, or its folder is gone.
    """
    folders = _read_record(workdir)["splits"]
    if split not in folders:
        raise DataError(
            f"{workdir} has no split {split!r}; there are: "
            f"{', '.join(folders) or 'none'}; give --source and --reference"
        )
    # A run that was moved holds its own data; data elsewhere stay where they were.
    inside = workdir / "data" / pathlib.Path(folders[split]).name
    for folder in (inside, pathlib.Path(folders[split])):
        if (folder / "manifest.json").exists():
            return TokenizedCorpus(folder)
    raise DataError(
        f"the tokenised {split} data {folders[split]} are gone; run transformer-jax "
        f"prepare --config=FILE --workdir={workdir}"
    )


def _has_begun(workdir: pathlib.Path) -> bool:
    """Returns whether the run has a checkpoint; until then all may still change."""
    return any(path.name.isdecimal() for path in workdir.glob("checkpoints/*"))


def _of_same_run(config: Config, workdir: pathlib.Path, report: Report) -> Config:
    """Returns `config` with the vocabulary's sample that the run began with."""
    old = read_workdir(workdir)
    differing = changes_the_run(old, config)
    if differing:
        raise ConfigError(
            f"{workdir} was made by another config ({'; '.join(differing)}); give "
            "another --workdir, or these fields their old values"
        )
    if config.tokenizer.train_lines != old.tokenizer.train_lines:
        report(
            "the vocabulary stays that of the run, from config.tokenizer.train_lines = "
            f"{old.tokenizer.train_lines}"
        )
    return dataclasses.replace(config, tokenizer=old.tokenizer)


def _read_record(workdir: pathlib.Path) -> dict[str, Any]:
    file = workdir / "data.json"
    if not file.exists():
        return {"tokenizer": None, "splits": {}}
    try:
        return dict(json.loads(file.read_bytes()))
    except ValueError as error:
        raise DataError(f"{file} is not JSON: {error}; restore it") from error


def _write_record(workdir: pathlib.Path, recipe: str | None, splits: Any) -> None:
    record = json.dumps({"tokenizer": recipe, "splits": splits}, indent=2) + "\n"
    _write_atomically(workdir / "data.json", record.encode())


def _changed(what: str) -> DataError:
    return DataError(
        f"the {what} data are not those this run began with; restore the files, or "
        "start a new run in another --workdir, with --init_from=OLD to begin with this "
        "one's parameters"
    )


def _digest(recipe: Any) -> str:
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


def _make_vocabularies(
    config: Config,
    workdir: pathlib.Path,
    recorded: dict[str, Any],
    begun: bool,
    report: Report,
    track: Track,
) -> tuple[Vocabularies, str]:
    """Returns the vocabularies, made anew if of another recipe, and the recipe."""
    files = model_files(workdir, config.tokenizer.joint)
    given = config.tokenizer.model_paths
    if given:
        prints = [Tokenizer.load(path).fingerprint for path in given]
        recipe = _digest(prints[0] if config.tokenizer.joint else prints)
    else:
        corpus = corpora.fingerprint(config.data, "train")
        settings = dataclasses.asdict(config.tokenizer)
        for name, value in ADDED.items():
            if settings[name] == value:
                del settings[name]
        recipe = _digest([corpus, settings, config.train.seed])
    if recorded["tokenizer"] != recipe or not all(file.exists() for file in files):
        for file in (*files, workdir / "data.json"):
            if begun and not file.exists():
                raise DataError(f"{file} of this run is gone; restore it")
        if begun:
            raise _changed("train")
        if given:
            models = [Tokenizer.load(path) for path in given]
        else:
            sides = ("",) if config.tokenizer.joint else SIDES
            models = [_train_vocabulary(config, side, report, track) for side in sides]
        # Whenever this ends, no recipe stands beside the model of another one.
        _write_record(workdir, None, recorded["splits"])
        for file, model in zip(files, models, strict=True):
            _write_atomically(file, model.model)
        _write_record(workdir, recipe, recorded["splits"])
    return Vocabularies.load(files), recipe


def _train_vocabulary(
    config: Config, side: str, report: Report, track: Track
) -> Tokenizer:
    """Trains the vocabulary of `side`, or with "" that of both."""
    report(f"training the {side} vocabulary" if side else "training the vocabulary")
    pairs = track(corpora.read_pairs(config.data, "train"), "reading train")
    lines = itertools.chain.from_iterable(pairs)
    if side:
        lines = (pair[SIDES.index(side)] for pair in pairs)
    return tokenizer.train(lines, config.tokenizer, config.train.seed, side)


def _write_atomically(path: pathlib.Path, content: bytes) -> None:
    """Writes a file beside `path` and renames it, so that no half file is ever seen.

    Where it holds `content`, nothing is written: a finished run may be read-only.
    """
    if path.is_file() and path.read_bytes() == content:
        return
    beside = path.with_name(path.name + ".partial")
    beside.write_bytes(content)
    beside.replace(path)


def _tokenize(
    config: Config,
    split: str,
    vocabularies: Vocabularies,
    folder: pathlib.Path,
    report: Report,
    track: Track,
) -> TokenizedCorpus:
    """Returns the tokenised `split`, made first where `folder` does not hold it."""
    recipe = {
        "split": split,
        "corpus": corpora.fingerprint(config.data, split),
        "source_lang": config.data.source_lang,
        "target_lang": config.data.target_lang,
        "tokenizer": vocabularies.fingerprint,
        "max_length": config.model.max_length if split == "train" else None,
    }
    final = folder / f"{split}-{_digest(recipe)[:12]}"
    if not (final / "manifest.json").exists():
        report(f"tokenising {split}")
        partial = folder / f"{final.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        pairs = corpora.read_pairs(config.data, split)
        watched = track(pairs, f"tokenising {split}")
        longest = config.model.max_length
        found = write_split(watched, split == "train", vocabularies, longest, partial)
        if skipped := pairs.cleaner.skipped:
            found["counts"]["read"] += skipped
            found["counts"]["not_utf8"] = skipped
        if warning := pairs.cleaner.warning():
            report(f"warning: {warning}")
        manifest = {"recipe": recipe, **found, "unclean": pairs.cleaner.found()}
        (partial / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
        shutil.rmtree(final, ignore_errors=True)  # one without a manifest
        partial.rename(final)
    corpus = TokenizedCorpus(final)
    if not len(corpus):
        reasons = [f"{n} {why}" for why, n in corpus.manifest["counts"].items()]
        raise DataError(f"no usable pairs in {split}: {', '.join(reasons)}")
    return corpus
