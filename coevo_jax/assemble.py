"""From a config to everything a run needs: models, tokenizers, engines, judge, data streams, buffer, learners and stages."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from coevo_jax import trained
from coevo_jax.bench import Bench, Seat
from coevo_jax.compiling import compilation_cache, compile_programs, judge_speakers
from coevo_jax.config import EndpointConfig, Experiment, JudgeConfig, ModelConfig, SamplerConfig, api_model, judge_sampler
from coevo_jax.config.model import STAND_IN
from coevo_jax.config.several import all_judges, frozen_models, judge_name, policy_names
from coevo_jax.config.validate import compat_warnings, generator_learns
from coevo_jax.critic import make_critic
from coevo_jax.data import PromptSet, SlotStream, read_chat, read_pairs, read_prompts
from coevo_jax.distributed import local_mesh
from coevo_jax.errors import UserError
from coevo_jax.judges import JUDGE_PROMPTS, MODEL_FREE, SCALAR, make_judge, make_pair_judge, pairwise
from coevo_jax.judges.scalar import RewardModel, ScalarJudge
from coevo_jax.judges.several import members
from coevo_jax.learn.verifiers import check_needs, resolve_verifier
from coevo_jax.learner import Learner, make_learner
from coevo_jax.mesh import DECODE_RULES, RULES, ShardingRules, make_mesh, param_shardings, train_rules
from coevo_jax.methods import evolm, reward_model, rlcer, supervised, verifiable
from coevo_jax.methods.context import Context, Voice, buffer_slots
from coevo_jax.methods.fixed_rubrics import check_records
from coevo_jax.methods.stage import Stage
from coevo_jax.models.forward import param_shapes
from coevo_jax.models.load import LoadedModel, critic_source, load_scalar, load_with_head
from coevo_jax.models.quantize import quantize_params, quantized_infos
from coevo_jax.models.spec import ModelSpec
from coevo_jax.preference.buffer import ReplayBuffer
from coevo_jax.progress import RunConsole
from coevo_jax.records.facts import Facts
from coevo_jax.records.fingerprint import fingerprint
from coevo_jax.records.run_folder import Input
from coevo_jax.remote import Endpoint
from coevo_jax.rubrics.endpoint import EndpointWriter
from coevo_jax.sampler import Engine
from coevo_jax.text.chat import ChatTokenizer
from coevo_jax.text.prompts import template_identity
from coevo_jax.watchdog import Watchdog

METHODS = {
    "evolm": evolm.stages, "verifiable": verifiable.stages, "sft": lambda cfg: [], "rlcer": rlcer.stages,
    "reward": reward_model.stages,
}  # fmt: skip
JUDGED = ("evolm", "rlcer")  # modes with a judge
UNSAMPLED = ("sft", "reward")  # modes in which nothing is drawn
HELDOUT = "heldout_judge"

CHECKED_QUESTIONS = 64  # of the longest ones, whose rubric prompts are made at the start


@dataclasses.dataclass
class System:
    """Everything of a run. `held`: weights that must never change beside those of judges; fingerprints: of all such, at start."""

    cfg: Experiment
    stages: list[Stage]
    learners: dict[str, Learner]
    context: Context
    engines: list[Engine]
    held: dict[str, Any]
    frozen_fingerprints: dict[str, str]
    compat: list[str]
    bench: Bench
    compile: Callable[[Iterable[Any]], None]  # the programs of (engine, weights, asks for probabilities) or a reward model
    endpoints: dict[str, Endpoint] = dataclasses.field(default_factory=dict)  # by role, where one is remote
    inputs: dict[str, Input] = dataclasses.field(default_factory=dict)  # what is read and the config only names

    def learner_of(self, role: str) -> Learner:
        """The weights that a role trains."""
        return self.learners.get(role, self.learners["policy"])

    @property
    def states(self) -> dict[str, Any]:
        """What updates change, by name: of every learner, and of its critic."""
        critics = {f"critic_{name}": learner.critic for name, learner in self.learners.items() if learner.critic is not None}
        return {name: learner.state for name, learner in self.learners.items()} | {n: c.state for n, c in critics.items()}

    def take_states(self, states: dict[str, Any]) -> None:
        """Put back what `states` gave."""
        for name, learner in self.learners.items():
            learner.state = states[name]
            if learner.critic is not None:
                learner.critic.state = states[f"critic_{name}"]

    @property
    def frozen(self) -> dict[str, Any]:
        """All weights that must never change, by name."""
        return self.held | self.bench.weights

    def temperature(self, stage: Stage) -> float:
        """The temperature of the distribution that the stage's completions were drawn from (1 for supervised data)."""
        if stage.loss != "policy":
            return 1.0
        return (self.cfg.rubric_sampling if stage.role == "rubric" else self.cfg.answer).temperature

    def take_sampler_facts(self) -> Facts:
        """Counts of this process's engines since the last call."""
        used, facts = [engine.stats for engine in self.engines], Facts()
        facts.total("tokens/sampled", sum(s.tokens for s in used))
        facts.total("tokens/prefilled", sum(s.prefill_tokens for s in used))
        facts.total("sampler/dispatches", sum(s.dispatches for s in used))
        steps = sum(s.row_steps for s in used), sum(s.slot_steps for s in used)
        facts.add("ratio_if", "sampler/occupancy", steps)
        for stats in used:
            stats.reset()
        return facts

    def open_caches(self, folder: pathlib.Path) -> None:
        """Let the endpoints keep their replies in the run folder."""
        for endpoint in self.endpoints.values():
            endpoint.open_cache(folder)

    def close(self) -> None:
        """End what runs in the background."""
        for endpoint in self.endpoints.values():
            endpoint.close()

    def check_frozen(self) -> None:
        """The weights that the judge holds are those of the start (design.md 4.7). RuntimeError when they are not."""
        held = self.frozen
        for seat, judge in zip(self.bench.serving, members(self.context.judge) if self.context.judge is not None else ()):
            if (instrument := getattr(judge, "instrument", None)) is not None:
                held[seat.name] = instrument.params
        if (instrument := getattr(self.context.heldout, "instrument", None)) is not None:
            held[HELDOUT] = instrument.params
        for name, params in held.items():
            found = fingerprint(params)
            if found != self.frozen_fingerprints[name]:
                raise RuntimeError(f"the frozen {name} changed: fingerprint {found}, at start {self.frozen_fingerprints[name]}")

    def begin_cycle(self, cycle: int, console: RunConsole) -> None:
        """Seat the judges of a cycle, where others served before. UserError where one's weights are not those that the run has
        had for it."""
        if self.context.judge is None or not self.bench.changes(cycle):
            return
        self.context.judge = self.context.pair_judge = None  # their weights go before others come
        new = self.bench.sit(cycle)
        self.context.judge, self.context.pair_judge = self.bench.judge, self.bench.pair_judge
        for seat in new:
            console.note(f"cycle {cycle + 1}: {seat.name} {seat.cfg.source!r} serves")
        self.check_known({seat.name: fingerprint(seat.params) for seat in new if seat.params is not None})
        self.compile(judge_speakers(new))

    def check_known(self, prints: dict[str, str]) -> None:
        """Fingerprints of frozen weights, of this process or of a checkpoint, against those known before; new ones are kept."""
        for name, found in prints.items():
            if (known := self.frozen_fingerprints.setdefault(name, found)) != found:
                where = _source_key(name)
                raise UserError(f"the frozen weights of {name} differ from those this run began with", where=where,
                                expected=f"fingerprint {known}, found {found}")  # fmt: skip


