#!/usr/bin/env python3
"""Measures decoding: sentences a second, memory, compile time.

With --steps=N exactly N steps are forced; with --steps=natural outputs end where they
end. A trained run (--workdir) translates the first lines of a file (--input). Without
one, which natural ends need, the parameters are random and every source has 14 words.

One call of `Translator.translate`, which `transformer-jax translate` makes, is timed:
splitting into pieces, sorting, batches, the search, and making text of what it found.
Not timed are opening the model and compiling. What the first call takes beyond the
median of the others is given as compile time.

Example: benchmarks/decode_speed.py --shape=tiny --beam=1 --steps=30
"""

import argparse
import dataclasses
import itertools
import pathlib
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import corpus
import flax.linen as nn
import jax
import jax.numpy as jnp
import measure
import numpy as np
import shapes

from transformer_jax import parallel
from transformer_jax.config import Config, DecodeConfig
from transformer_jax.config_file import load
from transformer_jax.data import textfiles
from transformer_jax.data.vocabularies import Vocabularies
from transformer_jax.decode.translator import Translator, load_translator
from transformer_jax.errors import ConfigError, DataError
from transformer_jax.model.transformer import param_axes

Setup = tuple[Config, Translator, list[str]]


def random_model(args: argparse.Namespace, folder: pathlib.Path) -> Setup:
    """Returns a shape's config, random parameters and sources of one length."""
    config_file = f"{measure.ROOT / 'benchmarks' / 'shapes.py'}:{args.shape}"
    config = load(config_file, [*corpus.overrides(folder), *args.overrides])
    corpus.write(folder, config.tokenizer.vocab_size, corpus.PAIRS[args.shape])
    vocabularies = Vocabularies.load(config.tokenizer.model_paths)
    parallel.cores_as_devices()
    layout = parallel.decoding_layout(config.parallel)
    translator = Translator([config.model], vocabularies, [], layout)
    (model,) = translator.models
    tokens, length = jnp.zeros((1, 2), jnp.int32), jnp.ones((1,), jnp.int32)
    drawn = jax.jit(model.init)(jax.random.key(0), tokens, length, tokens)["params"]
    params = jax.device_get(nn.unbox(drawn))
    translator.params = (layout.place(params, param_axes(model)),)
    return config, translator, _lines(folder / "fixed.source", args.sentences)


def trained_model(args: argparse.Namespace) -> Setup:
    """Returns a run's config, its best parameters, and lines to translate.

    Raises:
        UserError: run or file is missing, or a flag has no use.
    """
    if not (args.workdir and args.input):
        raise ConfigError(
            "a trained model (--steps=natural needs one) takes both --workdir=RUN and "
            "--input=FILE with text for it"
        )
    if args.overrides:
        raise ConfigError(f"{args.overrides[0]} is of no use with --workdir")
    translator, config, _ = load_translator([args.workdir], "best", measure.say)
    return config, translator, _lines(args.input, args.sentences)


def _lines(file: pathlib.Path, count: int) -> list[str]:
    lines = list(itertools.islice(textfiles.read_lines(str(file)), count))
    if len(lines) < count:
        raise DataError(
            f"{file} has only {len(lines)} lines; give --sentences={len(lines)} or less"
        )
    return lines


def settings(args: argparse.Namespace, config: Config) -> DecodeConfig:
    """Returns how to search; with forced steps an output can end at the limit only."""
    decode = dataclasses.replace(
        config.decode, beam_size=args.beam, batch_size=args.batch
    )
    if args.steps == "natural":
        return decode
    steps = int(args.steps)
    return dataclasses.replace(
        decode, min_length=steps, max_length=steps, max_extra_length=steps
    )


def translate(
    translator: Translator, lines: Sequence[str], decode: DecodeConfig
) -> tuple[float, np.ndarray]:
    """Returns the seconds, and the steps of each output, EOS included, `[lines]`."""
    started = time.perf_counter()
    found = translator.translate(lines, decode)
    seconds = time.perf_counter() - started
    return seconds, np.array([len(best.token_log_probs) for best, *_ in found])


def measure_decoding(args: argparse.Namespace, folder: pathlib.Path) -> dict[str, Any]:
    """Compiles, translates, and returns what was measured."""
    natural = args.steps == "natural"
    setup = random_model(args, folder) if args.shape else trained_model(args)
    config, translator, lines = setup
    decode = settings(args, config)
    first, steps = translate(translator, lines, decode)
    if not natural and set(steps.tolist()) != {int(args.steps)}:
        raise RuntimeError(f"{args.steps} steps were forced, but taken: {set(steps)}")
    times = []
    for repeat in range(args.repeats):
        if repeat:
            measure.beside(args.beside, repeat - 1)
        times.append(translate(translator, lines, decode)[0])
        measure.say(f"repeat {repeat + 1}: {len(lines) / times[-1]:,.2f} sentences/s")
    peak = measure.peak_memory()
    found = measure.summary("sentences_per_second", [len(lines) / t for t in times])
    median = len(lines) / found["sentences_per_second"]
    sources = np.array([1 + len(pieces) for pieces in translator.source_pieces(lines)])
    size = translator.vocabularies.target.vocab_size
    flops = measure.search_flops(config, size, sources, steps, args.beam)
    devices = jax.devices()
    return {
        **found,
        **measure.shares(flops / median),
        "output_tokens_per_second": int(steps.sum()) / median,
        "peak_memory": peak,
        "compile_seconds": first - median,
        "programs": translator.compilations,
        "device": str(devices[0].device_kind),
        "devices": len(devices),
        "source_tokens": int(sources.sum()),
        "output_tokens": int(steps.sum()),
        "shortest_output": int(steps.min()),
        "longest_output": int(steps.max()),
        "flops": flops,
    }


def _steps(text: str) -> str:
    return text if text == "natural" else str(measure.positive(text))


def main() -> None:
    """Measures in this process, which does nothing else."""
    parser = measure.Parser(description="Measure decoding.", allow_abbrev=False)
    parser.add_argument("--shape", choices=tuple(shapes.SHAPES), default="tiny")
    parser.add_argument("--beam", type=measure.positive, default=4, help="1 is greedy")
    parser.add_argument("--steps", type=_steps, default="30", help="N, or natural")
    parser.add_argument("--sentences", type=measure.positive, default=256)
    parser.add_argument("--batch", type=measure.positive, default=64)
    parser.add_repeats()
    parser.add_run()
    args = parser.parse_overrides()
    if args.steps == "natural" or args.workdir or args.input:
        args.shape = None  # it is the run's
    # Compile time is that of a first run.
    jax.config.update("jax_enable_compilation_cache", False)
    with tempfile.TemporaryDirectory() as folder:
        values = measure_decoding(args, pathlib.Path(folder))
    measure.emit("decode", args, values)


if __name__ == "__main__":
    measure.run(main)
