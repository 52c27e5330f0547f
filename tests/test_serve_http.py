"""The endpoint over real sockets: what it says, what it refuses and with which status, and that it goes on serving."""

from __future__ import annotations

import concurrent.futures
import http.client
import json
import random
import socket
import threading
import time
from typing import Any

import pytest
from serve_support import BAD, GOOD, QUESTION, RUBRIC, Client, Gated, rule_score, serving, system_of, until
from test_remote_run import judge_by_rule

from coevo_jax.judges.world import WORDS
from coevo_jax.serve.asks import ChatResult, Said
from coevo_jax.serve.limits import Limits, Rate
from coevo_jax.serve.server import Watcher

TOKEN = "a-token-of-tests"


@pytest.fixture(scope="module")
def system():
    return system_of("tiny", "oracle", policy="tiny", compile=True)


@pytest.fixture(scope="module")
def server(system):
    with serving(system) as (client, _):
        yield client


# ---------------------------------------------------------------------------------------------------------- what it says


def test_a_rubric_scores_and_a_verdict_are_those_of_the_library(system, server: Client) -> None:
    written = server.post("/v1/rubrics", {"question": QUESTION, "seed": 3}).json
    assert written["object"] == "rubric" and written["seed"] == 3 and written["id"].startswith("rubric-")
    ours = system.rubric(QUESTION, seed=3)
    assert ours.status == "ok" and {k: written[k] for k in ours.to_json()} == json.loads(json.dumps(ours.to_json()))
    said = server.post("/v1/scores", {"question": QUESTION, "answers": [GOOD, BAD], "rubric": written["rubric"]}).json
    scores = [answer["score"] for answer in said["answers"]]
    assert scores == [rule_score(written["rubric"]["criteria"], answer) for answer in (GOOD, BAD)]
    assert scores == system.score(QUESTION, [GOOD, BAD], ours).scores and scores[0] > scores[1]
    assert [c["criterion"] for c in said["answers"][0]["criteria"]] == [c.text for c in ours.rubric.criteria]
    verdict = server.post("/v1/verdicts", {"question": QUESTION, "a": BAD, "b": GOOD, "seed": 3}).json
    assert verdict["winner"] == "b" and verdict["preference"] == 0 and verdict["rubric"]["tries"] == ours.tries
    assert [call["score"] for call in verdict["calls"]] == scores[::-1]


def test_chat_is_openais_form_and_a_seed_repeats_it(system, server: Client) -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": QUESTION}], "n": 3, "max_tokens": 12, "logprobs": True}
    first, other = (server.post("/v1/chat/completions", body).json for _ in range(2))
    again = server.post("/v1/chat/completions", body | {"seed": first["seed"]}).json
    assert first["choices"] == again["choices"] and first["seed"] != other["seed"]
    assert first["choices"] != other["choices"]
    assert first["object"] == "chat.completion" and first["usage"]["completion_tokens"] == sum(
        len(choice["logprobs"]["content"]) for choice in first["choices"]
    )
    assert {choice["finish_reason"] for choice in first["choices"]} <= {"stop", "length"}
    texts = system.chat([{"role": "user", "content": QUESTION}], n=3, seed=first["seed"])
    assert [choice["message"]["content"] for choice in first["choices"]] == texts
    bare = server.post("/v1/chat/completions", body | {"logprobs": False, "stream": False, "user": "me"}).json
    assert bare["choices"][0]["logprobs"] is None


def test_a_first_tokens_likeliest_are_the_distributions(server: Client) -> None:
    body = {"model": "generator", "messages": [{"role": "user", "content": "rubric for write"}], "max_tokens": 1}
    reply = server.post("/v1/chat/completions", body | {"logprobs": True, "top_logprobs": 20, "seed": 1}).json
    token = reply["choices"][0]["logprobs"]["content"][0]
    values = [one["logprob"] for one in token["top_logprobs"]]
    assert len(values) == 20 and values == sorted(values, reverse=True) and values[0] <= 0
    listed = {one["token"]: one["logprob"] for one in token["top_logprobs"]}
    assert token["logprob"] == pytest.approx(listed[token["token"]], abs=1e-4)


