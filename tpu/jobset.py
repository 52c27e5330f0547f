"""A run on GKE as a JobSet, printed as a manifest: `python tpu/jobset.py ... -- FLAGS OF run.py | kubectl apply -f -`.

    python tpu/jobset.py --name=evolm --accelerator=v5litepod-64 --image=REGION-docker.pkg.dev/PROJECT/REPO/coevo-jax:1 \
        --nfs=10.0.0.2:/share:/mnt/shared -- --config=configs/evolm/qwen3_8b.py --workdir=/mnt/shared/runs/evolm

One Job a slice, one pod a host. A pod that ends with an error restarts all of them (the run goes on from its checkpoint), except
with exit code 2, bad input. Needs a cluster with the JobSet controller and one node pool a slice; it was never applied to one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import sys
from typing import Any

DEFAULT_TOPOLOGY = {16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}  # v5e and v6e, by chips
CUBES = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8"}  # v4, v5p


@dataclasses.dataclass(frozen=True)
class Slice:
    """What GKE calls a slice: the node label's accelerator, the topology, hosts and chips of a host."""

    accelerator: str
    topology: str
    hosts: int
    chips: int = 4


def slice_of(accelerator: str) -> Slice:
    """The GKE form of a TPU API type: v4-32, v5p-16 (TensorCores, two a chip), v5litepod-64, v6e-16 (chips). Else ValueError.

    Only slices of several hosts with four chips each: those are the ones on which JobSet has something to do.
    """
    match = re.fullmatch(r"(v4|v5p|v5litepod|v6e)-(\d+)", accelerator)
    if not match:
        raise ValueError(f"accelerator {accelerator!r} is not known: expected v4-N, v5p-N, v5litepod-N or v6e-N")
    kind, size = match[1], int(match[2])
    if kind in ("v4", "v5p"):
        label, chips, shapes = f"tpu-{kind}-{'podslice' if kind == 'v4' else 'slice'}", size // 2, CUBES
        sizes = [2 * n for n in shapes if n > 4]
    else:
        label, chips, shapes = ("tpu-v5-lite-podslice" if kind == "v5litepod" else "tpu-v6e-slice"), size, DEFAULT_TOPOLOGY
        sizes = list(shapes)
    if size not in sizes:
        raise ValueError(
            f"accelerator {accelerator!r} has no known topology of several hosts: expected {kind}- and one of {sizes}"
        )
    topology = shapes[chips]
    assert math.prod(map(int, topology.split("x"))) == chips
    return Slice(label, topology, chips // 4)


def manifests(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The objects, in the order to apply them: the shared folder's volume and claim (with --nfs), the JobSet."""
    found = []
    if args.nfs:
        server, export, _ = args.nfs.split(":")
        meta = {"name": f"{args.name}-shared"}
        size = {"storage": "1Ti"}  # a claim must name one; NFS does not enforce it
        found.append({
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": meta,
            "spec": {"capacity": size, "accessModes": ["ReadWriteMany"], "storageClassName": "", "persistentVolumeReclaimPolicy":
                     "Retain", "mountOptions": ["hard", "nolock"], "nfs": {"server": server, "path": export}},
        })  # fmt: skip
        found.append({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": meta | {"namespace": args.namespace},
            "spec": {"accessModes": ["ReadWriteMany"], "storageClassName": "", "volumeName": meta["name"],
                     "resources": {"requests": size}},
        })  # fmt: skip
    return [*found, _jobset(args)]


def _jobset(args: argparse.Namespace) -> dict[str, Any]:
    one = slice_of(args.accelerator)
    job = {
        "parallelism": one.hosts,
        "completions": one.hosts,
        "backoffLimit": 0,  # a lost pod ends its Job, and with it all: one host alone can't come back into a run
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}}]},
        "template": {"spec": _pod(args, one)},
    }
    rule = {"name": "bad-input", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": args.name,
            "namespace": args.namespace,
            "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"},
        },
        "spec": {
            "failurePolicy": {"maxRestarts": args.max_restarts, "rules": [rule]},
            "replicatedJobs": [{"name": "slice", "replicas": args.slices, "template": {"spec": job}}],
        },
    }


