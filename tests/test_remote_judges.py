"""The judge protocols and the rubric writer over a real endpoint, and the checks of their config."""

from __future__ import annotations

import json
import math

import pytest
from remote_support import completion, endpoint, says, serving

from coevo_jax.config import EndpointConfig, Experiment, JudgeConfig, RubricConfig, Sampling
from coevo_jax.config.override import apply_overrides
from coevo_jax.config.validate import used_samplings, validate
from coevo_jax.errors import UserError
from coevo_jax.judges import JudgeItem, make_judge
from coevo_jax.rubrics import Criterion, Rubric
from coevo_jax.rubrics.endpoint import EndpointWriter

RUBRIC = Rubric((Criterion("Names Lima", 0.6), Criterion("One sentence", 0.2), Criterion("Polite", 0.2)))


def items_of(n):
    return [JudgeItem("Capital of Peru?", RUBRIC, f"It is Lima {i}.", 1000 + i) for i in range(n)]


def judge_of(client, protocol, **fields):
    return make_judge(JudgeConfig(source="api:m", protocol=protocol, **fields), None, None, None, 0, client)


def test_json_score_sends_the_prompt_of_our_own_judge():
    with serving(says('<think>{"score": 1}</think>{"reasoning": "ok", "score": 0.25}')) as server, endpoint(server.url) as client:
        judge = judge_of(client, "json_score")
        verdicts = judge.judge(items_of(2), 7)
    assert judge.name == "json_score" and [(v.status, v.score, v.parts) for v in verdicts] == [("ok", 0.25, ())] * 2
    assert {b["max_tokens"] for b in server.bodies} == {256} and {b["temperature"] for b in server.bodies} == {0.6}
    system, user = server.bodies[0]["messages"]
    assert system["role"] == "system" and user["role"] == "user"
    assert "1. (weight 0.6) Names Lima" in user["content"] and "<answer " in user["content"]


def test_json_criteria_is_weighted_by_us():
    with serving(says('{"scores": [1, 0.5, 0]}')) as server, endpoint(server.url) as client:
        (verdict,) = judge_of(client, "json_criteria").judge(items_of(1), 0)
    assert verdict.score == pytest.approx(0.7) and verdict.parts == (1.0, 0.5, 0.0)


HOSTILE = ["", "no verdict", '{"score": 2}', '{"score": NaN}', '{"score": true}', '{"score": 0.9} {"score":', "<think>never ends"]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_text_without_verdict_is_asked_for_again_and_never_a_number(text):
    with serving(says(text)) as server, endpoint(server.url) as client:
        (verdict,) = judge_of(client, "json_score", retries=2).judge(items_of(1), 0)
    assert verdict.score is None and verdict.status in ("parse_fail", "truncated") and len(server.bodies) == 3


def test_a_later_attempt_counts():
    script = lambda h, body, number: h.send(completion('{"score": 0}', "length") if number == 0 else completion('{"score": 1}'))  # noqa: E731
    with serving(script) as server, endpoint(server.url) as client:
        (verdict,) = judge_of(client, "json_score").judge(items_of(1), 0)
    assert verdict.score == 1.0 and len(server.bodies) == 2


def test_a_failed_endpoint_is_not_asked_again_by_the_judge():
    with serving(lambda h, body, number: h.send("<html>")) as server, endpoint(server.url, retries=1) as client:
        (verdict,) = judge_of(client, "json_score", retries=2).judge(items_of(1), 0)
    assert verdict.status == "parse_fail" and verdict.detail == "malformed: no JSON (JSONDecodeError)" and len(server.bodies) == 2


@pytest.mark.parametrize("protocol", ["json_score", "json_criteria", "criterion_logits"])
def test_order_and_company_change_nothing(protocol):
    def script(h, body, number):
        text = body["messages"][-1]["content"]
        share = 0.1 + 0.8 * (sum(map(ord, text)) * 7919 % 9973) / 9973
        top = [{"token": "Yes", "logprob": math.log(share)}, {"token": "no", "logprob": math.log(1 - share)}]
        said = json.dumps({"score": share} if protocol == "json_score" else {"scores": [share, 0.5, 1 - share]})
        h.send(completion(said, logprobs={"content": [{"top_logprobs": top}]}))

    with serving(script) as server, endpoint(server.url) as client:
        judge, items = judge_of(client, protocol), items_of(5)
        together = judge.judge(items, 3)
        assert judge.judge(items[::-1], 4)[::-1] == together == [judge.judge([item], 5)[0] for item in items]
        assert len({v.score for v in together}) == 5 and judge.judge([], 0) == []
        with pytest.raises(ValueError, match="same request id"):
            judge.judge([items[0], items[0]], 0)


