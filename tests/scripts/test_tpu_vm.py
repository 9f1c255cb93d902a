"""The launcher for TPU VMs, from the options to the deletion."""

import os
import pty
import shlex
import signal
import subprocess
import time

import pytest
from stand_ins import World

OPTIONS = (
    "--name=me --zone=us-west4-a --type=v5litepod-8 --bucket=gs://b-1/run "
    "--config=configs/base.py --copy-every=1 --poll=0"
).split()
RUN = [*OPTIONS, "--yes"]
WHERE = ["--zone=us-west4-a", "--quiet"]


def verbs(world: World) -> list[str]:
    """Returns what was done with VMs, in order, looks left out."""
    calls = [call for call in world.calls("gcloud") if call[0] == "compute"]
    return [call[3] for call in calls if call[3] not in ("describe", "ssh", "scp")]


def trainings(world: World) -> list[list[str]]:
    return [call for call in world.calls("transformer-jax") if call[0] == "train"]


def steps(world: World) -> str:
    return (world.bucket / "b-1" / "run" / "checkpoints" / "steps").read_text()


def there(world: World, state: str = "READY", kind: str = "v5litepod-8") -> None:
    world.says("vm", {"state": state, "type": kind})


def gone(world: World) -> bool:
    return not (world.folder / "vm.json").exists()


def wait_for_training(world: World, process: subprocess.Popen) -> None:
    """Waits until the program trains."""
    while process.poll() is None and not list(
        world.folder.glob("vm/0/runs/*/*/*/steps")
    ):
        time.sleep(0.05)
    assert process.poll() is None


def test_makes_trains_scores_deletes(world):
    done = world.run("tpu_vm.sh", *RUN, "--spot", "--project=p-1")
    assert done.returncode == 0, done.stderr
    assert verbs(world) == ["create", "delete"] and gone(world)
    create = next(call for call in world.calls("gcloud") if call[3] == "create")
    assert create[4:] == [
        "me",
        "--accelerator-type=v5litepod-8",
        "--version=v2-alpha-tpuv5-lite",
        "--spot",
        "--scopes=https://www.googleapis.com/auth/cloud-platform",
        "--zone=us-west4-a",
        "--project=p-1",
        "--quiet",
    ]
    assert "training goes on after 0 steps" in done.stdout
    assert "average on the default\nevaluate on the default\n" in done.stdout
    workdir = f"--workdir={world.folder}/vm/0/runs/b-1/run"
    assert world.calls("transformer-jax") == [
        ["train", "--config=configs/base.py", workdir],
        ["average", workdir, "--last=5"],
        ["evaluate", workdir, "--checkpoint=average", "--paper"],
    ]
    assert world.calls("pip")[0][-2:] == ["--editable", ".[tpu]"]
    assert steps(world) == "step\n"
    copied = {path.name for path in (world.bucket / "b-1").rglob("*")}
    assert copied == {
        "run",
        "checkpoints",
        "steps",
        "launched.txt",
    }  # nothing half done


def test_uses_a_vm_that_is_ready(world):
    there(world)
    assert world.run("tpu_vm.sh", *RUN, "--evaluate=none").returncode == 0
    assert verbs(world) == ["delete"]
    assert len(world.calls("transformer-jax")) == 1


def test_leaves_a_vm_of_another_type_alone(world):
    there(world, kind="v4-8")
    done = world.run("tpu_vm.sh", *RUN)
    assert done.returncode == 2 and "me is a v4-8" in done.stderr
    assert verbs(world) == [] and not gone(world)


def test_leaves_a_stopped_vm_alone(world):
    there(world, "STOPPED")
    done = world.run("tpu_vm.sh", *RUN)
    assert done.returncode == 2 and "me is STOPPED" in done.stderr
    assert verbs(world) == []


@pytest.mark.slow
@pytest.mark.parametrize("state", ["PREEMPTED", "TERMINATED"])
def test_makes_a_preempted_vm_anew(world, state):
    there(world, state)
    assert world.run("tpu_vm.sh", *RUN).returncode == 0
    assert verbs(world) == ["delete", "create", "delete"] and gone(world)


