"""The small world's committed model, through the real loader, tokenizer, templates, sampler and parser."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from coevo_jax.config import ModelConfig, RubricConfig, SamplerConfig, Sampling
from coevo_jax.config.load import load_config
from coevo_jax.config.validate import validate
from coevo_jax.errors import UserError
from coevo_jax.judges import JudgeItem, world
from coevo_jax.judges.world import OracleJudge, make_question, true_quality
from coevo_jax.models.load import load_model
from coevo_jax.rubrics import parse_rubric
from coevo_jax.sampler import Engine, Request
from coevo_jax.text.chat import ChatTokenizer
from coevo_jax.text.prompts import render_prompt

GROUP = 8


@pytest.fixture(scope="module")
def model():
    return load_model(ModelConfig(source="tiny"))


@pytest.fixture(scope="module")
def tokenizer(model):
    return ChatTokenizer.load(model.folder)


@pytest.fixture(scope="module")
def sample(model, tokenizer):
    """Texts and finish reasons of n samples for each prompt, at temperature 1."""
    cfg = SamplerConfig(slots=32, max_prompt=64, max_new=48, steps_per_dispatch=16, prefill_tokens=256)
    engine = Engine(model.spec, cfg, tokenizer.stop_ids, seed=5)
    engine.warmup(model.params)

    def run(prompts: list[list[int]], n: int, role: str) -> list[list[tuple[str, str]]]:
        requests = [
            Request(prompt=np.asarray(ids, np.int32), n=n, role=role, update=0, request=i, sampling=Sampling(max_new_tokens=48))
            for i, ids in enumerate(prompts)
        ]
        out = engine.generate(model.params, requests)
        return [[(tokenizer.decode([int(t) for t in c.tokens]), c.finish) for c in group] for group in out]

    return run


@pytest.fixture(scope="module")
def questions():
    rng = random.Random("held out")
    return [make_question(rng)[0] for _ in range(16)]


def prompt(tokenizer, template: str, **slots: str) -> list[int]:
    messages = render_prompt(template, **slots)
    system = messages[0]["content"] if messages[0]["role"] == "system" else ""
    return tokenizer.render([m for m in messages if m["role"] != "system"], thinking=False, system=system)


def answer_prompt(tokenizer, question: str) -> list[int]:
    return tokenizer.render([{"role": "user", "content": question}], thinking=False, system="")


@pytest.fixture(scope="module")
def answers(sample, tokenizer, questions):
    return sample([answer_prompt(tokenizer, q) for q in questions], GROUP, "policy")


@pytest.fixture(scope="module")
def rubrics(sample, tokenizer, questions):
    texts = sample([prompt(tokenizer, "world_rubric", question=q) for q in questions], GROUP, "rubric")
    return [[parse_rubric(t, RubricConfig(), truncated=finish == "length") for t, finish in group] for group in texts]


def test_size_and_folder():
    files = {f.name: f.stat().st_size for f in world.MODEL_FOLDER.iterdir()}
    assert set(files) == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert sum(files.values()) <= 2_000_000


def test_tokenizer_round_trip(tokenizer):
    rng = random.Random(2)
    texts = [make_question(rng)[0] for _ in range(50)]
    texts += [" ".join(rng.sample(world.WORDS, 5)) for _ in range(50)]
    for kind in world.KINDS:
        prop = world.Property(kind, "owl", 4)
        texts.append(world.write_rubric([(prop.criterion, 0.6), (rng.choice(world.USELESS), 0.4)]))
    texts += [world.write_rubric([(pattern.format(number=3), 0.1), ("is kind", 0.9)]) for pattern in world.RUBRIC_ONLY.values()]
    unknown = tokenizer.encode("banana")
    for text in texts:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert unknown[0] not in ids
        if text.startswith("{"):
            assert json.loads(tokenizer.decode(ids))["criteria"]
            assert len(ids) <= 60


def test_prompts_are_in_the_vocabulary(tokenizer):
    """Every template of the world renders without an unknown token, and each says which task it is."""
    unknown = tokenizer.encode("banana")[0]
    question, answer = make_question(random.Random(1))
    rubric = world.write_rubric([("includes owl", 0.6), ("is nice", 0.4)])
    rendered = [
        answer_prompt(tokenizer, question),
        prompt(tokenizer, "world_rubric", question=question),
        prompt(tokenizer, "world_conditioned", question=question, rubric=rubric),
        prompt(tokenizer, "world_question", answer=answer),
    ]
    assert all(unknown not in ids for ids in rendered)
    assert len({tuple(ids) for ids in rendered}) == 4


def test_half_of_the_rubrics_are_valid(rubrics):
    valid = np.mean([parsed.status == "ok" for group in rubrics for parsed in group])
    assert 0.35 <= valid <= 0.65, valid


def test_answers_are_middling_and_differ_in_a_group(questions, answers):
    quality = np.asarray([[true_quality(q, text) for text, _ in group] for q, group in zip(questions, answers)])
    assert 0.35 <= quality.mean() <= 0.65, quality.mean()
    assert quality.std(axis=1).mean() > 0.1
    assert all(finish == "stop" for group in answers for _, finish in group)


def test_both_roles_have_something_to_learn(questions, answers, rubrics):
    """Rewards differ inside groups: of answers under a rubric, and of rubrics over a pair of answers."""
    judge = OracleJudge()
    policy, generator = [], []
    for question, group, written in zip(questions, answers, rubrics):
        texts = sorted((text for text, _ in group), key=lambda text: true_quality(question, text))
        valid = [parsed.value for parsed in written if parsed.status == "ok"]
        if not valid:
            continue
        policy.append(np.std([v.score for v in judge.judge([JudgeItem(question, valid[0], t, 0) for t in texts], 0)]))
        pairs = [[JudgeItem(question, r, texts[-1], 0), JudgeItem(question, r, texts[0], 0)] for r in valid]
        margins = [plus.score - minus.score for plus, minus in (judge.judge(pair, 0) for pair in pairs)]
        generator.append(np.std(margins + [0.0] * (len(written) - len(valid))))
    assert len(policy) >= 12
    assert np.mean(policy) > 0.05 and np.mean(generator) > 0.05


def test_rubrics_are_of_mixed_relevance(questions, rubrics):
    """Between a quarter and three quarters of the criteria are among what the question asks for: the margin can rise and fall."""
    asked = []
    for question, group in zip(questions, rubrics):
        wanted = {p.criterion for p in world.read_question(question)}
        asked += [c.text in wanted for parsed in group if parsed.status == "ok" for c in parsed.value.criteria]
    assert 0.25 <= np.mean(asked) <= 0.75, np.mean(asked)


def test_conditioned_answers_are_better(sample, tokenizer, questions, answers):
    """An answer that saw a good rubric beats one that did not, so that rubric-conditioned pairs are right more often than not."""
    prompts = []
    for question in questions:
        props = world.read_question(question)[-3:]
        rubric = world.write_rubric([(p.criterion, w) for p, w in zip(props, (0.4, 0.3, 0.3))])
        prompts.append(prompt(tokenizer, "world_conditioned", question=question, rubric=rubric))
    better = sample(prompts, GROUP, "policy")
    gain = [
        np.mean([true_quality(q, t) for t, _ in group]) - np.mean([true_quality(q, t) for t, _ in plain])
        for q, group, plain in zip(questions, better, answers)
    ]
    assert np.mean(gain) > 0.05, np.mean(gain)


def test_questions_are_inferred(sample, tokenizer, questions, answers):
    """Most inferred questions are questions of the world, about the answer, and seldom the original."""
    prompts = [prompt(tokenizer, "world_question", answer=group[0][0]) for group in answers]
    readable, met = [], []
    for group, (text, _) in zip(sample(prompts, 1, "policy"), (g[0] for g in answers)):
        try:
            met.append(true_quality(group[0][0], text))
            readable.append(group[0][0] not in questions)
        except UserError:
            readable.append(False)
    assert np.mean(readable) > 0.7 and np.mean(met) > 0.5


def test_config_is_valid():
    cfg = load_config(str(world.MODEL_FOLDER.parents[3] / "configs" / "tiny.py"))
    validate(cfg)
    assert (cfg.policy.source, cfg.judge.protocol, cfg.data.prompts) == ("tiny", "oracle", "tiny")
