"""The endpoint's JSON: bodies read strictly into asks, results and errors written in OpenAI's shapes (docs/serving.md).

A field that is unknown, of another type or out of range is a Problem with a status; nothing is guessed, and nothing ignored that
would change the reply.
"""

from __future__ import annotations

import dataclasses
import json
import math
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from coevo_jax.config import Sampling
from coevo_jax.errors import UserError, nearest
from coevo_jax.serve.asks import (
    Ask,
    ChatAsk,
    ChatResult,
    CompareAsk,
    CompareResult,
    RubricAsk,
    ScoreAsk,
    ScoreResult,
    Token,
    Written,
)
from coevo_jax.serve.library import System
from coevo_jax.serve.limits import Limits

TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    429: "rate_limit_error",
}  # fmt: skip
MOST_SHOWN = 300  # characters of an error's message; what it quotes came from the client
MOST_MESSAGES = 256
SEEDS = 2**63


class Problem(Exception):
    """A request that gets no answer. code: a word for programs; param: the field; wait: seconds for Retry-After, 0 = none."""

    def __init__(self, status: int, code: str, message: str, param: str = "", wait: float = 0.0):
        self.status, self.code, self.param, self.wait = status, code, param, wait
        self.message = message if len(message) <= MOST_SHOWN else message[: MOST_SHOWN - 3] + "..."
        super().__init__(self.message)

    def body(self) -> dict[str, Any]:
        """OpenAI's form of an error."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param or None, "code": self.code}}


def wrong(error: UserError) -> Problem:
    """Bad input that the system found. A model that isn't here is 404, as OpenAI has it; other good JSON without sense is 422."""
    message = error.what + (f"; expected {error.expected}" if error.expected else "")
    if error.where == "model":
        return Problem(404, "model_not_found", message, "model")
    if "sampler.max_prompt" in error.expected:
        return Problem(400, "context_length_exceeded", message, error.where)
    return Problem(422, "unprocessable", message, error.where)


# ------------------------------------------------------------------------------------------------------------ bodies in


def read_body(data: bytes) -> dict[str, Any]:
    """The JSON object of a request. Strict: no NaN, no doubled keys, no text that isn't Unicode."""
    try:
        found = json.loads(data.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_distinct)
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, ValueError) else "nested too deep"
        raise Problem(400, "invalid_json", f"the body is not JSON: {reason}") from None
    if not isinstance(found, dict):
        raise Problem(400, "invalid_json", "the body is not a JSON object")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has the same key twice")
    return found


