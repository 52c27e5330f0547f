"""Adapters through the whole loop: every trainer, kills, one base for all, starting adapters, exports; the reward rises."""

from __future__ import annotations

import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from train_support import Run, run, same_bits, system_of

from coevo_jax.config import ModelConfig
from coevo_jax.errors import UserError
from coevo_jax.export import export_run, export_run_adapter
from coevo_jax.learner import Learner
from coevo_jax.models.forward import forward, unembed
from coevo_jax.models.load import TINY, load_model, load_scalar
from coevo_jax.models.spec import ModelSpec
from coevo_jax.records.fingerprint import fingerprint
from coevo_jax.trained import load, load_trained

LORA = ("lora.rank=4", "optimizer.lr=1e-2", "schedule.cycles=1", "run.save_every=2")
VERIFIER = "def score(record, text):\n    return min(len(text.split()), 5) / 5\n"
VERIFIED = ("schedule.mode=verifiable", "schedule.verifier=lora_verifier:score")


@pytest.fixture(autouse=True)
def verifier(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lora_verifier.py").write_text(VERIFIER)
    monkeypatch.syspath_prepend(str(tmp_path))


class Killed(BaseException):
    """The end of a process, as far as one process can have it."""


def logits(params: dict, spec: ModelSpec) -> np.ndarray:
    tokens = np.random.default_rng(0).integers(0, spec.vocab_size, (1, 24)).astype(np.int32)
    hidden = forward(params, spec, tokens, np.arange(24, dtype=np.int32)[None], np.ones_like(tokens))
    return np.asarray(unembed(params, spec, hidden))


def base_of(learner: Learner) -> dict:
    assert learner.tuning.base is not None
    return learner.tuning.base


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One policy and one rubric update."""
    return run(tmp_path_factory.mktemp("lora") / "run", *LORA, "schedule.k=1")


def test_adapters_train_and_the_base_stays(done: Run) -> None:
    learner = done.system.learners["policy"]
    assert set(learner.state.params) == {"layers"} and all(row["grad_norm"] > 0 for row in done.rows)
    assert fingerprint(base_of(learner)) == fingerprint(load_model("tiny").params)
    first = done.rows[0]
    assert first["kl"] < 1e-6 and first["ratio/max"] == pytest.approx(1, abs=1e-5) and first["logp_gap/max"] < 1e-4
    assert done.rows[1]["kl"] > 1e-6  # the reference did not move with the adapters
    moments = [x for x in jax.tree.leaves(learner.state.opt_state) if x.ndim]
    assert sum(x.size for x in moments) == 2 * sum(x.size for x in jax.tree.leaves(learner.state.params))
    stored = json.loads((done.folder / "checkpoints/reference_policy/state/_METADATA").read_text())["tree_metadata"]
    assert len(stored) == 14 and all("layers" in name for name in stored)


def test_both_exports_and_the_run_as_a_source_give_base_plus_adapter(done: Run, tmp_path: pathlib.Path) -> None:
    learner = done.system.learners["policy"]
    wanted = logits(learner.tuning.whole(learner.state.params), learner.spec)
    export_run(done.folder, tmp_path / "merged")
    merged = load_model(str(tmp_path / "merged"))
    np.testing.assert_allclose(logits(merged.params, merged.spec), wanted, rtol=1e-5, atol=1e-5)  # logits of about 10
    assert abs(logits(load_model("tiny").params, merged.spec) - wanted).max() > 1e-2
    source = load(ModelConfig(source=f"run:{done.folder}"))
    assert same_bits(source.params, learner.published) and source.spec == merged.spec
    export_run_adapter(done.folder, tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    tensors, base = load_file(tmp_path / "adapter/adapter_model.safetensors"), load_file(TINY / "model.safetensors")
    by_hand = dict(base)
    for name in base:
        pair = [tensors.get(f"base_model.model.{name.removesuffix('.weight')}.lora_{x}.weight") for x in "AB"]
        if pair[0] is not None:
            by_hand[name] = base[name] + config["lora_alpha"] / config["r"] * (pair[1] @ pair[0])
    exported = load_file(tmp_path / "merged/model.safetensors")
    assert len(tensors) == 14 * learner.spec.layers
    for name in exported:
        np.testing.assert_allclose(exported[name], by_hand[name], atol=1e-6)


def test_adapters_of_a_run_without_any_are_refused(tmp_path: pathlib.Path, done: Run) -> None:
    folder = tmp_path / "run"
    shutil.copytree(done.folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config["lora"]["rank"] = 0
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="trained all weights"):
        export_run_adapter(folder, tmp_path / "out")


def test_weights_that_the_sampler_does_not_hold_are_found(done: Run) -> None:
    learner = done.system.learners["policy"]
    before = learner.state
    moved = {**before.params["layers"], "q": {**before.params["layers"]["q"]}}
    moved["q"]["b"] = moved["q"]["b"] + jnp.float32(1e-3)
    try:
        learner.weights()
        learner.state = before.replace(params={"layers": moved})
        with pytest.raises(RuntimeError, match="not the trainer's"):
            learner.weights()
    finally:
        learner.state = before
    learner.weights()


def test_one_base_for_two_models_critics_and_the_judge() -> None:
    system = system_of(
        *LORA,
        "generator.mode=two",
        "advantage.kind=gae",
        "judge.source=tiny",
        "judge.protocol=json_score",
        "judge.sampling.max_new_tokens=4",
    )
    policy, rubric = (base_of(system.learners[name]) for name in ("policy", "rubric"))
    critic = system.learners["policy"].critic
    assert critic is not None and set(critic.state.params) == {"layers", "score"} and critic.tuning.base is not None
    for other in (rubric, critic.tuning.base, system.bench.weights["judge"]):
        assert all(other["layers"][name] is policy["layers"][name] for name in policy["layers"])
    drawn = [system.learners[name].state.params["layers"]["q"]["a"] for name in ("policy", "rubric")]
    assert not np.array_equal(*drawn)


# ------------------------------------------------------------------------------------------------------------ every trainer

TRAINERS = {
    "grpo": ("schedule.k=2", "warmup.updates=1", "warmup.lr=1e-2", "update.inner_iterations=2"),
    "two models": ("schedule.k=2", "generator.mode=two", "lora.targets=q,v,down", "lora.rslora=true"),
    "ppo": (*VERIFIED, "schedule.k=4", "advantage.kind=gae", "critic.lr=1e-2", "critic.warmup_updates=1"),
    "sft": ("schedule.mode=sft", "warmup.updates=4", "warmup.lr=1e-2"),
    "reward": ("schedule.mode=reward", "schedule.k=4", "reward.pairs=8", "update.pack_length=64", "reward.heldout=8"),
    "dpo": ("schedule.mode=dpo", "schedule.k=4", "dpo.pairs=8"),
}


@pytest.mark.slow
@pytest.mark.parametrize("trainer", TRAINERS)
def test_every_trainer_survives_a_kill(trainer: str, tmp_path: pathlib.Path) -> None:
    cfg = (*LORA, *TRAINERS[trainer])
    whole = run(tmp_path / "whole", *cfg)

    def kill(system, row, done):
        if done == 3:
            raise Killed

    with pytest.raises(Killed):
        run(tmp_path / "run", *cfg, hook=kill)
    again = run(tmp_path / "run", *cfg)
    assert any(note.startswith("resumed after update 2") for note in again.notes)
    assert again.comparable == whole.comparable and same_bits(
        jax.device_get(again.system.states), jax.device_get(whole.system.states)
    )
    assert all(row.get("grad_norm", 1.0) > 0 for row in whole.rows)
    tiny = load_model("tiny").params
    for learner in whole.system.learners.values():
        held = base_of(learner)
        assert fingerprint(held) == fingerprint({name: tiny[name] for name in held})
    if trainer == "reward":
        export_run(tmp_path / "run", tmp_path / "out")
        assert set(load_scalar(ModelConfig(source=str(tmp_path / "out"))).params) == set(held) | {"score"}
        export_run_adapter(tmp_path / "run", tmp_path / "adapter")
        assert "base_model.model.score.weight" in load_file(tmp_path / "adapter/adapter_model.safetensors")
    if trainer == "ppo":
        export_run(tmp_path / "run", tmp_path / "out", "critic_policy")
    if trainer == "two models":
        model, _ = load_trained(tmp_path / "run", "rubric")
        assert same_bits(model.params, whole.system.learners["rubric"].published)


@pytest.mark.slow
def test_lr_zero_changes_nothing(tmp_path: pathlib.Path) -> None:
    rows = run(tmp_path / "run", *LORA, "schedule.k=2", "optimizer.lr=0").rows
    assert all(abs(row["ratio/max"] - 1) < 1e-5 and row["kl"] < 1e-6 and row["update_norm"] == 0 for row in rows)


@pytest.mark.slow
def test_a_run_goes_on_over_its_own_base_alone(tmp_path: pathlib.Path) -> None:
    shutil.copytree(TINY, tmp_path / "model")
    cfg = (*LORA, f"policy.source={tmp_path / 'model'}", "schedule.k=2")
    run(tmp_path / "run", *cfg, stop_after=2)
    path = tmp_path / "model/model.safetensors"
    tensors = dict(load_file(path))
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1.001
    path.unlink()
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match="the frozen weights of base_policy differ") as error:
        run(tmp_path / "run", *cfg)
    assert error.value.where == "policy.source"
    with pytest.raises(UserError, match="the base of policy"):
        load_trained(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["evolm", "dpo"])
def test_the_reference_is_the_base_with_the_starting_adapter(done: Run, tmp_path: pathlib.Path, mode: str) -> None:
    """The KL, and DPO's margin, are 0 before anything moved, over an adapter that is far from zero."""
    export_run_adapter(done.folder, tmp_path / "adapter")
    cfg = (*LORA, f"lora.source={tmp_path / 'adapter'}", "schedule.k=2", *(("schedule.mode=dpo",) if mode == "dpo" else ()))
    begun = run(tmp_path / "run", *cfg)
    start = system_of(*cfg).learners["policy"].state.params
    assert same_bits(jax.device_get(start), done.params["policy"])
    if mode == "dpo":
        assert abs(begun.rows[0]["loss"] - np.log(2)) < 1e-4 and abs(begun.rows[1]["loss"] - np.log(2)) > 1e-4
        return
    assert same_bits(jax.device_get(begun.system.learners["policy"].reference), done.params["policy"])
    assert begun.rows[0]["kl"] < 1e-6 < begun.rows[1]["kl"]
    path = tmp_path / "adapter/adapter_model.safetensors"
    tensors = {name: 2 * x for name, x in load_file(path).items()}
    path.unlink()
    save_file(tensors, path)
    with pytest.raises(UserError, match=r"lora\.source"):
        run(tmp_path / "run", *cfg)


@pytest.mark.slow
def test_an_int8_judge_is_left_alone(tmp_path: pathlib.Path) -> None:
    judge = ("judge.source=tiny", "judge.protocol=json_score", "judge.weights=int8", "judge.sampling.max_new_tokens=4")
    done = run(tmp_path / "run", *LORA, "schedule.k=1", *judge)
    assert fingerprint(done.system.bench.weights["judge"]) == done.system.frozen_fingerprints["judge"]


@pytest.mark.slow
def test_it_learns(tmp_path: pathlib.Path) -> None:
    """To write more words, by adapters of rank 4 alone."""
    cfg = (*LORA, *VERIFIED, "schedule.k=16", "schedule.prompts=8", "optimizer.lr=1e-3")
    rows = run(tmp_path / "run", *cfg).rows
    first, last = (np.mean([row["reward/mean"] for row in part]) for part in (rows[:4], rows[-4:]))
    assert last > first + 0.05, (first, last)
