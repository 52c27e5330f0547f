"""criterion_logits: each criterion is asked as a yes/no question and read from the next-token distribution. No decoding.

    p = sum of the yes forms / (sum of the yes and the no forms)

The forms are the tokenizer's single tokens that spell yes or no. Where yes and no together are less likely than
cfg.min_yes_no_mass, the model was about to say something else and p means nothing: a failure. There is no noise, so no retry.
"""

from __future__ import annotations

import dataclasses
import json

import numpy as np

from coevo_jax.errors import UserError
from coevo_jax.judges.aggregate import weighted_mean
from coevo_jax.judges.base import Instrument, JudgeItem, check_items
from coevo_jax.records.verdicts import Verdict, failed
from coevo_jax.text.chat import ChatTokenizer

TEMPLATE = "criterion_yes_no"
SPELLINGS = ("{}", " {}", "\n{}", '"{}', "▁{}")


def forms(tokenizer: ChatTokenizer, word: str) -> list[int]:
    """Ids of the single tokens that spell `word`, in any case, with or without a space before it."""
    found = set()
    for cased in (word.lower(), word.capitalize(), word.upper()):
        for spelling in SPELLINGS:
            for token in tokenizer.encode(spelling.format(cased)):
                if tokenizer.token_text(token).strip().lower() == word:
                    found.add(token)
    return sorted(found)


def yes_no_forms(tokenizer: ChatTokenizer) -> tuple[list[int], list[int]]:
    """The yes and the no ids. UserError where the tokenizer has no single token for one of them."""
    yes, no = forms(tokenizer, "yes"), forms(tokenizer, "no")
    for word, ids in (("yes", yes), ("no", no)):
        if not ids:
            raise UserError(
                f"the judge's tokenizer has no single token that spells {word!r}",
                where=tokenizer.where,
                expected="judge.protocol = json_score or json_criteria for this model",
            )
    return yes, no


@dataclasses.dataclass(frozen=True)
class CriterionLogits:
    """The judge of this protocol. yes, no: token ids of the forms."""

    instrument: Instrument
    yes: tuple[int, ...]
    no: tuple[int, ...]
    name: str = "criterion_logits"

    def judge(self, items: list[JudgeItem], update: int) -> list[Verdict]:
        """One verdict an item, in their order. parts: p of each criterion; yes_no_mass: the smallest over its criteria."""
        check_items(items)
        prompts = [self._prompts(item) for item in items]
        problems = [next((p for p in map(self.instrument.too_long, own) if p), "") for own in prompts]
        # Each prompt once and in the order of its ids: prompts of one answer lie side by side, and the engine meets the same
        # batch whatever order the items came in.
        asked = sorted({ids for own, problem in zip(prompts, problems) if not problem for ids in own})
        probs = self._probs(asked)
        return [
            failed("refused", problem) if problem else self._verdict(item, np.stack([probs[ids] for ids in own]))
            for item, own, problem in zip(items, prompts, problems)
        ]

    def _prompts(self, item: JudgeItem) -> list[tuple[int, ...]]:
        # Never in thinking mode: the next token must be the verdict, not the head of a reasoning block.
        return [
            tuple(self.instrument.prompt(TEMPLATE, False, question=item.question, answer=item.answer, criterion=criterion.text))
            for criterion in item.rubric.criteria
        ]

    def _probs(self, asked: list[tuple[int, ...]]) -> dict[tuple[int, ...], np.ndarray]:
        """(yes, no) probabilities of each prompt."""
        if not asked:
            return {}
        wanted = [list(self.yes), list(self.no)]
        found = self.instrument.engine.next_token_probs(self.instrument.params, [list(ids) for ids in asked], wanted)
        return dict(zip(asked, np.asarray(found, np.float64)))

    def _verdict(self, item: JudgeItem, yes_no: np.ndarray) -> Verdict:
        mass = yes_no.sum(axis=-1)
        if not np.isfinite(mass).all():
            return failed("parse_fail", "the judge's probabilities are not finite")
        least, floor = float(mass.min()), self.instrument.cfg.min_yes_no_mass
        raw = json.dumps({"yes": yes_no[:, 0].tolist(), "no": yes_no[:, 1].tolist()})
        if least < floor or least <= 0:
            return failed("parse_fail", f"yes and no have {least:.3g} of the probability, less than {floor:g}", raw, least)
        parts = tuple((yes_no[:, 0] / mass).tolist())
        return Verdict("ok", weighted_mean(item.rubric, parts), raw, parts, least)


def make(instrument: Instrument) -> CriterionLogits:
    """The judge of this protocol over a model; its tokenizer is checked here, at start."""
    if instrument.cfg.thinking:
        raise UserError(
            "criterion_logits reads the next token, which a reasoning block would take",
            where="judge.thinking",
            expected="false, or judge.protocol = json_score or json_criteria",
        )
    yes, no = yes_no_forms(instrument.tokenizer)
    if instrument.tokenizer.opens_reasoning(False):
        raise UserError(
            "this model's template opens a reasoning block in every prompt, so its next token is no verdict",
            where=instrument.tokenizer.where,
            expected="judge.protocol = json_score or json_criteria for this model",
        )
    return CriterionLogits(instrument, tuple(yes), tuple(no))
