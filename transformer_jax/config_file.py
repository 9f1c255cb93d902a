"""Where configs come from and how they are told apart: files, flags, a run's folder.

`load()` reads a config file through `ml_collections.config_flags` and applies
`--config.a.b=value` overrides.
"""

import ast
import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence

import ml_collections
from absl import flags
from ml_collections import config_flags

from transformer_jax.config import Config
from transformer_jax.config_check import convert, from_dict, nearest
from transformer_jax.errors import ConfigError


def load(path: str, overrides: Sequence[str] = ()) -> Config:
    """Loads a config file.

    Args:
        path: `FILE.py` or `FILE.py:ARGUMENT`; it defines `get_config([argument])`.
        overrides: flags such as `--config.train.steps=10`.

    Returns:
        The checked config.

    Raises:
        ConfigError: the file cannot be read, or a field or value is wrong.
    """
    file = path.split(":", 1)[0]
    if not pathlib.Path(file).is_file():
        raise ConfigError(f"config file {file} does not exist; give --config=FILE.py")
    argv = ["transformer-jax", f"--config={path}"]
    argv += [_checked_override(override) for override in overrides]
    values = flags.FlagValues()
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=argv)
    # config_flags runs the file inside the module of an earlier file, if there is one.
    sys.modules.pop("config_config", None)
    try:
        values(argv)
        config_dict = values["config"].value
    except Exception as error:  # whatever the user's file raises
        last = str(error).strip().splitlines()[-1]
        raise ConfigError(f"config file {path} cannot be loaded: {last}") from error
    if not isinstance(config_dict, ml_collections.ConfigDict):
        raise ConfigError(f"config file {path}: get_config() must return a ConfigDict")
    return from_dict(config_dict.to_dict())


def _checked_override(override: str) -> str:
    """Checks the name in `--config.a.b=value` and writes the value as its type asks."""
    name, equals, text = override.removeprefix("--config.").partition("=")
    section, _, key = name.partition(".")
    sections = {f.name: f.default_factory() for f in dataclasses.fields(Config)}  # pyright: ignore
    if not equals:
        raise ConfigError(f"{override} has no value; write --config.{name}=VALUE")
    if section not in sections:
        raise ConfigError(
            f"unknown section config.{section}: {nearest(section, list(sections))}"
        )
    fields = {f.name: f.type for f in dataclasses.fields(sections[section])}
    if key not in fields:
        raise ConfigError(f"unknown field config.{name}: {nearest(key, list(fields))}")
    kind = fields[key]
    if kind is str:
        return override
    try:
        value = ast.literal_eval(text.capitalize() if kind is bool else text)
    except (SyntaxError, ValueError):
        value = text
    return f"--config.{name}={convert(value, kind, f'config.{name}')}"


def read_workdir(workdir: str | pathlib.Path) -> Config:
    """Reads the config that `WORKDIR/config.json` holds.

    Raises:
        ConfigError: the folder or the file is missing or not a config.
    """
    file = pathlib.Path(workdir) / "config.json"
    if not file.is_file():
        raise ConfigError(
            f"{workdir} holds no config.json, so no run; train there first, or mend "
            "--workdir"
        )
    try:
        return from_dict(dict(json.loads(file.read_bytes())))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{file} is not JSON: {error}; restore it") from error


def differences(old: Config, new: Config) -> list[str]:
    """Returns `section.field: old -> new` for every field that differs."""
    return [
        f"{section}.{key}: {value!r} -> {new.to_dict()[section][key]!r}"
        for section, fields in old.to_dict().items()
        for key, value in fields.items()
        if value != new.to_dict()[section][key]
    ]


# Fields that say how far a run goes, what it reports, or where its files lie. They may
# change between a stop and a resume; all others make it another run.
FREE_FIELDS = (
    "data.root",
    "data.cache_dir",
    "data.tfds_dir",
    "tokenizer.train_lines",
    "train.remat",
    "train.scan_layers",
    "train.steps",
    "train.epochs",
    "train.hours",
    "train.early_stop_metric",
    "train.patience",
    "train.log_every",
    "train.eval_every",
    "train.save_every",
    "train.keep_last",
    "train.average_last",
    "train.max_bad_updates",
    "train.profile_steps",
)


def changes_the_run(old: Config, new: Config) -> list[str]:
    """Returns the `differences` that make `new` another run than `old`."""
    return [
        change
        for change in differences(old, new)
        if change.split(":", 1)[0] not in FREE_FIELDS
        and not change.startswith(("decode.", "describe.", "parallel."))
    ]