class Fields:
    """The fields of an object, taken one by one; `done` refuses those that are left."""

    def __init__(self, body: Mapping[str, Any], where: str = ""):
        self.left, self.known, self.where = dict(body), [], where  # type: ignore[var-annotated]

    def take(self, name: str, default: Any = None) -> Any:
        self.known.append(name)
        value = self.left.pop(name, default)
        return default if value is None else value

    def text(self, name: str, default: str | None = None) -> str:
        """A text. Lone surrogates, which JSON can write and no tokenizer can read, are refused."""
        value = self.take(name, default)
        if not isinstance(value, str):
            raise self.bad(name, "a text")
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise self.bad(name, "Unicode text (it holds half of a surrogate pair)") from None
        return value

    def whole(self, name: str, default: int, low: int, high: int) -> int:
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.bad(name, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.bad(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.take(name, False)
        if not isinstance(value, bool):
            raise self.bad(name, "true or false")
        return value

    def only(self, name: str, usual: Any) -> None:
        """A field of OpenAI's that is taken with its usual value alone."""
        if self.take(name, usual) != usual:
            raise self.bad(name, f"{json.dumps(usual)}, or no such field: nothing else is served")

    def done(self) -> None:
        if self.left:
            name = next(iter(self.left))
            close = nearest(name, self.known)
            hint = f"; the nearest is {close!r}" if close else ""
            raise Problem(400, "unknown_field", f"unknown field {name[:60]!r}{hint}", self.where + name[:60])

    def bad(self, name: str, expected: str) -> Problem:
        return Problem(400, "invalid_value", f"{self.where}{name} must be {expected}", self.where + name)


def rubric_ask(body: Mapping[str, Any], system: System, limits: Limits) -> RubricAsk:
    """POST /v1/rubrics"""
    fields = Fields(body)
    ask = RubricAsk(fields.text("question"), fields.text("reference", ""), fields.whole("seed", 0, 0, SEEDS))
    fields.done()
    return ask


def score_ask(body: Mapping[str, Any], system: System, limits: Limits) -> ScoreAsk:
    """POST /v1/scores"""
    fields = Fields(body)
    question, answers = fields.text("question"), fields.take("answers")
    if not isinstance(answers, list) or not 1 <= len(answers) <= limits.answers:
        raise fields.bad("answers", f"a list of 1 to {limits.answers} texts")
    texts = tuple(Fields({f"[{i}]": answer}, "answers").text(f"[{i}]") for i, answer in enumerate(answers))
    rest = _rubric(fields, system), fields.text("reference", ""), fields.whole("seed", 0, 0, SEEDS)
    fields.done()
    return ScoreAsk(question, texts, *rest)


def compare_ask(body: Mapping[str, Any], system: System, limits: Limits) -> CompareAsk:
    """POST /v1/verdicts"""
    fields = Fields(body)
    texts = fields.text("question"), fields.text("a"), fields.text("b")
    rest = _rubric(fields, system), fields.text("reference", ""), fields.whole("seed", 0, 0, SEEDS)
    fields.done()
    return CompareAsk(*texts, *rest)


def _rubric(fields: Fields, system: System) -> Any:
    """A rubric as /v1/rubrics gave it, or a text in the schema; None: one is written."""
    given = fields.take("rubric")
    if given is None:
        return None
    if not isinstance(given, str | dict):
        raise fields.bad("rubric", "an object with criteria, or a text")
    _all_unicode(given, fields)
    return system.given(given)  # UserError: 422


def _all_unicode(value: Any, fields: Fields) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise fields.bad("rubric", "Unicode text (it holds half of a surrogate pair)") from None


def chat_ask(body: Mapping[str, Any], system: System, limits: Limits) -> ChatAsk:
    """POST /v1/chat/completions. Without a seed each request has a fresh one, which the reply names."""
    fields = Fields(body)
    model = fields.text("model")
    speaker = system.speaker(model)
    messages = _messages(fields)
    longest = speaker.engine.cfg.max_new
    names = [name for name in ("max_tokens", "max_completion_tokens") if name in fields.left]
    if len(names) > 1:
        raise Problem(400, "invalid_value", "max_tokens and max_completion_tokens are the same: one of them", names[1])
    usual = min(default_sampling(system, model).max_new_tokens, longest)
    most = fields.whole("max_tokens", usual, 1, longest)
    most = fields.whole("max_completion_tokens", most, 1, longest)
    sampling = Sampling(
        fields.number("temperature", 1.0, 0, 2), fields.number("top_p", 1.0, 1e-6, 1), fields.whole("top_k", 0, 0, 2**31 - 1),
        most, fields.whole("min_tokens", 0, 0, most),
    )  # fmt: skip
    n, seed = fields.whole("n", 1, 1, limits.choices), fields.whole("seed", secrets.randbits(53), 0, SEEDS)
    listed, top = fields.flag("logprobs"), fields.whole("top_logprobs", 0, 0, 20)
    if top and (not listed or most > 1):
        raise fields.bad("top_logprobs", "0 unless logprobs is true and max_tokens is 1: only a first token's are listed")
    for name, value in (
        ("stream", False),
        ("presence_penalty", 0),
        ("frequency_penalty", 0),
        ("response_format", {"type": "text"}),
    ):
        fields.only(name, value)
    fields.take("user")
    fields.done()
    return ChatAsk(model, messages, sampling, n, seed, listed, top)


def default_sampling(system: System, model: str) -> Sampling:
    """How a role's texts are drawn in training; its length is a chat's usual one."""
    cfg = system.cfg
    return {"generator": cfg.rubric_sampling, "judge": cfg.judge.sampling, "policy": cfg.answer}[model]


def _messages(fields: Fields) -> tuple[tuple[str, str], ...]:
    given = fields.take("messages")
    if not isinstance(given, list) or not 1 <= len(given) <= MOST_MESSAGES:
        raise fields.bad("messages", f"a list of 1 to {MOST_MESSAGES} messages")
    found = []
    for i, message in enumerate(given):
        if not isinstance(message, dict):
            raise fields.bad(f"messages[{i}]", 'an object such as {"role": "user", "content": "..."}')
        own = Fields(message, f"messages[{i}].")
        role, content = own.text("role"), own.text("content")
        if role not in ("system", "user", "assistant") or (role == "system" and i):
            raise own.bad("role", "user, assistant, or system in the first message")
        own.done()
        found.append((role, content))
    if found[-1][0] != "user":
        raise fields.bad("messages", "a conversation whose last message is the user's")
    return tuple(found)


# ------------------------------------------------------------------------------------------------------------- bodies out


def rubric_reply(ask: Any, result: Written) -> dict[str, Any]:
    return {"object": "rubric", "seed": ask.seed} | result.to_json()


def score_reply(ask: Any, result: ScoreResult) -> dict[str, Any]:
    return {"object": "scores", "seed": ask.seed} | result.to_json()


def compare_reply(ask: Any, result: CompareResult) -> dict[str, Any]:
    return {"object": "verdict", "seed": ask.seed} | result.to_json()


def chat_reply(ask: ChatAsk, result: ChatResult) -> dict[str, Any]:
    """OpenAI's chat.completion."""
    choices = [
        {
            "index": i, "message": {"role": "assistant", "content": said.text}, "finish_reason": said.finish,
            "logprobs": {"content": [_token(token) for token in said.tokens]} if ask.logprobs else None,
        }
        for i, said in enumerate(result.choices)
    ]  # fmt: skip
    written = sum(said.count for said in result.choices)
    usage = {"prompt_tokens": result.prompt_tokens, "completion_tokens": written, "total_tokens": result.prompt_tokens + written}
    head = {"object": "chat.completion", "created": int(time.time()), "model": ask.model, "seed": ask.seed}
    return head | {"choices": choices, "usage": usage}


def _token(token: Token) -> dict[str, Any]:
    top = [_listed(text, logprob) for text, logprob in token.top]
    return _listed(token.text, token.logprob) | {"top_logprobs": top}


def _listed(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode("utf-8", "replace"))}


@dataclasses.dataclass(frozen=True)
class Route:
    """How a path's body becomes an ask, and its result a body."""

    read: Callable[[Mapping[str, Any], System, Limits], Ask]
    write: Callable[[Any, Any], dict[str, Any]]
    prefix: str  # of ids


ROUTES = {
    "/v1/rubrics": Route(rubric_ask, rubric_reply, "rubric"),
    "/v1/scores": Route(score_ask, score_reply, "scores"),
    "/v1/verdicts": Route(compare_ask, compare_reply, "verdict"),
    "/v1/chat/completions": Route(chat_ask, chat_reply, "chatcmpl"),
}


def encode(body: Mapping[str, Any]) -> bytes:
    """One line of ASCII JSON: whatever a model wrote is escaped, and half of a surrogate pair stays an escape."""
    return json.dumps(_finite(body), ensure_ascii=True, allow_nan=False).encode("ascii") + b"\n"


def _finite(value: Any) -> Any:
    """JSON has no NaN: null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
