"""Modes and schedules: two models, model judges, orders and pair sources, verifiable and supervised runs, one's own loss."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampler_support import border_distance, full_logits
from train_support import Recorder, Run, make_batch, prints, run, same_bits, shared_programs, system_of, tiny

from coevo_jax.assemble import assemble
from coevo_jax.judges import criterion_logits
from coevo_jax.learner import make_learner
from coevo_jax.methods.context import KINDS, request_id
from coevo_jax.methods.evolm import stages
from coevo_jax.models.load import load_model
from coevo_jax.records.fingerprint import fingerprint
from coevo_jax.records.metrics import read_metrics
from coevo_jax.sampler.keys import row_key, token_uniforms
from coevo_jax.system import System

ONE_CYCLE = "schedule.cycles=1"


def watch(seen: list[dict[str, Any]]) -> Any:
    """A hook that notes the row and the fingerprints of all weights after each update."""

    def hook(system: System, row: dict[str, Any], done: int) -> None:
        frozen = {name: fingerprint(params) for name, params in system.frozen.items()}
        seen.append({"row": row, "prints": prints(system), "frozen": frozen})

    return hook


# ------------------------------------------------------------------------------------------------------ one and two models


def test_two_models_leave_each_other_alone(tmp_path: pathlib.Path) -> None:
    two = ("generator.mode=two", "schedule.cycles=2", "generator.lr=7e-4")
    start, seen = prints(system_of(*two)), list[dict[str, Any]]()
    done = run(tmp_path / "run", *two, hook=watch(seen))
    before = start
    assert before["policy"] == before["rubric"]  # both begin as the same model
    for step in seen:
        role = step["row"]["role"]
        other = {"policy": "rubric", "rubric": "policy"}[role]
        assert step["prints"][role] != before[role] and step["prints"][other] == before[other], step["row"]["step"]
        expected = 7e-4 if role == "rubric" else done.system.cfg.optimizer.lr
        assert step["row"]["lr"] == pytest.approx(expected), "each model's optimizer has its own learning rate"
        before = step["prints"]
    for learner in done.system.learners.values():
        assert fingerprint(learner.reference) == start["policy"] and learner.published is not None
    assert done.system.context.voices["rubric"].weights() is done.system.learners["rubric"].published


def test_one_model_is_moved_by_both_roles(tmp_path: pathlib.Path) -> None:
    seen: list[dict[str, Any]] = []
    done = run(tmp_path / "run", ONE_CYCLE, hook=watch(seen))
    assert list(done.system.learners) == ["policy"] and done.system.context.one_voice()
    assert len({step["prints"]["policy"] for step in seen}) == 4
    assert int(done.system.learners["policy"].state.step) == 4  # one optimizer state too


# ----------------------------------------------------------------------------------------------------------- model judges

SMALL_JUDGE = ("judge.source=tiny", "judge.sampling.max_new_tokens=48", "sampler.max_prompt=256", "update.pack_length=256")


def test_a_judge_that_writes_no_verdict_trains_nothing_and_stays(tmp_path: pathlib.Path) -> None:
    """The small world's model can't write a score: every verdict is a failure, and no failure becomes a reward."""
    seen: list[dict[str, Any]] = []
    judge = ("judge.protocol=json_score", "judge.retries=1", "schedule.k=1", ONE_CYCLE, "advantage.max_resample=0")
    done = run(tmp_path / "run", *SMALL_JUDGE, *judge, hook=watch(seen))
    start = prints(system_of(*SMALL_JUDGE, *judge))
    policy, rubric = (step["row"] for step in seen)
    assert policy["judge/failure_share"] == rubric["judge/failure_share"] == 1.0 and policy["update/skipped"] == 1.0
    assert "reward/mean" not in policy and policy["groups/failed_sample_share"] == 1.0
    assert seen[0]["prints"] == start
    assert seen[0]["frozen"] == seen[1]["frozen"] == done.system.frozen_fingerprints != {}
    rows = done.rollouts(0, "policy")
    assert rows and all(r["reward"] is None and r["judge"]["status"] in ("parse_fail", "truncated") for r in rows)
    assert all(isinstance(r["judge"]["raw"], str) and r["judge"]["raw"] for r in rows)


@pytest.mark.slow
def test_a_criterion_judge_scores_and_keeps_its_bytes(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criterion_logits, "yes_no_forms", lambda tokenizer: ([2], [57, 58, 14, 12]))  # its vocabulary lacks both
    seen: list[dict[str, Any]] = []
    judge = ("judge.protocol=criterion_logits", "judge.min_yes_no_mass=0", ONE_CYCLE, "optimizer.lr=1e-2")
    done = run(tmp_path / "run", *SMALL_JUDGE, *judge, hook=watch(seen))
    assert {step["frozen"]["judge"] for step in seen} == {done.system.frozen_fingerprints["judge"]}
    assert len({step["prints"]["policy"] for step in seen}) > 1  # the policy moved, from the same file
    assert done.system.learners["policy"].spec == done.system.context.judge.instrument.engine.spec  # type: ignore[union-attr]
    for row in done.rows:
        assert row["judge/failure_share"] < 1 and 0 <= row["judge/score/mean"] <= 1
        assert row["judge/yes_no_mass/mean"] > 0 and row["judge/criterion_spread"] >= 0


def test_a_changed_judge_is_found_out(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(criterion_logits, "yes_no_forms", lambda tokenizer: ([2], [57, 58, 14, 12]))
    judge = ("judge.protocol=criterion_logits", "judge.min_yes_no_mass=0", "schedule.k=1", ONE_CYCLE)

    def meddle(system: System, row: dict[str, Any], done: int) -> None:
        held = system.context.judge.instrument  # type: ignore[union-attr]
        other = jax.tree.map(lambda x: x + np.float32(1e-3), held.params)
        system.context.judge = dataclasses.replace(system.context.judge, instrument=dataclasses.replace(held, params=other))  # type: ignore

    with pytest.raises(RuntimeError, match="the frozen judge changed"):
        run(tmp_path / "run", *SMALL_JUDGE, *judge, hook=meddle)
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [0]  # nothing learnt from its verdicts


# ------------------------------------------------------------------------------------------------------ published weights


def copied(tree: Any) -> Any:
    """Equal values in other arrays, which no donation takes."""
    return jax.tree.map(jnp.copy, tree)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_generation_begins_with_the_trainers_weights_or_not_at_all(dtype: str) -> None:
    cfg = tiny(f"policy.dtype={dtype}")
    model = load_model(cfg.policy)
    learner = make_learner("policy", cfg, model)
    with pytest.raises(RuntimeError, match="no weights were published"):
        learner.weights()
    learner.publish()
    good = learner.weights()
    assert good is learner.published and {str(x.dtype) for x in jax.tree.leaves(good)} == {dtype}
    learner.published = copied(good)
    learner.weights()  # other arrays, the same values
    learner.published = {**good, "final_norm": good["final_norm"].at[3].multiply(1.01)}
    with pytest.raises(RuntimeError, match="policy: the sampler's weights are not the trainer's"):
        learner.weights()
    learner.published = good
    learner.weights()
    moved = {**learner.state.params, "embed": learner.state.params["embed"].at[2, 1].add(0.1)}
    learner.state = learner.state.replace(params=moved)  # the trainer went on, and nothing was published
    with pytest.raises(RuntimeError, match="not the trainer's"):
        learner.weights()
    learner.publish()
    learner.weights()


def test_a_stale_publication_fails_the_run(tmp_path: pathlib.Path) -> None:
    first: list[Any] = []

    def stale(system: System, row: dict[str, Any], done: int) -> None:
        learner = system.learners["policy"]
        if done == 1:
            first.append(copied(learner.published))
        else:
            learner.published = first[0]

    with pytest.raises(RuntimeError, match=r"not the trainer's: it holds .* after 2 updates"):
        run(tmp_path / "run", ONE_CYCLE, hook=stale)
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [0, 1]


def test_a_wrong_last_publication_fails_the_run_too(tmp_path: pathlib.Path) -> None:
    def wrong(system: System, row: dict[str, Any], done: int) -> None:
        learner = system.learners["policy"]
        if done == 4:
            learner.published = jax.tree.map(lambda x: x * np.float32(1.01), learner.published)

    with pytest.raises(RuntimeError, match=r"not the trainer's: it holds .* after 4 updates"):
        run(tmp_path / "run", ONE_CYCLE, hook=wrong)


# ---------------------------------------------------------------------------------------------------- orders and pair sources


def test_generator_first(tmp_path: pathlib.Path) -> None:
    done = run(tmp_path / "run", "schedule.order=generator_first", "pairs.temporal=0", "pairs.inferred=1", "schedule.cycles=2")
    assert done.finished and [row["role"] for row in done.rows] == ["rubric"] * 4 + ["policy"] * 4
    assert all(row["pairs/share_inferred"] == 1.0 and row["update/skipped"] == 0 for row in done.rows[:4])
    for row in done.rollouts(0, "rubric"):
        assert row["pair"]["source"] == "inferred" and row["pair"]["gap"] is None


def test_policy_only(tmp_path: pathlib.Path) -> None:
    done = run(tmp_path / "run", "schedule.order=policy_only", "schedule.cycles=2")
    assert [row["role"] for row in done.rows] == ["policy"] * 4 and not done.rollouts(role="rubric")


def test_generator_only_on_conditioned_pairs(tmp_path: pathlib.Path) -> None:
    done = run(tmp_path / "run", "schedule.order=generator_only", "pairs.temporal=0", "pairs.conditioned=1", "schedule.cycles=2")
    assert [row["role"] for row in done.rows] == ["rubric"] * 4
    assert all(row["pairs/share_conditioned"] == 1.0 for row in done.rows)


def test_a_frozen_generator_is_never_trained() -> None:
    assert {stage.role for stage in stages(tiny("generator.frozen=true"))} == {"policy"}


def test_a_frozen_generator_has_no_optimizer_and_stays(tmp_path: pathlib.Path) -> None:
    done = run(tmp_path / "run", "generator.mode=two", "generator.frozen=true", ONE_CYCLE)
    assert list(done.system.learners) == ["policy"] and list(done.system.frozen) == ["rubric"]
    start = done.system.frozen_fingerprints["rubric"]
    assert fingerprint(done.system.context.voices["rubric"].weights()) == start != prints(done.system)["policy"]
    held = done.system.held["rubric"]
    done.system.held["rubric"] = {**held, "final_norm": held["final_norm"] * np.float32(1.5)}
    with pytest.raises(RuntimeError, match="the frozen rubric changed"):
        done.system.check_frozen()


@pytest.mark.parametrize(
    "overrides",
    [("generator.mode=two", "generator.frozen=true", "warmup.updates=1"), ("schedule.mode=sft", "warmup.updates=1")],
)
def test_weights_that_the_loop_does_not_train_need_no_length_of_a_cosine(overrides: tuple[str, ...]) -> None:
    with shared_programs():
        system = assemble(tiny("optimizer.schedule=cosine", *overrides), Recorder(), warm_up=False)
    untrained = system.learners[list(system.learners)[-1]]
    assert float(untrained.optimizer.lr(0)) == pytest.approx(system.cfg.optimizer.lr)


@pytest.mark.parametrize("source", ["inferred", "conditioned"])
def test_a_prompt_of_a_pair_that_is_too_long_makes_no_pair(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    system = system_of("pairs.temporal=0", f"pairs.{source}=1", "schedule.order=generator_only", "advantage.max_resample=0")
    text = "write 3 words" + " with owl" * 80
    monkeypatch.setattr(system.context, "text", lambda tokens, role="policy": text)
    batch = make_batch(system, "rubric", 0, 0)
    assert batch.metrics[f"pairs/{source}_prompt_too_long"] == 4 and batch.metrics["pairs/missing_share"] == 1.0
    assert batch.samples == []


def test_a_mixture_of_pair_sources(tmp_path: pathlib.Path) -> None:
    done = run(tmp_path / "run", "pairs.inferred=1", "pairs.conditioned=1", "schedule.cycles=3")
    names, totals = ("temporal", "inferred", "conditioned"), dict[str, float]()
    for row in done.rows:
        if row["role"] == "rubric":
            shares = {name: row[f"pairs/share_{name}"] for name in names}
            assert sum(shares.values()) == pytest.approx(1.0)
            totals = {name: totals.get(name, 0.0) + share for name, share in shares.items()}
            pairs = {(r["slot"], r["group"]): r["pair"]["source"] for r in done.rollouts(row["step"])}
            found = {name: list(pairs.values()).count(name) / len(pairs) for name in names}
            assert found == pytest.approx(shares)
    assert all(totals[name] > 0 for name in names)


def test_a_conditioned_answer_saw_a_rubric_and_wins(tmp_path: pathlib.Path) -> None:
    system = system_of("pairs.temporal=0", "pairs.conditioned=1", "schedule.order=generator_only")
    prompts: list[tuple[str, str]] = []
    engine = system.engines[0]
    generate = engine.generate
    try:
        engine.generate = lambda params, asked, **kw: (  # type: ignore[method-assign]
            prompts.extend((r.request >> 52, system.context.raw(r.prompt, "policy")) for r in asked),
            generate(params, asked, **kw),
        )[1]
        batch = make_batch(system, "rubric", 0, 0)
    finally:
        del engine.generate
    accepted = [text for kind, text in prompts if kind == KINDS["accepted"]]
    rejected = [text for kind, text in prompts if kind == KINDS["rejected"]]
    assert len(accepted) == len(rejected) == 4 and batch.rollouts
    assert all(len(a) > len(r) and r in a for a, r in zip(accepted, rejected))


# ------------------------------------------------------------------------------------------------------- verifiable and sft


def write_module(folder: pathlib.Path, name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A researcher's own file in the folder that they work in."""
    (folder / f"{name}.py").write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p != ""])
    monkeypatch.delitem(sys.modules, name, raising=False)


