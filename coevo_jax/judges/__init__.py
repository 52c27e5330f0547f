"""Judges: one file a protocol (requests out, verdicts in), chosen by `judge.protocol`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from coevo_jax.config import JudgeConfig
from coevo_jax.errors import UserError, nearest
from coevo_jax.judges import comparison, criterion_logits, json_criteria, json_score, likert, pairwise, points, rar_explicit
from coevo_jax.judges.aggregate import weighted_mean
from coevo_jax.judges.base import MAX_ATTEMPTS, Instrument, Judge, JudgeItem
from coevo_jax.judges.coin import CoinJudge
from coevo_jax.judges.several import Sampled
from coevo_jax.text.chat import ChatTokenizer

if TYPE_CHECKING:
    from coevo_jax.remote import Endpoint
    from coevo_jax.sampler import Engine


def _oracle(cfg: JudgeConfig, seed: int) -> Judge:
    from coevo_jax.judges.world import OracleJudge  # the small world is loaded only where it is asked for

    return OracleJudge(noise=cfg.oracle_noise, failure_rate=cfg.oracle_failure_rate, seed=seed)


def _coin(cfg: JudgeConfig, seed: int) -> Judge:
    return CoinJudge(seed)


# protocol -> judge. Those over a model take an Instrument, the others the config and the run's seed.
JUDGES: dict[str, Callable[[Instrument], Judge]] = {
    "json_score": json_score.make,
    "json_criteria": json_criteria.make,
    "criterion_logits": criterion_logits.make,
    "rar_explicit": rar_explicit.make,
    "points": points.make,
    **{protocol: likert.make(protocol) for protocol in likert.RATINGS},
}
MODEL_FREE = {"oracle": _oracle, "random": _coin}
SCALAR = "scalar"  # over a reward model, which no engine runs (judges/scalar.py)
# The template of each protocol that reads text.
JUDGE_PROMPTS = {
    "json_score": "judge_score",
    "json_criteria": "judge_criteria",
    "criterion_logits": criterion_logits.TEMPLATE,
    "rar_explicit": rar_explicit.TEMPLATE,
    "points": points.TEMPLATE,
    **{protocol: template for protocol, (template, _) in likert.RATINGS.items()},
}


# judge.pairs -> the form in which both answers of a pair are judged at once, and its template.
PAIR_JUDGES = {"pairwise": pairwise, "comparison": comparison}
PAIR_PROMPTS = {name: form.TEMPLATE for name, form in PAIR_JUDGES.items()}


def make_judge(
    cfg: JudgeConfig, engine: Engine | None, params: Any, tokenizer: ChatTokenizer | None, seed: int,
    endpoint: Endpoint | None = None,
) -> Judge:  # fmt: skip
    """The judge of a config. engine, params and tokenizer are None for protocols without a model and with `endpoint`, which
    stands for cfg.source = 'api:MODEL'."""
    if cfg.protocol in MODEL_FREE:
        return MODEL_FREE[cfg.protocol](cfg, seed)
    names = [*JUDGES, *MODEL_FREE, SCALAR]
    if cfg.protocol not in JUDGES:
        raise UserError(
            f"no judge protocol {cfg.protocol!r}",
            where="judge.protocol",
            expected=f"one of {', '.join(names)}",
            nearest=nearest(cfg.protocol, names),
        )
    if not 0 <= cfg.retries < MAX_ATTEMPTS:
        raise UserError(f"judge.retries is {cfg.retries}", where="judge.retries", expected=f"0 to {MAX_ATTEMPTS - 1}")
    if endpoint is not None:
        from coevo_jax.judges.endpoint import make  # sockets and TLS only where they are asked for

        return _sampled(make(cfg, endpoint), cfg)
    if engine is None or tokenizer is None:
        raise ValueError(f"protocol {cfg.protocol!r} needs a model")
    return _sampled(JUDGES[cfg.protocol](Instrument(cfg, engine, params, tokenizer)), cfg)


def make_pair_judge(
    cfg: JudgeConfig, engine: Engine | None, params: Any, tokenizer: ChatTokenizer | None, seed: int,
    endpoint: Endpoint | None = None,
) -> Judge | None:  # fmt: skip
    """The judge of pairs side by side beside make_judge's, over the same model; None for judge.pairs=scores."""
    if cfg.pairs == "scores":
        return None
    if cfg.protocol in MODEL_FREE:
        return pairwise.ByScores(MODEL_FREE[cfg.protocol](cfg, seed))
    if endpoint is not None:
        from coevo_jax.judges.endpoint import EndpointWritingJudge

        form = PAIR_JUDGES[cfg.pairs]
        template = cfg.pairs_prompt or form.TEMPLATE
        return _sampled(EndpointWritingJudge(cfg.pairs, endpoint, cfg, form.slots, template, form.read_verdict), cfg)
    if engine is None or tokenizer is None:
        raise ValueError("a judge of pairs needs a model")
    return _sampled(PAIR_JUDGES[cfg.pairs].make(Instrument(cfg, engine, params, tokenizer)), cfg)


def _sampled(judge: Judge, cfg: JudgeConfig) -> Judge:
    """judge.samples: each item is asked several times."""
    return Sampled(judge, cfg.samples, cfg.combine) if cfg.samples > 1 else judge


__all__ = [
    "JUDGES",
    "JUDGE_PROMPTS",
    "MODEL_FREE",
    "PAIR_PROMPTS",
    "SCALAR",
    "Judge",
    "JudgeItem",
    "make_judge",
    "make_pair_judge",
    "weighted_mean",
]
