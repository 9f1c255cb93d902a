"""The config: every field and its default, in one place; `config_check` has the limits.

A file in `configs/` returns a `ConfigDict` made by `default_config_dict()` with a few
values changed; `config_file.load` turns it once into the frozen dataclasses below. From
there every function is given its section, never the whole.
"""

import dataclasses
import json
from typing import Any

import ml_collections

CORPORA = ("phrases", "text", "tfds")
SPLITS = ("train", "valid", "test")
INVALID_UTF8 = ("error", "skip", "replace")
CONTROL = ("keep", "remove")
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "gelu_sigmoid", "swish", "tanh", "sigmoid")

# What early stopping may look at, each with its direction.
HIGHER_IS_BETTER = {"bleu": True, "chrf": True, "nll": False, "loss": False}


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Which parallel text is read, and which side is translated into which."""

    corpus: str = "text"  # one of CORPORA
    source_lang: str = "en"  # translated from; for TFDS it picks the side
    target_lang: str = "de"  # translated into
    root: str = ""  # folder that relative file names below start from
    train_source: str = ""  # file, or comma-separated files; plain or .gz
    train_target: str = ""
    valid_source: str = ""
    valid_target: str = ""
    test_source: str = ""
    test_target: str = ""
    invalid_utf8: str = "error"  # such lines; or skip (training pairs), or replace
    control: str = "keep"  # control characters in training text: keep or remove
    tfds_name: str = ""  # such as wmt14_translate/de-en
    tfds_dir: str = ""  # folder or bucket of prepared TFDS data; "" is TFDS's own
    cache_dir: str = ""  # where tokenised corpora are kept; "" is WORKDIR/data


@dataclasses.dataclass(frozen=True)
class TokenizerConfig:
    """The SentencePiece vocabulary of source and target, or one of each.

    Separate ones (`joint` false) need `model.share_embeddings` false, since one table
    cannot be of two vocabularies. The output may still take the target's table
    (`model.tie_output`): both are of the target's.
    """

    vocab_size: int = 37_000  # pieces, special ids and byte pieces included
    joint: bool = True  # one vocabulary, learned from both sides; False: one a side
    source_vocab_size: int = 0  # of the source's own; 0: as many as vocab_size
    model_type: str = "bpe"  # bpe or unigram
    model_path: str = ""  # an existing model, used as it is; SOURCE,TARGET if separate
    character_coverage: float = 1.0  # share of characters that get a piece
    byte_fallback: bool = True  # spell what has no piece in UTF-8 bytes
    lowercase: bool = False  # text is lower-cased, so translations are, too
    train_lines: int = 500_000  # lines sampled, by train.seed, to train it on
    hard_vocab_limit: bool = True  # False: fewer pieces where the text gives no more

    @property
    def source_size(self) -> int:
        """Pieces of the source's vocabulary."""
        return self.source_vocab_size or self.vocab_size

    @property
    def model_paths(self) -> list[str]:
        """The existing models: none, that of both sides, or those of each."""
        return self.model_path.split(",") if self.model_path else []


