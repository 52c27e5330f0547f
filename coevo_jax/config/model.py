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


API = "api:"
STAND_IN = "stand-in"  # a base_url: a small endpoint on this machine plays the role (remote/stand_in.py), as scale=smoke has it


def api_model(source: str) -> str:
    """MODEL of a source 'api:MODEL', which an endpoint serves; '' for a source with weights."""
    return source.removeprefix(API) if source.startswith(API) else ""


@dataclasses.dataclass(frozen=True)
class EndpointConfig:
    """An OpenAI-compatible endpoint (POST base_url/chat/completions), for a role whose source is 'api:MODEL'. docs/remote.md."""

    base_url: str = ""  # such as https://api.openai.com/v1 or http://localhost:8000/v1; STAND_IN
    key_env: str = ""  # NAME of the environment variable that holds the key, never the key; '' = none is sent
    concurrency: int = 8  # requests under way at a time
    timeout_s: float = 60.0  # of one request, from the connection to the last byte
    retries: int = 5  # further tries after a timeout, a broken connection, HTTP 408, 409, 425, 429, 5xx or a malformed body
    backoff_s: float = 1.0  # wait before the first retry; doubles with each, with jitter
    max_wait_s: float = 60.0  # longest wait, one that the endpoint asks for (Retry-After) included
    price_in: float = 0.0  # per million prompt tokens, in any currency
    price_out: float = 0.0  # per million completion tokens
    cache: str = "run"  # 'run': a file in the run folder; 'off'; else the path of a file that runs share
    length_field: str = "max_tokens"  # max_tokens | max_completion_tokens
    top_logprobs: int = 20  # criterion_logits: how many of the next tokens the endpoint lists
    extra_body: str = ""  # a JSON object that joins every request, such as {"chat_template_kwargs": {"enable_thinking": false}}


@dataclasses.dataclass(frozen=True)
class GeneratorConfig:
    """The rubric generator. mode 'single': the policy's weights and optimizer state, switched by the prompt; 'two': its own."""

    mode: str = "single"  # single | two
    source: str = ""  # two-model mode: like ModelConfig.source, '' = the policy's; or 'api:MODEL', which never trains
    thinking: bool = False
    frozen: bool = False  # sequential schedules and fixed generators
    lr: float = 0.0  # two-model mode: learning rate of its optimizer, 0 = optimizer.lr
    endpoint: EndpointConfig = EndpointConfig()  # source = 'api:MODEL'


@dataclasses.dataclass(frozen=True)
class JudgeConfig:
    """The frozen judge."""

    source: str = "smollm2"  # like ModelConfig.source, 'api:MODEL' (an endpoint), or 'oracle' (rules of the small world)
    # With a rubric: json_score | json_criteria | criterion_logits | rar_implicit | rar_explicit | oracle (the small world's).
    # points (schedule.mode=rlcer). Without: likert | likert_reference | scalar (a reward model) | random (a coin).
    protocol: str = "criterion_logits"
    dtype: str = "float32"
    weights: str = "full"  # full | int8: matrices as int8 with a scale an output channel (models/quantize.py)
    thinking: bool = False
    sampling: Sampling = Sampling(temperature=0.6, max_new_tokens=256)
    samples: int = 1  # verdicts asked for an answer, each with its own noise; those that fail are left out
    # How the two answers of a pair are judged under a rubric: scores (each alone) | pairwise (side by side; docs/signals.md).
    pairs: str = "scores"
    pairs_prompt: str = ""  # template of pairs side by side, a name or a path; '' = that of `pairs`
    order: str = "both"  # pairwise: the better answer comes first | random | both (two calls, averaged) | agree (or it is a tie)
    combine: str = "mean"  # of the samples: mean | majority (the median) | mean_minus_variance
    guided: bool = False  # json_score, json_criteria: verdicts are drawn under a grammar (extra 'guided')
    retries: int = 2  # further tries of a failed verdict, each with its own noise
    min_yes_no_mass: float = 0.05  # criterion_logits: less probability on yes and no than this is a failure
    alarm_failure_share: float = 0.2  # warn when more verdicts of an update fail
    scalar: str = "logit"  # scalar: the score is the reward model's logit, or its 'sigmoid'
    oracle_noise: float = 0.0  # oracle: share of the criterion checks that a coin decides, 0 = a perfect judge
    oracle_failure_rate: float = 0.0  # oracle: share of the verdicts that fail
    max_prompt: int = 0  # of its engine, whose prompts hold an answer and a rubric; 0 = sampler.max_prompt
    length_classes: tuple[tuple[int, int], ...] = ()  # of its engine; () = sampler.length_classes
    sha256: str = ""
    endpoint: EndpointConfig = EndpointConfig()  # source = 'api:MODEL'


