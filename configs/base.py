"""The base model of "Attention Is All You Need" on WMT14 English-German.

Reproduces: Table 2, base: BLEU 27.3 on newstest2014 in the paper's tokenised,
            compound-split measure; expect 25.8 to 26.6 in sacreBLEU.
Command:    transformer-jax train --config=configs/base.py --workdir=runs/base
            transformer-jax average --workdir=runs/base
            transformer-jax evaluate --workdir=runs/base --checkpoint=average
Hardware:   8 P100 for 12 hours in the paper. Not run here: needs WMT14 and an
            accelerator.
"""

import ml_collections

from transformer_jax.config import default_config_dict


def get_config() -> ml_collections.ConfigDict:
    config = (
        default_config_dict()
    )  # its model, optimiser and batch are the paper's base
    config.data.corpus = "tfds"
    config.data.tfds_name = "wmt14_translate/de-en"
    config.data.source_lang = "en"
    config.data.target_lang = "de"
    config.train.average_last = 5
    return config
