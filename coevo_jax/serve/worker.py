"""The one thread that asks the system: requests wait in a bounded queue, and those that wait are answered together.

A batch runs to its end before the next one begins (the engine takes no new request while it runs), so a request waits at most for
the batch before its own. Who is gone or too late is taken out of the queue; a batch that nobody waits for any more is stopped. A
request that breaks the batch is found by asking each alone, and fails alone.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

from coevo_jax.serve.asks import Ask, Result
from coevo_jax.serve.library import Stopped, System
from coevo_jax.serve.limits import Limits


class Full(Exception):
    """The queue is full."""


class Closed(Exception):
    """No more requests are taken: the process is ending."""


@dataclasses.dataclass(eq=False)
class Job:
    """A request that waits. `done` is set once `result` is there, a UserError (bad input) or another exception (our fault)."""

    ask: Ask
    deadline: float
    done: threading.Event = dataclasses.field(default_factory=threading.Event)
    result: Result | Exception | None = None
    gone: bool = False

    def alive(self) -> bool:
        """Does anybody wait for it?"""
        return not self.gone and time.monotonic() < self.deadline


class Worker:
    """Queue and thread. note: told of faults of ours, without the text of requests."""

    def __init__(self, system: System, limits: Limits, note: Callable[[str], None] = lambda text: None):
        self.system, self.limits, self.note = system, limits, note
        self._waiting: collections.deque[Job] = collections.deque()
        self._change = threading.Condition()
        self._closed = False
        self._running: list[Job] = []
        self._since = 0.0
        self.counts: collections.Counter[str] = collections.Counter()
        self._thread = threading.Thread(target=self._loop, name="serve-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Is the thread there?"""
        return self._thread.is_alive()

    def submit(self, ask: Ask) -> Job:
        """Let a request wait its turn. Full, Closed."""
        job = Job(ask, time.monotonic() + self.limits.timeout_s)
        with self._change:
            if self._closed:
                raise Closed
            if len(self._waiting) >= self.limits.queue:
                self._waiting = collections.deque(j for j in self._waiting if j.alive())
            if len(self._waiting) >= self.limits.queue:
                raise Full
            self._waiting.append(job)
            self._change.notify_all()
        return job

    def cancel(self, job: Job) -> None:
        """Nobody waits for it any more."""
        with self._change:
            job.gone = True
            if job in self._waiting:
                self._waiting.remove(job)
            self.counts["cancelled"] += 1
        _finish(job, Stopped())

    def status(self) -> dict[str, Any]:
        """What waits and runs now, and what has been done."""
        with self._change:
            busy = time.monotonic() - self._since if self._running else 0.0
            now = {"waiting": len(self._waiting), "running": len(self._running), "busy_s": round(busy, 3)}
            return now | {name: self.counts[name] for name in ("answered", "batches", "cancelled", "failed")}

    def close(self, drain_s: float) -> bool:
        """Take no more, finish what waits within `drain_s`, end the rest with Closed. Was everything finished?"""
        end = time.monotonic() + drain_s
        with self._change:
            self._closed = True
            self._change.notify_all()
            while (self._waiting or self._running) and (left := end - time.monotonic()) > 0 and self.alive:
                self._change.wait(left)
            left_over = [*self._waiting, *self._running]
            self._waiting.clear()
        for job in left_over:
            job.gone = True
            _finish(job, Closed())
        return not left_over

    # ---- the thread ---------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        while batch := self._take():
            try:
                self._answer(batch)
            finally:
                with self._change:
                    self._running = []
                    self._change.notify_all()
                for job in batch:  # whatever happened, nobody waits for ever
                    _finish(job, RuntimeError("the batch was not answered"))

    def _take(self) -> list[Job]:
        """The next batch; empty when closed and all is done."""
        with self._change:
            while True:
                while not self._waiting and not self._closed:
                    self._change.wait()
                self._gather()
                batch = self._alive()
                if batch or (self._closed and not self._waiting):
                    self._running, self._since = batch, time.monotonic()
                    return batch

    def _gather(self) -> None:
        """Give the first one's company a moment to come."""
        end = time.monotonic() + self.limits.gather_s
        while 0 < len(self._waiting) < self.limits.batch and not self._closed and (left := end - time.monotonic()) > 0:
            self._change.wait(left)

    def _alive(self) -> list[Job]:
        """The first ones of the queue that somebody waits for."""
        batch: list[Job] = []
        while self._waiting and len(batch) < self.limits.batch:
            job = self._waiting.popleft()
            if job.alive():
                batch.append(job)
            else:
                _finish(job, Stopped())
        return batch

    def _answer(self, batch: list[Job]) -> None:
        self.counts["batches"] += 1
        try:
            results: list[Any] = list(
                self.system.ask_all([job.ask for job in batch], lambda: not any(job.alive() for job in batch))
            )
        except Stopped:
            results = [Stopped()] * len(batch)
        except Exception as error:
            if len(batch) > 1:
                return self._answer_alone(batch, error)
            self.note(f"a request failed: {type(error).__name__}: {str(error)[:200]}")
            self.counts["failed"] += 1
            results = [error]
        for job, result in zip(batch, results):
            self.counts["answered"] += not isinstance(result, Exception)
            _finish(job, result)

    def _answer_alone(self, batch: list[Job], error: Exception) -> None:
        self.note(f"a batch of {len(batch)} failed, each request is asked alone: {type(error).__name__}")
        for job in batch:
            self._answer([job])


def _finish(job: Job, result: Any) -> None:
    if not job.done.is_set():
        job.result = result
        job.done.set()
