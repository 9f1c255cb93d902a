"""Transformer-Tiny on Multi30k English-German captions (Wu et al. 2021).

Reproduces: 41.02 on Test2016 (lower-cased, normalised Moses tokens, multi-bleu), of the
            mean of the last ten checkpoints, beam 5, score / length.
            `multi30k.py:published` is that run: 8,000 updates of 8,192 tokens; its text
            was lower-cased (--config.tokenizer.lowercase=true; run to 2,936 here).
            `multi30k.py` has as many tokens, half of them an update at half the rate.
Command:    transformer-jax train --config=configs/multi30k.py
                --config.data.root=FOLDER --workdir=runs/multi30k
            FOLDER holds train, val and test_2016_flickr, each as .en.gz and .de.gz.
Hardware:   2 CPU cores, 4 hours
Expect:     after 10,000 of the 16,000 updates 40.7, sacreBLEU 40.3 on raw cased text;
            at 12,000 no better, and stopped there
"""

import ml_collections

from transformer_jax.config import default_config_dict


def get_config(schedule: str = "half") -> ml_collections.ConfigDict:
    if schedule not in ("half", "published"):
        raise ValueError(f"multi30k.py:{schedule}; there are half and published")
    config = default_config_dict()
    config.data.corpus = "text"
    config.data.train_source = "train.en.gz"
    config.data.train_target = "train.de.gz"
    config.data.valid_source = "val.en.gz"
    config.data.valid_target = "val.de.gz"
    config.data.test_source = "test_2016_flickr.en.gz"
    config.data.test_target = "test_2016_flickr.de.gz"
    config.tokenizer.vocab_size = 10_000
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
    config.train.eval_every = 1000
    config.train.save_every = 500
    config.train.average_last = 10
    config.decode.beam_size = 5
    config.decode.alpha = 1.0
    config.decode.penalty = "length"

    peak, warmup = 0.005, 2000
    config.batch.tokens = 8192
    config.train.steps = 8000
    if schedule == "half":
        peak /= 2
        config.batch.tokens //= 2
        config.train.steps *= 2
    config.train.warmup_steps = warmup
    config.train.learning_rate = peak * (config.model.d_model * warmup) ** 0.5
    return config
