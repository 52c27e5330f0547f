"""DPO on given pairs and iterated DPO as modes of the loop: references, what is kept, kill and resume, and that they teach."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import numpy as np
import pytest
from train_support import files_of, run, same_bits, system_of, tiny

from coevo_jax.config import Experiment
from coevo_jax.config.scale import shrink
from coevo_jax.config.validate import validate
from coevo_jax.data import read_prompts
from coevo_jax.dry_run import dry_run, memory
from coevo_jax.errors import UserError
from coevo_jax.judges.world import read_question, true_quality, write_rubric
from coevo_jax.methods import preferred
from coevo_jax.methods.preferred import PairLabel
from coevo_jax.methods.stage import Step
from coevo_jax.records import reference_file
from coevo_jax.records.facts import Facts

LN2 = float(np.float32(np.log(2.0)))
DPO = ("schedule.mode=dpo", "schedule.cycles=2", "schedule.k=2", "dpo.pairs=4", "dpo.heldout=16", "dpo.eval_every=2")


class Killed(Exception):
    pass


def kill_after(update):
    def hook(system, row, done):
        if done == update:
            raise Killed

    return hook


# ------------------------------------------------------------------------------------------------------------ given pairs


def test_a_run_begins_at_ln_2_and_goes_on_after_a_kill(tmp_path: pathlib.Path) -> None:
    whole = run(tmp_path / "whole", *DPO)
    assert whole.finished and len(whole.rows) == 4
    first = whole.rows[0]
    assert first["loss"] == pytest.approx(LN2, abs=1e-6) and first["heldout/loss"] == pytest.approx(LN2, abs=1e-6)
    assert abs(first["rewards/margins"]) < 1e-6 and whole.rows[1]["rewards/margins"] != 0
    assert [("heldout/rewards/accuracies" in row) for row in whole.rows] == [True, False, True, False]
    assert {"rewards/chosen", "rewards/rejected", "rewards/accuracies", "logps/chosen", "logps/rejected", "entropy"} <= set(first)
    stream = whole.system.context.streams["dpo"].prompts
    assert not {r["prompt"] for r in stream.heldout} & {r["prompt"] for r in stream.records}
    assert all(learner.reference is None for learner in whole.system.learners.values())
    kept = (whole.folder / reference_file.NAME).read_bytes()
    for update in (1, 2, 3):  # inside a stage, at its end (saved), inside the next
        folder = tmp_path / f"killed_{update}"
        with pytest.raises(Killed):
            run(folder, *DPO, hook=kill_after(update))
        again = run(folder, *DPO)
        assert again.comparable == whole.comparable and same_bits(again.params, whole.params), update
        assert (folder / reference_file.NAME).read_bytes() == kept


def test_the_reference_is_bound_to_model_data_and_prompt(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run" / reference_file.NAME
    with pytest.raises(Killed):
        run(tmp_path / "run", *DPO, hook=kill_after(3))
    whole, lines = path.read_text(), path.read_text().splitlines()
    path.write_text("\n".join([json.dumps({"hash": "0" * 16, "pairs": len(lines) - 1}), *lines[1:]]) + "\n")
    before = files_of(tmp_path / "run" / "checkpoints")
    with pytest.raises(UserError, match="are of another model, data set, tokenizer or prompt"):
        run(tmp_path / "run", *DPO)
    path.write_text("\n".join(lines[:-3]) + "\n")
    with pytest.raises(UserError, match=r"3 of .* are missing, and 2 updates changed the weights"):
        run(tmp_path / "run", *DPO)
    assert files_of(tmp_path / "run" / "checkpoints") == before
    path.write_text(whole)
    assert run(tmp_path / "run", *DPO).finished
    system = system_of(*DPO)
    hashes = {hash_of(system, weights="a"), hash_of(system, weights="b"), hash_of(system_of(*DPO, "dpo.heldout=15"), "a")}
    cfg = tiny(*DPO)
    system.context.cfg = dataclasses.replace(cfg, policy=dataclasses.replace(cfg.policy, system_prompt="Be short."))
    assert len(hashes | {hash_of(system, weights="a")}) == 4


def hash_of(system, weights):
    from coevo_jax.methods.dpo import reference_hash

    return reference_hash(system.context, weights, system.context.streams["dpo"].prompts)


def test_a_kill_while_references_are_computed_costs_a_chunk(tmp_path: pathlib.Path) -> None:
    whole = run(tmp_path / "whole", *DPO)
    path = tmp_path / "run" / reference_file.NAME
    path.parent.mkdir()
    text = (whole.folder / reference_file.NAME).read_text()
    path.write_text(text[: text.index("\n", 600) + 20])  # a few whole lines and one that was cut off
    (path.parent / "config.json").write_text((whole.folder / "config.json").read_text())
    again = run(tmp_path / "run", *DPO)
    assert again.finished and path.read_text().count("\n") == text.count("\n")
    known = reference_file.read(path, json.loads(text.splitlines()[0])["hash"])
    wanted = reference_file.read(whole.folder / reference_file.NAME, json.loads(text.splitlines()[0])["hash"])
    assert known is not None and wanted is not None and known.keys() == wanted.keys()
    np.testing.assert_allclose([known[k] for k in wanted], list(wanted.values()), atol=1e-4)


def test_pairs_that_are_too_long_go_whole(tmp_path: pathlib.Path) -> None:
    rows = [{"id": f"p{i}", "prompt": "write words", "chosen": "owl " * (2 + 40 * (i == 1)), "rejected": "fox"} for i in range(3)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    data = ("schedule.mode=dpo", f"dpo.data={path}", "dpo.pairs=2", "dpo.max_tokens=30")
    assert [r["id"] for r in system_of(*data).context.streams["dpo"].prompts.records] == ["p0", "p2"]
    with pytest.raises(UserError, match="of the pair 'p1' has"):
        system_of(*data, "data.over_limit=refuse")


@pytest.mark.slow
def test_given_pairs_teach_their_ordering(tmp_path: pathlib.Path) -> None:
    """Held-out pairs of the small world, which its rules order."""
    held = ("dpo.heldout=60", "dpo.eval_every=15")
    cfg = ("schedule.mode=dpo", "schedule.cycles=1", "schedule.k=16", "dpo.pairs=32", "optimizer.lr=3e-4", *held)
    rows = run(tmp_path / "run", *cfg).rows
    assert rows[15]["heldout/rewards/accuracies"] > 0.65, rows[15]
    assert rows[15]["heldout/loss"] < LN2 - 0.02


# ---------------------------------------------------------------------------------------------------------------- iterated


ITERATED = (
    "schedule.mode=iterated_dpo", "schedule.cycles=2", "schedule.k=2", "schedule.prompts=4", "dpo.pairs=4", "dpo.compare=1",
    "rubric.source=data", "judge.pairs=pairwise", "run.save_every=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> str:
    """The small world's prompts, each with the rubric that lists what it asks for: the oracle then knows the true quality."""
    cfg = tiny().data
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    with open(path, "w") as file:
        for record in read_prompts(cfg).records:
            props = read_question(record["prompt"])
            total = sum(p.weight for p in props)
            rubric = json.loads(write_rubric([(p.criterion, p.weight / total) for p in props]))
            file.write(json.dumps({"id": record["id"], "prompt": record["prompt"], "rubric": rubric}) + "\n")
    return f"data.prompts={path}"