def test_what_there_is(server: Client) -> None:
    assert [model["id"] for model in server.ask("GET", "/v1/models").json["data"]] == ["generator", "policy"]
    for path in ("/health", "/health/live", "/health/ready"):
        body = server.ask("GET", path)
        assert body.status == 200 and body.json["status"] == "ok" and body.json["ready"] and body.json["memory_mib"] > 1


# ------------------------------------------------------------------------------------------------- concurrent requests


def test_concurrent_clients_get_their_own_answers(server: Client) -> None:
    rng = random.Random(7)

    def one(number: int) -> bool:
        mine = random.Random(number)
        answers = [" ".join(mine.sample(WORDS, mine.randint(1, 6))) for _ in range(mine.randint(1, 4))]
        criteria = [{"criterion": f"includes {word}", "weight": 1 + number % 3} for word in mine.sample(WORDS, 3)]
        reply = server.post("/v1/scores", {"question": QUESTION, "answers": answers, "rubric": {"criteria": criteria}})
        scores = [answer["score"] for answer in reply.json["answers"]]
        return scores == pytest.approx([rule_score(criteria, answer) for answer in answers])

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        assert all(pool.map(one, rng.sample(range(10**6), 160)))


def test_a_rubric_is_the_same_in_any_company(system, server: Client) -> None:
    questions = [f"write {n} words with {word}" for n in (3, 5) for word in ("owl", "bee", "yak")]
    alone = [system.rubric(question).to_json() for question in questions]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        said = list(pool.map(lambda q: server.post("/v1/rubrics", {"question": q}).json, questions * 2))
    for reply, ours in zip(said, alone * 2):
        assert {k: reply[k] for k in ours} == json.loads(json.dumps(ours))


def test_a_connection_takes_one_request_after_the_other(server: Client) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    for path, status in (("/health", 200), ("/v1/models", 200), ("/health", 200)):
        connection.request("GET", path)
        reply = connection.getresponse()
        assert reply.status == status and reply.read()
    sock = connection.sock
    body = json.dumps({"question": QUESTION, "answers": [GOOD], "rubric": RUBRIC})
    for _ in range(2):
        connection.request("POST", "/v1/scores", body, {"Content-Type": "application/json"})
        assert json.loads(connection.getresponse().read())["answers"][0]["score"] == 1
    assert connection.sock is sock
    connection.close()


# ---------------------------------------------------------------------------------------------------------- bad requests

