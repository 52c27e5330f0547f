"""Whole runs with several policies, a curriculum of judges, a panel, frozen policies and data pairs; stopped and resumed."""

from __future__ import annotations

import gc
import pathlib
import weakref
from typing import Any

import jax
import pytest
from test_train_resume import assert_same
from train_support import Run, run, same_bits, system_of

from coevo_jax.config import ModelConfig
from coevo_jax.errors import UserError
from coevo_jax.judges import criterion_logits
from coevo_jax.models.load import load_model, save_orbax
from coevo_jax.records.fingerprint import fingerprint
from coevo_jax.system import System
from coevo_jax.trained import load, load_trained

pytestmark = pytest.mark.slow

ROTATION = ("policies.0.source=tiny", "generator.mode=two", "schedule.cycles=2", "run.save_every=3")
MIXTURE = (
    "pairs.frozen=1", "pairs.dataset=1", "pairs.data=tiny", "pairs.frozen_models.0.source=tiny",
    "pairs.frozen_models.1.source=tiny", "schedule.cycles=2", "run.save_every=3",
)  # fmt: skip
CRITERIA = ("judge.protocol=criterion_logits", "judge.source=tiny", "judge.min_yes_no_mass=0", "sampler.max_prompt=256")


@pytest.fixture(scope="module")
def rotation(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tmp_path_factory.mktemp("rotation") / "run", *ROTATION)


def test_policies_rotate_and_each_ages_by_its_own_updates(rotation: Run) -> None:
    rows = [(row["stage"], row["policy"], row["policy_updates"]) for row in rotation.rows]
    assert rows == [
        *(("policy", "policy", i) for i in (0, 1)), *(("policy_1", "policy_1", i) for i in (0, 1)),
        *(("rubric", "policy", 2),) * 2,
        *(("policy", "policy", i) for i in (2, 3)), *(("policy_1", "policy_1", i) for i in (2, 3)),
        *(("rubric", "policy_1", 4),) * 2,
    ]  # fmt: skip
    prints = {name: fingerprint(learner.state.params) for name, learner in rotation.system.learners.items()}
    assert len(set(prints.values())) == 3  # all began alike
    for role in ("policy", "policy_1", "rubric"):
        assert {row["role"] for row in rotation.rollouts(role=role)} == {role}
    answers = {u: {tuple(r["completion_ids"]) for r in rotation.rollouts(u)} for u in (2, 3, 8, 9)}  # those of policy_1
    for row in rotation.rollouts(10, "rubric"):
        made = [2, 3, 8, 9][4 - row["pair"]["gap"]]
        assert tuple(row["pair"]["rejected_ids"]) in answers[made]


@pytest.mark.parametrize("stop_after", [1, 2, 3, 5, 6, 8, 10, 11])
def test_rotation_resumes_exactly(stop_after: int, rotation: Run, tmp_path: pathlib.Path) -> None:
    assert not run(tmp_path / "run", *ROTATION, stop_after=stop_after).finished
    assert_same(run(tmp_path / "run", *ROTATION), rotation)


def test_the_first_of_two_policies_may_be_the_generator(tmp_path: pathlib.Path) -> None:
    single = ("policies.0.source=tiny", "schedule.cycles=2", "schedule.k=1", "run.save_every=1")
    whole = run(tmp_path / "whole", *single)
    assert set(whole.system.learners) == {"policy", "policy_1"}
    assert {name: int(learner.state.step) for name, learner in whole.system.learners.items()} == {"policy": 4, "policy_1": 2}
    assert [row["policy"] for row in whole.rows if row["role"] == "rubric"] == ["policy", "policy_1"]
    run(tmp_path / "run", *single, stop_after=5)
    assert_same(run(tmp_path / "run", *single), whole)


def test_pairs_from_elsewhere_resume_exactly(tmp_path: pathlib.Path) -> None:
    whole = run(tmp_path / "whole", *MIXTURE)
    shares = [name for name in ("temporal", "frozen", "dataset") if any(row.get(f"pairs/share_{name}") for row in whole.rows)]
    assert shares == ["temporal", "frozen", "dataset"]
    run(tmp_path / "run", *MIXTURE, stop_after=3)
    assert_same(run(tmp_path / "run", *MIXTURE), whole)


# ---------------------------------------------------------------------------------------------------------------- transfer


def test_a_frozen_generator_of_another_run_writes_for_another_policy(tmp_path: pathlib.Path) -> None:
    """Cross-policy transfer: what one run's generator has learnt judges the answers of a policy that never met it."""
    first = run(tmp_path / "first", "generator.mode=two", "schedule.cycles=2", "schedule.k=1", "run.save_every=1", "run.keep=9")
    transfer = (
        "generator.mode=two", "generator.frozen=true", f"generator.source=run:{tmp_path / 'first'}",
        "schedule.order=policy_only", "schedule.cycles=2", "run.save_every=1",
    )  # fmt: skip
    whole = run(tmp_path / "whole", *transfer)
    held = whole.system.frozen["rubric"]
    assert same_bits(held, first.params["rubric"]) and not same_bits(held, whole.params["policy"])
    assert list(whole.system.learners) == ["policy"] and [row["role"] for row in whole.rows] == ["policy"] * 4
    run(tmp_path / "run", *transfer, stop_after=2)
    assert_same(run(tmp_path / "run", *transfer), whole)
    # Other weights, and those of an earlier update: after the third one of the run both had moved once or twice.
    policy, _ = load_trained(tmp_path / "first", "policy")
    assert same_bits(policy.params, first.params["policy"])
    early = load(ModelConfig(source=f"run:{tmp_path / 'first'}#rubric@1"))
    assert early.source.endswith("first#rubric@1") and same_bits(early.params, load_model("tiny").params)  # it had not begun
    with pytest.raises(UserError, match="no good checkpoint of update 7") as error:
        load(ModelConfig(source=f"run:{tmp_path / 'first'}@7"))
    assert error.value.expected == "one of the updates 4, 3, 2, 1"
    # A run that began from a run's weights knows their shapes.
    again = run(tmp_path / "again", f"policy.source=run:{tmp_path / 'first'}", "schedule.cycles=1", "schedule.k=1")
    assert same_bits(again.system.learners["policy"].reference, first.params["policy"])
    assert same_bits(load_trained(tmp_path / "again")[0].params, again.params["policy"])


