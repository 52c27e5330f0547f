"""scale=smoke shrinks every experiment and leaves what it is about alone; each ablation changes what its name says; all run."""

from __future__ import annotations

import pathlib

import pytest
from train_support import REPO, Recorder, shared_programs

from coevo_jax.cli import parse_flags, resolve
from coevo_jax.config import Experiment, ModelConfig
from coevo_jax.config.load import load_config
from coevo_jax.config.model import STAND_IN, api_model
from coevo_jax.config.override import diff, get_at, replace_at
from coevo_jax.config.scale import ENDPOINTS, MOST, SMOKE, SOURCES, TURNS, shrink
from coevo_jax.config.several import rule_of, serving
from coevo_jax.config.validate import validate
from coevo_jax.methods.evolm import stages
from coevo_jax.models.export import export_hf
from coevo_jax.models.load import load_with_head
from coevo_jax.records.metrics import read_metrics
from coevo_jax.train import train

CONFIGS = sorted(p for p in (REPO / "configs").glob("**/*.py") if not p.name.startswith("_"))
BASELINES = sorted(p for p in (REPO / "configs" / "baselines").glob("*.py") if not p.name.startswith("_"))
ABLATIONS = sorted((REPO / "configs" / "ablations").glob("*.py"))
SIBLINGS = sorted(p for p in (REPO / "configs" / "evolm").glob("*.py") if not p.name.startswith("_"))
MAIN = REPO / "configs" / "evolm" / "qwen3_8b.py"
# What smoke may never touch (issue: rubric source, schema, judge protocol, parser, order, reward, trainer, schedule).
KEPT = (
    "rubric", "loss", "optimizer", "compat", "generator.mode", "generator.frozen", "judge.protocol", "judge.retries",
    "judge.guided", "judge.weights", "judge.samples", "judge.combine", "judge.pairs", "judge.order", "panel.aggregate",
    "panel.tie_breaker", "advantage.kind", "advantage.epsilon", "schedule.order", "schedule.mode", "schedule.verifier",
    "pairs.temporal", "pairs.inferred", "pairs.conditioned", "pairs.frozen", "pairs.dataset", "pairs.leak_words",
    "pairs.on_empty", "pairs.inference_prompt", "pairs.conditioned_prompt", "answer.temperature", "answer.top_p",
    "rubric_sampling.temperature", "update.inner_iterations", "update.share_prefix",
    "rlcer", "reward.margin", "reward.center", "critic.gamma", "critic.lam",
    "critic.clip", "critic.lr", "control.overlong_penalty", "control.rubric_dropout", "control.length_correlation",
    "heldout_judge.protocol",
)  # fmt: skip


def smoke(path: pathlib.Path, *overrides: str) -> Experiment:
    flags = [f"--config={path}", "--config.scale=smoke", *(f"--config.{o}" for o in overrides)]
    return resolve(parse_flags(flags, ""))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_smoke_changes_sizes_counts_and_sources_alone(path: pathlib.Path) -> None:
    full = load_config(str(path))
    small = smoke(path)
    changed = {rule_of(key) for key in diff(full, small)}
    ends = {f"{source.removesuffix('.source')}.{key}" for source in SOURCES for key in ENDPOINTS}
    assert changed <= {*SMOKE, *SOURCES, *MOST, *ends, "scale", "pairs.data", TURNS}
    for key in changed:
        assert not any(key == kept or key.startswith(kept + ".") for kept in KEPT), key
    for one in (full, small):  # every judge and policy has its turn
        assert {i for c in range(one.schedule.cycles) for i in serving(one.panel, c)} == set(range(1 + len(one.panel.judges)))
        assert one.schedule.cycles > len(one.policies)


def test_the_lists_of_what_smoke_changes_and_keeps_do_not_meet() -> None:
    for key in (*SMOKE, *SOURCES, *MOST, "pairs.data", TURNS):
        assert not any(key == kept or key.startswith(kept + ".") for kept in KEPT), key


def test_overrides_come_after_the_shrinking_and_order_does_not_matter() -> None:
    flags = parse_flags([f"--config={MAIN}", "--config.schedule.k=3", "--config.scale=smoke"], "")
    assert resolve(flags).schedule.k == 3 and resolve(flags).policy.source == "tiny"