CHAT: dict[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": "write"}]}
SCORE: dict[str, Any] = {"question": QUESTION, "answers": [GOOD], "rubric": RUBRIC}
BAD_BODIES = [
    ("/v1/scores", b"", 400, "invalid_json"),
    ("/v1/scores", b'{"question": ', 400, "invalid_json"),
    ("/v1/scores", b"[" * 100_000, 400, "invalid_json"),
    ("/v1/scores", b"[]", 400, "invalid_json"),
    ("/v1/scores", b'{"question": "\xff"}', 400, "invalid_json"),
    ("/v1/scores", b'{"question": NaN}', 400, "invalid_json"),
    ("/v1/scores", b'{"question": "a", "question": "b"}', 400, "invalid_json"),
    ("/v1/scores", SCORE | {"question": 5}, 400, "invalid_value"),
    ("/v1/scores", SCORE | {"question": " "}, 422, "unprocessable"),
    ("/v1/scores", SCORE | {"question": "half \ud800"}, 400, "invalid_value"),
    ("/v1/scores", SCORE | {"answers": []}, 400, "invalid_value"),
    ("/v1/scores", SCORE | {"answers": [GOOD, None]}, 400, "invalid_value"),
    ("/v1/scores", SCORE | {"answers": ["a"] * 65}, 400, "invalid_value"),
    ("/v1/scores", SCORE | {"answer": [GOOD]}, 400, "unknown_field"),
    ("/v1/scores", SCORE | {"seed": True}, 400, "invalid_value"),
    ("/v1/scores", SCORE | {"seed": -1}, 400, "invalid_value"),
    ("/v1/scores", SCORE | {"rubric": []}, 400, "invalid_value"),
    ("/v1/scores", SCORE | {"rubric": "no rubric at all"}, 422, "unprocessable"),
    ("/v1/scores", SCORE | {"rubric": {"criteria": []}}, 422, "unprocessable"),
    ("/v1/scores", SCORE | {"rubric": {"criteria": [{"criterion": "x", "weight": 0}]}}, 422, "unprocessable"),
    ("/v1/scores", SCORE | {"rubric": {"criteria": [{"criterion": "\udfff", "weight": 1}]}}, 400, "invalid_value"),
    ("/v1/scores", SCORE | {"answers": ["ant " * 5000]}, 400, "context_length_exceeded"),
    ("/v1/rubrics", {"question": "ant " * 300}, 400, "context_length_exceeded"),
    ("/v1/verdicts", {"question": QUESTION, "a": GOOD}, 400, "invalid_value"),
    ("/v1/chat/completions", CHAT | {"model": "gpt"}, 404, "model_not_found"),
    ("/v1/chat/completions", CHAT | {"messages": []}, 400, "invalid_value"),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "tool", "content": ""}]}, 400, "invalid_value"),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": "ant " * 300}]}, 400, "context_length_exceeded"),
    ("/v1/chat/completions", CHAT | {"temperature": "hot"}, 400, "invalid_value"),
    ("/v1/chat/completions", CHAT | {"temperature": -1}, 400, "invalid_value"),
    ("/v1/chat/completions", CHAT | {"max_tokens": 10**9}, 400, "invalid_value"),
    ("/v1/chat/completions", CHAT | {"max_tokens": 2, "max_completion_tokens": 2}, 400, "invalid_value"),
    ("/v1/chat/completions", CHAT | {"n": 17}, 400, "invalid_value"),
    ("/v1/chat/completions", CHAT | {"stream": True}, 400, "invalid_value"),
    ("/v1/chat/completions", CHAT | {"top_logprobs": 5}, 400, "invalid_value"),
    ("/v1/chat/completions", CHAT | {"tools": []}, 400, "unknown_field"),
]


@pytest.mark.parametrize("path, body, status, code", BAD_BODIES)
def test_a_bad_body_gets_a_status_and_the_server_goes_on(server: Client, path: str, body: Any, status: int, code: str) -> None:
    reply = server.post(path, body)
    assert (reply.status, reply.code) == (status, code)
    error = reply.json["error"]
    assert set(error) == {"message", "type", "param", "code"} and 0 < len(error["message"]) <= 300
    assert server.scores([GOOD]).json["answers"][0]["score"] == 1


def test_text_is_escaped_in_every_reply(server: Client) -> None:
    hostile = '<script>alert("ü\u2028")</script>'
    for reply in (server.post("/v1/chat/completions", CHAT | {"model": hostile}), server.scores([hostile])):
        assert reply.data.isascii() and reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["content-type"] == "application/json"


def raw(port: int, data: bytes, wait: float = 10.0, close: bool = False) -> bytes:
    """Bytes to a server; all that it says until it closes, or one reply."""
    with socket.create_connection(("127.0.0.1", port), timeout=wait) as sock:
        sock.sendall(data)
        if close:
            return b""
        said = b""
        while chunk := sock.recv(65536):
            said += chunk
        return said


