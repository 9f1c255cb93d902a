"""A new run from the parameters of an old one; the old one's folder is only read.

    WORKDIR/init_from.json    the run and the checkpoints that the parameters came from

The parameters are saved as step 0 at once, so a resume needs the old run no more.
"""

import dataclasses
import json
import pathlib
from typing import Any

from transformer_jax.checkpoint import Report, load_params, require_same_shapes
from transformer_jax.config_file import read_workdir
from transformer_jax.data.vocabularies import Vocabularies, model_files
from transformer_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class InitFrom:
    """Which parameters a new run begins with."""

    workdir: pathlib.Path
    checkpoint: str = "best"  # best, last, average or a step


def still_to_load(
    init: InitFrom | None, workdir: pathlib.Path, report: Report
) -> InitFrom | None:
    """Returns where the parameters of `workdir` are yet to come from, if anywhere.

    A run that was killed before step 0 was saved remembers it without the flag.

    Raises:
        ConfigError: it holds checkpoints and began otherwise.
    """
    record = workdir / "init_from.json"
    try:
        before = json.loads(record.read_bytes()) if record.exists() else {}
    except ValueError as error:
        raise ConfigError(f"{record} is not JSON: {error}; restore it") from error
    checkpoints = workdir / "checkpoints"
    if not any(path.name.isdecimal() for path in checkpoints.glob("*")):
        if init or not before:
            return init
        return InitFrom(pathlib.Path(before["workdir"]), before["checkpoint"])
    if not init:
        return None
    wanted = [str(init.workdir.resolve()), init.checkpoint]
    if [before.get("workdir"), before.get("checkpoint")] == wanted:
        report(f"--init_from={init.workdir} is of no effect: the run goes on")
        return None
    began = " from ".join(["began", before["workdir"]] if before else ["began anew"])
    raise ConfigError(
        f"--init_from={init.workdir}: {workdir} already holds checkpoints of a run "
        f"that {began}; leave --init_from out to go on with it, or give another "
        "--workdir"
    )


def initial_params(
    init: InitFrom,
    workdir: pathlib.Path,
    vocabularies: Vocabularies,
    fresh: Any,
    report: Report,
    record: bool = True,
) -> Any:
    """Loads the parameters that a new run begins with, and records where from.

    Args:
        init: the old run.
        workdir: the new run's folder.
        vocabularies: of the new run.
        fresh: parameters of the new run's model.
        report: is told where they come from.
        record: whether this process writes `init_from.json`.

    Returns:
        A tree like `fresh`.

    Raises:
        ConfigError: the vocabularies differ.
        CheckpointError: there is no such checkpoint, or it is of another model.
    """
    loaded = load_params(init.workdir, init.checkpoint, report)
    joint = read_workdir(init.workdir).tokenizer.joint
    theirs = model_files(init.workdir, joint)
    if Vocabularies.load(theirs).fingerprint != vocabularies.fingerprint:
        raise ConfigError(
            f"--init_from={init.workdir}: its vocabulary is not that of {workdir}; set "
            f"config.tokenizer.model_path to {','.join(map(str, theirs))}"
            + ("" if joint else " and config.tokenizer.joint to false")
        )
    require_same_shapes(fresh, loaded.params, f"--init_from={init.workdir}")
    steps = ", ".join(map(str, loaded.steps))
    report(f"parameters  of {init.workdir}, {loaded.name} (step {steps})")
    if record:
        content = {
            "workdir": str(init.workdir.resolve()),
            "checkpoint": init.checkpoint,
            "steps": loaded.steps,
        }
        partial = workdir / "init_from.json.partial"
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        partial.replace(workdir / "init_from.json")
    return loaded.params