def test_a_judge_behind_an_endpoint_and_the_oracle_stay() -> None:
    tiny = load_config(str(REPO / "configs" / "tiny.py"))
    assert shrink(tiny).judge.source == "oracle"
    remote = shrink(replace_at(replace_at(tiny, "judge.source", "api:m"), "judge.endpoint.key_env", "KEY")).judge
    assert (remote.source, remote.endpoint.base_url, remote.endpoint.key_env) == ("api:m", STAND_IN, "")
    assert shrink(replace_at(tiny, "judge.source", "/models/Qwen3-1.7B")).judge.source == "tiny"


# Of each kind of ablation, by the first word of its name: what it may change.
GROUPS = {
    "reward": ("rubric.",), "k": ("schedule.",), "signal": ("pairs.",), "gap": ("pairs.",), "judge": ("judge.",),
    "panel": ("panel.", "rubric.reward"), "curriculum": ("panel.", "judge."), "coevolve": ("policies.", "generator.mode"),
    "frozen": ("pairs.", "schedule.order", "panel."),
    "transfer": ("policy.", "answer.", "generator.", "schedule.", "rubric_sampling."),
    "roles": ("policy.", "answer.", "generator.", "rubric_sampling.", "sampler."),
}  # fmt: skip


@pytest.mark.parametrize("path", ABLATIONS, ids=lambda p: p.stem)
def test_an_ablation_changes_what_it_says_and_is_what_its_name_says(path: pathlib.Path) -> None:
    main, cfg = load_config(str(MAIN)), load_config(str(path))
    validate(cfg)
    kind = path.stem.split("_")[0]
    changed = [key for key in diff(main, cfg) if key != "name"]
    assert cfg.name == path.stem and changed and all(key.startswith(GROUPS[kind]) for key in changed)
    if kind == "k":
        assert cfg.schedule.k * cfg.schedule.cycles == main.schedule.k * main.schedule.cycles
    if path.stem.startswith("gap_"):
        assert (cfg.pairs.min_gap, cfg.pairs.max_gap) == tuple(
            map(int, path.stem.split("_")[1:])
        ) and cfg.pairs.per_slot >= cfg.pairs.max_gap
    if path.stem.startswith("reward_") and path.stem.count("_") > 1 and get_at(cfg, "rubric.reward") in ("binary", "margin"):
        prompt, reward, *fmt = path.stem.split("_")[1:]
        assert cfg.rubric.prompt == f"rubric_{prompt}" and cfg.rubric.reward == reward and (cfg.rubric.alpha < 1) == bool(fmt)


OTHERS = [p for p in (*SIBLINGS, *ABLATIONS) if p != MAIN]


@pytest.mark.parametrize("path", [MAIN, *(pytest.param(p, marks=pytest.mark.slow) for p in OTHERS)], ids=lambda p: p.stem)
def test_it_runs_shrunk(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Two updates a phase through sampler, parser, judge, replay buffer and update. The small model can't follow real prompts:
    most rubrics are invalid, which is an outcome, and few groups have two rewards."""
    cfg = smoke(path)
    with shared_programs():
        assert train(cfg, str(tmp_path / "run"), Recorder())
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    roles = [s.role for s in stages(cfg) for _ in range(s.updates)]
    assert [row["role"] for row in rows] == roles and len(roles) >= 2
    assert all(row["tokens/sampled"] > 0 for row in rows)
    assert any(key.startswith("api/") for key in rows[0]) == bool(api_model(cfg.judge.source))


@pytest.mark.slow
@pytest.mark.parametrize("path", BASELINES, ids=lambda p: p.stem)
def test_a_baseline_runs_shrunk(path: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The small model's verdicts are mostly failures, which train nothing."""
    cfg = smoke(path)
    if cfg.judge.protocol == "scalar":
        cfg = replace_at(cfg, "judge.source", str(reward_folder(tmp_path / "reward")))
    with shared_programs():
        assert train(cfg, str(tmp_path / "run"), Recorder())
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert len(rows) == cfg.schedule.k * cfg.schedule.cycles * (2 if cfg.schedule.order == "generator_first" else 1)
    if cfg.schedule.mode == "reward":
        assert all(row["grad_norm"] > 0 for row in rows)
    else:
        assert all(row["tokens/sampled"] > 0 for row in rows)


def reward_folder(out: pathlib.Path) -> pathlib.Path:
    """The small world's model with a fresh head, as a folder."""
    model = load_with_head(ModelConfig(source="tiny"), std=0.1, seed=0)
    export_hf(model.params, model.spec, model.folder, out)
    return out
