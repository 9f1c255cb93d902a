"""The program `transformer-jax`: for each verb one call, and its output.

Results go to stdout, all else to stderr. Exit codes: 0 done, 2 the user's mistake (one
line says what and how to mend it), 1 our fault, 128 + signal when stopped by a signal.
JAX is imported by the verbs that compute, so help and mistakes come at once.
"""

import argparse
import contextlib
import dataclasses
import errno
import itertools
import logging
import os
import pathlib
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from transformer_jax import __version__
from transformer_jax.arguments import parse
from transformer_jax.chips import CHIPS
from transformer_jax.config import Config, DecodeConfig
from transformer_jax.config_check import check_decode
from transformer_jax.config_file import load, read_workdir
from transformer_jax.errors import ConfigError, DataError, UserError
from transformer_jax.machine import use_huge_pages
from transformer_jax.streams import (
    as_json,
    as_lines,
    input_lines,
    output,
    print_json,
    read,
    read_sets,
    say,
    warn,
)

if TYPE_CHECKING:
    from transformer_jax.hosts import Hosts

BLOCK = 4096  # lines translated before they are written

# What the machine, not the program, refuses; so is anything within a run's folder.
_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


def program() -> NoReturn:
    """Runs the program as its own process."""
    use_huge_pages()
    code = main()
    sys.stdout.flush()
    if code == 2:
        os._exit(code)  # a library's exit handler would bemoan a full disk again
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = argparse.Namespace()
    # Orbax and TFDS log what they also raise; the one line below says it once.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    try:
        args = parse(arguments)
        args.command = shlex.join(["transformer-jax", *arguments])
        return VERBS[args.verb](args) or 0
    except BrokenPipeError:
        # The reader of our output is gone; Python would complain again when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (UserError, KeyboardInterrupt, OSError) as error:
        found = _explain(error, args)
        if found is None:
            raise
        return _fail(*found)


def _explain(error: BaseException, args: argparse.Namespace) -> tuple[str, int] | None:
    """Returns message and exit code of an error; None where it is our fault."""
    if isinstance(error, UserError):
        return str(error), 2
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 130
    if isinstance(error, OSError):
        workdir = getattr(args, "workdir", None)
        within = workdir and str(error.filename or "").startswith(str(workdir))
        if error.errno in _REFUSED or within:
            where = error.filename or workdir or "output"
            return f"{where}: {error.strerror}; nothing already saved is lost", 2
    return None


def _fail(message: str, code: int) -> int:
    print(f"transformer-jax: {' '.join(message.split())}", file=sys.stderr)
    return code


def _decode_config(args: argparse.Namespace, config: Config) -> DecodeConfig:
    """Returns the run's decode settings with the flags that were given."""
    names = [field.name for field in dataclasses.fields(DecodeConfig)]
    flags = {name: getattr(args, name) for name in names}
    given = {name: value for name, value in flags.items() if value is not None}
    decode = dataclasses.replace(config.decode, **given)
    faults = "; ".join(check_decode(decode))
    draws = decode.sample or decode.mbr
    if draws and "beam_size" in given:
        faults = faults or "--beam_size is for a search, not for --sample or --mbr"
    most = decode.mbr if draws else decode.beam_size
    if most and getattr(args, "nbest", 1) > most:
        flag = "--mbr" if draws else "--beam_size"
        faults = faults or (
            f"--nbest={args.nbest} is more than {flag[2:]} {most}; give "
            f"{flag}={args.nbest} or more"
        )
    if faults:
        for name in given:
            faults = faults.replace(f"config.decode.{name} ", f"--{name} ")
        raise ConfigError(faults)
    return decode


def _workdirs(args: argparse.Namespace) -> list[pathlib.Path]:
    return [pathlib.Path(name) for name in str(args.workdir).split(",")]


# --- Verbs ----------------------------------------------------------------------


def _prepare(args: argparse.Namespace) -> None:
    if args.json and not args.check:
        raise ConfigError("--json is of no use without --check; give both")
    config = load(args.config, args.overrides)
    from transformer_jax.data.prepare import prepare
    from transformer_jax.progress import Progress

    with contextlib.closing(Progress()) as progress:
        if args.check:
            return _check(config, args, progress.track)
        prepared = prepare(config, args.workdir, progress.say, progress.track)
    asked = config.tokenizer
    sizes = [asked.vocab_size] if asked.joint else [asked.source_size, asked.vocab_size]
    limit = f", {' + '.join(f'{size:,}' for size in sizes)} asked for"
    soft = not (asked.hard_vocab_limit or asked.model_path)
    say(f"vocabulary  {prepared.vocabularies.sizes} pieces{limit if soft else ''}")
    for split, corpus in prepared.splits.items():
        counts = [f"{n:,} {why}" for why, n in corpus.manifest["counts"].items()]
        say(f"{split:11} {', '.join(counts)}: {corpus.folder}")
        for more in filter(None, (corpus.spelling(), corpus.unclean())):
            say(f"{'':11} {more}")