HOST = b"Host: localhost\r\n"
HEAD = b"POST /v1/scores HTTP/1.1\r\n" + HOST
JSON = b"Content-Type: application/json\r\n"
BAD_HEADS = [
    (HEAD + JSON + b"\r\n", 411),
    (HEAD + JSON + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 411),
    (HEAD + JSON + b"Content-Length: minus\r\n\r\n", 400),
    (HEAD + JSON + b"Content-Length: -5\r\n\r\n", 400),
    (HEAD + JSON + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
    (HEAD + b"Content-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}", 415),
    (HEAD + JSON + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}", 415),
    (HEAD + JSON + b"Content-Length: 99999999\r\nExpect: 100-continue\r\n\r\n", 413),
    (HEAD + JSON + b"Content-Length: 99999999\r\n\r\n" + b"x" * (3 << 20), 413),
    (b"POST /v1/nothing HTTP/1.1\r\n" + HOST + b"Content-Length: 2\r\n\r\n{}", 404),
    (b"PUT /v1/scores HTTP/1.1\r\n" + HOST + b"Content-Length: 2\r\n\r\n{}", 405),
    (b"GET /v1/scores HTTP/1.1\r\nConnection: close\r\n" + HOST + b"\r\n", 405),
    (b"POST /v1/models HTTP/1.1\r\n" + HOST + b"Content-Length: 2\r\n\r\n{}", 405),
    (b"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n", 403),
    (b"GET /v1/models HTTP/1.1\r\nConnection: close\r\n\r\n", 403),
    (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n", 414),
    (b"GET /health HTTP/1.1\r\n" + HOST + b"X: y\r\n" * 20000 + b"\r\n", 431),
    (b"GET /health HTTP/9.9\r\n\r\n", 505),
    (b"complete nonsense of words\r\n\r\n", 400),
]


@pytest.mark.parametrize("data, status", BAD_HEADS)
def test_a_bad_head_gets_a_status_and_the_server_goes_on(server: Client, data: bytes, status: int) -> None:
    said = raw(server.port, data)
    assert said.startswith(f"HTTP/1.1 {status} ".encode()), said[:200]
    assert json.loads(said.partition(b"\r\n\r\n")[2])["error"]["message"]
    assert server.ask("GET", "/health").status == 200


def test_a_body_is_asked_for_only_when_it_will_be_read(server: Client) -> None:
    body = json.dumps(SCORE).encode()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(HEAD + JSON + b"Connection: close\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body))
        assert sock.recv(100).startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
        sock.sendall(body)
        assert sock.recv(100).startswith(b"HTTP/1.1 200 OK")


def test_clients_that_hang_up_anywhere_do_no_harm(system) -> None:
    with serving(system) as (client, service):
        body = HEAD + JSON + b"Content-Length: 50\r\n\r\n" + b"{" * 20
        for cut in (0, 1, 10, 30, len(body)):
            raw(client.port, body[:cut], close=True)
        assert client.scores([GOOD]).status == 200 and service.worker.status()["answered"] == 1


# --------------------------------------------------------------------------------------------------------------- limits


def test_a_slow_request_gets_408_and_an_idle_connection_ends_silently(system) -> None:
    with serving(system, read_s=0.3, idle_s=0.2) as (client, _):
        started = time.monotonic()
        with socket.create_connection(("127.0.0.1", client.port), timeout=10) as sock:
            sock.settimeout(0.05)
            said = b""
            for byte in HEAD + JSON + b"Content-Length: 5\r\n\r\n":  # a byte at a time, each in good time
                sock.sendall(bytes([byte]))
                try:
                    said = sock.recv(1000)
                    break
                except TimeoutError:
                    pass
        assert said.startswith(b"HTTP/1.1 408 ") and time.monotonic() - started < 5
        assert raw(client.port, b"") == b""
        assert raw(client.port, HEAD + JSON + b"Content-Length: 5\r\n\r\n{}").startswith(b"HTTP/1.1 408 ")
        assert client.scores([GOOD]).status == 200


def test_a_token_is_needed_where_there_is_one(system) -> None:
    with serving(system, token=TOKEN) as (client, _):
        for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}, {"Authorization": "Bearer ü"}):
            reply = client.post("/v1/scores", SCORE, headers=header)
            assert (reply.status, reply.code, reply.headers["www-authenticate"]) == (401, "invalid_token", "Bearer")
            assert TOKEN.encode() not in reply.data
        assert client.ask("GET", "/v1/models").status == 401 and client.ask("GET", "/health").status == 200
        good = {"Authorization": f"Bearer {TOKEN}", "Host": "any.name.example"}
        assert client.post("/v1/scores", SCORE, headers=good).status == 200


def test_a_client_is_kept_to_its_rate(system) -> None:
    with serving(system, rate=0.5, burst=3) as (client, _):
        replies = [client.scores([GOOD]) for _ in range(5)]
        assert [reply.status for reply in replies] == [200, 200, 200, 429, 429]
        assert replies[3].code == "rate_limited" and 1 <= int(replies[3].headers["retry-after"]) <= 2
        assert client.ask("GET", "/health").status == 200


def test_the_bucket_fills_again_and_forgets_the_oldest() -> None:
    now = [0.0]
    rate = Rate(2.0, 2, most=3, clock=lambda: now[0])
    assert [rate.wait("a") for _ in range(3)] == [0, 0, 0.5]
    now[0] = 0.5
    assert [rate.wait("a") for _ in range(2)] == [0, 0.5]
    for client in "bcd":
        assert rate.wait(client) == 0
    assert len(rate) == 3 and rate.wait("a") == 0


def test_a_full_queue_gets_429_and_those_that_wait_their_answers(system) -> None:
    gated = Gated(system)
    with serving(gated, queue=2, gather_s=0.0) as (client, service), concurrent.futures.ThreadPoolExecutor(3) as pool:
        first = pool.submit(client.scores, [GOOD])
        until(lambda: gated.seen)
        waiting = [pool.submit(client.scores, [answer]) for answer in (BAD, "owl")]
        until(lambda: service.worker.status()["waiting"] == 2)
        reply = client.scores([GOOD])
        assert (reply.status, reply.code, reply.headers["retry-after"]) == (429, "queue_full", "1")
        assert client.ask("GET", "/health").json["queue"]["waiting"] == 2
        gated.gate.set()
        assert [f.result().json["answers"][0]["score"] for f in (first, *waiting)] == pytest.approx([1, 0, 2 / 3])
        assert client.scores([GOOD]).status == 200


def test_a_dropped_connection_leaves_the_queue(system) -> None:
    gated = Gated(system)
    with serving(gated, gather_s=0.0) as (client, service), concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(client.scores, [GOOD])
        until(lambda: gated.seen)
        body = json.dumps(SCORE | {"question": "dropped"}).encode()
        sock = socket.create_connection(("127.0.0.1", client.port))
        sock.sendall(HEAD + JSON + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        until(lambda: service.worker.status()["waiting"] == 1)
        sock.close()
        until(lambda: service.worker.status()["waiting"] == 0)
        gated.gate.set()
        assert first.result().status == 200 and client.scores([GOOD]).status == 200
        assert all("dropped" not in batch for batch in gated.seen)
        assert service.worker.status()["cancelled"] == 1 and service.counts["hung_up"] == 1


def test_a_look_at_a_client_that_says_nothing_never_waits() -> None:
    """Between an event and the look, the connection may have gone on to its next request: all others would wait with it."""
    watcher, (ours, theirs), gone = Watcher(every_s=60), socket.socketpair(), threading.Event()
    ours.settimeout(20)
    with watcher.watch(ours, gone.set):
        started = time.monotonic()
        watcher._look(ours.fileno())
        assert time.monotonic() - started < 5 and not gone.is_set()
        theirs.sendall(b"the next request")
        watcher._look(ours.fileno())
        assert not gone.is_set()
        ours.recv(100)
        theirs.close()
        watcher._look(ours.fileno())
        assert gone.is_set()
    watcher.close()
    ours.close()


def test_kept_connections_never_wait_for_each_other() -> None:
    """Judging by rules alone, so that much passes in little time; a reply that takes seconds has met a lock."""
    with serving(system_of("", "oracle")) as (client, service):
        service.watcher._every = 0.001  # looks as often as it can

        def one(number: int) -> float:
            connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=10)
            worst = 0.0
            for turn in range(30):
                answer = WORDS[(number + turn) % len(WORDS)]
                body = json.dumps({"question": QUESTION, "answers": [answer], "rubric": RUBRIC})
                started = time.monotonic()
                connection.request("POST", "/v1/scores", body, {"Content-Type": "application/json"})
                said = json.loads(connection.getresponse().read())
                worst = max(worst, time.monotonic() - started)
                assert said["answers"][0]["score"] == pytest.approx(rule_score(RUBRIC["criteria"], answer))
            connection.close()
            return worst

        with concurrent.futures.ThreadPoolExecutor(24) as pool:
            assert max(pool.map(one, range(24))) < 8


def test_a_batch_that_nobody_waits_for_is_stopped(system) -> None:
    gated = Gated(system)
    with serving(gated, gather_s=0.0) as (client, service):
        body = json.dumps(SCORE).encode()
        sock = socket.create_connection(("127.0.0.1", client.port))
        sock.sendall(HEAD + JSON + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        until(lambda: gated.seen)
        sock.close()
        until(lambda: service.worker.status()["running"] == 0)
        gated.gate.set()
        assert client.scores([GOOD]).status == 200


def test_a_request_that_waits_too_long_gets_504(system) -> None:
    gated = Gated(system)
    with serving(gated, timeout_s=0.3, gather_s=0.0) as (client, service), concurrent.futures.ThreadPoolExecutor(3) as pool:
        replies = [f.result() for f in [pool.submit(client.scores, [GOOD]) for _ in range(3)]]
        assert {(reply.status, reply.code) for reply in replies} == {(504, "timeout")}
        gated.gate.set()
        until(lambda: service.worker.status()["running"] == 0)
        assert client.scores([GOOD]).status == 200


def test_too_many_connections_get_503(system) -> None:
    with serving(system, connections=2) as (client, _):
        held = [socket.create_connection(("127.0.0.1", client.port)) for _ in range(2)]
        until(lambda: raw(client.port, b"").startswith(b"HTTP/1.1 503 "))
        for sock in held:
            sock.close()
        until(lambda: _status(client) == 200)


def _status(client: Client) -> int:
    try:
        return client.ask("GET", "/health").status
    except OSError:
        return 0


def test_a_request_that_breaks_its_batch_fails_alone(system) -> None:
    gated = Gated(system)
    gated.poison = "poison"
    with serving(gated, gather_s=0.0) as (client, service), concurrent.futures.ThreadPoolExecutor(4) as pool:
        first = pool.submit(client.scores, [GOOD])
        until(lambda: gated.seen)
        rest = [pool.submit(client.scores, [GOOD], question=question) for question in ("one", "poison", "two")]
        until(lambda: service.worker.status()["waiting"] == 3)
        gated.gate.set()
        assert [f.result().status for f in (first, *rest)] == [200, 200, 500, 200]
        assert rest[1].result().code == "internal_error" and b"poison" not in rest[1].result().data
        assert client.scores([GOOD]).status == 200 and service.state() == "ok"


class Breaking(Gated):
    """A system that answers all of its first round and then breaks it, before it has said so."""

    def advance(self, drafts: Any, stop: Any, deliver: Any) -> None:
        self.seen.append(len(drafts))
        self.system.advance(drafts, stop, lambda draft: None)
        if len(self.seen) == 1:
            raise RuntimeError("the round broke")
        for draft in drafts:
            deliver(draft)


def test_what_a_broken_round_has_answered_is_delivered(system) -> None:
    breaking = Breaking(system)
    with serving(breaking, gather_s=0.5, batch=3) as (client, service), concurrent.futures.ThreadPoolExecutor(3) as pool:
        replies = [f.result() for f in [pool.submit(client.scores, [answer]) for answer in (GOOD, BAD, "owl")]]
        assert breaking.seen == [3] and [reply.status for reply in replies] == [200] * 3
        until(lambda: service.worker.status()["running"] == 0)
        assert service.worker.status()["answered"] == 3 and service.worker.status()["failed"] == 0


# ---------------------------------------------------------------------------------------------------- beginning and end


def test_before_it_is_loaded_it_says_so() -> None:
    with serving(None) as (client, _):
        assert client.ask("GET", "/health").status == 503 and client.ask("GET", "/health/live").status == 200
        assert client.ask("GET", "/health/ready").json["status"] == "starting"
        reply = client.scores([GOOD])
        assert (reply.status, reply.code) == (503, "server_starting") and "retry-after" in reply.headers


def test_the_end_finishes_what_waits_and_takes_no_more(system) -> None:
    gated = Gated(system)
    with serving(gated, gather_s=0.0) as (client, service), concurrent.futures.ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(client.scores, [answer]) for answer in (GOOD, BAD)]
        until(lambda: gated.seen and service.worker.status()["waiting"] + service.worker.status()["running"] == 2)
        ended = pool.submit(service.end)
        until(lambda: service.ending)
        reply = client.scores([GOOD])
        assert (reply.status, reply.code) == (503, "server_ending")
        assert client.ask("GET", "/health").json["status"] == "ending"
        gated.gate.set()
        assert ended.result() and [f.result().json["answers"][0]["score"] for f in waiting] == [1, 0]


def test_what_is_not_finished_in_time_gets_503(system) -> None:
    gated = Gated(system)
    with serving(gated, gather_s=0.0, drain_s=0.1) as (client, service), concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.scores, [GOOD])
        until(lambda: gated.seen)
        assert not service.end() and waiting.result().code == "server_ending"
        gated.gate.set()


