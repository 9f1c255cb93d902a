"""The launcher for Slurm: the job it writes, and what the job does when it runs."""

import os
import pathlib
import pty
import shlex
import signal
import subprocess
import time

import pytest
from stand_ins import World, signals_as_usual

HOSTILE = [
    '--config.a.quotes=it\'s "so" `touch pwned`',
    "--config.a.shell=$(touch pwned); touch pwned & $HOME ~ * ! # \\",
    "--config.a.line=one\ntouch pwned\n#SBATCH --nodes=99",
    "--config.a.empty=",
]


def options(world: World, *more: str) -> list[str]:
    program = world.folder / "worker-bin" / "transformer-jax"
    given = "--workdir=a run", "--config=configs/base.py", "--time=1-12:00:00"
    return [*given, f"--program={program}", *more]


def submit(world: World, *more: str) -> str:
    """Submits a job and returns what was written."""
    done = world.run("slurm.sh", *options(world, "--yes", *more))
    assert done.returncode == 0, done.stderr
    return (world.folder / "a run" / "job.sbatch").read_text()


def directives(job: str) -> set[str]:
    """Returns the options that Slurm reads: those before the first command."""
    lines = job.splitlines()
    first = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return {line.removeprefix("#SBATCH --") for line in lines[1:first]}


def start(world: World, **variables: str) -> subprocess.Popen:
    """Runs the job as Slurm does: a copy, in the folder that --chdir names."""
    copy = world.folder / "spooled"
    copy.write_text((world.folder / "a run" / "job.sbatch").read_text())
    environment = {**world.environment(), "SLURM_JOB_ID": "7", **variables}
    return subprocess.Popen(
        ["bash", str(copy)],
        env=environment,
        cwd=world.folder,
        preexec_fn=signals_as_usual,
    )


def steps(world: World) -> pathlib.Path:
    return world.folder / "a run" / "checkpoints" / "steps"


def test_the_job(world):
    job = submit(
        world, "--nodes=2", "--gpus-per-node=4", "--partition=gpu", "--account=me"
    )
    assert directives(job) == {
        "job-name=transformer-jax",
        "nodes=2",
        "ntasks-per-node=4",
        "gpus-per-node=4",
        "cpus-per-task=8",
        "time=1-12:00:00",
        "requeue",
        "open-mode=append",
        "signal=B:TERM@120",
        "partition=gpu",
        "account=me",
    }
    folder = world.folder / "a run"
    assert world.calls("sbatch") == [
        [
            f"--chdir={world.repository}",
            f"--output={folder}/slurm-%j.log",
            f"{folder}/job.sbatch",
        ]
    ]
    world.says("program", [0])
    assert start(world).wait(300) == 0
    (srun,) = world.calls("srun")
    assert srun[:2] == ["--ntasks-per-node=4", "--cpus-per-task=8"]
    assert "--gpu-bind=none" in srun and "--kill-on-bad-exit=0" in srun
    assert world.calls("transformer-jax") == [
        [
            "train",
            "--config=configs/base.py",
            f"--workdir={folder}",
            "--distributed=auto",
        ]
    ]
    assert world.calls("scontrol") == []


def test_one_gpu_is_no_cluster(world):
    assert "--distributed" not in submit(world)


def test_arguments_reach_the_program_as_they_are(world):
    job = submit(world, "--", *HOSTILE)
    assert "nodes=1" in directives(job) and "nodes=99" not in directives(job)
    assert start(world).wait(300) == 0
    assert world.calls("transformer-jax")[0][3:] == HOSTILE
    assert not list(world.folder.rglob("pwned"))


@pytest.mark.parametrize(
    ("state", "count", "queued"),
    [("RUNNING", "0", True), ("RUNNING", "3", False), ("COMPLETING", "0", False)],
)
def test_a_job_that_stops_in_time_is_queued_again(world, state, count, queued):
    """At the limit of requeues it is not; nor where Slurm ends it, as with scancel."""
    submit(world, "--requeues=3")
    world.says("program", ["waits"])
    world.says("job-state", state)
    process = start(world, SLURM_RESTART_COUNT=count)
    while not steps(world).exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    if state != "RUNNING":  # Slurm itself signals the steps
        time.sleep(0.5)
        os.kill(int((world.folder / "srun.pid").read_text()), signal.SIGTERM)
    assert process.wait(300) == 143
    assert steps(world).read_text() == "step\nsaved after 1 signal\n"
    assert world.calls("scontrol") == ([["requeue", "7"]] if queued else [])
    if state == "RUNNING":
        assert world.calls("scancel") == [["--signal=TERM", "7"]]


@pytest.mark.parametrize("code", [1, 2, 137])
def test_a_job_that_fails_is_not_queued_again(world, code):
    submit(world)
    world.says("program", [code])
    assert start(world).wait(300) == code
    assert world.calls("scontrol") == []


def test_dry_run_prints_the_job_and_writes_nothing(world):
    done = world.run("slurm.sh", *options(world, "--dry-run", "--", *HOSTILE))
    assert done.returncode == 0 and not (world.folder / "a run").exists()
    assert world.calls("sbatch") == []
    assert shlex.split(done.stderr)[0] == "sbatch"
    assert done.stdout == submit(world, "--", *HOSTILE)


def test_sbatch_fails(world):
    world.says("sbatch-fails", "sbatch: error: invalid partition specified: gpu")
    done = world.run("slurm.sh", *options(world, "--yes"))
    assert done.returncode == 1 and "invalid partition" in done.stderr
    assert "error: sbatch did not take" in done.stderr


def test_asks_before_it_submits(world):
    done = world.run("slurm.sh", *options(world))
    assert done.returncode == 2 and "no terminal" in done.stderr
    for answer, calls in {"no": 0, "yes": 1}.items():
        controller, terminal = pty.openpty()
        process = world.start("slurm.sh", *options(world), stdin=terminal, stderr=-1)
        os.write(controller, f"{answer}\n".encode())
        _, err = process.communicate(timeout=300)
        assert "1 x 1 GPUs for 1-12:00:00" in err
        assert len(world.calls("sbatch")) == calls


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--time=soon"], "--time=soon is not a time such as 12:00:00"),
        (["--nodes=0"], "--nodes=0 is not a whole number above 0"),
        (["--partition=a\n#SBATCH --nodes=99"], "is not a name"),
        (["--workdir=100%"], "has %, \\ or a control character"),
        (["--program=missing"], "missing cannot be run"),
    ],
)
def test_mistakes(world: World, more: list[str], message: str) -> None:
    done = world.run("slurm.sh", *options(world), *more, "--yes")
    assert done.returncode == 2 and message in done.stderr
    assert done.stderr.count("\n") == 1 and world.calls("sbatch") == []
