"""A small world without a cloud: programs on the PATH that stand in for the real ones.

Each records its arguments. `gcloud` keeps one TPU VM, its workers' disks and a bucket
in a folder, and really runs what it is to run over ssh, as sshd does: in the worker's
home, by its login shell.
"""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
HERE = pathlib.Path(__file__).parent
SHELL = ["/bin/bash", "-c"]  # the login shell of a TPU VM


def make_repository(folder: pathlib.Path) -> None:
    """Makes a repository whose last commit has the scripts as they are now."""
    for name in ("scripts", "configs"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "pyproject.toml", folder)
    me = ["-c", "user.name=Test", "-c", "user.email=test@example.com"]
    for command in (["init"], ["add", "."], [*me, "commit", "--message=all"]):
        subprocess.run(["git", *command], cwd=folder, check=True, capture_output=True)


def signals_as_usual() -> None:
    """Undoes what a shell that runs the tests in the background, or nohup, ignores."""
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(signum, signal.SIG_DFL)


class World:
    """The folder with the stand-ins, what they were called with, and what they do."""

    def __init__(self, folder: pathlib.Path, repository: pathlib.Path) -> None:
        """Puts the stand-ins into `folder`/bin and `folder`/worker-bin."""
        self.folder, self.repository = folder, repository
        self.bucket = folder / "bucket"
        for bin_folder, names in {
            "bin": ("gcloud", "kubectl", "sbatch", "srun", "squeue", "scontrol"),
            "worker-bin": ("curl", "sleep", "python3", "transformer-jax"),
        }.items():
            (folder / bin_folder).mkdir()
            for name in names:
                self._put(folder / bin_folder / name)
        self._put(folder / "bin" / "scancel")

    def _put(self, path: pathlib.Path) -> None:
        path.write_text(
            f"#!{sys.executable} -IS\nimport sys\nsys.path.insert(0, {str(HERE)!r})\n"
            f"import actors\nactors.play({path.name!r}, {str(self.folder)!r})\n"
        )
        path.chmod(0o755)

    def says(self, name: str, value: Any) -> None:
        """Sets what the stand-ins look up under a name."""
        (self.folder / f"{name}.json").write_text(json.dumps(value))

    def calls(self, program: str) -> list[list[str]]:
        """Returns the arguments of each call of a program so far, in order."""
        file = self.folder / f"{program}.calls"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines]

    def environment(self) -> dict[str, str]:
        """Returns the environment in which the stand-ins come first."""
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        return {**os.environ, "PATH": path, "TMPDIR": str(self.folder)}

    def start(self, script: str, *arguments: str, **options: Any) -> subprocess.Popen:
        """Starts a script of the repository, without a terminal."""
        return subprocess.Popen(
            ["bash", str(self.repository / "scripts" / script), *arguments],
            env=self.environment(),
            cwd=self.folder,
            text=True,
            preexec_fn=signals_as_usual,
            **{"stdin": subprocess.DEVNULL, **options},
        )

    def run(self, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs a script of the repository to its end."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = self.start(script, *arguments, **pipes)
        out, err = process.communicate(timeout=300)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)