@pytest.mark.slow
def test_iterations_label_and_train_and_go_on_after_a_kill(tmp_path: pathlib.Path, questions: str) -> None:
    cfg = (*ITERATED, questions)
    whole = run(tmp_path / "whole", *cfg)
    assert whole.finished
    stages = [(row["cycle"], row["stage"]) for row in whole.rows]
    assert stages == [(c, s) for c in (0, 1) for s in ("label", "label", "dpo", "dpo")] + [(2, "compare")]
    labelled = [row for row in whole.rows if row["stage"] == "label"]
    assert all(row["update/skipped"] == 1.0 and row["pairs/drawn"] == 4 for row in labelled)
    assert sum(row["pairs/kept"] for row in labelled) > 0
    assert [("policy/win_rate_previous" in row) for row in whole.rows] == [r["step"] in (4, 8) for r in whole.rows]
    for cycle in (0, 1):  # the reference is the policy at the iteration's start
        trained = [row for row in whole.rows if (row["cycle"], row["stage"]) == (cycle, "dpo")]
        kept = sum(row["pairs/kept"] for row in labelled if row["cycle"] == cycle)
        assert trained[0]["loss"] == pytest.approx(LN2, abs=1e-6)
        assert sum(row["pairs/trained"] for row in trained) == kept
        assert [row["update/skipped"] for row in trained] == [float(4 * i >= kept) for i in range(2)]
    check_records(whole)
    for update in (1, 2, 3, 4, 6):
        folder = tmp_path / f"killed_{update}"
        with pytest.raises(Killed):
            run(folder, *cfg, hook=kill_after(update))
        again = run(folder, *cfg)
        assert again.comparable == whole.comparable and same_bits(again.params, whole.params), update


