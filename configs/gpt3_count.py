"""GPT-3 (Brown et al. 2020) as a worked example of the counting tool; never trained.

Reproduces: its count of weights, 175,181,291,520 of the 175 B in its name, row by row.
            `gpt3_count.py:tied` has one table for input and output: 174,563,733,504.
Command:    transformer-jax describe --config=configs/gpt3_count.py --length=2048
Hardware:   any; nothing is run. `train` refuses this config.
"""

import ml_collections

from transformer_jax.config import default_config_dict


def get_config(tables: str = "untied") -> ml_collections.ConfigDict:
    if tables not in ("untied", "tied"):
        raise ValueError(f"gpt3_count.py:{tables}; there are untied and tied")
    config = default_config_dict()
    config.describe.decoder_only = True
    config.describe.weights_only = True
    config.tokenizer.vocab_size = 50_257
    config.batch.tokens = 3_200_000
    config.model.num_layers = 96
    config.model.d_model = 12_288
    config.model.d_ff = 49_152
    config.model.num_heads = 96
    config.model.d_k = 128
    config.model.d_v = 128
    config.model.dropout = 0.0  # the paper names none
    config.model.norm = "pre"
    config.model.activation = "gelu_tanh"
    config.model.positions = "learned"
    config.model.attention_bias = True
    config.model.max_length = 2048
    config.model.tie_output = tables == "tied"
    return config
