"""HLO text is read as XLA for TPU prints it; the decode kernel compiles for every kind of slice (memory, not speed)."""

from __future__ import annotations

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from coevo_jax import aot, hlo
from coevo_jax.errors import UserError
from coevo_jax.sampler.kernel import decode_attention_kernel, merge_partials

TEXT = """HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}, num_partitions=16

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%all-reduce-scatter.2 (input: bf16[64,32]) -> bf16[32,32] {
  %input = bf16[64,32]{1,0:T(8,128)(2,1)} parameter(0)
  %all-reduce.33 = bf16[64,32]{1,0} all-reduce(%input), channel_id=12, replica_groups={{0,4},{1,5}}, to_apply=%add
  ROOT %dynamic-slice.64 = bf16[32,32]{1,0} dynamic-slice(%all-reduce.33, %zero), dynamic_slice_sizes={32,32}
}

%moves (p: bf16[4,1024,128], n: s32[]) -> bf16[1024,128] {
  %p = bf16[4,1024,128]{2,1,0} parameter(0)
  %n = s32[] parameter(1)
  %slice = bf16[1,1024,128]{2,1,0} dynamic-slice(%p, %n), dynamic_slice_sizes={1,1024,128}
  ROOT %bits = bf16[1024,128]{1,0} bitcast(%slice)
}

%computes (p: bf16[1024,128]) -> bf16[1024,128] {
  %p.1 = bf16[1024,128]{1,0} parameter(0)
  %t = bf16[1024,128]{1,0} transpose(%p.1), dimensions={1,0}
  ROOT %m = bf16[1024,128]{1,0} multiply(%t, %t)
}

%inner_body (q: (s32[], bf16[4,1024,128])) -> (s32[], bf16[4,1024,128]) {
  %q = (s32[]{:T(128)}, bf16[4,1024,128]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%q), index=0
  %kv = bf16[4,1024,128]{2,1,0} get-tuple-element(%q), index=1
  %kv.copy = bf16[4,1024,128]{1,2,0:T(8,128)(2,1)} copy(%kv)
  %start = (bf16[4,1024,128]{2,1,0:T(8,128)(2,1)S(1)}, bf16[4,1024,128]{2,1,0}, u32[]{:S(2)}) copy-start(%kv)
  %part = ((bf16[4,1024,128]{2,1,0:T(8,128)(2,1)}), bf16[2,1024,128]{2,1,0:T(8,128)(2,1)S(1)}, s32[]{:S(2)}) slice-start(%kv), slice={[0:2], [0:1024], [0:128]}
  %small = bf16[8,8]{1,0} copy(%x)
  %f = bf16[1024,128]{1,0} fusion(%kv, %i), kind=kLoop, calls=%moves
  %c = bf16[1024,128]{1,0} fusion(%f), kind=kLoop, calls=%computes
  %ag = bf16[1024,512]{1,0} all-gather(%f), channel_id=7, replica_groups=[4,4]<=[16], dimensions={1}
  %ag2 = bf16[1024,512]{1,0} all-gather(%f), channel_id=7, replica_groups=[4,4]<=[16], dimensions={1}
  %rs = bf16[32,32]{1,0} fusion(%y), kind=kCustom, calls=%all-reduce-scatter.2
  ROOT %out = (s32[], bf16[4,1024,128]{2,1,0}) tuple(%i, %kv)
}

%inner_cond (q: (s32[], bf16[4,1024,128])) -> pred[] {
  %limit = s32[] constant(36)
  %q.2 = (s32[]{:T(128)}, bf16[4,1024,128]{2,1,0}) parameter(0)
  %i.2 = s32[] get-tuple-element(%q.2), index=0
  ROOT %lt = pred[] compare(%i.2, %limit), direction=LT
}

%outer_body (q: (s32[], bf16[4,1024,128])) -> (s32[], bf16[4,1024,128]) {
  %q.3 = (s32[]{:T(128)}, bf16[4,1024,128]{2,1,0}) parameter(0)
  %one = s32[] constant(1)
  %kv.3 = bf16[4,1024,128]{2,1,0} get-tuple-element(%q.3), index=1
  %one.copy = s32[] copy(%one)
  %in = (s32[], bf16[4,1024,128]{2,1,0}) tuple(%one.copy, %kv.3)
  ROOT %w = (s32[], bf16[4,1024,128]{2,1,0}) while(%in), condition=%inner_cond, body=%inner_body
}

%outer_cond (q: (s32[], bf16[4,1024,128])) -> pred[] {
  %q.4 = (s32[]{:T(128)}, bf16[4,1024,128]{2,1,0}) parameter(0)
  %i.4 = s32[] get-tuple-element(%q.4), index=0
  %to = s32[] get-tuple-element(%q.4), index=0
  ROOT %lt.4 = pred[] compare(%i.4, %to), direction=LT
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %big = bf16[4,1024,128]{2,1,0} copy(%x)
  %init = (s32[], bf16[4,1024,128]{2,1,0}) tuple(%zero, %big)
  %loop = (s32[], bf16[4,1024,128]{2,1,0}) while(%init), condition=%outer_cond, body=%outer_body
  %known = (s32[]) while(%k), condition=%c9, body=%b9, backend_config={"known_trip_count":{"n":"5"}}
  %ags = (f32[8]{0}, f32[32]{0}) all-gather-start(%x), channel_id=9, replica_groups=[8,2]<=[4,4]T(1,0), dimensions={0}
  %ags.done = f32[32]{0} all-gather-done(%ags)
  %perm = f32[8]{0} collective-permute(%x), channel_id=3, source_target_pairs={{0,1},{4,8}}
  %sent = (f32[8]{0}, u32[], token[]) send(%x, %t), channel_id=4, is_host_transfer=true, frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}
  ROOT %r = f32[8]{0} all-reduce(%x), channel_id=1, replica_groups={}, to_apply=%add
}

%b9 (k: (s32[])) -> (s32[]) {
  %k.1 = (s32[]) parameter(0)
  %a2a = f32[2,4]{1,0} all-to-all(%e), channel_id=11, replica_groups=mesh['a'=2,'b'=2,'c'=4] {'b'}, dimensions={1}
}
"""  # noqa: E501
HOSTS = [d // 4 for d in range(16)]


def test_collectives_with_their_loops_groups_and_hosts():
    found = {(c.kind, c.bytes): c for c in hlo.collectives(TEXT, HOSTS)}
    assert len(found) == len(hlo.collectives(TEXT)) == 7  # the second piece of channel 7 is not counted
    gather = found["all-gather", 1024 * 512 * 2]
    assert gather.groups[1] == (4, 5, 6, 7) and not gather.crosses_hosts
    assert gather.loops == hlo.Loops(("outer_body", "inner_body"), 35, False)  # 1 .. 36; the outer loop's length is not known
    scatter = found["reduce-scatter", 64 * 32 * 2]
    assert scatter.body == "inner_body" and scatter.crosses_hosts
    outside = found["all-gather", 32 * 4]
    assert outside.groups[0] == (0, 4) and outside.groups[7] == (11, 15) and outside.body == "" and outside.crosses_hosts
    assert found["collective-permute", 32].groups == ((0, 1), (4, 8)) and found["collective-permute", 32].crosses_hosts
    assert found["slices-all-reduce", 32].crosses_hosts
    assert found["all-reduce", 32].groups == (tuple(range(16)),)
    mesh = found["all-to-all", 32]
    assert mesh.groups[:2] == ((0, 4), (1, 5)) and mesh.groups[7] == (11, 15) and mesh.loops.runs == 5 and mesh.loops.known
    assert all(c.crosses_hosts is None for c in hlo.collectives(TEXT) if c.groups)


def test_large_copies_inside_loops_alone():
    found = hlo.large_copies(TEXT, 1024 * 128 * 2)
    assert {(c.name, c.bytes, c.in_vmem) for c in found} == {
        ("kv.copy", 4 * 1024 * 128 * 2, False), ("start", 4 * 1024 * 128 * 2, True), ("f", 1024 * 128 * 2, False),
        ("part", 2 * 1024 * 128 * 2, True),
    }  # fmt: skip
    assert all(c.loops.bodies == ("outer_body", "inner_body") for c in found)
    assert [c.name for c in hlo.large_copies(TEXT, 1024 * 128 * 2 + 1)] == ["kv.copy", "start", "part"]


def test_text_that_is_not_understood_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.parse("module @jit_f {}")
    with pytest.raises(ValueError, match="notation that is not known"):
        hlo.replica_groups("replica_groups=all", 4)
    with pytest.raises(ValueError, match="parts of mesh axes"):
        hlo.replica_groups("replica_groups=mesh['a'=4] {'a':(1)2}", 4)


def test_names_of_topologies_and_a_missing_libtpu(monkeypatch):
    assert aot.parse_name("v5p:2x2x4*2") == (aot.CHIPS["v5p"], (2, 2, 4), 2)
    for name in ("v5:2x2", "v5e", "v4:2x2x", "v4:2"):
        with pytest.raises(UserError, match="topology"):
            aot.parse_name(name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"coevo-jax\[tpu\]"):
        aot.topology.__wrapped__("v5e:4x4")


def needs_libtpu():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu is not installed")


@pytest.mark.tpu_aot
@pytest.mark.parametrize("name", [*aot.TOPOLOGIES, "v5e:4x4*2"])
def test_the_decode_kernel_compiles_without_a_copy_of_the_cache(name):
    """bfloat16 of width 128, int8 of width 64; inside a loop, rows and kv heads cut over a mesh with tensor on a host."""
    needs_libtpu()
    slice_ = aot.topology(name)
    mesh = aot.mesh_for(slice_, tensor=4)
    B, K, S = 64 * mesh.shape["data"], 8, 16384  # 64 slots a host: too much for XLA to move into fast memory

    def given(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    for dtype, d in ((jnp.bfloat16, 128), (jnp.int8, 64)):
        row, head = P(("data", "fsdp")), P(("data", "fsdp"), "tensor")
        q, keys, values = (
            given(s, t, head) for s, t in (((B, 32, d), jnp.bfloat16), ((B, K, d, S), dtype), ((B, K, S, d), dtype))
        )
        scales = (given((B, K, S), jnp.float32, head),) * 2 if dtype == jnp.int8 else (None, None)

        def steps(q, keys, values, length, key_scale, value_scale):
            def step(_, q):
                part = decode_attention_kernel(
                    q, keys, values, jnp.zeros_like(length), length, key_scale=key_scale, value_scale=value_scale, mesh=mesh
                )
                return merge_partials([part]).astype(q.dtype)

            return jax.lax.fori_loop(0, 3, step, q)

        compiled = aot.compile_for(steps, (q, keys, values, given((B,), jnp.int32, row), *scales))
        cache = 64 * (K // 4) * S * d * jnp.dtype(dtype).itemsize
        found = aot.memory(compiled)
        assert "tpu_custom_call" in compiled.as_text()
        assert found.arguments >= 2 * cache and found.peak < 1.02 * found.arguments
        assert not aot.large_copies(compiled, cache // 4)
        assert not aot.collectives(compiled, aot.hosts_of(mesh))


@pytest.mark.tpu_aot
def test_collectives_stay_on_a_host_and_figures_are_kept(tmp_path, monkeypatch):
    needs_libtpu()
    slice_ = aot.topology("v5p:2x2x4")
    mesh = aot.mesh_for(slice_, data=2, fsdp=2, tensor=4)
    assert len(slice_.devices) == 16 and all(len({d.process_index for d in group}) == 1 for group in mesh.devices.reshape(-1, 4))
    with pytest.raises(UserError, match="hosts of 4 chips"):
        aot.mesh_for(slice_, tensor=8)
    x = jax.ShapeDtypeStruct((64, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, P("data", "tensor")))
    w = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16, sharding=NamedSharding(mesh, P("tensor", "fsdp")))
    call = lambda: aot.figures(  # noqa: E731
        lambda x, w: x @ w, (x, w), mesh, cache=tmp_path / "figures.json", out_shardings=NamedSharding(mesh, P("data", "fsdp"))
    )
    first = call()
    assert [(c["kind"], c["crosses_hosts"]) for c in first["collectives"]] == [("all-reduce", False)]
    assert first["memory"]["arguments"] >= 32 * 256 * 2 + 256 * 256 * 2
    monkeypatch.setattr(aot, "memory", lambda compiled: pytest.fail("compiled again"))
    assert call() == first
    assert dataclasses.fields(aot.Memory)[5].name == "peak"