def assemble(cfg: Experiment, console: RunConsole, warm_up: bool = True, watchdog: Watchdog | None = None) -> System:
    """Load and build everything; compile the sampler's programs ahead when `warm_up`."""
    _check_processes(cfg)
    compilation_cache(cfg, console)
    mesh = make_mesh(cfg.mesh) if jax.device_count() > 1 else None
    console.note(f"devices: {jax.device_count()} {jax.devices()[0].platform}" + (f", mesh {dict(mesh.shape)}" if mesh else ""))
    console.note(f"loading policy {cfg.policy.source!r}")
    head = functools.partial(load_with_head, std=cfg.reward.head_std, seed=cfg.seed) if cfg.schedule.mode == "reward" else None
    policy = _load(cfg.policy, mesh, "policy", train_rules(cfg.mesh), head)
    models = {"policy": policy}
    endpoints = _make_endpoints(cfg, console)
    if cfg.generator.mode == "two" and "generator" not in endpoints and generator_learns(cfg):
        models["rubric"] = _load(_generator_model(cfg), mesh, "generator", train_rules(cfg.mesh))
    for i, (name, wanted) in enumerate(zip(policy_names(cfg)[1:], cfg.policies)):
        console.note(f"loading {name} {wanted.source!r}")
        models[name] = _load(wanted, mesh, f"policies.{i}", train_rules(cfg.mesh))
    local = local_mesh(mesh)  # a process samples and judges on its own devices
    engines = _Engines(cfg, local)
    bench = _bench(cfg, policy, engines, endpoints)
    heldout = _heldout(cfg, policy, engines, endpoints.get(HELDOUT))

    tokenizers = {name: ChatTokenizer.load(model.folder) for name, model in models.items()}
    loop = METHODS[cfg.schedule.mode](cfg)
    updates = optimizer_steps(cfg, tuple(models))
    learners = {name: make_learner(name, cfg, model, mesh, updates[name]) for name, model in models.items()}
    if cfg.advantage.kind == "gae":
        for name, learner in learners.items():
            if updates[name]:
                learner.critic = make_critic(cfg, _load_critic(cfg, name, mesh), mesh)
    voices = {name: _voice(learners[name], tokenizers[name], engines) for name in models}
    frozen = _frozen_voices(cfg, voices, engines, console)
    if heldout is not None and heldout.params is not None:
        frozen[HELDOUT] = heldout.params
    voices.setdefault("rubric", voices["policy"])

    streams, warmup_role = _streams(cfg, tokenizers["policy"], console)
    stages = [*supervised.stages(cfg, warmup_role), *loop]
    pairs = cfg.pairs
    buffer = ReplayBuffer(
        buffer_slots(cfg), pairs.per_slot, pairs.min_gap, pairs.max_gap, on_empty=pairs.on_empty,
        fifo_entries=cfg.compat.buffer_entries,
    )  # fmt: skip
    writer = EndpointWriter(endpoints["generator"], cfg.rubric) if "generator" in endpoints else None
    judge = bench.judge if bench.seats else None
    context = Context(
        cfg, voices, judge, streams, buffer, console.progress, writer=writer, watchdog=watchdog or Watchdog(),
        pair_judge=bench.pair_judge if bench.seats else None, heldout=heldout.judge if heldout else None,
    )  # fmt: skip
    _check_lengths(context)
    _check_examples(context)
    compat = compat_warnings(cfg)
    for line in compat:
        console.note(f"warning: {line}")
    prints = {name: fingerprint(params) for name, params in (frozen | bench.weights).items()}
    compile_all = functools.partial(compile_programs, cfg, console)
    system = System(cfg, stages, learners, context, engines.all, frozen, prints, [w.split(":")[0] for w in compat], bench,
                    compile_all, endpoints)  # fmt: skip
    others = [heldout] if heldout else []
    system.inputs = _inputs(context, [*bench.serving, *others])
    if warm_up:
        _warm_up(system, others)
    return system


