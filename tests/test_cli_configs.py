"""Every file of configs/ loads and validates; that of the paper has the paper's values; printing one gives it back."""

from __future__ import annotations

import pathlib

import pytest
from train_support import REPO

from coevo_jax.config import Experiment
from coevo_jax.config.load import load_config
from coevo_jax.config.override import apply_overrides, from_dict, print_config, to_dict
from coevo_jax.config.validate import compat_warnings, validate

CONFIGS = sorted(p for p in (REPO / "configs").rglob("*.py") if not p.name.startswith("_"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_config_is_valid_and_can_be_printed_and_read(path: pathlib.Path) -> None:
    cfg = load_config(str(path))
    validate(cfg)
    assert cfg.name.endswith(path.stem) and compat_warnings(cfg) == []
    assert apply_overrides(Experiment(), print_config(cfg).splitlines()) == cfg
    assert from_dict(Experiment, to_dict(cfg)) == cfg


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_config_says_its_command_and_hardware(path: pathlib.Path) -> None:
    text = path.read_text()
    doc = text.split('"""')[1]
    assert ("run.py" in doc and path.name in doc) or (path.stem == "smollm2_demo" and "make demo" in doc)
    assert "ardware" in doc


def test_names_are_one_each_and_the_old_place_of_the_main_config_gives_the_same() -> None:
    old = REPO / "configs" / "evolm_qwen3_8b.py"
    configs = {path: load_config(str(path)) for path in CONFIGS}
    assert configs.pop(old) == configs[REPO / "configs" / "evolm" / "qwen3_8b.py"]
    assert len({cfg.name for cfg in configs.values()}) == len(configs)


def test_the_paper() -> None:
    """arXiv 2605.03871, main experiment."""
    cfg = load_config(str(REPO / "configs" / "evolm" / "qwen3_8b.py"))
    s, p = cfg.schedule, cfg.pairs
    assert (s.order, s.cycles, s.prompts, s.group, s.k) == ("alternate", 10, 64, 8, 50)
    assert (p.temporal, p.inferred, p.conditioned, p.min_gap, p.max_gap) == (1.0, 0.0, 0.0, 20, 100) and p.per_slot >= 100
    assert cfg.optimizer.lr == 1e-6
    assert (cfg.loss.kl_weight, cfg.loss.kl_estimator) == (0.001, "k3")
    assert (cfg.rubric.reward, cfg.rubric.alpha) == ("margin", 0.7)
    assert (cfg.advantage.kind, cfg.advantage.ddof, cfg.advantage.epsilon) == ("group_std", 0, 1e-6)
    assert cfg.generator.mode == "single" and "Qwen3-8B" in cfg.policy.source and "Qwen3-1.7B" in cfg.judge.source
    assert cfg.judge.protocol == "json_score" and cfg.judge.sampling.temperature == 0.6
    assert cfg.data.max_prompt_tokens == 2048
    assert cfg.answer.max_new_tokens == cfg.rubric_sampling.max_new_tokens == 16384 and cfg.update.pack_length >= 2048 + 16384
    assert cfg.answer.temperature == cfg.rubric_sampling.temperature == 1.0
    assert cfg.answer.top_p == cfg.rubric_sampling.top_p == 1.0  # 0.95 by compat.top_p


def test_a_switch_for_each_difference_of_the_released_code() -> None:
    path = str(REPO / "configs" / "evolm" / "qwen3_8b.py")
    switches = [
        "compat.train_rubric_prompt=rubric_long", "compat.policy_rubric_temperature=0.6", "compat.buffer_entries=2048",
        "compat.pack_mean=true", "compat.failed_to_mean=true", "compat.top_p=0.95",
    ]  # fmt: skip
    cfg = apply_overrides(load_config(path), [*switches, "rubric.reward=binary", "rubric.alpha=1.0", "rubric.prompt=rubric_long"])
    validate(cfg)
    assert [line.split("=")[0] for line in compat_warnings(cfg)] == [s.split("=")[0] for s in switches]
