"""HTTP requests over kept connections, each with a deadline for the whole of it. Standard library only.

Sockets time out per read, so a server that sends a byte now and then would hold a request for ever: here every read gets what
is left of the request's time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import http.client
import io
import select
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Mapping
from time import monotonic
from typing import Any

MAX_BODY = 4 * 2**20  # bytes; a completion of 100 thousand tokens is about 0.5 MB


class TransportError(Exception):
    """No usable answer came. kind: timeout | connection | cut_off | malformed."""

    def __init__(self, kind: str, detail: str):
        self.kind, self.detail = kind, detail
        super().__init__(f"{kind}: {detail}")


@dataclasses.dataclass(frozen=True)
class Answer:
    """A whole HTTP response. Names of headers in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


class Connections:
    """Connections to one host. Each is used by one thread at a time and kept while the server keeps it."""

    def __init__(self, base_url: str):
        parts = urllib.parse.urlsplit(base_url)
        self._host, self._port, self._path = parts.hostname or "", parts.port, parts.path.rstrip("/")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self._busy: set[http.client.HTTPConnection] = set()
        self._closed = False

    def post(self, path: str, body: bytes, headers: Mapping[str, str], timeout_s: float) -> Answer:
        """POST `body` to base_url + path. Redirects are not followed: they would take the key elsewhere. TransportError."""
        deadline = monotonic() + timeout_s
        connection, kept = self._take(), True
        if connection is None:
            connection, kept = self._new(), False
        try:
            try:
                answer, keep = _exchange(connection, self._path + path, body, headers, deadline)
            except _NoAnswer:
                if not kept:
                    raise
                # The server closed the kept connection as the request left: that says nothing about the request.
                self._drop(connection)
                connection = self._new()
                answer, keep = _exchange(connection, self._path + path, body, headers, deadline)
        except TransportError:
            self._drop(connection)
            raise
        except BaseException:
            self._drop(connection)
            raise
        self._give_back(connection, keep)
        return answer

    def close(self) -> None:
        """Close every connection; requests under way end with a TransportError."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for connection in idle:
            connection.close()
        for connection in busy:
            sock = connection.sock
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _take(self) -> http.client.HTTPConnection | None:
        """A kept connection on which nothing waits: what waits is its end, or bytes beyond the last response."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
                self._busy.add(connection)
            if connection.sock is not None and not _readable(connection.sock):
                return connection
            self._drop(connection)

    def _new(self) -> http.client.HTTPConnection:
        if self._tls is None:
            connection = http.client.HTTPConnection(self._host, self._port)
        else:
            connection = http.client.HTTPSConnection(self._host, self._port, context=self._tls)
        with self._lock:
            self._busy.add(connection)
        return connection

    def _drop(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._busy.discard(connection)
        connection.close()

    def _give_back(self, connection: http.client.HTTPConnection, keep: bool) -> None:
        with self._lock:
            self._busy.discard(connection)
            if keep and not self._closed:
                self._idle.append(connection)
                return
        connection.close()


class _NoAnswer(TransportError):
    """The connection ended before the first byte of a response."""


class _Timed(io.RawIOBase):
    """The bytes of a socket's file; every read ends at the deadline."""

    def __init__(self, raw: Any, sock: socket.socket, deadline: float):
        self._raw, self._sock, self._deadline = raw, sock, deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(_left(self._deadline))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, deadline: float, **kwargs: Any):
        super().__init__(sock, *args, **kwargs)
        self.fp = io.BufferedReader(_Timed(self.fp.detach(), sock, deadline))


def _left(deadline: float) -> float:
    left = deadline - monotonic()
    if left <= 0:
        raise TimeoutError("out of time")
    return left


def _exchange(
    connection: http.client.HTTPConnection, path: str, body: bytes, headers: Mapping[str, str], deadline: float
) -> tuple[Answer, bool]:
    """One request and its response; may the connection be used again?"""
    connection.response_class = functools.partial(_Response, deadline=deadline)  # type: ignore[assignment]
    answering = False
    try:
        if connection.sock is None:
            connection.timeout = _left(deadline)
            connection.connect()
        connection.sock.settimeout(_left(deadline))  # of the whole sendall
        connection.request("POST", path, body, dict(headers))
        response = connection.getresponse()
        answering = True
        with response:
            data = _read(response)
            keep = not response.will_close
        named = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, named, data), keep
    except TimeoutError:
        raise TransportError("timeout", "no whole response in time") from None
    except http.client.IncompleteRead:
        raise TransportError("cut_off", "the response's body was cut off") from None
    except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError) as error:
        kind = "cut_off" if answering else "connection"
        raise (TransportError if answering else _NoAnswer)(kind, type(error).__name__) from None
    except OSError as error:
        raise TransportError("connection", error.strerror or type(error).__name__) from None
    except (http.client.HTTPException, ValueError) as error:  # no HTTP, bad chunks, endless headers
        raise TransportError("malformed", f"not an HTTP response ({type(error).__name__})") from None


def _read(response: http.client.HTTPResponse) -> bytes:
    parts, size = [], 0
    while part := response.read(65536):
        size += len(part)
        if size > MAX_BODY:
            raise TransportError("malformed", f"a body of more than {MAX_BODY} bytes")
        parts.append(part)
    if response.length:  # promised and never sent; http.client says nothing where reads have a size
        raise TransportError("cut_off", f"the response's body lacks {response.length} bytes")
    return b"".join(parts)


def _readable(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))
