"""The engine: cached against full forward, recorded log-probs against the trainer's, noise by identity, scheduling."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampler_support import (
    CFG,
    LLAMA,
    SPECS,
    STOPS,
    assert_same_draws,
    engine_of,
    flat,
    full_logits,
    log_softmax,
    new_engine,
    params_of,
    prompts_of,
    requests_of,
    trainer_logprobs,
)  # fmt: skip

from coevo_jax.config import Sampling
from coevo_jax.errors import UserError
from coevo_jax.sampler import Engine, Request, kv

PARAMS = params_of(LLAMA)


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_recorded_logprobs_and_entropies_equal_the_trainers(family, temperature):
    spec, params = SPECS[family], params_of(SPECS[family])
    requests = requests_of(prompts_of(4), n=2, temperature=temperature)
    for r, row in zip(requests, engine_of(spec).generate(params, requests)):
        for c in row:
            rows = trainer_logprobs(params, spec, r.prompt, c.tokens, temperature)
            np.testing.assert_allclose(c.logprobs, rows[np.arange(len(c.tokens)), c.tokens], atol=1e-5, rtol=0)
            np.testing.assert_allclose(c.entropy, -(np.exp(rows) * rows).sum(1), atol=2e-5, rtol=0)


@pytest.mark.parametrize("family", SPECS)
def test_greedy_is_the_argmax_of_the_full_forward_and_its_logprob_is_at_temperature_1(family):
    spec, params = SPECS[family], params_of(SPECS[family])
    requests = requests_of(prompts_of(3, seed=2), n=1, temperature=0.0)
    for r, (c,) in zip(requests, engine_of(spec).generate(params, requests)):
        logits = full_logits(params, spec, np.concatenate([r.prompt, c.tokens]))[len(r.prompt) - 1 : -1]
        np.testing.assert_array_equal(c.tokens, logits.argmax(1))
        np.testing.assert_allclose(c.logprobs, log_softmax(logits).max(1), atol=1e-5)


def test_bfloat16_cache_stays_close_to_the_full_forward():
    requests = requests_of(prompts_of(4), n=2)
    gaps = []
    for r, row in zip(requests, engine_of(kv_dtype="bfloat16").generate(PARAMS, requests)):
        for c in row:
            rows = trainer_logprobs(PARAMS, LLAMA, r.prompt, c.tokens, 1.0)
            gaps.append(np.abs(c.logprobs - rows[np.arange(len(c.tokens)), c.tokens]).max())
    assert 1e-5 < max(gaps) < 0.2  # it is not float32, and not broken


BASE = requests_of(prompts_of(6, seed=3), n=3)
SETTINGS = {
    "more slots": {"slots": 8},
    "one slot": {"slots": 1},
    "longer dispatches": {"steps_per_dispatch": 12},
    "single steps": {"steps_per_dispatch": 1},
    "other buckets": {"prefill_tokens": 32, "max_prompt": 40, "max_new": 30},
    "late refill": {"refill_free_share": 1.0},
    "eager refill": {"refill_free_share": 0.0},
}


@pytest.fixture(scope="module")
def base():
    return engine_of().generate(PARAMS, BASE)


@pytest.mark.parametrize("name", SETTINGS)
def test_draws_do_not_depend_on_slots_dispatch_buckets_or_refill(base, name):
    other = engine_of(**SETTINGS[name])
    if not set(SETTINGS[name]) & {"slots", "prefill_tokens"}:
        other.programs = engine_of().programs  # these settings are arguments, not shapes
    assert assert_same_draws(PARAMS, other, BASE, base, other.generate(PARAMS, BASE)) <= 2


@pytest.mark.parametrize(
    "changes",
    [{}, {"kv_dtype": "int8"}, pytest.param({"length_classes": ((3, 20), (2, 36)), "slots": 5}, marks=pytest.mark.slow)],
    ids=str,
)
def test_keys_in_one_piece_give_the_same_draws_as_in_blocks(monkeypatch, changes):
    """Off the CPU the keys of slots aren't cut into blocks."""
    blocks = engine_of(**changes)
    monkeypatch.setattr(Engine, "_platform", "gpu")
    plain = new_engine(**changes)
    assert blocks.new_state().own[0][0][0].keys.ndim == 5 and plain.new_state().own[0][0][0].keys.ndim == 4
    assert_same_draws(PARAMS, plain, BASE, blocks.generate(PARAMS, BASE), plain.generate(PARAMS, BASE))


