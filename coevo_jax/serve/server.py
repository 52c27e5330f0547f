"""The endpoint: a thread a connection reads one request after the other and waits for the worker's reply. Use: docs/serving.md.

Everything is bounded (limits.py): head and body in bytes and seconds, connections, the queue, the wait, the sending of a reply. A
client that hangs up while it waits takes its request out of the queue. Errors have OpenAI's form and a status; it goes on.
Bound to loopback by default; there, without a token, a request must name a loopback host, so that no page of the web can reach it
through a name of its own (DNS rebinding), and a body must be declared as JSON, which a page can't do across origins unasked.
"""

from __future__ import annotations

import collections
import contextlib
import hmac
import http.server
import io
import ipaddress
import resource
import select
import socket
import socketserver
import sys
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from coevo_jax.errors import UserError
from coevo_jax.remote.messages import plain
from coevo_jax.serve.library import System
from coevo_jax.serve.limits import Limits, Rate
from coevo_jax.serve.rounds import Stopped
from coevo_jax.serve.schema import ROUTES, Problem, Route, encode, read_body, wrong
from coevo_jax.serve.worker import Closed, Full, Job, Worker

HEALTH = ("/health", "/health/live", "/health/ready")
LINGER_S = 1.0  # how long what a refused client still sends is read, so that it sees the reply and no reset
RETRY_S = 1.0  # Retry-After of a full queue or a server that isn't ready


class Service:
    """What all connections share: the worker once it is there, limits, token, counters."""

    def __init__(self, limits: Limits, token: str = "", note: Callable[[str], None] = lambda text: None, access: bool = False):
        self.limits, self.note, self.access = limits.check(), note, access
        self.worker: Worker | None = None
        self.ending = False
        self.rate = Rate(limits.rate, limits.burst)
        self.counts: collections.Counter[str] = collections.Counter()
        self.started = time.monotonic()
        self._token = token.encode()
        self._lock = threading.Lock()
        self.watcher = Watcher()

    def begin(self, system: System) -> None:
        """The system is loaded: take requests."""
        worker = Worker(system, self.limits, self.note)
        worker.start()
        self.worker = worker

    def end(self) -> bool:
        """Take no more requests and finish those under way, for limits.drain_s. Were all finished?"""
        self.ending = True
        done = self.worker.close(self.limits.drain_s) if self.worker is not None else True
        self.watcher.close()
        return done

    @property
    def open(self) -> bool:
        """Does it need no token?"""
        return not self._token

    def knows(self, header: str) -> bool:
        """Is it the token's header? Compared in a time that doesn't tell how much of it is right."""
        kind, _, value = header.partition(" ")
        return self.open or (
            kind.lower() == "bearer" and hmac.compare_digest(value.strip().encode("utf-8", "replace"), self._token)
        )

    def count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1

    def state(self) -> str:
        """starting | ok | ending | failed"""
        if self.ending:
            return "ending"
        if self.worker is None:
            return "starting"
        return "ok" if self.worker.alive else "failed"

    def health(self) -> dict[str, Any]:
        """The body of GET /health."""
        with self._lock:
            counts = dict(sorted(self.counts.items()))
        queue = self.worker.status() if self.worker is not None else {}
        state = self.state()
        head = {"status": state, "ready": state == "ok", "uptime_s": round(time.monotonic() - self.started, 1)}
        return head | {"memory_mib": memory_mib(), "queue": queue | {"limit": self.limits.queue}, "counts": counts}

    def models(self) -> dict[str, Any]:
        """The body of GET /v1/models."""
        names = sorted(self.worker.system.cast.speakers) if self.worker is not None else []
        return {"object": "list", "data": [{"id": n, "object": "model", "created": 0, "owned_by": "coevo-jax"} for n in names]}


def memory_mib() -> float:
    """Resident memory of this process now; where the system doesn't say, its peak."""
    try:
        with open("/proc/self/statm") as file:
            return round(int(file.read().split()[1]) * resource.getpagesize() / 2**20, 1)
    except (OSError, ValueError, IndexError):
        return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10), 1)