def test_no_quota_leaves_nothing(world):
    world.says("create-fails", "RESOURCE_EXHAUSTED: Quota 'TPUV5sLitepod' exhausted")
    done = world.run("tpu_vm.sh", *RUN)
    assert done.returncode == 1
    assert "Quota 'TPUV5sLitepod' exhausted" in done.stderr
    assert "error: cannot set up me" in done.stderr
    assert verbs(world) == ["create", "delete"] and gone(world)


def test_makes_nothing_where_nothing_can_be_known(world):
    world.says("describe-fails", "PERMISSION_DENIED: not yours")
    done = world.run("tpu_vm.sh", *RUN)
    assert done.returncode == 1 and "PERMISSION_DENIED" in done.stderr
    assert verbs(world) == []


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("pip-fails", "No matching distribution", "No matching distribution"),
        ("storage-rsync-fails", "403 no write", "cannot write to gs://b-1/run"),
        ("storage-ls-fails", "403 no read", "cannot read gs://b-1/run: ERROR: 403"),
    ],
)
def test_setting_up_fails(world, name, value, message):
    world.says(name, value)
    done = world.run("tpu_vm.sh", *RUN)
    assert done.returncode == 1 and message in done.stderr + done.stdout
    assert trainings(world) == [] and gone(world)


def test_training_fails(world):
    world.says("program", [3])
    done = world.run("tpu_vm.sh", *RUN)
    assert done.returncode == 3 and "exit code 3" in done.stderr
    assert verbs(world) == ["create", "delete"] and gone(world)
    assert len(world.calls("transformer-jax")) == 1
    assert steps(world) == "step\n"  # what there was is kept


@pytest.mark.slow
def test_evaluation_fails(world):
    world.says("evaluate-code", 2)
    done = world.run("tpu_vm.sh", *RUN)
    assert done.returncode == 1 and "evaluation failed" in done.stderr and gone(world)


def test_goes_on_after_a_preemption(world):
    world.says("program", ["preempted", "preempted", 0])
    done = world.run("tpu_vm.sh", *RUN)
    assert done.returncode == 0, done.stderr
    assert verbs(world) == ["create", "delete", "create", "delete", "create", "delete"]
    assert "training goes on after 2 steps" in done.stdout
    assert steps(world) == "step\n" * 3 and gone(world)


@pytest.mark.slow
def test_starts_again_on_the_same_vm_after_a_sigterm(world):
    world.says("program", [143, 0])
    done = world.run("tpu_vm.sh", *RUN)
    assert done.returncode == 0 and verbs(world) == ["create", "delete"]
    assert "training goes on after 1 steps" in done.stdout


@pytest.mark.slow
def test_gives_up_after_the_last_restart(world):
    world.says("program", ["preempted", "preempted", 0])
    done = world.run("tpu_vm.sh", *RUN, "--restarts=1")
    assert done.returncode == 1 and "stopped 2 times" in done.stderr
    assert gone(world) and steps(world) == "step\n" * 2


@pytest.mark.slow
def test_several_workers(world):
    world.says("hosts", 2)
    done = world.run("tpu_vm.sh", *RUN)
    assert done.returncode == 0, done.stderr
    assert sorted(trainings(world)) == [
        [
            "train",
            "--config=configs/base.py",
            "--distributed=auto",
            f"--workdir={world.folder}/vm/{worker}/runs/b-1/run",
        ]
        for worker in (0, 1)
    ]
    assert "evaluate on cpu" in done.stdout
    pushes = {call[2] for call in world.calls("gcloud") if call[1] == "rsync"}
    assert f"{world.folder}/vm/1/runs/b-1/run" not in pushes


@pytest.mark.slow
def test_what_cannot_be_copied_keeps_the_vm(world):
    process = start_waiting(world)
    world.says("storage-rsync-fails", "503 bucket on fire")
    (world.folder / "go-on").touch()
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1 and "could not be copied" in err
    assert (
        "costs money until you delete it:\ngcloud compute tpus tpu-vm delete me" in err
    )
    assert verbs(world) == ["create"] and not gone(world)


