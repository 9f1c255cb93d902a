"""The flags of every verb of the program `transformer-jax`, and their help."""

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any, NoReturn

from transformer_jax import __version__
from transformer_jax.chips import CHIPS
from transformer_jax.config_check import nearest
from transformer_jax.errors import ConfigError

DECODING = (  # the fields of DecodeConfig
    "beam_size alpha penalty coverage early_stop max_extra_length max_length "
    "min_length no_repeat_ngram sample temperature top_k top_p seed mbr batch_size"
)

PROCESSES = "distributed coordinator num_processes process_id start_timeout"

# What a verb does, an example, and its options, of which OPTIONS says the rest.
VERBS: dict[str, tuple[str, str, str]] = {
    "prepare": (
        "make vocabulary and tokenised corpus",
        "--config=configs/phrases.py --workdir=runs/phrases",
        "config workdir check json",
    ),
    "train": (
        "train, or go on training",
        "--config=configs/phrases.py --workdir=runs/phrases --config.train.steps=2000",
        "config workdir? init_from init_checkpoint dry_run devices chip json "
        f"{PROCESSES}",
    ),
    "evaluate": (
        "translate a split, or a file with references, and score it",
        "--workdir=runs/phrases --split=test",
        f"workdir checkpoint split source? reference? {DECODING} lowercase paper json "
        f"{PROCESSES}",
    ),
    "bleu": (
        "score a file of translations",
        "--hypothesis=out.de --reference=ref.de",
        "hypothesis reference lowercase paper lang compare samples seed json",
    ),
    "translate": (
        "translate lines",
        "--workdir=runs/phrases --input=text.en --output=text.de",
        f"workdir checkpoint input output prefix nbest {DECODING} scores pieces json",
    ),
    "score": (
        "log-probability of given translations",
        "--workdir=runs/phrases --source=text.en --target=text.de",
        "workdir checkpoint source target pieces",
    ),
    "average": (
        "average the last checkpoints",
        "--workdir=runs/phrases --last=3",
        "workdir last",
    ),
    "describe": (
        "count parameters, FLOPs and memory",
        "--config=configs/base.py",
        "config devices length json",
    ),
}


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def _required(**settings: Any) -> dict[str, Any]:
    return {"required": True, **settings}


