"""Lists of records in a config: their keys, and what is refused of panels, curricula, policies and sources of pairs."""

from __future__ import annotations

import pytest

from coevo_jax.config import Experiment, JudgeConfig, ModelConfig
from coevo_jax.config.override import apply_overrides, diff, from_dict, get_at, key_types, print_config, to_dict
from coevo_jax.config.scale import shrink
from coevo_jax.config.several import rule_of
from coevo_jax.config.validate import validate
from coevo_jax.errors import UserError
from coevo_jax.records.run_folder import config_differences

TWO = ("panel.judges.0.source=/a", "panel.judges.1.source=/b")
FROZEN = ("pairs.frozen=1", "pairs.frozen_models.0.source=/a", "pairs.frozen_models.1.source=/b")


def with_(*overrides: str) -> Experiment:
    return apply_overrides(Experiment(), overrides)


def test_a_list_grows_by_its_next_number_and_comes_back() -> None:
    cfg = with_(*TWO, "panel.judges.1.sampling.temperature=0.5", "panel.from_cycle=3,6", "policies.0.source=/c")
    assert [judge.source for judge in cfg.panel.judges] == ["/a", "/b"] and cfg.policies == (ModelConfig(source="/c"),)
    assert get_at(cfg, "panel.judges.1.sampling.temperature") == 0.5 and cfg.panel.judges[0] == JudgeConfig(source="/a")
    assert apply_overrides(Experiment(), print_config(cfg).splitlines()) == cfg
    assert from_dict(Experiment, to_dict(cfg)) == cfg
    assert set(diff(cfg, with_(*TWO))) == {
        "panel.judges.1.sampling.temperature", "panel.from_cycle", *(f"policies.0.{k}" for k in key_types(ModelConfig)),
    }  # fmt: skip
    validate(cfg)


@pytest.mark.parametrize(
    ("override", "where", "close"),
    [
        ("panel.judges.1.source=x", "panel.judges.1.source", ""),
        ("panel.judges.0.sorce=x", "panel.judges.0.sorce", "panel.judges.0.source"),
        ("panel.judges=x", "panel.judges", ""),
        ("panel.judges.x.source=x", "panel.judges.x.source", "panel.judges.0.source"),
    ],
)
def test_a_wrong_key_of_a_list_is_named_whole(override: str, where: str, close: str) -> None:
    with pytest.raises(UserError) as caught:
        with_(override)
    assert (caught.value.where, caught.value.nearest) == (where, close)


def test_a_saved_list_is_read_strictly() -> None:
    data = to_dict(with_(*TWO))
    data["panel"]["judges"][1]["sorce"] = 1
    with pytest.raises(UserError, match=r"panel\.judges\.1\.sorce"):
        from_dict(Experiment, data)
    with pytest.raises(UserError, match=r"panel\.judges is not a list"):
        from_dict(Experiment, {**to_dict(Experiment()), "panel": {**data["panel"], "judges": 3}})


