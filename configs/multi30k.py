"""Transformer-Tiny on Multi30k English-German captions (Wu et al. 2021).

Command:  transformer-jax train --config=configs/multi30k.py --config.data.root=FOLDER
              --workdir=runs/multi30k
          FOLDER holds train.en.gz, train.de.gz, val.*, test_2016_flickr.*
"""

import ml_collections

from transformer_jax.config import default_config_dict


def get_config() -> ml_collections.ConfigDict:
    config = default_config_dict()
    config.data.corpus = "text"
    config.data.train_source = "train.en.gz"
    config.data.train_target = "train.de.gz"
    config.data.valid_source = "val.en.gz"
    config.data.valid_target = "val.de.gz"
    config.data.test_source = "test_2016_flickr.en.gz"
    config.data.test_target = "test_2016_flickr.de.gz"
    config.tokenizer.vocab_size = 10_000
    config.batch.tokens = 4096
    config.batch.buckets = 10
    config.model.num_layers = 4
    config.model.d_model = 128
    config.model.d_ff = 256
    config.model.num_heads = 4
    config.model.d_k = 32
    config.model.d_v = 32
    config.model.dropout = 0.3
    config.train.warmup_steps = 1000
    # The published peak rate, 0.005, as a factor: peak * sqrt(d_model * warmup).
    config.train.learning_rate = 0.005 * (128 * 1000) ** 0.5
    config.train.adam_epsilon = 1e-8
    config.train.steps = 5000
    config.train.log_every = 50
    config.train.eval_every = 1000
    config.train.save_every = 250
    config.decode.beam_size = 5
    config.decode.alpha = 1.0
    return config
