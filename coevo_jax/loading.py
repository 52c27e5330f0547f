"""A run's models: weights of each role, engines, voices, judges and endpoints. An error names its source's key."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from coevo_jax import trained
from coevo_jax.bench import Bench, Seat
from coevo_jax.config import EndpointConfig, Experiment, JudgeConfig, ModelConfig, SamplerConfig, api_model, judge_sampler
from coevo_jax.config.model import STAND_IN
from coevo_jax.config.several import all_judges, frozen_models, judge_name
from coevo_jax.errors import UserError
from coevo_jax.judges import MODEL_FREE, SCALAR, make_judge, make_pair_judge
from coevo_jax.judges.scalar import RewardModel, ScalarJudge
from coevo_jax.learner import Learner
from coevo_jax.mesh import DECODE_RULES, RULES, ShardingRules, param_shardings
from coevo_jax.methods.context import Voice
from coevo_jax.models.forward import param_shapes
from coevo_jax.models.load import LoadedModel, load_scalar
from coevo_jax.models.quantize import quantize_params, quantized_infos
from coevo_jax.models.spec import ModelSpec
from coevo_jax.modes import MODES
from coevo_jax.progress import RunConsole
from coevo_jax.remote import Endpoint
from coevo_jax.sampler import Engine
from coevo_jax.text.chat import ChatTokenizer

HELDOUT = "heldout_judge"


def make_bench(cfg: Experiment, policy: LoadedModel, engines: Engines, endpoints: dict[str, Endpoint]) -> Bench:
    """The judges, those of the first cycle seated. policy: as loaded, for a judge of the same weights; trained later, so a judge
    that comes later reads its own."""
    loaded: list[LoadedModel] = [policy]

    def make(number: int) -> Seat:
        name = judge_name(number)
        own = dataclasses.replace(cfg, judge=all_judges(cfg)[number])
        try:
            model = load_judge(own, loaded[0] if loaded else None, engines.mesh)
            return make_seat(name, own, model, engines, endpoints.get(name))
        except UserError as error:
            where = error.where.replace("judge.", f"panel.judges.{number - 1}.", 1) if number else error.where
            raise UserError(error.what, where=where, expected=error.expected, nearest=error.nearest) from error

    bench = Bench(cfg, make)
    if MODES[cfg.schedule.mode].judged:
        bench.sit(0)
    loaded.clear()
    return bench


def make_heldout(cfg: Experiment, policy: LoadedModel, engines: Engines, endpoint: Endpoint | None) -> Seat | None:
    """The judge that rewards nothing, made as the others are."""
    if not cfg.heldout_judge.source:
        return None
    own = dataclasses.replace(cfg, judge=cfg.heldout_judge)
    return make_seat(HELDOUT, own, load_judge(own, policy, engines.mesh), engines, endpoint)


def generator_model(cfg: Experiment) -> ModelConfig:
    """The generator's own weights, in two-model mode."""
    return dataclasses.replace(cfg.policy, source=cfg.generator.source or cfg.policy.source, sha256="")


def frozen_voices(cfg: Experiment, voices: dict[str, Voice], engines: Engines, console: RunConsole) -> dict[str, Any]:
    """Give a voice each to the frozen policies of pairs and to a generator with weights of its own that nothing trains, and so no
    optimizer; their weights by name."""
    wanted = {name: (f"pairs.frozen_models.{i}", model) for i, (name, model) in enumerate(frozen_models(cfg).items())}
    two = MODES[cfg.schedule.mode].judged and cfg.generator.mode == "two" and not api_model(cfg.generator.source)
    if two and "rubric" not in voices:
        wanted["rubric"] = ("generator", generator_model(cfg))
    wanted |= MODES[cfg.schedule.mode].held(cfg)
    out = {}
    for name, (key, model) in wanted.items():
        console.note(f"loading {name} {model.source!r}")
        found = load_model(dataclasses.replace(model, param_dtype=model.dtype), engines.mesh, key, DECODE_RULES)
        tokenizer = ChatTokenizer.load(found.folder)
        out[name] = found.params
        voices[name] = Voice(tokenizer, engines.get(found.spec, tokenizer.stop_ids), functools.partial(out.get, name))
    return out


