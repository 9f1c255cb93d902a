"""Checkpoints: save, restore the newest whole one, choose for decoding, average.

    WORKDIR/checkpoints/STEP/params     parameters
                            /training   step, moments, counters
                            /metrics    validation loss and BLEU, where evaluated
    WORKDIR/average/                    mean parameters, and the steps they come from

Orbax writes a checkpoint in the background, under another name, and renames it when it
is whole, so all of it counts or nothing. The rest of a run's position follows from it:
the learning rate from Adam's count (updates that were not skipped), the random keys
and the next batch from the step and `train.seed`, and of `metrics.jsonl` the rows up to
the step count, the others are dropped. Kept are the newest `train.kept_newest` and the
best by validation BLEU.
"""

import contextlib
import dataclasses
import json
import pathlib
import shutil
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from transformer_jax.errors import CheckpointError

Report = Callable[[str], None]
Tree = Any

SAVE_WARNING, SAVE_LIMIT = 60.0, 1200.0  # seconds that a save may take; then it failed


def _bleu(metrics: Mapping[str, float]) -> float:
    return metrics["bleu"]


def _one_process() -> ocp.options.MultiprocessingOptions:
    """Returns options by which Orbax waits for no other process.

    Every process reads for itself, and one alone saves NumPy arrays, so a checkpoint
    is the same whatever the number of processes.
    """
    if jax.process_count() == 1:
        return ocp.options.MultiprocessingOptions()
    number = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=number,
        active_processes={number},
        barrier_sync_key_prefix=f"process{number}",
    )


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1] if str(error).strip() else repr(error)


