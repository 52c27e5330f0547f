"""Counters of an engine since the last reset."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Stats:
    tokens: int = 0  # drawn, of completions handed back
    sequences: int = 0
    prefill_tokens: int = 0  # fed by prefill and by scoring, padding left out
    prefill_positions: int = 0  # the same, padding included
    heads_kept: int = 0  # shared heads that were written to a row of the store
    dispatches: int = 0  # decode programs run
    row_steps: int = 0  # steps x active slots
    slot_steps: int = 0  # steps x slots
    moves: int = 0  # rows that went on in a slot of a larger length class
    seconds: float = 0.0  # wall time of all calls
    decode_seconds: float = 0.0
    prefill_seconds: float = 0.0  # packed prefill of prompts, and of scoring

    @property
    def occupancy(self) -> float:
        """Share of decoded row-steps that were of use, the drain at a call's end included."""
        return self.row_steps / self.slot_steps if self.slot_steps else 0.0

    def reset(self) -> None:
        """All back to zero."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, field.default)