def load_judge(cfg: Experiment, policy: LoadedModel | None, mesh: Any) -> LoadedModel | None:
    """The judge's weights, its own copy: the policy's buffers are donated at every update."""
    if not MODES[cfg.schedule.mode].judged or cfg.judge.protocol in MODEL_FREE or api_model(cfg.judge.source):
        return None
    wanted = ModelConfig(source=cfg.judge.source, dtype=cfg.judge.dtype, param_dtype=cfg.judge.dtype, sha256=cfg.judge.sha256)
    if cfg.judge.protocol == SCALAR:
        return load_model(wanted, mesh, "judge", RULES, load_scalar)
    same = (wanted.source, wanted.param_dtype) == (cfg.policy.source, cfg.policy.param_dtype) and jax.process_count() == 1
    if policy is not None and same and wanted.sha256 in ("", cfg.policy.sha256):
        kept = functools.partial(jax.tree.map, jnp.copy) if cfg.lora.rank == 0 else lambda params: params  # no update touches it
        copy = quantize_params if cfg.judge.weights == "int8" else kept
        return dataclasses.replace(policy, params=_to_decode(copy(policy.params), policy.spec, mesh, cfg))
    model = load_model(wanted, mesh, "judge", DECODE_RULES)
    if cfg.judge.weights == "int8":
        model = dataclasses.replace(model, params=quantize_params(model.params, free=True))
    return model


def _to_decode(params: Any, spec: ModelSpec, mesh: Any, cfg: Experiment) -> Any:
    """A judge's weights where decoding wants them."""
    if mesh is None:
        return params
    infos = param_shapes(spec)
    infos = quantized_infos(infos, cfg.judge.dtype) if cfg.judge.weights == "int8" else infos
    return jax.device_put(params, param_shardings(infos, mesh, DECODE_RULES))


def load_model(
    cfg: ModelConfig, mesh: Any, group: str, rules: ShardingRules, load: Callable[..., LoadedModel] | None = None
) -> LoadedModel:
    """A role's model; an error names its source's key beside the file. Of a run's weights, a generator takes the generator's."""
    try:
        if load is None:
            return trained.load(cfg, mesh, rules=rules, prefer="rubric" if group == "generator" else "policy")
        return load(cfg, mesh, rules=rules)
    except UserError as error:
        where = f"{group}.source, {error.where}".removesuffix(", ")
        raise UserError(error.what, where=where, expected=error.expected, nearest=error.nearest) from error


