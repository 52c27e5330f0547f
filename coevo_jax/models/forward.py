"""One pure forward pass for the Llama-shaped family; the sampler reuses its block pieces so that the maths exist once.

Axes: B batch, T time, S key positions, D model, H heads, K kv heads, d head width, F feed-forward, V vocabulary, L layers.
Parameters are a nested dict; per-layer arrays are stacked on axis 0 and run by `lax.scan`. The compute dtype is an argument of
`forward`; norms, softmax and logits are float32. A frozen model's matrices may be int8 (models/quantize.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from coevo_jax.mesh import RULES, ShardingRules, mesh_axes, one_cpu, token_sharding, vocab_batch_sharding
from coevo_jax.models.attention import KEPT, packed_attention
from coevo_jax.models.quantize import product, rows
from coevo_jax.models.remat import remat_policy
from coevo_jax.models.rope import rope_tables, rotate
from coevo_jax.models.spec import ModelSpec
from coevo_jax.models.tables import embed_rows

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ParamInfo:
    """Shape, logical axis names (mesh.py maps them to mesh axes) and the fan-in of the random start (0 = ones, -1 = zeros)."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    fan_in: int


def param_shapes(spec: ModelSpec) -> dict[str, Any]:
    """The parameter tree of an architecture, with ParamInfo leaves."""
    L, D, H, K, d, F = spec.layers, spec.hidden_size, spec.heads, spec.kv_heads, spec.head_dim, spec.mlp_size
    before, after = ("attn_norm", "mlp_norm") if spec.norm_placement == "pre" else ("post_attn_norm", "post_mlp_norm")
    layers = {
        before: ParamInfo((L, D), ("layers", "embed"), 0),
        after: ParamInfo((L, D), ("layers", "embed"), 0),
        "q": ParamInfo((L, D, H, d), ("layers", "embed", "heads", "head_dim"), D),
        "k": ParamInfo((L, D, K, d), ("layers", "embed", "kv_heads", "head_dim"), D),
        "v": ParamInfo((L, D, K, d), ("layers", "embed", "kv_heads", "head_dim"), D),
        "o": ParamInfo((L, H, d, D), ("layers", "heads", "head_dim", "embed"), H * d),
        "gate": ParamInfo((L, D, F), ("layers", "embed", "mlp"), D),
        "up": ParamInfo((L, D, F), ("layers", "embed", "mlp"), D),
        "down": ParamInfo((L, F, D), ("layers", "mlp", "embed"), F),
    }
    if spec.qkv_bias:
        layers |= {
            "q_bias": ParamInfo((L, H, d), ("layers", "heads", "head_dim"), -1),
            "k_bias": ParamInfo((L, K, d), ("layers", "kv_heads", "head_dim"), -1),
            "v_bias": ParamInfo((L, K, d), ("layers", "kv_heads", "head_dim"), -1),
        }
    if spec.qk_norm == "head":
        layers |= {name: ParamInfo((L, d), ("layers", "head_dim"), 0) for name in ("q_norm", "k_norm")}
    if spec.qk_norm == "full":
        layers["q_norm"] = ParamInfo((L, H, d), ("layers", "heads", "head_dim"), 0)
        layers["k_norm"] = ParamInfo((L, K, d), ("layers", "kv_heads", "head_dim"), 0)
    tree: dict[str, Any] = {
        "embed": ParamInfo((spec.vocab_size, D), ("vocab", "table"), D),
        "layers": layers,
        "final_norm": ParamInfo((D,), ("embed",), 0),
    }
    if spec.scalar:
        tree["score"] = ParamInfo((D,), ("embed",), D)
    elif not spec.tied:
        tree["unembed"] = ParamInfo((D, spec.vocab_size), ("table", "vocab"), D)
    return tree