def test_limits_out_of_range_and_a_port_in_use_are_errors(system) -> None:
    from coevo_jax.errors import UserError
    from coevo_jax.serve.server import Server, Service

    for bad in ({"queue": 0}, {"timeout_s": 0}, {"rate": -1}, {"body": 2**50}):
        with pytest.raises(UserError, match="out of range"):
            Limits(**bad).check()
    with serving(system) as (client, _), pytest.raises(UserError, match="can't listen"):
        Server("127.0.0.1", client.port, Service(Limits()))


# --------------------------------------------------------------------------------- this project's own client against it


class Judging(Gated):
    """A system whose chat is the oracle's rules on what a judge's prompt shows."""

    def advance(self, drafts: Any, stop: Any, deliver: Any) -> None:
        for draft in drafts:
            text = judge_by_rule("\n".join(content for _, content in draft.ask.messages))
            draft.result = ChatResult((Said(text, "stop", 1),), 1)
            deliver(draft)


def test_our_own_client_judges_over_it(system) -> None:
    with serving(Judging(system)) as (client, _):
        url = f"http://127.0.0.1:{client.port}/v1"
        remote = ["judge.protocol=json_score", f"judge.endpoint.base_url={url}", "judge.sampling.max_new_tokens=48"]
        over = system_of(judge="api:generator", overrides=remote)
        try:
            found = over.score(QUESTION, [GOOD, BAD, "owl"], RUBRIC)
        finally:
            over.close()
    assert found.ok and found.scores == pytest.approx([rule_score(RUBRIC["criteria"], a) for a in (GOOD, BAD, "owl")])


