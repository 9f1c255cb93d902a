"""Where a process belongs: explicit flags, and what clusters set."""

import threading
from typing import Any

import pytest
from jax._src.clusters import cloud_tpu_cluster

from transformer_jax import hosts
from transformer_jax.cli import main
from transformer_jax.errors import ConfigError
from transformer_jax.hosts import Address, find


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ((None, None, None, None), None),
        ((None, "host:1234", 1, 0), None),
        ((None, "host:1234", 4, 3), Address("host", 1234, 4, 3)),
        ((None, "[::1]:80", 2, 0), Address("::1", 80, 2, 0)),
    ],
)
def test_flags(given, found):
    assert find(*given, seconds=300) == found


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((None, "host:1234", None, None), "--num_processes and --process_id missing"),
        ((None, None, 2, 0), "--coordinator missing; give all three or none"),
        ((None, "host", 2, 0), "--coordinator=host is not HOST:PORT"),
        ((None, "host:99999", 2, 0), "--coordinator=host:99999 is not HOST:PORT"),
        ((None, "host:1", 2, 2), "--process_id=2 is not below --num_processes=2"),
        (("auto", None, 2, None), "--distributed=auto takes the address"),
        (("auto", None, None, None), "neither Cloud TPU nor GKE nor Slurm is here"),
    ],
)
def test_flags_that_do_not_fit(given, said):
    with pytest.raises(ConfigError, match=said.replace("[", r"\[")):
        find(*given, seconds=300)


def test_slurm(monkeypatch):
    """Four processes on two nodes; this is the third."""
    for name, value in {
        "JOB_ID": "4097",
        "STEP_NODELIST": "node[007-008]",
        "NTASKS": "4",
        "PROCID": "2",
        "LOCALID": "0",
    }.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert find("auto", None, None, None, 300) == Address("node007", 61441, 4, 2)
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert find("auto", None, None, None, 300) is None


def test_gke(monkeypatch):
    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    for name, value in {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost,worker-1",
        "TPU_WORKER_ID": "1",
        "MEGASCALE_COORDINATOR_ADDRESS": "",
        "MEGASCALE_NUM_SLICES": "",
        "MEGASCALE_SLICE_ID": "",
    }.items():
        monkeypatch.setenv(name, value)
    assert find("auto", None, None, None, 300) == Address("localhost", 8482, 2, 1)


def test_a_mistake_is_one_line(tmp_path, capsys):
    flags = f"--workdir={tmp_path}", "--coordinator=host"
    assert main(["evaluate", *flags]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "--num_processes and --process_id missing" in said


def test_one_process_asks_nobody():
    """No thread, no port, and what it gathers is its own."""
    nothing: Any = None
    before = threading.active_count()
    with hosts.joined(None, 300, nothing, None, nothing) as alone:
        assert alone.alone and alone.first
        assert alone.gather("values", 5) == [5]
        assert alone.in_turn("work", lambda: "done") == "done"
        alone.at("waiting", 3)
    assert threading.active_count() == before
