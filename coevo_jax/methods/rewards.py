"""The reward of a rubric, from its margin between the two answers of a pair and its format (EvoLM section 3, reward ablation).

Axes: G rubrics of a group, J judges.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np

from coevo_jax.config import PanelConfig, RubricConfig
from coevo_jax.judges.aggregate import rubric_rewards


def rubric_reward(accepted: float, rejected: float, fmt: float, cfg: RubricConfig) -> float:
    """alpha * base + (1 - alpha) * format, base by cfg.reward (EvoLM section 3 and its reward ablation).

    margin J+ - J-; binary 1 if J+ > J-; separation (1-w) binary + w clip(margin, 0, 1); log_sigmoid log sigma(margin).
    An invalid rubric has both scores 0 and format 0.
    """
    return margin_reward(accepted - rejected, fmt, cfg)


def margin_reward(margin: float, fmt: float, cfg: RubricConfig) -> float:
    """rubric_reward of a margin."""
    binary = 1.0 if margin > 0 else 0.0
    if cfg.reward == "margin":
        base = margin
    elif cfg.reward == "binary":
        base = binary
    elif cfg.reward == "separation":
        base = (1 - cfg.separation_weight) * binary + cfg.separation_weight * min(max(margin, 0.0), 1.0)
    else:
        base = -float(np.logaddexp(0.0, -margin))
    return cfg.alpha * base + (1 - cfg.alpha) * fmt


def combine_margins(margins_J: Sequence[float], how: str) -> float:
    """One margin of several judges': their mean, their median (majority), or their mean less their population variance."""
    if how == "majority":
        return float(statistics.median(margins_J))
    spread = statistics.pvariance(margins_J) if how == "mean_minus_variance" else 0.0
    return statistics.fmean(margins_J) - spread


def panel_rewards(
    margins_GxJ: Sequence[Sequence[float]], formats_G: Sequence[float], cfg: RubricConfig, panel: PanelConfig
) -> list[float]:
    """Rewards of the rubrics of a group that J judges have scored a pair under; an invalid rubric has margins 0 and format 0.

    rubric.reward = binary: the judges vote, by the formulas of EvoLM's released code (aggregate.rubric_rewards), and the format
    is blended in by alpha. margin_kappa_format: that code's formula, which weighs the format itself. Otherwise `rubric.reward` of
    the combined margin. kappa is one number a group, so it moves rewards and no advantage within the group.
    """
    if panel.aggregate == "margin_kappa_format":
        return rubric_rewards(margins_GxJ, formats_G, panel.aggregate)
    if cfg.reward == "binary":
        votes = rubric_rewards(margins_GxJ, formats_G, panel.aggregate, panel.tie_breaker)
        return [cfg.alpha * base + (1 - cfg.alpha) * fmt for base, fmt in zip(votes, formats_G)]
    return [margin_reward(combine_margins(row, panel.aggregate), fmt, cfg) for row, fmt in zip(margins_GxJ, formats_G)]