def check_records(done) -> None:
    """What is stored is what was sampled, and the better answer by the true quality."""
    rollouts = {(r["update"], r["slot"], r["pair"]): r for r in done.rollouts() if r["what"] == "labelled"}
    store = done.system.context.stores["policy_pairs"]
    records = [(slot, record) for slot in range(4) for record in store.of(slot)]
    assert records
    for slot, record in records:
        row = rollouts[record["update"], slot, 0]
        own = row["forward"] == "A"
        chosen, rejected = row["completion_ids"][not own], row["completion_ids"][own]
        assert (record["chosen"], record["rejected"], record["prompt"]) == (chosen, rejected, row["prompt_ids"])
        assert chosen[-1] in done.system.context.voices["policy"].tokenizer.stop_ids
        better, worse = row["answers"][not own], row["answers"][own]
        assert true_quality(row["question"], better) > true_quality(row["question"], worse)
        assert record["rubric"] and record["seed"] == 1 and record["agree"] and record["policy_updates"] == 2
        assert record["judge"] == "oracle" and {"judge_raw_forward", "judge_raw_reverse", "reference"} <= set(record)


@pytest.mark.parametrize(("says", "kept"), [(("A", "A"), 0), (("A", "B"), 4), ((None, "B"), 0), (("tie", "tie"), 0)])
def test_only_pairs_on_which_both_orders_agree_are_kept(questions: str, says, kept) -> None:
    """A judge that always says A keeps nothing; one that failed neither."""
    system = system_of(*ITERATED, questions, "dpo.compare=0")

    def label(ctx, step, items, facts):
        return [PairLabel(*says, note={"judge": "mine"}) for _ in items]

    batch = preferred.label_batch(system.context, Step(0, 0, 0, "policy"), label, "policy")
    assert batch.samples == [] and len(system.context.stores["policy_pairs"]) == kept
    assert batch.metrics["pairs/keep_rate"] == kept / 4
    again = preferred.preferred_batch(system.context, Step(2, 0, 0, "policy"), "policy")
    assert len(again.samples) == min(kept, 4)
    if kept:
        assert again.samples[0].reference[0] < 0 and {r["judge"] for r in system.context.stores["policy_pairs"].of(0)} == {"mine"}


def test_a_pass_meets_every_pair_once_and_further_ones_in_other_orders() -> None:
    for N in (1, 5, 8):
        walk = [preferred._walk(1, "policy", 0, at, N) for at in range(3 * N)]
        assert all(sorted(walk[i * N : (i + 1) * N]) == list(range(N)) for i in range(3))
    assert [preferred._walk(1, "policy", 0, i, 8) for i in range(8)] != [preferred._walk(1, "policy", 1, i, 8) for i in range(8)]


def test_answers_that_are_equal_or_cut_are_not_judged(questions: str) -> None:
    asked = []

    def label(ctx, step, items, facts: Facts):
        asked.extend(items)
        return [PairLabel("A", "B") for _ in items]

    for extra, most in (((), 0), (("dpo.keep_truncated=true",), 4)):
        asked.clear()
        system = system_of(*ITERATED, questions, "answer.max_new_tokens=1", *extra)
        batch = preferred.label_batch(system.context, Step(0, 0, 0, "policy"), label, "policy")
        assert batch.metrics["pairs/truncated_share"] > 0.5 and len(asked) <= most
        assert all(item.first != item.second for item in asked)


