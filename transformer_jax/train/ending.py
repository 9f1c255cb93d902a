"""When a run is over: steps, epochs, hours, or a validation score that stands still.

All of it follows from the rows of `metrics.jsonl` up to the step that a run goes on
from, so a stop and a resume change nothing, and rows written later do not count.
"""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from transformer_jax.config import HIGHER_IS_BETTER, TrainConfig


class Ending:
    """The limits of a run, whichever comes first, and how near they are."""

    def __init__(
        self,
        config: TrainConfig,
        updates_per_epoch: float,
        rows: Sequence[Mapping[str, Any]],
    ) -> None:
        """Starts the clock.

        Args:
            config: the limits.
            updates_per_epoch: updates that see each pair once.
            rows: of `metrics.jsonl`, up to the step that the run goes on from.
        """
        self._config = config
        self.last_step, self._limit = config.steps, f"config.train.steps {config.steps}"
        if config.epochs:
            updates = max(1, math.ceil(config.epochs * updates_per_epoch - 1e-6))
            if updates < config.steps:
                self.last_step = updates
                self._limit = f"config.train.epochs {config.epochs:g}"
        self._before = max((row.get("hours", 0.0) for row in rows), default=0.0)
        self._started = time.monotonic()
        self._scores: list[tuple[int, float]] = []
        for row in rows:
            if row["kind"] == "valid":
                self.evaluated(row["step"], row)

    @property
    def hours(self) -> float:
        """Hours of training up to now, those before a resume counted."""
        return self._before + (time.monotonic() - self._started) / 3600

    @property
    def hours_left(self) -> float:
        """Hours until the limit; infinite where there is none."""
        return self._config.hours - self.hours if self._config.hours else math.inf

    @property
    def late(self) -> bool:
        """Whether the hours are over, by this host's clock."""
        return self.hours_left <= 0

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Notes the validation's result at a step."""
        metric = self._config.early_stop_metric
        if metric:
            sign = 1.0 if HIGHER_IS_BETTER[metric] else -1.0
            value = sign * values[metric]
            self._scores.append((step, -math.inf if math.isnan(value) else value))

    def reason(self, step: int, late: bool) -> str:
        """Says why the run is over after `step` updates; "" while it is not.

        Args:
            step: updates made.
            late: whether the hours are over, by the clock that counts.
        """
        config = self._config
        if step >= self.last_step:
            return f"{self._limit} reached; raise it to go on"
        if late:
            return f"config.train.hours {config.hours:g} reached; raise it to go on"
        if self._scores:
            # max() gives the first of equal ones: standing still is no improvement.
            best = max(range(len(self._scores)), key=lambda i: self._scores[i][1])
            if len(self._scores) - 1 - best >= config.patience:
                return (
                    f"the validation's {config.early_stop_metric} is no better than at "
                    f"step {self._scores[best][0]} in {config.patience} evaluations; "
                    "raise config.train.patience to go on"
                )
        return ""
