"""The modes of a run (schedule.mode), one entry each: how a method's stages are made and what they need around them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from coevo_jax.config import Experiment, ModelConfig, arm
from coevo_jax.data import SlotStream
from coevo_jax.methods import (
    dpo,
    dynamic_rubric,
    evolm,
    iterated_dpo,
    preferred,
    reward_model,
    rlcer,
    rubric_arm,
    verifiable,
)
from coevo_jax.methods.context import Context
from coevo_jax.methods.prepared import Prepared
from coevo_jax.methods.stage import Stage
from coevo_jax.progress import RunConsole
from coevo_jax.text.chat import ChatTokenizer


@dataclasses.dataclass(frozen=True)
class Trained:
    """Weights that a mode trains beside policy and generator. key: of `model` in the config; lr 0: optimizer.lr."""

    key: str
    model: ModelConfig
    lr: float = 0.0


@dataclasses.dataclass(frozen=True)
class Mode:
    """`stages`: the loop. judged: `judge` and its panel serve; sampled: something is drawn; prompts: data.prompts is read.

    models: weights that train under a role of their own, beside policy and generator; held: such that don't, each with its key.
    streams: data of its own, by stream name; `count` gives the tokens of a question in the policy's template; data_keys: the
    config key of each. stores: slots of each store that the method keeps (Context.stores). check: what can only be known once all
    is loaded. templates: prompt templates by the key that names them, which the run folder then binds. show: (title, role, ids)
    of the prompts that a dry run prints. prepare: makes something once before the first update.
    """

    stages: Callable[[Experiment], list[Stage]]
    judged: bool = False
    sampled: bool = True
    prompts: bool = True
    models: Callable[[Experiment], dict[str, Trained]] = lambda cfg: {}
    held: Callable[[Experiment], dict[str, tuple[str, ModelConfig]]] = lambda cfg: {}
    streams: Callable[[Experiment, ChatTokenizer, Callable[[str], int], RunConsole], dict[str, SlotStream]] = (
        lambda cfg, tokenizer, count, console: {}
    )
    check: Callable[[Context], None] = lambda context: None
    data_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    stores: Callable[[Experiment], dict[str, int]] = lambda cfg: {}
    templates: Callable[[Experiment], dict[str, str]] = lambda cfg: {}
    prepare: Callable[[Context, Prepared], bool] | None = None
    show: Callable[[Context], list[tuple[str, str, list[int]]]] | None = None


MODES: dict[str, Mode] = {
    "evolm": Mode(evolm.stages, judged=True),
    "verifiable": Mode(verifiable.stages),
    "sft": Mode(lambda cfg: [], sampled=False, prompts=False),
    "rlcer": Mode(rlcer.stages, judged=True),
    "dynamic": Mode(
        dynamic_rubric.stages,
        judged=True,
        streams=dynamic_rubric.streams,
        data_keys=dynamic_rubric.DATA_KEYS,
        check=dynamic_rubric.check,
        templates=dynamic_rubric.templates,
    ),
    "reward": Mode(
        reward_model.stages,
        sampled=False,
        prompts=False,
        streams=reward_model.streams,
        data_keys={reward_model.STREAM: "reward.data"},
    ),
    "dpo": Mode(
        dpo.stages,
        sampled=False,
        prompts=False,
        streams=dpo.streams,
        data_keys={dpo.STREAM: "dpo.data"},
        prepare=dpo.prepare,
    ),
    "iterated_dpo": Mode(iterated_dpo.stages, judged=True, check=iterated_dpo.check, stores=preferred.stores),
    arm.MODE: Mode(
        rubric_arm.stages,
        models=lambda cfg: (
            {"judge": Trained("arm.judge", arm.judge_model(cfg), cfg.arm.judge_lr)} if arm.trains_judge(cfg) else {}
        ),
        held=rubric_arm.held,
        streams=rubric_arm.streams,
        check=rubric_arm.check,
        stores=rubric_arm.stores,
        templates=rubric_arm.templates,
        show=rubric_arm.show,
    ),
}