def test_rubrics_come_from_a_frozen_generator(tmp_path: pathlib.Path) -> None:
    """And a judge of scores labels without an order."""
    cfg = ("schedule.mode=iterated_dpo", "schedule.cycles=1", "schedule.k=1", "dpo.pairs=4", "generator.mode=two")
    done = run(tmp_path / "run", *cfg)
    assert done.finished and set(done.system.learners) == {"policy"} and "rubric" in done.system.held
    assert "rubric/valid_share" in done.rows[0] and done.rows[0]["judge/order_flip_share"] == 0.0
    assert all(row["rubric"] or row["forward"] is None for row in done.rollouts())
    assert not any("reference" in name for name in memory(done.system))


@pytest.mark.slow
def test_iterations_raise_the_true_quality(tmp_path: pathlib.Path, questions: str) -> None:
    cfg = (
        "schedule.mode=iterated_dpo", "schedule.cycles=3", "schedule.k=4", "schedule.prompts=16", "dpo.pairs=16",
        "rubric.source=data", "judge.pairs=pairwise", questions, "optimizer.lr=3e-4", "dpo.compare=2",
    )  # fmt: skip
    done = run(tmp_path / "run", *cfg)
    quality = {}
    for row in done.rollouts():
        if row["what"] == "labelled":
            quality.setdefault(row["cycle"], []).extend(true_quality(row["question"], a) for a in row["answers"])
    means = [float(np.mean(quality[cycle])) for cycle in sorted(quality)]
    assert means[2] > means[0] + 0.05, means
    wins = [row["policy/win_rate_previous"] for row in done.rows if "policy/win_rate_previous" in row]
    assert np.mean(wins) > 0.5, wins


# ------------------------------------------------------------------------------------------------------------------ config


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (["dpo.beta=0.5"], "settings of `dpo` would be ignored"),
        ([*DPO, "dpo.beta=0"], "nothing would hold the policy"),
        ([*DPO, "dpo.loss=dpo"], "unknown choice"),
        ([*DPO, "dpo.loss=robust"], "without wrong labels"),
        ([*DPO, "dpo.loss=ipo", "dpo.label_smoothing=0.1"], "would be ignored: dpo.loss=ipo"),
        ([*DPO, "dpo.label_smoothing=0.5"], "out of range"),
        ([*DPO, "dpo.sft_weight=-1"], "out of range"),
        ([*DPO, "dpo.compare=1"], "dpo.compare=1 would be ignored"),
        ([*DPO, "warmup.updates=1"], "trains one policy on given pairs"),
        ([*DPO, "update.rows_per_micro=1"], "may hold no pair"),
        ([*DPO, "dpo.max_tokens=999"], "above update.pack_length"),
        ([*DPO, "update.inner_iterations=2"], "would be ignored"),
        ([*ITERATED, "dpo.heldout=3"], "dpo.heldout=3 would be ignored"),
        ([*ITERATED, "dpo.max_tokens=30"], "dpo.max_tokens=30 would be ignored"),
        ([*ITERATED, "dpo.answers=3"], "without a partner"),
        ([*ITERATED, "dpo.compare=3"], "above schedule.k=2"),
        ([*ITERATED, "rubric.source=generator"], "would write the rubrics of its labels"),
        ([*ITERATED, "rubric.source=none"], "reads a rubric"),
        ([*ITERATED, "judge.order=first"], "labels need both orders"),
        ([*ITERATED, "optimizer.schedule=cosine"], "would end early"),
        ([*ITERATED, "sampler.max_new=8"], "answer.max_new_tokens"),
    ],
)
def test_refused(overrides, what) -> None:
    with pytest.raises(UserError, match=what):
        tiny(*overrides)


def test_both_modes_shrink_and_show_themselves(capsys, questions: str) -> None:
    for overrides in (DPO, (*ITERATED, questions)):
        small: Experiment = shrink(tiny(*overrides))
        validate(small)
        assert small.dpo.pairs <= 4 and small.schedule.mode == tiny(*overrides).schedule.mode
    dry_run(tiny(*DPO))
    shown = capsys.readouterr().out
    assert (
        "prompt and chosen answer" in shown
        and "4 pairs = 8 conversations" in shown
        and "reference" not in shown.split("== batch")[1]
    )
    dry_run(tiny(*ITERATED, questions))
    assert "judge prompt" in capsys.readouterr().out
