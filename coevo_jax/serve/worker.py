"""The one thread that asks the system: requests wait in a bounded queue, and those that wait go through its rounds together.

A round runs to its end before others join (the engine takes no new request while it runs), so a request waits at most for the
round before its first. Who is gone or too late is taken out between rounds; a round that nobody waits for any more is stopped. A
request that breaks its round is found by letting each go alone, and fails alone.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

from coevo_jax.errors import UserError
from coevo_jax.serve.asks import Ask, Result
from coevo_jax.serve.library import System
from coevo_jax.serve.limits import Limits
from coevo_jax.serve.rounds import Draft, Stopped


class Full(Exception):
    """The queue is full."""


class Closed(Exception):
    """No more requests are taken: the process is ending."""


@dataclasses.dataclass(eq=False)
class Job:
    """A request that waits. `done` is set once `result` is there, a UserError (bad input) or another exception (our fault)."""

    draft: Draft
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
        """Let a request wait its turn. UserError: it can't be answered; Full, Closed."""
        draft = self.system.begin(ask)
        if isinstance(draft.result, UserError):
            raise draft.result
        job = Job(draft, time.monotonic() + self.limits.timeout_s)
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
            return now | {name: self.counts[name] for name in ("answered", "rounds", "cancelled", "failed")}

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
        if not left_over and self.alive:
            self._thread.join(5.0)
        return not left_over

    # ---- the thread ---------------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        going: list[Job] = []
        while going := self._join(going):
            try:
                self._round(going)
            except BaseException:
                for job in going:  # whatever happened, nobody waits for ever
                    _finish(job, RuntimeError("the round was not finished"))
                raise

    def _join(self, going: list[Job]) -> list[Job]:
        """Those of a round that go on and those that waited, up to limits.batch. Empty when closed and all is done."""
        with self._change:
            while True:
                going = [job for job in going if not job.done.is_set()]
                self._running = going = self._alive(going)
                self._change.notify_all()
                while not (going or self._waiting or self._closed):
                    self._change.wait()
                if not going:
                    self._gather()
                while self._waiting and len(going) < self.limits.batch:
                    going += self._alive([self._waiting.popleft()])
                if going or (self._closed and not self._waiting):
                    self._running, self._since = going, time.monotonic()
                    return going

    def _gather(self) -> None:
        """Give the first one's company a moment to come."""
        end = time.monotonic() + self.limits.gather_s
        while 0 < len(self._waiting) < self.limits.batch and not self._closed and (left := end - time.monotonic()) > 0:
            self._change.wait(left)

    def _alive(self, jobs: list[Job]) -> list[Job]:
        """Those that somebody waits for."""
        for job in jobs:
            if not job.alive():
                _finish(job, Stopped())
        return [job for job in jobs if job.alive() and not job.done.is_set()]

    def _round(self, jobs: list[Job]) -> None:
        self.counts["rounds"] += 1
        by_draft = {id(job.draft): job for job in jobs}

        def deliver(draft: Draft) -> None:
            job = by_draft[id(draft)]
            self.counts["answered"] += not job.done.is_set()
            _finish(job, draft.result)

        try:
            self.system.advance([job.draft for job in jobs], lambda: not any(job.alive() for job in jobs), deliver)
        except Stopped:
            for job in jobs:
                _finish(job, Stopped())
        except Exception as error:
            for job in jobs:  # answered before the round broke
                if job.draft.result is not None:
                    deliver(job.draft)
            left = [job for job in jobs if not job.done.is_set()]
            if len(jobs) > 1:
                self.note(f"a round of {len(jobs)} failed, each request goes alone: {type(error).__name__}")
                for job in left:
                    self._round([job])
                return
            self.note(f"a request failed: {type(error).__name__}: {str(error)[:200]}")
            self.counts["failed"] += len(left)
            for job in left:
                _finish(job, error)


def _finish(job: Job, result: Any) -> None:
    if not job.done.is_set():
        job.result = result
        job.done.set()
