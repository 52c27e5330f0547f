"""Shared heads: rows keep every sequence, and sharing changes results by rounding only."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from sampler_support import SPECS, new_engine, params_of, prompts_of

from coevo_jax.models.forward import forward, unembed
from coevo_jax.models.prefix import SharedRow, common_length, shared_rows


def tree(seed: int = 0) -> list[np.ndarray]:
    """Prompts with common heads: 3 heads x 4 tails, a lone one, and one that is another's beginning."""
    heads = prompts_of(3, seed=seed, low=8, high=10)
    out = [np.concatenate([h, t]) for i, h in enumerate(heads) for t in prompts_of(4, seed=seed + 10 * i + 1, low=1, high=6)]
    return [*out, *prompts_of(1, seed=99), out[0][:-1]]


def test_rows_hold_every_sequence_once_within_capacity():
    prompts = tree()
    lengths = [len(p) + 3 for p in prompts]
    rows = shared_rows(prompts, lengths, 32, 5)
    assert sorted(i for row in rows for i in row.members) == list(range(len(prompts)))
    for row in rows:
        assert row.size(lengths) <= 32 and len(row.members) <= 5
        first = prompts[row.members[0]]
        assert all(row.head < len(prompts[i]) and (prompts[i][: row.head] == first[: row.head]).all() for i in row.members)
    assert sum(row.size(lengths) for row in rows) < 0.8 * sum(lengths)


def test_a_head_is_shared_by_two_or_more_and_never_the_last_token():
    same = [np.arange(10, dtype=np.int32)] * 3
    assert shared_rows(same, [10, 10, 10], 32, 8) == [SharedRow((0, 1, 2), 9)]
    assert shared_rows(same[:1], [10], 32, 8) == [SharedRow((0,), 0)]
    assert common_length(same[0], same[0][:4]) == 4


SLOW = pytest.mark.slow


@pytest.mark.parametrize("family", ["llama", pytest.param("mistral", marks=SLOW), pytest.param("olmo3", marks=SLOW)])
def test_next_token_probabilities_equal_those_of_single_rows(family):
    spec, params = SPECS[family], params_of(SPECS[family])
    engine, prompts = new_engine(spec, max_prompt=64, prefill_tokens=128, share_least=4), tree(seed=3)
    forms = [[1, 2], [3], [5, 90]]
    got = engine.next_token_probs(params, prompts, forms)
    for p, row in zip(prompts, got):
        ones = np.ones((1, len(p)), np.int32)
        hidden = forward(params, spec, p[None], np.arange(len(p), dtype=np.int32)[None], ones)
        probs = np.asarray(jax.nn.softmax(unembed(params, spec, hidden[:, -1]), axis=-1))[0]
        np.testing.assert_allclose(row, [probs[f].sum() for f in forms], atol=2e-6)
    assert engine.stats.prefill_tokens < 0.8 * sum(map(len, prompts))