class Checkpoints:
    """The checkpoints of a workdir."""

    def __init__(
        self, workdir: pathlib.Path, report: Report, keep_last: int = 0
    ) -> None:
        """Opens `workdir/checkpoints`, made where missing.

        Args:
            workdir: the run's folder.
            report: is warned of each damaged checkpoint.
            keep_last: newest checkpoints that are kept when another is saved; 0: none
                is saved, and nothing in the folder is touched, where a run may write.

        Raises:
            CheckpointError: one that must not be touched is damaged.
        """
        self.folder = (workdir / "checkpoints").absolute()
        self._report = report
        if keep_last:
            self.folder.mkdir(parents=True, exist_ok=True)
        self._begun = 0.0  # when the last save began
        self._stuck = False  # whether it will never be said to be over
        for step, metrics in self._metrics().items():
            if metrics is None and keep_last:  # Orbax would not open the folder
                self._set_aside(step, "its metrics cannot be read")
            elif metrics is None:
                raise CheckpointError(
                    f"the metrics of checkpoint {step} in {self.folder} are damaged; "
                    "transformer-jax train sets it aside when it goes on"
                )
        one = _one_process()
        policies = checkpoint_managers.preservation_policy
        keep = policies.AnyPreservationPolicy(
            [
                policies.LatestN(keep_last),
                policies.BestN(
                    get_metric_fn=_bleu, n=1, keep_checkpoints_without_metrics=False
                ),
            ]
        )
        self._manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=keep,
                best_fn=_bleu,  # without it metrics are not written
                cleanup_tmp_directories=bool(keep_last),
                read_only=not keep_last,
                create=False,
                multiprocessing_options=one,
            ),
            item_handlers={
                "params": ocp.StandardCheckpointHandler(multiprocessing_options=one),
                "training": ocp.StandardCheckpointHandler(multiprocessing_options=one),
            },
        )

    def _metrics(self) -> dict[int, Mapping[str, float] | None]:
        """Returns those of each evaluated checkpoint, None where they are damaged."""
        found = {}
        for file in self.folder.glob("*/metrics/metrics"):
            step = file.parents[1].name
            if step.isdecimal():
                try:
                    found[int(step)] = json.loads(file.read_bytes())
                except (ValueError, OSError):
                    found[int(step)] = None
        return found

    def steps(self) -> list[int]:
        """Returns the steps of whole checkpoints, oldest first."""
        return sorted(self._manager.all_steps())

    def save(
        self, step: int, params: Tree, training: Tree, metrics: Mapping[str, float]
    ) -> None:
        """Starts to save in the background; waits for an earlier save first.

        Args:
            step: updates made.
            params: parameters, NumPy arrays.
            training: the rest of the state.
            metrics: of the validation set, `bleu` among them; empty if not evaluated.

        Raises:
            CheckpointError: this or the earlier save could not be written.
        """
        if not self.folder.is_dir():  # Orbax would notice only minutes later
            self._stuck = True
            raise self._save_error(FileNotFoundError("the folder is gone"))
        self.wait()
        self._begun = time.monotonic()
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(params),
                    training=ocp.args.StandardSave(training),
                ),
                metrics=dict(metrics) or None,
                force=True,  # even where a later step was saved before
            )
        except Exception as error:
            self._stuck = True
            raise self._save_error(error) from error

    def check(self) -> None:
        """Raises CheckpointError if the last save failed or hangs; does not wait."""
        late = time.monotonic() - self._begun > SAVE_LIMIT
        if late or not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Waits until the last save is on disk.

        Raises:
            CheckpointError: it failed, or takes more than `SAVE_LIMIT` seconds.
        """
        warned = False
        while self._manager.is_saving_in_progress():
            seconds = time.monotonic() - self._begun
            if seconds > SAVE_LIMIT:
                self._stuck = True
                late = f"it is not written after {seconds:.0f} seconds"
                raise self._save_error(TimeoutError(late))
            if seconds > SAVE_WARNING and not warned:
                warned = True
                self._report(
                    f"warning: a checkpoint is not written after {seconds:.0f} "
                    f"seconds; the run waits for it up to {SAVE_LIMIT:.0f}"
                )
            time.sleep(0.01)
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._save_error(error) from error

    def _save_error(self, error: Exception) -> CheckpointError:
        names = [path.name for path in self.folder.glob("*")]  # not what Orbax expects
        whole = sorted(int(name) for name in names if name.isdecimal()) or "none"
        return CheckpointError(
            f"a checkpoint could not be written to {self.folder}: {_last_line(error)}; "
            f"the earlier ones ({whole}) are whole; free space or mend the folder and "
            "start again"
        )

    def restore_newest(
        self, params: Tree, training: Tree
    ) -> tuple[int, Tree, Tree] | None:
        """Restores the newest whole checkpoint.

        Args:
            params: a tree of arrays of the wanted shapes.
            training: likewise.

        Returns:
            Step, parameters and the rest of the state; None where there is none yet.

        Raises:
            CheckpointError: there are checkpoints, but none is whole, or they are of
                another model.
        """
        steps, damaged = self.steps(), {}
        for step in reversed(steps):
            try:
                saved = self._manager.restore(
                    step,
                    args=ocp.args.Composite(
                        params=ocp.args.StandardRestore(),
                        training=ocp.args.StandardRestore(training),
                    ),
                )
            except Exception as error:
                damaged[step] = (str(error).strip() or repr(error)).splitlines()[0]
                continue
            require_same_shapes(params, saved["params"], f"checkpoint {step}")
            for bad_step, reason in damaged.items():
                self._set_aside(bad_step, reason)
            self._manager.reload()
            return step, saved["params"], saved["training"]
        if steps:
            raise CheckpointError(
                f"none of the checkpoints {steps} in {self.folder} is whole; nothing "
                "was deleted; restore one, or give another --workdir"
            )
        return None

    def _set_aside(self, step: int, reason: str) -> None:
        """Moves a damaged checkpoint out of the way, so the step can be saved again."""
        aside = self.folder.with_name("damaged") / f"{step}-{time.time_ns()}"
        aside.parent.mkdir(exist_ok=True)
        (self.folder / str(step)).rename(aside)
        self._report(
            f"warning: checkpoint {step} is damaged, passed over and moved to {aside}: "
            f"{reason}"
        )

    def params(self, step: int) -> Tree:
        """Returns the parameters of checkpoint `step`, as NumPy arrays.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        try:
            saved = self._manager.restore(
                step, args=ocp.args.Composite(params=ocp.args.StandardRestore())
            )
        except Exception as error:
            raise CheckpointError(
                f"checkpoint {step} in {self.folder} cannot be read: "
                f"{(str(error).strip() or repr(error)).splitlines()[0]}; whole ones "
                f"may be among {self.steps()}"
            ) from error
        return jax.tree.map(np.asarray, saved["params"])

    def best_step(self) -> int | None:
        """Returns the step with the highest validation BLEU, the last on ties."""
        scored = [
            (_bleu(found), step) for step, found in self._metrics().items() if found
        ]
        return max(scored)[1] if scored else None

    def close(self) -> None:
        """Ends background work; a save that failed was reported before."""
        with contextlib.suppress(CheckpointError):
            if not self._stuck:
                self.wait()
        if not self._stuck:
            self._manager.close()


@dataclasses.dataclass(frozen=True)
class Loaded:
    """Parameters for decoding, and which checkpoints they come from."""

    params: Tree
    name: str  # best, last, average or the step
    steps: list[int]


