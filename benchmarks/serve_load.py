"""Many clients of the endpoint at once: latency, throughput, lost and mixed-up answers, memory.

    python benchmarks/serve_load.py --clients=200 --seconds=60 [--generator=tiny --judge=oracle] [--json=FILE] [--url=http://HOST:PORT]

Each client keeps one connection and sends one request after the other: scores of random answers under random criteria (the rules
know the right ones, so an answer that belongs to another client is seen), the same with a rubric that is written first, rubrics
alone, and chats; now and then bad JSON, and now and then it hangs up in the middle. A 429 or 503 is tried again when Retry-After
says so. Without --url the endpoint is a process of its own, whose memory is read after a warm-up and at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from typing import Any

REPO = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from coevo_jax.judges.world import WORDS, check, make_question, read_criterion  # noqa: E402

MIX = {"scores": 0.6, "written": 0.15, "rubrics": 0.1, "chat": 0.1, "bad_json": 0.03, "hang_up": 0.02}
SETTLE_S = 5.0  # before memory is first read
JSON = {"Content-Type": "application/json"}


def true_score(criteria: list[dict[str, Any]], answer: str) -> float:
    """What the small world's rules say."""
    total = parts = 0.0
    for criterion in criteria:
        prop = read_criterion(criterion["criterion"])
        parts += criterion["weight"] * (0.5 if prop is None else check(prop, answer))
        total += criterion["weight"]
    return parts / total


class Client(threading.Thread):
    """One client. `times`: seconds of each good reply by kind; `counts`: what happened."""

    def __init__(self, number: int, address: tuple[str, int], end: float, headers: dict[str, str]):
        super().__init__(daemon=True)
        self.rng, self.address, self.end, self.headers = random.Random(number), address, end, headers
        self.times: dict[str, list[float]] = {kind: [] for kind in MIX}
        self.counts: Counter[str] = Counter()
        self.connection: http.client.HTTPConnection | None = None

    def run(self) -> None:
        while time.monotonic() < self.end:
            kind = self.rng.choices(list(MIX), list(MIX.values()))[0]
            try:
                self.one(kind)
            except (OSError, http.client.HTTPException) as error:
                self.counts["lost"] += kind != "hang_up"
                self.counts[f"error {type(error).__name__}"] += 1
                self.hang_up()
        self.hang_up()

    def one(self, kind: str) -> None:
        path, body, right = self.request(kind)
        if kind == "hang_up":
            self.send(path, body)
            time.sleep(self.rng.random() * 0.05)
            return self.hang_up()
        start = time.monotonic()
        while True:
            self.send(path, body)
            assert self.connection is not None
            reply = self.connection.getresponse()
            data = reply.read()
            if reply.will_close:
                self.hang_up()
            self.counts[f"status {reply.status}"] += 1
            if reply.status not in (429, 503):
                break
            self.counts["waited"] += 1
            time.sleep(float(reply.headers.get("Retry-After", "1")) * (0.5 + self.rng.random()))
        self.times[kind].append(time.monotonic() - start)
        if not right(reply.status, json.loads(data)):
            self.counts["wrong"] += 1

    def send(self, path: str, body: bytes) -> None:
        if self.connection is None:
            self.connection = http.client.HTTPConnection(*self.address, timeout=120)
        self.connection.request("POST", path, body, self.headers)

    def hang_up(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def request(self, kind: str) -> tuple[str, bytes, Any]:
        """(path, body, is a reply right?)"""
        rng = self.rng
        question, good = make_question(rng)
        if kind == "bad_json":
            return "/v1/scores", b'{"question": "' + question.encode(), lambda status, _: status == 400
        if kind == "rubrics":
            return (
                "/v1/rubrics",
                _dumps({"question": question}),
                lambda status, said: status == 200 and said["object"] == "rubric",
            )
        if kind == "chat":
            body = {"model": "generator", "messages": [{"role": "user", "content": question}], "max_tokens": 12, "n": 2}
            return "/v1/chat/completions", _dumps(body), lambda status, said: status == 200 and len(said["choices"]) == 2
        answers = [good, " ".join(rng.sample(WORDS, rng.randint(1, 6)))]
        body = {"question": question, "answers": answers}
        if kind != "written":
            words = rng.sample(WORDS, 3)
            body["rubric"] = {"criteria": [{"criterion": f"includes {word}", "weight": rng.random() + 0.1} for word in words]}  # type: ignore[assignment]
        return "/v1/scores", _dumps(body), lambda status, said: status == 200 and right_scores(said, body)


def right_scores(said: dict[str, Any], body: dict[str, Any]) -> bool:
    """Are the scores those of these answers, under the rubric that the reply has?"""
    written = said["rubric"]
    if written["status"] != "ok":
        return said["answers"] == [] and "rubric" not in body
    criteria = written["rubric"]["criteria"]
    if "rubric" in body and [c["criterion"] for c in criteria] != [c["criterion"] for c in body["rubric"]["criteria"]]:
        return False
    scores = [answer["score"] for answer in said["answers"]]
    wanted = [true_score(criteria, answer) for answer in body["answers"]]
    return len(scores) == len(wanted) and all(abs(a - b) < 1e-6 for a, b in zip(scores, wanted))


def _dumps(body: Any) -> bytes:
    return json.dumps(body).encode()


@contextlib.contextmanager
def endpoint(flags: argparse.Namespace) -> Iterator[tuple[tuple[str, int], subprocess.Popen[str] | None]]:
    """(address, process) of a ready endpoint."""
    if flags.url:
        parts = urllib.parse.urlsplit(flags.url)
        yield (parts.hostname or "127.0.0.1", parts.port or 80), None
        return
    words = [sys.executable, "-m", "coevo_jax.serve", "http", "--port=0", "--rate=0", f"--generator={flags.generator}",
             f"--judge={flags.judge}", *flags.rest]  # fmt: skip
    process = subprocess.Popen(words, cwd=REPO, text=True, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(REPO)})
    assert process.stderr is not None
    try:
        port = 0
        for line in process.stderr:
            print(line, end="", file=sys.stderr)
            port = int(line.split(":")[2].split(",")[0]) if line.startswith("listening") else port
            if line.startswith("ready"):
                break
        if process.poll() is not None or not port:
            raise SystemExit("the endpoint did not begin")
        threading.Thread(target=lambda: print(process.stderr.read(), file=sys.stderr), daemon=True).start()  # type: ignore[union-attr]
        yield ("127.0.0.1", port), process
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        process.kill()
        process.wait()