def share_of(cfg: SamplerConfig, processes: int) -> SamplerConfig:
    """One process's part of the slots and of a prefill program's tokens, which the config counts over all; rounded up."""
    if processes == 1:
        return cfg

    def part(n: int) -> int:
        return -(-n // processes)

    classes = tuple((part(n), positions) for n, positions in cfg.length_classes)
    slots = sum(n for n, _ in classes) or part(cfg.slots)
    return dataclasses.replace(
        cfg, slots=slots, length_classes=classes, narrow=tuple(n for n in cfg.narrow if n < slots),
        prefill_tokens=part(cfg.prefill_tokens),
    )  # fmt: skip


class Engines:
    """One engine an architecture: roles of the same spec and stop ids share programs and KV memory."""

    def __init__(self, cfg: Experiment, mesh: Any):
        self.cfg, self.mesh = cfg, mesh
        self._made: dict[tuple[ModelSpec, tuple[int, ...], SamplerConfig], Engine] = {}
        self.all: list[Engine] = []

    def get(self, spec: ModelSpec, stop_ids: tuple[int, ...], judge: JudgeConfig | None = None) -> Engine:
        sampler = judge_sampler(self.cfg.sampler, judge) if judge is not None else self.cfg.sampler
        key = (spec, tuple(stop_ids), sampler)
        if key not in self._made:
            cfg = share_of(sampler, jax.process_count())
            self._made[key] = Engine(spec, cfg, tuple(stop_ids), mesh=self.mesh, seed=self.cfg.seed)
            self.all.append(self._made[key])
        return self._made[key]


def make_voice(learner: Learner, tokenizer: ChatTokenizer, engines: Engines) -> Voice:
    return Voice(tokenizer, engines.get(learner.spec, tokenizer.stop_ids), learner.weights)


def make_endpoints(cfg: Experiment, console: RunConsole) -> dict[str, Endpoint]:
    """The roles that another machine plays. Nothing is asked yet."""

    def asked(judge: JudgeConfig) -> str:
        return judge.protocol + (f" {judge.pairs}" if judge.pairs != "scores" else "")

    roles = {judge_name(i): (judge.source, judge.endpoint, asked(judge)) for i, judge in enumerate(all_judges(cfg))}
    roles[HELDOUT] = (cfg.heldout_judge.source, cfg.heldout_judge.endpoint, cfg.heldout_judge.protocol)
    roles["generator"] = (cfg.generator.source, cfg.generator.endpoint, f"rubric {cfg.rubric.schema}")
    remote = {role: (api_model(source), how, kind) for role, (source, how, kind) in roles.items() if api_model(source)}
    if not MODES[cfg.schedule.mode].judged:
        return {}
    for role, (model, how, _) in remote.items():
        console.note(f"{role}: {model!r} at {how.base_url}, {how.concurrency} requests at a time")
        if how.key_env and how.base_url.startswith("http://"):
            console.note(f"warning: the key in {how.key_env} travels unencrypted: {role}.endpoint.base_url is no https address")
    return {role: _endpoint(role, *rest) for role, rest in remote.items()}


def _endpoint(role: str, model: str, how: EndpointConfig, kind: str) -> Endpoint:
    if how.base_url != STAND_IN:
        return Endpoint(role, model, how)
    from coevo_jax.remote.stand_in import Played  # a server is loaded only where one is asked for

    return Played(role, model, how, kind)


def source_key(name: str) -> str:
    """The configuration key of frozen weights' source, by their name: judge, judge_1, frozen_0, rubric, ..."""
    if name == HELDOUT:
        return "heldout_judge.source"
    group, _, number = name.partition("_")
    if group == "base":  # of adapters
        kind, _, index = number.partition("_")
        keys = {"critic": "critic.source", "rubric": "generator.source", "policy": f"policies.{int(index or 1) - 1}.source"}
        return keys.get(kind, kind) if kind != "policy" or index else "policy.source"
    if group == "judge":
        return f"panel.judges.{int(number) - 1}.source" if number else "judge.source"
    return f"pairs.frozen_models.{number}.source" if group == "frozen" else "generator.source"


def make_seat(name: str, cfg: Experiment, model: LoadedModel | None, engines: Engines, endpoint: Endpoint | None) -> Seat:
    """cfg.judge, ready to serve."""
    judge = cfg.judge
    if model is None:
        remote = judge, None, None, None, cfg.seed, endpoint
        return Seat(name, judge, make_judge(*remote), pairs=make_pair_judge(*remote))
    tokenizer = ChatTokenizer.load(model.folder)
    if judge.protocol == SCALAR:
        how = judge.dtype, cfg.update.attention, engines.mesh
        reward = RewardModel(model.spec, model.params, tokenizer, judge_sampler(cfg.sampler, judge), *how)
        return Seat(name, judge, ScalarJudge(judge, reward), model.params)
    engine = engines.get(model.spec, tokenizer.stop_ids, judge)
    made = judge, engine, model.params, tokenizer, cfg.seed
    return Seat(name, judge, make_judge(*made), model.params, engine, make_pair_judge(*made))
