"""From names and values to a checked `Config`: types, limits, contradictions."""

import dataclasses
import difflib
import math
from collections.abc import Sequence
from typing import Any

from transformer_jax.config import (
    ACTIVATIONS,
    CONTROL,
    CORPORA,
    HIGHER_IS_BETTER,
    INVALID_UTF8,
    Config,
    DecodeConfig,
    ParallelConfig,
)
from transformer_jax.errors import ConfigError

# Whole numbers that may be 0.
ZERO_ALLOWED = (
    *("seed", "decoder_layers", "position_offset"),
    *("source_vocab_size", "data", "average_last", "profile_steps"),
)


def nearest(name: str, names: Sequence[str]) -> str:
    """Returns `; did you mean X?`, or the whole list where nothing is near."""
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]}?" if close else f"there are: {', '.join(names)}"


def convert(value: Any, kind: Any, where: str) -> Any:
    """Converts `value` to `kind` where nothing is lost, else raises ConfigError."""
    if kind is bool and isinstance(value, bool):
        return value
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise ConfigError(f"{where} is {value}; it must be a finite number")
        return float(value)
    if kind is int and isinstance(value, int | float) and not isinstance(value, bool):
        if float(value).is_integer():
            return int(value)
    if kind is str and isinstance(value, str):
        return value
    raise ConfigError(f"{where} is {value!r}; it must be of type {kind.__name__}")


def from_dict(values: dict[str, Any]) -> Config:
    """Builds a `Config` from nested dictionaries and checks it.

    Args:
        values: section name to field name to value; what is left out keeps its default.

    Returns:
        The config.

    Raises:
        ConfigError: unknown names, wrong types and contradictions, all in one message.
    """
    sections = {f.name: f.default_factory for f in dataclasses.fields(Config)}
    faults, built = [], {}
    for name in values.keys() - sections.keys():
        faults.append(f"unknown section {name}: {nearest(name, list(sections))}")
    for section, cls in sections.items():
        fields = {f.name: f.type for f in dataclasses.fields(cls)}  # pyright: ignore
        converted = {}
        for key, value in dict(values.get(section, {})).items():
            where = f"config.{section}.{key}"
            if key not in fields:
                faults.append(f"unknown field {where}: {nearest(key, list(fields))}")
                continue
            try:
                converted[key] = convert(value, fields[key], where)
            except ConfigError as error:
                faults.append(str(error))
        built[section] = cls(**converted)  # pyright: ignore
    config = Config(**built)
    faults = faults or check(config)
    if faults:
        raise ConfigError("; ".join(faults))
    return config


