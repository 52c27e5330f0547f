"""Ctrl-C and SIGTERM as a request to stop at the next good point; a second one stops at once."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def stop_on_signals(say: Callable[[str], None], doing: str) -> Iterator[threading.Event]:
    """An event that the first signal sets. say: tells what is done then, `doing`. Only the main thread hears signals."""
    stop = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        say(f"{signal.Signals(number).name}: {doing}; once more to stop at once")

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
