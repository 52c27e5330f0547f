"""DynamicRubric's programs at 8B, compiled for a slice that nobody owns, at two layers."""

from __future__ import annotations

import importlib.util

import pytest
from train_support import REPO

from coevo_jax import aot
from coevo_jax.config.load import load_config
from coevo_jax.plan.compiled import compile_one
from coevo_jax.plan.programs import Slice

pytestmark = [pytest.mark.tpu_aot, pytest.mark.slow]


def test_the_verifier_scores_on_its_own_host(tmp_path):
    """Packed prefill over shared heads, and no collective across hosts."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")
    s = Slice(load_config(str(REPO / "configs" / "dynamic_rubric_qwen3_8b.py")), aot.topology("v5p:2x2x2"), 2)
    scoring = compile_one(s, "judge scoring", tmp_path, full=True)
    assert scoring.memory.peak < 32 * 2**30
    assert not [c for c in aot.collectives(scoring.parts[0].read(), aot.hosts_of(s.mesh)) if c.crosses_hosts is not False]
