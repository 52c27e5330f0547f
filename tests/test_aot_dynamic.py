"""DynamicRubric's programs at 8B, compiled for a slice that nobody owns, at two layers."""

from __future__ import annotations

import importlib.util

import pytest
from train_support import REPO

from coevo_jax import aot
from coevo_jax.config.load import load_config
from coevo_jax.config.override import apply_overrides
from coevo_jax.plan.compiled import compile_one
from coevo_jax.plan.programs import Slice

# At the config's own prompts of up to 17,408 tokens the program takes 47 GiB: attention without splash keeps its scores.
SHORTER = ("judge.max_prompt=8192", "sampler.prefill_tokens=8192")
pytestmark = [pytest.mark.tpu_aot, pytest.mark.slow]


def test_the_verifier_scores_in_a_chips_memory(tmp_path):
    """Packed prefill over shared heads, at prompts of up to 8,192 tokens."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    cfg = load_config(str(REPO / "configs" / "dynamic_rubric_qwen3_8b.py"))
    s = Slice(apply_overrides(cfg, SHORTER), aot.topology("v5p:2x2x2"), 2)
    scoring = compile_one(s, "judge scoring", tmp_path, full=True)
    assert 2**30 < scoring.memory.peak < 32 * 2**30
