"""Who hangs, and where: every process tells the others what it does, and ends with a message that names the one that is lost.

A thread of each process writes a beat to the coordinator (stage, update, how long, which meeting it is in) and reads those of the
others. Three things end a run with code 75, within seconds on every process:
- a process that sends no beats for `dead_after` seconds (killed, its machine gone, stopped);
- a process that ended with an error, which it tells before it goes;
- a meeting (a collective, a save) in which some process waits longer than `hang_after` seconds: the one that has not come hangs,
  and prints where its threads stand.
Times are counted in the thread's own ticks, so a machine that sleeps and wakes up blames nobody.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from coevo_jax.errors import UserError

LOST = 75  # exit code (sysexits' EX_TEMPFAIL): the same command goes on with the run
PREFIX = "coevo/beat/"


@dataclasses.dataclass
class Beat:
    """What a process tells. `meetings`: how many it entered; `inside`: it is in one now. Seconds are those since each began."""

    number: int = 0
    stage: str = "start"
    update: int = 0
    stage_s: float = 0.0
    meetings: int = 0
    inside: bool = False
    inside_s: float = 0.0
    ended: str = ""  # how it ended, if it did

    def where(self) -> str:
        """'judge' of update 3, for 12 s"""
        return f"at {self.stage!r} of update {self.update}, for {self.stage_s:.0f} s"


class Watchdog:
    """Marks of this process, and the thread that compares them with those of the others. One process: marks cost nothing.

    store: the coordinator's (key_value_set, key_value_dir_get); end: what ends this process, replaced in tests.
    """

    def __init__(self, index: int = 0, count: int = 1, store: Any = None, end: Callable[[str], None] | None = None):
        self.index, self.count, self.store = index, count, store
        self.dead_after, self.hang_after = 60.0, 3600.0
        self.end = end or self._end
        self.own = Beat()
        self.beats: dict[int, Beat] = {}  # the others', as last heard
        self._silent = dict.fromkeys(range(count), 0.0)  # seconds without a new beat
        self._since = self._inside_since = time.monotonic()
        self._lock, self._closed = threading.RLock(), threading.Event()
        self._over = False
        self.interval = max(0.5, count / 64)  # all processes together ask the coordinator at most 128 times a second

    # ---- marks ---------------------------------------------------------------------------------------------------------

    def at(self, stage: str, update: int | None = None) -> None:
        """This process is now at `stage` (of another update, where one is given)."""
        with self._lock:
            self.own.stage, self._since = stage, time.monotonic()
            self.own.update = self.own.update if update is None else update

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A part of the stage, after which it is the one before again."""
        before, since = self.own.stage, self._since
        self.at(name)
        yield
        with self._lock:  # an error leaves the mark where it happened
            self.own.stage, self._since = before, since

    @contextlib.contextmanager
    def meeting(self, name: str) -> Iterator[None]:
        """A stage that no process leaves before all have come. All processes enter the same ones in the same order."""
        with self.stage(name):
            with self._lock:
                self.own.meetings, self.own.inside, self._inside_since = self.own.meetings + 1, True, time.monotonic()
            yield
            with self._lock:
                self.own.inside = False

    # ---- the thread ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to tell and to listen."""
        if self.count > 1:
            _before_abort(self._last_words)
            threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def finish(self, how: str = "") -> None:
        """Tell the others that this process is done ('' for well), and stop."""
        self._closed.set()
        if self.count > 1:
            self.own.ended = how or "well"
            with contextlib.suppress(Exception):
                self._tell()

    @contextlib.contextmanager
    def watching(self) -> Iterator[Watchdog]:
        """Watch over a block that every process runs. Where one of several fails, it tells the others and ends."""
        self.start()
        try:
            yield self
        except BaseException as error:
            if self.count > 1:
                self._fail(error)
            raise
        self.finish()

    def _fail(self, error: BaseException) -> None:
        """Does not return."""
        if not isinstance(error, UserError | KeyboardInterrupt | SystemExit):
            # It may be a collective that another's end broke: then the thread finds out whose, and ends this process first.
            if "Gloo" in str(error) or type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError"):
                print(f"[process {self.index}] {_first_line(error)}", file=sys.stderr, flush=True)
                time.sleep(self.dead_after + 8 * self.interval)
                while self._over:  # it has, and ends this process in a moment
                    time.sleep(self.interval)
            traceback.print_exception(error)
        elif isinstance(error, UserError):
            print(f"error: {error}", file=sys.stderr, flush=True)
        self.finish(f"{type(error).__name__}: {_first_line(error)}")
        if self.index == 0:
            time.sleep(4 * self.interval)  # the store goes with it
        os._exit(2 if isinstance(error, UserError) else 130 if isinstance(error, KeyboardInterrupt) else 1)

    def _run(self) -> None:
        before = time.monotonic()
        while not self._closed.wait(self.interval):
            now = time.monotonic()
            passed, before = min(now - before, 2 * self.interval), now
            try:
                self._tell()
                found = self._listen()
            except Exception as error:  # of the connection; what it says differs between versions
                if self._closed.is_set():
                    return
                self._silent[0] += passed
                if self.index == 0 or self._silent[0] <= self.dead_after:
                    continue
                found = f"process 0 can't be reached ({_first_line(error)}); it was {self._last_heard(0)}"
            found = found or self.verdict(passed)
            if found and not self._closed.is_set():
                self.end(found)
                return

    def _tell(self) -> None:
        with self._lock:
            now = time.monotonic()
            self.own.number += 1
            self.own.stage_s, self.own.inside_s = now - self._since, now - self._inside_since
            text = json.dumps(dataclasses.asdict(self.own))
        self.store.key_value_set(f"{PREFIX}{self.index}", text, allow_overwrite=True)

    def _listen(self) -> str:
        """Take in the others' beats; a verdict that one of them reached already is returned."""
        for key, text in self.store.key_value_dir_get(PREFIX):
            name = key.rpartition("/")[2]
            if name == "verdict":
                return text
            beat, index = Beat(**json.loads(text)), int(name)
            if index == self.index:
                continue
            if index not in self.beats or beat.number != self.beats[index].number:
                self._silent[index] = -1.0  # heard now: no time passed
            self.beats[index] = beat
        return ""

    # ---- verdicts ------------------------------------------------------------------------------------------------------

    def verdict(self, passed: float) -> str:
        """What ends the run, or ''. passed: seconds since the last call."""
        for index in self._others():
            self._silent[index] = 0.0 if self._silent[index] < 0 else self._silent[index] + passed
        return self._ended() or self._dead() or self._hung()

    def _others(self) -> list[int]:
        return [i for i in range(self.count) if i != self.index]

    def _ended(self) -> str:
        for index, beat in sorted(self.beats.items()):
            if beat.ended and beat.ended != "well":
                return f"process {index} ended {beat.where()}: {beat.ended}"
        return ""

    def _dead(self) -> str:
        gone = [i for i in self._others() if self._silent[i] > self.dead_after and not self._left(i)]
        if not gone:
            return ""
        told = "; ".join(f"process {i} was {self._last_heard(i)}" for i in gone)
        return f"no sign of life from process {_names(gone)} for {max(self._silent[i] for i in gone):.0f} s: {told}"

    def _left(self, index: int) -> bool:
        return index in self.beats and bool(self.beats[index].ended)

    def _last_heard(self, index: int) -> str:
        return f"last heard {self.beats[index].where()}" if index in self.beats else "never heard"

    def _hung(self) -> str:
        """Somebody waits in a meeting for longer than hang_after."""
        every = {**self.beats, self.index: self.own}
        newest = max(beat.meetings for beat in every.values())
        waiting = [i for i, b in every.items() if b.meetings == newest and b.inside and b.inside_s > self.hang_after]
        if not waiting:
            return ""
        missing = sorted(i for i, b in every.items() if b.meetings < newest)
        if not missing:
            inside = [i for i, b in every.items() if b.inside and b.meetings == newest]
            if len(inside) < self.count or len(waiting) < self.count:
                return ""  # somebody is out of it already, or came a short while ago
            beat = every[waiting[0]]
            return f"all processes are {beat.where()}, and it does not end: a collective or a file system hangs"
        told = "; ".join(f"process {i} hangs {every[i].where()}" for i in missing)
        beat = every[waiting[0]]
        return f"{told}; waiting {beat.where()}: process {_names(sorted(waiting))}"

    # ---- the end -------------------------------------------------------------------------------------------------------

    def _end(self, why: str) -> None:
        """Print the verdict and end this process at once: its main thread waits in a collective that nothing can interrupt."""
        self._over = True
        with contextlib.suppress(Exception):  # so that all say the same, whoever found it
            self.store.key_value_set(f"{PREFIX}verdict", why, allow_overwrite=False)
        self._say(why)
        if f"process {self.index} hangs" in why:
            faulthandler.dump_traceback(all_threads=True)
        if self.index == 0:  # the store goes with process 0, so the others read the verdict first
            time.sleep(4 * self.interval)
        os._exit(LOST)

    def _say(self, why: str) -> None:
        sys.stdout.flush()
        print(
            f"[process {self.index}] ends: {why}. The same command goes on from the last checkpoint.", file=sys.stderr, flush=True
        )

    def _last_words(self) -> None:
        """JAX aborts a process that lost the coordinator, and says so without naming what was going on."""
        if not self._over:
            self._say(
                f"no connection to process 0, the coordinator; it was {self._last_heard(0)}; this one was {self.own.where()}"
            )
        os._exit(LOST)


def _before_abort(say: Callable[[], None]) -> None:
    """Call `say` in place of SIGABRT's default. By C, not by Python's signal module: who aborts never returns to it."""
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int)
    handler = kind(lambda number: say())
    _kept.append(handler)  # C keeps no reference
    signal_function = ctypes.CDLL(None).signal
    signal_function.restype, signal_function.argtypes = ctypes.c_void_p, [ctypes.c_int, kind]
    signal_function(signal.SIGABRT, handler)


_kept: list[Any] = []


def _names(indices: list[int]) -> str:
    return ", ".join(map(str, indices))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