@pytest.mark.slow
@pytest.mark.model
def test_a_judges_logits_over_it_are_those_of_the_engine() -> None:
    small = ["sampler.slots=4", "sampler.max_prompt=384", "sampler.max_new=16", "judge.min_yes_no_mass=0"]
    here = system_of(judge="smollm2", overrides=small, compile=True)
    rubric = {"criteria": [{"criterion": "The answer names a colour", "weight": 1}, {"criterion": "It is short", "weight": 2}]}
    answers = ["The sky is blue.", "I don't know, and I won't say anything of it at all."]
    with serving(here) as (client, _):
        remote = ["judge.protocol=criterion_logits", f"judge.endpoint.base_url=http://127.0.0.1:{client.port}/v1"]
        over = system_of(judge="api:judge", overrides=[*remote, "judge.min_yes_no_mass=0"])
        try:
            asked = over.score("What colour is the sky?", answers, rubric)
        finally:
            over.close()
    ours = here.score("What colour is the sky?", answers, rubric)
    assert ours.ok and asked.ok
    for a, b in zip(asked.answers, ours.answers):
        assert a.parts == pytest.approx(b.parts, abs=0.03)  # what isn't among the 20 listed tokens counts as nothing


def test_our_own_client_writes_rubrics_over_it(server: Client) -> None:
    url = f"http://127.0.0.1:{server.port}/v1"
    remote = [f"generator.endpoint.base_url={url}", "rubric.prompt=world_rubric", "rubric_sampling.max_new_tokens=48"]
    author = system_of("api:generator", "oracle", overrides=remote)
    try:
        found = [author.rubric(QUESTION, seed=seed) for seed in range(3)]
        assert all(written.status in ("ok", "parse_fail", "truncated") and written.tries >= 1 for written in found)
        assert any(written.status == "ok" for written in found)
        assert author.score(QUESTION, [GOOD], next(w for w in found if w.status == "ok")).answers[0].status == "ok"
    finally:
        author.close()


def test_it_never_holds_a_thread_for_a_connection_that_is_gone(system) -> None:
    with serving(system) as (client, _):
        before = threading.active_count()
        for _ in range(20):
            raw(client.port, b"GET /health HTTP/1.1\r\n", close=True)
        until(lambda: threading.active_count() <= before + 1)
