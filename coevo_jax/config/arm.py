"""Record and checks of Rubric-ARM (arXiv 2602.01511): rounds of a judge and a generator over labelled pairs, then a policy that
trains on what they say. Imports no JAX."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from coevo_jax.config.model import ModelConfig, Sampling

if TYPE_CHECKING:
    from coevo_jax.config import Experiment

MODE = "rubric_arm"


@dataclasses.dataclass(frozen=True)
class ArmConfig:
    """schedule.mode=rubric_arm (docs/rubric_arm.md). A round: one list for each pair of its part of data.pairs (cached), GRPO on
    the judge under those lists, GRPO on the generator by the frozen judge's verdict."""

    rounds: int = 3
    order: str = "judge_first"  # judge_first | generator_first (the ablation: lists are kept after the generator's phase)
    part: int = 64  # pairs of a round; parts share no question
    test: int = 16  # pairs whose questions nothing trains on
    measure: str = "ends"  # looks at the test pairs: none | ends (as loaded, after the warm-up, after the last round) | rounds
    votes: int = 5  # judgements of a pair and order in such a look; the majority is voting@k
    cached: int = 64  # lists made in one update of the caching stage
    retries: int = 1  # further tries, at temperature 1, of a frozen judge's verdict that can't be read
    judge: str = "trained"  # trained (weights of its own) | oracle (the small world's rules, `judge.oracle_noise`)
    judge_source: str = ""  # like ModelConfig.source; '' = the policy's
    judge_lr: float = 0.0  # 0 = optimizer.lr
    judge_prompt: str = "judge_comparison"  # template name or path
    judge_prompts: int = 32  # pairs of an update
    judge_group: int = 7  # judgements of a pair
    judge_updates: int = 2  # of a round
    judge_sampling: Sampling = Sampling(max_new_tokens=256)
    format_weight: float = 1.0  # of the judge's structural reward beside its correctness; 0: the paper's ablation
    generator_prompts: int = 48
    generator_group: int = 6
    generator_updates: int = 1  # of a round
    generator_format: float = 0.0  # added for any list that can be read (1 in EvoLM's port; none in the paper)
    warmup_updates: int = 0  # supervised updates of each, generator and judge, before the rounds (warmup.batch, warmup.lr)
    demonstrations: str = "demo"  # of the warm-up: 'demo', 'tiny' (bundled) or a JSONL file (data/arm.py)
    policy: str = "none"  # after the rounds: none | grpo (schedule.cycles x schedule.k updates) | dpo | iterated_dpo (DpoConfig)


CHOICES: dict[str, tuple[str, ...]] = {
    "arm.order": ("judge_first", "generator_first"),
    "arm.measure": ("none", "ends", "rounds"),
    "arm.judge": ("trained", "oracle"),
    "arm.policy": ("none", "grpo", "dpo", "iterated_dpo"),
}
RANGES: dict[str, tuple[float, float]] = {
    **{f"arm.{key}": (0, math.inf) for key in ("rounds", "test", "judge_lr", "format_weight", "generator_format")},
    **{f"arm.{key}": (1, math.inf) for key in ("part", "cached", "judge_prompts", "generator_prompts")},
    **{f"arm.{key}": (2, math.inf) for key in ("judge_group", "generator_group")},
    **{f"arm.{key}": (0, math.inf) for key in ("judge_updates", "generator_updates", "warmup_updates")},
    "arm.votes": (1, 64),
    "arm.retries": (0, 16),
}


def trains_judge(cfg: Experiment) -> bool:
    """Does anything train the judge's weights?"""
    arm = cfg.arm
    return cfg.schedule.mode == MODE and arm.judge == "trained" and (arm.rounds * arm.judge_updates > 0 or arm.warmup_updates > 0)


def trains_lists(cfg: Experiment) -> bool:
    """Does anything train the generator's weights?"""
    arm = cfg.arm
    return cfg.schedule.mode == MODE and (arm.rounds * arm.generator_updates > 0 or arm.warmup_updates > 0)