def optimizer_steps(cfg: Experiment, names: tuple[str, ...]) -> dict[str, int]:
    """Optimizer steps of the loop that train each of the weights `names`; the first ones play every role without its own."""
    steps = dict.fromkeys(names, 0)
    for stage in METHODS[cfg.schedule.mode](cfg):
        for role in filter(None, (stage.role, stage.then_role)):
            steps[role if role in steps else "policy"] += stage.updates
    return steps


def _heldout(cfg: Experiment, policy: LoadedModel, engines: _Engines, endpoint: Endpoint | None) -> Seat | None:
    """The judge that rewards nothing, made as the others are."""
    if not cfg.heldout_judge.source:
        return None
    own = dataclasses.replace(cfg, judge=cfg.heldout_judge)
    return _seat(HELDOUT, own, _load_judge(own, policy, engines.mesh), engines, endpoint)


def _load_critic(cfg: Experiment, name: str, mesh: Any) -> LoadedModel:
    """The critic of the weights `name`, its own copy."""
    load = functools.partial(load_with_head, std=cfg.critic.head_std, seed=cfg.seed)
    return _load(critic_source(cfg, name), mesh, "critic", train_rules(cfg.mesh), load)


def _check_processes(cfg: Experiment) -> None:
    """What several processes can't do: nothing may depend on which samples share a process."""
    faults = {"compat.pack_mean": cfg.compat.pack_mean, "compat.buffer_entries": cfg.compat.buffer_entries}
    if jax.process_count() > 1 and (found := next((key for key, on in faults.items() if on), None)):
        raise UserError(f"{found} with several processes would depend on their number", where=found, expected="one process")
    if jax.process_count() > cfg.schedule.prompts:
        raise UserError(f"{jax.process_count()} processes for {cfg.schedule.prompts} prompt slots", where="schedule.prompts",
                        expected=f"at least {jax.process_count()}")  # fmt: skip


