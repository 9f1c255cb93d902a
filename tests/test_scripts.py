"""The scripts: curves are drawn, shell files parse, and the CI runs the test script."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


def test_plot_metrics_draws_a_picture(trained, tmp_path):
    picture = tmp_path / "curves.png"
    script = str(ROOT / "scripts" / "plot_metrics.py")
    subprocess.run(
        [sys.executable, script, str(trained / "metrics.jsonl"), str(picture)],
        check=True,
        capture_output=True,
    )
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 10_000


@pytest.mark.parametrize(
    "script", ["scripts/env.sh", "scripts/test.sh", "scripts/quickstart.sh", ".ci/run"]
)
def test_shell_scripts_parse(script):
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True, capture_output=True)


def test_ci_runs_the_test_script_of_the_readme():
    assert "scripts/test.sh" in (ROOT / ".ci" / "run").read_text()
    assert "\nscripts/test.sh " in (ROOT / "README.md").read_text()
