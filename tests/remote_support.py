"""A real HTTP server on this machine that behaves, or misbehaves, as a test says."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from coevo_jax.config import EndpointConfig, Sampling
from coevo_jax.remote import Ask, Endpoint

Script = Callable[["Handler", dict[str, Any], int], None]  # (handler, request body, number of the request) -> writes a response


class Server:
    """`script` answers each request; what came is in `bodies` and `headers`, the most requests at a time in `most`."""

    def __init__(self, script: Script):
        self.script, self.bodies, self.headers, self.paths = script, [], [], []
        self.now = self.most = self.connections = 0
        self.lock = threading.Lock()
        owner = self

        class Own(Handler):
            server_state = owner

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Own)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_state: Server

    def setup(self) -> None:
        super().setup()
        with self.server_state.lock:
            self.server_state.connections += 1

    def do_POST(self) -> None:
        state = self.server_state
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with state.lock:
            number = len(state.bodies)
            state.bodies.append(body)
            state.headers.append(dict(self.headers))
            state.paths.append(self.path)
            state.now += 1
            state.most = max(state.most, state.now)
        try:
            state.script(self, body, number)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            with state.lock:
                state.now -= 1

    def send(
        self, data: bytes | str, status: int = 200, headers: dict[str, str] | None = None, length: int | None = None
    ) -> None:
        data = data.encode() if isinstance(data, str) else data
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        self.wfile.write(data)

    def hang_up(self) -> None:
        self.close_connection = True

    def log_message(self, *args: Any) -> None:
        pass


def completion(text: str | None, finish: str | None = "stop", **choice: Any) -> str:
    """The body of a good response."""
    message = choice.pop("message", {"role": "assistant", "content": text})
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    return json.dumps(
        {"id": "x", "choices": [{"index": 0, "message": message, "finish_reason": finish, **choice}], "usage": usage}
    )


def says(text: str) -> Script:
    return lambda handler, body, number: handler.send(completion(text))


def first(bad: Script, times: int = 1, then: str = "fine") -> Script:
    """`bad` for the first requests, then a good response."""
    return lambda h, body, number: bad(h, body, number) if number < times else h.send(completion(then))


@contextlib.contextmanager
def serving(script: Script) -> Iterator[Server]:
    server = Server(script)
    try:
        yield server
    finally:
        server.http.shutdown()
        server.http.server_close()


FAST = {"backoff_s": 0.001, "max_wait_s": 0.05, "timeout_s": 5.0, "retries": 2, "cache": "off"}


@contextlib.contextmanager
def endpoint(url: str, folder: Any = None, environ: dict[str, str] | None = None, **fields: Any) -> Iterator[Endpoint]:
    """A client of `url`, impatient."""
    cfg = EndpointConfig(base_url=url, **{**FAST, **({"cache": "run"} if folder else {}), **fields})
    made = Endpoint("judge", "some-model", cfg, environ or {})
    if folder:
        made.open_cache(folder)
    try:
        yield made
    finally:
        made.close()


def ask(text: str = "hello", attempt: int = 0, **sampling: Any) -> Ask:
    return Ask([{"role": "user", "content": text}], Sampling(**sampling), attempt)


def nap(seconds: float) -> None:
    assert seconds <= 0.3
    time.sleep(seconds)
