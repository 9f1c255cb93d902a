"""What a run says of its speed and memory, and the trace of a few updates."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from transformer_jax.chips import chip_of
from transformer_jax.config import Config, DescribeConfig
from transformer_jax.data.batching import Batch
from transformer_jax.describe import describe

WARM_UP = 5  # updates before a trace, in which caches and queues fill


class Meter:
    """Measures updates: their time, the share of the chips' speed, device memory.

    The share, `mfu`, is model FLOPs utilisation: the FLOPs of the matrix products of
    real tokens, forward and backward, by the closed form of `describe` at the mean
    length of the sentences, divided by what all devices could have done in that time
    in bfloat16. Padding is no work done.
    """

    def __init__(self, config: Config, vocab_size: int, devices: Sequence[Any]) -> None:
        """Begins to count.

        Args:
            config: of the run.
            vocab_size: of its model.
            devices: that it runs on, all of one kind.
        """
        tokenizer = dataclasses.replace(config.tokenizer, vocab_size=vocab_size)
        self._config = dataclasses.replace(
            config, tokenizer=tokenizer, describe=DescribeConfig()
        )
        self._devices = devices
        self._chip = chip_of(devices[0].device_kind)
        self._counts = [0, 0, 0]  # sentences, source and target tokens

    def add(self, batches: Sequence[Batch]) -> None:
        """Counts the batches of an update, on the host."""
        for batch in batches:
            pairs = batch.source_length > 0
            if batch.source_segment is not None:
                pairs = batch.source_segment.max(axis=1)
            self._counts[0] += int(pairs.sum())
            self._counts[1] += int(batch.source_length.sum())
            self._counts[2] += int(batch.target_length.sum())

    def take(self, updates: int, seconds: float) -> dict[str, float]:
        """Returns the values of the updates since the last call, and begins anew.

        Args:
            updates: how many.
            seconds: that they took.

        Returns:
            `step_seconds`; `mfu`, where the chip is known; `device_memory`, the most
            bytes in use on one device since the start, where devices tell.
        """
        values = {"step_seconds": seconds / max(updates, 1)}
        (pairs, source, target), self._counts = self._counts, [0, 0, 0]
        if self._chip and pairs and seconds > 0:
            length = max(1, round((source + target) / (2 * pairs)))
            flops = describe(self._config, length=length).flops
            done = source * flops.forward_source_token
            done += target * flops.forward_target_token
            possible = seconds * len(self._devices) * self._chip.flops
            values["mfu"] = 3 * done / possible
        own = [d for d in self._devices if d.process_index == jax.process_index()]
        stats = [device.memory_stats() or {} for device in own]
        if peaks := [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]:
            values["device_memory"] = max(peaks)
        return values


class Trace:
    """A trace of some updates in `WORKDIR/profile`, for TensorBoard or Perfetto."""

    def __init__(
        self,
        workdir: pathlib.Path,
        step: int,
        updates: int,
        report: Callable[[str], None],
    ) -> None:
        """Plans a trace.

        Args:
            workdir: of the run.
            step: that the run goes on from.
            updates: to trace, after `WARM_UP` others; 0 for none.
            report: is given a line when the trace is written.
        """
        self._folder, self._report = workdir / "profile", report
        self._first = step + WARM_UP + 1
        self._last = self._first + updates - 1
        self._step, self._running = step, False

    @contextlib.contextmanager
    def update(self, step: int, before: Any) -> Iterator[None]:
        """Is around update `step`; the trace starts with the first and names each.

        Args:
            step: number of the update.
            before: arrays that are to be there before the trace starts.
        """
        if step == self._first <= self._last:
            jax.block_until_ready(before)
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # each call in Python would be an event
            jax.profiler.start_trace(self._folder, profiler_options=options)
            self._running = True
        if self._running:
            with jax.profiler.StepTraceAnnotation("update", step_num=step):
                yield
        else:
            yield
        self._step = step

    def end(self, results: Any) -> None:
        """Writes the trace after its last update, when the `results` are there."""
        if self._running and self._step == self._last:
            jax.block_until_ready(results)
            self.close()

    def close(self) -> None:
        """Writes what there is of a trace that goes on."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
            updates = f"updates {self._first} to {self._step}"
            self._report(f"profile of {updates} is in {self._folder}")
        elif self._step < self._first <= self._last:
            self._report(f"no profile: update {self._first} was to be its first")