class Watcher:
    """Sees which of the clients that wait have hung up, with one thread for all of them."""

    EVENTS = select.POLLIN | select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)

    def __init__(self, every_s: float = 0.1):
        self._every = every_s
        self._waiting: dict[int, tuple[socket.socket, Callable[[], None]]] = {}
        self._lock, self._some, self._closed = threading.Lock(), threading.Event(), False
        threading.Thread(target=self._loop, name="serve-watch", daemon=True).start()

    @contextlib.contextmanager
    def watch(self, sock: socket.socket, gone: Callable[[], None]) -> Any:
        """Inside, `gone` is called when the client hangs up."""
        number = sock.fileno()
        with self._lock:
            self._waiting[number] = (sock, gone)
        self._some.set()
        try:
            yield
        finally:
            with self._lock:
                self._waiting.pop(number, None)

    def close(self) -> None:
        self._closed = True
        self._some.set()

    def _loop(self) -> None:
        while not self._closed:
            with self._lock:
                waiting = dict(self._waiting)
                if not waiting:
                    self._some.clear()
            if not waiting:
                self._some.wait()
                continue
            poll = select.poll()
            for number in waiting:
                poll.register(number, self.EVENTS)
            for number, _ in poll.poll(0):
                self._look(number)
            time.sleep(self._every)

    def _look(self, number: int) -> None:
        with self._lock:  # the socket can't be closed or given to another client meanwhile
            if number not in self._waiting:
                return
            sock, gone = self._waiting[number]
            own = select.poll()  # again, since it may wait for another request by now; a socket with a timeout would block
            own.register(number, self.EVENTS)
            if not own.poll(0):
                return
            try:
                ended = sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
            except BlockingIOError:
                ended = False
            except OSError:
                ended = True
        if ended:
            gone()


class TooLarge(Exception):
    """More bytes came than the head may have."""