def init_params(key: jax.Array, spec: ModelSpec, dtype: Any = jnp.float32) -> Params:
    """Random parameters: normal with std 1/sqrt(fan-in), norms at one, biases at zero."""
    infos, treedef = jax.tree.flatten(param_shapes(spec), is_leaf=lambda x: isinstance(x, ParamInfo))
    keys = jax.random.split(key, len(infos))

    def leaf(key: jax.Array, info: ParamInfo) -> jax.Array:
        if info.fan_in <= 0:
            return jnp.full(info.shape, 1.0 if info.fan_in == 0 else 0.0, dtype)
        return (jax.random.normal(key, info.shape, jnp.float32) / np.float32(np.sqrt(info.fan_in))).astype(dtype)

    return jax.tree.unflatten(treedef, [leaf(k, i) for k, i in zip(keys, infos)])


def cast(params: Params, dtype: Any) -> Params:
    """Parameters in the compute dtype (a no-op where they have it)."""
    return jax.tree.map(lambda p: p.astype(dtype), params)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float, axes: int = 1) -> jax.Array:
    """RMS norm in float32 over the last `axes` axes; `scale` has their shape."""
    over = tuple(range(-axes, 0))
    x32 = x.astype(jnp.float32)
    normed = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=over, keepdims=True) + eps)
    return (normed * lax.expand_dims(scale.astype(jnp.float32), range(x.ndim - scale.ndim))).astype(x.dtype)


def embed(params: Params, tokens_BxT: jax.Array, dtype: Any) -> jax.Array:
    """Token embeddings [B,T,D]."""
    return rows(params["embed"], tokens_BxT, dtype)


def unembed(params: Params, spec: ModelSpec, hidden: jax.Array) -> jax.Array:
    """Logits [...,V] in float32 of final hidden states [...,D] (already normalised)."""
    if spec.tied:
        return product("...D,VD->...V", hidden, params["embed"], jnp.float32)
    return product("...D,DV->...V", hidden, params["unembed"], jnp.float32)


