"""Records: where models come from, how they are placed and how they sample. Imports no JAX."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How one kind of text is drawn. top_p = 1 and top_k = 0 keep the full support (design.md 4.4)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 64
    min_new_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """One role's model.

    source: 'smollm2' (the embedded model), 'tiny' (the small world's model), a Hugging Face folder, a .gguf file,
    or an Orbax folder written by this project.
    """

    source: str = "smollm2"
    dtype: str = "float32"  # compute dtype: float32 or bfloat16
    param_dtype: str = "float32"
    thinking: bool = False  # passed to the chat template as enable_thinking
    system_prompt: str = ""  # of answers; '' = the template is given an explicit empty default, see text/chat.py
    sha256: str = ""  # of the weight file; '' = not checked


@dataclasses.dataclass(frozen=True)
class GeneratorConfig:
    """The rubric generator. mode 'single': the policy's weights and optimizer state, switched by the prompt; 'two': its own."""

    mode: str = "single"  # single | two
    source: str = ""  # two-model mode: like ModelConfig.source; '' = the policy's
    thinking: bool = False
    frozen: bool = False  # sequential schedules and fixed generators


@dataclasses.dataclass(frozen=True)
class JudgeConfig:
    """The frozen judge."""

    source: str = "smollm2"  # like ModelConfig.source, or 'oracle' (rules of the small world)
    protocol: str = "criterion_logits"  # json_score | json_criteria | criterion_logits | oracle
    dtype: str = "float32"
    thinking: bool = False
    sampling: Sampling = Sampling(temperature=0.6, max_new_tokens=256)
    retries: int = 2  # further tries of a failed verdict, each with its own noise
    min_yes_no_mass: float = 0.05  # criterion_logits: less probability on yes and no than this is a failure
    alarm_failure_share: float = 0.2  # warn when more verdicts of an update fail
    oracle_noise: float = 0.0  # oracle: share of the criterion checks that a coin decides, 0 = a perfect judge
    oracle_failure_rate: float = 0.0  # oracle: share of the verdicts that fail
    sha256: str = ""


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """The engine. slots: rows decoded together; lengths are tokens."""

    slots: int = 32
    max_prompt: int = 512
    max_new: int = 128
    steps_per_dispatch: int = 16
    prefill_tokens: int = 2048  # token budget of one prefill program
    kv_dtype: str = "float32"
    refill_free_share: float = 0.25  # a dispatch ends early at this share of free slots while the queue is not empty


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; data = -1 takes the rest."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
