"""Who plays in a run: each set of weights on the slice by its role, its spec and the engine that runs it; judges' turns."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

from jax.sharding import Mesh

from coevo_jax import aot
from coevo_jax.config import Experiment, JudgeConfig, api_model, judge_sampler
from coevo_jax.config.several import all_judges, frozen_models, judge_name, policy_names, serving
from coevo_jax.config.validate import generator_learns, trains_generator
from coevo_jax.errors import UserError
from coevo_jax.mesh import ShardingRules, make_mesh, train_rules
from coevo_jax.models.known import STOP_IDS, known_spec
from coevo_jax.models.load import critic_source
from coevo_jax.models.spec import ModelSpec
from coevo_jax.modes import MODES
from coevo_jax.sampler.engine import Engine

JUDGED = tuple(name for name, mode in MODES.items() if mode.judged)
PLANNED = (*JUDGED, "verifiable", "reward", "dpo")
MODEL_FREE = ("oracle", "random")  # judge protocols
HELDOUT = "heldout_judge"


@dataclasses.dataclass(frozen=True)
class JudgeSeat:
    """A judge with weights on the slice; key: of its settings, such as panel.judges.0. engine: None for a reward model."""

    key: str
    cfg: JudgeConfig
    spec: ModelSpec
    engine: Engine | None


@dataclasses.dataclass(frozen=True)
class Slice:
    """A config on a topology: its mesh, specs and engines. `layers` cuts the models' depth (0: all), to compile sooner."""

    cfg: Experiment
    topology: aot.Topology
    layers: int = 0

    def check(self) -> None:
        """UserError for what has no plan: shapes that are not known by name, a mesh that does not use the slice."""
        mode = self.cfg.schedule.mode
        if mode not in PLANNED:
            raise UserError(f"schedule.mode={mode} has no plan yet", where="schedule.mode", expected=" | ".join(PLANNED))
        _ = self.mesh, self.trained, self.frozen, self.judges, self.critics

    @functools.cached_property
    def mesh(self) -> Mesh:
        return make_mesh(self.cfg.mesh, self.topology.devices)

    @property
    def rules(self) -> ShardingRules:
        return train_rules(self.cfg.mesh)

    @property
    def chips(self) -> int:
        return len(self.topology.devices)

    @property
    def samples(self) -> bool:
        """Does the run draw anything?"""
        return self.cfg.schedule.mode not in ("reward", "dpo")

    # ------------------------------------------------------------------------------------------------------ trained

    @functools.cached_property
    def policy(self) -> ModelSpec:
        spec = self._known(self.cfg.policy.source, "policy.source")
        return dataclasses.replace(spec, scalar=True) if self.cfg.schedule.mode == "reward" else spec

    @functools.cached_property
    def generator(self) -> ModelSpec | None:
        """The rubric generator's own model, or None where it is the policy's or behind an endpoint."""
        own = self.cfg.generator
        if own.mode != "two" or api_model(own.source) or self.cfg.schedule.mode not in JUDGED:
            return None
        return self._known(own.source, "generator.source") if own.source else self.policy

    def learns(self, role: str) -> bool:
        """Does the run train this role's own weights?"""
        return role.startswith("policy") or generator_learns(self.cfg)

    @functools.cached_property
    def trained(self) -> dict[str, ModelSpec]:
        """Sets of weights by role, trained but for a generator that nothing trains (`learns`)."""
        others = dict(zip(policy_names(self.cfg)[1:], self.cfg.policies))
        more = {name: self._known(m.source, f"policies.{i}.source") for i, (name, m) in enumerate(others.items())}
        return {"policy": self.policy} | more | ({"rubric": self.generator} if self.generator else {})

    @functools.cached_property
    def critics(self) -> dict[str, ModelSpec]:
        """PPO's critics (advantage.kind=gae) by the role of the weights that they value."""
        if self.cfg.advantage.kind != "gae":
            return {}
        sources = {role: critic_source(self.cfg, role).source for role in self.trained if self.learns(role)}
        return {
            f"critic_{role}": dataclasses.replace(self._known(source, "critic.source"), scalar=True)
            for role, source in sources.items()
        }

    # ------------------------------------------------------------------------------------------------------- frozen

    @functools.cached_property
    def frozen(self) -> dict[str, ModelSpec]:
        """The frozen policies of pairs."""
        models = frozen_models(self.cfg) if trains_generator(self.cfg) else {}
        return {name: self._known(m.source, f"pairs.frozen_models.{i}.source") for i, (name, m) in enumerate(models.items())}

    @functools.cached_property
    def judges(self) -> dict[str, JudgeSeat]:
        """Judges with weights on the slice, by name: judge, judge_1, ..., heldout_judge."""
        if self.cfg.schedule.mode not in JUDGED:
            return {}
        wanted = {judge_name(i): (f"panel.judges.{i - 1}" if i else "judge", j) for i, j in enumerate(all_judges(self.cfg))}
        if self.cfg.heldout_judge.source:
            wanted[HELDOUT] = (HELDOUT, self.cfg.heldout_judge)
        local = {n: (k, j) for n, (k, j) in wanted.items() if j.protocol not in MODEL_FREE and not api_model(j.source)}
        return {name: self._seat(key, judge) for name, (key, judge) in local.items()}

    def _seat(self, key: str, judge: JudgeConfig) -> JudgeSeat:
        spec = self._known(judge.source, f"{key}.source")
        if judge.protocol == "scalar":
            return JudgeSeat(key, judge, dataclasses.replace(spec, scalar=True), None)
        return JudgeSeat(key, judge, spec, Engine(spec, judge_sampler(self.cfg.sampler, judge), STOP_IDS, mesh=self.mesh))

    @functools.cached_property
    def turns(self) -> list[frozenset[str]]:
        """Names of the judges that hold weights at a time, for each turn of a curriculum; one turn without."""
        starts = sorted({0, *self.cfg.panel.from_cycle})
        names = [{judge_name(i) for i in serving(self.cfg.panel, cycle)} | {HELDOUT} for cycle in starts]
        return [frozenset(turn & set(self.judges)) for turn in names]

    def seated(self, sizes: Mapping[str, int], role: str = "") -> frozenset[str]:
        """Of the turns in which judge `role` serves (any, for another role), that whose judges take most. sizes: by name."""
        turns = [turn for turn in self.turns if role not in self.judges or role in turn]
        return max(turns, key=lambda turn: sum(sizes[name] for name in turn))

    # ------------------------------------------------------------------------------------------------------ engines

    @functools.cached_property
    def engine(self) -> Engine:
        """The policy's (and that of every other role of the same architecture)."""
        return Engine(self.policy, self.cfg.sampler, STOP_IDS, mesh=self.mesh)

    def spec(self, role: str) -> ModelSpec:
        """Of any role, judges and critics among them."""
        if role in self.judges:
            return self.judges[role].spec
        return (self.trained | self.frozen | self.critics)[role]

    def player(self, role: str) -> tuple[ModelSpec, Engine]:
        """Spec and engine of a role that writes."""
        if role in self.judges:
            seat = self.judges[role]
            assert seat.engine is not None
            return seat.spec, seat.engine
        spec = self.spec(role)
        return spec, self.engine if spec == self.policy else self._other(spec)

    @functools.cached_property
    def _engines(self) -> dict[ModelSpec, Engine]:
        return {}

    def _other(self, spec: ModelSpec) -> Engine:
        return self._engines.setdefault(spec, Engine(spec, self.cfg.sampler, STOP_IDS, mesh=self.mesh))

    def owner(self, role: str) -> str:
        """The first role of the same architecture, whose programs this one runs too; judges have their own."""
        if role in self.judges or role in self.critics:
            return role
        return next(name for name, spec in (self.trained | self.frozen).items() if spec == self.spec(role))

    def _known(self, source: str, where: str) -> ModelSpec:
        spec = known_spec(source, where)
        return dataclasses.replace(spec, layers=min(self.layers or spec.layers, spec.layers))