def _pod(args: argparse.Namespace, one: Slice) -> dict[str, Any]:
    selector = {"cloud.google.com/gke-tpu-accelerator": one.accelerator, "cloud.google.com/gke-tpu-topology": one.topology}
    container: dict[str, Any] = {
        "name": "run",
        "image": args.image,
        "args": [flag.replace("$(", "$$(") for flag in args.flags],  # of `python run.py`; Kubernetes would fill in $(NAME)
        "ports": [{"containerPort": 8471}, {"containerPort": 8080}],
        "resources": {"requests": {"google.com/tpu": one.chips}, "limits": {"google.com/tpu": one.chips}},
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": args.grace,
        "hostNetwork": True,
        "dnsPolicy": "ClusterFirstWithHostNet",
        "nodeSelector": selector,
        "containers": [container],
    }
    if args.spot:
        selector["cloud.google.com/gke-spot"] = "true"
        pod["tolerations"] = [{"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}]
    if args.service_account:
        pod["serviceAccountName"] = args.service_account
    if args.secret:
        container["envFrom"] = [{"secretRef": {"name": args.secret}}]
    if args.nfs:
        container["volumeMounts"] = [{"name": "shared", "mountPath": args.nfs.split(":")[2]}]
        pod["volumes"] = [{"name": "shared", "persistentVolumeClaim": {"claimName": f"{args.name}-shared"}}]
    return pod


def to_yaml(value: Any, indent: str = "") -> str:
    """Block YAML; every string is a JSON string, which YAML reads as it is."""
    if isinstance(value, dict) and value:
        return "".join(f"{indent}{key}:{_inside(item, indent)}" for key, item in value.items())
    if isinstance(value, list) and value:
        return "".join(f"{indent}- {to_yaml(item, indent + '  ').lstrip(' ')}" for item in value)
    return f"{indent}{json.dumps(value, ensure_ascii=False)}\n"


def _inside(value: Any, indent: str) -> str:
    nested = isinstance(value, dict | list) and value
    return "\n" + to_yaml(value, indent + "  ") if nested else " " + to_yaml(value)


def parse(argv: list[str]) -> argparse.Namespace:
    """Flags; those of run.py follow `--`. Bad ones end the program with code 2."""
    parser = argparse.ArgumentParser(
        prog="tpu/jobset.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", required=True, help="of the JobSet: at most 40 lower case letters, digits, hyphens")
    parser.add_argument(
        "--accelerator", required=True, help="a slice, as the TPU API names it: v4-32, v5p-16, v5litepod-64, v6e-16"
    )
    parser.add_argument("--slices", type=int, default=1, help="so many slices; the data axis of the mesh goes across them")
    parser.add_argument("--image", required=True, help="made from tpu/Dockerfile")
    parser.add_argument("--nfs", default="", help="SERVER:/EXPORT:/MOUNT_POINT of the shared folder")
    parser.add_argument("--namespace", default="default")
    parser.add_argument("--service_account", default="", help="Kubernetes service account that may read the weights' bucket")
    parser.add_argument("--secret", default="", help="Kubernetes secret whose keys the run gets as environment")
    parser.add_argument("--spot", action="store_true", help="Spot nodes")
    parser.add_argument("--max_restarts", type=int, default=100)
    parser.add_argument("--grace", type=int, default=600, help="seconds between SIGTERM and SIGKILL; Spot nodes give less")
    split = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:split])
    args.flags = argv[split + 1 :]
    if not args.flags:
        parser.error("no flags for run.py: expected -- --config=configs/NAME.py --workdir=...")
    if not any(flag.split("=")[0] == "--processes" for flag in args.flags):
        args.flags = ["--processes=auto", *args.flags]
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", args.name):
        parser.error(f"--name={args.name}: expected at most 40 lower case letters, digits and hyphens, a letter first")
    if args.nfs and not re.fullmatch(r"[A-Za-z0-9.-]+:/[^:]+:/[^:]+", args.nfs):
        parser.error(f"--nfs={args.nfs}: expected SERVER:/EXPORT:/MOUNT_POINT")
    for name in ("slices", "grace"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}={getattr(args, name)}: expected 1 or more")
    if args.max_restarts < 0:
        parser.error(f"--max_restarts={args.max_restarts}: expected 0 or more")
    try:
        slice_of(args.accelerator)
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: list[str]) -> int:
    """Print the manifest. Exit code 2 for bad input."""
    print("---\n".join(to_yaml(item) for item in manifests(parse(argv))), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