def health(address: tuple[str, int]) -> dict[str, Any]:
    connection = http.client.HTTPConnection(*address, timeout=30)
    connection.request("GET", "/health")
    found = json.loads(connection.getresponse().read())
    connection.close()
    return dict(found)


def run_clients(address: tuple[str, int], count: int, seconds: float, first: int, headers: dict[str, str]) -> list[Client]:
    """Let `count` clients work for `seconds`; prints progress."""
    end = time.monotonic() + seconds
    clients = [Client(first + i, address, end, headers) for i in range(count)]
    for client in clients:
        client.start()
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(10.0, max(left, 0.1)))
        done = sum(len(times) for client in clients for times in client.times.values())
        print(f"{done} replies, {max(left, 0):.0f} s left, {health(address)['memory_mib']} MiB", file=sys.stderr, flush=True)
    for client in clients:
        client.join(130)
    return clients


def summary(clients: list[Client], seconds: float) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    for client in clients:
        counts.update(client.counts)
    rows = {}
    for kind in MIX:
        times = sorted(t for client in clients for t in client.times[kind])
        if times:
            at = {f"p{p}": times[min(len(times) - 1, int(len(times) * p / 100))] for p in (50, 90, 99)}
            rows[kind] = {"replies": len(times), "mean": statistics.fmean(times), **at, "most": times[-1]}
    total = sum(row["replies"] for row in rows.values())
    stuck = sum(client.is_alive() for client in clients)
    head = {"clients": len(clients), "seconds": seconds, "replies": total, "per_second": total / seconds}
    return head | {"lost": counts["lost"] + stuck, "wrong": counts["wrong"], "counts": dict(counts), "latency": rows}


def main() -> int:
    """Exit code 1 where an answer was lost or wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--generator", default="tiny")
    parser.add_argument("--judge", default="oracle", help="'oracle', whose scores this program knows")
    parser.add_argument("--url", default="", help="of an endpoint that is there already")
    parser.add_argument("--token_env", default="", help="environment variable that holds its token")
    parser.add_argument("--json", default="", help="file for the figures")
    flags, rest = parser.parse_known_args()
    flags.rest = rest
    headers = JSON | ({"Authorization": f"Bearer {os.environ[flags.token_env]}"} if flags.token_env else {})
    with endpoint(flags) as (address, _):
        run_clients(address, flags.clients, SETTLE_S, 10**6, headers)
        before = health(address)
        found = summary(run_clients(address, flags.clients, flags.seconds, 0, headers), flags.seconds)
        after = health(address)
    found |= {"memory_mib_before": before["memory_mib"], "memory_mib_after": after["memory_mib"], "queue": after["queue"]}
    if flags.json:
        pathlib.Path(flags.json).write_text(json.dumps(found, indent=2) + "\n")
    print("| request | replies | mean ms | p50 | p90 | p99 | most |\n|---|---|---|---|---|---|---|")
    for kind, row in found["latency"].items():
        print(
            f"| {kind} | {row['replies']} | "
            + " | ".join(f"{1000 * row[k]:.0f}" for k in ("mean", "p50", "p90", "p99", "most"))
            + " |"
        )
    print(f"{found['replies']} replies in {flags.seconds:g} s, {found['per_second']:.0f} a second; lost {found['lost']}, "
          f"wrong {found['wrong']}; {found['counts']}")  # fmt: skip
    print(f"memory {found['memory_mib_before']} -> {found['memory_mib_after']} MiB; {found['queue']}")
    return 1 if found["lost"] or found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
