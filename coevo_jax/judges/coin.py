"""random: a fair coin decides, 0 or 1 an answer. The baseline that shows what a reward without information does."""

from __future__ import annotations

import dataclasses
import hashlib

from coevo_jax.judges.base import JudgeItem, check_items
from coevo_jax.records.verdicts import Verdict


@dataclasses.dataclass(frozen=True)
class CoinJudge:
    """The coin belongs to (seed, update, item): it depends neither on the order of the items nor on any text."""

    seed: int
    name: str = "random"

    def judge(self, items: list[JudgeItem], update: int) -> list[Verdict]:
        """One verdict an item, in their order."""
        check_items(items)
        return [Verdict("ok", float(self._heads(item, update))) for item in items]

    def _heads(self, item: JudgeItem, update: int) -> int:
        identity = f"{self.seed}\0coin\0{update}\0{item.request}\0{item.branch}".encode()
        return hashlib.blake2b(identity, digest_size=1).digest()[0] & 1
