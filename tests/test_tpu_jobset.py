"""The GKE manifest: its fields, its YAML, its refusals."""

from __future__ import annotations

import importlib.util
import pathlib
import subprocess
import sys

import pytest
import yaml

TPU = pathlib.Path(__file__).parent.parent / "tpu"
EXAMPLES = sorted((TPU / "examples").glob("*.yaml"))


def render(*flags: str) -> list[dict]:
    return list(yaml.safe_load_all(text_of(*flags)))


def text_of(*flags: str) -> str:
    command = [sys.executable, "-S", str(TPU / "jobset.py"), *flags]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def module():
    spec = importlib.util.spec_from_file_location("jobset", TPU / "jobset.py")
    loaded = importlib.util.module_from_spec(spec)
    sys.modules["jobset"] = loaded  # for its dataclass
    spec.loader.exec_module(loaded)
    return loaded


@pytest.mark.parametrize(
    "accelerator, label, topology, hosts",
    [
        ("v4-32", "tpu-v4-podslice", "2x2x4", 4),
        ("v5p-16", "tpu-v5p-slice", "2x2x2", 2),
        ("v5litepod-64", "tpu-v5-lite-podslice", "8x8", 16),
        ("v6e-16", "tpu-v6e-slice", "4x4", 4),
    ],
)
def test_one_job_a_slice_and_one_pod_a_host(accelerator, label, topology, hosts):
    (jobset,) = render("--name=evolm", f"--accelerator={accelerator}", "--slices=3", "--image=i:1", "--", "--config=c.py")
    assert (jobset["apiVersion"], jobset["kind"], jobset["metadata"]["name"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet", "evolm")
    annotations = jobset["metadata"]["annotations"]
    assert annotations == {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job, pod = replicated["template"]["spec"], replicated["template"]["spec"]["template"]["spec"]
    assert (replicated["replicas"], job["parallelism"], job["completions"], job["backoffLimit"]) == (3, hosts, hosts, 0)
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": label, "cloud.google.com/gke-tpu-topology": topology}  # fmt: skip
    (container,) = pod["containers"]
    assert container["resources"] == {"requests": {"google.com/tpu": 4}, "limits": {"google.com/tpu": 4}}
    assert pod["restartPolicy"] == "Never" and "tolerations" not in pod and "volumes" not in pod


def test_errors_restart_all_but_bad_input_does_not():
    (jobset,) = render("--name=a", "--accelerator=v4-32", "--image=i", "--max_restarts=7", "--", "--config=c.py")
    policy = jobset["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 7
    (rule,) = policy["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["podFailurePolicy"]["rules"] == [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}}]


def test_the_shared_folder_secrets_and_spot():
    flags = ["--nfs=10.0.0.2:/share:/mnt/shared", "--secret=keys", "--service_account=reader", "--spot", "--namespace=n"]
    volume, claim, jobset = render("--name=a", "--accelerator=v4-32", "--image=i", *flags, "--", "--config=c.py")
    assert volume["spec"]["nfs"] == {"server": "10.0.0.2", "path": "/share"} and "nolock" in volume["spec"]["mountOptions"]
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"] == "a-shared" and claim["metadata"]["namespace"] == "n"
    assert claim["spec"]["accessModes"] == volume["spec"]["accessModes"] == ["ReadWriteMany"]
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (mount,) = container["volumeMounts"]
    assert pod["volumes"] == [{"name": mount["name"], "persistentVolumeClaim": {"claimName": "a-shared"}}]
    assert mount["mountPath"] == "/mnt/shared" and container["envFrom"] == [{"secretRef": {"name": "keys"}}]
    assert pod["serviceAccountName"] == "reader" and pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert pod["tolerations"][0]["key"] == "cloud.google.com/gke-spot"


def test_odd_flags_arrive_as_given():
    odd = ["--config=a b.py", 'x: "y" # z', "- 'it''s", "yes", "1e3", "~", "", "ü\n\t", "{a: [b}"]
    (jobset,) = render("--name=a", "--accelerator=v4-32", "--image=i", "--", *odd, "$(HOME)")
    (container,) = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    assert container["args"] == ["--processes=auto", *odd, "$$(HOME)"]  # which Kubernetes turns into $(HOME)


@pytest.mark.parametrize(
    "value", [{"a": {"b": [1, {"c": [], "d": {}}, [2, [3, "x"]]]}, "e": None}, [[1], {"f": True}], "plain", {}]
)
def test_yaml_reads_back(value, module):
    assert yaml.safe_load(module.to_yaml(value)) == value


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--accelerator=v4-8"], "no known topology of several hosts"),
        (["--accelerator=v5litepod-60"], "one of [16, 32, 64, 128, 256]"),
        (["--accelerator=v9-16"], "is not known"),
        (["--name=A"], "--name=A: expected"),
        (["--nfs=10.0.0.2/share"], "expected SERVER:/EXPORT:/MOUNT_POINT"),
        (["--slices=0"], "expected 1 or more"),
        (["--max_restarts=-1"], "expected 0 or more"),
        (["--zone=x"], "unrecognized arguments: --zone=x"),
    ],
)
def test_bad_flags_are_refused(flags, message, module, capsys):
    with pytest.raises(SystemExit) as error:
        module.parse(["--name=a", "--accelerator=v4-32", "--image=i", *flags, "--", "--config=c.py"])
    assert error.value.code == 2 and message in capsys.readouterr().err


def test_no_flags_for_the_run_are_refused(module, capsys):
    with pytest.raises(SystemExit):
        module.parse(["--name=a", "--accelerator=v4-32", "--image=i"])
    assert "no flags for run.py" in capsys.readouterr().err


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_an_example_is_what_its_first_line_makes(path):
    """The first line is the command; the rest its output."""
    first, rest = path.read_text().split("\n", 1)
    words = first.removeprefix("# python tpu/jobset.py ").split()
    assert text_of(*words) == rest


def test_there_is_an_example_of_one_and_of_several_slices():
    replicas = [list(yaml.safe_load_all(path.read_text()))[-1]["spec"]["replicatedJobs"][0]["replicas"] for path in EXAMPLES]
    assert sorted(replicas) == [1, 2]


def test_the_image_holds_what_a_run_needs():
    """The container is not built here; what it copies must exist, and its ignore file must let it through."""
    lines = (TPU / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    ignore = (TPU / "Dockerfile.dockerignore").read_text().split()
    assert set(copied) == {line[1:] for line in ignore if line.startswith("!")} and "run.py" in copied
    assert all((TPU.parent / name).exists() for name in copied)
    assert 'ENTRYPOINT ["python", "run.py"]' in lines  # the exec form: the run itself gets SIGTERM
