"""Records: advantage, loss, optimizer and update. Imports no JAX."""

from __future__ import annotations

import dataclasses

# Parts of a layer that update.remat can keep (models/forward.py): what the attention kernel's gradient needs of its result,
# rotated queries, keys and values, the residual stream after attention, and two of the feed-forward's products.
REMAT_NAMES = ("attention", "qkv", "residual", "gate", "up")


@dataclasses.dataclass(frozen=True)
class AdvantageConfig:
    kind: str = "mean"  # group_std | mean | leave_one_out | gae (PPO: a critic's, CriticConfig; no group statistics)
    ddof: int = 0  # group_std: 0 population, 1 sample
    epsilon: float = 1e-6  # group_std: added to the std
    drop_zero_variance: bool = True  # groups whose max equals their min
    max_resample: int = 2  # further groups a prompt slot may draw after a dropped one; 0 = keep what came


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """GRPO and its relatives. `function`: '' = coevo_jax.learn.losses.policy_loss, or a dotted path 'module:function'."""

    function: str = ""
    aggregation: str = "token"  # token | sequence | constant
    constant_length: int = 0  # aggregation = constant: the divisor per sequence
    ratio: str = "token"  # token | sequence (GSPO)
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_weight: float = 0.001
    kl_estimator: str = "k3"  # k1 | k2 | k3
    tis_cap: float = 2.0  # truncated importance weight of trainer over sampler; 0 = off
    entropy_weight: float = 0.0
    mask_truncated: bool = False  # truncated completions leave numerator and denominator


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    name: str = "adamw"
    lr: float = 1e-6
    schedule: str = "constant"  # constant | cosine
    warmup_steps: int = 0
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    mu_dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class UpdateConfig:
    inner_iterations: int = 1  # passes over one batch; 1 = old log-probs are the detached current ones
    pack_length: int = 512  # tokens of a packed row
    max_segments: int = 8  # sequences a packed row may hold
    share_prefix: bool = True  # samples of a row that begin alike store their beginning once (attention xla)
    rows_per_micro: int = 4  # rows of one micro-batch (over all devices)
    # What the gradient finds kept of a layer: none = all of it | dots = products | full = its input alone, all else is made
    # again | its input and some of REMAT_NAMES, as attention+qkv
    remat: str = "full"
    logprob_chunk: int = 128  # positions a step of the vocabulary scan
    vocab_tile: int = -1  # instead: ids a step, all positions at once; 0 = by positions; -1 = by ids on one CPU, else 0
    attention: str = "xla"  # xla | splash
    reference: str = "device"  # where the KL's frozen weights wait: device | host (brought back for their pass, then freed)
