"""What a terminal shows of long work, and what a log does."""

import operator
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

import rich.console
import rich.progress

Item = TypeVar("Item")

LOOK = 1000  # items between looks at the clock
SAY = 10.0  # seconds between lines where there is no terminal


class Progress:
    """Bars on a terminal, and plain lines elsewhere; all output goes to stderr."""

    def __init__(self, quiet: bool = False) -> None:
        """Shows nothing yet, and with `quiet` nothing at all."""
        self.console = rich.console.Console(
            stderr=True, highlight=False, soft_wrap=True, emoji=False, quiet=quiet
        )
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(bar_width=None),
            rich.progress.TextColumn("{task.fields[shown]}"),
            rich.progress.TimeRemainingColumn(),
            console=self.console,
            disable=quiet or not sys.stderr.isatty(),
        )
        self._bar.start()

    def track(self, items: Iterable[Item], what: str) -> Iterator[Item]:
        """Yields `items`, and shows how many came; short work says nothing in a log.

        Args:
            items: if they tell their number (`__length_hint__`), so does the display.
            what: is done with them, such as `tokenising train`.
        """
        total = operator.length_hint(items) or None
        task = self._bar.add_task(what, total=total, shown="")
        start = said = time.monotonic()
        try:
            for done, item in enumerate(items, 1):
                yield item
                if done % LOOK:
                    continue
                now = time.monotonic()
                rate = done / max(now - start, 1e-9)
                shown = f"{done:,}{f'/{total:,}' if total else ''}  {rate:,.0f}/s"
                self._bar.update(task, completed=done, shown=shown)
                if self._bar.disable and now - said >= SAY:
                    said = now
                    left = f"  left {clock((total - done) / rate)}" if total else ""
                    self.say(f"{what}  {shown}{left}")
        finally:
            self._bar.remove_task(task)

    def say(self, message: str) -> None:
        """Prints a line above the bars."""
        self.console.print(message, markup=False)

    def close(self) -> None:
        """Ends the bars."""
        self._bar.stop()


def clock(seconds: float) -> str:
    """Returns hours, minutes and seconds."""
    minutes, second = divmod(round(max(seconds, 0.0)), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{second:02}"
