"""The rows of Table 3 of "Attention Is All You Need", for WMT14 English-German.

Reproduces: perplexity a piece and BLEU on newstest2013, as below; no averaging.
            PPL is exp of the unsmoothed loss, EOS counted; BLEU is the paper's
            tokenised measure, so sacreBLEU is another number.

            row           PPL   BLEU        row              PPL   BLEU
            base          4.92  25.8        C-d256           5.75  24.5
            A-h1          5.29  24.9        C-d1024          4.66  26.0
            A-h4          5.00  25.5        C-ff1024         5.12  25.4
            A-h16         4.91  25.8        C-ff4096         4.75  26.2
            A-h32         5.01  25.4        D-dropout0.0     5.77  24.6
            B-dk16        5.16  25.1        D-dropout0.2     4.95  25.5
            B-dk32        5.01  25.4        D-smoothing0.0   4.67  25.3
            C-N2          6.11  23.7        D-smoothing0.2   5.47  25.7
            C-N4          5.19  25.3        E                4.92  25.7
            C-N8          4.88  25.5        big              4.33  26.4

Command:    transformer-jax train --config=configs/table3.py:C-N2 --workdir=runs/C-N2
            transformer-jax evaluate --workdir=runs/C-N2 --split=valid --checkpoint=last
            Training logs the perplexity of newstest2013 as it goes.
Hardware:   8 P100 in the paper, 12 hours a row of base's size. Not run here: needs
            WMT14 and an accelerator.
"""

from typing import Any

import ml_collections

from transformer_jax.config import default_config_dict

# What a row changes of base.
ROWS: dict[str, dict[str, Any]] = {
    "base": {},
    "A-h1": {"model.num_heads": 1, "model.d_k": 512, "model.d_v": 512},
    "A-h4": {"model.num_heads": 4, "model.d_k": 128, "model.d_v": 128},
    "A-h16": {"model.num_heads": 16, "model.d_k": 32, "model.d_v": 32},
    "A-h32": {"model.num_heads": 32, "model.d_k": 16, "model.d_v": 16},
    "B-dk16": {"model.d_k": 16},
    "B-dk32": {"model.d_k": 32},
    "C-N2": {"model.num_layers": 2},
    "C-N4": {"model.num_layers": 4},
    "C-N8": {"model.num_layers": 8},
    "C-d256": {"model.d_model": 256, "model.d_k": 32, "model.d_v": 32},
    "C-d1024": {"model.d_model": 1024, "model.d_k": 128, "model.d_v": 128},
    "C-ff1024": {"model.d_ff": 1024},
    "C-ff4096": {"model.d_ff": 4096},
    "D-dropout0.0": {"model.dropout": 0.0},
    "D-dropout0.2": {"model.dropout": 0.2},
    "D-smoothing0.0": {"train.label_smoothing": 0.0},
    "D-smoothing0.2": {"train.label_smoothing": 0.2},
    "E": {"model.positions": "learned"},
    "big": {
        "model.d_model": 1024,
        "model.d_ff": 4096,
        "model.num_heads": 16,
        "model.dropout": 0.3,
        "train.steps": 300_000,
    },
}


def get_config(row: str = "base") -> ml_collections.ConfigDict:
    if row not in ROWS:
        raise ValueError(f"table3.py:{row} does not exist; there are {', '.join(ROWS)}")
    config = default_config_dict()
    config.data.corpus = "tfds"
    config.data.tfds_name = "wmt14_translate/de-en"
    config.data.source_lang = "en"
    config.data.target_lang = "de"
    config.update_from_flattened_dict(ROWS[row])
    return config