def _bench(cfg: Experiment, policy: LoadedModel, engines: _Engines, endpoints: dict[str, Endpoint]) -> Bench:
    """The judges, those of the first cycle seated. policy: as loaded, for a judge of the same weights; trained later, so a judge
    that comes later reads its own."""
    loaded: list[LoadedModel] = [policy]

    def make(number: int) -> Seat:
        name = judge_name(number)
        own = dataclasses.replace(cfg, judge=all_judges(cfg)[number])
        try:
            model = _load_judge(own, loaded[0] if loaded else None, engines.mesh)
            return _seat(name, own, model, engines, endpoints.get(name))
        except UserError as error:
            where = error.where.replace("judge.", f"panel.judges.{number - 1}.", 1) if number else error.where
            raise UserError(error.what, where=where, expected=error.expected, nearest=error.nearest) from error

    bench = Bench(cfg, make)
    if cfg.schedule.mode in JUDGED:
        bench.sit(0)
    loaded.clear()
    return bench


def _generator_model(cfg: Experiment) -> ModelConfig:
    """The generator's own weights, in two-model mode."""
    return dataclasses.replace(cfg.policy, source=cfg.generator.source or cfg.policy.source, sha256="")


def _frozen_voices(cfg: Experiment, voices: dict[str, Voice], engines: _Engines, console: RunConsole) -> dict[str, Any]:
    """Give a voice each to the frozen policies of pairs and to a generator with weights of its own that nothing trains, and so no
    optimizer; their weights by name."""
    wanted = {name: (f"pairs.frozen_models.{i}", model) for i, (name, model) in enumerate(frozen_models(cfg).items())}
    two = cfg.schedule.mode in JUDGED and cfg.generator.mode == "two" and not api_model(cfg.generator.source)
    if two and "rubric" not in voices:
        wanted["rubric"] = ("generator", _generator_model(cfg))
    out = {}
    for name, (key, model) in wanted.items():
        console.note(f"loading {name} {model.source!r}")
        found = _load(dataclasses.replace(model, param_dtype=model.dtype), engines.mesh, key, DECODE_RULES)
        tokenizer = ChatTokenizer.load(found.folder)
        out[name] = found.params
        voices[name] = Voice(tokenizer, engines.get(found.spec, tokenizer.stop_ids), functools.partial(out.get, name))
    return out


