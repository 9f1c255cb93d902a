"""The paper's protocol at the size of two CPU cores: 241,131 pairs, en-de.

Reproduces: nothing published; newstest2013 validates and newstest2014 tests, as in the
            paper, after a training set of one twentieth and a fortieth of the model.
Command:    transformer-jax train --config=configs/news.py
                --config.data.root=FOLDER --workdir=runs/news
            FOLDER holds the folders of SETS, files as .en.gz and .de.gz: the news test
            sets of the other years, Tatoeba, LibreOffice's help, and some Europarl.
Hardware:   2 CPU cores; about 2 hours, not run yet
"""

import ml_collections

from transformer_jax.config import default_config_dict

NEWS = (
    "news-test2008",
    "newssyscomb2009",
    *(f"newstest{year}" for year in (2009, 2010, 2011, 2012)),
    *(f"newstest{year}.en-de" for year in range(2015, 2021)),
    *(f"newstest{year}.de-en" for year in (2019, 2020)),
)
SETS = (
    *(f"wmt-newstest/{name}" for name in NEWS),
    "tatoeba/en-de.train",
    "libreoffice-help/en-de.train",
    "europarl-20k/en-de.train",
)


def get_config() -> ml_collections.ConfigDict:
    config = default_config_dict()
    config.data.corpus = "text"
    for side, language in (("source", "en"), ("target", "de")):
        files = (f"{name}.{language}.gz" for name in SETS)
        config.data[f"train_{side}"] = ",".join(files)
        config.data[f"valid_{side}"] = f"wmt-newstest/newstest2013.{language}.gz"
        config.data[f"test_{side}"] = f"wmt-newstest/newstest2014.en-de.{language}.gz"
    config.tokenizer.vocab_size = 8_000
    config.model.num_layers = 4
    config.model.d_model = 128
    config.model.d_ff = 512
    config.model.num_heads = 4
    config.model.d_k = 32
    config.model.d_v = 32
    config.batch.tokens = 4096
    config.train.steps = 8_000
    config.train.warmup_steps = 2_000
    config.train.learning_rate = 0.0025 * (config.model.d_model * 2_000) ** 0.5
    config.train.eval_every = 1_000
    config.train.save_every = 500
    config.train.average_last = 10
    return config
