"""Records: training a reward model, PPO's critic, and what is watched against reward hacking. Imports no JAX."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """A scalar reward model from preference pairs (schedule.mode=reward): cycles x k updates of policy.source."""

    data: str = "tiny"  # pairs {prompt, chosen, rejected}: sources like those of data.prompts, or 'tiny' (bundled)
    pairs: int = 64  # of an update
    max_tokens: int = 0  # of a conversation, 0 = update.pack_length; longer ones: data.over_limit
    margin: float = 0.0  # m in -log sigmoid(chosen - rejected - m)
    data_margin: bool = False  # a pair's own column 'margin' is added to it
    center: float = 0.0  # weight of (chosen + rejected)^2, which keeps rewards around 0
    heldout: int = 0  # pairs set aside (the last ones of the seed's order), never trained on
    eval_every: int = 50  # updates between two looks at them
    head_std: float = 0.02  # of the fresh head; a source that is a reward model already keeps its own


@dataclasses.dataclass(frozen=True)
class RlcerConfig:
    """RLCER (schedule.mode=rlcer; schedule.order=alternate: evolving, the writer of rubrics is trained too)."""

    correlation: float = 0.2  # of a criterion's checks with correctness, above which it is valid
    correct: float = 0.5  # least score of schedule.verifier that is a right answer
    outcome_weight: float = 1.0  # of the reward's 1 or -1
    cot_weight: float = 1.0  # of the points of valid criteria, scaled to [0, 1]


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """PPO's critic (advantage.kind=gae): a model of its own with a scalar head, and an optimizer of its own."""

    source: str = ""  # like ModelConfig.source, or a reward model's folder; '' = the policy's
    lr: float = 1e-5
    warmup_updates: int = 0  # first ones, in which the critic alone trains
    gamma: float = 1.0
    lam: float = 1.0  # lambda of the advantages; the returns are theirs plus the values
    clip: float = 0.2  # of a value around that before the update; 0 = off
    whiten: bool = True  # advantages of a batch have mean 0 and std 1
    head_std: float = 0.0  # of the fresh head: 0 begins with values of 0


@dataclasses.dataclass(frozen=True)
class ControlConfig:
    """Against reward hacking: what is changed, and limits at which an alarm marks a metrics row. A limit of 0 gives no alarm."""

    overlong_buffer: int = 0  # tokens before answer.max_new_tokens over which the penalty rises (DAPO); 0 = none
    overlong_penalty: float = 1.0  # at its end
    rubric_dropout: float = 0.0  # share of criteria that the judge of an answer doesn't see; one at least stays
    heldout_every: int = 1  # updates between two looks through heldout_judge (where it has a source)
    heldout_answers: int = 1  # of each group
    ngram: int = 4  # tokens of one that counts as repeated
    # Alarms.
    length_correlation: float = 0.8  # |correlation| of reward and length inside groups
    repeated_ngrams: float = 0.5  # share of an update's n-grams that stood in their completion before
    verdict_like: float = 0.05  # share of answers with the text of a verdict in them
    part_share: float = 0.0  # share of the rewards' variance that comes from another part than the first
    judge_gap: float = 0.0  # mean of judge - heldout judge, for judges of one scale
    score_gap: float = 0.05  # dynamic, below it: mean over groups of max - min of the scores E, which all lie in [0, 1]
    surface_items: float = 0.5  # dynamic: share of items that mention length or format
    judge_agreement: float = 0.0  # below it: share of pairs of answers that both judges order alike
    entropy_low: float = 0.0  # below it: nats a token
    entropy_high: float = 0.0
    kl: float = 0.0  # of the trained weights to the reference, nats a token