# -------------------------------------------------------------------------------------------------------------- curriculum


@pytest.fixture
def curriculum(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Three judges in turn: the small world's model, the same with other weights, and rules beside it."""
    monkeypatch.setattr(criterion_logits, "yes_no_forms", lambda tokenizer: ([2], [57, 58, 14, 12]))
    model = load_model("tiny")
    other = jax.tree.map(lambda x: x * 1.01, model.params)
    save_orbax(other, model.spec, model.folder, tmp_path / "other")
    second = [o.replace("judge.", "panel.judges.0.") for o in CRITERIA[:3]]
    second[1] = f"panel.judges.0.source={tmp_path / 'other'}"
    third = ("panel.judges.1.source=oracle", "panel.judges.1.protocol=oracle")
    return (*CRITERIA, *second, *third, "panel.from_cycle=1,2", "schedule.cycles=3", "schedule.k=1", "run.save_every=2")


def test_judges_take_their_turns_are_let_go_and_resume(curriculum: tuple[str, ...], tmp_path: pathlib.Path) -> None:
    seen: list[dict[str, Any]] = []
    first: list[Any] = []
    at_loading: list[tuple[int, bool]] = []

    def watch(system: System, row: dict[str, Any], done: int) -> None:
        if not first:
            first.append(weakref.ref(jax.tree.leaves(system.bench.seats[0].params)[0]))
            make = system.bench._make

            def listening(number: int) -> Any:
                gc.collect()
                at_loading.append((number, first[0]() is not None))
                return make(number)

            system.bench._make = listening
        gc.collect()
        alive = first[0]() is not None
        seen.append({"cycle": row["cycle"], "judges": sorted(system.bench.weights), "first alive": alive})

    whole = run(tmp_path / "whole", *curriculum, hook=watch)
    assert [s["judges"] for s in seen] == [["judge"], ["judge"], ["judge_1"], ["judge_1"], [], []]
    assert [s["first alive"] for s in seen] == [True, True, False, False, False, False]
    assert at_loading == [(1, False), (2, False)]  # two judges are never in memory together
    prints = whole.system.frozen_fingerprints
    assert set(prints) == {"judge", "judge_1"} and prints["judge"] != prints["judge_1"]
    assert all("oracle" not in r["judge"]["raw"] for r in whole.rollouts(0))
    assert [n for n in whole.notes if n.startswith("cycle")] == [
        f"cycle 2: judge_1 {whole.system.cfg.panel.judges[0].source!r} serves", "cycle 3: judge_2 'oracle' serves",
    ]  # fmt: skip
    for stop_after in (1, 2, 3, 4, 5):
        folder = tmp_path / f"stopped_{stop_after}"
        assert not run(folder, *curriculum, stop_after=stop_after).finished
        assert_same(run(folder, *curriculum), whole)


def test_a_judge_that_changed_between_two_sittings_is_refused(curriculum: tuple[str, ...], tmp_path: pathlib.Path) -> None:
    run(tmp_path / "run", *curriculum, stop_after=3)
    source = pathlib.Path(curriculum[5].partition("=")[2])
    model = load_model(str(source))
    source.rename(tmp_path / "moved")
    save_orbax(jax.tree.map(lambda x: x * 1.01, model.params), model.spec, tmp_path / "moved", source)
    with pytest.raises(UserError, match="the frozen weights of judge_1 differ") as error:
        run(tmp_path / "run", *curriculum)
    assert error.value.where == "panel.judges.0.source"


def test_a_panel_of_a_model_and_rules_trains_and_resumes(curriculum: tuple[str, ...], tmp_path: pathlib.Path) -> None:
    panel = (*(o for o in curriculum if not o.startswith("panel.from_cycle")), "panel.aggregate=majority")
    whole = run(tmp_path / "whole", *panel)
    assert all(len(r["judge"]["parts"]) == 3 for r in whole.rollouts(role="policy") if r["judge"]["status"] == "ok")
    assert set(whole.system.frozen_fingerprints) == {"judge", "judge_1"}
    run(tmp_path / "run", *panel, stop_after=3)
    assert_same(run(tmp_path / "run", *panel), whole)


def test_a_wrong_source_of_a_panels_judge_names_its_key(curriculum: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as error:
        system_of(*curriculum, "panel.judges.0.source=/none", "panel.from_cycle=0,2")
    assert "panel.judges.0.source" in error.value.where