def test_an_item_has_the_rules_of_the_record_it_is_like() -> None:
    assert rule_of("panel.judges.12.endpoint.retries") == "judge.endpoint.retries"
    assert rule_of("pairs.frozen_models.0.dtype") == "policy.dtype" and rule_of("judge.dtype") == "judge.dtype"


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        ((*TWO, "panel.judges.1.protocol=json_scor"), "panel.judges.1.protocol"),
        ((*TWO, "panel.judges.1.oracle_noise=2"), "panel.judges.1.oracle_noise"),
        ((*TWO, "panel.judges.1.sampling.top_p=0"), "panel.judges.1.sampling.top_p"),
        ((*TWO, "panel.judges.1.protocol=scalar"), "panel.judges.1.protocol"),  # reads no rubric
        ((*TWO, "panel.judges.1.source=oracle"), "panel.judges.1.source"),
        ((*TWO, "panel.judges.1.source=api:m"), "panel.judges.1.endpoint.base_url"),
        ((*TWO, "panel.judges.0.source="), "panel.judges.0.source"),
        ((*TWO, "panel.judges.0.protocol=json_score", "panel.judges.0.sampling.max_new_tokens=999"), "panel.judges.0.sampling"),
        ((*TWO, "panel.from_cycle=3"), "panel.from_cycle"),
        ((*TWO, "panel.from_cycle=6,3"), "panel.from_cycle"),
        ((*TWO, "panel.from_cycle=3,10"), "schedule.cycles"),
        ((*TWO, "panel.from_cycle=3,6", "panel.aggregate=majority"), "panel.aggregate"),
        ((*TWO, "panel.aggregate=margin_kappa_format", "rubric.reward=binary"), "rubric.reward"),
        ((*TWO, "panel.aggregate=margin_kappa_format", "schedule.order=policy_only"), "schedule.order"),
        ((*TWO, "schedule.mode=sft", "warmup.updates=1"), "schedule.mode"),
        (("panel.aggregate=majority",), "panel"),
        (("policies.0.source=api:m",), "policies.0.source"),
        (("policies.0.dtype=bfloat16",), "policies.0.dtype"),
        (("policies.0.thinking=true", "schedule.order=generator_only", "pairs.temporal=0", "pairs.inferred=1"), "policies"),
        (("policies.0.thinking=true", "compat.buffer_entries=2048"), "compat.buffer_entries"),
        (FROZEN[:2], "pairs.frozen_models"),
        (FROZEN[1:], "pairs.frozen"),
        ((*FROZEN, "pairs.frozen_models.1.source=api:m"), "pairs.frozen_models.1.source"),
        ((*FROZEN, "schedule.order=policy_only"), "pairs.frozen"),
        (("pairs.dataset=1",), "pairs.data"),
        (("pairs.data=tiny",), "pairs.dataset"),
        (("pairs.temporal=0",), "pairs.dataset"),
        (("pairs.leak_words=-1",), "pairs.leak_words"),
    ],
)  # fmt: skip
def test_what_is_refused_names_its_key(overrides: tuple[str, ...], where: str) -> None:
    with pytest.raises(UserError) as caught:
        validate(with_(*overrides))
    named = [key.strip() for key in caught.value.where.split(",")]
    assert any(key == where or key.startswith(where + ".") for key in named), caught.value
    assert caught.value.expected


def test_what_is_allowed() -> None:
    validate(with_(*FROZEN, "pairs.temporal=0", "schedule.order=generator_only"))
    validate(with_("pairs.dataset=1", "pairs.data=tiny", "pairs.temporal=0", "schedule.order=generator_first"))
    validate(with_("policies.0.source=/b", "generator.mode=two"))
    validate(with_(*TWO, "panel.from_cycle=0,3", "panel.aggregate=majority"))
    scalar = ("judge.protocol=scalar", "rubric.source=none", "schedule.order=policy_only", "judge.source=/rm")
    validate(with_(*scalar, "judge.scalar=sigmoid", "panel.judges.0.protocol=scalar", "panel.judges.0.scalar=sigmoid"))
    with pytest.raises(UserError, match="can't be combined"):
        validate(with_(*scalar, "panel.judges.0.protocol=scalar", "panel.judges.0.scalar=sigmoid"))


def test_smoke_lets_every_judge_and_policy_have_a_turn() -> None:
    cfg = shrink(with_(*TWO, "panel.from_cycle=3,8", "panel.judges.1.source=api:m", "panel.judges.0.max_prompt=4096"))
    assert (cfg.panel.from_cycle, cfg.schedule.cycles) == ((1, 2), 3)
    assert [judge.source for judge in cfg.panel.judges] == ["tiny", "api:m"] and cfg.panel.judges[0].max_prompt == 0
    cfg = shrink(with_("policies.0.source=/x", "policies.1.source=/y", *FROZEN, "pairs.dataset=1", "pairs.data=d.jsonl"))
    assert [m.source for m in (*cfg.policies, *cfg.pairs.frozen_models)] == ["tiny"] * 4
    assert (cfg.schedule.cycles, cfg.pairs.data) == (3, "tiny")
    assert shrink(Experiment()).schedule.cycles == 1 and shrink(Experiment()).pairs.data == ""


def test_how_a_judge_of_a_panel_is_reached_may_change_between_two_starts() -> None:
    before, after = (to_dict(with_(*TWO, f"panel.judges.1.endpoint.base_url={url}")) for url in ("http://a/v1", "http://b/v1"))
    assert config_differences(before, after) == []
    after["panel"]["judges"][1]["endpoint"]["extra_body"] = "{}"
    assert config_differences(before, after) == ['panel.judges.1.endpoint.extra_body: "" -> "{}"']
