"""Record: direct preference optimisation, on given pairs or on the policy's own. Imports no JAX."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class DpoConfig:
    """schedule.mode=dpo: cycles x k updates on the pairs of `data`. iterated_dpo: each of schedule.cycles iterations labels
    pairs of the policy's own answers (k updates of schedule.prompts questions), then trains on them (docs/trainers.md)."""

    data: str = "tiny"  # dpo: pairs {prompt, chosen, rejected}, sources like those of data.prompts, or 'tiny' (bundled)
    loss: str = "sigmoid"  # sigmoid | robust | hinge | ipo | sigmoid_norm | sppo | apo_zero (learn/preference_losses.py)
    beta: float = 0.1  # ipo: tau; not comparable between summed and length-normalised losses
    label_smoothing: float = 0.0  # share of labels taken to be wrong: sigmoid, sigmoid_norm and robust
    sft_weight: float = 0.0  # of the chosen answer's cross-entropy, a token
    pairs: int = 64  # of an update
    max_tokens: int = 0  # dpo: of a prompt and its longer answer, 0 = update.pack_length; longer ones: data.over_limit
    heldout: int = 0  # dpo: pairs set aside (the last ones of the seed's order), never trained on
    eval_every: int = 50  # dpo: updates between two looks at them
    answers: int = 2  # iterated_dpo: of a question; they make answers / 2 pairs
    updates: int = 0  # iterated_dpo: of an iteration's training; 0 = one pass over the pairs that were kept
    keep_truncated: bool = False  # iterated_dpo: pairs with an answer that was cut at answer.max_new_tokens
    compare: int = 0  # iterated_dpo: updates of a labelling whose questions later iterations answer again, for a win rate
