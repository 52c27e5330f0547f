"""Pairwise verdicts and the order of the two answers: a call says who sat in slot A, and a verdict names an answer, never a slot.

The policy's answer is 'own', the other one 'other'. In the forward call it sits in slot A, in the reverse call in slot B.
"""

from __future__ import annotations

from typing import Literal

Slot = Literal["A", "B"]
Side = Literal["own", "other", "tie"]


def side_of(winner: str | None, own_slot: Slot) -> Side | None:
    """Which answer a call's winner ('A', 'B' or 'tie'; None: the judge failed) is."""
    if winner is None or winner == "tie":
        return None if winner is None else "tie"
    if winner not in ("A", "B"):
        raise ValueError(f"winner {winner!r} is none of A, B, tie")
    return "own" if winner == own_slot else "other"


def both_orders(forward: str | None, reverse: str | None) -> float | None:
    """1/2 (own wins forward) + 1/2 (own wins reverse), a tie giving half of its half: Rubric-ARM's policy reward.

    A judge that always says 'A' gives 1/2. None when a call failed: half a reward would be a failure's (design.md 4.1).
    """
    sides = (side_of(forward, "A"), side_of(reverse, "B"))
    if None in sides:
        return None
    return sum({"own": 0.5, "tie": 0.25, "other": 0.0}[str(side)] for side in sides)


def agreed(forward: str | None, reverse: str | None) -> Side | None:
    """The answer that both orders name, the filter of pairs for DPO; None where they differ, tie or fail."""
    first, second = side_of(forward, "A"), side_of(reverse, "B")
    return first if first == second and first != "tie" else None


def order_flipped(forward: str | None, reverse: str | None) -> bool | None:
    """Did the order decide? None when a call failed."""
    first, second = side_of(forward, "A"), side_of(reverse, "B")
    return None if first is None or second is None else first != second