@dataclasses.dataclass(frozen=True)
class PanelConfig:
    """Further judges beside `judge`, each with all of its settings (keys panel.judges.0.source, ...).

    Those whose first cycle is the latest that has begun serve together; `judge` begins with cycle 0. So () is a panel of all of
    them, (3, 6) a curriculum of three judges in turn, and (3, 3) one judge and then two. One that serves no more is unloaded.
    """

    judges: tuple[JudgeConfig, ...] = ()
    from_cycle: tuple[int, ...] = ()  # first cycle of each of `judges`; () = 0
    # What several judges make of an answer, and of a rubric (docs/signals.md); margin_kappa_format is of rubrics alone.
    aggregate: str = "mean"  # mean | majority | mean_minus_variance | margin_kappa_format
    tie_breaker: str = "mean_score"  # mean_score | first_judge


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """The engine. slots: rows decoded together; lengths are tokens."""

    slots: int = 32
    max_prompt: int = 512
    max_new: int = 128
    steps_per_dispatch: int = 16
    prefill_tokens: int = 2048  # token budget of one prefill program
    kv_dtype: str = "float32"
    length_classes: tuple[tuple[int, int], ...] = ()  # (slots, positions) each; () = one class that holds any row
    share_heads: bool = True  # prompts that begin alike are prefilled once, as far as share_least tokens are saved
    share_least: int = 64
    heads: int = 8  # rows of the store that shared heads are kept in
    share_decode: bool = False  # slots refer to the store's rows, so that a group's prompt is kept once; off, each has a copy
    narrow: tuple[int, ...] = ()  # further decode programs over the first so many slots, for when few rows run (CPU)
    check_every: int = 1  # steps between two looks for finished rows inside a dispatch
    read_lag: int = 0  # dispatches between one and the reading of its report (pods: 1)
    forced_tokens: int = 0  # most tokens that a request may force at the beginning of its completions
    attention: str = "xla"  # xla | pallas (TPU: a kernel for decode, splash for prefill without shared heads)
    refill_free_share: float = 0.25  # a dispatch ends early at this share of free slots while the queue is not empty


def judge_sampler(sampler: SamplerConfig, judge: JudgeConfig) -> SamplerConfig:
    """The engine of a judge with weights: that of the policy but for what the judge's record sets. Classes of its own need hold
    no more than its prompts and verdicts."""
    if judge.length_classes:
        slots, new = sum(n for n, _ in judge.length_classes), min(judge.sampling.max_new_tokens, sampler.max_new)
        sampler = dataclasses.replace(sampler, slots=slots, length_classes=judge.length_classes, narrow=(), max_new=new)
    return dataclasses.replace(sampler, max_prompt=judge.max_prompt) if judge.max_prompt else sampler


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Devices along each axis; data or fsdp = -1 takes the rest."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1
    # tensor: heads and feed-forward over `tensor`, as decoding has them | fsdp: rows over all chips | context: a row's time over
    # `tensor`, rows over the rest
    train: str = "tensor"
