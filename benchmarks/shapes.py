"""The model shapes that are measured, as a config file: benchmarks/shapes.py:tiny.

The text is that of `corpus.py`. `batch.tokens` is a limit that includes padding; it is
chosen so that an update of the whole epoch's mixture has, on average, the number of
real target tokens that each shape names.
"""

from typing import Any

import ml_collections

from transformer_jax.config import default_config_dict

SHAPES: dict[str, dict[str, Any]] = {
    # Multi30k's Transformer-Tiny; about 4,096 target tokens an update.
    "tiny": {
        "tokenizer.vocab_size": 10_000,
        "batch.tokens": 4816,
        "model.num_layers": 4,
        "model.d_model": 128,
        "model.d_ff": 256,
        "model.num_heads": 4,
        "model.d_k": 32,
        "model.d_v": 32,
        "model.dropout": 0.3,
    },
    # The paper's base model, but for the vocabulary; about 2,048 target tokens.
    "base": {"tokenizer.vocab_size": 32_000, "batch.tokens": 2400},
    # Only tries the drivers; its numbers mean nothing.
    "smoke": {
        "tokenizer.vocab_size": 60,
        "batch.tokens": 512,
        "batch.buckets": 2,
        "model.num_layers": 1,
        "model.d_model": 8,
        "model.d_ff": 16,
        "model.num_heads": 2,
        "model.d_k": 4,
        "model.d_v": 4,
    },
}


def get_config(shape: str) -> ml_collections.ConfigDict:
    """Returns the config of a shape; the corpus's files are still to be named."""
    if shape not in SHAPES:
        raise ValueError(f"shapes.py:{shape}; there are {', '.join(SHAPES)}")
    config: Any = default_config_dict()
    config.data.corpus = "text"
    config.model.max_length = 64
    config.model.dtype = "float32"  # what the matrix product is measured in
    for name, value in SHAPES[shape].items():
        section, field = name.split(".")
        config[section][field] = value
    return config
