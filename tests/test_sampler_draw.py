"""The draw: its distribution, truncated support, greedy, masks, noise by identity; and scoring against the naive way."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampler_support import (
    LLAMA,
    SPECS,
    engine_of,
    full_logits,
    log_softmax,
    params_of,
    prompts_of,
    requests_of,
    trainer_logprobs,
)  # fmt: skip

from coevo_jax.errors import UserError
from coevo_jax.sampler import draw as draw_module
from coevo_jax.sampler.draw import chunk_width, draw, forbid, truncate
from coevo_jax.sampler.keys import row_key, token_uniforms

PARAMS = params_of(LLAMA)
ROWS = 20000


def uniforms(rows: int, index: int = 0) -> jax.Array:
    keys = jnp.asarray(np.stack([row_key(0, "policy", 0, i, 0) for i in range(rows)]))
    return token_uniforms(keys, jnp.full(rows, index, jnp.int32))


@pytest.mark.parametrize("vocab", [40, 97, 600, 1021])  # one chunk, one padded (prime), several, padded
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_draws_follow_the_distribution(vocab, temperature):
    logits = np.random.default_rng(vocab).normal(0, 2, vocab).astype(np.float32)
    logits[:3] = -1e30  # masked: never drawn
    rows = jnp.broadcast_to(jnp.asarray(logits), (ROWS, vocab))
    out = jax.jit(draw)(rows, uniforms(ROWS), jnp.full(ROWS, temperature, jnp.float32))
    expected = np.exp(log_softmax(logits / temperature))
    counts = np.bincount(np.asarray(out.token), minlength=vocab)
    assert counts[:3].sum() == 0 and len(counts) == vocab
    keep = expected * ROWS >= 5
    chi2 = ((counts - expected * ROWS)[keep] ** 2 / (expected * ROWS)[keep]).sum()
    assert chi2 < keep.sum() + 5 * np.sqrt(2 * keep.sum()), chi2
    np.testing.assert_allclose(out.logprob, np.log(expected[np.asarray(out.token)]), atol=1e-5)
    entropy = -(expected[3:] * np.log(expected[3:])).sum()
    np.testing.assert_allclose(out.entropy, np.full(ROWS, entropy), atol=1e-5)


@pytest.mark.parametrize(("vocab", "piece_bytes"), [(4 * 512, 2**13), (7 * 97, 1), (1000, 2**20)])
def test_vocabulary_first_draws_the_same(monkeypatch, vocab, piece_bytes):
    """In pieces of the vocabulary, each with its own peak; greedy, forced and forbidden ids too."""
    monkeypatch.setattr(draw_module, "PIECE_BYTES", piece_bytes)
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(8, vocab)) * 4 + np.linspace(0, 60, vocab)[None], jnp.float32)
    uniforms = jnp.asarray(rng.random((8, 2)), jnp.float32)
    temperature = jnp.asarray([0, 0.5, 1, 2, 1, 1, 0, 1], jnp.float32)
    forced = jnp.asarray([-1, -1, -1, -1, 5, vocab - 1, 3, -1], jnp.int32)
    forbidden, some = (vocab - 1, 3), jnp.arange(8) >= 7
    rows = draw(forbid(logits, forbidden, some), uniforms, temperature, forced)
    first = draw(forbid(logits.T, forbidden, some, True), uniforms, temperature, forced, vocab_first=True)
    np.testing.assert_array_equal(rows.token, first.token)
    np.testing.assert_allclose(rows.logprob, first.logprob, atol=1e-5)
    np.testing.assert_allclose(rows.entropy, first.entropy, atol=1e-4)
    assert len(set(rows.token.tolist())) > 4


def test_chunk_width_divides_the_vocabularies_in_use():
    assert chunk_width(49152) == 512 and chunk_width(128256) == 501 and chunk_width(151936) == 128
    assert chunk_width(96) == 96 and chunk_width(1021) == 256


def test_uniforms_depend_on_identity_only():
    base = [0, "policy", 0, 0, 0]
    names = [base] + [[*base[:i], other, *base[i + 1 :]] for i, other in enumerate([1, "rubric", 1, 1, 1])]
    keys = np.stack([row_key(*n) for n in names])
    assert len({k.tobytes() for k in keys}) == len(names)
    a = np.asarray(token_uniforms(jnp.asarray(keys), jnp.arange(6, dtype=jnp.int32)))
    b = np.asarray(token_uniforms(jnp.asarray(keys[::-1].copy()), jnp.arange(6, dtype=jnp.int32)[::-1]))
    np.testing.assert_array_equal(a, b[::-1])
    assert (a >= 0).all() and (a < 1).all() and len(np.unique(a)) == 12
    many = np.asarray(uniforms(4000))
    assert abs(many.mean() - 0.5) < 0.01 and abs(np.corrcoef(many.T)[0, 1]) < 0.05
    assert abs(np.corrcoef(many[:, 0], np.asarray(uniforms(4000, 1))[:, 0])[0, 1]) < 0.05


def naive_support(logits: np.ndarray, temperature: float, top_p: float, top_k: int) -> np.ndarray:
    """Hugging Face's order: temperature, top-k, then top-p over what top-k left."""
    x = logits.astype(np.float64) / temperature
    order = np.argsort(-x)
    keep = np.zeros(len(x), bool)
    order = order[:top_k] if top_k else order
    probs = np.exp(x[order] - x.max())
    mass = np.cumsum(probs / probs.sum())
    keep[order[: int(np.argmax(mass >= top_p)) + 1 if top_p < 1 else len(order)]] = True
    return keep


