"""The trained weights of a run come out as a Hugging Face folder that loads with the run's last parameters."""

from __future__ import annotations

import json
import pathlib

import jax
import numpy as np
import pytest
import train_support as support

from coevo_jax.config import ModelConfig
from coevo_jax.errors import UserError
from coevo_jax.export import export_run, load_trained
from coevo_jax.models.load import load_model
from coevo_jax.trained import load, split


def test_the_exported_folder_holds_the_runs_last_weights(tmp_path: pathlib.Path):
    done = support.run(tmp_path / "run", "schedule.cycles=1", "schedule.k=1")
    export_run(tmp_path / "run", tmp_path / "out")
    again, start = load_model(str(tmp_path / "out")), load_model("tiny")
    trained, step = load_trained(tmp_path / "run")
    assert step == 2
    rubric = load(ModelConfig(source=f"run:{tmp_path / 'run'}"), prefer="rubric")  # one model plays both roles
    assert rubric.source.endswith("run#policy@2") and support.same_bits(rubric.params, trained.params)
    for a, b in zip(jax.tree.leaves(again.params), jax.tree.leaves(trained.params), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert any((np.asarray(a) != np.asarray(b)).any() for a, b in zip(*map(jax.tree.leaves, (again.params, start.params))))
    assert done is not None


def test_a_run_whose_rubrics_came_from_an_endpoint_has_the_policys_weights_alone(tmp_path: pathlib.Path):
    support.run(tmp_path / "run", "schedule.cycles=1", "schedule.k=1", "schedule.order=policy_only")
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    config["generator"] |= {"mode": "two", "source": "api:some-model"}
    path.write_text(json.dumps(config))
    assert load_trained(tmp_path / "run")[1] == 1
    with pytest.raises(UserError, match="no weights 'rubric'"):
        load_trained(tmp_path / "run", "rubric")


def test_what_is_no_run_is_refused(tmp_path: pathlib.Path):
    with pytest.raises(UserError, match="not a run folder"):
        load_trained(tmp_path)
    support.run(tmp_path / "run", "schedule.cycles=1", "schedule.k=1")
    with pytest.raises(UserError, match="no weights 'rubrics'"):
        load_trained(tmp_path / "run", "rubrics")


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("run:runs/a", ("runs/a", "", None)),
        ("run:/x/y#rubric", ("/x/y", "rubric", None)),
        ("run:/x@y/z#policy_1@500", ("/x@y/z", "policy_1", 500)),
        ("run:runs/a@12", ("runs/a", "", 12)),
    ],
)
def test_a_source_names_a_run_its_weights_and_an_update(source: str, parts: tuple[str, str, int | None]):
    assert split(source) == (pathlib.Path(parts[0]), *parts[1:])