def _load_judge(cfg: Experiment, policy: LoadedModel | None, mesh: Any) -> LoadedModel | None:
    """The judge's weights, its own copy: the policy's buffers are donated at every update."""
    if cfg.schedule.mode not in JUDGED or cfg.judge.protocol in MODEL_FREE or api_model(cfg.judge.source):
        return None
    wanted = ModelConfig(source=cfg.judge.source, dtype=cfg.judge.dtype, param_dtype=cfg.judge.dtype, sha256=cfg.judge.sha256)
    if cfg.judge.protocol == SCALAR:
        return _load(wanted, mesh, "judge", RULES, load_scalar)
    same = (wanted.source, wanted.param_dtype) == (cfg.policy.source, cfg.policy.param_dtype) and jax.process_count() == 1
    if policy is not None and same and wanted.sha256 in ("", cfg.policy.sha256):
        copy = quantize_params if cfg.judge.weights == "int8" else functools.partial(jax.tree.map, jnp.copy)
        return dataclasses.replace(policy, params=_to_decode(copy(policy.params), policy.spec, mesh, cfg))
    model = _load(wanted, mesh, "judge", DECODE_RULES)
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


def _load(
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


class _Engines:
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


def _voice(learner: Learner, tokenizer: ChatTokenizer, engines: _Engines) -> Voice:
    return Voice(tokenizer, engines.get(learner.spec, tokenizer.stop_ids), learner.weights)


def _make_endpoints(cfg: Experiment, console: RunConsole) -> dict[str, Endpoint]:
    """The roles that another machine plays. Nothing is asked yet."""
    roles = {judge_name(i): (judge.source, judge.endpoint, judge.protocol) for i, judge in enumerate(all_judges(cfg))}
    roles[HELDOUT] = (cfg.heldout_judge.source, cfg.heldout_judge.endpoint, cfg.heldout_judge.protocol)
    roles["generator"] = (cfg.generator.source, cfg.generator.endpoint, f"rubric {cfg.rubric.schema}")
    remote = {role: (api_model(source), how, kind) for role, (source, how, kind) in roles.items() if api_model(source)}
    if cfg.schedule.mode not in JUDGED:
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


def _source_key(name: str) -> str:
    """The configuration key of frozen weights' source, by their name: judge, judge_1, frozen_0, rubric, ..."""
    if name == HELDOUT:
        return "heldout_judge.source"
    group, _, number = name.partition("_")
    if group == "judge":
        return f"panel.judges.{int(number) - 1}.source" if number else "judge.source"
    return f"pairs.frozen_models.{number}.source" if group == "frozen" else "generator.source"


def _seat(name: str, cfg: Experiment, model: LoadedModel | None, engines: _Engines, endpoint: Endpoint | None) -> Seat:
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


def _streams(cfg: Experiment, tokenizer: ChatTokenizer, console: RunConsole) -> tuple[dict[str, SlotStream], str]:
    """Prompt streams of both roles and of the warm-up; whose weights the warm-up trains."""
    streams: dict[str, SlotStream] = {}
    role = "policy"
    if cfg.warmup.updates:
        records = supervised.split_turns(list(read_chat(cfg.warmup.data, key="warmup.data").records))
        role = "rubric" if "rubric" in records[0] else "policy"
        streams["warmup"] = SlotStream(PromptSet.of(records, cfg.warmup.data), cfg.warmup.seed, cfg.warmup.batch, "warmup")
    if cfg.schedule.mode == "sft":
        return streams, role
    if cfg.schedule.mode == "reward":
        pairs = reward_model.read(cfg, tokenizer, lambda done, total: console.progress("pairs measured", done, total))
        console.note(f"{len(pairs)} pairs" + (f", {n} over the limit left out" if (n := pairs.filtered) else ""))
        streams[reward_model.STREAM] = SlotStream(pairs, cfg.seed, cfg.reward.pairs, reward_model.STREAM)
        return streams, role
    if cfg.schedule.mode == "evolm" and cfg.schedule.order == "generator_first" and cfg.generator.mode == "single":
        console.note("note: generator_first with generator.mode=single: training the policy changes the generator's weights too")

    def count(question: str) -> int:
        messages = [{"role": "user", "content": question}]
        return len(tokenizer.render(messages, thinking=cfg.policy.thinking, system=cfg.policy.system_prompt))

    prompts = read_prompts(cfg.data, count, cfg.seed, lambda done, total: console.progress("prompts measured", done, total))
    console.note(f"{len(prompts)} prompts" + (f", {prompts.filtered} over the limit left out" if prompts.filtered else ""))
    for name in (*policy_names(cfg), "rubric"):
        streams[name] = SlotStream(prompts, cfg.seed, cfg.schedule.prompts, name)
    if cfg.pairs.data:
        streams["pairs"] = SlotStream(_read_pairs(cfg, count, console), cfg.seed, cfg.schedule.prompts, "pairs")
    return streams, role


def _read_pairs(cfg: Experiment, count: Callable[[str], int], console: RunConsole) -> PromptSet:
    """The pairs of pairs.data whose prompts keep the limit on prompts. UserError where none does."""
    found = read_pairs(cfg.pairs.data, key="pairs.data")
    kept = [record for record in found.records if count(record["prompt"]) <= cfg.data.max_prompt_tokens]
    dropped = len(found) - len(kept)
    if not kept or (dropped and cfg.data.over_limit == "refuse"):
        raise UserError(f"{dropped} of {len(found)} pairs have a prompt over the limit of {cfg.data.max_prompt_tokens} tokens",
                        where=f"pairs.data={cfg.pairs.data}",
                        expected="a larger data.max_prompt_tokens, or shorter prompts")  # fmt: skip
    console.note(f"{len(kept)} pairs" + (f", {dropped} over the limit left out" if dropped else ""))
    return PromptSet.of(kept, found.source) if dropped else found


def _inputs(context: Context, serving: Iterable[Seat]) -> dict[str, Input]:
    """What the config only names and the run reads: prompt templates, data and tokenizers, by key."""
    cfg = context.cfg
    names = {}
    if (cfg.schedule.mode in JUDGED and cfg.rubric.source == "generator") or cfg.warmup.updates:
        names = {"rubric.prompt": cfg.rubric.prompt, "compat.train_rubric_prompt": cfg.compat.train_rubric_prompt}
    if cfg.schedule.mode in JUDGED:
        names["heldout_judge.protocol"] = JUDGE_PROMPTS.get(cfg.heldout_judge.protocol, "") if cfg.heldout_judge.source else ""
        for i, judge in enumerate(all_judges(cfg)):
            group = f"panel.judges.{i - 1}" if i else "judge"
            names[f"{group}.protocol"] = JUDGE_PROMPTS.get(judge.protocol, "")
            names[f"{group}.pairs"] = pairwise.TEMPLATE if judge.pairs == "pairwise" and judge.protocol not in MODEL_FREE else ""
        names["pairs.inference_prompt"] = cfg.pairs.inference_prompt if cfg.pairs.inferred > 0 else ""
        names["pairs.conditioned_prompt"] = cfg.pairs.conditioned_prompt if cfg.pairs.conditioned > 0 else ""
    found = {key: Input(*template_identity(name)) for key, name in names.items() if name}
    for key, stream in (("data.prompts", "policy"), ("warmup.data", "warmup"), ("pairs.data", "pairs"),
                        ("reward.data", reward_model.STREAM)):  # fmt: skip
        if stream in context.streams:
            prompts = context.streams[stream].prompts
            found[key] = Input(prompts.hash, f"{key}={prompts.source}")
    tokenizers = {f"tokenizer of {role}": voice.tokenizer for role, voice in context.voices.items()}
    for seat in serving:  # a judge that comes later shows its tokenizer then
        if (instrument := getattr(seat.judge, "instrument", None)) is not None:
            tokenizers[f"tokenizer of {seat.name}"] = instrument.tokenizer
    return found | {key: Input(tokenizer.hash, tokenizer.where) for key, tokenizer in tokenizers.items()}


def _check_lengths(context: Context) -> None:
    """The longest question allowed must fit its rubric prompt too: into the sampler and, with a rubric, into a packed row.

    A template may hold the question more than once, so the prompts of the longest questions are made as well.
    """
    cfg = context.cfg
    if cfg.schedule.mode in ("verifiable", "rlcer"):
        prompts = context.streams["policy"].prompts
        check_needs(resolve_verifier(cfg.schedule.verifier), prompts.records, prompts.source)
    if cfg.schedule.mode != "evolm":
        return
    check_records(cfg, context.streams["policy"].prompts.records)
    _check_other_policies(context)
    if context.writer is not None or cfg.rubric.source != "generator":
        return
    # What the rubric prompt adds to a question; the answer prompt's own frame is within data.max_prompt_tokens.
    added = len(context.rubric_prompt("", training=True)) - len(context.answer_prompt(""))
    longest, what = cfg.data.max_prompt_tokens + max(added, 0), f"data.max_prompt_tokens = {cfg.data.max_prompt_tokens}"
    records = context.streams["rubric"].prompts.records
    for record in heapq.nlargest(CHECKED_QUESTIONS, records, key=lambda r: len(r["prompt"])):
        if (length := len(context.rubric_prompt(record["prompt"], training=True))) > longest:
            longest, what = length, f"the prompt {record['id']!r}"
    if longest > cfg.sampler.max_prompt:
        raise UserError(
            f"a question of {what} makes a rubric prompt of {longest} tokens",
            where="sampler.max_prompt", expected=f"at least {longest}, or a smaller data.max_prompt_tokens",
        )  # fmt: skip
    if (row := longest + cfg.rubric_sampling.max_new_tokens) > cfg.update.pack_length:
        raise UserError(
            f"a rubric prompt of {longest} tokens and a rubric of {cfg.rubric_sampling.max_new_tokens} do not fit a packed row",
            where="update.pack_length", expected=f"at least {row}",
        )  # fmt: skip


def _check_other_policies(context: Context) -> None:
    """The longest questions, measured in the first policy's tokens, fit the others' prompts and packed rows too."""
    cfg, records = context.cfg, context.streams["policy"].prompts.records
    limit = min(cfg.sampler.max_prompt, cfg.update.pack_length - cfg.answer.max_new_tokens)
    for i, role in enumerate(policy_names(cfg)[1:]):
        for record in heapq.nlargest(CHECKED_QUESTIONS, records, key=lambda r: len(r["prompt"])):
            if (length := len(context.answer_prompt(record["prompt"], role))) > limit:
                expected = f"room for {length} tokens, or a smaller data.max_prompt_tokens"
                what = f"the prompt {record['id']!r} has {length} tokens for {role}, and there is room for {limit}"
                raise UserError(what, where=f"policies.{i}.source, sampler.max_prompt, update.pack_length", expected=expected)


def _check_examples(context: Context) -> None:
    """Every supervised example that the run will see fits a packed row: found now, and not at the update that draws it."""
    cfg, stream = context.cfg, context.streams.get("warmup")
    if stream is None:
        return
    drawn = {stream.index(slot, count) for slot in range(stream.slots) for count in range(cfg.warmup.updates)}
    for record in (stream.prompts.records[index] for index in sorted(drawn)):
        if (length := supervised.length(context, record)) > cfg.update.pack_length:
            raise UserError(
                f"the example {record['id']!r} has {length} tokens, and a packed row holds {cfg.update.pack_length}",
                where=f"warmup.data={stream.prompts.source}, update.pack_length",
                expected=f"update.pack_length of at least {length}, or shorter examples",
            )


def _warm_up(system: System, others: Iterable[Seat]) -> None:
    """Compile the sampler's programs, so that nothing compiles later inside the loop (but a judge's whose cycle comes later)."""
    if system.cfg.schedule.mode in UNSAMPLED:
        return
    for learner in system.learners.values():
        learner.publish()
    speakers = [(voice.engine, voice.weights(), False) for voice in system.context.voices.values()]
    system.compile([*speakers, *judge_speakers([*system.bench.serving, *others])])
    system.take_sampler_facts()  # what the warm-up fed is nobody's metric