VERIFIER = '''
"""My own reward: the share of the wanted number of words."""


def score(record, text):
    assert record["prompt"].startswith("write")
    return min(len(text.split()), 5) / 5
'''


def test_verifiable_by_a_dotted_path(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_module(tmp_path, "my_reward", VERIFIER, monkeypatch)
    done = run(
        tmp_path / "run", "schedule.mode=verifiable", "schedule.verifier=my_reward:score", "schedule.cycles=3", "schedule.k=4"
    )
    assert [row["role"] for row in done.rows] == ["policy"] * 12 and done.system.context.judge is None
    for row in done.rollouts():
        assert row["reward"] == row["parts"]["verifier"] == min(len(row["completion"].split()), 5) / 5
    assert all(row["reward/verifier/mean"] == row["reward/mean"] for row in done.rows)
    assert sum(r["reward/mean"] for r in done.rows[-4:]) > sum(r["reward/mean"] for r in done.rows[:4])  # it learns to write more


def test_verifiable_by_reasoning_gym(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("reasoning_gym")
    from coevo_jax.learn.verifiers import reasoning_gym

    task = "data.prompts=reasoning_gym:letter_counting?size=40"
    done = run(tmp_path / "run", "schedule.mode=verifiable", task, ONE_CYCLE, "advantage.drop_zero_variance=false")
    records = {r["id"]: r for r in done.system.context.streams["policy"].prompts.records}
    rows = done.rollouts()
    assert done.finished and len(rows) >= 32 and all(r["record"].startswith("letter_counting-0-") for r in rows)
    assert all(r["reward"] == reasoning_gym(records[r["record"]], r["completion"]) for r in rows)


def test_sft_is_a_mode_of_its_own(tmp_path: pathlib.Path) -> None:
    done = run(tmp_path / "run", "schedule.mode=sft", "warmup.updates=8", "warmup.lr=1e-3", "warmup.batch=16")
    assert [row["stage"] for row in done.rows] == ["warmup"] * 8
    assert done.rows[-1]["loss"] < done.rows[0]["loss"] and all(row["lr"] == pytest.approx(1e-3) for row in done.rows)
    assert done.system.learners["policy"].reference is None and not done.rollouts()


def test_the_loop_after_a_warm_up_has_its_own_optimizer_and_reference(tmp_path: pathlib.Path) -> None:
    seen: list[Any] = []

    def hook(system: System, row: dict[str, Any], done: int) -> None:
        learner = system.learners["policy"]
        seen.append((row, int(learner.state.step), prints(system)["policy"], learner.reference))

    done = run(tmp_path / "run", "warmup.updates=2", "warmup.batch=8", ONE_CYCLE, hook=hook)
    assert [row["stage"] for row, *_ in seen] == ["warmup", "warmup", "policy", "policy", "rubric", "rubric"]
    assert [step for _, step, *_ in seen] == [1, 2, 1, 2, 3, 4]
    assert seen[1][3] is None and fingerprint(done.system.learners["policy"].reference) == seen[1][2]
    assert abs(seen[2][0]["kl"]) < 1e-6


# -------------------------------------------------------------------------------------------------------- a researcher's own

OWN_LOSS = '''
"""My own loss: REINFORCE with the reward's sign alone, a mean over samples."""

import jax.numpy as jnp

from coevo_jax.learn.losses import segment_means, token_mean


def signed(logp, entropy, batch, denominators, cfg):
    loss = segment_means(-jnp.sign(batch.advantage) * logp, batch).sum() / denominators.sequences
    return loss, {"entropy": token_mean(entropy, batch, denominators), "my_metric": jnp.float32(cfg.clip_low)}
'''


def test_an_own_loss_by_config_alone(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_module(tmp_path, "my_loss", OWN_LOSS, monkeypatch)
    own = run(tmp_path / "own", "loss.function=my_loss:signed", "loss.kl_weight=0", "schedule.k=1", ONE_CYCLE)
    plain = run(tmp_path / "plain", "schedule.k=1", ONE_CYCLE)
    assert own.finished and all("my_metric" in row and "ratio/mean" not in row for row in own.rows)
    assert not same_bits(own.params, plain.params)
    assert own.rollouts(0) == plain.rollouts(0)  # the same first batch; only the loss is another
    assert own.system.learners["policy"].reference is None  # no reference pass without a KL weight
    # its value, in NumPy, from the sampler's own log-probs (equal to the trainer's to 1e-4)
    samples = make_batch(system_of("schedule.k=1", ONE_CYCLE), "policy", 0, 0).samples
    wanted = np.mean([np.mean(-np.sign(s.advantage) * s.sampler_logp) for s in samples])
    assert own.rows[0]["loss"] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("override", ["advantage.kind=group_std", "advantage.kind=leave_one_out"])
def test_choices_of_advantage_run(override: str, tmp_path: pathlib.Path) -> None:
    done = run(tmp_path / "run", override, "schedule.k=1", ONE_CYCLE)
    assert done.finished and all(row["update_norm"] > 0 for row in done.rows)


def test_inner_iterations_leave_the_first_policy(tmp_path: pathlib.Path) -> None:
    done = run(tmp_path / "run", "update.inner_iterations=3", "optimizer.lr=3e-3", "schedule.k=1", ONE_CYCLE)
    assert all(abs(row["ratio/max"] - 1) > 1e-3 for row in done.rows)  # the last pass is off the policy that drew
    assert int(done.system.learners["policy"].state.step) == 6


# -------------------------------------------------------------------------------------------------------------- slots, dtype


def border_gap(system: System, ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """How near the noise of the first differing token was to the border between two tokens, in probability."""
    a, b = ours["completion_ids"], theirs["completion_ids"]
    at = next(i for i, (x, y) in enumerate(zip(a, b)) if x != y)
    cfg, learner = system.cfg, system.learners["policy"]
    kind = {"policy": "answer", "rubric": "rubric"}[ours["role"]]
    identity = request_id(kind, ours["slot"], attempt=ours["group"] // cfg.schedule.prompts)
    key = row_key(cfg.seed, ours["role"], ours["update"], identity, ours["sample"])
    logits = full_logits(learner.published, learner.spec, np.asarray([*ours["prompt_ids"], *a[:at]], np.int32))[-1]
    return border_distance(logits, 1.0, np.asarray(token_uniforms(jnp.asarray(key)[None], jnp.asarray([at], jnp.int32)))[0])


@pytest.mark.slow
def test_another_number_of_slots_draws_the_same(tmp_path: pathlib.Path) -> None:
    """The same prompts and noise whatever the slots; with lr = 0 rounding does not pile up: equal draws but for near-ties."""
    still = ("optimizer.lr=0", ONE_CYCLE)
    ours = run(tmp_path / "ours", *still)
    theirs = run(tmp_path / "theirs", *still, "sampler.slots=5")
    a, b = ours.rollouts(), theirs.rollouts()
    assert [(r["prompt_ids"], r["group"], r["sample"]) for r in a] == [(r["prompt_ids"], r["group"], r["sample"]) for r in b]
    differing = [(x, y) for x, y in zip(a, b) if x["completion_ids"] != y["completion_ids"]]
    assert len(differing) <= len(a) // 20
    assert all(border_gap(ours.system, x, y) < 1e-4 for x, y in differing)


@pytest.mark.slow
def test_bfloat16_sampling_from_float32_masters(tmp_path: pathlib.Path) -> None:
    seen: list[tuple[str, str]] = []

    def hook(system: System, row: dict[str, Any], done: int) -> None:
        learner = system.learners["policy"]
        cast = jax.tree.map(lambda x: x.astype("bfloat16"), learner.state.params)
        assert {str(x.dtype) for x in jax.tree.leaves(learner.state.params)} == {"float32"}
        seen.append((fingerprint(learner.published), fingerprint(cast)))

    done: Run = run(tmp_path / "run", "policy.dtype=bfloat16", "schedule.k=1", ONE_CYCLE, hook=hook)
    assert done.finished and all(a == b for a, b in seen) and seen[0] != seen[1]
    assert all(0 < row["logp_gap/max"] < 0.2 for row in done.rows)
