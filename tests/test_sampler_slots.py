"""Length classes, forced tokens, late reading and int8 keys and values: none of them changes what is drawn beyond rounding."""

from __future__ import annotations

import dataclasses
import types

import jax.numpy as jnp
import numpy as np
import pytest
from sampler_support import (
    LLAMA,
    STOPS,
    assert_same_draws,
    engine_of,
    flat,
    new_engine,
    params_of,
    prompts_of,
    requests_of,
    trainer_logprobs,
)

from coevo_jax.errors import UserError
from coevo_jax.sampler.kv import attend, bytes_per_token, encode, merge, quantize
from coevo_jax.sampler.queue import Sample
from coevo_jax.sampler.run import Run, Running

PARAMS = params_of(LLAMA)
BASE = requests_of(prompts_of(6, seed=3), n=3)
CLASSES = ((2, 22), (1, 28), (1, 36))
WAYS = {
    "classes": {"length_classes": CLASSES},
    "read late": {"read_lag": 1},
    "read very late": {"read_lag": 3},
    "classes, read late": {"length_classes": CLASSES, "read_lag": 1},
    "rare checks": {"check_every": 3},
    "few rows": {"narrow": (1, 2, 3)},
}


@pytest.mark.parametrize("way", WAYS)
def test_draws_do_not_depend_on_classes_checks_or_when_reports_are_read(way):
    engine = engine_of(**WAYS[way])
    engine.stats.reset()
    base = engine_of().generate(PARAMS, BASE)
    assert assert_same_draws(PARAMS, engine, BASE, base, engine.generate(PARAMS, BASE)) <= 2
    assert engine.stats.tokens == sum(len(c.tokens) for c in flat(base)) == engine.stats.row_steps
    assert bool(engine.stats.moves) == ("length_classes" in WAYS[way])


def test_rows_that_end_together_skip_widths_whose_programs_are_compiled():
    """From all slots to one at once, after warm-up: a program that was not built would be an error."""
    engine = new_engine(stops=(95,), narrow=(1, 2, 3))
    engine.warmup(PARAMS, next_token=False)
    lengths = [1, 1, 1, 12]
    requests = [
        dataclasses.replace(r, sampling=dataclasses.replace(r.sampling, max_new_tokens=n, min_new_tokens=n))
        for r, n in zip(requests_of(prompts_of(4, seed=5), n=1), lengths)
    ]
    found = [len(c.tokens) for (c,) in engine.generate(PARAMS, requests)]
    assert found == lengths
    assert engine.stats.slot_steps < engine.cfg.slots * 12  # most steps were of the one row


def test_a_row_that_outgrows_its_class_waits_for_room_and_loses_nothing():
    """One long slot for many long rows: all come out whole, each moved at most once a class."""
    engine = engine_of(stops=(95,), length_classes=((3, 20), (1, 36)))
    requests = requests_of(prompts_of(8, seed=1, low=10, high=18), n=1, min_new_tokens=12)
    engine.stats.reset()
    for r, (c,) in zip(requests, engine.generate(PARAMS, requests)):
        assert len(c.tokens) == 12
        rows = trainer_logprobs(PARAMS, LLAMA, r.prompt, c.tokens, 1.0)
        assert (c.tokens < 95).all()
        rows[:, 95] = -np.inf
        rows -= np.log(np.exp(rows).sum(1, keepdims=True))
        np.testing.assert_allclose(c.logprobs, rows[np.arange(12), c.tokens], atol=1e-5)
    assert 0 < engine.stats.moves <= 8


def test_the_longest_full_row_moves_first():
    """Short rows must not take the slots that only longer ones need: on long queues nothing but the longest class would run."""
    run = object.__new__(Run)
    kinds = np.asarray([0, 0, 1, 1, 2])
    run.engine = types.SimpleNamespace(
        classes=((2, 16), (2, 32), (1, 64)), kinds=kinds, kind_of=lambda s: int(kinds[s]), stats=types.SimpleNamespace(moves=0),
        run_move=lambda state, slot, to, kinds: moved.append((slot, to, kinds)),
    )  # fmt: skip
    run.cfg, run.state, run.guided, run.dispatched, moved = types.SimpleNamespace(slots=5), None, None, 0, []
    run.running = {slot: Running(Sample(slot, 0, 0), 0, 0, full=slot in (0, 3)) for slot in range(4)}
    run._move_full()
    assert moved == [(3, 4, (1, 2))]


