"""An endpoint that writes: many requests under way, up to a limit, each retried, cached by content and counted.

Resume: a checkpoint holds nothing of an endpoint. Replies are keyed by content, so updates that are done again after a kill meet
the same replies in the cache and give the same rows. Failures are not cached: an outage should not be remembered, so an update
that lost verdicts to one may come out differently when it is done again.

Nothing depends on the order in which replies come. The key of an endpoint comes from an environment variable, goes into one
header and is cut out of every text that comes back.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import email.utils
import hashlib
import json
import math
import os
import pathlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from coevo_jax.config import EndpointConfig
from coevo_jax.errors import UserError
from coevo_jax.remote.cache import ReplyCache
from coevo_jax.remote.messages import (
    KINDS,
    MAX_DETAIL,
    Ask,
    Failure,
    Reply,
    content_key,
    error_text,
    from_entry,
    read_reply,
    request_body,
    to_entry,
)
from coevo_jax.remote.transport import Answer, Connections, TransportError

CACHE_FILE = "api_cache.jsonl"
RETRIED = {408, 409, 425, 429}  # and all of 5xx
COUNTS = ("asked", "cached", "requests", "retries", "gave_up", "prompt_tokens", "completion_tokens")


class Closed(Exception):
    """The endpoint was closed while a request was under way."""


class Endpoint:
    """One model behind an OpenAI-compatible endpoint. `role` ('judge', 'generator') names its settings and its counters."""

    def __init__(self, role: str, model: str, cfg: EndpointConfig, environ: Mapping[str, str] = os.environ):
        self.role, self.model, self.cfg = role, model, cfg
        self._secret = _secret(role, cfg, environ)
        self._connections = Connections(cfg.base_url)
        self._pool = concurrent.futures.ThreadPoolExecutor(cfg.concurrency, thread_name_prefix=f"{role}-endpoint")
        self._cache: ReplyCache | None = None
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._stop = threading.Event()
        self._quiet_until = 0.0  # the endpoint asked everybody to wait

    def open_cache(self, folder: str | os.PathLike[str]) -> None:
        """Use the cache that the config names; a run's own is in `folder`."""
        if self.cfg.cache != "off":
            path = pathlib.Path(folder) / CACHE_FILE if self.cfg.cache == "run" else pathlib.Path(self.cfg.cache)
            self._cache = ReplyCache(path)

    def ask(self, asks: Sequence[Ask]) -> list[Reply]:
        """One reply an ask, in their order. Asks of the same content share one request."""
        return self.start(asks)()

    def start(self, asks: Sequence[Ask]) -> Callable[[], list[Reply]]:
        """Send the requests and return at once; the result gives the replies of `ask`."""
        bodies = [request_body(ask, self.model, self.cfg) for ask in asks]
        keys = [content_key(body, ask.attempt) for body, ask in zip(bodies, asks)]
        futures: dict[str, concurrent.futures.Future[Reply]] = {}
        known: dict[str, Reply] = {}
        for key, body in zip(keys, bodies):
            self._count("asked")
            if key in known or key in futures:
                self._count("cached")
            elif (reply := self._cached(key)) is not None:
                self._count("cached")
                known[key] = reply
            else:
                futures[key] = self._pool.submit(self._fetch, key, json.dumps(body).encode())

        def collect() -> list[Reply]:
            replies = known | {key: future.result() for key, future in futures.items()}
            if futures and self._cache is not None:
                self._cache.sync()
            return [replies[key] for key in keys]

        return collect

    def take_stats(self) -> dict[str, float]:
        """Counters since the last call, for a metrics row. cost: by the prices of the config, of replies that were paid now.

        They tell what this process did, cache and network included, so they differ between a run and its resumed copy.
        """
        with self._lock:
            counts, self._counts = self._counts, Counter()
        name = f"api/{self.role}"
        cost = (counts["prompt_tokens"] * self.cfg.price_in + counts["completion_tokens"] * self.cfg.price_out) / 1e6
        out = {f"{name}/{count}": float(counts[count]) for count in COUNTS} | {f"{name}/cost": cost}
        return out | {f"{name}/failures/{kind}": float(counts[kind]) for kind in KINDS}

    def close(self) -> None:
        """End requests under way and close the cache."""
        self._stop.set()
        self._connections.close()
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._cache is not None:
            self._cache.close()
            self._cache = None

    # ------------------------------------------------------------------------------------------------ one request

    def _cached(self, key: str) -> Reply | None:
        entry = self._cache.get(key) if self._cache is not None else None
        return from_entry(entry) if entry is not None else None

    def _fetch(self, key: str, body: bytes) -> Reply:
        """In a worker: try, wait and try again. A failure becomes a reply; UserError only for the disk."""
        for attempt in range(self.cfg.retries + 1):
            self._count("requests")
            self._count("retries", attempt > 0)
            try:
                reply = self._try(body)
            except Failure as failure:
                last = failure
                self._count(failure.kind)
                if not failure.retry:
                    break
                if attempt < self.cfg.retries:
                    self._wait(key, attempt, failure.wait)
                continue
            self._count("prompt_tokens", reply.prompt_tokens)
            self._count("completion_tokens", reply.completion_tokens)
            if self._cache is not None:
                self._cache.put(key, to_entry(reply))
            return reply
        self._count("gave_up")
        return last.reply

    def _try(self, body: bytes) -> Reply:
        self._hold()
        headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "coevo-jax"}
        if self._secret:
            headers["Authorization"] = f"Bearer {self._secret}"
        try:
            try:
                answer = self._connections.post("/chat/completions", body, headers, self.cfg.timeout_s)
            except TransportError as error:
                raise Failure(error.kind, error.detail, retry=True) from None
            _check_status(answer)
            reply = read_reply(answer.body)
        except Failure as failure:
            if self._stop.is_set():
                raise Closed from None
            failure.detail = self._clean(failure.detail)[:MAX_DETAIL]
            raise
        top = tuple((self._clean(token), value) for token, value in reply.top)
        return dataclasses.replace(reply, text=self._clean(reply.text), top=top)

    def _clean(self, text: str) -> str:
        """An endpoint may say the key back, and what it says is logged and saved."""
        return text.replace(self._secret, "[key]") if self._secret else text

    def _wait(self, key: str, attempt: int, asked: float) -> None:
        """Before a retry: exponential, with jitter in [0.5, 1) that the request's content decides; never less than was asked for,
        up to max_wait_s. What was asked for holds for all requests."""
        longest = self.cfg.max_wait_s
        wait = min(self.cfg.backoff_s * 2.0 ** min(attempt, 60), longest) * jitter(key, attempt)
        if asked > 0:
            with self._lock:
                self._quiet_until = max(self._quiet_until, time.monotonic() + min(asked, longest))
        self._sleep(wait)

    def _hold(self) -> None:
        """Wait while the endpoint wants quiet."""
        while (left := self._quiet_until - time.monotonic()) > 0:
            self._sleep(left)
        self._sleep(0.0)

    def _sleep(self, seconds: float) -> None:
        if self._stop.wait(seconds) if seconds > 0 else self._stop.is_set():
            raise Closed

    def _count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._counts[name] += number


