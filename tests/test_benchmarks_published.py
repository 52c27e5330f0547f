"""The published figures are read as they were published; what is compiled for them is tests/test_aot_cost.py's matter."""

from __future__ import annotations

import dataclasses
import math
import pathlib
import sys

import jax
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "benchmarks"))

import published

from coevo_jax.models.forward import param_shapes


@pytest.mark.parametrize(
    ("scale", "sizes"), [(16, (4096, 64, 28_672, 32)), (32, (8192, 64, 28_672, 32)), (1, (2048, 16, 7168, 16))]
)
def test_maxtext_models_have_the_size_in_their_name(scale, sizes):
    spec = published.maxtext(scale)
    assert (spec.hidden_size, spec.heads, spec.mlp_size, spec.layers) == sizes
    count = sum(math.prod(i.shape) for i in jax.tree.leaves(param_shapes(spec), is_leaf=lambda x: hasattr(x, "axes")))
    assert count == pytest.approx(scale * 1e9, rel=0.25 if scale == 1 else 0.03)


def test_teraflops_are_turned_into_seconds_as_maxtext_counts_them():
    """The log of the 8B recipe gives both: 3.393 s and 419.485 TFLOP/s a chip."""
    case = next(case for case in published.CASES if case.name == "llama3.1-8b")
    by_flops = dataclasses.replace(case, seconds=0.0, tflops=419.485)
    assert case.published == 3.393 and by_flops.published == pytest.approx(3.393, rel=0.02)
    assert next(c for c in published.CASES if c.name == "decode-8").published == 1 / 84.4


def test_two_depths_are_continued_on_a_line():
    x, y = {"seconds": 3.0, "by": {"matmul": 2.0}}, {"seconds": 5.0, "by": {"matmul": 3.0, "copy": 1.0}}
    assert published._line(x, y, (80 - 2) / 2) == {"seconds": 3 + 39 * 2, "by": {"matmul": 2 + 39, "copy": 39.0}}


def test_a_name_that_no_figure_has_ends_with_code_2(capsys):
    assert published.main(["--only=decode-9"]) == 2
    assert "decode-128" in capsys.readouterr().err
    assert {case.source for case in published.CASES} and all("/" in case.source for case in published.CASES)
