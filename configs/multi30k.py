"""Transformer-Tiny on Multi30k English-German captions (Wu et al. 2021).

Reproduces: 41.02 on Test2016 (lower-cased, normalised Moses tokens, multi-bleu), of the
            mean of the last ten checkpoints, beam 5, score / length.
Command:    transformer-jax train --config=configs/multi30k.py
                --config.data.root=FOLDER --workdir=runs/multi30k
            FOLDER holds train, val and test_2016_flickr, each as .en.gz and .de.gz.
Hardware:   2 CPU cores, 3 to 4 hours
Expect:     41.48 (sacreBLEU without case 41.46) at update 7,364 of 8,000, where it was
            stopped. Translations are lower-case, as the published ones are.
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
    config.tokenizer.lowercase = True
    config.model.num_layers = 4
    config.model.d_model = 128
    config.model.d_ff = 256
    config.model.num_heads = 4
    config.model.d_k = 32
    config.model.d_v = 32
    config.model.dropout = 0.3
    config.model.attention_bias = True
    config.train.adam_epsilon = 1e-8
    config.train.log_every = 50
    config.train.eval_every = 500
    config.train.save_every = 200
    config.train.average_last = 10
    config.decode.beam_size = 5
    config.decode.alpha = 1.0
    config.decode.penalty = "length"

    peak, warmup = 0.005, 2000
    config.batch.tokens = 8192
    config.train.steps = 8000
    config.train.warmup_steps = warmup
    config.train.learning_rate = peak * (config.model.d_model * warmup) ** 0.5
    return config
