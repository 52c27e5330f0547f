"""An endpoint that misbehaves: every fault ends as a typed reply, is tried again where that can help, and is counted."""

from __future__ import annotations

import email.utils
import json
import socket
import threading
import time

import pytest
from remote_support import ask, completion, endpoint, first, nap, says, serving

from coevo_jax.config import EndpointConfig
from coevo_jax.errors import UserError
from coevo_jax.remote import Ask, Endpoint
from coevo_jax.remote.client import Closed, jitter, retry_after
from coevo_jax.remote.transport import MAX_BODY


def slow(h, body, number):
    nap(0.25)
    h.send(completion("late"))


def drips(h, body, number):
    """A byte now and then: no single read is slow."""
    h.send("", length=1000)
    for _ in range(12):
        h.wfile.write(b" ")
        nap(0.02)
    h.hang_up()


def drips_headers(h, body, number):
    h.wfile.write(b"HTTP/1.1 200 OK\r\n")
    for _ in range(12):
        h.wfile.write(b"X-A: b\r\n")
        nap(0.02)
    h.hang_up()


def cut_off(h, body, number):
    text = completion("fine")
    h.send(text[:20], length=len(text))
    h.hang_up()


def cut_chunk(h, body, number):
    h.send_response(200)
    h.send_header("Transfer-Encoding", "chunked")
    h.end_headers()
    h.wfile.write(b"40\r\n{\r\n")
    h.hang_up()


def short_length(h, body, number):
    """Less is promised than is sent; the rest must not become the next response."""
    h.send(completion("fine"), length=20)


def vanishes(h, body, number):
    h.hang_up()


def not_http(h, body, number):
    h.wfile.write(b"SSH-2.0-OpenSSH_9.6\r\n\r\n")
    h.hang_up()


def status(code, **headers):
    return lambda h, body, number: h.send(json.dumps({"error": {"message": "go\naway \x1b[31m"}}), code, headers)


def body(text):
    return lambda h, b, number: h.send(text)


FAULTS = {
    "slow": (slow, "timeout", "timeout", True),
    "drips": (drips, "timeout", "timeout", True),
    "drips headers": (drips_headers, "timeout", "timeout", True),
    "vanishes": (vanishes, "connection", "timeout", True),
    "cut off": (cut_off, "cut_off", "parse_fail", True),
    "cut chunk": (cut_chunk, "cut_off", "parse_fail", True),
    "short length": (short_length, "malformed", "parse_fail", True),
    "not http": (not_http, "malformed", "parse_fail", True),
    "html": (body("<html>down</html>"), "malformed", "parse_fail", True),
    "not utf-8": (body(b'{"choices": "\xff"}'), "malformed", "parse_fail", True),
    "deep": (body("[" * 100_000), "malformed", "parse_fail", True),
    "empty": (body(""), "malformed", "parse_fail", True),
    "list": (body("[]"), "malformed", "parse_fail", True),
    "no choices": (body('{"choices": []}'), "malformed", "parse_fail", True),
    "choices of another kind": (body('{"choices": [3]}'), "malformed", "parse_fail", True),
    "no message": (body('{"choices": [{"text": "old"}]}'), "malformed", "parse_fail", True),
    "content is a number": (body('{"choices": [{"message": {"content": 1}}]}'), "malformed", "parse_fail", True),
    "null content": (lambda h, b, n: h.send(completion(None)), "malformed", "parse_fail", True),
    "too large": (body(completion("x" * MAX_BODY)), "malformed", "parse_fail", True),
    "error in a 200": (body('{"error": {"message": "overloaded"}}'), "server_error", "refused", True),
    "500": (status(500), "server_error", "refused", True),
    "503": (status(503), "server_error", "refused", True),
    "408": (status(408), "server_error", "refused", True),
    "429": (status(429), "rate_limit", "refused", True),
    "400": (status(400), "refused", "refused", False),
    "401": (status(401), "refused", "refused", False),
    "404": (status(404), "refused", "refused", False),
    "302": (status(302, Location="http://127.0.0.1:1/"), "refused", "refused", False),
    "content filter": (lambda h, b, n: h.send(completion("", "content_filter")), "refused", "refused", False),
    "refusal": (
        lambda h, b, n: h.send(completion(None, message={"content": None, "refusal": "no"})),
        "refused",
        "refused",
        False,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_typed_tried_again_and_counted(name):
    script, kind, expected, again = FAULTS[name]
    timeout = 0.1 if kind == "timeout" else 5.0
    with serving(script) as server, endpoint(server.url, timeout_s=timeout, retries=1) as client:
        (reply,) = client.ask([ask()])
        stats = client.take_stats()
    tries = 2 if again else 1
    assert (reply.status, reply.text) == (expected, "") and reply.detail.startswith(kind)
    assert reply.detail.isprintable()
    assert stats[f"api/judge/failures/{kind}"] == tries == stats["api/judge/requests"] == len(server.bodies)
    assert stats["api/judge/retries"] == tries - 1 and stats["api/judge/gave_up"] == 1
    assert sum(value for name, value in stats.items() if "/failures/" in name) == tries


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault[3]])
def test_right_after_two_faults(name):
    script, kind, _, _ = FAULTS[name]
    with serving(first(script, 2)) as server, endpoint(server.url, timeout_s=0.1 if kind == "timeout" else 5.0) as client:
        (reply,) = client.ask([ask()])
        stats = client.take_stats()
    assert (reply.status, reply.text) == ("ok", "fine")
    assert stats[f"api/judge/failures/{kind}"] == 2 and stats["api/judge/gave_up"] == 0


