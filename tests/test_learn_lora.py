"""Low-rank adapters: products, gradients, updates, meshes, merging, PEFT files, and what of a config is refused."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learn_support import SPEC, assert_close, experiment, mesh_of, params_on, some_samples
from safetensors.numpy import load_file, save_file

from coevo_jax.adapters import Tuning, tune
from coevo_jax.config import Experiment, LossConfig, OptimizerConfig
from coevo_jax.config.lora import TARGETS, LoraConfig
from coevo_jax.config.override import apply_overrides
from coevo_jax.config.validate import validate
from coevo_jax.errors import UserError
from coevo_jax.learn.losses import policy_loss
from coevo_jax.learn.packing import pack
from coevo_jax.learn.publish import make_publish, same_places
from coevo_jax.learn.update import batch_logprobs, init_state, make_logprobs, make_optimizer, make_update, rows_devices
from coevo_jax.mesh import FSDP_RULES, RULES, array_sharding, param_shardings, train_rules
from coevo_jax.models.forward import forward, param_shapes, unembed
from coevo_jax.models.hf_weights import file_tensors
from coevo_jax.models.load import LoadedModel
from coevo_jax.models.lora import adapted, fresh, merged, trained_shapes, whole
from coevo_jax.models.peft import export_adapter, read_adapter, tensor_name
from coevo_jax.records.fingerprint import fingerprint

LORA = LoraConfig(rank=4, alpha=8.0)
ADAPTED = adapted(SPEC, LORA)
LOSS = LossConfig(kl_weight=0.0, tis_cap=2.0, entropy_weight=0.01)
TOKENS = np.random.default_rng(1).integers(1, 48, (2, 12)).astype(np.int32)


def adapters(seed: int = 0, zero: bool = False, mesh: object = None, rules: object = RULES) -> dict:
    """Random adapters, B too unless `zero`."""
    place = None if mesh is None else lambda info: array_sharding(mesh, info.shape, info.axes, rules)
    tree = fresh(ADAPTED, params_on(), "kaiming", seed, "policy", place)
    if zero:
        return tree
    rng = np.random.default_rng(seed)
    bumped = {n: {**p, "b": jax.device_put(rng.normal(0, 0.2, p["b"].shape).astype(np.float32), p["b"].sharding)}
              for n, p in tree["layers"].items()}  # fmt: skip
    return {"layers": bumped}


def logits(params: dict, dtype: object = jnp.float32) -> jax.Array:
    positions = np.arange(12, dtype=np.int32)[None].repeat(2, 0)
    return unembed(params, SPEC, forward(params, SPEC, TOKENS, positions, np.ones_like(TOKENS), dtype=dtype))


def config(**kwargs: object) -> Experiment:
    return dataclasses.replace(experiment(LOSS, **kwargs), lora=LORA)


# ------------------------------------------------------------------------------------------------------------- the forward


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_zero_b_gives_the_logits_of_the_base_exactly(dtype: str):
    base = params_on()
    assert np.array_equal(logits(base, jnp.dtype(dtype)), logits(whole(ADAPTED, base, adapters(zero=True)), jnp.dtype(dtype)))
    moved = logits(whole(ADAPTED, base, adapters()), jnp.dtype(dtype))
    assert abs(np.asarray(moved) - np.asarray(logits(base, jnp.dtype(dtype)))).max() > 0.05


def test_the_joined_forward_is_that_of_the_merged_weights():
    base, trained = params_on(), adapters()
    assert_close(logits(whole(ADAPTED, base, trained)), logits(merged(ADAPTED, base, trained, "float32")))
    q, pair = np.asarray(base["layers"]["o"]), trained["layers"]["o"]
    by_hand = q + 2.0 * np.einsum("lhdr,lrD->lhdD", np.asarray(pair["a"]), np.asarray(pair["b"]))
    np.testing.assert_allclose(np.asarray(merged(ADAPTED, base, trained, "float32")["layers"]["o"]), by_hand, atol=1e-6)


def test_a_scale_by_the_root_of_the_rank():
    assert LoraConfig(rank=16, alpha=32.0).scale == 2.0 and LoraConfig(rank=16, alpha=32.0, rslora=True).scale == 8.0


def test_a_is_drawn_by_seed_model_and_matrix():
    tree, again = adapters(3, zero=True), adapters(3, zero=True)
    assert_close(tree, again, 0)
    a = {name: np.asarray(pair["a"]) for name, pair in tree["layers"].items()}
    assert not any(np.asarray(pair["b"]).any() for pair in tree["layers"].values())
    assert abs(a["q"]).max() <= 16**-0.5 and abs(a["q"]).std() > 0.05 and not np.array_equal(a["k"], a["v"])
    other = fresh(ADAPTED, params_on(), "kaiming", 3, "rubric")["layers"]["q"]["a"]
    assert not np.array_equal(other, a["q"]) and not np.array_equal(adapters(4, zero=True)["layers"]["q"]["a"], a["q"])
    normal = fresh(ADAPTED, params_on(), "normal", 3, "policy")["layers"]["down"]["a"]
    assert np.std(normal) == pytest.approx(1 / 4, rel=0.2)


# -------------------------------------------------------------------------------------------------------------- the update


def test_gradients_equal_those_through_merged_weights():
    """B counts before A: with B zero A has no gradient, so both are random here."""
    cfg, base, trained = config(), params_on(), adapters()
    batch = jax.tree.map(lambda x: x[0], pack(some_samples(), cfg.update))

    def loss(params: dict) -> jax.Array:
        logp, entropy = batch_logprobs(params, SPEC, batch, 1.0, cfg)
        return jnp.where(batch.mask, logp + 0.1 * entropy, 0.0).sum()

    found = jax.jit(jax.grad(lambda t: loss(whole(ADAPTED, base, t))))(trained)
    naive = jax.jit(jax.grad(lambda t: loss(merged(ADAPTED, base, t, "float32"))))(trained)
    assert_close(found, naive, 1e-4)
    scale = max(float(abs(x).max()) for x in jax.tree.leaves(naive))
    assert scale > 0.1 and max(float(abs(x - y).max()) for x, y in zip(*map(jax.tree.leaves, (found, naive)))) < 1e-5 * scale


def updated(cfg: Experiment, mesh: object = None, steps: int = 2) -> tuple[dict, dict, dict]:
    """(adapters, metrics, the base) after updates of one batch."""
    base, optimizer, rules = params_on(mesh), make_optimizer(cfg.optimizer), train_rules(cfg.mesh)
    if mesh is not None:
        base = jax.device_put(base, param_shardings(param_shapes(SPEC), mesh, rules))
    state = init_state(adapters(mesh=mesh, rules=rules), optimizer)
    update = make_update(ADAPTED, optimizer, policy_loss, cfg, mesh)
    batch = pack(some_samples(), cfg.update, devices=rows_devices(mesh, rules))
    for _ in range(steps):
        state, metrics = update(state, batch, 1.0, base)
    return jax.device_get(state.params), {name: float(x) for name, x in metrics.items()}, base


@pytest.fixture(scope="module")
def base_run():
    return updated(config())


def test_an_update_moves_the_adapters_alone(base_run):
    trained, metrics, base = base_run
    assert all((np.asarray(x) != np.asarray(y)).any() for x, y in zip(*map(jax.tree.leaves, (trained, adapters()))))
    assert fingerprint(base) == fingerprint(params_on()) and not any(x.is_deleted() for x in jax.tree.leaves(base))
    assert metrics["grad_norm"] > 0 and metrics["nonfinite"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("kwargs", [{"rows_per_micro": 1, "remat": "full"}, {"rows_per_micro": 8, "vocab_tile": 0}])
def test_accumulation_against_whole(base_run, kwargs):
    trained, metrics, _ = updated(config(**kwargs))
    assert_close(trained, base_run[0])
    assert metrics == pytest.approx(base_run[1], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("train", ["tensor", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_eight_devices_against_one(base_run, train):
    cfg = config()
    cfg = dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, train=train))
    trained, metrics, _ = updated(cfg, mesh_of(2, 2, 2))
    assert_close(trained, base_run[0])
    assert metrics == pytest.approx(base_run[1], rel=1e-4, abs=1e-5)


def test_every_half_of_an_adapter_is_cut_over_the_mesh():
    for rules in (RULES, FSDP_RULES):
        places = param_shardings(trained_shapes(ADAPTED), mesh_of(2, 2, 2), rules)
        assert not any(place.is_fully_replicated for place in jax.tree.leaves(places))


def test_lr_zero_leaves_the_adapters_and_ratio_one():
    trained, metrics, _ = updated(dataclasses.replace(config(), optimizer=OptimizerConfig(lr=0.0)))
    assert_close(trained, adapters(), 0)
    assert metrics["ratio/max"] == 1.0 and metrics["update_norm"] == 0.0 and metrics["grad_norm"] > 0


def test_log_probs_of_the_sampler_and_of_the_trainer_agree():
    """The sampler holds merged weights, the trainer both parts: within 1e-4 in float32."""
    cfg, tuning, trained = config(), Tuning(ADAPTED, params_on()), adapters()
    batch, logprobs = pack(some_samples(), cfg.update), make_logprobs(SPEC, cfg)
    ours, theirs = (logprobs(p, batch, 1.0) for p in (tuning.whole(trained), tuning.merged(trained, "float32")))
    assert abs(np.asarray(ours) - np.asarray(theirs)).max() < 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_fingerprint_is_that_of_the_merged_weights(dtype: str):
    """On a mesh too, after they were laid out for decoding; and another adapter has another one."""
    for mesh in (None, mesh_of(2, 2, 2)):
        tuning, trained = Tuning(ADAPTED, params_on(mesh)), adapters(mesh=mesh)
        published = make_publish(SPEC, dtype, RULES, mesh)(tuning.merged(trained, dtype))
        assert {str(x.dtype) for x in jax.tree.leaves(published)} == {dtype} and (mesh is None) == same_places(SPEC, RULES, mesh)
        assert fingerprint(published) == tuning.fingerprint(trained, dtype) != tuning.fingerprint(adapters(1, mesh=mesh), dtype)


def test_leaves_without_an_adapter_are_the_bases():
    spec = adapted(SPEC, LoraConfig(rank=2, targets=("q", "v")))
    base = params_on()
    made = merged(spec, base, fresh(spec, base, "kaiming", 0), "float32")
    assert made["embed"] is base["embed"] and made["layers"]["up"] is base["layers"]["up"]
    assert set(trained_shapes(spec)["layers"]) == {"q", "v"}


# --------------------------------------------------------------------------------------------------------------- PEFT files


def test_a_peft_folder_merged_by_hand_gives_our_logits(tmp_path: pathlib.Path):
    """W [out, in] + alpha / r B A, by the names that PEFT gives, against ours; and the folder reads back bit by bit."""
    base, trained = params_on(), adapters()
    export_adapter(trained, ADAPTED, LORA, "some/model", tmp_path / "out")
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and (config["r"], config["lora_alpha"], config["use_rslora"]) == (4, 8.0, False)
    assert config["target_modules"] == sorted(f"{t}_proj" for t in TARGETS) and config["base_model_name_or_path"] == "some/model"
    tensors = load_file(tmp_path / "out/adapter_model.safetensors")
    assert tensors["base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight"].shape == (8, 4)
    wanted = {n: f() for n, _, f in file_tensors(merged(ADAPTED, base, trained, "float32"), SPEC)}
    for name, _, fetch in file_tensors(base, SPEC):
        pair = [tensors.pop(f"base_model.model.{name.removesuffix('.weight')}.lora_{x}.weight", None) for x in "AB"]
        by_hand = fetch() if pair[0] is None else fetch() + config["lora_alpha"] / config["r"] * pair[1] @ pair[0]
        np.testing.assert_allclose(by_hand, wanted[name], atol=1e-6)
    assert not tensors
    assert_close(read_adapter(tmp_path / "out", LORA, ADAPTED, adapters(5, zero=True)), trained, 0)


def written(folder: pathlib.Path, change: object = None, **settings: object) -> pathlib.Path:
    """A PEFT folder, its tensors or settings changed."""
    export_adapter(adapters(), ADAPTED, LORA, "some/model", folder)
    tensors = dict(load_file(folder / "adapter_model.safetensors"))
    if change is not None:
        change(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


@pytest.mark.parametrize(
    ("change", "settings", "what"),
    [
        (lambda t: t.pop(tensor_name("q", "b", 1)), {}, "lora_B.weight' is missing"),
        (lambda t: t.update({tensor_name("q", "a", 0): np.zeros((2, 16), np.float32)}), {}, "has shape"),
        (lambda t: t.update({"base_model.model.lm_head.lora_A.weight": np.zeros(1, np.float32)}), {}, "has no place"),
        (None, {"r": 8}, "lora.rank=4, and the adapter to begin with has 8"),
        (None, {"lora_alpha": 6}, "lora.alpha=8.0"),
        (None, {"use_dora": True}, "use_dora=True is not supported"),
        (None, {"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        (None, {"peft_type": "IA3"}, "peft_type='IA3'"),
    ],
)
def test_a_peft_folder_that_is_something_else_is_refused(tmp_path: pathlib.Path, change, settings, what):
    with pytest.raises(UserError, match=what):
        read_adapter(written(tmp_path / "out", change, **settings), LORA, ADAPTED, adapters(zero=True))


def test_targets_that_a_peft_folder_lacks_begin_at_zero(tmp_path: pathlib.Path):
    lora = dataclasses.replace(LORA, targets=("q", "down"))
    some = {"layers": {name: adapters()["layers"][name] for name in lora.targets}}
    export_adapter(some, adapted(SPEC, lora), lora, "some/model", tmp_path / "out")
    found = read_adapter(tmp_path / "out", LORA, ADAPTED, adapters(5, zero=True))
    assert_close({name: found["layers"][name] for name in lora.targets}, some["layers"], 0)
    assert_close(found["layers"]["up"], adapters(5, zero=True)["layers"]["up"], 0)
    with pytest.raises(UserError, match="no adapter is there"):
        read_adapter(tmp_path / "nowhere", LORA, ADAPTED, found)


def test_a_starting_adapter_is_of_the_models_that_begin_as_the_policy(tmp_path: pathlib.Path):
    cfg = apply_overrides(
        config(), ["lora.rank=4", "lora.alpha=8", f"lora.source={written(tmp_path / 'out')}", "generator.mode=two"]
    )
    model = LoadedModel(SPEC, params_on(), tmp_path, "smollm2", "")
    for name, source in (("policy", ""), ("rubric", ""), ("rubric", "other")):
        own = apply_overrides(cfg, [f"generator.source={source}"])
        tuning, start = tune(own, name, model)
        assert tuning.base["layers"]["q"] is model.params["layers"]["q"]
        begun = np.asarray(start["layers"]["q"]["b"]).any()
        assert begun == (source == ""), name


# ------------------------------------------------------------------------------------------------------------------ refused


def test_a_rank_that_no_matrix_has_is_refused():
    with pytest.raises(UserError, match=r"lora\.rank=9 is above what a matrix k of 16 x 8 has") as caught:
        adapted(SPEC, LoraConfig(rank=9))
    assert caught.value.expected == "at most 8, or targets without k"
    assert adapted(SPEC, LoraConfig(rank=9, targets=("q", "gate"))).lora is not None


@pytest.mark.parametrize(
    ("overrides", "what", "close"),
    [
        (["lora.alpha=8"], "would be ignored: lora.rank=0", ""),
        (["lora.source=x"], "would be ignored: lora.rank=0", ""),
        (["lora.rank=4", "lora.targets=q_proj,v"], "no matrix 'q_proj'", "q"),
        (["lora.rank=4", "lora.targets=gat"], "no matrix 'gat'", "gate"),
        (["lora.rank=4", "lora.targets=q,q"], "names a matrix twice", ""),
        (["lora.rank=4", "lora.targets="], "is empty", ""),
        (["lora.rank=4", "lora.alpha=0"], "lora.alpha=0", ""),
        (["lora.rank=-1"], "lora.rank=-1 is out of range", ""),
        (["lora.rank=4", "update.reference=host"], "update.reference=host would be ignored", ""),
        (["lora.rank=4", "lora.init=kaimin"], "unknown choice lora.init", "kaiming"),
    ],
)
def test_settings_that_are_wrong_or_would_be_ignored(overrides, what, close):
    with pytest.raises(UserError, match=what) as caught:
        validate(apply_overrides(Experiment(), overrides))
    assert caught.value.nearest == close
    validate(apply_overrides(Experiment(), ["lora.rank=4", "lora.targets=q,v", "lora.rslora=true"]))