# A "?" behind a name in VERBS makes a required option an optional one.
OPTIONS: dict[str, dict[str, Any]] = {
    "config": _required(
        help="Python file with get_config(), also FILE:ARGUMENT; single fields are set "
        "by --config.SECTION.FIELD=VALUE"
    ),
    "workdir": _required(
        type=pathlib.Path,
        help="folder of the run; evaluate, translate and score take several, with "
        "commas between, as an ensemble",
    ),
    "check": {
        "action": "store_true",
        "help": "make nothing; read the corpus and report what is odd about it",
    },
    "init_from": {
        "type": pathlib.Path,
        "help": "folder of another run: a new run begins with its parameters, at step "
        "0 with a fresh optimizer; both need the same vocabulary and model",
    },
    "init_checkpoint": {
        "help": "of --init_from: best, last, average or a step (default: best)"
    },
    "checkpoint": {
        "default": "best",
        "help": "best (by valid BLEU), last, average or a step (default: best)",
    },
    "split": {
        "default": "test",
        "choices": ("valid", "test"),
        "help": "which set of the run's corpus (default: test)",
    },
    "source": _required(help="file of source sentences, one a line"),
    "target": _required(help="file of target sentences, one a line"),
    "reference": _required(help="file of references, or several, with commas between"),
    "hypothesis": _required(help="file of translations, one a line"),
    "lowercase": {
        "action": "store_true",
        "help": "compare lower-cased text; the signatures say so",
    },
    "paper": {
        "action": "store_true",
        "help": "print the paper's tokenised BLEU beside sacreBLEU: Moses tokens, "
        "German compounds split, multi-bleu",
    },
    "lang": {"help": "target language, for the tokens of --paper (default: de)"},
    "compare": {
        "help": "file of other translations, or several, with commas between: tests "
        "whether they differ from the hypotheses"
    },
    "samples": {
        "type": _positive,
        "help": "of each test of --compare (default: 1000 for the bootstrap, 10000 "
        "for the randomisation)",
    },
    "input": {"default": "-", "help": "file or - (default: stdin)"},
    "output": {"default": "-", "help": "file or - (default: stdout)"},
    "prefix": {"help": "file with what each translation must begin with, line by line"},
    "nbest": {
        "type": _positive,
        "default": 1,
        "help": "hypotheses a line, with --sample draws; above 1 they come as line "
        "number, score and text with tabs between (default: 1)",
    },
    "scores": {
        "action": "store_true",
        "help": "print the score and a tab before each translation",
    },
    "pieces": {
        "action": "store_true",
        "help": "pieces with blanks between instead of text: written by translate, "
        "read from --target by score",
    },
    # Settings of the search: where they are not given, those of the run's config hold.
    "beam_size": {"type": _positive, "help": "live hypotheses; 1 is greedy"},
    "alpha": {"type": float, "help": "length penalty exponent"},
    "penalty": {"help": "gnmt, ((5 + n) / 6)^alpha, or length, n^alpha"},
    "coverage": {"type": float, "help": "weight of GNMT's coverage penalty"},
    "early_stop": {
        "action": "store_true",
        "default": None,
        "help": "stop at beam_size endings, even if a better one may come, as other "
        "toolkits do; faster",
    },
    "max_extra_length": {
        "type": _natural,
        "help": "output is at most so much longer than the source, in pieces",
    },
    "max_length": {"type": _natural, "help": "and at most so long; 0: no such limit"},
    "min_length": {"type": _natural, "help": "fewest pieces before the end"},
    "no_repeat_ngram": {
        "type": _natural,
        "help": "no n-gram of so many pieces comes twice in a translation; 0: all may",
    },
    "sample": {
        "action": "store_true",
        "default": None,
        "help": "draw --nbest translations at random instead of searching",
    },
    "temperature": {"type": float, "help": "of the draws; below 1 nearer to greedy"},
    "top_k": {"type": _natural, "help": "draw from the k most probable pieces; 0: all"},
    "top_p": {"type": float, "help": "draw from the most probable of this share"},
    "seed": {
        "type": _natural,
        "help": "of the draws: sentence, seed and model give the same; with bleu, of "
        "the tests of --compare (default: 12345)",
    },
    "mbr": {
        "type": _natural,
        "help": "draw so many and take the one that is most like all by chrF",
    },
    "batch_size": {"type": _positive, "help": "sentences decoded together"},
    "last": {
        "type": _positive,
        "help": "how many (default: config.train.average_last of the run)",
    },
    "dry_run": {
        "action": "store_true",
        "help": "train nothing and read no data; compile the update for --devices and "
        "say what it costs on each",
    },
    "devices": {
        "type": _positive,
        "help": "that the batch is split over (default: 1; of --dry_run 8)",
    },
    "chip": {
        "choices": tuple(CHIPS),
        "help": "what --dry_run compares with (default: all that there are)",
    },
    "length": {
        "type": _positive,
        "default": 32,
        "help": "tokens a sentence that attention looks at (default: 32)",
    },
    "distributed": {
        "choices": ("auto",),
        "help": "auto: the same command runs on several hosts, as Cloud TPU, GKE or "
        "Slurm say",
    },
    "coordinator": {
        "help": "HOST:PORT of process 0: the same command runs in --num_processes "
        "processes"
    },
    "num_processes": {"type": _positive, "help": "how many processes there are"},
    "process_id": {"type": _natural, "help": "number of this one, from 0 on"},
    "start_timeout": {
        "type": _positive,
        "default": 300,
        "help": "seconds in which all processes must have come (default: 300)",
    },
    "json": {
        "action": "store_true",
        "help": "JSON: one object; for translate one a line, with scores, pieces, "
        "log-probabilities and attention of each hypothesis",
    },
}

SPELLED = {"dry_run": ("--dry-run",)}  # in another way, too


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the command line.

    Returns:
        The verb and its options; `--config.a.b=value` flags are in `overrides`.

    Raises:
        ConfigError: an unknown verb or option, with the nearest one, or a wrong value.
    """
    args, rest = _make_parser().parse_known_args(arguments)
    args.overrides = []
    known = [f"--{name.rstrip('?')}" for name in VERBS[args.verb][2].split()]
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("-"):
            raise ConfigError(f"unexpected argument {flag!r}; options start with --")
        if not (flag.startswith("--config.") and "--config" in known):
            name = flag.split("=", 1)[0]
            raise ConfigError(f"unknown option {name}: {nearest(name, known)}")
        if "=" not in flag and rest and not rest[0].startswith("--"):
            flag = f"{flag}={rest.pop(0)}"
        args.overrides.append(flag)
    return args


def _make_parser() -> _Parser:
    parser = _Parser(
        prog="transformer-jax",
        description='The Transformer of "Attention Is All You Need" in JAX.',
        epilog=f"Example: transformer-jax train {VERBS['train'][1]}",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    group = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, (about, example, options) in VERBS.items():
        sub = group.add_parser(
            verb,
            help=about,
            description=about,
            epilog=f"Example: transformer-jax {verb} {example}",
            allow_abbrev=False,
        )
        for name in options.split():
            settings = dict(OPTIONS[name.rstrip("?")])
            if name.endswith("?"):
                del settings["required"]
            names = [f"--{name.rstrip('?')}", *SPELLED.get(name, ())]
            sub.add_argument(*names, **settings)
    return parser
