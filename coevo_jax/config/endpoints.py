"""Checks of a role behind an endpoint: address, the variable that holds its key, additions to requests. Imports no JAX."""

from __future__ import annotations

import json
import re
import urllib.parse

from coevo_jax.config import EndpointConfig, api_model
from coevo_jax.config.model import API, STAND_IN
from coevo_jax.config.several import require


def check_endpoint(role: str, source: str, thinking: bool, cfg: EndpointConfig) -> None:
    """UserError where a role's source and its endpoint do not go together, or the endpoint's settings can't serve."""
    key = f"{role}.endpoint"
    if not source.startswith(API):
        expected = f"{role}.source=api:MODEL, or an empty {key}.base_url"
        what = f"{key}.base_url={cfg.base_url!r} would be ignored: {role}.source={source!r} is no endpoint"
        require(not cfg.base_url, what, f"{role}.source, {key}.base_url", expected)
        return
    require(api_model(source).strip() != "", f"{role}.source={source!r} names no model", f"{role}.source", "api:MODEL")
    require(cfg.base_url == STAND_IN or _is_base_url(cfg.base_url), f"{key}.base_url is not the address of an endpoint",
            f"{key}.base_url", "http:// or https://, a host and a path such as /v1, without user, password, query or fragment; "
            "or 'stand-in', one on this machine that reads nothing")  # fmt: skip
    # Whoever pastes the key itself must not find it in a log: the value is not shown.
    named = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", cfg.key_env) is not None
    require(named or not cfg.key_env, f"{key}.key_env is no name of an environment variable", f"{key}.key_env",
            "a name such as OPENAI_API_KEY, never the key itself; '' sends none")  # fmt: skip
    require(cfg.cache != "", f"{key}.cache is empty", f"{key}.cache", "'run', 'off' or the path of a file")
    what = f"{role}.thinking=true has no effect: {role}.source={source!r} renders its own template"
    expected = f"{role}.thinking=false, and what the endpoint takes in {key}.extra_body"
    require(not thinking, what, f"{role}.thinking, {key}.extra_body", expected)
    _check_extra_body(f"{key}.extra_body", cfg.extra_body)


def _is_base_url(text: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(text)
        port_ok = parts.port is None or parts.port > 0
    except ValueError:
        return False
    plain = text.isascii() and text.isprintable() and " " not in text
    bare = "@" not in parts.netloc and "?" not in text and "#" not in text
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port_ok and plain and bare


# What the project sets itself in a request, and what would change the shape of the reply.
OWN_FIELDS = (
    *("model", "messages", "n", "stream", "temperature", "top_p", "top_k", "min_tokens", "max_tokens", "max_completion_tokens"),
    *("logprobs", "top_logprobs"),
)


def _check_extra_body(key: str, text: str) -> None:
    if not text:
        return
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    require(isinstance(found, dict), f"{key} is not JSON", key, "a JSON object, or nothing")
    taken = [name for name in found if name in OWN_FIELDS]
    require(not taken, f"{key} sets {', '.join(taken)}", key, "other fields: these come from the sampling and the source")
