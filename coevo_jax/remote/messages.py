"""What is asked of an endpoint and what it said: request bodies out, replies in. Everything that comes in is hostile."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from coevo_jax.config import EndpointConfig, Sampling
from coevo_jax.records.verdicts import Status

MAX_COUNT = 2**31  # tokens; more is a lie
MAX_DETAIL = 200  # characters of a foreign error message
# What went wrong with a try -> the status of a request that ended so.
KINDS: dict[str, str] = {
    "timeout": "timeout",
    "connection": "timeout",  # nobody answered
    "cut_off": "parse_fail",
    "malformed": "parse_fail",
    "rate_limit": "refused",  # HTTP 429
    "server_error": "refused",  # HTTP 5xx, 408, 409, 425, or an error in the body of a 200
    "refused": "refused",  # other HTTP statuses, a refusal, a content filter
}


@dataclasses.dataclass(frozen=True)
class Ask:
    """One completion of `messages`. attempt: a further try of the same text is another ask. top_logprobs: of the first token."""

    messages: Sequence[Mapping[str, str]]
    sampling: Sampling
    attempt: int = 0
    top_logprobs: int = 0


@dataclasses.dataclass(frozen=True)
class Reply:
    """status 'ok' with the text, or a failure with `detail`. top: (token, log-prob) of the first token's alternatives."""

    status: Status = "ok"
    text: str = ""
    truncated: bool = False
    top: tuple[tuple[str, float], ...] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0
    detail: str = ""


class Failure(Exception):
    """A try that failed. retry: may another one fare better? wait: seconds that the endpoint asked for."""

    def __init__(self, kind: str, detail: str, retry: bool, wait: float = 0.0):
        self.kind, self.detail, self.retry, self.wait = kind, detail, retry, wait
        super().__init__(f"{kind}: {detail}")

    @property
    def reply(self) -> Reply:
        return Reply(cast(Status, KINDS[self.kind]), detail=f"{self.kind}: {self.detail}")


def request_body(ask: Ask, model: str, cfg: EndpointConfig) -> dict[str, Any]:
    """The request as a JSON object. What has its usual default is left out: some models refuse the field."""
    s = ask.sampling
    body: dict[str, Any] = {"model": model, "messages": [dict(m) for m in ask.messages], cfg.length_field: s.max_new_tokens}
    if s.temperature != 1.0:
        body["temperature"] = s.temperature
    if s.top_p < 1.0:
        body["top_p"] = s.top_p
    if s.top_k:
        body["top_k"] = s.top_k
    if s.min_new_tokens:
        body["min_tokens"] = s.min_new_tokens
    if ask.top_logprobs:
        body |= {"logprobs": True, "top_logprobs": ask.top_logprobs}
    return body | (json.loads(cfg.extra_body) if cfg.extra_body else {})


def content_key(body: Mapping[str, Any], attempt: int) -> str:
    """Hash of (model, messages, sampling, attempt). The address is no part of it: a server that moves keeps its replies."""
    text = json.dumps([body, attempt], sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def read_reply(data: bytes) -> Reply:
    """The reply in the body of a 200. Failure: malformed (worth another try), an error inside, or a refusal."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _malformed(f"no JSON ({type(error).__name__})") from None
    if not isinstance(found, dict):
        raise _malformed("no JSON object")
    if found.get("error") and not found.get("choices"):
        raise Failure("server_error", error_text(data), retry=True)
    choices = found.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise _malformed("no choices")
    return _choice(choices[0], found.get("usage"))


def _choice(choice: dict[str, Any], usage: Any) -> Reply:
    message, finish = choice.get("message"), choice.get("finish_reason")
    if not isinstance(message, dict):
        raise _malformed("no message")
    if finish == "content_filter" or (isinstance(message.get("refusal"), str) and message["refusal"]):
        raise Failure("refused", plain(str(message.get("refusal") or "content filter")), retry=False)
    text = message.get("content")
    if text is None and finish == "length":
        text = ""  # all of it went into reasoning
    if not isinstance(text, str):
        raise _malformed("the message has no text")
    counts = usage if isinstance(usage, dict) else {}
    asked, written = _count(counts.get("prompt_tokens")), _count(counts.get("completion_tokens"))
    return Reply("ok", text, finish == "length", _top(choice.get("logprobs")), asked, written)


def _top(logprobs: Any) -> tuple[tuple[str, float], ...]:
    """Alternatives of the first token; () where the endpoint gave none. A log-prob that is none is malformed."""
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(content, list) or not content:
        return ()
    listed = content[0].get("top_logprobs") if isinstance(content[0], dict) else None
    if not isinstance(listed, list):
        return ()
    return tuple(_alternative(item) for item in listed)


def _alternative(item: Any) -> tuple[str, float]:
    if not isinstance(item, dict) or not isinstance(item.get("token"), str):
        raise _malformed("an alternative without a token")
    value = item.get("logprob")
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e5 <= value <= 1e-3:
        raise _malformed("a log-prob that is none")
    return item["token"], min(float(value), 0.0)


def _count(value: Any) -> int:
    return value if type(value) is int and 0 <= value < MAX_COUNT else 0


def _malformed(detail: str) -> Failure:
    return Failure("malformed", detail, retry=True)


def error_text(data: bytes) -> str:
    """What an error's body says, for people, at full length: who shortens it must first cut out the key."""
    text = data.decode("utf-8", "replace")
    try:
        error = json.loads(data)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, RecursionError, LookupError, TypeError):
        pass
    return plain(text)


def plain(text: str) -> str:
    """Foreign text on one line, without control characters."""
    line = " ".join(text.split())
    return "".join(c if c.isprintable() else "?" for c in line)


# ---------------------------------------------------------------------------------------------------- on disk


def to_entry(reply: Reply) -> dict[str, Any]:
    """A reply as the cache holds it."""
    return {**dataclasses.asdict(reply), "top": [list(pair) for pair in reply.top]}


def from_entry(entry: Mapping[str, Any]) -> Reply | None:
    """The reply of a cache entry, or None where it is none."""
    try:
        top = tuple((str(token), float(value)) for token, value in entry["top"])
        reply = Reply("ok", entry["text"], entry["truncated"], top, entry["prompt_tokens"], entry["completion_tokens"])
    except (KeyError, TypeError, ValueError):
        return None
    good = isinstance(reply.text, str) and isinstance(reply.truncated, bool) and all(math.isfinite(v) for _, v in top)
    return reply if good else None
