"""What the endpoint takes: sizes, times, rates; and the bucket that keeps a client to its rate."""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable

from coevo_jax.config.several import require


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bytes, seconds and counts. Everything that waits or is held is bounded by one of them."""

    body: int = 1 << 20  # bytes of a request's body
    head: int = 32 << 10  # bytes of its head
    answers: int = 64  # of one request
    choices: int = 16  # n of a chat completion
    queue: int = 256  # requests that wait for the engine; one more gets 429
    batch: int = 64  # requests that the engine takes at once
    gather_s: float = 0.005  # how long the first of a batch waits for company
    connections: int = 1024  # open at a time; one more gets 503
    timeout_s: float = 60.0  # from a request's last byte to its reply; then 504
    read_s: float = 10.0  # from a request's first byte to its last; then 408
    idle_s: float = 30.0  # a connection without a request
    write_s: float = 30.0  # to send a reply
    drain_s: float = 30.0  # for requests under way when the process is told to end
    rate: float = 100.0  # requests a second of one address; more get 429. 0 = no limit
    burst: int = 200  # requests that may come at once

    def check(self) -> Limits:
        """Itself. UserError for a value out of range."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("gather_s", "drain_s", "rate") else 1 if field.type == "int" else 0.001
            require(least <= value <= 2**40, f"{field.name} = {value} is out of range", f"--{field.name}", f"at least {least}")
        return self


class Rate:
    """A token bucket for each client, the least recent forgotten beyond `most`. Safe for threads."""

    def __init__(self, rate: float, burst: int, most: int = 4096, clock: Callable[[], float] = time.monotonic):
        self.rate, self.burst, self.most, self.clock = rate, float(burst), most, clock
        self._lock = threading.Lock()
        self._buckets: collections.OrderedDict[str, tuple[float, float]] = collections.OrderedDict()  # tokens, when

    def wait(self, client: str) -> float:
        """0 where the client may go on, else the seconds until it may."""
        if self.rate <= 0:
            return 0.0
        with self._lock:
            now = self.clock()
            tokens, then = self._buckets.pop(client, (self.burst, now))
            tokens = min(self.burst, tokens + (now - then) * self.rate)
            wait = 0.0 if tokens >= 1 else (1 - tokens) / self.rate
            self._buckets[client] = (tokens - (wait == 0), now)
            if len(self._buckets) > self.most:
                self._buckets.popitem(last=False)
        return wait

    def __len__(self) -> int:
        return len(self._buckets)