class Incoming(io.RawIOBase):
    """What a client sends, within a time and a number of bytes that `allow` sets."""

    def __init__(self, sock: socket.socket):
        self._sock = sock
        self._end, self._read_s, self._left = 0.0, 0.0, 0
        self.started = False  # has a byte come since?

    def allow(self, idle_s: float, read_s: float, most: int) -> None:
        """From now: the first byte within idle_s, the rest within read_s of it, `most` bytes in all."""
        self._end, self._read_s, self._left, self.started = time.monotonic() + idle_s, read_s, most, False

    def more(self, most: int) -> None:
        """Allow further bytes in the same time."""
        self._left = most

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._left <= 0:
            raise TooLarge
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._sock.settimeout(left)
        count = self._sock.recv_into(memoryview(buffer)[: self._left])
        self._left -= count
        if count and not self.started:
            self.started, self._end = True, time.monotonic() + self._read_s
        return count


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server_version, sys_version = "coevo-jax", ""
    disable_nagle_algorithm = True
    wbufsize = -1  # a reply leaves in one piece
    server: Server

    def setup(self) -> None:
        super().setup()
        self.rfile.close()  # ours has a time limit for all of a request, not for each of its bytes
        self.service = self.server.service
        self.incoming = Incoming(self.connection)
        self.rfile = io.BufferedReader(self.incoming, 8192)

    def handle_one_request(self) -> None:
        """Read a request, answer it. Every way out leaves the connection in order or closes it."""
        self.command, self.path, self.requestline, self.request_version = "", "", "", "HTTP/1.1"
        self.unread, self.begun = True, time.monotonic()
        limits = self.service.limits
        self.incoming.allow(limits.idle_s, limits.read_s, limits.head)
        try:
            self._request()
        except Problem as problem:
            self._refuse(problem)
        except TimeoutError:
            if not self.incoming.started or self.command == "(reply)":
                self.close_connection = True
            else:
                self._refuse(Problem(408, "request_timeout", f"the request did not come within {limits.read_s:g} s"))
        except TooLarge:
            self._refuse(Problem(431, "head_too_large", f"the head has more than {limits.head} bytes"))
        except OSError:
            self.close_connection = True  # the client is gone
        except Exception as error:
            self.service.note(f"a connection failed: {type(error).__name__}: {plain(str(error))[:200]}")
            self._refuse(Problem(500, "internal_error", "the server failed on this request"))

    # ---- reading ------------------------------------------------------------------------------------------------------

    def _request(self) -> None:
        self.raw_requestline = self.rfile.readline(8193)
        if not self.raw_requestline:
            self.close_connection = True
            return
        if len(self.raw_requestline) > 8192:
            raise Problem(414, "uri_too_long", "the request's first line is too long")
        self.begun = time.monotonic()
        if not self.parse_request():
            return  # send_error has answered
        path = self.path.partition("?")[0]
        self._allowed(path)
        if path in HEALTH:
            self._health(path)
        elif path == "/v1/models":
            self._need("GET")
            self._send(200, self.service.models())
        else:
            self._need("POST")
            self._answer(ROUTES[path])

    def _allowed(self, path: str) -> None:
        """Host, path, token and rate, before anything else of the request is read."""
        service = self.service
        framed = self.headers.get("Content-Length", "0").strip() != "0" or self.headers.get("Transfer-Encoding")
        self.unread = bool(framed) or self.command not in ("GET", "HEAD")
        if self.server.local and service.open and not is_loopback(self.headers.get("Host", "")):
            raise Problem(403, "host_not_allowed", "the request names another host than this machine's own")
        if path not in HEALTH and path != "/v1/models" and path not in ROUTES:
            known = ", ".join([*ROUTES, "/v1/models", *HEALTH])
            raise Problem(404, "not_found", f"no such path; there are {known}")
        if path in HEALTH:
            return
        if not service.knows(self.headers.get("Authorization", "")):
            raise Problem(401, "invalid_token", "the request's bearer token is missing or wrong")
        if wait := service.rate.wait(self.client_address[0]):
            raise Problem(429, "rate_limited", f"more than {service.limits.rate:g} requests a second", wait=wait)

    def _need(self, method: str) -> None:
        if self.command != method:
            raise Problem(405, "method_not_allowed", f"{plain(self.command)[:20]} is not for this path, {method} is")

    def _body(self) -> bytes:
        limits, headers = self.service.limits, self.headers
        if headers.get("Transfer-Encoding"):
            raise Problem(411, "length_required", "the body must come whole, with a Content-Length")
        lengths = {value.strip() for value in headers.get_all("Content-Length", [])}
        if not lengths:
            raise Problem(411, "length_required", "the request has no Content-Length")
        (text,) = lengths if len(lengths) == 1 else ("",)
        if not (text.isascii() and text.isdigit() and len(text) < 16):
            raise Problem(400, "invalid_length", "Content-Length is no number of bytes")
        if int(text) > limits.body:
            raise Problem(413, "body_too_large", f"the body has more than {limits.body} bytes")
        if headers.get_content_type() != "application/json":
            raise Problem(415, "unsupported_media_type", "the body's Content-Type must be application/json")
        if headers.get("Content-Encoding", "identity").lower() != "identity":
            raise Problem(415, "unsupported_encoding", "the body must come unencoded")
        if headers.get("Expect", "").lower() == "100-continue":
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.wfile.flush()
        self.incoming.more(int(text) + 1)
        data = self.rfile.read(int(text))
        if len(data) < int(text):
            raise ConnectionAbortedError("the client hung up within its body")
        self.unread = False
        return data

    def handle_expect_100(self) -> bool:
        """Nothing yet: a body that will be refused is not asked for."""
        return True

    # ---- answering ----------------------------------------------------------------------------------------------------

    def _health(self, path: str) -> None:
        self._need("GET")
        body = self.service.health()
        self._send(200 if path == "/health/live" or body["ready"] else 503, body)

    def _answer(self, route: Route) -> None:
        data, service = self._body(), self.service
        worker, state = service.worker, service.state()
        if worker is None or state != "ok":
            raise Problem(503, f"server_{state}", f"the server is {state}", wait=RETRY_S)
        try:
            ask = route.read(read_body(data), worker.system, service.limits)
            job = worker.submit(ask)
        except UserError as error:
            raise wrong(error) from None
        except Full:
            raise Problem(429, "queue_full", f"{service.limits.queue} requests are waiting", wait=RETRY_S) from None
        except Closed:
            raise Problem(503, "server_ending", "the server is ending", wait=RETRY_S) from None
        del data
        with service.watcher.watch(self.connection, lambda: worker.cancel(job)):
            job.done.wait(max(job.deadline - time.monotonic(), 0.0))
        self._send(200, {"id": f"{route.prefix}-{uuid.uuid4().hex}"} | route.write(ask, self._result(job, worker)))

    def _result(self, job: Job, worker: Worker) -> Any:
        if job.gone and not isinstance(job.result, Closed):
            self.service.count("hung_up")
            raise ConnectionAbortedError("the client hung up")
        if not job.done.is_set() or isinstance(job.result, Stopped):
            worker.cancel(job)
            raise Problem(504, "timeout", f"no reply within {self.service.limits.timeout_s:g} s", wait=RETRY_S)
        if isinstance(job.result, Closed):
            raise Problem(503, "server_ending", "the server is ending", wait=RETRY_S)
        if isinstance(job.result, UserError):
            raise wrong(job.result)
        if isinstance(job.result, Exception):
            raise Problem(500, "internal_error", "the server failed on this request")
        return job.result

    def _send(self, status: int, body: dict[str, Any], wait: float = 0.0) -> None:
        """A whole reply."""
        data = encode(body)
        command, self.command = self.command, "(reply)"
        self.connection.settimeout(self.service.limits.write_s)
        self.close_connection = self.close_connection or self.service.ending or self.unread
        self.send_response(status)
        headers = {"Content-Type": "application/json", "Content-Length": str(len(data)), "Cache-Control": "no-store"}
        headers |= {"X-Content-Type-Options": "nosniff"}
        headers |= {"Retry-After": str(max(1, round(wait)))} if wait else {}
        headers |= {"WWW-Authenticate": "Bearer"} if status == 401 else {}
        headers |= {"Allow": "POST" if self.path_known else "GET"} if status == 405 else {}
        headers |= {"Connection": "close"} if self.close_connection else {}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if command != "HEAD":
            self.wfile.write(data)
        self.wfile.flush()
        self.service.count(f"status_{status}")
        if self.service.access:
            taken = 1000 * (time.monotonic() - self.begun)
            self.service.note(f"{self.client_address[0]} {plain(command)[:10]} {plain(self.path)[:80]} {status} {taken:.0f} ms")

    @property
    def path_known(self) -> bool:
        return self.path.partition("?")[0] in ROUTES

    def _refuse(self, problem: Problem) -> None:
        """An error, and what the client still sends is read for a moment: closing at once could destroy the reply on its way."""
        try:
            if self.request_version == "HTTP/0.9":
                self.request_version = "HTTP/1.0"
            self.unread = self.unread or problem.status in (408, 414, 431)
            self._send(problem.status, problem.body(), problem.wait)
            if self.unread:
                self._linger()
        except OSError:
            self.close_connection = True

    def _linger(self) -> None:
        self.connection.shutdown(socket.SHUT_WR)
        self.incoming.allow(LINGER_S, LINGER_S, 8 * self.service.limits.body)
        with contextlib.suppress(TooLarge, OSError):
            while self.rfile.read1(65536):
                pass

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Faults that the library finds in a request's head."""
        self.close_connection = True
        self._refuse(Problem(int(code), "bad_request", f"the request can't be read: {plain(message or '')[:80]}"))

    def version_string(self) -> str:
        return self.server_version

    def log_message(self, *args: Any) -> None:
        """The library's own log is off: `access` has ours."""