def left_out(s: Slice) -> list[str]:
    """What a plan of this config does not count, a line each."""
    cfg, out = s.cfg, []
    if cfg.policies:
        others = ", ".join(policy_names(cfg)[1:])
        out.append(f"the time of {others}: a policy step is one of the first policy, and the run's hours count it once for each")
    if cfg.panel.from_cycle:
        out.append("judges take turns: memory is of the largest turn, time of " + ", ".join(sorted(timed_judges(s))))
    if any(seat.engine is None for seat in s.judges.values()):
        out.append("the reward model's passes: its weights are counted, what they need beside them and their time are not")
    remote = [name for name, source in (("generator", cfg.generator.source), ("judge", cfg.judge.source)) if api_model(source)]
    remote += [f"judge_{i}" for i, judge in enumerate(cfg.panel.judges, start=1) if api_model(judge.source)]
    if remote and cfg.schedule.mode in JUDGED:
        out.append(f"the time that {', '.join(remote)} behind an endpoint takes")
    if cfg.warmup.updates:
        out.append("the supervised warm-up")
    return out


def timed_judges(s: Slice) -> frozenset[str]:
    """The judges whose time a plan counts: of turns, the one with the most weights."""
    from coevo_jax.cost import product_parameters

    return s.seated({name: int(product_parameters(seat.spec)) for name, seat in s.judges.items()})
