"""From a config to everything a run needs: models, tokenizers, engines, judge, data streams, buffer, learners and stages."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import jax

from coevo_jax.adapters import adapter_input, base_prints
from coevo_jax.bases import Bases
from coevo_jax.bench import Seat
from coevo_jax.compiling import compilation_cache, compile_programs, judge_speakers
from coevo_jax.config import Experiment
from coevo_jax.config.several import policy_names
from coevo_jax.config.validate import compat_warnings, generator_learns
from coevo_jax.critic import make_critic
from coevo_jax.distributed import local_mesh
from coevo_jax.errors import UserError
from coevo_jax.inputs import check_examples, check_lengths, make_streams, run_inputs
from coevo_jax.learner import make_learner, tunings
from coevo_jax.loading import (
    HELDOUT,
    Engines,
    frozen_voices,
    generator_model,
    make_bench,
    make_endpoints,
    make_heldout,
    make_voice,
)
from coevo_jax.mesh import make_mesh
from coevo_jax.methods import supervised
from coevo_jax.methods.context import Context, buffer_slots
from coevo_jax.methods.store import SlotStore
from coevo_jax.models.load import critic_source, load_with_head
from coevo_jax.modes import MODES
from coevo_jax.preference.buffer import ReplayBuffer
from coevo_jax.progress import RunConsole
from coevo_jax.records.fingerprint import fingerprint
from coevo_jax.rubrics.endpoint import EndpointWriter
from coevo_jax.system import System, optimizer_steps
from coevo_jax.text.chat import ChatTokenizer
from coevo_jax.watchdog import Watchdog


def assemble(cfg: Experiment, console: RunConsole, warm_up: bool = True, watchdog: Watchdog | None = None) -> System:
    """Load and build everything; compile the sampler's programs ahead when `warm_up`."""
    _check_processes(cfg)
    compilation_cache(cfg, console)
    mesh = make_mesh(cfg.mesh) if jax.device_count() > 1 else None
    console.note(f"devices: {jax.device_count()} {jax.devices()[0].platform}" + (f", mesh {dict(mesh.shape)}" if mesh else ""))
    console.note(f"loading policy {cfg.policy.source!r}")
    head = functools.partial(load_with_head, std=cfg.reward.head_std, seed=cfg.seed) if cfg.schedule.mode == "reward" else None
    bases = Bases(cfg, mesh)
    policy = bases.load(cfg.policy, "policy", head)
    models = {"policy": policy}
    endpoints = make_endpoints(cfg, console)
    if cfg.generator.mode == "two" and "generator" not in endpoints and generator_learns(cfg):
        models["rubric"] = bases.load(generator_model(cfg), "generator")
    for i, (name, other) in enumerate(zip(policy_names(cfg)[1:], cfg.policies)):
        console.note(f"loading {name} {other.source!r}")
        models[name] = bases.load(other, f"policies.{i}")
    extra = MODES[cfg.schedule.mode].models(cfg)
    for name, wanted in extra.items():
        console.note(f"loading {name} {wanted.model.source!r}")
        models[name] = bases.load(wanted.model, wanted.key)
    local = local_mesh(mesh)  # a process samples and judges on its own devices
    engines = Engines(cfg, local)
    bench = make_bench(cfg, policy, engines, endpoints)
    heldout = make_heldout(cfg, policy, engines, endpoints.get(HELDOUT))

    tokenizers = {name: ChatTokenizer.load(model.folder) for name, model in models.items()}
    streams, warmup_role = make_streams(cfg, tokenizers["policy"], console)
    cfg = supervised.with_updates(cfg, streams)
    loop = MODES[cfg.schedule.mode].stages(cfg)
    updates = optimizer_steps(cfg, tuple(models))
    lrs = {name: extra[name].lr if name in extra else 0.0 for name in models}
    learners = {name: make_learner(name, cfg, model, mesh, updates[name], lrs[name]) for name, model in models.items()}
    if cfg.advantage.kind == "gae":
        valued = functools.partial(load_with_head, std=cfg.critic.head_std, seed=cfg.seed)
        for name, learner in learners.items():
            if updates[name]:
                learner.critic = make_critic(cfg, name, bases.load(critic_source(cfg, name), "critic", valued), mesh)
    voices = {name: make_voice(learners[name], tokenizers[name], engines) for name in models}
    frozen = frozen_voices(cfg, voices, engines, console)
    if heldout is not None and heldout.params is not None:
        frozen[HELDOUT] = heldout.params
    voices.setdefault("rubric", voices["policy"])

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
        stores={name: SlotStore(slots) for name, slots in MODES[cfg.schedule.mode].stores(cfg).items()},
    )  # fmt: skip
    check_lengths(context)
    check_examples(context)
    compat = compat_warnings(cfg)
    for line in compat:
        console.note(f"warning: {line}")
    prints = {name: fingerprint(params) for name, params in (frozen | bench.weights).items()} | base_prints(tunings(learners))
    compile_all = functools.partial(compile_programs, cfg, console)
    system = System(cfg, stages, learners, context, engines.all, frozen, prints, [w.split(":")[0] for w in compat], bench,
                    compile_all, endpoints)  # fmt: skip
    context.pair_logps = lambda role, pairs, most: system.learner_of(role).pair_logps(pairs, most)
    if MODES[cfg.schedule.mode].prepare is not None:
        system.began = {name: fingerprint(learner.tuning.whole(learner.state.params)) for name, learner in learners.items()}
    others = [heldout] if heldout else []
    system.inputs = run_inputs(context, [*bench.serving, *others]) | adapter_input(cfg)
    if warm_up:
        _warm_up(system, others)
    return system


def _check_processes(cfg: Experiment) -> None:
    """What several processes can't do: nothing may depend on which samples share a process."""
    faults = {"compat.pack_mean": cfg.compat.pack_mean, "compat.buffer_entries": cfg.compat.buffer_entries}
    if jax.process_count() > 1 and (found := next((key for key, on in faults.items() if on), None)):
        raise UserError(f"{found} with several processes would depend on their number", where=found, expected="one process")
    if jax.process_count() > cfg.schedule.prompts:
        raise UserError(f"{jax.process_count()} processes for {cfg.schedule.prompts} prompt slots", where="schedule.prompts",
                        expected=f"at least {jax.process_count()}")  # fmt: skip


def _warm_up(system: System, others: Iterable[Seat]) -> None:
    """Compile the sampler's programs, so that nothing compiles later inside the loop (but a judge's whose cycle comes later)."""
    if not MODES[system.cfg.schedule.mode].sampled:
        return
    for learner in system.learners.values():
        learner.publish()
    speakers = [(voice.engine, voice.weights(), False) for voice in system.context.voices.values()]
    system.compile([*speakers, *judge_speakers([*system.bench.serving, *others])])
    system.take_sampler_facts()  # what the warm-up fed is nobody's metric
