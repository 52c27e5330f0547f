"""Record: DynamicRubric (arXiv 2607.20083), schedule.mode=dynamic. Imports no JAX."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class DynamicConfig:
    """Rounds (schedule.cycles) of a generator stage, which trains on R_disc and R_anchor, and a policy stage, which trains on E.

    data.rankings: the anchors. schedule.prompts: prompts of an update; schedule.group: answers of the policy to each.
    """

    candidates: int = 0  # K: the policy's answers that the generator sees in its own stage; 0 = schedule.group
    group: int = 0  # G: rubrics of a prompt; 0 = schedule.group
    generator_updates: int = 0  # of a round; 0 = schedule.k
    policy_updates: int = 0  # of a round; 0 = schedule.k
    objectives: str = "both"  # both | discriminability | anchor
    anchor_weight: float = 1.0  # lambda in A_disc + lambda A_anchor
    anchor_loss: str = "bt"  # bt: rank-weighted Bradley-Terry | listnet: its top-one form
    tau: float = 1.0  # listnet: temperature of the scores
    conditioned: str = "set"  # set: the generator sees the candidates | prompt_only
    static_from: int = 0  # round (from 1) from which the generator trains no more; 0 = never, 1 = it never trains
    prompt: str = "dynamic_rubric"  # template name or path; conditioned=set
    blind_prompt: str = "dynamic_rubric_blind"  # conditioned=prompt_only
    shuffle: str = "sample"  # order of the candidates: of each rubric its own | group: one for all rubrics of a prompt
    yes_above: float = 0.5  # a vote is yes where the verifier's p(yes) / (p(yes) + p(no)) is above it
    new_rankings: tuple[str, ...] = ()  # sources that join data.rankings with round 2, 3, ...; '' = none
    test_share: float = 0.25  # of the rankings, by prompt: never trained on, for scoring (benchmarks/dynamic.py)
    min_anchors: int = 2  # ranked answers that a row must have (the paper: 7)
    min_characters: int = 0  # of prompt and top answer (the paper: 50); above 0 refusals, greetings and degenerate ones go too

    @property
    def template(self) -> str:
        """The generator's prompt template."""
        return self.prompt if self.conditioned == "set" else self.blind_prompt


CHOICES = {
    "dynamic.objectives": ("both", "discriminability", "anchor"),
    "dynamic.anchor_loss": ("bt", "listnet"),
    "dynamic.conditioned": ("set", "prompt_only"),
    "dynamic.shuffle": ("sample", "group"),
}
RANGES = {
    **{f"dynamic.{name}": (0.0, math.inf) for name in ("group", "generator_updates", "policy_updates", "static_from")},
    **{f"dynamic.{name}": (0.0, math.inf) for name in ("anchor_weight", "min_characters")},
    "dynamic.candidates": (0.0, 64.0),  # a label each in the prompt, and a request id each for the verifier
    "dynamic.tau": (1e-6, math.inf),
    "dynamic.yes_above": (0.0, 1.0),
    "dynamic.test_share": (0.0, 1.0),
    "dynamic.min_anchors": (2.0, math.inf),
}
