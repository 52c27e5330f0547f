"""Guided sampling: masks against brute force, walks under them against our own parsers, the device's part against NumPy."""

from __future__ import annotations

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sampler_support as ss
import text_support as tt

from coevo_jax.config import Experiment, JudgeConfig, RubricConfig, SamplerConfig, Sampling
from coevo_jax.config.validate import validate
from coevo_jax.errors import UserError
from coevo_jax.judges import JudgeItem, make_judge
from coevo_jax.methods.context import Context, Voice
from coevo_jax.models.load import TINY
from coevo_jax.rubrics import Criterion, Rubric, parse_rubric
from coevo_jax.sampler.draw import NEGATIVE, draw
from coevo_jax.sampler.requests import Completion, Request, check_request
from coevo_jax.text.chat import ChatTokenizer
from coevo_jax.text.grammars import rubric_lark
from coevo_jax.text.parse import parse_criteria_scores, parse_score

pytest.importorskip("llguidance")
from coevo_jax.sampler import guided
from coevo_jax.sampler.guided import Grammar, GuidedRows, apply_mask

WORDS = ("yes", " no", "score")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A byte-level one with two stop ids."""
    folder = tt.make_tokenizer(tmp_path_factory.mktemp("tok"), tt.CHATML, words=WORDS)
    ends = [ChatTokenizer.load(folder)._tok.convert_tokens_to_ids("<|eot_id|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    tokenizer = ChatTokenizer.load(folder)
    assert len(tokenizer.stop_ids) == 2
    return tokenizer


@pytest.fixture(scope="module")
def tiny():
    return ChatTokenizer.load(TINY)


@pytest.fixture(scope="module")
def smollm2():
    from coevo_jax.config import ModelConfig
    from coevo_jax.models.load import load_model
    from coevo_jax.models.smollm2 import gguf_path

    if not gguf_path().is_file():
        pytest.skip("the embedded model is absent")
    return ChatTokenizer.load(load_model(ModelConfig()).folder)


def allowed(rows: GuidedRows, slot: int) -> list[int]:
    bits = np.unpackbits(np.ascontiguousarray(rows.masks()[slot]).view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def walk(grammar: Grammar, vocab: int, seed: int, most: int = 3000) -> list[int]:
    """Tokens drawn evenly from the masks until a stop id."""
    rows, rng, out = GuidedRows(2, vocab), np.random.default_rng(seed), []
    rows.start(1, grammar, "walk")
    while not out or out[-1] not in grammar.tokenizer.stop_ids:
        assert len(out) < most
        out.append(int(rng.choice(allowed(rows, 1))))
        rows.accept(1, out[-1])
    return out


def test_masks_against_brute_force(small):
    """Exactly the tokens after which one of the texts is still possible; stop ids exactly after a whole text."""
    texts = ["yes", "yes no", "score: 1", "scores", "no"]
    grammar = Grammar.from_regex("|".join(map(re.escape, texts)), small, own_spelling=False)
    pieces, vocab = [small.token_text(i) for i in range(small.vocab_size)], small.vocab_size + 40
    rng, ended = np.random.default_rng(0), set()
    for _ in range(12):
        rows, said = GuidedRows(3, vocab), ""
        rows.start(2, grammar, "r")
        while True:
            wanted = [i for i, p in enumerate(pieces) if p and "\ufffd" not in p and any(t.startswith(said + p) for t in texts)]
            wanted += small.stop_ids if said in texts else []
            assert allowed(rows, 2) == sorted(wanted), said
            token = int(rng.choice(wanted))
            rows.accept(2, token)
            if token in small.stop_ids:
                break
            said += pieces[token]
        ended.add(said)
    assert len(ended) >= 3


def test_own_spelling_of_forced_text(small):
    rows = GuidedRows(2, small.vocab_size)
    for slot, own in enumerate((True, False)):
        rows.start(slot, Grammar.from_regex("score", small, own_spelling=own), "r")
    assert [small.token_text(i) for i in allowed(rows, 0)] == ["score"] and len(allowed(rows, 1)) > 1


def check_walks(tokenizer: ChatTokenizer, vocab: int, seeds: int) -> None:
    for cfg in (RubricConfig(), RubricConfig(min_criteria=3, max_criteria=4, weight_tolerance=0.0)):
        grammar = guided.rubric_grammar(tokenizer, cfg)
        for seed in range(seeds):
            ids = walk(grammar, vocab, seed)
            parsed = parse_rubric(tokenizer.decode(ids), cfg)
            assert parsed.ok or "are the same" in parsed.detail, (parsed.detail, tokenizer.decode(ids))
            assert not set(ids[:-1]) & set(tokenizer.stop_ids)


def test_walks_are_rubrics_tiny(tiny):
    check_walks(tiny, tiny.vocab_size + 29, 6)


def test_walks_are_rubrics_bytes(small):
    """Short texts: a walk over single bytes ends its strings at their longest length only."""
    cfg = RubricConfig(min_criteria=3, max_criteria=4, weight_tolerance=0.0)
    for seed in range(4):
        text = small.decode(walk(Grammar(rubric_lark(cfg, 20, criterion=24, level=8), small), small.vocab_size, seed))
        assert parse_rubric(text, cfg).ok, text


def test_walks_are_verdicts(small):
    for seed in range(3):
        one, three = (small.decode(walk(guided.verdict_grammar(small, n), small.vocab_size, seed)) for n in (0, 3))
        assert parse_score(one).ok and one.strip().startswith('{"reasoning": "'), one
        assert parse_criteria_scores(three, 3).ok, three


@pytest.mark.model
def test_walks_smollm2(smollm2):
    check_walks(smollm2, smollm2.vocab_size + 64, 1)
    assert parse_score(smollm2.decode(walk(guided.verdict_grammar(smollm2), smollm2.vocab_size, 0))).ok


def test_schema(small):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": [1, 2]}}, "required": ["a", "b"],
              "additionalProperties": False}  # fmt: skip
    texts = {small.decode(walk(Grammar.from_schema(schema, small), small.vocab_size, seed)).strip() for seed in range(12)}
    assert texts <= {f'{{"a": {a}, "b": {b}}}' for a in ("true", "false") for b in (1, 2)} and len(texts) > 1


def test_only_stop_ids_at_the_end(small):
    rows = GuidedRows(1, small.vocab_size)
    rows.start(0, Grammar.from_regex("yes", small), "r")
    rows.accept(0, small.encode("yes")[0])
    assert allowed(rows, 0) == list(small.stop_ids)


def test_dead_end_names_the_request(tiny):
    """No token of the small world begins with a z, or with a space and a z."""
    words = [tiny.token_text(i) for i in range(tiny.vocab_size)]
    rows = GuidedRows(1, tiny.vocab_size)
    rows.start(0, Grammar.from_regex("is z", tiny), "request 7")
    rows.accept(0, words.index("is"))
    with pytest.raises(UserError, match=r"(?s)no token continues.*request 7"):
        rows.masks()
    rows = GuidedRows(1, tiny.vocab_size)
    rows.start(0, Grammar.from_regex("is ant", tiny), "request 8")
    with pytest.raises(UserError, match="request 8"):
        rows.accept(0, words.index("bee"))


def test_broken_grammar(small):
    with pytest.raises(UserError, match="grammar"):
        Grammar("start: (", small).matcher(small.vocab_size)


def test_slots_are_independent(small):
    rows = GuidedRows(4, small.vocab_size)
    rows.start(0, Grammar.from_regex("yes", small, own_spelling=False), "a")
    rows.start(2, Grammar.from_regex("no|score", small, own_spelling=False), "b")
    before = allowed(rows, 2)
    rows.accept(0, small.encode("y")[0])
    assert allowed(rows, 2) == before and {small.token_text(i) for i in allowed(rows, 0)} == {"e"}
    assert (rows.masks()[[1, 3]] == 0xFFFFFFFF).all() and 2 in rows and 1 not in rows
    rows.accept(1, 5)  # not guided: nothing to do
    rows.stop(2)
    assert (rows.masks()[2] == 0xFFFFFFFF).all() and 2 not in rows and len(allowed(rows, 0)) == 1


def test_a_text_moves_and_is_told_once(small):
    rows = GuidedRows(3, small.vocab_size)
    rows.start(0, Grammar.from_regex("yyes", small, own_spelling=False), "a")
    y = small.encode("y")[0]
    rows.accept(0, y, 1)
    rows.accept(0, y, 1)  # at rest: the same token again
    rows.move(0, 2)
    rows.move(0, 1)  # nothing there
    assert (rows.masks()[:2] == 0xFFFFFFFF).all()
    assert {small.token_text(i) for i in allowed(rows, 2)} == {"y", "ye", "yes"}
    rows.accept(2, y, 2)
    assert {small.token_text(i) for i in allowed(rows, 2)} == {"e"}


def test_engine_under_a_grammar(tiny):
    """Guided and free rows together, more than there are slots: guided texts are of the grammar, log-probs of what it left."""
    spec = dataclasses.replace(ss.LLAMA, vocab_size=128)
    params = ss.params_of(spec, scale=1.0)
    engine = ss.new_engine(spec, tiny.stop_ids, slots=3, max_new=8)
    grammar = Grammar.from_regex(r"is( ant| bee| owl){2,3}", tiny)
    requests = ss.requests_of(ss.prompts_of(4), n=2, max_new_tokens=8)
    requests = [dataclasses.replace(r, grammar=grammar) if i % 2 else r for i, r in enumerate(requests)]
    free = engine.generate(params, requests[::2])
    found = engine.generate(params, requests)
    assert ss.assert_same_draws(params, engine, requests[::2], found[::2], free) <= 1
    for r, row in list(zip(requests, found))[1::2]:
        for c in row:
            assert c.finish == "stop" and re.fullmatch(r"is( ant| bee| owl){2,3}", tiny.decode(c.tokens))
            rows, logp = GuidedRows(1, 128), ss.full_logits(params, spec, np.concatenate([r.prompt, c.tokens]))
            rows.start(0, grammar, "r")
            for i, token in enumerate(c.tokens):
                keep = allowed(rows, 0)
                left = ss.log_softmax(logp[len(r.prompt) - 1 + i][keep])
                np.testing.assert_allclose(c.logprobs[i], left[keep.index(token)], atol=1e-4)
                np.testing.assert_allclose(c.entropy[i], -(np.exp(left) * left).sum(), atol=1e-4)
                rows.accept(0, token)


def test_apply_mask_against_numpy():
    rng = np.random.default_rng(0)
    logits, keep = rng.normal(size=(3, 77)).astype(np.float32), rng.random((3, 77)) < 0.3
    keep[1] = True
    words = np.packbits(np.pad(keep, ((0, 0), (0, 19))), axis=1, bitorder="little").view(np.uint32)
    out = jax.jit(apply_mask)(jnp.asarray(logits), jnp.asarray(words))
    np.testing.assert_array_equal(out, np.where(keep, logits, np.float32(NEGATIVE)))
    drawn = draw(out, jnp.asarray(rng.random((3, 2)), jnp.float32), jnp.full(3, 0.7, jnp.float32))
    for b in range(3):  # log-prob and entropy are those of the tokens that are left
        x = logits[b][keep[b]].astype(np.float64) / np.float32(0.7)
        logp = x - np.log(np.exp(x).sum())
        place = np.flatnonzero(keep[b]).tolist().index(int(drawn.token[b]))
        np.testing.assert_allclose([drawn.logprob[b], drawn.entropy[b]], [logp[place], -(np.exp(logp) * logp).sum()], atol=2e-5)


def test_min_new_tokens_is_refused(small):
    request = Request(np.ones(2, np.int32), 1, "judge", 0, 0, Sampling(max_new_tokens=8), Grammar.from_regex("a", small))
    assert check_request(request, SamplerConfig(), 99).grammar is request.grammar
    with pytest.raises(UserError, match="min_new_tokens"):
        check_request(dataclasses.replace(request, sampling=Sampling(max_new_tokens=8, min_new_tokens=2)), SamplerConfig(), 99)


def test_config():
    on = dataclasses.replace(Experiment(), rubric=RubricConfig(guided=True))
    validate(on)
    judge = JudgeConfig(protocol="json_score", guided=True, sampling=Sampling(max_new_tokens=64))
    validate(dataclasses.replace(Experiment(), judge=judge))
    for cfg, key in (
        (dataclasses.replace(on, generator=dataclasses.replace(on.generator, thinking=True)), "generator.thinking"),
        (dataclasses.replace(Experiment(), judge=JudgeConfig(guided=True)), "judge.protocol"),
    ):
        with pytest.raises(UserError, match=key):
            validate(cfg)


def test_judges_ask_under_a_grammar_when_told_to(small):
    asked: list[Request] = []

    class Engine:
        cfg = SamplerConfig(max_prompt=4096)

        def generate(self, params, requests, progress=None):
            asked.extend(requests)
            ids, nothing = np.asarray([*small.encode("no"), small.stop_ids[0]], np.int32), np.zeros(3, np.float32)
            return [[Completion(ids, nothing, nothing, "stop")] for _ in requests]

    rubric = Rubric((Criterion("Names Lima", 0.5), Criterion("Polite", 0.3), Criterion("Short", 0.2)))
    for protocol, count in (("json_score", 0), ("json_criteria", 3)):
        for on in (False, True):
            cfg = JudgeConfig(protocol=protocol, guided=on, retries=0)
            make_judge(cfg, Engine(), None, small, 0).judge([JudgeItem("q", rubric, "a", 1)], 0)
            assert asked.pop().grammar == (guided.verdict_grammar(small, count) if on else None)


def test_rubrics_are_guided_unless_trained(small):
    for on in (False, True):
        cfg = dataclasses.replace(Experiment(), rubric=RubricConfig(guided=on, min_criteria=3))
        ctx = Context(cfg, dict.fromkeys(("policy", "rubric"), Voice(small, None, None)), None, {}, None, None)
        kinds = ("answer", "rubric", "policy_rubric", "pair_rubric")
        role = lambda kind: "rubric" if "rubric" in kind else "policy"  # noqa: E731
        found = [ctx.request([1], 1, kind, role(kind), 0, Sampling(), slot=0).grammar for kind in kinds]
        grammar = guided.rubric_grammar(small, cfg.rubric)
        assert found == ([None, None, grammar, grammar] if on else [None] * 4)


def test_open_reasoning_is_refused(tmp_path):
    opens = ChatTokenizer.load(tt.make_tokenizer(tmp_path, tt.CHATML_OPENS))
    with pytest.raises(UserError, match="reasoning"):
        guided.check_no_reasoning(opens, False, "judge.guided")


def test_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"coevo-jax\[guided\]"):
        guided.llguidance()
    with pytest.raises(UserError, match=r"coevo-jax\[guided\]"):
        validate(dataclasses.replace(Experiment(), rubric=RubricConfig(guided=True)))