def logits(*pairs):
    return {"logprobs": {"content": [{"top_logprobs": [{"token": t, "logprob": math.log(p)} for t, p in pairs]}]}}


def test_criterion_logits_reads_the_listed_tokens():
    by_word = {
        "Names Lima": logits(("Yes", 0.5), (" yes", 0.1), ("No", 0.2), ("Yesterday", 0.1), ("Maybe", 0.1)),
        "One sentence": logits(("no", 0.9), ("NO", 0.05)),
        "Polite": logits(('"yes', 0.25), ("▁no", 0.25), ("x", 0.5)),
    }

    def script(h, body, number):
        word = next(w for w in by_word if f"Criterion: {w}" in body["messages"][-1]["content"])
        h.send(completion("Yes", "length", **by_word[word]))

    with serving(script) as server, endpoint(server.url) as client:
        (verdict,) = judge_of(client, "criterion_logits").judge(items_of(1), 0)
    assert verdict.parts == pytest.approx((0.75, 0.0, 0.5)) and verdict.score == pytest.approx(0.6 * 0.75 + 0.2 * 0.5)
    assert verdict.yes_no_mass == pytest.approx(0.5)
    assert all(b["max_tokens"] == 1 and b["top_logprobs"] == 20 and "temperature" not in b for b in server.bodies)


@pytest.mark.parametrize(
    "choice, why",
    [
        ({}, "lists no top_logprobs"),
        (logits(("maybe", 0.9), ("yes", 0.01)), "of the probability"),
        (logits(("maybe", 0.9)), "of the probability"),
        (logits(("yes", 0.9), ("no", 0.9)), "add up to more than 1"),
    ],
)
def test_criterion_logits_without_a_verdict_fails(choice, why):
    with serving(lambda h, body, number: h.send(completion("yes", **choice))) as server, endpoint(server.url) as client:
        (verdict,) = judge_of(client, "criterion_logits").judge(items_of(1), 0)
    assert verdict.status == "parse_fail" and why in verdict.detail


def test_the_writer_reads_rubrics_and_tells_a_failed_endpoint_from_a_bad_rubric():
    good = json.dumps({"criteria": [{"criterion": f"c{i}", "weight": 0.5} for i in range(2)]})

    def script(h, body, number):
        text = body["messages"][-1]["content"]
        h.send("{}", 400) if "down" in text else h.send(completion("prose" if "bad" in text else good))

    with serving(script) as server, endpoint(server.url) as client:
        found = EndpointWriter(client, RubricConfig()).start(["good?", "bad?", "down?"], Sampling(max_new_tokens=99))()
    assert found[0] is not None and found[0].value is not None and len(found[0].value.criteria) == 2
    assert found[1] is not None and found[1].status == "parse_fail" and found[2] is None
    assert all(body["max_tokens"] == 99 for body in server.bodies)


# ---------------------------------------------------------------------------------------------------- config

JUDGE = ("judge.source=api:gpt", "judge.protocol=json_score", "judge.endpoint.base_url=https://api.example.com/v1")
WRITER = (
    *("generator.source=api:gpt", "generator.mode=two", "generator.endpoint.base_url=http://localhost:8000/v1"),
    "schedule.order=policy_only",
)


def with_(*overrides: str) -> Experiment:
    return apply_overrides(Experiment(), overrides)


def test_good_configs_pass_and_ask_no_room_of_our_own_sampler():
    cfg = with_(*JUDGE, *WRITER, "judge.sampling.max_new_tokens=4096", "rubric_sampling.max_new_tokens=4096")
    validate(cfg)
    assert [key for key, _, _ in used_samplings(cfg)] == ["answer"]
    validate(with_(*WRITER[:3], "generator.frozen=true"))
    validate(with_(*JUDGE[:1], "judge.protocol=criterion_logits", *JUDGE[2:]))


