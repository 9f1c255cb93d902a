"""Small models of every kind, for what must hold for all of them."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.config import Config, DescribeConfig
from transformer_jax.model.transformer import Transformer

BIG: dict[str, Any] = {"d_model": 1024, "d_ff": 4096, "num_heads": 16}

TINY: dict[str, Any] = {
    **{"num_layers": 2, "d_model": 8, "d_ff": 12, "num_heads": 2},
    **{"d_k": 4, "d_v": 4, "max_length": 16, "dtype": "float32"},
}
_ALL_AWAY: dict[str, Any] = {
    **{"num_layers": 3, "d_model": 10, "d_ff": 17, "num_heads": 3, "d_k": 5, "d_v": 7},
    **{"dropout": 0.2, "norm": "pre", "attention_bias": True, "max_length": 13},
    **{"dtype": "bfloat16", "decoder_layers": 1, "final_norm": "off"},
    **{"norm_epsilon": 1e-5, "activation": "gelu_tanh", "share_embeddings": False},
    **{"tie_output": False, "output_bias": True, "embedding_scale": 1.0},
    **{"zero_start": True},
}
# Nothing is as in the base model; sinusoids have fields that a learned table has not.
ALL_AWAY: list[dict[str, Any]] = [
    _ALL_AWAY | {"positions": "learned", "d_model": 11},
    _ALL_AWAY
    | {"position_layout": "halves", "position_offset": 2, "position_stretch": True}
    | {"final_norm": "on"},
]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"norm": "pre"},
    {"positions": "learned"},
    {"attention_bias": True},
    {"d_k": 3, "d_v": 5},
    {"d_k": 5, "d_v": 3, "attention_bias": True},
    {"num_layers": 1, "num_heads": 1},
    {"num_layers": 3, "num_heads": 3, "d_ff": 7, "norm": "pre", "attention_bias": True},
    {"positions": "learned", "norm": "pre", "max_length": 5},
    {"decoder_layers": 1},
    {"num_layers": 1, "decoder_layers": 3, "d_k": 3, "attention_bias": True},
    {"final_norm": "on"},
    {"norm": "pre", "final_norm": "off"},
    {"share_embeddings": False},
    {"tie_output": False},
    {"share_embeddings": False, "tie_output": False, "decoder_layers": 1},
    {"output_bias": True},
    {"tie_output": False, "output_bias": True, "final_norm": "on"},
    *ALL_AWAY,
]


def make_config(
    vocab_size: int = 37_000,
    tokens: int = 25_000,
    decoder_only: bool = False,
    weights_only: bool = False,
    **model: Any,
) -> Config:
    """Returns the base config with some of its numbers changed."""
    config = Config()
    return dataclasses.replace(
        config,
        tokenizer=dataclasses.replace(config.tokenizer, vocab_size=vocab_size),
        batch=dataclasses.replace(config.batch, tokens=tokens),
        model=dataclasses.replace(config.model, **model),
        describe=DescribeConfig(decoder_only, weights_only),
    )


def param_shapes(config: Config) -> Any:
    """Returns the real model's parameters, of which only the shapes are made."""
    sizes = config.tokenizer
    model = Transformer(
        config.model, sizes.vocab_size, source_vocab_size=sizes.source_size
    )
    tokens, lengths = jnp.zeros((1, 2), jnp.int32), jnp.ones((1,), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens, lengths, tokens)
    return nn.unbox(variables["params"])
