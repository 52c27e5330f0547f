"""Shared beginnings: the prefix tree, packed prefill on top of a head, and draws that do not depend on what is shared."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampler_support import LLAMA, SPECS, assert_same_draws, engine_of, flat, full_logits, log_softmax, params_of, requests_of

from coevo_jax.sampler import kv
from coevo_jax.sampler.block_attention import Context, block_attention
from coevo_jax.sampler.prefill import BLOCK, Span, choose, fill, pack, variants
from coevo_jax.sampler.tree import Heads, plan
from coevo_jax.sampler.tree import flat as no_sharing

PARAMS = params_of(LLAMA)
SHARE = {"share_least": 4, "heads": 3, "max_prompt": 40, "prefill_tokens": 128}


def family(seed: int = 0, heads: int = 2, rubrics: int = 2, tails: int = 3, vocab: int = 96) -> list[np.ndarray]:
    """Prompts of a tree: a head, two middle parts each, and tails (one of them of a single token)."""
    rng = np.random.default_rng(seed)
    draw = lambda n: rng.integers(8, vocab, n).astype(np.int32)  # noqa: E731
    out = []
    for _ in range(heads):
        head = draw(12)
        for _ in range(rubrics):
            middle = np.concatenate([head, draw(8)])
            out += [np.concatenate([middle, draw(1 + 4 * t)]) for t in range(tails)]
    return [out[i] for i in np.random.default_rng(9).permutation(len(out))]


# ---- the tree ----


def test_the_tree_holds_every_long_common_beginning_once():
    prompts = family()
    tree = plan(prompts, [len(p) - 1 for p in prompts], least=4, deepest=3)
    assert sorted((n.start, n.stop) for n in tree.nodes) == [(0, 12)] * 2 + [(12, 20)] * 4
    for i, prompt in enumerate(prompts):
        path = tree.path(tree.node_of[i])
        assert [tree.nodes[n].stop for n in path] == [12, 20]
        for n in path:
            owner = prompts[tree.nodes[n].owner]
            np.testing.assert_array_equal(owner[: tree.nodes[n].stop], prompt[: tree.nodes[n].stop])
    stops = [tree.node_of[i] for i in tree.order]
    assert stops == sorted(stops, key=stops.index)  # those of a node lie side by side


def test_a_head_that_saves_too_little_or_lies_too_deep_is_none():
    prompts = family()
    limits = [len(p) - 1 for p in prompts]
    assert {n.stop for n in plan(prompts, limits, least=4, deepest=1).nodes} == {12}
    assert {n.stop for n in plan(prompts, limits, least=17, deepest=3).nodes} == {12}  # 8 tokens x 2 sharers is not enough
    assert plan(prompts, limits, least=1000, deepest=3).nodes == ()
    assert plan(prompts, [0] * len(prompts), least=1, deepest=3).nodes == ()
    assert plan([], [], 1, 3).order == ()


def test_the_last_token_is_nobodys_but_the_sequences_own():
    a, b = np.arange(10, dtype=np.int32), np.arange(12, dtype=np.int32)  # one is the beginning of the other
    tree = plan([a, b], [9, 11], least=1, deepest=3)
    assert [(n.start, n.stop) for n in tree.nodes] == [(0, 9)] and tree.start(0) == tree.start(1) == 9


def test_several_samples_of_a_prompt_make_a_head_of_it():
    a = np.arange(10, dtype=np.int32)
    assert plan([a], [9], 4, 3).nodes == ()
    assert [(n.start, n.stop) for n in plan([a], [9], 4, 3, uses=[2]).nodes] == [(0, 9)]


def test_rows_of_the_store_are_given_back_and_taken_from_idle_heads():
    prompts = family()
    tree = plan(prompts, [len(p) - 1 for p in prompts], least=4, deepest=3)
    heads, order = Heads(tree, 2, [1] * len(prompts)), tree.order
    assert heads.make_room(order[0], set()) == tree.path(tree.node_of[order[0]])
    assert heads.make_room(order[1], set()) == []
    busy = set(tree.path(tree.node_of[order[0]]))
    assert heads.make_room(order[-1], busy) is None  # no row is idle
    assert heads.make_room(order[-1], set()) == tree.path(tree.node_of[order[-1]])  # given away
    heads.hold(order[-1])
    heads.row.clear()
    heads = Heads(tree, 2, [1] * len(prompts))
    for i in order:
        assert heads.make_room(i, set()) is not None
        heads.done(i)
    assert sorted(heads.free) == [0, 1] and not heads.row


# ---- packing ----


def test_a_new_head_begins_a_new_block_and_nothing_crosses_a_row():
    spans = [Span(np.full(n, 9, np.int32), start, head) for n, start, head in ((10, 5, 1), (20, 5, 1), (10, 7, 2), (100, 0, 0))]
    assert fill(spans, (2, 128)) == [(0, 0), (0, 10), (0, BLOCK), (1, 0)]
    assert fill([Span(np.zeros(100, np.int32))] * 3, (2, 128)) == [(0, 0), (1, 0)]
    packed = pack(spans[:3], variants(128, 128, 1, heads=128)[-1])
    assert packed.positions[0, :3].tolist() == [5, 6, 7] and packed.positions[0, BLOCK] == 7
    assert packed.heads.tolist() == [[1, 2]] and packed.head_lengths.tolist() == [[5, 7]] and packed.used == 40
    with pytest.raises(ValueError, match="do not fit"):
        pack(spans, variants(128, 128, 1, heads=128)[-1])


def test_the_smallest_program_that_holds_everything_is_taken():
    shapes = variants(512, 2048, 1, heads=512)
    span = lambda n, start=0: Span(np.zeros(n, np.int32), start)  # noqa: E731
    assert choose([span(100)], shapes, 1) == (1, shapes[0]) and shapes[0].shape == (1, 128)
    count, v = choose([span(100)] * 9, shapes, 9)
    assert count == 9 and v.shape == (1, 2048) and v.longest == 128 and v.context == 0
    count, v = choose([span(500, 40)] * 9, shapes, 9)
    assert count == 4 and v.longest == 512 and v.context == 384
    assert choose([span(100)] * 9, shapes, 1)[1].shape == (1, 128)


@pytest.mark.parametrize("attention", ["xla", "blocks", "splash"])
def test_no_program_reads_more_of_a_head_than_the_store_holds(attention):
    for longest in (40, 100, 300):  # scoring takes prompts with their continuations: longer than any head
        widths = {v.context for v in variants(longest, 256, 1, heads=64, attention=attention)}
        assert widths == {0, 64}
    assert {v.context for v in variants(300, 512, 1, heads=320, attention=attention)} == {0, 256, 320}
    assert {v.context for v in variants(300, 512, 1, heads=0, attention=attention)} == {0}


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("window", [None, 0, 40])
def test_blocks_one_after_the_other_or_all_at_once(dtype, window):
    P, T, K, G, d, R, W = 2, 5 * BLOCK, 2, 3, 8, 3, 128
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    store = jax.tree.map(lambda x: x[None], kv.encode(normal(R, W, K, d), normal(R, W, K, d), jnp.dtype(dtype)))
    context = Context(store, jnp.int32(0), jnp.asarray([[0, 0, 2, 1, 1], [1] * 5], jnp.int32),
                      jnp.asarray([[7, 7, 128, 0, 0], [90] * 5], jnp.int32), 128)  # fmt: skip
    lengths = [[60, 68, 64, 100, 20], [130, 150]]
    segments = np.zeros((P, T), np.int32)
    for row, sizes in enumerate(lengths):
        ids = np.repeat(np.arange(len(sizes)) + 1 + 10 * row, sizes)
        segments[row, : len(ids)] = ids
    positions = np.asarray([[(r[: t + 1] == r[t]).sum() - 1 for t in range(T)] for r in segments], np.int32)
    args = normal(P, T, K * G, d), normal(P, T, K, d), normal(P, T, K, d), jnp.asarray(positions), jnp.asarray(segments)
    w = None if window is None else jnp.int32(window)
    for head in (context, None):
        one, all_ = (block_attention(*args, 150, head, w, loop) for loop in (True, False))
        used = segments > 0
        np.testing.assert_allclose(np.asarray(one)[used], np.asarray(all_)[used], atol=2e-6)


# ---- results do not depend on sharing ----


@pytest.mark.parametrize("family_name", SPECS)
def test_next_token_probs_with_and_without_shared_heads(family_name):
    spec, params, prompts = SPECS[family_name], params_of(SPECS[family_name]), family(1)
    forms = [[5, 9], [11]]
    shared, alone = engine_of(spec, **SHARE), engine_of(spec, **SHARE | {"share_heads": False})
    for e in (shared, alone):
        e.stats.reset()
    got, expected = (e.next_token_probs(params, prompts, forms) for e in (shared, alone))
    np.testing.assert_allclose(got, expected, atol=1e-6)
    for row, prompt in zip(got, prompts):
        probs = np.exp(log_softmax(full_logits(params, spec, prompt)[-1]))
        np.testing.assert_allclose(row, [probs[5] + probs[9], probs[11]], atol=1e-6)
    assert alone.stats.prefill_tokens == sum(map(len, prompts))
    assert shared.stats.prefill_tokens == 2 * 12 + 4 * 8 + sum(len(p) - 20 for p in prompts)  # every head once


def test_score_with_and_without_shared_heads():
    prompts, rng = family(2), np.random.default_rng(3)
    continuations = [rng.integers(8, 96, 1 + i % 5).astype(np.int32) for i in range(len(prompts))]
    for engine in (engine_of(**SHARE), engine_of(**SHARE | {"share_heads": False})):
        for p, c, got in zip(prompts, continuations, engine.score(PARAMS, prompts, continuations)):
            rows = log_softmax(full_logits(PARAMS, LLAMA, np.concatenate([p, c]))[len(p) - 1 : -1])
            np.testing.assert_allclose(got, rows[np.arange(len(c)), c], atol=1e-5)


BASE = requests_of(family(4), n=2)
WAYS = {
    "no sharing": {"share_heads": False},
    "few rows": {"heads": 2},
    "referred to": {"share_decode": True, "heads": 8},
    "referred to, few rows": {"share_decode": True, "heads": 3},
    "copies": {},
}


@pytest.mark.parametrize("way", WAYS)
def test_draws_do_not_depend_on_what_is_shared(way):
    engine = engine_of(**SHARE | WAYS[way])
    base = engine_of(max_prompt=40).generate(PARAMS, BASE)  # share_least is above what these could save
    assert assert_same_draws(PARAMS, engine, BASE, base, engine.generate(PARAMS, BASE)) <= 2


@pytest.mark.parametrize("family_name", ["mistral", "olmo3"])
def test_windows_reach_over_the_border_between_head_and_slot(family_name):
    spec, params = SPECS[family_name], params_of(SPECS[family_name])
    engine, requests = engine_of(spec, **SHARE | {"share_decode": True, "heads": 8}), requests_of(family(5), n=2)
    for r, row in zip(requests, engine.generate(params, requests)):
        for c in row:
            rows = log_softmax(full_logits(params, spec, np.concatenate([r.prompt, c.tokens]))[len(r.prompt) - 1 : -1])
            np.testing.assert_allclose(c.logprobs, rows[np.arange(len(c.tokens)), c.tokens], atol=1e-5)


def test_a_shared_head_is_prefilled_and_kept_once():
    engine, prompt = engine_of(**SHARE | {"share_decode": True, "heads": 8}), family(6)[0]
    (request,) = requests_of([prompt], n=4)
    engine.stats.reset()
    engine.generate(PARAMS, [request, dataclasses.replace(request, request=5)])
    assert engine.stats.prefill_tokens == len(prompt) - 1


def test_prompts_of_one_token_and_equal_prompts_are_no_trouble():
    prompts = [np.asarray([9], np.int32), *family(7)[:2], np.asarray([9], np.int32)]
    for way in ("copies", "referred to"):
        requests = requests_of(prompts, n=2)
        out = engine_of(**SHARE | WAYS[way]).generate(PARAMS, requests)
        assert all(len(c.tokens) for c in flat(out))
        assert not np.array_equal(out[0][0].tokens, out[3][0].tokens)  # equal prompts, noise of their own


def test_no_tree_without_sequences():
    assert no_sharing(2).order == (0, 1) and no_sharing(2).start(1) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_heads_in_a_store_are_attended_like_copies_of_them(dtype):
    rng = np.random.default_rng(0)
    x = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))  # noqa: E731
    store = kv.encode(x(3, 6, 2, 8), x(3, 6, 2, 8), kv.DTYPES[dtype])  # 3 heads of 6 positions
    row, q = jnp.asarray([2, 0, 2, 1], jnp.int32), x(4, 4, 8)
    seen = jnp.arange(6, dtype=jnp.int32)[None] < jnp.asarray([6, 3, 1, 0], jnp.int32)[:, None]  # the last one sees nothing
    copies = kv.attend(q, jax.tree.map(lambda a: a[row], store), seen)
    found = kv.attend_heads(q, store, row, seen)
    for a, b in zip(copies, found):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert float(found.total[3].max()) == 0
