"""What holds for all launchers: help, mistakes, and what shellcheck says."""

import pathlib
import shutil
import subprocess
import sys

import pytest
from stand_ins import ROOT

LAUNCHERS = ["tpu_vm.sh", "gke.sh", "slurm.sh"]
NEEDED = {
    "tpu_vm.sh": [
        "--name=n",
        "--zone=us-west4-a",
        "--type=v4-8",
        "--bucket=gs://b-1/r",
    ],
    "gke.sh": "--name=n --image=i --accelerator=tpu-v5 --topology=2x4 --pvc=c".split(),
    "slurm.sh": ["--workdir=w"],
}


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a launcher such that nothing real can be called."""
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / script), *arguments, "--dry-run"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("script", LAUNCHERS)
def test_help_has_every_option_and_an_example_that_works(script):
    done = run(script, "--help")
    assert done.returncode == 0 and done.stderr == ""
    source = (ROOT / "scripts" / script).read_text().replace("\\\n", "")
    parsed = source.split("parse_options ")[1].split("check_options")[0]
    for option in parsed.replace('"', " ").split():
        assert option in ("$@", "help") or f"--{option}" in done.stdout, option
    example = done.stdout.split("Example: ")[1].replace("\\\n", "").split()
    before = example.index("--")
    assert example[0] == f"scripts/{script}"
    tried = run(script, *example[1:before])
    assert tried.returncode == 0, tried.stderr


@pytest.mark.parametrize("script", LAUNCHERS)
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--confg=x", "unknown option --confg; there are --"),
        ("--yes no=x", "unknown option"),
        ("x\ny", "unknown option $'x\\ny'; there are --"),
        ("--config", "--config has no value; write --config=VALUE"),
        ("--yes=1", "--yes takes no value"),
        ("--config=configs/none.py", "configs/none.py is not in the last commit"),
    ],
)
def test_a_mistake_is_one_line(script, argument, message):
    done = run(script, *NEEDED[script], "--config=configs/base.py", argument)
    assert done.returncode == 2 and message in done.stderr
    assert done.stderr.count("\n") == 1 and done.stdout == ""


@pytest.mark.parametrize("script", LAUNCHERS)
def test_only_overrides_come_last(script):
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / script), "--dry-run", "--", "--yes"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "--yes is no override" in done.stderr


def test_shellcheck_finds_nothing():
    beside = pathlib.Path(sys.executable).with_name("shellcheck")
    shellcheck = str(beside) if beside.exists() else shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is missing: pip install -e '.[test]' brings it")
    scripts = [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"]
    assert len(scripts) >= 8
    done = subprocess.run(
        [shellcheck, "--external-sources", *map(str, scripts)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
