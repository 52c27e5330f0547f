"""Overrides, dict and JSON forms, differences and loading of config files."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from coevo_jax.config import Experiment, PairConfig, RubricConfig
from coevo_jax.config.load import load_config
from coevo_jax.config.override import (
    apply_overrides,
    diff,
    from_dict,
    key_types,
    print_config,
    to_dict,
    to_json,
)
from coevo_jax.errors import UserError


def test_overrides_take_the_type_of_the_record():
    cfg = apply_overrides(
        Experiment(),
        [
            "schedule.k=10",
            "pairs.min_gap=1",
            "optimizer.lr=3e-4",
            "loss.clip_low=1",
            "policy.thinking=True",
            "policy.source=/a=b.gguf",
            "rubric.retry_temperatures=0.6,0.3",
            "judge.sampling.temperature=0.25",
            "policy.system_prompt=",
        ],
    )
    assert cfg.schedule.k == 10 and cfg.pairs.min_gap == 1
    assert cfg.optimizer.lr == 3e-4
    assert cfg.loss.clip_low == 1.0 and isinstance(cfg.loss.clip_low, float)
    assert cfg.policy.thinking is True
    assert cfg.policy.source == "/a=b.gguf"
    assert cfg.rubric.retry_temperatures == (0.6, 0.3)
    assert cfg.judge.sampling.temperature == 0.25
    assert Experiment().schedule.k == 50, "the record given is not changed"


@pytest.mark.parametrize("text, expected", [("", ()), ("()", ()), ("0.5,", (0.5,)), ("(0.5, 0.25)", (0.5, 0.25))])
def test_tuples(text, expected):
    assert apply_overrides(Experiment(), [f"rubric.retry_temperatures={text}"]).rubric.retry_temperatures == expected


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", ()),
        ("()", ()),
        ("4,64", ((4, 64),)),
        ("4,64;2,192", ((4, 64), (2, 192))),
        ("((4, 64), (2, 192))", ((4, 64), (2, 192))),
        ("((4, 64),)", ((4, 64),)),
        ("(4,64); (2,192)", ((4, 64), (2, 192))),
    ],
)
def test_tuples_of_tuples(text, expected):
    cfg = apply_overrides(Experiment(), [f"sampler.length_classes={text}"])
    assert cfg.sampler.length_classes == expected
    assert apply_overrides(Experiment(), print_config(cfg).splitlines()) == cfg


@pytest.mark.parametrize("text", ["4", "4,64,2,192", "4,64;;2,192", "4,x", "((4,64)"])
def test_a_wrong_tuple_of_tuples_shows_the_form(text):
    with pytest.raises(UserError, match=r"sampler\.length_classes") as caught:
        apply_overrides(Experiment(), [f"sampler.length_classes={text}"])
    assert "4,64;2,192" in caught.value.expected


def test_the_last_override_wins():
    assert apply_overrides(Experiment(), ["seed=2", "seed=3"]).seed == 3


@pytest.mark.parametrize(
    "key, close",
    [
        ("schedule.kk", "schedule.k"),
        ("schedul.k", "schedule.k"),
        ("k", "schedule.k"),
        ("policy.k", "schedule.k"),
        ("pairs.mingap", "pairs.min_gap"),
        ("min_gapp", "pairs.min_gap"),
        ("judge.samplng.top_p", "judge.sampling.top_p"),
        ("policy.sorce", "policy.source"),
    ],
)
def test_an_unknown_key_names_the_nearest(key, close):
    with pytest.raises(UserError) as caught:
        apply_overrides(Experiment(), [f"{key}=1"])
    assert caught.value.nearest == close and key in caught.value.what


@pytest.mark.parametrize(
    "text, expected",
    [
        ("schedule.k=1.5", "whole number"),
        ("schedule.k=", "whole number"),
        ("schedule.k=ten", "whole number"),
        ("optimizer.lr=fast", "finite number"),
        ("optimizer.lr=nan", "finite number"),
        ("policy.thinking=1", "true or false"),
        ("rubric.retry_temperatures=0.6;0.3", "numbers with commas"),
    ],
)
def test_a_wrong_type_names_the_key(text, expected):
    with pytest.raises(UserError) as caught:
        apply_overrides(Experiment(), [text])
    assert caught.value.where == text.split("=")[0] and expected in caught.value.expected


def test_a_group_or_a_missing_value_is_refused():
    with pytest.raises(UserError, match=r"group of settings") as caught:
        apply_overrides(Experiment(), ["schedule=3"])
    assert "schedule.k" in caught.value.expected
    with pytest.raises(UserError, match="no value"):
        apply_overrides(Experiment(), ["schedule.k"])


def changed() -> Experiment:
    return Experiment(name="x", pairs=PairConfig(min_gap=1), rubric=RubricConfig(retry_temperatures=(0.5,)))


def test_dict_and_json_give_the_record_back():
    assert from_dict(Experiment, json.loads(to_json(changed()))) == changed()
    assert from_dict(Experiment, to_dict(changed())) == changed()
    assert to_dict(changed()) == json.loads(to_json(changed()))


def test_printed_lines_are_overrides_in_record_order():
    lines = print_config(changed()).splitlines()
    assert apply_overrides(Experiment(), lines) == changed()
    assert [line.split("=")[0] for line in lines] == list(key_types(Experiment))
    assert lines[0] == "name=x" and "rubric.retry_temperatures=0.5" in lines and "policy.thinking=false" in lines


def test_from_dict_is_strict():
    extra, missing, wrong = (to_dict(Experiment()) for _ in range(3))
    extra["schedule"]["kk"] = 3
    with pytest.raises(UserError) as caught:
        from_dict(Experiment, extra, where="config.json")
    assert caught.value.nearest == "schedule.k" and caught.value.where == "config.json"
    del missing["judge"]["sampling"]["top_p"]
    with pytest.raises(UserError, match=r"judge\.sampling\.top_p is missing"):
        from_dict(Experiment, missing)
    wrong["schedule"]["k"] = True
    with pytest.raises(UserError, match=r"schedule\.k"):
        from_dict(Experiment, wrong)
    with pytest.raises(UserError, match="schedule is not a group"):
        from_dict(Experiment, {**to_dict(Experiment()), "schedule": 3})


def test_diff_names_what_differs():
    assert diff(Experiment(), Experiment()) == []
    assert diff(Experiment(), changed()) == ["name", "rubric.retry_temperatures", "pairs.min_gap"]


def write(tmp_path, text, name="one.py"):
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def test_load_config_runs_the_file(tmp_path):
    path = write(
        tmp_path,
        "from __future__ import annotations\nfrom coevo_jax.config import *\n"
        "def get_config() -> Experiment:\n    return Experiment(name='mine', schedule=ScheduleConfig(k=2))\n",
    )
    cfg = load_config(path)
    assert cfg.name == "mine" and cfg.schedule.k == 2


@pytest.mark.parametrize(
    "text, what",
    [
        ("x = 1\n", "no function get_config"),
        ("def get_config():\n    return {}\n", "returned dict"),
        ("def get_config(:\n", "not valid Python"),
        ("import no_such_module_anywhere\n", "could not be imported"),
    ],
)
def test_load_config_refuses(tmp_path, text, what):
    with pytest.raises(UserError, match=what) as caught:
        load_config(write(tmp_path, text))
    assert "one.py" in caught.value.where


def test_load_config_names_the_nearest_file(tmp_path):
    write(tmp_path, "", "smollm2_demo.py")
    with pytest.raises(UserError, match="no config file") as caught:
        load_config(str(tmp_path / "smolm2_demo.py"))
    assert caught.value.nearest.endswith("smollm2_demo.py")


def test_config_imports_no_jax():
    code = "import sys, coevo_jax.config.load, coevo_jax.config.override; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_records_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Experiment().seed = 3  # type: ignore[misc]
