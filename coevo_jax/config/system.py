"""Records: data, rubrics, pairs, schedule, warm-up, run folder and compat switches. Imports no JAX."""

from __future__ import annotations

import dataclasses

from coevo_jax.config.model import ModelConfig


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """prompts: a JSONL or Parquet path, 'demo' (bundled), 'tiny' (small world), 'reasoning_gym:TASK',
    or a mixture 'a.jsonl:0.7,b.jsonl:0.3'. 'a.jsonl?prompt=question&reference=gold' names a file's columns."""

    prompts: str = "demo"
    prompt_column: str = "prompt"
    rankings: str = (
        "labelled"  # dynamic: ranked answers {prompt, answers, scores or ranks}; 'labelled', 'tiny' (bundled) or files
    )
    max_prompt_tokens: int = 256
    over_limit: str = "filter"  # filter | refuse
    heldout: int = 0  # prompts set aside (the last ones of the seed's order)
    # rubric_arm: labelled pairs {prompt, chosen, rejected} or {prompt, response_a, response_b, label}: a file, 'demo' or 'tiny'
    pairs: str = "demo"


@dataclasses.dataclass(frozen=True)
class RubricConfig:
    """Rubric writing and its reward (EvoLM section 3; alpha = 0.7)."""

    # Whose rubrics the policy is judged by: generator | none (the judge reads none) | predefined (RaR's four generic items)
    # | data (the record's 'rubric', in the form of `schema`). The last three need schedule.order=policy_only.
    source: str = "generator"
    prompt: str = "rubric_dealbreaker"  # rubric_long | rubric_dealbreaker, or a path to a template file
    # json_criteria | rar | points (RLCER) | numbered_rules | weighted_items (coevo_jax/rubrics, one file a schema)
    schema: str = "json_criteria"
    reward: str = "margin"  # margin | binary | separation | log_sigmoid
    separation_weight: float = 0.3
    alpha: float = 0.7  # alpha * reward + (1 - alpha) * format
    min_criteria: int = 2
    max_criteria: int = 0  # 0 = no limit
    weight_tolerance: float = 0.15
    pitfall_weight: float = 0.9  # rar: weight of an item of the category Pitfall (0.8 in the paper's first version)
    retry_temperatures: tuple[float, ...] = (0.6, 0.3, 0.1)  # policy phase: further tries of an invalid rubric
    guided: bool = False  # rubrics that aren't trained are drawn under a grammar (extra 'guided'); trained ones never are


@dataclasses.dataclass(frozen=True)
class PairConfig:
    """Where preference pairs come from (docs/signals.md). Weights of a mixture: temporal to dataset."""

    temporal: float = 1.0
    inferred: float = 0.0
    conditioned: float = 0.0
    frozen: float = 0.0  # answers of two of `frozen_models`, of which the one named first wins
    dataset: float = 0.0  # chosen and rejected of `data`
    frozen_models: tuple[ModelConfig, ...] = ()  # best first (keys pairs.frozen_models.0.source, ...)
    data: str = ""  # pairs {prompt, chosen, rejected} from sources like those of data.prompts; 'tiny' (small world)
    leak_words: int = 8  # a conditioned answer with so many words of its rubric in a row makes no pair; 0 = not checked
    min_gap: int = 20  # policy updates between the stored and the fresh answer
    max_gap: int = 100  # 0 = no upper bound
    per_slot: int = 128  # answers the buffer holds for each prompt slot
    on_empty: str = "nearest"  # no stored answer fits the gap: nearest (counted) | drop
    inference_prompt: str = "question_inference"  # template name or path, like rubric.prompt
    conditioned_prompt: str = "conditioned_answer"


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
    """order: alternate (policy then rubric, K updates each) | generator_first | policy_only | generator_only."""

    order: str = "alternate"
    cycles: int = 10
    k: int = 50
    prompts: int = 64  # prompt slots of an update
    group: int = 8  # samples a prompt
    # evolm | sft | verifiable | rlcer (RlcerConfig) | reward (RewardConfig) | dpo, iterated_dpo (DpoConfig)
    # | rubric_arm (ArmConfig) | dynamic (DynamicConfig)
    mode: str = "evolm"
    verifier: str = ""  # verifiable, rlcer: dotted path 'module:function'


@dataclasses.dataclass(frozen=True)
class WarmupConfig:
    """Supervised first stage on chat data, and all of schedule.mode=sft; without updates and epochs there is none.

    An example is one assistant turn with what came before it; each is drawn once an epoch."""

    updates: int = 0
    epochs: float = 0.0  # instead of `updates`: passes over the data
    data: str = "demo"  # chat from sources like those of data.prompts, 'demo' (bundled question and rubric examples) or 'tiny'
    batch: int = 16
    lr: float = 1e-4
    schedule: str = "constant"  # constant | cosine, which falls to 0 at the end of the stage
    warmup_steps: int = 0  # first updates, over which the learning rate rises
    heldout: int = 0  # conversations set aside (the last ones of the seed's order), never trained on
    eval_every: int = 50  # updates between two looks at them
    seed: int = 0

    @property
    def on(self) -> bool:
        """Is there such a stage?"""
        return self.updates > 0 or self.epochs > 0


@dataclasses.dataclass(frozen=True)
class RunConfig:
    save_every: int = 25  # updates
    keep: int = 2
    rollouts_every: int = 1  # updates between dumps
    tensorboard: bool = False
    wandb: str = "off"  # off | online | offline
    wandb_project: str = "coevo-jax"
    show_every: int = 0  # updates between two tables of completions on the console; 0 = none
    show: int = 4  # rows of one
    profile: str = ""  # updates to trace with the profiler, FIRST:LAST; '' = none
    compile_cache: str = ""  # folder; '' = the user cache
    dead_after_s: float = 60.0  # several processes: the run ends when one gives no sign of life for so long
    hang_after_s: float = 3600.0  # and when one waits for another for so long; above the longest compile, update or save
    allow_changed_inputs: bool = False  # go on though a prompt template or tokenizer is not as it was when the run began


@dataclasses.dataclass(frozen=True)
class CompatConfig:
    """Faults of the released EvoLM code, each off; a run with one on warns at start and marks its rows (design.md 4.12)."""

    train_rubric_prompt: str = ""  # another template for the trained prompt than the deployed one (released: rubric_long)
    policy_rubric_temperature: float = 0.0  # released: 0.6; 0 = that of training
    buffer_entries: int = 0  # released: one global FIFO of 2048
    pack_mean: bool = False  # mean over a packed row, then over rows
    failed_to_mean: bool = False  # a failed verdict takes its group's mean
    top_p: float = 0.0  # released: 0.95 while the loss uses the full softmax; 0 = off
