"""The cache of replies: content decides, kills and damage cost at most a request, and a hit makes no request."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from remote_support import ask, completion, endpoint, first, says, serving

from coevo_jax.config import EndpointConfig, Sampling
from coevo_jax.errors import UserError
from coevo_jax.remote import Ask, cache
from coevo_jax.remote.cache import ReplyCache
from coevo_jax.remote.client import CACHE_FILE
from coevo_jax.remote.messages import Reply, content_key, from_entry, request_body, to_entry


def test_a_hit_makes_no_request_in_a_later_process_either(tmp_path):
    count = lambda h, body, number: h.send(completion(f"reply {number}"))  # noqa: E731
    with serving(count) as server:
        with endpoint(server.url, tmp_path) as client:
            was = client.ask([ask("a")])
            assert client.ask([ask("a")]) == was and len(server.bodies) == 1
        with endpoint(server.url, tmp_path, concurrency=1, timeout_s=9.0) as client:  # how it is reached doesn't matter
            assert client.ask([ask("a")]) == was
            stats = client.take_stats()
        assert len(server.bodies) == 1
        assert (stats["api/judge/cached"], stats["api/judge/requests"], stats["api/judge/cost"]) == (1, 0, 0)
        with endpoint(server.url, tmp_path, cache="off") as client:
            assert client.ask([ask("a")]) != was
    with endpoint("http://127.0.0.1:1/v1", tmp_path) as client:  # nobody there, and nobody is asked
        assert client.ask([ask("a")]) == was


def test_a_failure_is_not_remembered(tmp_path):
    bad = lambda h, body, number: h.send("{}", 500)  # noqa: E731
    with serving(first(bad)) as server, endpoint(server.url, tmp_path, retries=0) as client:
        assert client.ask([ask()])[0].status == "refused"
        assert client.ask([ask()])[0].status == "ok"


def test_runs_may_share_a_file(tmp_path):
    shared = str(tmp_path / "deep" / "shared.jsonl")
    with serving(says("x")) as server:
        for name in ("one", "two"):
            with endpoint(server.url, tmp_path / name, cache=shared) as client:
                client.ask([ask()])
        assert len(server.bodies) == 1 and not (tmp_path / "one").exists()


def test_what_the_key_is_made_of():
    cfg, messages = EndpointConfig(), [{"role": "user", "content": "a"}]

    def key(text="a", model="m", attempt=0, top=0, extra="", **sampling):
        own = EndpointConfig(extra_body=extra)
        asked = Ask([{"role": "user", "content": text}], Sampling(**sampling), attempt, top)
        return content_key(request_body(asked, model, own), attempt)

    keys = [key(), key(text="b"), key(model="n"), key(attempt=1), key(top=5), key(temperature=0.3), key(top_p=0.5)]
    keys += [key(max_new_tokens=3), key(extra='{"seed": 1}'), key(min_new_tokens=1), key(top_k=3)]
    assert len(set(keys)) == len(keys)
    assert key() == content_key(request_body(Ask(messages, Sampling()), "m", cfg), 0) == "899d4ab0889f3b47e420dbec17fc0bc1"


@pytest.mark.parametrize("cut", [1, 10, 30, 60])
def test_a_cut_off_last_line_is_a_miss_and_the_next_is_whole(tmp_path, cut):
    path = tmp_path / "c.jsonl"
    first_cache = ReplyCache(path)
    first_cache.put("a", {"n": 1})
    first_cache.put("b", {"n": "x" * 50})
    first_cache.close()
    os.truncate(path, path.stat().st_size - cut)
    second = ReplyCache(path)
    assert (second.get("a"), second.get("b"), second.damaged) == ({"n": 1}, None, 1)
    second.put("b", {"n": 2})
    second.put("c", {"n": 3})
    assert second.get("b") == {"n": 2}
    second.close()
    third = ReplyCache(path)
    assert [third.get(key) for key in "abc"] == [{"n": 1}, {"n": 2}, {"n": 3}] and len(third) == 3
    third.close()


@pytest.mark.parametrize("size", range(0, 40, 3))
def test_a_first_line_that_is_cut_off_is_no_error(tmp_path, size):
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'{"key": "0123456789", "value": {"text": "x"}}\n'[:size])
    found = ReplyCache(path)
    found.put("k", {"n": 1})
    found.close()
    found = ReplyCache(path)
    assert found.get("k") == {"n": 1}
    found.close()


def test_damage_in_the_middle_is_a_miss(tmp_path):
    path = tmp_path / "c.jsonl"
    written = ReplyCache(path)
    for key in "abc":
        written.put(key, {"n": key})
    written.close()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\x00garbage\xff\n" + lines[2])
    read = ReplyCache(path)
    assert [read.get(key) for key in "abc"] == [{"n": "a"}, None, {"n": "c"}]
    read.close()


def test_another_file_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("dear diary\n")
    with pytest.raises(UserError, match="no reply cache"):
        ReplyCache(path)
    assert path.read_text() == "dear diary\n"


def test_a_full_disk_is_an_error_and_keeps_what_was_there(tmp_path, file_size_limit):
    path = tmp_path / "c.jsonl"
    found = ReplyCache(path)
    found.put("a", {"n": 1})
    with file_size_limit(path.stat().st_size + 10), pytest.raises(UserError, match="reply cache"):
        found.put("b", {"n": "x" * 100})
    assert found.get("a") == {"n": 1} and found.get("b") is None
    found.put("b", {"n": 2})
    found.close()
    again = ReplyCache(path)
    assert (again.get("a"), again.get("b")) == ({"n": 1}, {"n": 2})
    again.close()


def test_a_kill_keeps_every_reply_that_was_put(tmp_path):
    code = (
        "import sys\nfrom coevo_jax.remote.cache import ReplyCache\nc = ReplyCache(sys.argv[1])\n"
        "for i in range(10**9):\n    c.put(str(i), {'n': i, 'x': 'y' * 500})\n    print(i, flush=True)\n"
    )
    path = tmp_path / "c.jsonl"
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(200):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    said = 200 + len(process.stdout.read().splitlines())
    process.wait()
    found = ReplyCache(path)
    assert len(found) >= said - 1 and all(found.get(str(i)) == {"n": i, "x": "y" * 500} for i in range(said - 1))
    found.close()


def test_a_reply_survives_the_way_to_disk_and_a_foreign_entry_is_a_miss(tmp_path):
    reply = Reply("ok", "Größe \ud800\n", True, (("Yes", -0.25),), 3, 4)
    found = ReplyCache(tmp_path / cache.__name__)
    found.put("k", to_entry(reply))
    entry = found.get("k")
    found.close()
    assert entry is not None and from_entry(json.loads(json.dumps(entry))) == reply
    for change in ({"text": 3}, {"truncated": "no"}, {"top": [["a"]]}, {"top": None}, {"top": [["a", float("inf")]]}):
        assert from_entry(entry | change) is None
    assert from_entry({}) is None
    assert CACHE_FILE == "api_cache.jsonl"
