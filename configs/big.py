"""The big model of "Attention Is All You Need" on WMT14.

Reproduces: Table 2, big: BLEU 28.4 English-German, 41.8 English-French on newstest2014
            in the paper's measure; expect 26.9 to 27.7 in sacreBLEU for English-German.
Command:    transformer-jax train --config=configs/big.py --workdir=runs/big
            transformer-jax train --config=configs/big.py:en-fr --workdir=runs/big-fr
            transformer-jax average --workdir=runs/big
            transformer-jax evaluate --workdir=runs/big --checkpoint=average
Hardware:   8 P100 for 3.5 days in the paper. Not run here: needs WMT14 and an
            accelerator.
"""

import ml_collections

from transformer_jax.config import default_config_dict


def get_config(pair: str = "en-de") -> ml_collections.ConfigDict:
    if pair not in ("en-de", "en-fr"):
        raise ValueError(f"big.py:{pair} does not exist; there are en-de and en-fr")
    target = pair.removeprefix("en-")
    config = default_config_dict()
    config.data.corpus = "tfds"
    config.data.tfds_name = f"wmt14_translate/{target}-en"
    config.data.source_lang = "en"
    config.data.target_lang = target
    config.tokenizer.vocab_size = 37_000 if target == "de" else 32_000
    config.model.d_model = 1024
    config.model.d_ff = 4096
    config.model.num_heads = 16
    config.model.dropout = 0.3 if target == "de" else 0.1
    config.train.steps = 300_000
    config.train.save_every = 600  # 10 minutes apart at the paper's 1.0 s a step
    config.train.eval_every = 3000
    config.train.average_last = 20
    return config
