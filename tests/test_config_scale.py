"""scale=smoke shrinks every experiment and leaves what it is about alone; each ablation changes what its name says; all run."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import scripted_model
from train_support import REPO, Recorder, shared_programs

from coevo_jax.cli import parse_flags, resolve
from coevo_jax.config import Experiment, ModelConfig, RubricConfig
from coevo_jax.config.load import load_config
from coevo_jax.config.model import STAND_IN, api_model
from coevo_jax.config.override import diff, get_at, key_types, replace_at
from coevo_jax.config.scale import ENDPOINTS, MOST, SMOKE, SOURCES, TURNS, shrink
from coevo_jax.config.several import rule_of, serving
from coevo_jax.config.validate import validate
from coevo_jax.models.export import export_hf
from coevo_jax.models.load import load_with_head
from coevo_jax.modes import MODES
from coevo_jax.records.metrics import read_metrics
from coevo_jax.rubrics import parse_rubric
from coevo_jax.text.chat import ChatTokenizer
from coevo_jax.text.prompts import prompt_slots, render_prompt
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
    "rlcer", "dynamic.objectives", "dynamic.anchor_weight", "dynamic.anchor_loss", "dynamic.tau", "dynamic.conditioned",
    "dynamic.shuffle", "dynamic.yes_above", "dynamic.prompt", "dynamic.blind_prompt",
    "reward.margin", "reward.center", "critic.gamma", "critic.lam",
    "critic.clip", "critic.lr", "control.overlong_penalty", "control.rubric_dropout", "control.length_correlation",
    "heldout_judge.protocol", "arm.order", "arm.judge", "arm.policy", "arm.format_weight", "arm.judge_prompt", "arm.measure",
    "arm.retries", "arm.judge_sampling.temperature",
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
    assert changed <= {*SMOKE, *SOURCES, *MOST, *ends, "scale", "pairs.data", "dpo.eval_every", TURNS}
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
    "roles": ("policy.", "answer.", "generator.", "rubric_sampling.", "sampler."), "arm": ("arm.",), "dynamic": ("dynamic.",),
}  # fmt: skip


BASES = {  # of those that are none of the main experiment's
    "arm": REPO / "configs" / "rubric_arm_qwen3_8b.py",
    "dynamic": REPO / "configs" / "dynamic_rubric_qwen3_8b.py",
}


@pytest.mark.parametrize("path", ABLATIONS, ids=lambda p: p.stem)
def test_an_ablation_changes_what_it_says_and_is_what_its_name_says(path: pathlib.Path) -> None:
    kind = path.stem.split("_")[0]
    main, cfg = load_config(str(BASES.get(kind, MAIN))), load_config(str(path))
    validate(cfg)
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


@pytest.fixture(scope="module")
def obedient(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A model that writes rubrics, verdicts and answers in the forms that the prompts ask for."""
    return scripted_model.make(tmp_path_factory.mktemp("scripted") / "model")


SEEDS = {"rlcer": 2, "rlcer_evolving": 2}  # with seed 1 no group of so few has a right and a wrong answer
FLAT = ("judge_greedy",)  # a judge that doesn't draw gives all answers of the scripted model one score
OBEYED = ("evolm", "rlcer")  # modes whose prompts the scripted model knows


def run_shrunk(path: pathlib.Path, source: pathlib.Path, folder: pathlib.Path) -> tuple[Experiment, list[dict[str, Any]]]:
    """The smoke run of a config, under the paper's prompts with that model wherever 'tiny' was; its rows. Each role's trained
    something."""
    cfg = replace_at(smoke(path), "seed", SEEDS.get(path.stem, 1))
    if cfg.schedule.mode in OBEYED:  # other modes are small in words of their own
        for key in [k for k in key_types(cfg) if k.endswith(".source") and get_at(cfg, k) == "tiny"]:
            cfg = replace_at(cfg, key, str(source))
    if cfg.schedule.mode == "rlcer":
        (folder / "prompts.jsonl").write_text("".join(f'{{"prompt": "What is {i}?", "reference": "4"}}\n' for i in range(40)))
        cfg = replace_at(cfg, "data.prompts", str(folder / "prompts.jsonl"))
    if cfg.judge.protocol == "scalar":
        cfg = replace_at(cfg, "judge.source", str(reward_folder(folder / "reward")))
    with shared_programs():
        assert train(cfg, str(folder / "run"), Recorder())
    rows = read_metrics(folder / "run" / "metrics.jsonl")
    for role in {row["role"] for row in rows} if cfg.schedule.mode in (*OBEYED, "reward") else ():
        trained = any(not row.get("update/skipped") and row["grad_norm"] > 0 for row in rows if row["role"] == role)
        assert trained or (path.stem in FLAT and role == "policy"), role
    for row in rows:
        assert row.get("judge/failure_share", 0.0) < 0.5
    return cfg, rows