def check(config: Config) -> list[str]:
    """Returns every fault of the values, alone and against one another."""
    faults: list[str] = []

    def need(condition: bool, message: str) -> None:
        if not condition:
            faults.append(message)

    def one_of(where: str, value: str, choices: Sequence[str]) -> None:
        need(
            value in choices, f"config.{where} is {value!r}; {nearest(value, choices)}"
        )

    model, train, decode = config.model, config.train, config.decode
    one_of("data.corpus", config.data.corpus, CORPORA)
    one_of("data.invalid_utf8", config.data.invalid_utf8, INVALID_UTF8)
    one_of("data.control", config.data.control, CONTROL)
    one_of("tokenizer.model_type", config.tokenizer.model_type, ("bpe", "unigram"))
    one_of("model.norm", model.norm, ("post", "pre"))
    one_of("model.positions", model.positions, ("sinusoidal", "learned"))
    one_of("model.dtype", model.dtype, ("auto", "float32", "bfloat16"))
    one_of("model.final_norm", model.final_norm, ("auto", "on", "off"))
    one_of("model.activation", model.activation, ACTIVATIONS)
    one_of("model.position_layout", model.position_layout, ("interleaved", "halves"))
    one_of("parallel.strategy", config.parallel.strategy, ("pmap", "mesh"))
    one_of("train.early_stop_metric", train.early_stop_metric, ("", *HIGHER_IS_BETTER))
    for where, value in (("epochs", train.epochs), ("hours", train.hours)):
        need(
            value >= 0,
            f"config.train.{where} is {value}; it must be above 0, or 0 for no limit",
        )
    for section in (model, train, config.batch, config.tokenizer, config.parallel):
        for key, value in dataclasses.asdict(section).items():
            if type(value) is int:
                least = 0 if key in ZERO_ALLOWED else 1
                where = f"config.{_section_name(section)}.{key}"
                need(value >= least, f"{where} is {value}; it must be at least {least}")
    for where, value in (
        ("model.dropout", model.dropout),
        ("train.label_smoothing", train.label_smoothing),
    ):
        need(0.0 <= value < 1.0, f"config.{where} is {value}; it must be in [0, 1)")
    for where, value in (
        ("train.learning_rate", train.learning_rate),
        ("train.adam_epsilon", train.adam_epsilon),
        ("model.norm_epsilon", model.norm_epsilon),
        ("tokenizer.character_coverage", config.tokenizer.character_coverage),
    ):
        need(value > 0, f"config.{where} is {value}; it must be above 0")
    need(
        train.clip_norm >= 0,
        f"config.train.clip_norm is {train.clip_norm}; it must be above 0, or 0 for no "
        "clipping",
    )
    need(
        config.data.source_lang != config.data.target_lang,
        "config.data.source_lang and config.data.target_lang are both "
        f"{config.data.source_lang!r}; name two languages",
    )
    need(
        model.positions == "learned" or model.d_model % 2 == 0,
        f"config.model.d_model is {model.d_model}; sinusoidal positions need it even",
    )
    need(
        model.embedding_scale >= 0,
        f"config.model.embedding_scale is {model.embedding_scale}; it must be above 0, "
        "or 0 for the square root of d_model",
    )
    sinusoids = (model.position_layout, model.position_offset, model.position_stretch)
    need(
        model.positions == "sinusoidal" or sinusoids == ("interleaved", 0, False),
        "config.model.position_layout, position_offset and position_stretch are of "
        "sinusoidal positions; leave them out, or set config.model.positions",
    )
    need(
        not model.position_stretch or model.d_model >= 4,
        f"config.model.d_model is {model.d_model}; position_stretch needs 4 or more",
    )
    need(
        config.batch.tokens >= model.max_length,
        f"config.batch.tokens is {config.batch.tokens}, less than one sentence of "
        f"config.model.max_length = {model.max_length}; raise one or lower the other",
    )
    need(
        config.batch.tokens >= config.batch.row_multiple,
        f"config.batch.row_multiple is {config.batch.row_multiple}, more than "
        f"config.batch.tokens = {config.batch.tokens}",
    )
    mesh = dataclasses.replace(config.parallel, strategy="pmap")
    need(
        config.parallel.strategy == "mesh" or mesh == ParallelConfig(),
        "config.parallel.data, fsdp and tensor are of a mesh; set "
        "config.parallel.strategy to mesh, or leave them out",
    )
    need(
        config.tokenizer.joint or not model.share_embeddings,
        "config.tokenizer.joint is false and config.model.share_embeddings true, but "
        "two vocabularies cannot have one table; set share_embeddings to false "
        "(config.model.tie_output may stay true), or joint to true",
    )
    need(
        not (config.tokenizer.joint and config.tokenizer.source_vocab_size),
        f"config.tokenizer.source_vocab_size is {config.tokenizer.source_vocab_size}, "
        "but the vocabulary is joint; set config.tokenizer.joint to false, or leave "
        "it out",
    )
    named, wanted = len(config.tokenizer.model_paths), 2 - config.tokenizer.joint
    need(
        named in (0, wanted),
        f"config.tokenizer.model_path is {config.tokenizer.model_path!r}; "
        + ("one file" if config.tokenizer.joint else "the source's and the target's")
        + f" must be named where config.tokenizer.joint is {config.tokenizer.joint}",
    )
    need(
        not (named and config.tokenizer.lowercase),
        "config.tokenizer.lowercase is of a new vocabulary, but config.tokenizer."
        "model_path names an existing one, which lower-cases if it was made to; leave "
        "one of them out",
    )
    need(
        decode.beam_size <= config.tokenizer.vocab_size,
        f"config.decode.beam_size is {decode.beam_size}, more than the vocabulary size "
        f"{config.tokenizer.vocab_size}",
    )
    return faults + check_decode(decode)


def check_decode(decode: DecodeConfig) -> list[str]:
    """Returns every fault of the decode settings."""
    faults: list[str] = []
    for key, value in dataclasses.asdict(decode).items():
        least = 1 if key in ("beam_size", "batch_size") else 0
        if type(value) is int and value < least:
            faults.append(f"config.decode.{key} is {value}; it must be {least} or more")
        if type(value) is float and not math.isfinite(value):
            faults.append(f"config.decode.{key} is {value}; it must be a finite number")

    def need(condition: bool, key: str, limits: str) -> None:
        if not condition:
            value = getattr(decode, key)
            faults.append(f"config.decode.{key} is {value!r}; {limits}")

    need(decode.penalty in ("gnmt", "length"), "penalty", "there are: gnmt, length")
    need(decode.coverage >= 0, "coverage", "it must be 0 or more")
    need(decode.temperature > 0, "temperature", "it must be above 0; beam 1 is greedy")
    need(0 < decode.top_p <= 1, "top_p", "it must be above 0 and at most 1")
    if not (decode.sample or decode.mbr):
        for key, default in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0)):
            need(
                getattr(decode, key) == default,
                key,
                "it is for draws; set sample or mbr, too",
            )
    return faults


def _section_name(section: Any) -> str:
    return type(section).__name__.removesuffix("Config").lower()
