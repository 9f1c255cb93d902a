"""What the programs of `stand_ins.World` do when they are called."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time


def play(name: str, folder: str) -> None:
    """Records the call and acts as program `name`."""
    world, arguments = pathlib.Path(folder), sys.argv[1:]
    if name not in ("python3", "sleep", "curl"):
        with (world / f"{name}.calls").open("a") as file:
            file.write(json.dumps(arguments) + "\n")
    actor = globals().get(name.replace("-", "_"), silent)
    sys.exit(actor(world, arguments) or 0)


def looked_up(world: pathlib.Path, name: str, default: object) -> object:
    """Returns what the test set under `name`."""
    file = world / f"{name}.json"
    return json.loads(file.read_text()) if file.exists() else default


def silent(world: pathlib.Path, arguments: list[str]) -> None:
    """A program that takes everything."""


def fail(message: str, code: int = 1) -> int:
    """Says why and returns the exit code."""
    print(message, file=sys.stderr)
    return code


# --- gcloud -------------------------------------------------------------------------


def gcloud(world: pathlib.Path, arguments: list[str]) -> int | None:
    """`gcloud compute tpus tpu-vm VERB` and `gcloud storage VERB`."""
    if arguments[0] == "storage":
        return storage(world, arguments[1], arguments[2:])
    assert arguments[:3] == ["compute", "tpus", "tpu-vm"], arguments
    verb, rest = arguments[3], arguments[4:]
    flags = dict(a[2:].split("=", 1) for a in rest if "=" in a and a.startswith("--"))
    if denied := looked_up(world, f"{verb}-fails", ""):
        return fail(f"ERROR: (gcloud.compute.tpus.tpu-vm.{verb}) {denied}")
    vm = world / "vm.json"
    if verb == "create":
        made = {"state": "READY", "type": flags["accelerator-type"]}
        vm.write_text(json.dumps(made))
        return None
    if not vm.exists():
        return fail(f"ERROR: (gcloud.compute.tpus.tpu-vm.{verb}) NOT_FOUND: no such VM")
    hosts = int(looked_up(world, "hosts", 1))  # pyright: ignore
    for number in range(hosts):
        (world / "vm" / str(number)).mkdir(parents=True, exist_ok=True)
    if verb == "describe":
        found = json.loads(vm.read_text())
        print(found["state"], found["type"], hosts, sep="\t")
    elif verb == "delete":
        vm.unlink()
        shutil.rmtree(world / "vm")
    elif verb == "scp":
        for number in workers(flags, hosts):
            target = rest[1].split(":", 1)[1]
            shutil.copy(rest[0], world / "vm" / number / target)
    elif verb == "ssh":
        codes = [
            ssh(world, number, flags["command"]) for number in workers(flags, hosts)
        ]
        return next((code for code in codes if code), 0)
    return None


def workers(flags: dict[str, str], hosts: int) -> list[str]:
    """Returns the numbers that --worker names."""
    named = flags["worker"]
    return [str(n) for n in range(hosts)] if named == "all" else [named]


def ready(world: pathlib.Path) -> bool:
    """Returns whether the VM can be reached."""
    return '"READY"' in (world / "vm.json").read_text()


def ssh(world: pathlib.Path, number: str, command: str) -> int:
    """Runs a command on a worker as gcloud, ssh and sshd do."""
    home = world / "vm" / number
    sent = " ".join(command.split(" "))  # gcloud splits at blanks, ssh joins again
    path = f"{world / 'worker-bin'}:{world / 'bin'}:/usr/bin:/bin"
    environment = {"HOME": str(home), "PATH": path, "WORKER": number}
    if not ready(world):
        return fail("ssh: connect to host: Connection refused", 255)
    done = subprocess.run(["/bin/bash", "-c", sent], cwd=home, env=environment)
    return done.returncode if ready(world) else 255


def storage(world: pathlib.Path, verb: str, arguments: list[str]) -> int | None:
    """A bucket that knows files only, as the real one."""
    plain = [a for a in arguments if not a.startswith("--")]
    if denied := looked_up(world, f"storage-{verb}-fails", ""):
        return fail(f"ERROR: {denied}")
    paths = [
        world / "bucket" / p.removeprefix("gs://")
        if p.startswith("gs://")
        else pathlib.Path(p)
        for p in plain
    ]
    if verb == "ls":
        if not paths[0].is_dir():
            return fail("ERROR: One or more URLs matched no objects.")
        return None
    source, target = paths
    excluded = [a.split("=", 1)[1] for a in arguments if a.startswith("--exclude=")]
    files = {p.relative_to(source) for p in source.rglob("*") if p.is_file()}
    files = {f for f in files if not any(re.match(x, str(f)) for x in excluded)}
    for file in files:
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source / file, target / file)
    if "--delete-unmatched-destination-objects" in arguments:
        for path in target.rglob("*"):
            if path.is_file() and path.relative_to(target) not in files:
                path.unlink()
    return None


# --- What a worker has --------------------------------------------------------------


def curl(world: pathlib.Path, arguments: list[str]) -> None:
    """The metadata server of a TPU VM."""
    assert arguments[-1].endswith("/instance/attributes/agent-worker-number")
    print(os.environ["WORKER"], end="")


def sleep(world: pathlib.Path, arguments: list[str]) -> None:
    """Does not sleep long."""
    time.sleep(min(float(arguments[0]), 0.1))


def python3(world: pathlib.Path, arguments: list[str]) -> int | None:
    """Makes environments whose pip installs the program of this file."""
    if arguments[:2] == ["-m", "venv"]:
        os.makedirs(".venv/bin", exist_ok=True)
        shutil.copy(world / "worker-bin" / "python3", ".venv/bin/python")
    elif arguments[:2] == ["-m", "pip"]:
        if denied := looked_up(world, "pip-fails", ""):
            return fail(f"ERROR: {denied}")
        with (world / "pip.calls").open("a") as file:
            file.write(json.dumps(arguments) + "\n")
        shutil.copy(world / "worker-bin" / "transformer-jax", ".venv/bin")
    elif arguments[0] == "-":
        print("a fingerprint")
    elif "print" in arguments[1]:
        print("3.12.0")
    return None


def transformer_jax(world: pathlib.Path, arguments: list[str]) -> int:
    """Acts as the next of the list `program` says: a number is training's exit code.

    "preempted" takes the VM away in mid-training, "waits" trains until SIGTERM, then
    saves and ends with 143.
    """
    flags = dict(a[2:].split("=", 1) for a in arguments if "=" in a)
    workdir = pathlib.Path(flags["workdir"])
    if arguments[0] != "train":
        platform = os.environ.get("JAX_PLATFORMS", "the default")
        print(f"{arguments[0]} on {platform}")
        return int(looked_up(world, f"{arguments[0]}-code", 0))  # pyright: ignore
    todo = list(looked_up(world, "program", [0]))  # pyright: ignore
    act = todo.pop(0)
    if os.environ.get("WORKER", "0") == "0":
        (world / "program.json").write_text(json.dumps(todo))
    return train(world, workdir, act)


def train(world: pathlib.Path, workdir: pathlib.Path, act: object) -> int:
    """Adds to the steps that are there already, and ends as it is told."""
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, frame: stopped.append(signum))
    steps = workdir / "checkpoints" / "steps"
    steps.parent.mkdir(parents=True, exist_ok=True)
    before = steps.read_text() if steps.exists() else ""
    steps.write_text(before + "step\n")
    (workdir / "checkpoints" / "9.orbax-checkpoint-tmp").write_text("half")
    print(f"training goes on after {before.count('step')} steps", flush=True)
    if act == "preempted":
        copied = world / "bucket" / "b-1" / "run" / "checkpoints" / "steps"
        while not copied.exists() or copied.read_text() != steps.read_text():
            time.sleep(0.05)
        vm = (world / "vm.json").read_text()
        (world / "vm.json").write_text(vm.replace("READY", "PREEMPTED"))
        os.killpg(0, signal.SIGKILL)  # the supervisor, too
    if act != "waits":
        return int(act)  # pyright: ignore
    while not stopped and not (world / "go-on").exists():
        time.sleep(0.05)
    if stopped:
        time.sleep(0.3)  # a second signal would come now
        steps.write_text(steps.read_text() + f"saved after {len(stopped)} signal\n")
        return 143
    return 0


# --- Slurm and Kubernetes -----------------------------------------------------------


def kubectl(world: pathlib.Path, arguments: list[str]) -> int | None:
    """Keeps the manifest."""
    (world / "manifest.yaml").write_text(sys.stdin.read())
    denied = str(looked_up(world, "kubectl-fails", ""))
    return fail(denied) if denied else None


def sbatch(world: pathlib.Path, arguments: list[str]) -> int | None:
    """Takes the job, or does not."""
    denied = str(looked_up(world, "sbatch-fails", ""))
    if denied:
        return fail(denied)
    print("Submitted batch job 7")
    return None


def squeue(world: pathlib.Path, arguments: list[str]) -> None:
    """Says the state of the job."""
    print(looked_up(world, "job-state", "RUNNING"))


def srun(world: pathlib.Path, arguments: list[str]) -> int:
    """Runs the program once."""
    (world / "srun.pid").write_text(str(os.getpid()))
    program = next(i for i, a in enumerate(arguments) if not a.startswith("--"))
    process = subprocess.Popen(arguments[program:])
    signal.signal(signal.SIGTERM, lambda *_: process.send_signal(signal.SIGTERM))
    return process.wait()


def scancel(world: pathlib.Path, arguments: list[str]) -> None:
    """Passes the signal on to the steps, as scancel does without --batch."""
    os.kill(int((world / "srun.pid").read_text()), signal.SIGTERM)