@pytest.mark.parametrize(
    "changes",
    [{}, {"kv_dtype": "int8"}, pytest.param({"length_classes": ((3, 50), (2, 96)), "slots": 5}, marks=pytest.mark.slow)],
    ids=str,
)
def test_segments_of_positions_change_no_draw(monkeypatch, changes):
    """Prompts and rows that lie over several segments, written, moved and read; rows of different lengths beside each other."""
    changes = {"max_prompt": 80, "max_new": 16, **changes}
    requests = requests_of(prompts_of(6, seed=2, low=20, high=80), n=2, max_new_tokens=16, min_new_tokens=16)
    whole = new_engine(**changes)
    monkeypatch.setattr(kv, "SEGMENT", 32)
    cut = new_engine(**changes)
    assert len(whole.new_state().own[0][-1]) == 1 and len(cut.new_state().own[0][-1]) == 3
    expected = whole.generate(PARAMS, requests)
    assert_same_draws(PARAMS, cut, requests, expected, cut.generate(PARAMS, requests))
    assert whole.stats.moves == cut.stats.moves and bool(cut.stats.moves) == ("length_classes" in changes)


def test_draws_do_not_depend_on_order_or_batch_mix(base):
    engine = engine_of()
    order = [4, 1, 5, 0, 3, 2]
    strangers = requests_of(prompts_of(3, seed=9), n=2, role="rubric", temperature=0.3)
    mixed = engine.generate(PARAMS, [*strangers, *(BASE[i] for i in order)])[3:]
    assert_same_draws(PARAMS, engine, BASE, base, [mixed[order.index(i)] for i in range(6)])
    alone = [engine.generate(PARAMS, [r])[0] for r in BASE]
    assert_same_draws(PARAMS, engine, BASE, base, alone)


def test_a_groups_shared_prefill_equals_repeated_ones(base):
    """The same samples, each asked for with a prompt of its own program call."""
    engine = engine_of(slots=3)
    again = [engine.generate(PARAMS, [r])[0] for r in BASE]
    assert_same_draws(PARAMS, engine, BASE, base, again)
    engine.stats.reset()
    engine.generate(PARAMS, [BASE[0], dataclasses.replace(BASE[0], request=77)])
    assert engine.stats.prefill_tokens == len(BASE[0].prompt) - 1  # the group, and the second request, share one prefill


def test_the_same_call_gives_the_same_bits_and_another_update_other_noise(base):
    """B38 of the public reports."""
    engine = engine_of()
    for x, y in zip(flat(engine.generate(PARAMS, BASE)), flat(base)):
        assert x.tokens.tobytes() == y.tokens.tobytes() and x.logprobs.tobytes() == y.logprobs.tobytes()
    for change in ({"update": 1}, {"role": "rubric"}, {"request": 50}):
        other = engine.generate(PARAMS, [dataclasses.replace(BASE[0], **change)])[0]
        assert any(not np.array_equal(x.tokens, y.tokens) for x, y in zip(other, base[0])), change
    other = engine_of(seed=2).generate(PARAMS, BASE[:1])[0]
    assert any(not np.array_equal(x.tokens, y.tokens) for x, y in zip(other, base[0]))
    assert not np.array_equal(base[0][0].tokens, base[0][1].tokens)  # samples of a group differ


def test_every_stop_id_ends_a_row_is_kept_and_wins_over_the_length_limit():
    """B04, B39 of the public reports."""
    for stop in STOPS:
        loud = _always(stop)
        ((first,),) = engine_of().generate(loud, requests_of(prompts_of(1), n=1))
        assert first.finish == "stop" and first.tokens.tolist() == [stop] and len(first.logprobs) == 1  # empty completion
        last = requests_of(prompts_of(1), n=1, max_new_tokens=3, min_new_tokens=2)
        ((c,),) = engine_of().generate(loud, last)
        assert len(c.tokens) == 3 and c.tokens[-1] == stop and c.finish == "stop"  # a stop at exactly the limit
        assert not set(c.tokens[:2].tolist()) & set(STOPS)


