"""Text in and out of the program: files, stdin and stdout."""

import contextlib
import json
import pathlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TextIO

from transformer_jax.data import textfiles

STDIN = "/dev/stdin"


def say(message: str) -> None:
    """Says something on stderr."""
    print(message, file=sys.stderr, flush=True)


def warn(message: str) -> None:
    """Warns on stderr."""
    say(f"warning: {message}")


def read(path: str) -> list[str]:
    """Returns the lines of a file; DataError where it cannot be read."""
    return list(textfiles.read_lines(path))


def read_sets(paths: str) -> list[list[str]]:
    """Returns the lines of each of several files, with commas between."""
    return [read(path) for path in paths.split(",")]


def input_lines(path: str) -> Iterator[str]:
    """Yields the lines of a file as they come; `-` is stdin."""
    return textfiles.read_lines(STDIN if path == "-" else path)


@contextlib.contextmanager
def output(path: str) -> Iterator[TextIO]:
    """Opens stdout, or a file that appears under its name only when it is whole."""
    if path == "-":
        sys.stdout.reconfigure(encoding="utf-8", newline="\n")  # pyright: ignore
        yield sys.stdout
        sys.stdout.flush()
        return
    final = pathlib.Path(path)
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.with_name(final.name + ".partial")
    with partial.open("w", encoding="utf-8", newline="\n") as file:
        yield file
    partial.replace(final)


def print_json(value: Any) -> None:
    """Prints one JSON object on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def as_lines(number: int, hypotheses: Sequence[Any], args: Any) -> Iterable[str]:
    """Returns the output lines of one input line."""
    shown = [" ".join(h.tokens) if args.pieces else h.text for h in hypotheses]
    scores = [f"{h.score:.6f}" for h in hypotheses]
    if args.nbest == 1:
        return [f"{scores[0]}\t{shown[0]}\n" if args.scores else f"{shown[0]}\n"]
    return [
        f"{number}\t{score}\t{text}\n"
        for score, text in zip(scores, shown, strict=True)
    ]


def as_json(number: int, pieces: list[str], hypotheses: Sequence[Any]) -> str:
    """Returns the output line of one input line, whose pieces attention refers to."""
    shown = []
    for hypothesis in hypotheses:
        values = {k: v for k, v in vars(hypothesis).items() if v is not None}
        rows = values.pop("attention", [])
        values["token_log_probs"] = [round(x, 6) for x in hypothesis.token_log_probs]
        values["attention"] = [[round(x, 6) for x in row] for row in rows]
        shown.append(values)
    row = {"line": number, "source_tokens": pieces, "hypotheses": shown}
    return json.dumps(row, ensure_ascii=False) + "\n"
