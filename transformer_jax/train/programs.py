"""The compiled update and evaluation of a run, one program for each batch shape."""

import functools
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import optax

from transformer_jax.config import Config
from transformer_jax.data.batching import Batch
from transformer_jax.model.transformer import Transformer
from transformer_jax.parallel import Layout
from transformer_jax.train.loss import LossSums
from transformer_jax.train.step import (
    StepMetrics,
    TrainState,
    add_batch,
    apply_sums,
    eval_step,
    state_shapes,
    sums_axes,
    train_step,
    zero_sums,
)


class Programs:
    """What `train.step` defines, put on devices.

    Attributes:
        state: shapes, types and places of `TrainState`.
        total: those of `BatchSums`.
    """

    def __init__(
        self,
        config: Config,
        layout: Layout,
        model: Transformer,
        optimizer: optax.GradientTransformation,
        axes: TrainState,
    ) -> None:
        """Builds the programs; nothing is compiled yet.

        Args:
            config: of the run.
            layout: where the arrays lie.
            model: what is trained.
            optimizer: as in `apply_sums`.
            axes: logical axes of the state.
        """
        self._layout, self._accumulate = layout, config.train.accumulate
        sums, fresh = sums_axes(axes), state_shapes(model, optimizer)
        self.state = layout.outline(fresh, axes)
        self.total = layout.outline(jax.eval_shape(zero_sums, fresh)[0], sums)
        shards, axis_name = layout.batch_shards, layout.axis_name
        train = config.train
        model = model.clone(
            data_axis=axis_name, remat=train.remat, scan=train.scan_layers
        )
        last: dict[str, Any] = {"optimizer": optimizer, "axis_name": axis_name}
        batch: dict[str, Any] = {
            "model": model,
            "smoothing": config.train.label_smoothing,
            "seed": config.train.seed,
            "shards": shards,
        }

        def put(function: Any, axes: Any, donate: bool = True, **options: Any) -> Any:
            whole = functools.partial(function, **options)
            return layout.compile(whole, axes, donate)

        accumulate = self._accumulate
        self._step = put(train_step, axes, **last, **batch)
        self._zero = put(zero_sums, sums, donate=False)
        self._add = put(add_batch, sums, accumulate=accumulate, **batch)
        self._apply = put(apply_sums, axes, **last)
        evaluation = {"model": model, "axis_name": axis_name, "shards": shards}
        self._evaluate = put(eval_step, None, donate=False, **evaluation)
        self._compiled: dict[Any, Any] = {}
        self._begun: dict[Any, Future[Any]] = {}
        self._worker = ThreadPoolExecutor(1)

    def begin(self, batch: Batch) -> None:
        """Traces what `compile` will be asked for; the rest goes on in a thread."""
        lowered = self._lower(self._layout.split_rows(batch))
        self._begun[_key(batch)] = self._worker.submit(lowered.compile)

    def compile(self, batch: Batch) -> bool:
        """Compiles the update for the shape of `batch` (on the host).

        Returns:
            Whether that was to be done: it was not compiled before.
        """
        if (key := _key(batch)) in self._compiled:
            return False
        if key not in self._begun:
            self.begin(batch)
        self._compiled[key] = self._begun.pop(key).result()
        return True

    def _lower(self, split: Batch) -> Any:
        if self._accumulate == 1:
            return self._step.lower(self.state, split)
        return self._add.lower(self.total, self.state, split)

    def lower(self, batch: Batch) -> list[tuple[int, Any]]:
        """Returns what an update runs for the shape of `batch`, not yet compiled.

        Args:
            batch: on the host.

        Returns:
            Each program, and how often it runs.
        """
        first = self._lower(self._layout.split_rows(batch))
        if self._accumulate == 1:
            return [(1, first)]
        last = self._apply.lower(self.state, self.total)
        return [(self._accumulate, first), (1, last)]

    def update(
        self, state: TrainState, batches: Sequence[Batch]
    ) -> tuple[TrainState, StepMetrics]:
        """Takes one update with `train.accumulate` batches; `state` is used up.

        The shape of each batch is compiled already, see `compile`.
        """
        parts = [self._layout.split_rows(batch) for batch in batches]
        if self._accumulate == 1:
            return self._compiled[_key(batches[0])](state, parts[0])
        total = self._zero(state)[0]
        for batch, part in zip(batches, parts, strict=True):
            total, _ = self._compiled[_key(batch)](total, state, part)
        return self._apply(state, total)

    def evaluate(self, state: TrainState, batch: Batch) -> LossSums:
        """Returns the sums of a batch without dropout and smoothing, on the host."""
        split = self._layout.split_rows(batch)
        return self._layout.fetch(self._evaluate(state.params, split))


def _key(batch: Batch) -> tuple[Any, ...]:
    """Returns the shape of a batch on the host, before its rows are split."""
    return batch.source.shape, batch.target_in.shape