def test_nobody_listens():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        with endpoint(f"http://127.0.0.1:{taken.getsockname()[1]}/v1") as client:
            (reply,) = client.ask([ask()])
            assert reply.status == "timeout" and client.take_stats()["api/judge/failures/connection"] == 3


def test_what_is_sent_and_what_comes():
    extra = '{"chat_template_kwargs": {"enable_thinking": false}}'
    with serving(says("Größe \ud800")) as server, endpoint(server.url + "/", extra_body=extra) as client:
        plain, shaped = client.ask([ask(), ask(temperature=0.5, top_p=0.9, top_k=5, min_new_tokens=2, max_new_tokens=7)])
        stats = client.take_stats()
        assert client.take_stats()["api/judge/requests"] == 0
    assert set(server.paths) == {"/v1/chat/completions"}
    always = {
        "model": "some-model",
        "messages": [{"role": "user", "content": "hello"}],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    sent = sorted(server.bodies, key=len)
    assert sent[0] == always | {"max_tokens": 64}
    assert sent[1] == always | {"max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_tokens": 2}
    assert plain.text == shaped.text == "Größe \ud800" and not plain.truncated
    assert (stats["api/judge/prompt_tokens"], stats["api/judge/completion_tokens"]) == (200, 20)


def test_cost_and_lying_counts():
    lies = completion("x").replace("100", "true").replace('"completion_tokens": 10', '"completion_tokens": -1e99')
    script = lambda h, body, number: h.send(completion("x") if number == 0 else lies)  # noqa: E731
    with serving(script) as server, endpoint(server.url, price_in=2.0, price_out=8.0) as client:
        client.ask([ask("a")])
        assert client.take_stats()["api/judge/cost"] == pytest.approx((100 * 2 + 10 * 8) / 1e6)
        assert client.ask([ask("b")])[0].text == "x" and client.take_stats()["api/judge/cost"] == 0


def test_truncated_and_reasoning_only():
    script = lambda h, body, number: h.send(completion("half" if number == 0 else None, "length"))  # noqa: E731
    with serving(script) as server, endpoint(server.url) as client:
        assert [(r.text, r.truncated) for r in client.ask([ask("a")]) + client.ask([ask("b")])] == [("half", True), ("", True)]


def test_the_limit_of_requests_under_way_is_kept_and_used():
    def hold(h, body, number):
        nap(0.02)
        h.send(completion(body["messages"][0]["content"].upper()))

    with serving(hold) as server, endpoint(server.url, concurrency=3) as client:
        replies = client.ask([ask(f"q{i}") for i in range(12)])
    assert [r.text for r in replies] == [f"Q{i}" for i in range(12)]  # in order, whichever came first
    assert server.most == 3 and server.connections <= 3  # and connections are kept


def test_a_kept_connection_that_ended_is_no_failure():
    def close_after(h, body, number):
        h.send(completion("fine"))
        h.hang_up()  # without saying so in a header

    with serving(close_after) as server, endpoint(server.url, retries=0) as client:
        for i in range(3):
            assert client.ask([ask(f"{i}")])[0].status == "ok"
        assert server.connections == 3 and client.take_stats()["api/judge/failures/connection"] == 0

    hang_up_once = lambda h, body, number: h.hang_up() if number == 1 else h.send(completion("fine"))  # noqa: E731
    with serving(hang_up_once) as server, endpoint(server.url, retries=0) as client:  # as the request was on its way
        assert [client.ask([ask(f"{i}")])[0].status for i in range(2)] == ["ok", "ok"]
        assert server.connections == 2 and client.take_stats()["api/judge/failures/connection"] == 0


def test_bytes_beyond_a_response_are_never_the_next_one():
    forged = completion("forged")
    response = f"HTTP/1.1 200 OK\r\nContent-Length: {len(forged)}\r\n\r\n{forged}"

    def smuggle(h, body, number):
        h.send(completion("fine"))
        nap(0.02)  # after the first response was read
        h.wfile.write(response.encode())

    with serving(smuggle) as server, endpoint(server.url) as client:
        assert client.ask([ask("a")])[0].text == "fine"
        nap(0.1)
        assert client.ask([ask("b")])[0].text == "fine"


def test_retry_after_is_honoured_by_all_and_capped():
    times = []

    def limited(h, body, number):
        times.append(time.monotonic())
        h.send("{}", 429, {"Retry-After": "0.15"}) if number == 0 else h.send(completion("fine"))

    with serving(limited) as server, endpoint(server.url, concurrency=1, max_wait_s=1.0) as client:
        assert [r.status for r in client.ask([ask("a"), ask("b")])] == ["ok", "ok"]
        assert all(t - times[0] >= 0.14 for t in times[1:])
    with serving(first(status(429, **{"Retry-After": "20"}))) as server, endpoint(server.url) as client:
        began = time.monotonic()
        assert client.ask([ask()])[0].status == "ok" and time.monotonic() - began < 2


def test_retry_after_forms():
    assert retry_after("2.5") == 2.5 and retry_after("120") == 120
    assert retry_after(email.utils.formatdate(1_000_010, usegmt=True), now=lambda: 1_000_000) == pytest.approx(10)
    assert [retry_after(text) for text in ("", "-3", "nan", "inf", "1e999", "soon", "0")] == [0] * 7
    assert retry_after(email.utils.formatdate(1_000, usegmt=True)) == 0


def test_backoff_doubles_with_the_same_jitter_each_time(monkeypatch):
    waits = []
    with serving(status(500)) as server, endpoint(server.url, backoff_s=4.0, max_wait_s=20.0, retries=4) as client:
        monkeypatch.setattr(client, "_sleep", lambda seconds: waits.append(seconds) if seconds else None)
        client.ask([ask()])
        client.ask([ask()])
    assert waits[:4] == waits[4:] and len(set(waits[:4])) == 4
    for wait, base in zip(waits, (4, 8, 16, 20)):
        assert base / 2 <= wait < base
    assert all(0.5 <= jitter("k", i) < 1 for i in range(100))


def test_the_same_content_is_asked_once():
    with serving(says("fine")) as server, endpoint(server.url) as client:
        replies = client.ask([ask(), ask(), ask(attempt=1)])
        stats = client.take_stats()
    assert [r.text for r in replies] == ["fine"] * 3 and len(server.bodies) == 2
    assert (stats["api/judge/asked"], stats["api/judge/cached"], stats["api/judge/requests"]) == (3, 1, 2)


def test_closing_ends_waits_at_once():
    with serving(status(500)) as server, endpoint(server.url, backoff_s=60.0, max_wait_s=60.0) as client:
        collect = client.start([ask()])
        while not server.bodies:
            nap(0.005)
        began = time.monotonic()
        threading.Timer(0.05, client.close).start()
        with pytest.raises(Closed):
            collect()
        assert time.monotonic() - began < 2


KEY = "sk-very-secret-0123456789"


def test_the_key_is_sent_and_never_kept(tmp_path, capfd, caplog):
    def parrot(h, body, number):
        said = h.headers["Authorization"]
        if "bad" in body["messages"][0]["content"]:
            return h.send(json.dumps({"error": {"message": "x" * 155 + f" wrong key {said}"}}), 401)
        h.send(completion(f"you sent {said}"))

    with (
        serving(parrot) as server,
        endpoint(server.url, tmp_path, {"MY_KEY": KEY + "\n"}, key_env="MY_KEY") as client,
        caplog.at_level("DEBUG"),
    ):
        good, bad = client.ask([ask("good"), ask("bad")])
        shown = f"{good!r} {bad!r} {client!r} {client.cfg!r} {client.take_stats()!r}"
    assert {h["Authorization"] for h in server.headers} == {f"Bearer {KEY}"}
    assert good.text == "you sent Bearer [key]" and bad.status == "refused"
    out = "".join(capfd.readouterr()) + caplog.text + shown + "".join(p.read_text() for p in tmp_path.rglob("*"))
    assert KEY not in out and KEY[:8] not in out


@pytest.mark.parametrize("value", [None, "", " \n", "two\nlines", "schlüssel"])
def test_a_key_that_is_none_is_an_error_that_hides_it(value):
    environ = {} if value is None else {"MY_KEY": value}
    with pytest.raises(UserError) as caught:
        Endpoint("judge", "m", EndpointConfig(base_url="http://localhost/v1", key_env="MY_KEY"), environ)
    assert "MY_KEY" in caught.value.what and caught.value.where == "judge.endpoint.key_env"
    assert not (value or "").strip() or value not in str(caught.value)


def test_without_key_env_no_key_is_sent():
    with serving(says("x")) as server, endpoint(server.url, environ={"OPENAI_API_KEY": KEY}) as client:
        client.ask([ask()])
    assert "Authorization" not in server.headers[0]


def test_log_probs_are_read_and_lies_are_malformed():
    def listed(*pairs):
        top = [{"token": token, "logprob": value, "bytes": None} for token, value in pairs]
        return {"logprobs": {"content": [{"token": "x", "logprob": -1, "top_logprobs": top}]}}

    shapes = [listed(("Yes", -0.1), (" no", -2.5)), {"logprobs": None}, {"logprobs": {"content": 3}}]
    lies = [listed(("Yes", float("nan"))), listed(("Yes", 0.5)), listed(("Yes", True)), listed((3, -1.0)), listed(("Yes", None))]
    script = lambda h, body, number: h.send(completion("x", **(shapes + lies)[int(body["messages"][0]["content"])]))  # noqa: E731
    with serving(script) as server, endpoint(server.url, retries=0) as client:
        asks = [Ask([{"role": "user", "content": str(i)}], ask().sampling, 0, 5) for i in range(len(shapes + lies))]
        replies = client.ask(asks)
    assert server.bodies[0]["logprobs"] is True and server.bodies[0]["top_logprobs"] == 5
    assert [r.top for r in replies[:3]] == [(("Yes", -0.1), (" no", -2.5)), (), ()]
    assert [r.status for r in replies] == ["ok"] * 3 + ["parse_fail"] * 5
