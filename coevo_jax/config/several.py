"""Checks of what a run may have several of: judges, policies that train, frozen policies. Which judges serve in a cycle."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from coevo_jax.config import Experiment, JudgeConfig, ModelConfig, PanelConfig
from coevo_jax.config.model import API
from coevo_jax.errors import UserError


def require(ok: bool, what: str, where: str, expected: str, close: str = "") -> None:
    """UserError unless `ok`."""
    if not ok:
        raise UserError(what, where=where, expected=expected, nearest=close)


# Items of the lists of records, and the record whose checks hold for each.
ITEMS = {"panel.judges": "judge", "policies": "policy", "pairs.frozen_models": "policy"}


def rule_of(key: str) -> str:
    """The key whose choices and range hold for `key`: 'judge.dtype' for 'panel.judges.1.dtype'."""
    for listed, like in ITEMS.items():
        key = re.sub(rf"^{re.escape(listed)}\.\d+\.", f"{like}.", key)
    return key


# --------------------------------------------------------------------------------------------------------------- judges


def all_judges(cfg: Experiment) -> tuple[JudgeConfig, ...]:
    """`judge` and those of `panel.judges`; their numbers are their places here."""
    return (cfg.judge, *cfg.panel.judges)


def judge_name(number: int) -> str:
    """'judge', 'judge_1', ...: in metrics, messages and checkpoints."""
    return f"judge_{number}" if number else "judge"


def serving(panel: PanelConfig, cycle: int) -> tuple[int, ...]:
    """Numbers of the judges that serve in a cycle: those whose first cycle is the latest that has begun."""
    first = (0, *(panel.from_cycle or (0,) * len(panel.judges)))
    latest = max(start for start in first if start <= cycle)
    return tuple(i for i, start in enumerate(first) if start == latest)


def last_cycle(cfg: Experiment) -> int:
    """Number of the last cycle of the schedule; a generator that trains first is cycle 0, the policy after it cycle 1."""
    return 1 if cfg.schedule.order == "generator_first" else cfg.schedule.cycles - 1


def check_panel(cfg: Experiment, check_judge: Callable[[Experiment], None], trains_generator: bool) -> None:
    """check_judge: raises for a bad `judge`; each of the panel is checked in its place."""
    panel, keys = cfg.panel, "panel.aggregate, panel.judges"
    if not panel.judges:
        plain = (panel.aggregate, panel.tie_breaker, panel.from_cycle) == ("mean", "mean_score", ())
        require(plain, "the settings of `panel` would be ignored: panel.judges is empty", "panel", "panel.judges.0.source=...")
        return
    require(cfg.schedule.mode == "evolm", f"schedule.mode={cfg.schedule.mode} has no judge, so panel.judges would be ignored",
            "panel.judges, schedule.mode", "schedule.mode=evolm")  # fmt: skip
    _check_cycles(cfg)
    for i, judge in enumerate(panel.judges):
        try:
            check_judge(dataclasses.replace(cfg, judge=judge, panel=PanelConfig()))
        except UserError as error:
            place = f"panel.judges.{i}."
            texts = [text.replace("judge.", place) for text in (error.what, error.where, error.expected)]
            raise UserError(texts[0], where=texts[1], expected=texts[2], nearest=error.nearest) from error
    groups = [serving(panel, cycle) for cycle in range(last_cycle(cfg) + 1)]
    together = [group for group in groups if len(group) > 1]
    what = f"panel.aggregate={panel.aggregate} would be ignored: no two judges serve together"
    require(bool(together) or panel.aggregate == "mean", what, keys, "panel.aggregate=mean")
    for judge in (all_judges(cfg)[i] for group in together for i in group):
        what = "a reward model's logit can't be combined with scores in [0, 1]"
        require(judge.protocol != "scalar" or judge.scalar == "sigmoid", what, "panel.judges, judge.scalar", "scalar=sigmoid")
        alike = len({(all_judges(cfg)[i].pairs, all_judges(cfg)[i].order) for group in together for i in group}) == 1
        require(
            alike, "judges that serve together judge pairs alike", "panel.judges, judge.pairs, judge.order", "the same of all"
        )
    if panel.aggregate == "margin_kappa_format":
        what = f"it is a reward of rubrics from their margins, and rubric.reward={cfg.rubric.reward}"
        expected = "rubric.reward=margin, in a run that trains the generator"
        require(trains_generator and cfg.rubric.reward == "margin", f"panel.aggregate=margin_kappa_format: {what}",
                "panel.aggregate, rubric.reward, schedule.order", expected)  # fmt: skip


def _check_cycles(cfg: Experiment) -> None:
    starts, judges, last = cfg.panel.from_cycle, cfg.panel.judges, last_cycle(cfg)
    shown = ",".join(map(str, starts))
    require(not starts or len(starts) == len(judges),
            f"panel.from_cycle={shown} has {len(starts)} cycles for the {len(judges)} of panel.judges",
            "panel.from_cycle, panel.judges", f"{len(judges)} cycles, or none")  # fmt: skip
    in_order = all(start >= 0 for start in starts) and list(starts) == sorted(starts)
    require(in_order, f"panel.from_cycle={shown} is not in order", "panel.from_cycle", "cycles from 0, each at least the last")
    require(all(start <= last for start in starts), f"panel.from_cycle={shown}: the last cycle of the run is {last}",
            "panel.from_cycle, schedule.cycles", f"cycles of at most {last}")  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- policies


def policy_names(cfg: Experiment) -> tuple[str, ...]:
    """Roles of the policies that train: 'policy', 'policy_1', ..."""
    return ("policy", *(f"policy_{i}" for i in range(1, len(cfg.policies) + 1)))


def frozen_models(cfg: Experiment) -> dict[str, ModelConfig]:
    """The frozen policies of pairs by role, 'frozen_0', ..., best first."""
    return {f"frozen_{i}": model for i, model in enumerate(cfg.pairs.frozen_models)}


def check_policies(cfg: Experiment, trains_generator: bool) -> None:
    """Further policies that train, and the frozen ones and the data that pairs come from."""
    for i, model in enumerate(cfg.policies):
        _check_weights(f"policies.{i}", model)
        same = (model.dtype, model.param_dtype) == (cfg.policy.dtype, cfg.policy.param_dtype)
        key, what = f"policies.{i}.dtype", f"policies.{i} has dtypes {model.dtype}, {model.param_dtype}"
        require(same, what, f"{key}, policies.{i}.param_dtype", f"those of policy: {cfg.policy.dtype}, {cfg.policy.param_dtype}")
    if cfg.policies:
        order = cfg.schedule.order
        what = f"policies would be ignored: schedule.mode={cfg.schedule.mode}, schedule.order={order}"
        expected = "schedule.mode=evolm with schedule.order=alternate or policy_only"
        taken = cfg.schedule.mode == "evolm" and order in ("alternate", "policy_only")
        require(taken, what, "policies, schedule.mode, schedule.order", expected)
        require(not cfg.compat.buffer_entries, "compat.buffer_entries is one store of answers, whichever policy gave them",
                "policies, compat.buffer_entries", "compat.buffer_entries=0")  # fmt: skip
    for i, model in enumerate(cfg.pairs.frozen_models):
        _check_weights(f"pairs.frozen_models.{i}", model)
    _check_sources(cfg, trains_generator)


def _check_sources(cfg: Experiment, trains_generator: bool) -> None:
    pairs, used = cfg.pairs, trains_generator
    models, weight = len(pairs.frozen_models), pairs.frozen
    require(weight == 0 or models >= 2, f"pairs.frozen={weight} compares frozen policies, and pairs.frozen_models has {models}",
            "pairs.frozen, pairs.frozen_models", "at least two of them, best first")  # fmt: skip
    require(models == 0 or (weight > 0 and used), "pairs.frozen_models would be loaded and never asked",
            "pairs.frozen_models, pairs.frozen", "pairs.frozen above 0 in a run that trains the generator")  # fmt: skip
    require(pairs.dataset == 0 or pairs.data != "", f"pairs.dataset={pairs.dataset} takes pairs of pairs.data, which is empty",
            "pairs.dataset, pairs.data", "a JSONL or Parquet file with prompt, chosen and rejected")  # fmt: skip
    require(pairs.data == "" or (pairs.dataset > 0 and used), f"pairs.data={pairs.data!r} would be ignored",
            "pairs.data, pairs.dataset", "pairs.dataset above 0 in a run that trains the generator")  # fmt: skip


def _check_weights(key: str, model: ModelConfig) -> None:
    require(model.source != "" and not model.source.startswith(API), f"{key}.source={model.source!r} has no weights here",
            f"{key}.source", "a source with weights, like policy.source")  # fmt: skip