def load_params(workdir: pathlib.Path, which: str, report: Report) -> Loaded:
    """Loads the parameters to decode with.

    Args:
        workdir: the run's folder.
        which: `best`, `last`, `average` or a step.
        report: is warned of damaged checkpoints.

    Returns:
        The parameters; `best` is the last one where none was evaluated.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    if which == "average":
        return _load_average(workdir)
    if not (workdir / "checkpoints").is_dir():
        raise CheckpointError(f"{workdir} holds no checkpoints; train there first")
    checkpoints = Checkpoints(workdir, report)
    try:
        steps = checkpoints.steps()
        if not steps:
            raise CheckpointError(f"{workdir} holds no checkpoint yet; train longer")
        if which == "best":
            step = checkpoints.best_step() or steps[-1]
        elif which == "last":
            step = steps[-1]
        elif which.isdecimal() and int(which) in steps:
            step = int(which)
        else:
            raise CheckpointError(
                f"--checkpoint={which}: there are best, last, average, and the steps "
                f"{', '.join(map(str, steps))}"
            )
        return Loaded(checkpoints.params(step), which, [step])
    finally:
        checkpoints.close()


def _load_average(workdir: pathlib.Path) -> Loaded:
    folder = (workdir / "average").absolute()
    if not folder.is_dir():
        raise CheckpointError(
            f"{workdir} holds no average; run transformer-jax average "
            f"--workdir={workdir}"
        )
    saved = ocp.StandardCheckpointer().restore(folder)
    steps = [int(step) for step in saved["steps"]]
    return Loaded(jax.tree.map(np.asarray, saved["params"]), "average", steps)


def average(workdir: pathlib.Path, last: int, report: Report) -> list[int]:
    """Writes the mean of the parameters of the last checkpoints (section 6.1).

    Args:
        workdir: the run's folder.
        last: how many.
        report: is warned of damaged checkpoints.

    Returns:
        The steps averaged. `WORKDIR/average` holds the mean, taken in float64 and
        stored in float32, for decoding only.

    Raises:
        CheckpointError: there are fewer, or their trees differ.
    """
    checkpoints = Checkpoints(workdir, report)
    try:
        steps = checkpoints.steps()
        if not 1 <= last <= len(steps):
            raise CheckpointError(
                f"--last={last}: {workdir} holds {len(steps)} checkpoints"
                f" ({', '.join(map(str, steps)) or 'none'}); ask for fewer, "
                "or train with a larger config.train.keep_last"
            )
        mean = average_trees({step: checkpoints.params(step) for step in steps[-last:]})
    finally:
        checkpoints.close()
    tree = {"params": mean, "steps": np.asarray(steps[-last:], np.int64)}
    final = (workdir / "average").absolute()
    partial, old = (final.with_name(f"average.{name}") for name in ("partial", "old"))
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(partial, tree, force=True)
    except Exception as error:
        raise CheckpointError(
            f"the average could not be written to {final}: {_last_line(error)}; an "
            "earlier one is as it was; free space or mend the folder"
        ) from error
    shutil.rmtree(old, ignore_errors=True)
    if final.exists():
        final.rename(old)
    partial.rename(final)
    shutil.rmtree(old, ignore_errors=True)
    return steps[-last:]


def average_trees(trees: Mapping[int, Tree]) -> Tree:
    """Returns the arithmetic mean of trees of equal shapes, float32.

    Raises:
        CheckpointError: a tree differs from the first; it names the first such leaf.
    """
    first, *_ = trees.values()
    for step, tree in trees.items():
        require_same_shapes(first, tree, f"checkpoint {step}")

    def mean(*leaves: np.ndarray) -> np.ndarray:
        return np.asarray(np.mean(leaves, axis=0, dtype=np.float64), np.float32)

    return jax.tree.map(mean, *trees.values())


def require_same_shapes(wanted: Tree, found: Tree, origin: str) -> None:
    """Raises CheckpointError naming the first array that differs or is missing."""

    def shapes(tree: Tree) -> dict[str, tuple[int, ...]]:
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        return {
            jax.tree_util.keystr(path, simple=True, separator="/"): np.shape(leaf)
            for path, leaf in leaves
        }

    wanted_shapes, found_shapes = shapes(wanted), shapes(found)
    for name in sorted(wanted_shapes.keys() | found_shapes.keys()):
        if wanted_shapes.get(name) != found_shapes.get(name):
            raise CheckpointError(
                f"{origin} is of another model: {name} is "
                f"{found_shapes.get(name, 'missing')}, here it is "
                f"{wanted_shapes.get(name, 'missing')}"
            )