def attention_inputs(
    layer: Params, spec: ModelSpec, x_BxTxD: jax.Array, cos_BxTxh: jax.Array, sin_BxTxh: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rotated q [B,T,H,d], rotated k [B,T,K,d] and v [B,T,K,d] of one layer."""
    x = rms_norm(x_BxTxD, layer["attn_norm"], spec.norm_eps) if spec.norm_placement == "pre" else x_BxTxD
    q, k, v = (product("BTD,DHd->BTHd", x, layer[name]) for name in "qkv")
    if spec.qkv_bias:
        q, k, v = (y + layer[n][None, None].astype(y.dtype) for y, n in ((q, "q_bias"), (k, "k_bias"), (v, "v_bias")))
    if spec.qk_norm != "none":
        axes = 1 if spec.qk_norm == "head" else 2
        q = rms_norm(q, layer["q_norm"], spec.norm_eps, axes)
        k = rms_norm(k, layer["k_norm"], spec.norm_eps, axes)
    return rotate(q, cos_BxTxh, sin_BxTxh), rotate(k, cos_BxTxh, sin_BxTxh), v


def attention_output(layer: Params, spec: ModelSpec, x_BxTxD: jax.Array, attended_BxTxHxd: jax.Array) -> jax.Array:
    """Residual stream after the attention block."""
    y = product("BTHd,HdD->BTD", attended_BxTxHxd, layer["o"])
    if spec.norm_placement == "post":
        y = rms_norm(y, layer["post_attn_norm"], spec.norm_eps)
    return x_BxTxD + y


def mlp_block(layer: Params, spec: ModelSpec, x_BxTxD: jax.Array) -> jax.Array:
    """Residual stream after the gated feed-forward block."""
    x = rms_norm(x_BxTxD, layer["mlp_norm"], spec.norm_eps) if spec.norm_placement == "pre" else x_BxTxD
    gate, up = (checkpoint_name(product("BTD,DF->BTF", x, layer[name]), name) for name in ("gate", "up"))
    y = product("BTF,FD->BTD", jax.nn.silu(gate) * up, layer["down"])
    if spec.norm_placement == "post":
        y = rms_norm(y, layer["post_mlp_norm"], spec.norm_eps)
    return x_BxTxD + y


def layer_constants(spec: ModelSpec) -> dict[str, jax.Array]:
    """Data that travels through scan beside the weights: `window` [L] (0 = full) and `rope` [L] (variant of rope_tables)."""
    windows = np.asarray(spec.window_of, np.int32)
    variant = (windows > 0) if spec.unscaled_rope_in_windows and spec.rope_scaling else np.zeros_like(windows)
    return {"window": jnp.asarray(windows), "rope": jnp.asarray(variant, jnp.int32)}


def _embed_rows(params: Params, tokens_BxT: jax.Array, dtype: Any, mesh: Mesh | None, rules: ShardingRules) -> jax.Array:
    """Token embeddings [B,T,D], rows where the rules want them."""
    if mesh is None or rules.embed == RULES.embed:
        return embed(params, tokens_BxT, dtype)
    tokens_BxT = lax.with_sharding_constraint(tokens_BxT, vocab_batch_sharding(mesh, rules))
    x = embed_rows(params["embed"], tokens_BxT, dtype, mesh, rules)
    return lax.with_sharding_constraint(x, token_sharding(mesh, rules))


def forward(
    params: Params,
    spec: ModelSpec,
    tokens_BxT: jax.Array,
    positions_BxT: jax.Array,
    segment_ids_BxT: jax.Array,
    *,
    remat: str = "none",
    attention: str = "xla",
    dtype: Any = jnp.float32,
    mesh: Mesh | None = None,
    rules: ShardingRules = RULES,
    parent_ids_BxT: jax.Array | None = None,
) -> jax.Array:
    """Final normalised hidden states [B,T,D]. Rows may be packed: attention stays inside equal segment ids, 0 is padding;
    parent_ids names a further segment that a token sees (a shared head, models/prefix.py).

    Where rules.time cuts rows over chips and attention is splash, positions of rows come in models.attention.time_order.
    remat: what a layer keeps for the gradient, the rest is made again: 'none' (nothing is), 'dots' (products with weights are
    kept), 'full' (only its input is) or that and some of config.learn.REMAT_NAMES with '+'. rules: where rows and weights lie.
    attention: 'xla' or 'splash', which needs the mesh, where there is one. dtype: of the computation.
    """
    x = _embed_rows(params, tokens_BxT, dtype, mesh, rules)
    cos, sin = rope_tables(spec, positions_BxT)

    attend: Callable[..., jax.Array] = functools.partial(
        packed_attention,
        choice=attention,
        windows=spec.windows,
        mesh=mesh,
        dealt=mesh_axes(rules.batch),
        along=mesh_axes(rules.time),
    )

    def block(x: jax.Array, scanned: tuple[Params, dict[str, jax.Array]]) -> tuple[jax.Array, None]:
        layer, constants = scanned
        q, k, v = attention_inputs(layer, spec, x, cos[constants["rope"]], sin[constants["rope"]])
        q, k, v = (checkpoint_name(y, "qkv") for y in (q, k, v))
        window = constants["window"] if spec.windows else None
        attended = attend(q, k, v, positions_BxT, segment_ids_BxT, window, parents=parent_ids_BxT)
        # splash, and pairs of blocks, name their own residuals
        attended = checkpoint_name(attended, KEPT) if attention == "xla" and not one_cpu(mesh) else attended
        x = checkpoint_name(attention_output(layer, spec, x, attended), "residual")
        return mlp_block(layer, spec, x), None

    if remat != "none":
        block = jax.checkpoint(block, prevent_cse=False, policy=remat_policy(remat))
    x, _ = lax.scan(block, x, (params["layers"], layer_constants(spec)))
    return rms_norm(x, params["final_norm"], spec.norm_eps)
