"""Device sums to numbers, JSON lines, TensorBoard, and what the terminal shows."""

import json
import math
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import (
    Event,  # pyright: ignore[reportAttributeAccessIssue]
    SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
)
from tensorboardX.summary import scalar

from transformer_jax.progress import Progress, clock
from transformer_jax.train.loss import LossSums
from transformer_jax.train.step import StepMetrics


def loss_metrics(sums: Sequence[LossSums]) -> dict[str, float]:
    """Returns means over all target tokens of several batches.

    Args:
        sums: host values of each batch.

    Returns:
        `loss` (smoothed, nats a token), `nll` (unsmoothed), `perplexity` (exp of nll),
        `accuracy` (share from 0 to 1) and `tokens` (their number).
    """
    tokens = sum(int(s.tokens) for s in sums)
    count = max(tokens, 1)
    nll = sum(float(s.nll) for s in sums) / count
    return {
        "loss": sum(float(s.loss) for s in sums) / count,
        "nll": nll,
        "perplexity": math.exp(min(nll, 700.0)),
        "accuracy": sum(int(s.correct) for s in sums) / count,
        "tokens": tokens,
    }


def train_metrics(
    steps: Sequence[StepMetrics], seconds: float, waited: float
) -> dict[str, float]:
    """Returns `loss_metrics` of several updates with norm, counts and speed.

    Non-finite updates were skipped, so they are counted but not averaged in.

    Args:
        steps: host values of each update.
        seconds: that they took.
        waited: how many of those passed before a batch was there.
    """
    good = [s for s in steps if np.isfinite(s.sums.loss) and int(s.bad_in_a_row) == 0]
    values = loss_metrics([s.sums for s in good])
    tokens = sum(int(s.sums.tokens) for s in steps)
    norms = [float(s.gradient_norm) for s in good]
    return values | {
        "gradient_norm": sum(norms) / max(len(norms), 1),
        "bad_updates": int(steps[-1].bad_total),
        "tokens_per_second": tokens / max(seconds, 1e-9),
        "data_wait": min(1.0, waited / max(seconds, 1e-9)),  # share of the time
    }


class MetricsWriter:
    """Appends to `metrics.jsonl` and TensorBoard files.

    A run that goes on from step n first drops what was written after n, so that no row
    is doubled.
    """

    def __init__(self, workdir: pathlib.Path, step: int) -> None:
        """Opens the files for a run that goes on at `step`."""
        self._path = workdir / "metrics.jsonl"
        if self._path.exists():
            # Beside it, then renamed: a run killed just now must not lose the rows.
            kept = self._path.with_name(self._path.name + ".partial")
            rows = (json.dumps(row) + "\n" for row in read_rows(workdir, step))
            kept.write_text("".join(rows), encoding="utf-8")
            kept.replace(self._path)
        self._file = self._path.open("a", encoding="utf-8")
        # Not its SummaryWriter: that has a thread which dies of a full disk, and then
        # the run waits for it.
        board = workdir / "tensorboard"
        board.mkdir(exist_ok=True)
        self._board = EventsWriter(str(board / "events"))
        dropped = SessionLog(status=SessionLog.START)
        self._add_event(step + 1, session_log=dropped)

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Adds one row: `kind` (train, valid or event), `step`, and the values."""
        row = {"kind": kind, "step": step, "time": round(time.time(), 3), **values}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        for name, value in values.items():
            if isinstance(value, int | float):
                self._add_event(step, summary=scalar(f"{kind}/{name}", value))
        self._board.flush()

    def _add_event(self, step: int, **content: Any) -> None:
        self._board.write_event(Event(step=step, wall_time=time.time(), **content))

    def close(self) -> None:
        """Closes the files."""
        self._file.close()
        self._board.close()


class NoWriter:
    """What a process has that is not the first: nothing is written twice."""

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Writes nothing."""

    def close(self) -> None:
        """Closes nothing."""


def read_rows(workdir: pathlib.Path, step: int) -> list[dict[str, Any]]:
    """Returns the rows of `metrics.jsonl` up to `step`.

    A last line cut short by a crash, or one that is no row, is left out.
    """
    path = workdir / "metrics.jsonl"
    rows = []
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        try:
            row = json.loads(line)
            if row["step"] <= step:
                rows.append(row)
        except (ValueError, KeyError, TypeError):
            continue
    return rows


class TrainProgress(Progress):
    """Progress with a bar of the steps, or plain lines at each log."""

    def __init__(self, step: int, steps: int, quiet: bool = False) -> None:
        """Starts at `step` of `steps`; with `quiet` it shows nothing."""
        super().__init__(quiet)
        self._step, self._steps = step, steps
        self._seconds, self._updates = 0.0, 0
        self._task = self._bar.add_task("", total=steps, completed=step, shown="")
        self.advance(step)

    def end_at(self, step: int) -> None:
        """Sets the last step."""
        self._steps = step
        self._bar.update(self._task, total=step)

    def advance(self, step: int) -> None:
        """Moves the bar to `step`."""
        self._step = step
        shown = f"step {step}/{self._steps}"
        self._bar.update(self._task, completed=step, description=shown)

    def log(
        self,
        updates: int,
        seconds: float,
        values: Mapping[str, float],
        seconds_left: float = math.inf,
    ) -> None:
        """Shows the values of the last `updates`, which took `seconds`.

        Args:
            updates: how many.
            seconds: that they took.
            values: of `train_metrics` and `Meter`, and the learning rate.
            seconds_left: that the run may go on, though steps be left.
        """
        self._seconds, self._updates = (
            self._seconds + seconds,
            self._updates + updates,
        )
        shown = (
            f"loss {values['loss']:.3f}  {values['tokens_per_second']:,.0f} tokens/s  "
            f"lr {values['learning_rate']:.2e}  data wait {values['data_wait']:.1%}"
        )
        if "mfu" in values:
            shown += f"  MFU {values['mfu']:.1%}"
        if self._bar.disable:
            left = self._seconds / self._updates * (self._steps - self._step)
            left = max(0.0, min(left, seconds_left))
            self.say(f"step {self._step}/{self._steps}  {shown}  left {clock(left)}")
        self._bar.update(self._task, shown=shown)