def _check(config: Config, args: argparse.Namespace, track: Any) -> None:
    from transformer_jax.data import doctor, findings

    report = doctor.check(config, args.workdir, track)
    print_json(report) if args.json else print(findings.as_text(report))
    if stops := findings.stops(report):
        raise DataError(stops)


def _train(args: argparse.Namespace) -> int:
    if args.dry_run:
        return _dry_run(args)
    for name in ("devices", "chip", "json"):
        if getattr(args, name):
            raise ConfigError(f"--{name} is of no use without --dry_run; give both")
    if not args.workdir:
        raise ConfigError("--workdir is missing; see transformer-jax train --help")
    config = load(args.config, args.overrides)
    if args.init_checkpoint and not args.init_from:
        raise ConfigError("--init_checkpoint is of no use without --init_from")
    from transformer_jax.train.loop import Stopped, train
    from transformer_jax.train.origin import InitFrom

    init = args.init_from and InitFrom(args.init_from, args.init_checkpoint or "best")
    with _hosts(args, lambda: _run_facts(config, args), args.workdir) as hosts:
        try:
            train(config, args.workdir, init, hosts)
        except Stopped as stopped:
            if hosts.first:
                say(f"{stopped}; the same command goes on from there")
            return 128 + stopped.signum
    return 0


def _dry_run(args: argparse.Namespace) -> int:
    config = load(args.config, args.overrides)
    from transformer_jax import dry_run

    dry_run.simulate(args.devices or 8)
    found = dry_run.dry_run(config)
    chips = [args.chip] if args.chip else list(CHIPS)
    if args.json:
        print_json(dry_run.as_dict(found, chips))
    else:
        print(dry_run.as_text(found, chips))
    return 0


def _hosts(
    args: argparse.Namespace,
    facts: Callable[[], dict[str, Any]],
    workdir: pathlib.Path | None = None,
) -> contextlib.AbstractContextManager["Hosts"]:
    """Joins the other processes, if there are any; see `hosts.joined`."""
    from transformer_jax import hosts

    given = args.distributed, args.coordinator, args.num_processes, args.process_id
    seconds = args.start_timeout
    return hosts.joined(
        hosts.find(*given, seconds),
        seconds,
        facts,
        workdir,
        lambda e: _explain(e, args),
    )


def _run_facts(config: Config, args: argparse.Namespace) -> dict[str, Any]:
    """Returns what must be the same in all processes that train."""
    from transformer_jax.data.prepare import fingerprints

    facts = {
        f"config.{section}.{name}": value
        for section, fields in config.to_dict().items()
        for name, value in fields.items()
    }
    facts |= {"--init_from": str(args.init_from), "the data": fingerprints(config)}
    return facts


def _evaluate(args: argparse.Namespace) -> None:
    facts = {name: str(value) for name, value in vars(args).items()}
    for name in ("command", "process_id"):
        del facts[name]
    with _hosts(args, lambda: facts) as hosts:
        _evaluate_on(args, hosts)


def _evaluate_on(args: argparse.Namespace, hosts: "Hosts") -> None:
    if bool(args.source) != bool(args.reference):
        raise ConfigError("--source and --reference go together; give both or neither")
    from transformer_jax.decode.translator import load_translator
    from transformer_jax.evaluate import evaluate, write_report

    workdirs = _workdirs(args)
    translator, config, loaded = load_translator(workdirs, args.checkpoint, say)
    checkpoint = "+".join(each.name for each in loaded)
    if args.source:
        name = pathlib.Path(args.source).name
        sources, references = read(args.source), read_sets(args.reference)
    else:
        from transformer_jax.data.prepare import open_split

        name = args.split
        sources, target = open_split(workdirs[0], args.split).text()
        references = [target]
    decode = _decode_config(args, config)
    told = warn if hosts.first else lambda message: None
    lowercase = args.lowercase or translator.vocabularies.target.lowercase
    score, hypotheses = evaluate(
        translator, sources, references, decode, told, lowercase
    )
    if not hosts.first:
        return
    report = {
        "set": name,
        "direction": f"{config.data.source_lang}-{config.data.target_lang}",
        **dataclasses.asdict(score),
        **_paper(args, hypotheses, references, config.data.target_lang, lowercase),
        "workdirs": [str(workdir) for workdir in workdirs],
        "checkpoint": checkpoint,
        "checkpoint_steps": [step for each in loaded for step in each.steps],
        "decode": dataclasses.asdict(decode),
        "command": args.command,
        "version": __version__,
    }
    path = write_report(
        workdirs[0] / "evaluate", f"{name}-{checkpoint}", report, hypotheses
    )
    say(f"programs compiled: {translator.compilations}, one a length bucket")
    say(f"written to {path}")
    _print_score(report, args.json)


