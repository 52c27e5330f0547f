"""A stand-in for gcloud, run as `gcloud` by test_tpu_scripts.py: records its calls and plays a queued resource with its workers.

FAKE_CLOUD is its folder: calls.jsonl; plan.json, for every request in turn the states it goes through (the last stays);
resource.json, the present one; w0, w1, ...: the workers' home folders; silent: workers that can't be reached; broken: gcloud
fails. A worker's command runs in a shell here, with HOME in its folder and the programs of FAKE_CLOUD/bin.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(os.environ["FAKE_CLOUD"])
RESOURCE = ROOT / "resource.json"


def fail(text: str) -> None:
    print(f"ERROR: (gcloud) {text}", file=sys.stderr)
    sys.exit(1)


def option(words: list[str], name: str) -> str:
    return next((w.split("=", 1)[1] for w in words if w.startswith(f"--{name}=")), "")


def load() -> dict:
    if not RESOURCE.exists():
        fail("NOT_FOUND: Resource was not found.")
    return json.loads(RESOURCE.read_text())


def create(words: list[str]) -> None:
    if RESOURCE.exists():
        fail("ALREADY_EXISTS")
    plan = json.loads((ROOT / "plan.json").read_text())
    if not plan:
        fail("RESOURCE_EXHAUSTED: no plan is left")
    (ROOT / "plan.json").write_text(json.dumps(plan[1:]))
    for home in ROOT.glob("w[0-9]*"):  # new machines
        shutil.rmtree(home)
    slices = int(option(words, "node-count") or 1)
    for worker in range(slices * 2):  # the tests use slices of two hosts
        (ROOT / f"w{worker}").mkdir()
    RESOURCE.write_text(json.dumps({"states": plan[0], "workers": slices * 2}))


def describe(words: list[str]) -> None:
    resource = load()
    state = resource["states"][0]
    resource["states"] = resource["states"][1:] or resource["states"]
    RESOURCE.write_text(json.dumps(resource))
    if state == "GONE":
        RESOURCE.unlink()
        fail("NOT_FOUND: Resource was not found.")
    print(state)


def delete(words: list[str]) -> None:
    resource = load()
    if "--force" not in words:
        fail("FAILED_PRECONDITION: the resource has nodes")
    for home in ROOT.glob("w[0-9]*"):
        (home / "gone").touch()  # ends its programs
    RESOURCE.write_text(json.dumps(resource | {"states": ["DELETING", "GONE"]}))


def reached(words: list[str]) -> list[int]:
    """The workers that a command reaches: the others are left out with a warning, as gcloud does."""
    resource = load()
    wanted = range(resource["workers"]) if option(words, "worker") == "all" else [int(option(words, "worker"))]
    silent = (ROOT / "silent").read_text().split() if (ROOT / "silent").exists() else []
    return [w for w in wanted if str(w) not in silent]


def ssh(words: list[str]) -> None:
    codes = []
    for worker in reached(words):
        home = ROOT / f"w{worker}"
        environment = {"HOME": str(home), "PATH": f"{ROOT / 'bin'}:{os.environ['PATH']}", "FAKE_CLOUD": str(ROOT)}
        command = ["bash", "-c", option(words, "command")]
        codes.append(subprocess.run(command, cwd=home, env=environment | {"FAKE_HOST": f"host-{worker}"}).returncode)
    sys.exit(max(codes, default=0))


def scp(words: list[str]) -> None:
    source, target = [w for w in words if not w.startswith("--")]
    for worker in reached(words):
        shutil.copyfile(source, ROOT / f"w{worker}" / target.split(":", 1)[1])


def main(argv: list[str]) -> None:
    with open(ROOT / "calls.jsonl", "a") as file:
        file.write(json.dumps(argv) + "\n")
    if (ROOT / "broken").exists():
        fail("the network is down")
    assert argv[:3] == ["compute", "tpus", "queued-resources"] and "--quiet" in argv
    assert option(argv, "project") == "my-project" and option(argv, "zone") == "us-east5-a"
    verbs = {"create": create, "describe": describe, "delete": delete, "ssh": ssh, "scp": scp}
    verbs[argv[3]](argv[4:])


main(sys.argv[1:])