BAD = {
    "policy.source": ("policy.source=api:gpt",),
    "generator.source, schedule.order": (*WRITER, "schedule.order=alternate"),
    "generator.source, generator.mode": (*WRITER, "generator.mode=single"),
    "judge.source": (*JUDGE, "judge.source=api:"),
    "judge.source, judge.protocol": (*JUDGE, "judge.protocol=oracle"),
    "judge.source, judge.endpoint.base_url": (*JUDGE, "judge.source=smollm2"),
    "judge.thinking, judge.endpoint.extra_body": (*JUDGE, "judge.thinking=true"),
    "judge.endpoint.concurrency": (*JUDGE, "judge.endpoint.concurrency=0"),
    "judge.endpoint.timeout_s": (*JUDGE, "judge.endpoint.timeout_s=0"),
    "judge.endpoint.length_field": (*JUDGE, "judge.endpoint.length_field=max_token"),
    "judge.endpoint.cache": (*JUDGE, "judge.endpoint.cache="),
}


@pytest.mark.parametrize("where", BAD)
def test_a_bad_config_names_its_keys(where):
    with pytest.raises(UserError) as caught:
        validate(with_(*BAD[where]))
    assert caught.value.where == where and caught.value.expected


@pytest.mark.parametrize(
    "url",
    [
        *("", "api.example.com/v1", "ftp://a/v1", "https://", "https://user:pw@a/v1", "https://a/v1?key=1", "https://a/v1#x"),
        *("https://a:x/v1", "https://a b/v1", "https://[a/v1", "https://a:0/v1"),
    ],
)
def test_a_bad_address(url):
    with pytest.raises(UserError) as caught:
        validate(with_(*JUDGE[:2], f"judge.endpoint.base_url={url}"))
    assert caught.value.where == "judge.endpoint.base_url" and "pw" not in str(caught.value)


def test_a_key_in_place_of_its_name_is_refused_and_not_shown():
    with pytest.raises(UserError) as caught:
        validate(with_(*JUDGE, "judge.endpoint.key_env=sk-very-secret"))
    assert caught.value.where == "judge.endpoint.key_env" and "secret" not in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[]", "3", '{"temperature": 0}', '{"stream": true}'])
def test_extra_body(text):
    with pytest.raises(UserError) as caught:
        validate(with_(*JUDGE, f"judge.endpoint.extra_body={text}"))
    assert caught.value.where == "judge.endpoint.extra_body"
    assert EndpointConfig().extra_body == ""


# ---- the baselines' protocols


def test_a_rating_over_an_endpoint():
    with serving(says('{"reasoning": "ok", "rating": 7}')) as server, endpoint(server.url) as client:
        judges = {name: judge_of(client, name) for name in ("likert", "likert_reference", "rar_implicit")}
        found = {name: judge.judge(items_of(1), 0)[0] for name, judge in judges.items()}
    assert {name: judge.name for name, judge in judges.items()} == {name: name for name in judges}
    assert all(v.score == pytest.approx(2 / 3) for v in found.values())
    prompts = [body["messages"][-1]["content"] for body in server.bodies]
    assert ["Names Lima" in p for p in prompts] == [False, False, True] and "<reference " in prompts[1]


def test_explicit_over_an_endpoint():
    def script(h, body, number):
        h.send(completion("no" if "One sentence" in body["messages"][-1]["content"] else "yes"))

    with serving(script) as server, endpoint(server.url) as client:
        verdicts = judge_of(client, "rar_explicit").judge(items_of(2), 0)
    assert [v.score for v in verdicts] == pytest.approx([0.8, 0.8]) and verdicts[0].parts == (1.0, 0.0, 1.0)
    assert len(server.bodies) == 6


def test_samples_over_an_endpoint_are_requests_of_their_own(tmp_path):
    script = lambda h, body, number: h.send(completion(f'{{"rating": {number + 1}}}'))  # noqa: E731
    with serving(script) as server, endpoint(server.url, tmp_path, concurrency=1) as client:
        judge = judge_of(client, "likert", samples=3)
        first = judge.judge(items_of(1), 0)
        again = judge.judge(items_of(1), 1)
    assert len(server.bodies) == 3 and first == again  # from the cache: identity is content and the sample's number
    assert sorted(first[0].parts) == pytest.approx([0, 1 / 9, 2 / 9]) and first[0].score == pytest.approx(1 / 9)
