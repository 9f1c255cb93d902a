"""The launcher for GKE: the manifest, and how it is applied."""

import os
import pathlib
import pty
import re
import shlex
from typing import Any

import pytest
import yaml
from stand_ins import World

OPTIONS = (
    "--name=me --image=us-docker.pkg.dev/p/i/t:1 --accelerator=tpu-v5-lite-podslice "
    "--config=configs/base.py"
).split()
RUN = [*OPTIONS, "--topology=2x4", "--bucket=gs://b-1/run/one"]
HOSTILE = [
    '--config.a.quotes=it\'s "so" \\ \\n',
    "--config.a.shell=$(TPU_WORKER_ID) $$ $HOME `id`; # {a: [b]}",
    "--config.a.line=one\n- two\ttab\x07",
    "--config.a.umlaut=ä→😀",
    "--config.a.empty=",
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, repository: pathlib.Path) -> World:
    return World(tmp_path_factory.mktemp("world"), repository)


@pytest.fixture(autouse=True)
def nothing_called(world: World) -> None:
    for file in [*world.folder.glob("*.calls"), *world.folder.glob("*.json")]:
        file.unlink()


def manifest(world: World, *arguments: str) -> dict[str, Any]:
    done = world.run("gke.sh", "--dry-run", *arguments)
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout)


def job(of: dict[str, Any]) -> dict[str, Any]:
    (replicated,) = of["spec"]["replicatedJobs"]
    assert replicated["name"] == "worker" and replicated["replicas"] == 1
    return replicated["template"]["spec"]


def pod(of: dict[str, Any]) -> dict[str, Any]:
    return job(of)["template"]["spec"]


def expanded(argument: str) -> str:
    """Returns an argument as a container gets it where no variable is defined."""
    return re.sub(r"\$\$", "$", argument)


def test_one_machine(world):
    found = manifest(world, *RUN)
    assert (
        found["apiVersion"] == "jobset.x-k8s.io/v1alpha2" and found["kind"] == "JobSet"
    )
    assert found["metadata"] == {"name": "me"}
    assert found["spec"]["failurePolicy"]["maxRestarts"] == 20
    assert job(found)["parallelism"] == job(found)["completions"] == 1
    assert pod(found)["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": "2x4",
    }
    (container,) = pod(found)["containers"]
    assert container["resources"]["limits"] == {"google.com/tpu": 8}
    assert container["args"] == (
        ["train", "--config=configs/base.py", "--workdir=/run/workdir"]
    )
    (volume,) = pod(found)["volumes"]
    assert volume["csi"]["driver"] == "gcsfuse.csi.storage.gke.io"
    assert volume["csi"]["volumeAttributes"]["bucketName"] == "b-1"
    options = volume["csi"]["volumeAttributes"]["mountOptions"].split(",")
    assert "only-dir:run/one" in options and "implicit-dirs" in options
    assert container["volumeMounts"] == [
        {"name": volume["name"], "mountPath": "/run/workdir"}
    ]
    annotations = job(found)["template"]["metadata"]["annotations"]
    assert annotations == {"gke-gcsfuse/volumes": "true"}


def test_several_machines_find_each_other(world):
    found = manifest(world, *OPTIONS, "--topology=4x4", "--pvc=claim", "--spot")
    (container,) = pod(found)["containers"]
    assert container["args"][-1] == "--distributed=auto"
    names, number = container["env"]
    assert job(found)["completions"] == 4 and job(found)["completionMode"] == "Indexed"
    assert names["value"].split(",") == [f"me-worker-0-{n}.me" for n in range(4)]
    assert "job-completion-index" in number["valueFrom"]["fieldRef"]["fieldPath"]
    assert found["spec"]["network"]["enableDNSHostnames"] is True
    assert container["resources"]["limits"] == {"google.com/tpu": 4}
    assert pod(found)["volumes"] == [
        {"name": "workdir", "persistentVolumeClaim": {"claimName": "claim"}}
    ]
    assert pod(found)["nodeSelector"]["cloud.google.com/gke-spot"] == "true"


