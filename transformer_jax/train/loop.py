"""train(config, workdir): the loop and nothing else.

The order within an update is fixed: update, then what is due of log, evaluate, save.
Only then comes the next batch, so what is saved is exactly what comes next.
"""

import contextlib
import functools
import itertools
import pathlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from transformer_jax import parallel
from transformer_jax.checkpoint import Checkpoints
from transformer_jax.config import Config, TrainConfig
from transformer_jax.data.batching import Batch
from transformer_jax.data.packing import PackedBatches
from transformer_jax.data.pipeline import (
    TrainBatches,
    eval_batches,
    read_shapes,
    write_shapes,
)
from transformer_jax.data.prepare import Prepared, prepare
from transformer_jax.decode.translator import Translator
from transformer_jax.errors import ConfigError, TrainingError
from transformer_jax.evaluate import evaluate
from transformer_jax.hosts import ALONE, PREPARING, Hosts
from transformer_jax.model.transformer import Transformer, compute_dtype
from transformer_jax.train import optimizer as optimizers
from transformer_jax.train.ending import Ending
from transformer_jax.train.metrics import (
    MetricsWriter,
    NoWriter,
    TrainProgress,
    loss_metrics,
    read_rows,
    train_metrics,
)
from transformer_jax.train.origin import InitFrom, initial_params, still_to_load
from transformer_jax.train.profiling import Meter, Trace
from transformer_jax.train.programs import Programs
from transformer_jax.train.step import (
    StepMetrics,
    TrainState,
    first_bad_output,
    init_state,
    state_axes,
    state_shapes,
    value_names,
)
from transformer_jax.train.stops import RUN_AHEAD, Stops


class Stopped(Exception):
    """A signal stopped the run after it was saved."""

    def __init__(self, signum: int, step: int) -> None:
        """Remembers the signal and the step saved."""
        super().__init__(f"stopped by {signal.Signals(signum).name} at step {step}")
        self.signum = signum


