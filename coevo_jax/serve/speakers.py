"""The models of a system: who speaks, how a prompt of theirs is made, what is compiled for them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from coevo_jax.bench import Seat
from coevo_jax.config import Experiment, SamplerConfig, api_model
from coevo_jax.distributed import local_mesh
from coevo_jax.judges.base import Instrument
from coevo_jax.judges.scalar import ScalarJudge
from coevo_jax.loading import Engines, load_model, make_bench, make_endpoints
from coevo_jax.mesh import DECODE_RULES, make_mesh
from coevo_jax.models.load import LoadedModel
from coevo_jax.progress import RunConsole
from coevo_jax.records.fingerprint import fingerprint
from coevo_jax.remote import Endpoint
from coevo_jax.sampler import Completion, Engine, Request
from coevo_jax.serve.settings import Roles, model_settings
from coevo_jax.text.chat import ChatTokenizer

ROLES = ("generator", "judge", "policy")


@dataclasses.dataclass(frozen=True)
class Speaker:
    """A model that writes."""

    tokenizer: ChatTokenizer
    engine: Engine
    params: Any
    thinking: bool = False
    system: str = ""  # where a conversation has no system turn

    def prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation."""
        return self.tokenizer.render_messages(messages, thinking=self.thinking, default_system=self.system)

    def text(self, tokens: np.ndarray) -> str:
        """What was written, reasoning included."""
        return self.tokenizer.decode(tokens.tolist())

    @property
    def opened(self) -> bool:
        """Does a prompt end inside a reasoning block?"""
        return self.tokenizer.opens_reasoning(self.thinking)

    def generate(self, requests: list[Request], progress: Any = None) -> list[list[Completion]]:
        """Completions of each request."""
        return self.engine.generate(self.params, requests, progress=progress) if requests else []

    def likeliest(self, prompts: list[list[int]], most: int) -> list[tuple[tuple[str, float], ...]]:
        """(text, log-prob) of the likeliest first tokens after each prompt, by the model's own distribution."""
        probs = self.engine.next_token_probs(self.params, prompts, every_token(self.engine))
        found = []
        for row in np.asarray(probs, np.float64):
            order = [int(i) for i in np.argsort(-row, kind="stable")[:most] if row[i] > 0]
            found.append(tuple((self.tokenizer.decode([i], keep_special=True), math.log(min(row[i], 1.0))) for i in order))
        return found


def every_token(engine: Engine) -> list[list[int]]:
    """Each token of the vocabulary as a form of its own."""
    return [[i] for i in range(engine.spec.vocab_size)]


@dataclasses.dataclass(frozen=True)
class Cast:
    """All that was loaded: speakers by role, the judge's seat (None: no judge), endpoints by role."""

    speakers: dict[str, Speaker]
    seat: Seat | None
    endpoints: dict[str, Endpoint]

    def weights(self) -> dict[str, str]:
        """Fingerprint of each role's weights."""
        found = {role: speaker.params for role, speaker in self.speakers.items()}
        if self.seat is not None and self.seat.params is not None:
            found["judge"] = self.seat.params
        return {role: fingerprint(params) for role, params in found.items()}


def load_cast(cfg: Experiment, roles: Roles, console: RunConsole) -> Cast:
    """Load the models that the roles name. UserError as in load_model."""
    mesh = local_mesh(make_mesh(cfg.mesh)) if jax.device_count() > 1 else None
    engines = Engines(cfg, mesh)
    endpoints = make_endpoints(cfg, console)
    speakers: dict[str, Speaker] = {}
    loaded: dict[str, LoadedModel] = {}
    for role, source in (("generator", roles.generator), ("policy", roles.policy)):
        if not source or api_model(source):
            continue
        if source not in loaded:
            console.note(f"loading {role} {source!r}")
            loaded[source] = load_model(model_settings(cfg, source), mesh, role, DECODE_RULES)
        speakers[role] = _speaker(cfg, role, loaded[source], engines)
    seat = _seat(cfg, loaded.get(roles.policy), engines, endpoints) if roles.judge else None
    if seat is not None and (instrument := _instrument(seat)) is not None:
        speakers["judge"] = Speaker(instrument.tokenizer, instrument.engine, instrument.params, cfg.judge.thinking)
    for endpoint in endpoints.values():
        if endpoint.cfg.cache not in ("run", "off"):  # a run's own cache has no folder here
            endpoint.open_cache("")
    return Cast(speakers, seat, endpoints)


def _speaker(cfg: Experiment, role: str, model: LoadedModel, engines: Engines) -> Speaker:
    tokenizer = ChatTokenizer.load(model.folder)
    thinking, system = (cfg.policy.thinking, cfg.policy.system_prompt) if role == "policy" else (cfg.generator.thinking, "")
    return Speaker(tokenizer, engines.get(model.spec, tokenizer.stop_ids), model.params, thinking, system)


def _seat(cfg: Experiment, policy: LoadedModel | None, engines: Engines, endpoints: dict[str, Endpoint]) -> Seat:
    bench = make_bench(cfg, policy, engines, endpoints)  # type: ignore[arg-type]  # None: the judge reads its own weights
    (seat,) = bench.serving
    return seat


def _instrument(seat: Seat) -> Instrument | None:
    found = getattr(seat.judge, "instrument", None)
    return found if isinstance(found, Instrument) else None


def compile_ahead(cfg: Experiment, cast: Cast, console: RunConsole, listed: bool = True) -> None:
    """Compile every program, so that none does while somebody waits. listed: also what lists a first token's likeliest ones."""
    asks = cfg.judge.protocol == "criterion_logits" and cast.seat is not None and cast.seat.engine is not None
    guided = cfg.rubric.guided or cfg.judge.guided
    done: set[tuple[int, int]] = set()
    for speaker in cast.speakers.values():
        key = (id(speaker.engine), id(speaker.params))
        if key in done:
            continue
        done.add(key)
        console.note("compiling the sampler")
        engine = speaker.engine
        seconds = engine.warmup(speaker.params, top_p=True, next_token=asks, guided=guided, whole=listed)
        console.note(f"compiled in {seconds:.1f} s")
    if cast.seat is not None and isinstance(cast.seat.judge, ScalarJudge):
        cast.seat.judge.instrument.warm_up()


def limits_of(cfg: SamplerConfig) -> dict[str, int]:
    """Tokens that a prompt and a completion may have."""
    return {"prompt_tokens": cfg.max_prompt, "completion_tokens": cfg.max_new}