@pytest.mark.parametrize(
    ("topology", "more", "hosts", "chips"),
    [
        ("1x1", [], 1, 1),
        ("2x2", [], 1, 4),
        ("2x4", ["--chips-per-host=4"], 2, 4),
        ("16x16", [], 64, 4),
        ("2x2x1", [], 1, 4),
        ("2x2x2", [], 2, 4),
        ("4x4x8", [], 32, 4),
    ],
)
def test_machines_of_a_topology(world, topology, more, hosts, chips):
    found = manifest(world, *OPTIONS, f"--topology={topology}", "--pvc=c", *more)
    assert job(found)["completions"] == hosts
    assert pod(found)["containers"][0]["resources"]["requests"] == {
        "google.com/tpu": chips
    }


def test_a_mistake_of_the_user_is_not_tried_again(world):
    found = manifest(world, *RUN, "--restarts=7")
    assert found["spec"]["failurePolicy"] == {
        "maxRestarts": 7,
        "rules": [
            {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
        ],
    }
    (rule,) = job(found)["podFailurePolicy"]["rules"]
    codes = {"containerName": "train", "operator": "In", "values": [2]}
    assert rule == {"action": "FailJob", "onExitCodes": codes}
    assert job(found)["backoffLimit"] == 0 and pod(found)["restartPolicy"] == "Never"


def test_arguments_reach_the_program_as_they_are(world):
    (container,) = pod(manifest(world, *RUN, "--", *HOSTILE))["containers"]
    assert [expanded(argument) for argument in container["args"][3:]] == HOSTILE
    # Nothing is left that Kubernetes would take for a variable.
    assert not re.search(r"(?<!\$)(\$\$)*\$\(", "".join(container["args"]))


def test_dry_run_calls_nothing(world):
    done = world.run("gke.sh", *RUN, "--dry-run", "--namespace=n")
    assert shlex.split(done.stderr) == (
        ["kubectl", "--namespace=n", "apply", "--filename=-"]
    )
    assert world.calls("kubectl") == []


def test_applies_what_the_dry_run_prints(world):
    done = world.run("gke.sh", *RUN, "--yes", "--namespace=n", "--", *HOSTILE)
    assert done.returncode == 0, done.stderr
    assert world.calls("kubectl") == [["--namespace=n", "apply", "--filename=-"]]
    applied = (world.folder / "manifest.yaml").read_text()
    assert yaml.safe_load(applied) == manifest(world, *RUN, "--", *HOSTILE)
    assert "kubectl --namespace=n delete jobset/me" in done.stderr


def test_kubectl_fails(world):
    world.says("kubectl-fails", 'no matches for kind "JobSet"')
    done = world.run("gke.sh", *RUN, "--yes")
    assert done.returncode == 1 and 'no matches for kind "JobSet"' in done.stderr
    assert "== next" not in done.stderr


def test_asks_before_it_spends(world):
    done = world.run("gke.sh", *RUN)
    assert done.returncode == 2 and "no terminal" in done.stderr
    for answer, calls in {"no": 0, "yes": 1}.items():
        controller, terminal = pty.openpty()
        process = world.start("gke.sh", *RUN, stdin=terminal, stderr=-1)
        os.write(controller, f"{answer}\n".encode())
        _, err = process.communicate(timeout=300)
        assert "1 x 8 chips" in err and len(world.calls("kubectl")) == calls


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--topology=2by4"], "--topology=2by4 is not such as 2x4"),
        (["--chips-per-host=3"], "--chips-per-host=3 is not 1, 2, 4 or 8"),
        (["--topology=1x1", "--chips-per-host=4"], "does not divide"),
        (["--pvc=c"], "--bucket and --pvc: give one of them"),
        (["--bucket="], "--bucket has no value"),
        (["--name=A b"], "is not a name of at most 40"),
        (["--image=a\nb: c"], "is not the name of an image"),
    ],
)
def test_mistakes(world: World, more: list[str], message: str) -> None:
    done = world.run("gke.sh", *RUN, *more, "--yes")
    assert done.returncode == 2 and message in done.stderr
    assert done.stderr.count("\n") == 1 and world.calls("kubectl") == []


def test_the_image_has_what_the_program_needs():
    recipe = pathlib.Path(__file__).parents[2] / "scripts" / "Dockerfile"
    copied = set(re.findall(r"^COPY (.*)$", recipe.read_text(), re.MULTILINE))
    assert copied == {
        "pyproject.toml README.md LICENSE ./",
        "transformer_jax transformer_jax",
        "configs configs",
    }
