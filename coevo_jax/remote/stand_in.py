"""A small endpoint on this machine that plays a role behind an API (endpoint.base_url=stand-in), so that such a run works without
a key or a network: over HTTP, as the real one. It knows nothing: what it says depends on a hash of the prompt.
"""

from __future__ import annotations

import dataclasses
import hashlib
import http.server
import json
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from coevo_jax.config import EndpointConfig
from coevo_jax.errors import UserError
from coevo_jax.remote.client import Endpoint

Say = Callable[[float], str]  # from a number in [0, 1) that the prompt decides to a reply


def _rating(x: float) -> str:
    return json.dumps({"rating": 1 + int(10 * x)})


def _rubric(x: float) -> str:
    words = ["Answers in few words", "Says what the question asks for"]
    weights = [round(0.3 + 0.4 * x, 2), round(0.7 - 0.4 * x, 2)]
    levels = {"1.0": "yes", "0.0": "no"}
    return json.dumps({"criteria": [{"criterion": c, "weight": w, "scoring_levels": levels} for c, w in zip(words, weights)]})


def _rar_rubric(x: float) -> str:
    kinds = ("Essential", "Essential", "Important", "Important", "Optional", "Optional", "Optional")
    items = [{"title": f"Point {i}", "description": f"{kind}: has property {i}", "weight": 1} for i, kind in enumerate(kinds)]
    return json.dumps({"items": items})


# By what a role is asked for: a judge's protocol (and 'pairwise' where it judges pairs side by side), or 'rubric' and the schema.
SAYS: dict[str, Say] = {
    "json_score": lambda x: json.dumps({"reasoning": "a stand-in does not read", "score": round(x, 3)}),
    "json_score pairwise": lambda x: json.dumps({"score": round(x, 3), "winner": "AB"[int(2 * x)]}),
    "likert": _rating,
    "likert_reference": _rating,
    "rar_implicit": _rating,
    "rar_explicit": lambda x: "yes" if x < 0.5 else "no",
    "rubric json_criteria": _rubric,
    "rubric rar": _rar_rubric,
}


class Played(Endpoint):
    """An Endpoint whose other side is a server of this process; close() ends both. UserError: nothing plays `kind`."""

    def __init__(self, role: str, model: str, cfg: EndpointConfig, kind: str, environ: Mapping[str, str] = os.environ):
        if kind not in SAYS:
            raise UserError(f"the stand-in can't play {kind!r}", where=f"{role}.endpoint.base_url",
                            expected=f"the address of an endpoint; it plays {', '.join(SAYS)}")  # fmt: skip
        self._server = _serve(SAYS[kind])
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        super().__init__(role, model, dataclasses.replace(cfg, base_url=self.url), environ)

    def close(self) -> None:
        """End requests under way, the cache and the server."""
        super().close()
        self._server.shutdown()
        self._server.server_close()


def _serve(say: Say) -> http.server.ThreadingHTTPServer:
    class Handler(_Handler):
        reply = staticmethod(say)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), name="stand-in", daemon=True).start()
    return server


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    reply: Say

    def do_POST(self) -> None:
        prompt = self.rfile.read(int(self.headers["Content-Length"]))
        x = int.from_bytes(hashlib.blake2b(prompt, digest_size=4).digest(), "big") / 2**32
        choice = {"index": 0, "message": {"role": "assistant", "content": self.reply(x)}, "finish_reason": "stop"}
        usage = {"prompt_tokens": len(prompt) // 4, "completion_tokens": 16}
        data = json.dumps({"choices": [choice], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        """Nothing: the run's own counters tell what was asked."""
