"""The cost model's rules, one after the other, on hand-written HLO text as XLA for TPU prints it. No TPU, nothing compiled."""

from __future__ import annotations

import dataclasses

import pytest

from coevo_jax import hlo
from coevo_jax.aot import CHIPS
from coevo_jax.cost import Kernel, Network, decode_kernels, mfu, program_cost, useful_update_flops
from coevo_jax.cost.links import HOP, wraparound
from coevo_jax.cost.operations import Array, splash
from coevo_jax.models.spec import ModelSpec

CHIP = dataclasses.replace(CHIPS["v5e"], bf16_flops=1e12, hbm_bandwidth=1e11, ici_link=1e9)
PEAK, RATE = 0.75e12, 0.8e11
SUM = """
%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %ab = f32[] add(%a, %b)
}
"""


def program(body: str, before: str = "", partitions: int = 4) -> str:
    return (
        f"HloModule m, is_scheduled=true, num_partitions={partitions}\n{before}\nENTRY %main (p: f32[]) -> f32[] {{\n{body}\n}}\n"
    )


def ring(n: int, wraps: bool = True) -> Network:
    return Network(tuple((i,) for i in range(n)), (0,) * n, (n,), (wraps,), 1e9, 1e8)


def square(n: int, wraps: bool = True) -> Network:
    return Network(tuple((i % n, i // n) for i in range(n * n)), (0,) * n**2, (n, n), (wraps, wraps), 1e9, 1e8)


# -------------------------------------------------------------------------------------------------------------------- FLOPs


@pytest.mark.parametrize(
    ("line", "flops"),
    [
        ("%c = f32[64,256] dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}", 2 * 64 * 128 * 256),
        ("%c = f32[64,256] convolution(%x, %y), dim_labels=bf_io->bf", 2 * 64 * 128 * 256),
        # a window of 32 over one padded element: each output position meets it once (heads as a spatial dimension)
        (
            "%c = bf16[64,32,16,1] convolution(%u, %v), window={size=32x2 pad=31_31x0_0 rhs_reversal=1x0}, "
            "dim_labels=b1f0_1i0o->b0f1",
            2 * 64 * 16 * 128 * 32 * 2,
        ),
        ("%c = f32[64,256] add(%x, %x)", 0),
    ],
)
def test_flops_of_products(line, flops):
    given = """  %x = bf16[64,128]{1,0} parameter(0)
  %y = bf16[128,256]{1,0} parameter(1)
  %u = bf16[64,2,128,1]{3,2,1,0} parameter(2)
  %v = bf16[2,128,32,16]{3,2,1,0} parameter(3)
"""
    assert program_cost(program(given + "  ROOT " + line), CHIP).flops == flops


def test_products_count_inside_fusions_and_time_is_the_larger_of_flops_and_bytes():
    before = """
%inner (p0: bf16[64,128], p1: bf16[128,256]) -> f32[64,256] {
  %p0 = bf16[64,128]{1,0} parameter(0)
  %p1 = bf16[128,256]{1,0} parameter(1)
  ROOT %c = f32[64,256]{1,0} convolution(%p0, %p1), dim_labels=bf_io->bf
}

%outer (q0: bf16[64,128], q1: bf16[128,256]) -> f32[64,256] {
  %q0 = bf16[64,128]{1,0} parameter(0)
  %q1 = bf16[128,256]{1,0} parameter(1)
  %f = f32[64,256]{1,0} fusion(%q0, %q1), kind=kOutput, calls=%inner
  ROOT %n = f32[64,256]{1,0} negate(%f)
}
"""
    given = "  %x = bf16[64,128]{1,0} parameter(0)\n  %y = bf16[128,256]{1,0} parameter(1)\n"
    call = '  ROOT %f = f32[64,256]{1,0} fusion(%x, %y), kind=kOutput, calls=%outer, metadata={op_name="jit(f)/dot"}'
    found = program_cost(program(given + call, before), CHIP)
    flops, size = 2 * 64 * 128 * 256, 64 * 128 * 2 + 128 * 256 * 2 + 64 * 256 * 4
    assert (found.flops, found.bytes) == (flops, size)
    assert found.seconds == pytest.approx(max(flops / PEAK, size / RATE)) and size / RATE > 0
    assert found.heaviest[0].op_name == "jit(f)/dot" and found.by_category["matmul"]["flops"] == flops
    slow = dataclasses.replace(CHIP, bf16_flops=1e9)
    assert program_cost(program(given + call, before), slow).seconds == pytest.approx(flops / 0.75e9)


# ------------------------------------------------------------------------------------------------------------------ traffic


def test_a_fusion_reads_the_slice_of_stacked_weights_and_writes_the_update():
    before = """
%reads (w: bf16[36,128,256], n: s32[]) -> bf16[128,256] {
  %w = bf16[36,128,256]{2,1,0} parameter(0)
  %n = s32[] parameter(1)
  %z = s32[] constant(0)
  %s = bf16[1,128,256]{2,1,0} dynamic-slice(%w, %n, %z, %z), dynamic_slice_sizes={1,128,256}
  ROOT %b = bf16[128,256]{1,0} bitcast(%s)
}

%writes (all: f32[36,128], one: f32[128], n: s32[]) -> f32[36,128] {
  %all = f32[36,128]{1,0} parameter(0)
  %one = f32[128]{0} parameter(1)
  %n.1 = s32[] parameter(2)
  %z.1 = s32[] constant(0)
  %row = f32[1,128]{1,0} bitcast(%one)
  ROOT %dus = f32[36,128]{1,0} dynamic-update-slice(%all, %row, %n.1, %z.1)
}
"""
    body = """  %w = bf16[36,128,256]{2,1,0} parameter(0)
  %all = f32[36,128]{1,0} parameter(1)
  %one = f32[128]{0} parameter(2)
  %n = s32[]{:S(6)} parameter(3)
  %f = bf16[128,256]{1,0:S(1)} fusion(%w, %n), kind=kLoop, calls=%reads
  ROOT %g = f32[36,128]{1,0} fusion(%all, %one, %n), kind=kLoop, calls=%writes"""
    found = program_cost(program(body, before), CHIP)
    assert found.bytes == 128 * 256 * 2 + 2 * 128 * 4  # the slice; the row read and written; the result in VMEM is free
    assert found.by_category["copy"]["bytes"] == found.bytes and found.flops == 0


def test_what_has_another_use_is_read_whole():
    before = """
%both (w: f32[8,128], n: s32[]) -> f32[8,128] {
  %w = f32[8,128]{1,0} parameter(0)
  %n = s32[] parameter(1)
  %s = f32[1,128]{1,0} dynamic-slice(%w, %n, %n), dynamic_slice_sizes={1,128}
  %b = f32[8,128]{1,0} broadcast(%s), dimensions={0,1}
  ROOT %a = f32[8,128]{1,0} add(%w, %b)
}
"""
    body = """  %w = f32[8,128]{1,0} parameter(0)
  %n = s32[]{:S(6)} parameter(1)
  ROOT %f = f32[8,128]{1,0} fusion(%w, %n), kind=kLoop, calls=%both"""
    assert program_cost(program(body, before), CHIP).bytes == 2 * 8 * 128 * 4


def test_a_prefetch_is_hidden_as_far_as_the_operations_leave_hbm_free():
    before = """
%product (x: bf16[64,128], y: bf16[128,256]) -> bf16[64,256] {
  %x = bf16[64,128]{1,0} parameter(0)
  %y = bf16[128,256]{1,0} parameter(1)
  ROOT %c = bf16[64,256]{1,0} convolution(%x, %y), dim_labels=bf_io->bf
}
"""
    body = """  %x = bf16[64,128]{1,0:S(1)} parameter(0)
  %y = bf16[128,256]{1,0:S(1)} parameter(1)
  %w = f32[1000000]{0} parameter(2)
  %s = (f32[1000000]{0:S(1)}, f32[1000000]{0}, u32[]{:S(2)}) copy-start(%w)
  %f = bf16[64,256]{1,0:S(1)} fusion(%x, %y), kind=kOutput, calls=%product
  ROOT %d = f32[1000000]{0:S(1)} copy-done(%s)"""
    copy, product = 4e6 / RATE, 2 * 64 * 128 * 256 / PEAK
    assert copy > product
    found = program_cost(program(body, before), CHIP)
    assert found.bytes == 4e6 and found.seconds == pytest.approx(copy)  # a part of it under the product
    swapped = "\n".join(body.splitlines()[n] for n in (0, 1, 2, 4, 3, 5))
    assert program_cost(program(swapped, before), CHIP).seconds == pytest.approx(copy + product)


# -------------------------------------------------------------------------------------------------------------------- loops

LOOP = """
%body (q: (s32[], f32[1000])) -> (s32[], f32[1000]) {{
  %q = (s32[], f32[1000]{{0}}) parameter(0)
  %i = s32[]{{:S(6)}} get-tuple-element(%q), index=0
  %v = f32[1000]{{0}} get-tuple-element(%q), index=1
  %step = s32[]{{:S(6)}} constant({step})
  %next = s32[]{{:S(6)}} add(%i, %step)
  %n = f32[1000]{{0}} negate(%v)
  ROOT %t = (s32[], f32[1000]{{0}}) tuple(%next, %n)
}}

%cond (q: (s32[], f32[1000])) -> pred[] {{
  %limit = s32[] {limit}
  %q.1 = (s32[], f32[1000]{{0}}) parameter(0)
  %i.1 = s32[] get-tuple-element(%q.1), index=0
  ROOT %lt = pred[] compare(%i.1, %limit), direction=LT
}}
"""
RUN = """  %v = f32[1000]{0} parameter(0)
  %zero = s32[] constant(0)
  %t0 = (s32[], f32[1000]{0}) tuple(%zero, %v)
  ROOT %w = (s32[], f32[1000]{0}) while(%t0), condition=%cond, body=%body, metadata={op_name="jit(f)/while"}"""


@pytest.mark.parametrize(("limit", "step", "runs"), [(36, 1, 36), (8, 2, 4), (7, 2, 4)])
def test_a_loop_costs_its_body_as_often_as_it_runs(limit, step, runs):
    found = program_cost(program(RUN, LOOP.format(limit=f"constant({limit})", step=step)), CHIP)
    assert found.bytes == pytest.approx(runs * 8000)
    assert found.unknown_loops == 0 and found.heaviest[0].runs == runs


def test_lengths_that_are_data_are_given_by_nesting_or_by_a_function():
    text = program(RUN, LOOP.format(limit="get-tuple-element(%q.1), index=0", step=1))
    once = program_cost(text, CHIP)
    assert once.unknown_loops == 1
    assert program_cost(text, CHIP, trips=[5]).bytes == pytest.approx(5 * once.bytes)
    seen = []
    by_function = program_cost(text, CHIP, trips=lambda loop: seen.append(loop) or 7)
    assert by_function.bytes == pytest.approx(7 * once.bytes) and by_function.unknown_loops == 0
    assert (seen[0].op_name, seen[0].depth) == ("jit(f)/while", 0)


def test_of_a_conditional_the_longest_branch_counts():
    before = """
%small (x: f32[10]) -> f32[10] {
  %x = f32[10]{0} parameter(0)
  ROOT %n = f32[10]{0} negate(%x)
}

%large (y: f32[1000]) -> f32[10] {
  %y = f32[1000]{0} parameter(0)
  ROOT %s = f32[10]{0} reduce(%y), to_apply=%sum
}
"""
    body = """  %p = s32[] parameter(0)
  %a = f32[10]{0} parameter(1)
  %b = f32[1000]{0} parameter(2)
  ROOT %c = f32[10]{0} conditional(%p, %a, %b), branch_computations={%small, %large}"""
    assert program_cost(program(body, before + SUM), CHIP).bytes == 4000 + 40


# --------------------------------------------------------------------------------------------------------------- collectives


def test_ring_formulas():
    size, four = 4_000_000, (tuple(range(4)),)
    assert ring(4).seconds("all-gather", size, four) == pytest.approx(size * 3 / 4 / 2e9 + 2 * HOP)
    assert ring(4, False).seconds("reduce-scatter", size, four) == pytest.approx(size * 3 / 4 / 1e9 + 3 * HOP)
    assert ring(4).seconds("all-reduce", size, four) == pytest.approx(2 * ring(4).seconds("all-gather", size, four))
    # a quarter of the gathering of the whole array, 4 x size
    assert ring(4).seconds("all-to-all", size, four) == pytest.approx(4 * size / 4 / 2e9 + 2 * HOP)
    all16, row, column = (tuple(range(16)),), ((0, 1, 2, 3),), ((0, 4, 8, 12),)
    assert square(4).seconds("all-gather", size, all16) == pytest.approx(size * 15 / 16 / 4e9 + 4 * HOP)
    assert square(4).seconds("all-gather", size, row) == square(4).seconds("all-gather", size, column)
    every_other = square(4, False).seconds("all-gather", size, ((0, 2),))  # its link is shared with 1, 3
    assert every_other == pytest.approx(size / 2 / 0.5e9 + 2 * HOP)
    assert ring(4).seconds("all-gather", size, ((0,), (1,))) == 0
    assert ring(4).seconds("slices-all-reduce", size, ()) == pytest.approx(size / 1e8 + HOP)


def test_permutes_take_the_most_loaded_link():
    size, shift = 1_000_000, tuple((i, (i + 1) % 4) for i in range(4))
    assert ring(4).seconds("collective-permute", size, shift) == pytest.approx(size / 1e9 + HOP)
    # without the wraparound the last one goes back over every link, against the others
    assert ring(4, False).seconds("collective-permute", size, shift) == pytest.approx(size / 1e9 + 3 * HOP)
    assert ring(4, False).seconds("collective-permute", size, ((0, 2), (1, 3))) == pytest.approx(2 * size / 1e9 + 2 * HOP)


def test_where_a_torus_closes():
    assert wraparound("v5e", (4, 16)) == (False, True)
    assert wraparound("v5p", (2, 2, 4)) == (False, False, False)
    assert wraparound("v4", (4, 4, 8)) == (True, True, True)


COLLECTIVES = """  %x = f32[250000]{{0}} parameter(0)
  %u = bf16[{n},128]{{1,0:S(1)}} parameter(1)
  %y = bf16[128,256]{{1,0:S(1)}} parameter(2)
  %ags = (f32[250000]{{0}}, f32[1000000]{{0}}) all-gather-start(%x), channel_id=1, replica_groups={{{{0,1,2,3}}}}
  %c = bf16[{n},256]{{1,0:S(1)}} convolution(%u, %y), dim_labels=bf_io->bf
  %agd = f32[1000000]{{0}} all-gather-done(%ags)
  ROOT %ar = f32[250000]{{0}} all-reduce(%x), channel_id=2, replica_groups={{{{0,1,2,3}}}}, to_apply=%sum
"""


@pytest.mark.parametrize("n", [2**10, 2**18])
def test_asynchronous_collectives_are_hidden_and_synchronous_ones_are_not(n):
    hosts = [0, 0, 1, 1]
    found = program_cost(program(COLLECTIVES.format(n=n), SUM), CHIP, hosts, network=ring(4))
    gather, reduce = 4e6 * 3 / 4 / 2e9 + 2 * HOP, 2 * (1e6 * 3 / 4 / 2e9 + 2 * HOP)
    product = 2 * n * 128 * 256 / PEAK
    assert found.collective_bytes == {"all-gather": 4e6, "all-reduce": 1e6}
    assert found.collective_seconds == pytest.approx(gather + reduce)
    assert found.exposed_seconds == pytest.approx(reduce + max(0.0, gather - product))
    assert (
        found.seconds
        == pytest.approx(found.exposed_seconds + product)
        == pytest.approx(found.compute_seconds + found.exposed_seconds)
    )
    assert found.crossing_bytes == 5e6
    assert (gather < product) == (n == 2**18)  # one case hides it, the other doesn't


def test_a_collective_in_pieces_is_hidden_by_the_fusions_that_carry_it():
    piece = """
%async_collective_fusion.{k} (x: f32[250000], r: f32[1000000], u: bf16[262144,128], y: bf16[128,256]) -> (f32[], f32[]) {{
  %x = f32[250000]{{0}} parameter(0)
  %r = f32[1000000]{{0}} parameter(1)
  %u = bf16[262144,128]{{1,0}} parameter(2)
  %y = bf16[128,256]{{1,0}} parameter(3)
  %ag.{k} = f32[1000000]{{0}} all-gather(%x), channel_id=1, replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}
  %c.{k} = bf16[262144,256]{{1,0}} convolution(%u, %y), dim_labels=bf_io->bf
  ROOT %t.{k} = (bf16[262144,256]{{1,0}}, f32[1000000]{{0}}) tuple(%c.{k}, %ag.{k})
}}
"""
    fusion = (
        "  %f{k} = (bf16[262144,256]{{1,0:S(1)}}, f32[1000000]{{0}}) fusion(%x, %r, %u, %y), kind=kCustom, "
        "calls=%async_collective_fusion.{k}\n"
    )
    body = """  %x = f32[250000]{0} parameter(0)
  %r = f32[1000000]{0} parameter(1)
  %u = bf16[262144,128]{1,0:S(1)} parameter(2)
  %y = bf16[128,256]{1,0:S(1)} parameter(3)
"""
    text = program(body + "".join(fusion.format(k=k) for k in (1, 2)), "".join(piece.format(k=k) for k in (1, 2)))
    found = program_cost(text, CHIP, network=ring(4))
    product = 2 * 262144 * 128 * 256 / PEAK
    assert found.collective_bytes == {"all-gather": 4e6} and found.exposed_seconds == 0
    assert found.seconds == pytest.approx(2 * product)
    assert found.bytes == 5e6  # the collective's own; buffers that the fusions hand on are not touched


# ------------------------------------------------------------------------------------------------------------------- kernels

METADATA = """  %k = bf16[{H},2048,128]{{2,1,0}} custom-call(%m, %m, %q, %kv, %kv), custom_call_target="tpu_custom_call", frontend_attributes={{kernel_metadata={{
"xprof_metadata":"{{}}"
}}}}, metadata={{op_name="jit(f)/splash_mha_fwd"}}
"""  # noqa: E501


def test_a_kernel_whose_metadata_takes_several_lines_does_not_end_the_computation():
    body = """  %m = s8[1,4,4]{{2,1,0}} parameter(0)
  %q = bf16[32,2048,128]{{2,1,0}} parameter(1)
  %kv = bf16[8,2048,128]{{2,1,0}} parameter(2)
""".replace("{{", "{").replace("}}", "}")
    text = program(body + METADATA.format(H=32).replace("%k", "%splash_mha_fwd.2", 1) + "  ROOT %n = f32[8]{0} negate(%x)")
    assert [i.opcode for i in hlo.parse(text).computations["main"]] == ["parameter"] * 3 + ["custom-call", "negate"]
    text = text.replace("negate(%x)", "iota()")
    found = program_cost(text, CHIP)
    blocks = 10  # of 16, those on and under the diagonal
    assert found.flops == 2 * 2 * 512 * 512 * 128 * 32 * blocks and found.by_category["attention"]["flops"] == found.flops
    assert found.unknown_kernels == ()
    looped = program_cost(text.replace("splash_mha_fwd.2", "closed_call.2"), CHIP)  # in a loop over rows; op_name still says it
    assert looped.unknown_kernels == () and looped.by_category["attention"] == found.by_category["attention"]


def test_blocks_of_splash_by_pass_and_window():
    q, kv = Array("bf16", (2, 8, 4096, 128), 0), Array("bf16", (2, 8, 4096, 128), 0)

    def flops(name, table):
        return splash(Kernel(name, (Array("s8", table, 0), q, kv), (q,)))[0] / (2 * 512 * 512 * 128 * 16)

    assert flops("splash_mha_fwd_x", (1, 8, 8)) == 2 * 36
    assert flops("splash_mha_dq_x", (1, 8, 8)) == 3 * 36 and flops("splash_mha_dkv_x", (1, 8, 8)) == 4 * 36
    assert flops("splash_mha_fwd_x", (1, 8, 2)) == 2 * 15  # a window of two blocks a row
    assert splash(Kernel("other", (q, kv), ())) is None


def test_decode_attention_reads_what_is_filled_and_others_can_be_given():
    q, keys, values = (
        Array("bf16", (64, 2, 16, 128), 0),
        Array("bf16", (64, 2, 128, 8192), 0),
        Array("bf16", (64, 2, 8192, 128), 0),
    )
    flops, size = decode_kernels(2048)(Kernel("decode_attention.3", (q, keys, values), ()))
    assert size == (keys.bytes + values.bytes) / 4 + q.bytes and flops == 4 * 64 * 2 * 16 * 128 * 2048
    assert decode_kernels(2048)(Kernel("flush", (q,), ())) is None
    body = """  %x = f32[1000]{0} parameter(0)
  ROOT %k.1 = f32[1000]{0} custom-call(%x), custom_call_target="tpu_custom_call\""""
    unknown = program_cost(program(body), CHIP)
    assert unknown.unknown_kernels == ("k",) and unknown.bytes == 8000
    given = program_cost(program(body), CHIP, kernels=lambda kernel: (3e12, 1.0))
    assert given.unknown_kernels == () and given.seconds == pytest.approx(4.0)


# -------------------------------------------------------------------------------------------------------------- useful FLOPs


def test_useful_flops_and_their_share_of_the_peak():
    spec = ModelSpec("qwen3", vocab_size=1000, hidden_size=64, layers=2, heads=4, kv_heads=2, head_dim=16, mlp_size=128)
    layer = 64 * 16 * (4 + 2 + 2) + 16 * 4 * 64 + 3 * 64 * 128
    n = 2 * layer + 1000 * 64
    attention = 3 * 2 * 2 * (100**2 + 50**2) / 2 * 4 * 16 * 2
    assert useful_update_flops(spec, [100, 50]) == pytest.approx(6 * n * 150 + attention)
    windowed = dataclasses.replace(spec, windows=(10, 0))
    assert useful_update_flops(windowed, [100]) == pytest.approx(6 * n * 100 + 12 * 4 * 16 * (100**2 / 2 + 10**2 / 2 + 90 * 10))
    assert mfu(1e15, 2.0, 5, 1e15) == pytest.approx(0.1)