@pytest.mark.parametrize("path", [MAIN, *(pytest.param(p, marks=pytest.mark.slow) for p in OTHERS)], ids=lambda p: p.stem)
def test_it_runs_shrunk(path: pathlib.Path, obedient: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Two updates a phase through sampler, parser, judge, replay buffer and update."""
    cfg, rows = run_shrunk(path, obedient, tmp_path)
    roles = [s.role for s in MODES[cfg.schedule.mode].stages(cfg) for _ in range(s.updates)]
    assert [row["role"] for row in rows] == roles and len(roles) >= 2
    assert all(row["tokens/sampled"] > 0 for row in rows if not row["stage"].startswith(("warm", "judge")))
    if cfg.schedule.mode == "evolm":
        assert all(row["judge/verdicts"] > 0 for row in rows) and any(row["rubric/valid_share"] > 0 for row in rows)
    asked = [row["api/judge/requests"] for row in rows if "api/judge/requests" in row]
    assert bool(asked) == bool(api_model(cfg.judge.source)) and all(asked)


@pytest.mark.slow
@pytest.mark.parametrize("path", BASELINES, ids=lambda p: p.stem)
def test_a_baseline_runs_shrunk(path: pathlib.Path, obedient: pathlib.Path, tmp_path: pathlib.Path) -> None:
    cfg, rows = run_shrunk(path, obedient, tmp_path)
    assert len(rows) == cfg.schedule.k * cfg.schedule.cycles * (2 if cfg.schedule.order == "generator_first" else 1)
    assert cfg.schedule.mode == "reward" or all(row["tokens/sampled"] > 0 for row in rows)


def test_the_scripted_model_obeys_in_every_form(obedient: pathlib.Path) -> None:
    """The words by which it knows a prompt stand in the package's templates, and what it writes reads."""
    tokenizer = ChatTokenizer.load(obedient)
    slots = dict.fromkeys(("question", "rubric", "answer", "answer_a", "answer_b", "criterion", "reference"), "x")
    for template, opening in (
        ("judge_score", "<|score|>"), ("judge_likert", "<|rating|>"), ("judge_reference", "<|rating|>"),
        ("judge_rubric_rating", "<|rating|>"), ("criterion_yes_no", "<|yes|>"), ("judge_points", "<|points|>"),
        ("judge_pair", "<|pair|>"), ("question_inference", "<|question|>"), ("rubric_points", "<|write_points|>"),
        ("rubric_rar", "<|write_rar|>"), ("rubric_long", "<|write|>"), ("rubric_dealbreaker", "<|write|>"),
    ):  # fmt: skip
        own = {name: text for name, text in slots.items() if name in prompt_slots(template)}
        ids = tokenizer.render_messages(render_prompt(template, **own), thinking=False)
        assert tokenizer._tok.convert_ids_to_tokens(ids[-1]) == opening, template
    rubric = scripted_model.FIRST[0] + scripted_model.SECOND[0]
    ids = tokenizer._tok.encode(rubric, add_special_tokens=False)
    assert len(ids) == 2 and tokenizer.decode(ids) == rubric and parse_rubric(rubric, RubricConfig()).ok
    bad = scripted_model.FIRST[0] + scripted_model.INVALID[0]
    assert not parse_rubric(bad, RubricConfig()).ok


def reward_folder(out: pathlib.Path) -> pathlib.Path:
    """The small world's model with a fresh head, as a folder."""
    model = load_with_head(ModelConfig(source="tiny"), std=0.1, seed=0)
    export_hf(model.params, model.spec, model.folder, out)
    return out