def is_loopback(host: str) -> bool:
    """Does a Host header name this machine's own address?"""
    name = host.strip().lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Listens; a thread a connection, up to limits.connections."""

    daemon_threads, block_on_close = True, False
    allow_reuse_address = True
    request_queue_size = 512

    def __init__(self, host: str, port: int, service: Service):
        self.service = service
        self.local = is_loopback(f"[{host}]" if ":" in host else host)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._open, self._lock = 0, threading.Lock()
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UserError(
                f"can't listen on {host} port {port}: {reason}", where="--host, --port", expected="a free port"
            ) from None

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            full = self._open >= self.service.limits.connections
            self._open += not full
        if not full:
            try:
                return super().process_request(request, client_address)
            except RuntimeError:  # the machine has no thread left
                with self._lock:
                    self._open -= 1
        self.service.count("status_503")
        body = encode(Problem(503, "too_many_connections", "too many connections are open").body())
        head = f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        with contextlib.suppress(OSError):
            request.setblocking(False)
            request.send(f"{head}Retry-After: 1\r\nConnection: close\r\n\r\n".encode() + body)
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._open -= 1

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that broke is nothing to tell; a fault of ours is."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            self.service.note(f"a connection failed: {type(error).__name__}: {plain(str(error))[:200]}")

    def start(self) -> None:
        """Serve in a thread."""
        threading.Thread(target=self.serve_forever, args=(0.05,), name="serve-accept", daemon=True).start()
