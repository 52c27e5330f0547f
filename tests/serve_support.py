"""What the tests of serving share: systems of the small world over one set of compiled programs, and servers of them."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

from train_support import shared_programs

from coevo_jax.judges.world import check, read_criterion
from coevo_jax.serve.library import System, load_system
from coevo_jax.serve.limits import Limits
from coevo_jax.serve.rounds import Stopped
from coevo_jax.serve.server import Server, Service

QUESTION = "write 5 words with owl without fox first ant"
GOOD, BAD = "ant bee owl yak cat", "fox fox"
RUBRIC = {"criteria": [{"criterion": "includes owl", "weight": 2}, {"criterion": "begins with ant", "weight": 1}]}


def system_of(*args: Any, **kwargs: Any) -> System:
    """load_system, compiled programs shared."""
    with shared_programs():
        return load_system(*args, **kwargs)


def rule_score(criteria: list[dict[str, Any]], answer: str) -> float:
    """What the oracle's rules make of an answer, worked out here."""
    parts = []
    for criterion in criteria:
        prop = read_criterion(criterion["criterion"])
        parts.append((criterion["weight"], 0.5 if prop is None else check(prop, answer)))
    return sum(w * p for w, p in parts) / sum(w for w, _ in parts)


@dataclasses.dataclass
class Reply:
    """An HTTP reply."""

    status: int
    headers: dict[str, str]
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def code(self) -> str:
        return str(self.json["error"]["code"])


class Client:
    """Requests to a server on this machine, a connection each."""

    def __init__(self, port: int):
        self.port = port

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout: float = 30) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
            reply = connection.getresponse()
            return Reply(reply.status, {k.lower(): v for k, v in reply.getheaders()}, reply.read())
        finally:
            connection.close()

    def post(self, path: str, body: Any, **kwargs: Any) -> Reply:
        return self.ask("POST", path, body, **kwargs)

    def scores(self, answers: list[str], **fields: Any) -> Reply:
        return self.post("/v1/scores", {"question": QUESTION, "answers": answers, "rubric": RUBRIC, **fields})


@contextlib.contextmanager
def serving(system: Any, token: str = "", **limits: Any) -> Iterator[tuple[Client, Service]]:
    """A server of a system, None: one that is still loading."""
    service = Service(Limits(**{"rate": 0, **limits}), token)
    server = Server("127.0.0.1", 0, service)
    server.start()
    if system is not None:
        service.begin(system)
    try:
        yield Client(server.port), service
    finally:
        service.limits = dataclasses.replace(service.limits, drain_s=0.0)
        service.end()
        server.shutdown()
        server.server_close()


def until(true: Any, seconds: float = 10.0) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.005)


class Gated:
    """A system whose rounds wait for `gate`. `seen`: the questions of each round; one that asks `poison` breaks its round."""

    def __init__(self, system: System):
        self.system, self.gate, self.seen = system, threading.Event(), []  # type: ignore[var-annotated]
        self.poison = ""

    def advance(self, drafts: Any, stop: Any, deliver: Any) -> None:
        self.seen.append([draft.ask.question for draft in drafts])
        while not self.gate.wait(0.01):
            if stop():
                raise Stopped
        if any(draft.ask.question == self.poison for draft in drafts):
            raise RuntimeError("the round broke")
        self.system.advance(drafts, stop, deliver)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.system, name)
