"""Scoring that also says which tokens are the likeliest: against whole logits, and against what the engine draws greedily."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampler_support import SPECS, engine_of, params_of, prompts_of, requests_of
from test_models_logprobs import setup

from coevo_jax.models.forward import unembed
from coevo_jax.models.logprobs import greedy_logprobs, token_logprobs


@pytest.mark.parametrize(("tied", "chunk"), [(True, 4), (False, 64)])
def test_the_likeliest_token_of_each_position(tied: bool, chunk: int) -> None:
    spec, params, hidden, targets = setup(tied)
    best = jnp.argmax(unembed(params, spec, hidden), axis=-1)
    targets = jnp.where(jnp.arange(targets.shape[1])[None] % 2 == 0, best.astype(targets.dtype), targets)
    logp, greedy = jax.jit(lambda: greedy_logprobs(params, spec, hidden, targets, chunk))()
    np.testing.assert_allclose(logp, token_logprobs(params, spec, hidden, targets)[0], atol=1e-5)
    np.testing.assert_array_equal(greedy, (best == targets).astype(np.float32))
    assert 0 < float(greedy.mean()) < 1


def test_what_the_engine_draws_greedily_is_the_likeliest() -> None:
    """Alone, packed with others and after a shared head; a changed token is not."""
    spec = SPECS["qwen3"]
    engine, params = engine_of(spec), params_of(spec)
    prompts = prompts_of(6)
    drawn = [c[0] for c in engine.generate(params, requests_of(prompts, n=1, temperature=0.0))]
    tails = [c.tokens for c in drawn]
    found = engine.score(params, prompts, tails, greedy=True)
    plain = engine.score(params, prompts, tails)
    for rows, logp, completion in zip(found, plain, drawn):
        assert rows.shape == (2, len(completion.tokens)) and rows[1].all()
        np.testing.assert_allclose(rows[0], logp, atol=1e-5)
    wrong = [np.where(np.arange(len(t)) == 0, (t + 1) % spec.vocab_size, t).astype(np.int32) for t in tails]
    for rows in engine.score(params, prompts, wrong, greedy=True):
        assert not rows[1][0]