@dataclasses.dataclass(frozen=True)
class BatchConfig:
    """How sentence pairs become arrays of fixed shapes."""

    tokens: int = 25_000  # at most so many padded tokens a side, over all devices
    buckets: int = 18  # array shapes, so also compilations, at the most
    row_multiple: int = 8  # rows are a multiple of it; best a multiple of the devices
    packing: bool = False  # several pairs a row, one shape; buckets are of validation


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The Transformer (Vaswani et al. 2017, section 3); the defaults are `base`.

    The fields from `decoder_layers` on are variants that other toolkits' models have.
    """

    num_layers: int = 6  # N, of the encoder and of the decoder
    d_model: int = 512
    d_ff: int = 2048
    num_heads: int = 8
    d_k: int = 64  # width of a head's queries and keys
    d_v: int = 64  # width of a head's values
    dropout: float = 0.1
    norm: str = "post"  # post (the paper) or pre
    positions: str = "sinusoidal"  # or learned (Table 3, row E)
    attention_bias: bool = False  # biases in the attention's four projections
    max_length: int = 256  # longest sequence in pieces, EOS included
    dtype: str = "auto"  # compute type: float32, bfloat16, or auto (by device)

    decoder_layers: int = 0  # of the decoder, if they are not num_layers
    final_norm: str = "auto"  # a norm after each stack: on, off, or auto (with pre)
    norm_epsilon: float = 1e-6  # added to the variance in LayerNorm
    activation: str = "relu"  # of the feed-forward layers, one of ACTIVATIONS
    share_embeddings: bool = True  # source and target have one table
    tie_output: bool = True  # the output product takes the target's table
    output_bias: bool = False  # added to the logits
    embedding_scale: float = 0.0  # factor on embeddings; 0 is sqrt(d_model)
    zero_start: bool = False  # the decoder starts from a zero vector, not from BOS
    position_layout: str = "interleaved"  # sine, cosine, ...; or halves: sines first
    position_offset: int = 0  # number of the first position
    position_stretch: bool = False  # frequencies 10000^(-i / (d_model / 2 - 1))

    @property
    def decoder_depth(self) -> int:
        """Layers of the decoder."""
        return self.decoder_layers or self.num_layers

    @property
    def ends_in_norm(self) -> bool:
        """Whether a norm follows each stack."""
        return self.final_norm == "on" or (
            self.final_norm == "auto" and self.norm == "pre"
        )


@dataclasses.dataclass(frozen=True)
class ParallelConfig:
    """Where state and batch lie on the devices; it changes nothing that is computed."""

    strategy: str = "pmap"  # the state on every device; or mesh: split over them
    data: int = 0  # mesh: parts of the batch; 0 takes the devices that are left
    fsdp: int = 1  # mesh: parts of the batch, and of every parameter along d_model
    tensor: int = 1  # mesh: parts of heads, feed-forward layer and vocabulary


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Optimisation (section 5) and what happens while it runs; durations in updates."""

    accumulate: int = 1  # batches an update: as one of so many times batch.tokens
    steps: int = 100_000  # the run ends at the first of these three limits
    epochs: float = 0.0  # times that each pair is seen; 0: no limit
    hours: float = 0.0  # of training, summed over resumes; 0: no limit
    remat: bool = False  # activations are computed again, not kept: less memory
    scan_layers: bool = False  # one layer is compiled and run in a loop: quicker start
    warmup_steps: int = 4000
    learning_rate: float = 1.0  # factor on d_model^-0.5 min(s^-0.5, s warmup^-1.5)
    label_smoothing: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    adam_epsilon: float = 1e-9
    clip_norm: float = 0.0  # longer gradients are scaled to this L2 norm; 0: none are
    seed: int = 0  # of initialisation, order of data, dropout and vocabulary sample
    log_every: int = 100
    eval_every: int = 1500  # validation loss and BLEU, and a checkpoint
    save_every: int = 1500
    keep_last: int = 10  # newest checkpoints kept, beside the best by validation BLEU
    average_last: int = 0  # newest ones that `average` takes; kept, too; 0: not planned
    early_stop_metric: str = ""  # of validation: bleu, chrf, nll, loss; "": none
    patience: int = 5  # evaluations in a row without a better one before the run ends
    max_bad_updates: int = 5  # non-finite updates in a row before the run stops
    profile_steps: int = 0  # updates traced into WORKDIR/profile; slower while it lasts

    @property
    def kept_newest(self) -> int:
        """Newest checkpoints that are kept: averaging never lacks one."""
        return max(self.keep_last, self.average_last)


@dataclasses.dataclass(frozen=True)
class DecodeConfig:
    """How translations are searched for (section 6.1), or drawn at random."""

    beam_size: int = 4  # 1 is greedy
    alpha: float = 0.6  # exponent of the length penalty; 0 ranks by log-probability
    penalty: str = "gnmt"  # ((5 + n) / 6)^alpha, or length: n^alpha
    coverage: float = 0.0  # weight of GNMT's coverage penalty
    early_stop: bool = False  # at beam_size endings, though a better may come
    max_extra_length: int = 50  # output is at most source pieces + this, EOS included
    max_length: int = 0  # and at most so many pieces, EOS included; 0: no other limit
    min_length: int = 0  # and at least so many before EOS
    no_repeat_ngram: int = 0  # no n-gram of this size comes twice; 0: all may
    sample: bool = False  # draw at random instead of searching
    temperature: float = 1.0  # of the draws: below 1 nearer to greedy
    top_k: int = 0  # draw from the k most probable pieces only; 0: from all
    top_p: float = 1.0  # draw from the most probable with this share only; 1: from all
    seed: int = 0  # of the draws
    mbr: int = 0  # draw so many, take the one most like all others by chrF
    batch_size: int = 64  # sentences decoded together, over all devices


@dataclasses.dataclass(frozen=True)
class DescribeConfig:
    """What `describe` counts; nothing else reads it, and it changes no run."""

    decoder_only: bool = False  # a language model: no encoder, no cross-attention
    weights_only: bool = False  # no biases, norms and position tables, as is published


@dataclasses.dataclass(frozen=True)
class Config:
    """One run. Sections are handed out one by one."""

    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    tokenizer: TokenizerConfig = dataclasses.field(default_factory=TokenizerConfig)
    batch: BatchConfig = dataclasses.field(default_factory=BatchConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    decode: DecodeConfig = dataclasses.field(default_factory=DecodeConfig)
    describe: DescribeConfig = dataclasses.field(default_factory=DescribeConfig)

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Returns the fields as nested plain dictionaries, ready for JSON."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """Returns the config as the text kept in `WORKDIR/config.json`."""
        return json.dumps(self.to_dict(), indent=2) + "\n"


def default_config_dict() -> ml_collections.ConfigDict:
    """Returns the defaults as the `ConfigDict` that config files start from."""
    return ml_collections.ConfigDict(Config().to_dict())
