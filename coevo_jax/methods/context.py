"""What a method may touch while it makes a batch: the config, text, engines, judge, data streams and the replay buffer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import numpy as np

from coevo_jax.config import Experiment, ModelConfig, Sampling
from coevo_jax.config.several import frozen_models, policy_names
from coevo_jax.data import SlotStream
from coevo_jax.distributed import own
from coevo_jax.judges import Judge
from coevo_jax.learn.preference import PreferenceSample
from coevo_jax.methods.store import SlotStore
from coevo_jax.preference.buffer import ReplayBuffer
from coevo_jax.rubrics.endpoint import EndpointWriter
from coevo_jax.sampler import Completion, Engine, Request
from coevo_jax.text.candidates import generator_messages
from coevo_jax.text.chat import ChatTokenizer
from coevo_jax.text.parse import strip_reasoning
from coevo_jax.text.prompts import render_prompt
from coevo_jax.watchdog import Watchdog

# What a request is for. Part of the identity of its noise, so the numbers never change.
KINDS = {
    name: i
    for i, name in enumerate(
        ["answer", "rubric", "policy_rubric", "accepted", "rejected", "infer", "pair_rubric", "judge", "heldout"]
    )
}


GUIDED = ("policy_rubric", "pair_rubric")  # kinds whose text is a rubric that isn't trained


def request_id(kind: str, slot: int, attempt: int = 0, sample: int = 0, retry: int = 0) -> int:
    """Identity of a request in an update, below 2**56: unique for slot < 2**24, attempt and retry < 2**8, sample < 2**12."""
    return (((KINDS[kind] << 8 | retry) << 8 | attempt) << 24 | slot) << 12 | sample


@dataclasses.dataclass(frozen=True)
class Voice:
    """How a role speaks: its tokenizer, the engine that decodes for it, and its published weights (checked at each use)."""

    tokenizer: ChatTokenizer
    engine: Engine
    weights: Callable[[], Any]


def buffer_slots(cfg: Experiment) -> tuple[int, ...]:
    """Slots of the replay buffer that this process owns: each policy has P of its own, those of the first one first."""
    P = cfg.schedule.prompts
    return tuple(number * P + slot for number in range(len(policy_names(cfg))) for slot in own(P))


@dataclasses.dataclass
class Context:
    """Host-side state of a run. `voices` by role: 'policy' and 'rubric', the same one in single-model mode; 'policy_1', ... for
    further policies, 'frozen_0', ... for those that only give answers to pairs."""

    cfg: Experiment
    voices: dict[str, Voice]
    judge: Judge | None
    streams: dict[str, SlotStream]
    buffer: ReplayBuffer
    progress: Callable[[str, int, int], None]
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    writer: EndpointWriter | None = None  # writes the rubrics in place of the rubric voice
    watchdog: Watchdog = dataclasses.field(default_factory=Watchdog)
    heldout: Judge | None = None  # scores some answers and rewards none
    stores: dict[str, SlotStore] = dataclasses.field(default_factory=dict)  # what a method keeps from update to update
    # (role, pairs, most pairs of a process) -> log-probs of both answers under the role's weights of now (Learner.pair_logps)
    pair_logps: Callable[[str, list[PreferenceSample], int], list[tuple[float, float]]] | None = None
    reference: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)  # those of given pairs, by id
    pair_judge: Judge | None = None  # judges the two answers of a pair side by side, where it isn't by their scores

    @property
    def slots(self) -> range:
        """The prompt slots that this process owns end to end."""
        return own(self.cfg.schedule.prompts)

    def one_voice(self, policy: str = "policy") -> bool:
        """Do the generator and this policy speak through the same weights, so that one engine call can serve both?"""
        return self.voices[policy] is self.voices["rubric"]

    def model(self, role: str) -> ModelConfig:
        """The settings of a policy, trained or frozen."""
        own = dict(zip(policy_names(self.cfg), (self.cfg.policy, *self.cfg.policies)))
        return (own | frozen_models(self.cfg))[role]

    def buffer_slot(self, policy: str, slot: int) -> int:
        """Where the replay buffer keeps a policy's answers of a prompt slot."""
        return policy_names(self.cfg).index(policy) * self.cfg.schedule.prompts + slot

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the time of a block to `seconds[part]`; the loop moves it into the metrics row."""
        start = perf_counter()
        try:
            with self.watchdog.stage(part):
                yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + perf_counter() - start

    def request(self, ids: list[int], n: int, kind: str, role: str, update: int, sampling: Sampling, **identity: int) -> Request:
        """A sampler request whose noise is keyed by (seed, role, update, request id, sample, token)."""
        top_p = self.cfg.compat.top_p or sampling.top_p
        sampling = dataclasses.replace(sampling, top_p=top_p)
        return Request(
            prompt=np.asarray(ids, np.int32),
            n=n,
            role=role,
            update=update,
            request=request_id(kind, **identity),
            sampling=sampling,
            grammar=self._grammar(kind, role),
        )

    def _grammar(self, kind: str, role: str) -> Any:
        """rubric.guided: that of rubrics which aren't trained. The trainer's log-probs are those of the whole distribution."""
        if not self.cfg.rubric.guided or kind not in GUIDED:
            return None
        from coevo_jax.sampler import guided  # loads a library that is optional

        tokenizer = self.voices[role].tokenizer
        guided.check_no_reasoning(tokenizer, self.cfg.generator.thinking, "rubric.guided")
        return guided.rubric_grammar(tokenizer, self.cfg.rubric)

    def generate(self, role: str, requests: list[Request]) -> list[list[Completion]]:
        """Completions of each request, by the current weights of `role`."""
        if not requests:
            return []
        voice = self.voices[role]
        with self.timed("check"):
            weights = voice.weights()
        with self.timed("sample"):
            return voice.engine.generate(weights, requests, progress=lambda d, n: self.progress("sampling", d, n))

    def generate_both(
        self, rubric: list[Request], answers: list[Request], policy: str = "policy"
    ) -> tuple[list[list[Completion]], list[list[Completion]]]:
        """Completions of the generator's and a policy's requests, in one engine call where one voice speaks for both."""
        if not self.one_voice(policy):
            return self.generate("rubric", rubric), self.generate(policy, answers)
        out = self.generate(policy, rubric + answers)
        return out[: len(rubric)], out[len(rubric) :]

    # Rendering: one function a text, so that what is trained is what is deployed (design.md 4.10).

    def answer_prompt(self, question: str, role: str = "policy") -> list[int]:
        cfg = self.model(role)
        messages = [{"role": "user", "content": question}]
        return self.voices[role].tokenizer.render(messages, thinking=cfg.thinking, system=cfg.system_prompt)

    def rubric_prompt(self, question: str, *, training: bool = False) -> list[int]:
        name = self.cfg.compat.train_rubric_prompt if training else ""
        messages = render_prompt(name or self.cfg.rubric.prompt, question=question)
        return self.voices["rubric"].tokenizer.render_messages(messages, thinking=self.cfg.generator.thinking)

    def set_prompt(self, question: str, candidates: Sequence[str]) -> list[int]:
        """The prompt of DynamicRubric's generator, candidates in the order shown."""
        messages = generator_messages(self.cfg.dynamic.template, question, candidates)
        return self.voices["rubric"].tokenizer.render_messages(messages, thinking=self.cfg.generator.thinking)

    def inference_prompt(self, answer: str, role: str = "policy") -> list[int]:
        return self._as_policy(render_prompt(self.cfg.pairs.inference_prompt, answer=answer), role)

    def conditioned_prompt(self, question: str, rubric: str, role: str = "policy") -> list[int]:
        return self._as_policy(render_prompt(self.cfg.pairs.conditioned_prompt, question=question, rubric=rubric), role)

    def _as_policy(self, messages: list[dict[str, str]], role: str) -> list[int]:
        """A template without a system turn has that of answers."""
        cfg = self.model(role)
        return self.voices[role].tokenizer.render_messages(messages, thinking=cfg.thinking, default_system=cfg.system_prompt)

    def raw(self, tokens: np.ndarray | list[int], role: str) -> str:
        """Token ids of a role as text, reasoning included."""
        return self.voices[role].tokenizer.decode([int(t) for t in tokens])

    def text(self, tokens: np.ndarray | list[int], role: str = "policy") -> str:
        """What a reader sees of a completion: decoded, reasoning removed (nothing when it never closes)."""
        return strip_reasoning(self.raw(tokens, role), opened=self.opened(role)).strip()

    def opened(self, role: str) -> bool:
        """Does the role's prompt already end inside a reasoning block, so that a completion needs no opening tag?"""
        thinking = self.cfg.generator.thinking if role == "rubric" else self.model(role).thinking
        return self.voices[role].tokenizer.opens_reasoning(thinking)