def _always(token: int) -> dict:
    """Weights whose next token is `token` with probability near 1: every embedding gets a large shared part."""
    params = params_of(LLAMA)
    direction = np.zeros(LLAMA.hidden_size, np.float32)
    direction[0] = 1.0
    embed = np.asarray(params["embed"]).copy()
    embed[:, 0] = 1.0
    embed[token, 0] = 30.0
    layers = {n: w * jnp.float32(0) if n in ("o", "down") else w for n, w in params["layers"].items()}
    return params | {"embed": jnp.asarray(embed), "layers": layers, "final_norm": jnp.abs(params["final_norm"])}


def test_a_truncated_row_keeps_its_tokens_and_says_length():
    """B10 of the public reports."""
    ((c,),) = engine_of(stops=(95,)).generate(_always(10), requests_of(prompts_of(1), n=1, max_new_tokens=4))
    assert c.tokens.tolist() == [10] * 4 and c.finish == "length" and len(c.logprobs) == len(c.entropy) == 4


def test_minimum_length_forbids_stop_ids_and_records_the_distribution_without_them():
    requests = requests_of(prompts_of(3), n=3, min_new_tokens=5)
    for r, row in zip(requests, engine_of(stops=tuple(range(0, 48))).generate(PARAMS, requests)):
        for c in row:
            assert len(c.tokens) >= 5 and (c.tokens[:5] >= 48).all()
            logits = full_logits(PARAMS, LLAMA, np.concatenate([r.prompt, c.tokens]))[len(r.prompt) - 1 : -1][:5].copy()
            logits[:, :48] = -np.inf
            rows = log_softmax(logits)
            np.testing.assert_allclose(c.logprobs[:5], rows[np.arange(5), c.tokens[:5]], atol=1e-5)


def test_changed_weights_change_the_next_sample_and_nothing_is_stale():
    """B15 of the public reports."""
    engine, requests = engine_of(), requests_of(prompts_of(3), n=2)
    before = engine.generate(PARAMS, requests)
    changed = PARAMS | {"layers": PARAMS["layers"] | {"v": PARAMS["layers"]["v"] * jnp.float32(0)}}
    after = engine.generate(changed, requests)
    for r, row, old in zip(requests, after, before):
        for c, o in zip(row, old):
            rows = trainer_logprobs(changed, LLAMA, r.prompt, c.tokens, 1.0)
            np.testing.assert_allclose(c.logprobs, rows[np.arange(len(c.tokens)), c.tokens], atol=1e-5)
            assert c.logprobs[0] != o.logprobs[0]
    for x, y in zip(flat(engine.generate(PARAMS, requests)), flat(before)):
        assert x.logprobs.tobytes() == y.logprobs.tobytes()


def test_a_queue_longer_than_the_slots_is_served_and_counted():
    engine, seen = engine_of(slots=3), []
    engine.stats.reset()
    prompts = prompts_of(9, seed=5)
    requests = [dataclasses.replace(r, sampling=Sampling(max_new_tokens=2 + i)) for i, r in enumerate(requests_of(prompts, n=2))]
    out = engine.generate(PARAMS, requests, progress=lambda done, total: seen.append((done, total)))
    assert [len(row) for row in out] == [2] * 9 and seen[-1] == (18, 18) and seen == sorted(seen)
    for r, row in zip(requests, out):
        assert all(len(c.tokens) <= r.sampling.max_new_tokens for c in row)
    s = engine.stats
    assert s.tokens == s.row_steps == sum(len(c.tokens) for c in flat(out)) and s.sequences == 18
    assert 0.5 < s.occupancy <= 1 and s.slot_steps % 3 == 0 and s.dispatches > 3
    s.reset()
    assert s.tokens == 0 and s.occupancy == 0 and engine.generate(PARAMS, []) == []


