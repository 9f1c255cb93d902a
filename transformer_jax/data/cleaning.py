"""Lines that are no clean text: what becomes of them, and how many there were."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from transformer_jax.config import DataConfig
from transformer_jax.data import textfiles
from transformer_jax.errors import DataError

# U+0000 to U+001F without the tab, and U+007F to U+009F; those that part words become
# a blank, such as CR and U+0085.
_CONTROL = re.compile("[\0-\x08\n-\x1f\x7f-\x9f]")
_REMOVED = {
    code: " " if chr(code).isspace() else None
    for code in (*range(0x20), *range(0x7F, 0xA0))
    if code != ord("\t")
}


class Cleaner:
    """Decodes the lines of a split by the config's rules."""

    def __init__(self, config: DataConfig, split: str) -> None:
        """Takes the rules for a split; only of training data anything is left out."""
        training = split == "train"
        self.skips = training and config.invalid_utf8 == "skip"
        self.invalid_utf8 = config.invalid_utf8
        self.removes = training and config.control == "remove"
        self.lines = Counter[str]()  # by what they held: not_utf8, nul, removed
        self.skipped = 0  # pairs
        self.first_nul = ""  # where it is

    def read(self, path: str) -> Iterator[str | None]:
        """Yields the lines of a file, as `read_lines` does; None is one to skip.

        Raises:
            DataError: the file cannot be read, or is not UTF-8 though it must be.
        """
        for number, (start, line) in enumerate(textfiles.raw_lines(path), 1):
            try:
                yield self.decode(textfiles.without_end(line), path, number)
            except UnicodeDecodeError as error:
                raise DataError(not_utf8(path, number, start, error)) from error

    def decode(self, line: bytes, name: str, number: int) -> str | None:
        """Returns the text of line `number` of `name`, None if it is to be skipped.

        Raises:
            UnicodeDecodeError: it is not UTF-8, though it must be.
        """
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError:
            if self.invalid_utf8 == "error":
                raise
            self.lines["not_utf8"] += 1
            if self.skips:
                return None
            text = line.decode("utf-8", "replace")
        if "\0" in text:
            self.lines["nul"] += 1
            self.first_nul = self.first_nul or f"{name} line {number}"
        cleaned = self.clean(text)
        self.lines["removed"] += cleaned is not text
        return cleaned

    def clean(self, text: str) -> str:
        """Returns `text`, without control characters if they are removed."""
        if self.removes and _CONTROL.search(text):
            return text.translate(_REMOVED)
        return text

    def both(
        self, rows: Iterable[tuple[str | None, str | None]]
    ) -> Iterator[tuple[str, str]]:
        """Yields the pairs of which no side is to be skipped."""
        for source, target in rows:
            if source is None or target is None:
                self.skipped += 1
            else:
                yield source, target

    def rules(self) -> dict[str, str]:
        """Returns what makes the text of the split another than the files'."""
        invalid = "skip" if self.skips else "replace"
        rules = {"invalid_utf8": invalid} if self.invalid_utf8 != "error" else {}
        return rules | ({"control": "remove"} if self.removes else {})

    def found(self) -> dict[str, int]:
        """Returns how many lines of each kind came so far, without those of none."""
        return {kind: n for kind, n in self.lines.items() if n}

    def warning(self) -> str:
        """Returns what is said about NUL that stays in the text, or ""."""
        if not self.lines["nul"] or self.removes:
            return ""
        return (
            f"{self.lines['nul']:,} lines hold NUL, the first is {self.first_nul}; it "
            "stays as text; config.data.control = 'remove' takes control characters "
            "out of training text"
        )


def not_utf8(path: str, number: int, start: int, error: UnicodeDecodeError) -> str:
    """Returns what is said about line `number` of a corpus, from byte `start` on."""
    wrong = textfiles.not_utf8(path, number, start, error)
    return f"{wrong}, or set config.data.invalid_utf8 to skip or replace"