def start_waiting(world: World, *more: str) -> subprocess.Popen:
    """Starts the launcher and waits until training runs."""
    world.says("program", ["waits"])
    process = world.start(
        "tpu_vm.sh", *RUN, *more, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    wait_for_training(world, process)
    return process


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_and_deletes(world, sent, code):
    process = start_waiting(world)
    process.send_signal(sent)
    _, err = process.communicate(timeout=300)
    assert process.returncode == code, err
    assert steps(world) == "step\nsaved after 1 signal\n"
    assert verbs(world) == ["create", "delete"] and gone(world)


@pytest.mark.slow
def test_keep_leaves_training_alone_and_a_second_call_joins_it(world):
    process = start_waiting(world, "--keep")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130 and "me is kept and costs money" in err
    assert verbs(world) == ["create"]

    said = world.folder / "said"
    with said.open("w") as stderr:
        joined = world.start("tpu_vm.sh", *RUN, stdout=-1, stderr=stderr)
    while joined.poll() is None and "running there already" not in said.read_text():
        time.sleep(0.05)
    (world.folder / "go-on").touch()
    out, _ = joined.communicate(timeout=300)
    assert joined.returncode == 0 and "running there already" in said.read_text()
    assert "training goes on after 0 steps" in out and len(trainings(world)) == 1
    assert verbs(world) == ["create", "delete"]


@pytest.mark.slow
def test_says_loudly_what_it_could_not_delete(world):
    world.says("delete-fails", "INTERNAL: try later")
    done = world.run("tpu_vm.sh", *RUN)
    assert done.returncode == 1 and verbs(world) == ["create"] + 3 * ["delete"]
    assert "me was NOT deleted and costs money" in done.stderr
    assert "\ngcloud compute tpus tpu-vm delete me " in done.stderr


HOSTILE = [
    "--config.a.blanks=two  blanks and a\ttab",
    '--config.a.quotes=it\'s "so" `touch pwned`',
    "--config.a.shell=$(touch pwned); touch pwned & touch pwned | $HOME ~ * ! # \\",
    "--config.a.line=one\ntouch pwned\n",
    "--config.a.umlaut=ä→%s",
    "--config.a.empty=",
]


def test_arguments_reach_the_program_as_they_are(world):
    done = world.run("tpu_vm.sh", *RUN, "--", *HOSTILE)
    assert done.returncode == 0, done.stderr
    assert trainings(world)[0][2:-1] == HOSTILE
    assert not list(world.folder.rglob("pwned"))


def test_dry_run_prints_and_calls_nothing(world):
    done = world.run("tpu_vm.sh", *OPTIONS, "--dry-run", "--", *HOSTILE)
    assert done.returncode == 0 and world.calls("gcloud") == []
    # What is printed can be pasted into a shell, and is what would be run.
    subprocess.run(
        ["bash", "-c", done.stdout], env=world.environment(), capture_output=True
    )
    calls = [call for call in world.calls("gcloud") if call[0] == "compute"]
    assert [call[3] for call in calls] == (
        "describe create describe scp ssh ssh ssh ssh ssh ssh ssh delete".split()
    )
    start = shlex.split(calls[7][6].removeprefix("--command="))
    assert start[2:4] == ["start", "gs://b-1/run"] and start[-6:] == HOSTILE


def test_without_a_terminal_it_refuses(world):
    done = world.run("tpu_vm.sh", *OPTIONS)
    assert done.returncode == 2 and "no terminal" in done.stderr
    assert world.calls("gcloud") == []


@pytest.mark.parametrize(("answer", "code"), [("no", 1), ("y", 1), ("", 1), ("yes", 0)])
def test_asks_before_it_spends(world, answer, code):
    controller, terminal = pty.openpty()
    process = world.start("tpu_vm.sh", *OPTIONS, stdin=terminal, stdout=-1, stderr=-1)
    os.write(controller, f"{answer}\n".encode())
    _, err = process.communicate(timeout=300)
    assert process.returncode == code, err
    assert "me, v5litepod-8, v2-alpha-tpuv5-lite, in us-west4-a" in err
    assert "costs money" in err and bool(world.calls("gcloud")) == (code == 0)
