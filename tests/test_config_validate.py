"""Cross-field checks: each bad experiment is refused by an error that names its keys."""

from __future__ import annotations

import pathlib
import re

import pytest

import coevo_jax.config
from coevo_jax.config import Experiment
from coevo_jax.config.limits import CHOICES, RANGES
from coevo_jax.config.override import apply_overrides, key_types
from coevo_jax.config.validate import compat_warnings, validate
from coevo_jax.errors import UserError


def with_(*overrides: str) -> Experiment:
    return apply_overrides(Experiment(), overrides)


def refused(*overrides: str) -> UserError:
    with pytest.raises(UserError) as caught:
        validate(with_(*overrides))
    return caught.value


def test_the_default_experiment_is_valid():
    validate(Experiment())


@pytest.mark.parametrize(
    "override",
    [
        *("schedule.k=0", "schedule.group=1", "schedule.prompts=0", "schedule.cycles=0", "pairs.min_gap=0"),
        *("pairs.temporal=-0.1", "rubric.alpha=1.1", "loss.clip_low=-0.1", "optimizer.lr=-1e-6", "answer.temperature=0"),
        *("answer.top_p=0", "answer.top_p=1.5", "judge.sampling.top_k=-1", "answer.min_new_tokens=65", "mesh.data=0"),
        *("optimizer.b1=1", "rubric.retry_temperatures=0.6,0", "sampler.refill_free_share=2", "advantage.ddof=2", "seed=-1"),
        *("data.prompts=", "schedule.verifier=module", "name=a/b", "rubric.min_criteria=0", "update.inner_iterations=0"),
    ],
)
def test_a_value_out_of_range_names_its_key(override):
    error = refused(override)
    assert override.split("=")[0] in error.where.split(", ") and error.expected


@pytest.mark.parametrize("key", CHOICES)
def test_a_misspelt_choice_names_the_nearest(key):
    choice = max(CHOICES[key], key=len)
    error = refused(f"{key}={choice[:-1]}x")
    assert error.where == key and error.nearest in CHOICES[key] and len(error.nearest) == len(choice)


def test_choices_and_ranges_name_real_keys():
    assert not (CHOICES.keys() | RANGES.keys()) - key_types(Experiment).keys()


def test_every_choice_written_in_a_record_is_checked():
    """Comments such as `# filter | refuse` in the records are the list of choices."""
    folder = pathlib.Path(coevo_jax.config.__file__).parent
    for name in ("learn.py", "model.py", "system.py"):
        for field, comment in re.findall(r'^    (\w+): str = ".*?"  # (.*)$', (folder / name).read_text(), re.M):
            words = re.match(r"[\w.]+(?: \([^)]*\))?(?: \| [\w.]+(?: \([^)]*\))?)+", comment)
            if words and "path" not in comment:
                choices = {re.sub(r" \(.*\)", "", word) for word in words.group().split(" | ")}
                assert any(key.endswith("." + field) and choices <= set(known) for key, known in CHOICES.items()), field


def test_the_buffer_must_hold_the_gap():
    error = refused("pairs.per_slot=99")
    assert "at least 100" in error.expected and "pairs.per_slot" in error.where
    validate(with_("pairs.per_slot=100"))
    # Without an upper bound the smallest gap decides.
    assert "at least 20" in refused("pairs.max_gap=0", "pairs.per_slot=19").expected
    validate(with_("pairs.max_gap=0", "pairs.per_slot=20"))
    validate(with_("pairs.per_slot=1", "compat.buffer_entries=2048"))
    validate(with_("pairs.per_slot=1", "pairs.temporal=0", "pairs.inferred=1"))


def test_a_gap_that_is_never_reached():
    assert "at most 4" in refused("schedule.cycles=2", "schedule.k=2", "pairs.min_gap=5").expected
    validate(with_("schedule.cycles=2", "schedule.k=2", "pairs.min_gap=4"))
    validate(with_("schedule.cycles=2", "schedule.k=2", "schedule.order=policy_only"))