def test_nothing_compiles_after_warm_up_and_an_unknown_program_is_named():
    engine = new_engine(max_new=8, prefill_tokens=32)
    assert engine.warmup(PARAMS, score=True) > 0
    with pytest.raises(RuntimeError, match=r"truncated.*not compiled by warm-up"):
        engine.generate(PARAMS, requests_of(prompts_of(1), max_new_tokens=8, top_k=3))
    engine.warmup(PARAMS, top_p=True, score=True)
    count = len(engine.programs)
    for seed in range(3):
        prompts = prompts_of(7, seed=seed, low=1, high=24)
        engine.generate(PARAMS, requests_of(prompts, n=1 + seed, max_new_tokens=8, top_p=0.9 if seed else 1.0))
        engine.next_token_probs(PARAMS, prompts, [[1, 2], [3]])
        engine.score(PARAMS, prompts, [p[:5] for p in prompts])
    assert len(engine.programs) == count


def test_an_interrupted_call_leaves_the_engine_usable(base):
    engine = engine_of()

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate(PARAMS, BASE, progress=stop)
    for x, y in zip(flat(engine.generate(PARAMS, BASE)), flat(base)):
        assert x.tokens.tobytes() == y.tokens.tobytes()


def test_prompts_at_the_limit_and_of_one_token():
    requests = requests_of([np.arange(8, 8 + CFG.max_prompt, dtype=np.int32), np.asarray([9], np.int32)], n=2)
    for r, row in zip(requests, engine_of(stops=(95,)).generate(PARAMS, requests)):
        for c in row:
            rows = trainer_logprobs(PARAMS, LLAMA, r.prompt, c.tokens, 1.0)
            np.testing.assert_allclose(c.logprobs, rows[np.arange(len(c.tokens)), c.tokens], atol=1e-5)


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], {}, "empty prompt"),
        ([9] * 25, {}, "prompt has 25 tokens"),
        ([96], {}, "token id 96"),
        ([-1], {}, "token id -1"),
        ([1.5], {}, "float"),
        ([9], {"max_new_tokens": 13}, "max_new_tokens = 13"),
        ([9], {"max_new_tokens": 0}, "max_new_tokens = 0"),
        ([9], {"min_new_tokens": 13}, "min_new_tokens = 13"),
        ([9], {"temperature": -0.1}, "temperature"),
        ([9], {"temperature": float("nan")}, "temperature"),
        ([9], {"top_p": 0.0}, "top_p"),
        ([9], {"top_k": -1}, "top_k"),
    ],
)
def test_bad_requests_are_refused_by_name(prompt, sampling, message):
    request = Request(np.asarray(prompt), 1, "policy", 0, 0, Sampling(**({"max_new_tokens": 12} | sampling)))
    with pytest.raises(UserError, match=message):
        engine_of().generate(PARAMS, [request])
    with pytest.raises(UserError, match="0 samples"):
        engine_of().generate(PARAMS, [dataclasses.replace(request, n=0)])


def test_weights_with_nan_are_an_error_and_not_a_completion():
    bad = PARAMS | {"final_norm": PARAMS["final_norm"] * jnp.float32("nan")}
    with pytest.raises(RuntimeError, match="not finite"):
        engine_of().generate(bad, requests_of(prompts_of(1)))


def test_eight_devices_give_what_one_gives():
    mesh = jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with pytest.raises(UserError, match="4 slots of a class do not divide over 8 devices"):
        engine_of(mesh=mesh)
    one, eight = engine_of(slots=8), new_engine(slots=8, mesh=mesh)
    everywhere = jax.device_put(PARAMS, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    assert_same_draws(PARAMS, one, BASE, one.generate(PARAMS, BASE), eight.generate(everywhere, BASE))
    prompts = prompts_of(4)
    expected, got = (e.next_token_probs(p, prompts, [[1], [2, 3]]) for e, p in ((one, PARAMS), (eight, everywhere)))
    np.testing.assert_allclose(got, expected, atol=1e-6)