@pytest.mark.parametrize(
    ("classes", "message"),
    [(((2, 36),), "hold 2 slots"), (((3, 20), (1, 30)), "longest class has 30"), (((4, 36), (0, 40)), "at least 1 each")],
)
def test_classes_that_cannot_work_are_refused(classes, message):
    with pytest.raises(UserError, match=message):
        new_engine(length_classes=classes)


def test_forced_tokens_come_first_with_the_logprob_they_have():
    engine = engine_of(forced_tokens=4)
    forced = [np.asarray([11, 12, 13], np.int32), None, np.asarray([STOPS[0]], np.int32)]
    requests = [dataclasses.replace(r, forced=f) for r, f in zip(requests_of(prompts_of(3), n=3), forced)]
    out = engine.generate(PARAMS, requests)
    for r, row in zip(requests, out):
        for c in row:
            if r.forced is not None:
                assert c.tokens[: len(r.forced)].tolist() == r.forced.tolist()
            rows = trainer_logprobs(PARAMS, LLAMA, r.prompt, c.tokens, 1.0)
            np.testing.assert_allclose(c.logprobs, rows[np.arange(len(c.tokens)), c.tokens], atol=1e-5)
    assert [c.finish for c in out[2]] == ["stop"] * 3 and len({tuple(c.tokens) for c in out[0]}) > 1
    free = engine_of().generate(PARAMS, [dataclasses.replace(requests[1])])
    assert_same_draws(PARAMS, engine, requests[1:2], free, out[1:2])
    with pytest.raises(UserError, match=r"(?s)5 tokens are forced.*sampler.forced_tokens"):
        engine.generate(PARAMS, [dataclasses.replace(requests[0], forced=np.arange(8, 13))])


def test_int8_cache_stays_close_to_the_full_forward():
    for changes in ({}, {"share_decode": True, "share_least": 4}):
        requests, gaps = requests_of(prompts_of(4, low=8), n=2), []
        for r, row in zip(requests, engine_of(kv_dtype="int8", **changes).generate(PARAMS, requests)):
            for c in row:
                rows = trainer_logprobs(PARAMS, LLAMA, r.prompt, c.tokens, 1.0)
                gaps.append(np.abs(c.logprobs - rows[np.arange(len(c.tokens)), c.tokens]).max())
        assert 1e-5 < max(gaps) < 0.3  # it is not float32, and not broken


def test_quantised_values_are_within_half_a_step():
    x = np.random.default_rng(0).normal(size=(3, 5, 8)).astype(np.float32)
    x[0, 0] = 0
    values, scale = quantize(jnp.asarray(x), 2)
    assert values.dtype == jnp.int8 and scale.shape == (3, 5)
    assert (np.abs(np.asarray(values) * np.asarray(scale)[..., None] - x) <= np.asarray(scale)[..., None] * 0.5001).all()
    assert bytes_per_token(LLAMA, "int8") == 2 * 2 * 2 * (8 + 4) and bytes_per_token(LLAMA, "float32") == 2 * 2 * 2 * 32


def test_parts_of_an_attention_merge_exactly():
    rng = np.random.default_rng(1)
    q, k, v = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((3, 4, 8), (3, 20, 2, 8), (3, 20, 2, 8)))
    kv, s = encode(k, v, jnp.float32), jnp.arange(20)[None]
    last = jnp.asarray([[19], [4], [0]])
    whole = merge([attend(q, kv, s <= last)], jnp.float32)
    cut = merge([attend(q, kv, (s <= last) & (s < 7)), attend(q, kv, (s <= last) & (s >= 7))], jnp.float32)
    np.testing.assert_allclose(cut, whole, atol=1e-6)
    scores = np.einsum("bkgd,bskd->bkgs", np.asarray(q).reshape(3, 2, 2, 8), np.asarray(k)) / 8**0.5
    weights = np.exp(scores) * (np.arange(20) <= np.asarray(last)[:, :, None, None])[:, :, :, :]
    weights = weights / weights.sum(3, keepdims=True)
    np.testing.assert_allclose(whole, np.einsum("bkgs,bskd->bkgd", weights, np.asarray(v)).reshape(3, 4, 8), atol=1e-5)