def _bleu(args: argparse.Namespace) -> None:
    for name, needs in (("lang", "paper"), ("samples", "compare"), ("seed", "compare")):
        if getattr(args, name) and not getattr(args, needs):
            raise ConfigError(f"--{name} is of no use without --{needs}; give both")
    from transformer_jax.evaluate import score_text

    hypotheses, references = (
        read(args.hypothesis),
        read_sets(args.reference),
    )
    score = score_text(hypotheses, references, args.lowercase, warn)
    report = dataclasses.asdict(score)
    report |= _paper(args, hypotheses, references, args.lang or "de", args.lowercase)
    if not args.compare:
        _print_score(report, args.json)
        return
    from transformer_jax.compare import SEED, as_text, compare

    others = zip(args.compare.split(","), read_sets(args.compare), strict=True)
    systems = [(args.hypothesis, hypotheses), *others]
    seed = SEED if args.seed is None else args.seed
    if seed == 0:
        raise ConfigError("--seed is 0; the tests need one above 0")
    compared = compare(systems, references, args.lowercase, args.samples, seed)
    tests = {name: dataclasses.asdict(test) for name, test in compared.items()}
    _print_score(report | {"compared": tests}, args.json)
    if not args.json:
        print("\n" + as_text(compared))


def _paper(
    args: argparse.Namespace,
    hypotheses: Sequence[str],
    references: Sequence[Sequence[str]],
    lang: str,
    lowercase: bool,
) -> dict[str, Any]:
    """Returns what `--paper` adds to a report."""
    if not args.paper:
        return {}
    from transformer_jax.paper_bleu import paper_score

    return dataclasses.asdict(paper_score(hypotheses, references, lang, lowercase))


def _print_score(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    print(f"{report['bleu_detail']}  [{report['bleu_signature']}]")
    print(f"chrF2 = {report['chrf']:.2f}  [{report['chrf_signature']}]")
    for name in ("paper", "tokenised"):
        if f"{name}_bleu" in report:
            print(f"{name} {report[f'{name}_detail']}  [{report[f'{name}_recipe']}]")


def _translate(args: argparse.Namespace) -> None:
    from transformer_jax.decode.translator import load_translator

    lines, prefixes = input_lines(args.input), None
    if args.prefix:
        lines, prefixes = list(lines), read(args.prefix)
        _check_counts(args.input, len(lines), args.prefix, len(prefixes))
    translator, config, _ = load_translator(_workdirs(args), args.checkpoint, say)
    decode = _decode_config(args, config)
    lines, first = iter(lines), 1
    with output(args.output) as file:
        while block := list(itertools.islice(lines, BLOCK)):
            if first == 1:  # a short input needs no more rows than it has lines
                rows = min(decode.batch_size, 1 << (len(block) - 1).bit_length())
                decode = dataclasses.replace(decode, batch_size=rows)
            found = translator.translate(
                block,
                decode,
                args.nbest,
                warn,
                first,
                prefixes and prefixes[first - 1 : first - 1 + len(block)],
                args.json,
            )
            if args.json:
                pieces = translator.source_pieces(block)
                rows = zip(itertools.count(first), pieces, found, strict=False)
                file.writelines(as_json(*row) for row in rows)
            else:
                for number, hypotheses in enumerate(found, first):
                    file.writelines(as_lines(number, hypotheses, args))
            first += len(block)
    say(f"programs compiled: {translator.compilations}, one a length bucket")


def _check_counts(one: str, count: int, other: str, other_count: int) -> None:
    if count != other_count:
        raise DataError(
            f"{one} has {count} lines, {other} {other_count}; line N of one must "
            "belong to line N of the other"
        )


def _score(args: argparse.Namespace) -> None:
    from transformer_jax.decode.translator import load_translator

    sources, targets = read(args.source), read(args.target)
    _check_counts(args.source, len(sources), args.target, len(targets))
    translator, config, _ = load_translator(_workdirs(args), args.checkpoint, say)
    rows = config.decode.batch_size
    for value in translator.score(sources, targets, rows, args.pieces):
        print(f"{value:.6f}")


def _average(args: argparse.Namespace) -> None:
    from transformer_jax.checkpoint import average

    last = args.last or read_workdir(args.workdir).train.average_last
    if not last:
        raise ConfigError(
            "config.train.average_last of the run is 0; say how many by --last=N"
        )
    steps = average(args.workdir, last, say)
    say(
        f"averaged steps {', '.join(map(str, steps))} into {args.workdir / 'average'}; "
        "decode with --checkpoint=average"
    )


def _describe(args: argparse.Namespace) -> None:
    from transformer_jax.describe import as_dict, as_text, describe

    config = load(args.config, args.overrides)
    description = describe(config, args.devices or 1, args.length)
    if args.json:
        print_json(as_dict(description))
    else:
        print(as_text(description))


VERBS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "prepare": _prepare,
    "train": _train,
    "evaluate": _evaluate,
    "bleu": _bleu,
    "translate": _translate,
    "score": _score,
    "average": _average,
    "describe": _describe,
}