def judge_model(cfg: Experiment) -> ModelConfig:
    """The judge's weights."""
    source = cfg.arm.judge_source or cfg.policy.source
    same = source == cfg.policy.source
    return dataclasses.replace(cfg.policy, source=source, sha256=cfg.policy.sha256 if same else "")


def samplings(cfg: Experiment) -> Iterator[tuple[str, Sampling, bool]]:
    """As validate.used_samplings."""
    if cfg.arm.policy != "none":
        yield "answer", cfg.answer, True
    yield "rubric_sampling", cfg.rubric_sampling, trains_lists(cfg)
    if cfg.arm.judge == "trained":
        yield "arm.judge_sampling", cfg.arm.judge_sampling, False  # its prompts hold two answers: data/arm.py limits them


def check_arm(cfg: Experiment) -> None:
    """Rubric-ARM's axes, and no settings of it in another mode."""
    from coevo_jax.config.several import require

    arm = cfg.arm
    if cfg.schedule.mode != MODE:
        require(arm == ArmConfig(), f"the settings of `arm` would be ignored: schedule.mode={cfg.schedule.mode}",
                "arm, schedule.mode", "schedule.mode=rubric_arm")  # fmt: skip
        require(cfg.rubric.schema != "numbered_rules" or cfg.schedule.mode == "evolm",
                f"rubric.schema=numbered_rules in schedule.mode={cfg.schedule.mode}", "rubric.schema",
                "schedule.mode=evolm or rubric_arm")  # fmt: skip
        return
    require(cfg.rubric.schema == "numbered_rules" and cfg.rubric.source == "generator" and not cfg.rubric.guided,
            "the generator of Rubric-ARM writes a numbered list, unguided", "rubric.schema, rubric.source, rubric.guided",
            "rubric.schema=numbered_rules, rubric.source=generator, rubric.guided=false")  # fmt: skip
    require(cfg.generator.mode == "two" and not cfg.generator.source.startswith("api:"),
            "generator and judge of Rubric-ARM are models of their own", "generator.mode, generator.source",
            "generator.mode=two and a source with weights")  # fmt: skip
    require(cfg.generator.frozen != trains_lists(cfg), f"generator.frozen={cfg.generator.frozen}".lower() + ", and the schedule "
            + ("trains it" if cfg.generator.frozen else "never trains it"), "generator.frozen, arm.rounds, arm.warmup_updates",
            f"generator.frozen={str(not cfg.generator.frozen).lower()}")  # fmt: skip
    require(not cfg.warmup.on, "Rubric-ARM warms both of its models up", "warmup.updates", "0, and arm.warmup_updates")
    require(arm.judge == "trained" or not (arm.judge_source or arm.judge_lr or arm.warmup_updates),
            "arm.judge=oracle is rules: it has no weights and no warm-up", "arm.judge, arm.judge_source, arm.warmup_updates",
            "arm.judge=trained")  # fmt: skip
    require(arm.rounds + arm.warmup_updates > 0 or arm.policy != "none", "nothing trains: no rounds, no warm-up, no policy",
            "arm.rounds, arm.policy", "arm.rounds of at least 1")  # fmt: skip
    for key in ("judge_prompts", "generator_prompts"):
        slots = getattr(arm, key)
        require(slots <= cfg.schedule.prompts, f"arm.{key}={slots} is above schedule.prompts={cfg.schedule.prompts}",
                f"arm.{key}, schedule.prompts", f"at most {cfg.schedule.prompts}")  # fmt: skip
        require(arm.rounds == 0 or slots <= arm.part, f"arm.{key}={slots} is above arm.part={arm.part}", f"arm.{key}, arm.part",
                f"at most {arm.part}")  # fmt: skip
    require(cfg.advantage.kind != "gae", "Rubric-ARM has no critic", "advantage.kind", "advantage.kind=group_std")