def jitter(key: str, attempt: int) -> float:
    """A number in [0.5, 1) that depends on the request's content and the try alone."""
    digest = hashlib.blake2b(f"{key}/{attempt}".encode(), digest_size=8).digest()
    return 0.5 + int.from_bytes(digest, "big") / 2**65


def _check_status(answer: Answer) -> None:
    status = answer.status
    if status == 200:
        return
    retry = status in RETRIED or 500 <= status < 600
    kind = "rate_limit" if status == 429 else "server_error" if retry else "refused"
    raise Failure(kind, f"HTTP {status}: {error_text(answer.body)}", retry, retry_after(answer.headers.get("retry-after", "")))


def retry_after(text: str, now: Callable[[], float] = time.time) -> float:
    """Seconds of a Retry-After header (a number or a date), 0 for none or nonsense."""
    try:
        seconds = float(text) if text.strip()[:1].isdigit() else email.utils.parsedate_to_datetime(text).timestamp() - now()
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0


def _secret(role: str, cfg: EndpointConfig, environ: Mapping[str, str]) -> str:
    if not cfg.key_env:
        return ""
    where, value = f"{role}.endpoint.key_env", environ.get(cfg.key_env, "").strip()
    if not value:
        raise UserError(f"the environment variable {cfg.key_env} is not set", where=where, expected="the endpoint's key in it")
    if not (value.isascii() and value.isprintable()):
        raise UserError(f"the value of {cfg.key_env} can't be a key", where=where, expected="printable ASCII on one line")
    return value