@pytest.mark.parametrize(
    ("top_p", "top_k"), [(0.9, 0), (0.5, 0), (1e-6, 0), (1.0, 5), (1.0, 1), (0.8, 10), (1.0, 0), (1.0, 5000)]
)
def test_truncation_keeps_the_support_that_sorting_keeps(top_p, top_k):
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (16, 300)).astype(np.float32)
    temperature = rng.uniform(0.5, 1.5, 16).astype(np.float32)
    out = jax.jit(truncate)(
        jnp.asarray(logits), jnp.asarray(temperature), jnp.full(16, top_p, jnp.float32), jnp.full(16, top_k, jnp.int32)
    )
    for row, t, got in zip(logits, temperature, np.asarray(out)):
        keep = naive_support(row, float(t), top_p, min(top_k, 300))
        np.testing.assert_array_equal(got > -1e29, keep)
        np.testing.assert_array_equal(got[keep], row[keep])


def test_truncation_is_per_row_and_keeps_ties():
    logits = jnp.asarray(np.tile(np.float32([3, 2, 2, 1, -1]), (2, 1)))
    out = truncate(logits, jnp.ones(2), jnp.ones(2), jnp.asarray([2, 0], jnp.int32))
    np.testing.assert_array_equal(np.asarray(out) > -1e29, [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])


def test_forbid_masks_only_the_rows_asked_for():
    out = np.asarray(forbid(jnp.zeros((2, 5)), (1, 3), jnp.asarray([True, False])))
    np.testing.assert_array_equal(out < -1e29, [[0, 1, 0, 1, 0], [0, 0, 0, 0, 0]])


@pytest.mark.parametrize(("top_p", "top_k"), [(0.8, 0), (1.0, 4), (0.7, 12)])
def test_truncated_sampling_records_the_renormalised_logprob(top_p, top_k):
    requests = requests_of(prompts_of(4), n=3, temperature=0.8, top_p=top_p, top_k=top_k)
    for r, row in zip(requests, engine_of().generate(PARAMS, requests)):
        for c in row:
            logits = full_logits(PARAMS, LLAMA, np.concatenate([r.prompt, c.tokens]))[len(r.prompt) - 1 : -1]
            for x, token, logp, entropy in zip(logits, c.tokens, c.logprobs, c.entropy):
                keep = naive_support(x, 0.8, top_p, top_k)
                rows = log_softmax(np.where(keep, x / 0.8, -np.inf))
                assert keep[token]
                np.testing.assert_allclose(logp, rows[token], atol=1e-5)
                np.testing.assert_allclose(entropy, -(np.exp(rows[keep]) * rows[keep]).sum(), atol=2e-5)


# ---- scoring ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", SPECS)
def test_next_token_probs_equal_the_full_softmax(family):
    spec, params = SPECS[family], params_of(SPECS[family])
    prompts = prompts_of(11, seed=4, high=24)
    prompts[7] = prompts[2]
    forms = [[5, 9, 5], [40], list(range(20, 95))]
    got = engine_of(spec).next_token_probs(params, prompts, forms)
    assert got.shape == (11, 3) and got.dtype == np.float32
    for prompt, row in zip(prompts, got):
        probs = np.exp(log_softmax(full_logits(params, spec, prompt)[-1]))
        np.testing.assert_allclose(row, [probs[sorted(set(f))].sum() for f in forms], atol=1e-5)
    np.testing.assert_array_equal(got[2], got[7])


def test_equal_prompts_run_once_and_bad_ones_are_refused():
    engine = engine_of()
    engine.stats.reset()
    engine.next_token_probs(PARAMS, [[9, 10, 11]] * 5, [[1]])
    assert engine.stats.prefill_tokens == 3
    assert engine.next_token_probs(PARAMS, [], [[1]]).shape == (0, 1)
    with pytest.raises(UserError, match="prompt has 25 tokens"):
        engine.next_token_probs(PARAMS, [[9] * 25], [[1]])
    with pytest.raises(UserError, match="empty prompt"):
        engine.next_token_probs(PARAMS, [[9]], [[]])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_score_equals_the_trainers_logprobs(temperature):
    prompts = prompts_of(7, seed=6)
    tails = [t[: i * 2] for i, t in enumerate(prompts_of(7, seed=7, low=12, high=16))]
    got = engine_of().score(PARAMS, prompts, tails, temperature)
    for prompt, tail, logp in zip(prompts, tails, got):
        assert logp.dtype == np.float32 and len(logp) == len(tail)
        if len(tail):
            rows = trainer_logprobs(PARAMS, LLAMA, prompt, tail, temperature)
            np.testing.assert_allclose(logp, rows[np.arange(len(tail)), tail], atol=1e-5)


def test_score_agrees_with_what_the_sampler_recorded():
    engine, requests = engine_of(), requests_of(prompts_of(3), n=2)
    for r, row in zip(requests, engine.generate(PARAMS, requests)):
        for c, logp in zip(row, engine.score(PARAMS, [r.prompt] * 2, [c.tokens for c in row])):
            np.testing.assert_allclose(logp, c.logprobs, atol=1e-5)
