"""One JSON line a command on stdin, one JSON line an answer on stdout. Standard library only.

    {"command": "load", ...}  ->  {"ok": true, ...}      model loaded
    {"command": "run", ...}   ->  {"ok": true, "lengths": [...], "seconds": ...}
    {"command": "stop"}       ->  the process ends
An exception becomes {"ok": false, "error": traceback}; the process goes on.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

Answer = dict[str, Any]


def serve(handlers: dict[str, Callable[[Answer], Answer]]) -> None:
    """Answer commands until 'stop' or the end of stdin. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["command"] == "stop":
            return
        try:
            if asked["command"] not in handlers:
                raise KeyError(f"unknown command {asked['command']!r}")
            answer = {"ok": True, **handlers[asked["command"]](asked)}
        except Exception:
            answer = {"ok": False, "error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


def lengths_to_end(rows: list[list[int]], end: int) -> list[int]:
    """Tokens of each row up to and including the first end token."""
    return [row.index(end) + 1 if end in row else len(row) for row in rows]