def test_an_empty_gap_or_mixture():
    assert "pairs.max_gap" in refused("pairs.max_gap=19").where
    assert "pairs.inferred" in refused("pairs.temporal=0").where
    validate(with_("pairs.temporal=0", "schedule.mode=verifiable", "schedule.verifier=a:b"))


def test_temporal_pairs_need_an_older_policy():
    assert "schedule.order" in refused("schedule.order=generator_first").where
    validate(with_("schedule.order=generator_first", "pairs.temporal=0", "pairs.conditioned=1"))


@pytest.mark.parametrize(
    "overrides, where",
    [
        (["answer.max_new_tokens=129"], "answer.max_new_tokens"),
        (["rubric_sampling.max_new_tokens=129"], "rubric_sampling.max_new_tokens"),
        (["judge.protocol=json_score"], "judge.sampling.max_new_tokens"),
        (["question_sampling.max_new_tokens=129", "pairs.inferred=0.1"], "question_sampling.max_new_tokens"),
    ],
)
def test_the_engine_must_hold_the_longest_completion(overrides, where):
    error = refused(*overrides)
    assert where in error.where and "sampler.max_new of at least" in error.expected


def test_lengths_that_are_not_used_are_not_checked():
    validate(with_("question_sampling.max_new_tokens=129"))
    validate(with_("rubric_sampling.max_new_tokens=999", "schedule.mode=verifiable", "schedule.verifier=a:b"))


def test_a_packed_row_must_hold_the_longest_sequence():
    assert "at least 384" in refused("update.pack_length=383").expected
    validate(with_("update.pack_length=384"))
    assert "sampler.max_prompt" in refused("sampler.max_prompt=255").where


def test_roles():
    assert "generator.mode" in refused("generator.source=/model").where
    validate(with_("generator.source=/model", "generator.mode=two"))
    assert "judge.protocol" in refused("judge.source=oracle").where
    validate(with_("judge.source=oracle", "judge.protocol=oracle"))
    assert "generator.frozen" in refused("generator.frozen=true", "schedule.order=generator_only").where
    assert "generator.lr" in refused("generator.lr=1e-5").where
    validate(with_("generator.lr=1e-5", "generator.mode=two"))


def test_loss_and_verifier():
    assert "loss.constant_length" in refused("loss.aggregation=constant").where
    assert "schedule.verifier" in refused("schedule.mode=verifiable").where
    assert "data.prompts" in refused("schedule.mode=verifiable", "schedule.verifier=reasoning_gym").where
    validate(with_("schedule.mode=verifiable", "data.prompts=reasoning_gym:chain_sum"))
    validate(with_("schedule.mode=verifiable", "data.prompts=reasoning_gym:chain_sum", "schedule.verifier=reasoning_gym"))


def test_a_comparison_goes_by_a_numbered_list():
    wrong = refused(
        "judge.pairs=comparison", "judge.source=tiny", "judge.protocol=criterion_logits", "judge.sampling.max_new_tokens=32"
    )
    assert "rubric.schema" in wrong.where and "numbered_rules" in wrong.expected


def test_only_what_forms_a_group_must_be_random():
    validate(with_("judge.sampling.temperature=0", "question_sampling.temperature=0"))
    assert refused("rubric_sampling.temperature=0").where == "rubric_sampling.temperature"
    assert refused("judge.sampling.temperature=-1").where == "judge.sampling.temperature"


def test_a_value_of_another_type_in_a_config_file():
    import dataclasses

    bad = dataclasses.replace(Experiment(), schedule=dataclasses.replace(Experiment().schedule, k=10.0))
    with pytest.raises(UserError, match=r"10\.0 is not a value of schedule\.k"):
        validate(bad)


def test_compat_switches_warn():
    assert compat_warnings(Experiment()) == []
    every = with_(
        "compat.train_rubric_prompt=rubric_long",
        "compat.policy_rubric_temperature=0.6",
        "compat.buffer_entries=2048",
        "compat.pack_mean=true",
        "compat.failed_to_mean=true",
        "compat.top_p=0.95",
    )
    validate(every)
    warnings = compat_warnings(every)
    assert [line.split("=")[0] for line in warnings] == [key for key in key_types(Experiment) if key.startswith("compat.")]