class Trainer:
    """What a run holds beside its state: data, compiled steps, writers."""

    def __init__(
        self,
        config: Config,
        workdir: pathlib.Path,
        data: Prepared,
        report: Callable[[str], None],
        hosts: Hosts = ALONE,
    ) -> None:
        """Builds model, optimizer and steps; nothing is compiled yet.

        Raises:
            ConfigError: a mesh does not divide a size, or the run is to stop by a
                validation split that it has not.
        """
        self.config, self.workdir, self.data = config, workdir, data
        self.hosts = hosts
        train = config.train
        if train.early_stop_metric and "valid" not in self.data.splits:
            raise ConfigError(
                f"config.train.early_stop_metric is {train.early_stop_metric!r}, but "
                "the corpus has no validation split; name one in config.data, or leave "
                "the metric empty"
            )
        source_size, size = (side.vocab_size for side in data.vocabularies)
        sizes = {source_size, size}
        parallel.require_divisible(config.parallel, config.model, sizes)
        self.layout = parallel.make_layout(config.parallel)
        self.meter = Meter(config, size, self.layout.devices)
        self.model = Transformer(config.model, size, source_vocab_size=source_size)
        self.optimizer = optimizers.make_optimizer(train, config.model.d_model)
        self.schedule = optimizers.learning_rate(train, config.model.d_model)
        kept_newest = train.kept_newest if hosts.first else 0
        self.checkpoints = Checkpoints(workdir, report, kept_newest)
        kept = read_shapes(workdir) if self.checkpoints.steps() else None
        order = PackedBatches if config.batch.packing else TrainBatches
        self.batches = order(data.splits["train"], config.batch, train.seed, kept)
        self.shapes_are_kept = kept is not None
        self.updates_per_epoch = self.batches.batches_per_epoch / train.accumulate
        self.axes = state_axes(self.model, self.optimizer)
        self.programs = Programs(
            config, self.layout, self.model, self.optimizer, self.axes
        )
        self.compiled = 0  # shapes

    def restore(self) -> TrainState:
        """Returns the newest checkpoint's state, or a fresh one; on the host.

        The first update of a fresh one is compiled meanwhile.
        """
        shapes = state_shapes(self.model, self.optimizer)
        like = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), shapes)
        found = self.checkpoints.restore_newest(like.params, like.replace(params=None))
        if found is None:
            # Its second half runs outside of Python, so there is time for both.
            self.programs.begin(self.batches.batch(0))
            seed = self.config.train.seed
            return jax.device_get(init_state(self.model, self.optimizer, seed))
        _, params, training = found
        return training.replace(params=params)

    def ending(self, step: int) -> Ending:
        """Returns the limits of a run that goes on from `step`; starts its clock."""
        rows = read_rows(self.workdir, step) if step else []
        return Ending(self.config.train, self.updates_per_epoch, rows)

    def save(self, state: TrainState, metrics: dict[str, float] | None = None) -> None:
        """Saves a state that lies on devices; the first process writes it."""
        self.hosts.at("saving")
        host = self.layout.fetch(state)
        if not self.hosts.first:
            return
        training = host.replace(params=None)
        self.checkpoints.save(int(host.step), host.params, training, metrics or {})

    def compile(self, batches: Sequence[Batch], progress: TrainProgress) -> float:
        """Compiles the update for shapes that come for the first time.

        Each waits for its first batch, so that a run begins at once: tracing takes
        seconds a shape, even where the program is found in the user's cache.

        Returns:
            The seconds that took.
        """
        seconds = 0.0
        for batch in batches:
            started = time.monotonic()
            self.hosts.at("compiling")
            if not self.programs.compile(batch):
                continue
            # Some transports give up on a process that comes half a minute later.
            self.hosts.gather("a compiled update", None)
            self.compiled += 1
            took = time.monotonic() - started
            seconds += took
            (rows, source), target = batch.source.shape, batch.target_in.shape[1]
            progress.say(
                f"compiled {rows}x({source}+{target}), {self.compiled} of "
                f"{len(self.batches.shapes)}, {took:.1f} s"
            )
        return seconds

    def update(
        self, state: TrainState, batches: Sequence[Batch]
    ) -> tuple[TrainState, StepMetrics]:
        """Takes one update with `train.accumulate` host batches."""
        return self.programs.update(state, batches)

    def validate(self, state: TrainState, progress: TrainProgress) -> dict[str, float]:
        """Returns loss and BLEU of the validation split, by real decodes."""
        self.hosts.at("evaluating")
        corpus = self.data.splits["valid"]
        shapes = self.batches.eval_shapes
        batches = eval_batches(corpus, shapes, self.config.batch.tokens)
        sums = [self.programs.evaluate(state, batch) for batch in batches]
        translator = self._translator
        translator.params = (state.params,)
        source, target = corpus.text()
        lowercase = self.data.vocabularies.target.lowercase
        score, _ = evaluate(
            translator, source, [target], self.config.decode, lowercase=lowercase
        )
        values = loss_metrics(sums)
        progress.say(
            f"valid  loss {values['nll']:.3f}  perplexity {values['perplexity']:.2f}  "
            f"BLEU {score.bleu:.2f} [{score.bleu_signature}]  "
            f"chrF {score.chrf:.2f} [{score.chrf_signature}]"
        )
        return values | {"bleu": score.bleu, "chrf": score.chrf}

    def not_finite(
        self, state: TrainState, batch: Batch, metrics: StepMetrics, step: int
    ) -> TrainingError:
        """Returns the error that says what was not finite, after too many updates."""
        params = self.layout.fetch(state.params)
        where = first_bad_output(params, batch, self.model)
        what = value_names(params)[int(metrics.first_bad)]
        most = self.config.train.max_bad_updates
        self.checkpoints.wait()
        good = self.checkpoints.steps()
        return TrainingError(
            f"{what} is not finite, for {most} updates in a row at step {step} "
            "(config.train.max_bad_updates)"
            + (f"; in the forward pass {where} is the first" if where else "")
            + f"; the last good checkpoint is {good[-1] if good else 'none'}; lower "
            "config.train.learning_rate or raise config.train.warmup_steps"
        )

    @functools.cached_property
    def _translator(self) -> Translator:
        return Translator([self.config.model], self.data.vocabularies, [], self.layout)


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM in a list; a second one of a kind acts as usual."""
    received: list[int] = []
    before = {}

    def note(signum: int, frame: Any) -> None:
        received.append(signum)
        signal.signal(signum, before[signum])

    for signum in (signal.SIGINT, signal.SIGTERM):
        before[signum] = signal.signal(signum, note)
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def train(
    config: Config,
    workdir: pathlib.Path,
    init: InitFrom | None = None,
    hosts: Hosts = ALONE,
) -> None:
    """Trains, or goes on training, in `workdir`; returns when the run is over.

    Args:
        config: the run's config.
        workdir: the run's folder.
        init: an old run whose parameters a new one begins with.
        hosts: the processes that train together, all with the same arguments.

    Raises:
        UserError: config, data, checkpoint or numerics are wrong.
        Stopped: SIGINT or SIGTERM came; everything is saved.
    """
    parallel.cache_compilations()
    progress = TrainProgress(0, config.train.steps, quiet=not hosts.first)
    hosts.at(PREPARING)

    def open_run() -> tuple[InitFrom | None, Trainer, TrainState]:
        new = still_to_load(init, workdir, progress.say)
        data = prepare(config, workdir, progress.say, progress.track)
        trainer = Trainer(config, workdir, data, progress.say, hosts)
        return new, trainer, trainer.restore()

    try:
        new, trainer, state = hosts.in_turn("the opened run", open_run)
        with contextlib.closing(trainer.checkpoints), _signals() as signals:
            step = int(state.step)
            ending = trainer.ending(step)
            progress.end_at(ending.last_step)
            if over := hosts.gather("the ending", ending.reason(step, ending.late))[0]:
                progress.say(f"finished: {workdir} is at step {step}: {over}")
                return
            for line in start_block(trainer, state):
                progress.say(line)
            if new:
                params = initial_params(
                    new,
                    workdir,
                    trainer.data.vocabularies,
                    state.params,
                    progress.say,
                    record=hosts.first,
                )
                state = state.replace(params=params)
            if hosts.first:
                write_shapes(workdir, trainer.batches.shapes)
            if new:
                trainer.save(trainer.layout.place(state, trainer.axes))
            _run(trainer, state, ending, progress, Stops(hosts, ending, signals))
    finally:
        progress.close()


def start_block(trainer: Trainer, state: TrainState) -> list[str]:
    """Returns the lines that say what is about to run."""
    config, batches = trainer.config, trainer.batches
    devices = len(trainer.layout.devices)
    parameters = sum(x.size for x in jax.tree.leaves(state.params))
    shapes = ", ".join(f"{s.rows}x({s.source}+{s.target})" for s in batches.shapes)
    shapes += ", packed" if config.batch.packing else ""
    updates = trainer.updates_per_epoch
    source, target = (n / updates for n in batches.tokens_per_epoch)
    tokens, hosts = config.train.accumulate * config.batch.tokens, trainer.hosts.count
    share = "host" if hosts == 1 else f"{hosts} hosts x {tokens // hosts}"
    lines = [
        f"devices     {devices} {jax.devices()[0].platform}, {trainer.layout}, "
        f"{compute_dtype(config.model).name} compute, JAX {jax.__version__}",
        f"batch       {tokens} tokens a side at "
        f"most, global = {share}; {config.batch.tokens // devices} a device"
        + (f", {config.train.accumulate} times" if config.train.accumulate > 1 else ""),
        f"model       {parameters:,} parameters, vocabulary "
        f"{trainer.data.vocabularies.sizes}",
        f"shapes      {len(batches.shapes)} to compile: {shapes}",
        f"epoch       {updates:g} updates of {source:,.0f} + "
        f"{target:,.0f} tokens on average, padding {100 * batches.padding:.1f} %",
    ]
    for split, corpus in trainer.data.splits.items():
        counts = corpus.manifest["counts"]
        left = ", ".join(f"{counts[why]} {why}" for why in ("empty", "too_long"))
        lines.append(
            f"{split:11} {counts['kept']:,} pairs kept of {counts['read']:,} ({left})"
        )
        if spelling := corpus.spelling():
            lines.append(f"{'':11} {spelling}")
    lines.append(f"checkpoints {keep_rule(config.train)}")
    if int(state.step):
        lines.append(f"resuming    at step {int(state.step)}")
        if not trainer.shapes_are_kept:
            lines.append(
                "warning: this run began in a version that chose other batch shapes; "
                "from here on its pairs come in a new order"
            )
    return lines


def keep_rule(config: TrainConfig) -> str:
    """Says when checkpoints are written, and which of them are kept."""
    kept = f"the newest {config.kept_newest} are kept"
    if config.average_last > config.keep_last:
        kept += f" (config.train.keep_last is {config.keep_last})"
    if config.average_last:
        kept += f", of which {config.average_last} for the average"
    return (
        f"every {config.save_every} updates and at each evaluation; {kept}, and the "
        "best by valid BLEU"
    )


def _run(
    trainer: Trainer,
    state: TrainState,
    ending: Ending,
    progress: TrainProgress,
    stops: Stops,
) -> None:
    """Updates from `state` (on the host) until the run is over or stopped."""
    config, step, hosts = trainer.config.train, int(state.step), trainer.hosts
    writer = MetricsWriter(trainer.workdir, step) if hosts.first else NoWriter()
    state = trainer.layout.place(state, trainer.axes)
    pending: list[Any] = []
    trace = Trace(trainer.workdir, step, config.profile_steps, progress.say)
    saved, logged, waited, over = step, time.monotonic(), 0.0, ""
    with contextlib.closing(writer), contextlib.ExitStack() as stack:
        stack.callback(trace.close)
        batches = trainer.batches.from_batch(step * config.accumulate)
        stack.callback(batches.close)  # pyright: ignore[reportAttributeAccessIssue]
        while not over and not stops.ask():
            hosts.at("waiting for data", step)
            asked = time.monotonic()
            some = list(itertools.islice(batches, config.accumulate))
            waited += time.monotonic() - asked
            logged += trainer.compile(some, progress)
            hosts.at("in an update", step + 1)
            trainer.meter.add(some)
            with trace.update(step + 1, state):
                state, metrics = trainer.update(state, some)
            step += 1
            trace.end(metrics)
            pending.append(metrics)
            progress.advance(step)
            trainer.checkpoints.check()
            if len(pending) > RUN_AHEAD:
                jax.block_until_ready(pending[-1 - RUN_AHEAD].sums.tokens)
            over = ending.reason(step, stops.late)
            due = {
                name: step % every == 0 or bool(over)
                for name, every in (
                    ("log", config.log_every),
                    ("evaluate", config.eval_every),
                    ("save", config.save_every),
                )
            }
            if due["log"] or due["evaluate"] or due["save"]:
                fetched = [trainer.layout.fetch(m) for m in pending]
                seconds = time.monotonic() - logged
                values = train_metrics(fetched, seconds, waited)
                values |= trainer.meter.take(len(fetched), seconds)
                updates = step - values["bad_updates"]
                values["learning_rate"] = float(trainer.schedule(updates - 1))
                values["hours"] = ending.hours
                writer.write("train", step, values)
                progress.log(len(fetched), seconds, values, 3600 * ending.hours_left)
                pending, logged, waited = [], time.monotonic(), 0.0
                if int(fetched[-1].bad_in_a_row) >= config.max_bad_updates:
                    raise trainer.not_finite(state, some[-1], fetched[-1], step)
            valid: dict[str, float] = {}
            if due["evaluate"] and "valid" in trainer.data.splits:
                valid = trainer.validate(state, progress)
                writer.write("valid", step, valid)
                ending.evaluated(step, valid)
                over = over or ending.reason(step, stops.late)
            if due["save"] or due["evaluate"]:
                trainer.save(state, valid)
                saved = step
                logged = time.monotonic()
        if saved < step:
            trainer.save(state)
            writer.write("event", step, {"event": "stopped", "hours": ending.hours})
        hosts.at("waiting for the last save")
        trainer.checkpoints.wait()
        if over:
            progress.say(f"finished at step {step}: {over}")
    if stops.signum and not over:
        raise Stopped(stops.signum, step)
