"""One set of trained weights and everything that belongs to it: optimizer state, frozen reference, published sampler weights.

In single-model mode one Learner serves both roles; in two-model mode there are two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
from jax.sharding import NamedSharding, PartitionSpec

from coevo_jax.adapters import Tuning, tune
from coevo_jax.config import Experiment, UpdateConfig
from coevo_jax.critic import Critic, fetch
from coevo_jax.distributed import any_process, global_rows, largest, local_copy, local_mesh, most_owned
from coevo_jax.learn.losses import resolve_loss, sft_loss
from coevo_jax.learn.packing import Sample, TokenBatch, pack, with_micro_batches
from coevo_jax.learn.preference import (
    PreferenceSample,
    make_preference_scores,
    make_preference_update,
    make_reference_logps,
    pack_preferences,
)
from coevo_jax.learn.publish import cast_matrices, make_publish, same_places
from coevo_jax.learn.reward_model import PairSample, described, make_reward_scores, make_reward_update, pack_pairs
from coevo_jax.learn.supervised import make_supervised_scores
from coevo_jax.learn.update import Optimizer, TrainState, init_state, make_logprobs, make_optimizer, make_update, rows_devices
from coevo_jax.mesh import train_rules
from coevo_jax.models.load import LoadedModel
from coevo_jax.models.spec import ModelSpec
from coevo_jax.records.fingerprint import fingerprint


@dataclasses.dataclass
class Learner:
    """Trained weights. `updates` by loss name ('policy', 'sft', 'reward', 'dpo'; 'scores' and 'dpo_scores' look at held-out
    pairs, 'pair_logps' gives log-probs of answers).

    `publish` makes the sampler's copy, `weights` hands it out."""

    name: str
    cfg: Experiment
    spec: ModelSpec
    state: TrainState
    optimizer: Optimizer
    updates: dict[str, Callable[..., tuple[TrainState, dict[str, Any]]]]
    logprobs: Callable[[Any, Any, float], jax.Array]
    placed: Callable[[Any], Any]  # the trainer's parameters in the sampler's dtype, where it wants them
    tuning: Tuning  # what is frozen under the parameters, with adapters
    mesh: Any = None
    reference: Any = None  # frozen parameters of the KL term, where it has a weight; matrices in policy.dtype
    anchored: bool = False  # the loop has begun: reference taken, optimizer fresh
    critic: Critic | None = None  # PPO's (advantage.kind=gae)
    published: Any = None  # what the sampler holds
    _compared: tuple[jax.Array, ...] = ()  # the sampler's and the trainer's arrays that were last found to agree
    _wanted: str = ""  # several processes: the trainer's fingerprint when its weights were published

    def publish(self) -> None:
        """Give the sampler the trainer's weights."""
        self.published, self._compared = None, ()  # the old copy goes before the new one comes
        params = self.tuning.merged(self.state.params, self.cfg.policy.dtype)
        if jax.process_count() > 1:  # what every process needs for sampling alone: its own copy, and what it must be equal to
            self.published = local_copy(self.placed(params), local_mesh(self.mesh))
            self._wanted = self._print()
        else:
            self.published = params if self._shared else self.placed(params)

    def weights(self) -> Any:
        """What the sampler holds, for a generation that begins now: equal to the trainer's weights of now (design.md 4.7).

        RuntimeError when they differ or none were published. The fingerprints are compared at the first use after either side
        got other arrays, so once an update; 135M parameters on one CPU core take 0.05 s a side, 0.12 s a cast one.
        """
        if self.published is None:
            raise RuntimeError(f"{self.name}: a generation begins and no weights were published after the last update")
        arrays = (*jax.tree.leaves(self.published), *jax.tree.leaves(self.state.params))
        if len(arrays) != len(self._compared) or any(a is not b for a, b in zip(arrays, self._compared)):
            held = fingerprint(self.published)
            wanted = self._wanted or self._print()
            if held != wanted:
                raise RuntimeError(
                    f"{self.name}: the sampler's weights are not the trainer's: it holds fingerprint {held}, the trainer's after "
                    f"{int(self.state.step)} updates of its optimizer is {wanted} (in {self.cfg.policy.dtype})"
                )
            self._compared = arrays
        return self.published

    def _print(self) -> str:
        """Fingerprint of the trainer's weights in the sampler's dtype."""
        return self.tuning.fingerprint(self.state.params, self.cfg.policy.dtype)

    @property
    def _shared(self) -> bool:
        """Does what `tuning.merged` gives serve the sampler as it is?"""
        same = self.cfg.policy.dtype == self.cfg.policy.param_dtype or self.tuning.base is not None
        return same and same_places(self.spec, train_rules(self.cfg.mesh), self.mesh)

    def take_reference(self, params: Any) -> None:
        """Hold frozen parameters for the KL term; of adapters these alone, over the base that is there."""
        self.reference = _moved(cast_matrices(params, self.cfg.policy.dtype), self._reference_kind)

    @property
    def _reference_kind(self) -> str:
        return "pinned_host" if self.cfg.update.reference == "host" else "device"

    def fresh_optimizer(self) -> None:
        """New moments and step count: the loop starts its own optimizer after the warm-up."""
        params = self.state.params
        self.state = self.state.replace(opt_state=None)  # the old moments go before the new ones come
        self.state = _settled(init_state(params, self.optimizer))

    def update(self, samples: list[Any], loss: str, temperature: float, most: int = 0) -> dict[str, float]:
        """One update on a batch of samples (pairs for 'reward' and 'dpo'); returns its metrics. The old parameters are donated:
        publish afterwards. most: samples that such an update may have, 0: prompts x group."""
        if loss == "reward":
            return self._update_reward(samples)
        if loss == "dpo":
            return self._update_preference(samples, most)
        if loss == "sft" and self.cfg.warmup.heldout:
            return self._update_supervised(samples, temperature, most)
        return self._update_tokens(samples, loss, temperature, most)

    def _update_supervised(self, samples: list[Sample], temperature: float, most: int) -> dict[str, float]:
        """One update on the examples that are not held out, after a look at those that are."""
        trained, heldout = ([sample for sample in samples if sample.heldout == aside] for aside in (False, True))
        seen: dict[str, float] = {}
        if number := largest([len(heldout)])[0]:
            rows, scores = self._rows(heldout, self.cfg.update, "sft", number), cast(Any, self.updates["sft_scores"])
            found = jax.device_get(scores(self.tuning.whole(self.state.params), rows))
            seen = {f"heldout/{name}": float(value) for name, value in found.items()}
        return seen | self._update_tokens(trained, "sft", temperature, most)

    def _update_tokens(self, samples: list[Sample], loss: str, temperature: float, most: int) -> dict[str, float]:
        """One update on completions."""
        cfg = self.cfg.update
        if self.cfg.compat.pack_mean:  # whose rows are means, so what is in a row matters
            cfg = dataclasses.replace(cfg, share_prefix=False)
        rows = self._rows(samples, cfg, loss, most)
        if loss == "policy" and self.cfg.loss.kl_weight > 0:
            assert self.reference is not None
            rows = rows.replace(ref_logp=self.logprobs(self.tuning.whole(_moved(self.reference, "device")), rows, temperature))
        metrics: dict[str, Any] = {}
        valued: dict[str, float] = {}
        if self.critic is not None and loss == "policy":
            resting = self.critic.warming_up
            rows, fit, estimated = self.critic.estimate(rows)
            valued = fetch(estimated, self.critic.fit(fit)) | {"critic/alone": float(resting)}
            if resting:
                return valued
        inner = self.cfg.update.inner_iterations if loss == "policy" else 1
        if inner > 1:
            rows = rows.replace(old_logp=self.logprobs(self.tuning.whole(self.state.params), rows, temperature))
        for _ in range(inner):
            self.published, self._compared, self._wanted = None, (), ""  # the donated buffers may be the sampler's
            self.state, metrics = self.updates[loss](self.state, rows, temperature, *self.tuning.args)
        found = valued | {name: float(value) for name, value in jax.device_get(metrics).items()}
        return {"update/nonfinite" if name == "nonfinite" else name: value for name, value in found.items()}

    def _update_reward(self, pairs: list[PairSample]) -> dict[str, float]:
        """One update on the pairs that are not held out, after a look at those that are."""

        def placed(chosen: list[PairSample], most: int) -> Any:
            return self._placed(lambda cfg, devices: pack_pairs(chosen, cfg, devices=devices, most=most_owned(most)))

        def told(metrics: Any) -> dict[str, float]:
            return described({name: float(value) for name, value in jax.device_get(metrics).items()})

        trained, heldout = ([pair for pair in pairs if pair.heldout == aside] for aside in (False, True))
        seen: dict[str, float] = {}
        if heldout:
            seen = told(self.updates["scores"](self.tuning.whole(self.state.params), placed(heldout, self.cfg.reward.heldout)))
        self.published, self._compared, self._wanted = None, (), ""
        self.state, metrics = self.updates["reward"](self.state, placed(trained, self.cfg.reward.pairs), *self.tuning.args)
        found = told(metrics) | {f"heldout/{name.removeprefix('reward_model/')}": value for name, value in seen.items()}
        return {"update/nonfinite" if name == "nonfinite" else name: value for name, value in found.items()}

    def _update_preference(self, pairs: list[PreferenceSample], most: int) -> dict[str, float]:
        """One update on the pairs that are not held out, after a look at those that are. most: pairs that one process may have,
        0: its part of dpo.pairs."""
        trained, heldout = ([pair for pair in pairs if pair.heldout == aside] for aside in (False, True))
        seen: dict[str, float] = {}
        if any_process(bool(heldout)):
            scores = cast(Any, self.updates["dpo_scores"])
            looked = scores(self.tuning.whole(self.state.params), self._pairs(heldout, most_owned(self.cfg.dpo.heldout)))
            seen = {f"heldout/{name}": float(value) for name, value in jax.device_get(looked).items()}
        self.published, self._compared, self._wanted = None, (), ""
        rows = self._pairs(trained, most or most_owned(self.cfg.dpo.pairs))
        self.state, metrics = self.updates["dpo"](self.state, rows, *self.tuning.args)
        found = seen | {name: float(value) for name, value in jax.device_get(metrics).items()}
        return {"update/nonfinite" if name == "nonfinite" else name: value for name, value in found.items()}

    def pair_logps(self, pairs: list[PreferenceSample], most: int) -> list[tuple[float, float]]:
        """Summed log-probs of both answers of each of this process's pairs under the weights of now: a frozen reference without a
        copy of them. Called by all processes together. most: pairs that any of them may have."""
        first = jax.process_index() * most
        params = self.tuning.whole(self.state.params)
        sums, owner = jax.device_get(self.updates["pair_logps"](params, self._pairs(pairs, most, first)))
        found = {int(o): float(x) for o, x in zip(owner.ravel(), sums.ravel()) if o >= 0}
        return [(found[2 * i], found[2 * i + 1]) for i in range(first, first + len(pairs))]

    def _pairs(self, pairs: list[PreferenceSample], most: int, first: int = 0) -> Any:
        return self._placed(lambda cfg, devices: pack_preferences(pairs, cfg, devices=devices, most=most, first=first))

    def _placed(self, make: Callable[[UpdateConfig, int], Any]) -> Any:
        """Rows that `make(cfg, devices)` packs for one process, over all processes; their number is one for all of them."""
        cfg, rules, processes = self.cfg.update, train_rules(self.cfg.mesh), jax.process_count()
        devices = rows_devices(self.mesh, rules)
        if processes == 1:
            return make(cfg, devices)
        height = -(-cfg.rows_per_micro // devices) * devices
        rows = make(dataclasses.replace(cfg, rows_per_micro=height // processes), devices // processes)
        return global_rows(rows, NamedSharding(self.mesh, PartitionSpec(None, rules.batch)))

    def _rows(self, samples: list[Sample], cfg: UpdateConfig, loss: str, most: int) -> TokenBatch:
        """Packed rows of all processes. One shape, and so one program, whatever the packing: rows enough for a sample each; empty
        micro-batches don't run. Processes agree on the number of micro-batches, since they run them together."""
        schedule, processes = self.cfg.schedule, jax.process_count()
        usual = most_owned(self.cfg.warmup.batch) if loss == "sft" else most_owned(schedule.prompts) * schedule.group
        most = most or usual
        rules = train_rules(self.cfg.mesh)
        devices = rows_devices(self.mesh, rules)
        if processes == 1:
            return pack(samples, cfg, devices=devices, rows=most)
        height = -(-cfg.rows_per_micro // devices) * devices  # of a micro-batch over all processes, each of which fills its share
        cfg = dataclasses.replace(cfg, rows_per_micro=height // processes)
        rows = pack(samples, cfg, devices=devices // processes, rows=most)
        rows = with_micro_batches(rows, largest([rows.tokens.shape[0]])[0])
        return global_rows(rows, NamedSharding(self.mesh, PartitionSpec(None, rules.batch)))


def _moved(params: Any, kind: str) -> Any:
    """Arrays in another memory of the same devices, or as they are where they lie in it."""
    places = jax.tree.map(lambda x: x.sharding.with_memory_kind(kind), params)
    return jax.tree.map(lambda x, s: x if x.sharding.memory_kind == kind else jax.device_put(x, s), params, places)


def _settled(state: TrainState) -> TrainState:
    """A fresh state that can be saved before its first update, which a second model's may be: scalars that jax.device_put laid on
    the devices of several processes can't be read until a program has returned them (jax 0.10)."""
    if jax.process_count() == 1:
        return state
    same = jax.jit(lambda x: x)
    return jax.tree.map(lambda x: same(x) if x.ndim == 0 else x, state)


def make_learner(name: str, cfg: Experiment, model: LoadedModel, mesh: Any = None, updates: int = 0, lr: float = 0.0) -> Learner:
    """A Learner over loaded weights. `updates`: those of the loop that train them, the length of a cosine schedule. lr: its own,
    where the role has one."""
    lr = lr or (cfg.generator.lr if name == "rubric" and cfg.generator.lr else cfg.optimizer.lr)
    schedule = cfg.optimizer.schedule if updates else "constant"  # a frozen generator, a supervised run
    optimizer = make_optimizer(dataclasses.replace(cfg.optimizer, lr=lr, schedule=schedule), updates)
    warmup = cfg.warmup
    rise, fall = warmup.warmup_steps, warmup.schedule if warmup.updates else "constant"
    supervised = make_optimizer(
        dataclasses.replace(cfg.optimizer, lr=warmup.lr, warmup_steps=rise, schedule=fall), warmup.updates
    )
    tuning, params = tune(cfg, name, model, mesh)
    if model.spec.scalar:
        scores = make_reward_scores(model.spec, cfg, mesh)
        functions = {"reward": make_reward_update(tuning.spec, optimizer, cfg, mesh), "scores": scores}
    else:
        functions = {
            "policy": make_update(tuning.spec, optimizer, resolve_loss(cfg.loss), cfg, mesh),
            "sft": make_update(tuning.spec, supervised, sft_loss, cfg, mesh),
            "sft_scores": make_supervised_scores(model.spec, cfg, mesh),
            "dpo": make_preference_update(tuning.spec, optimizer, cfg, mesh),
            "dpo_scores": make_preference_scores(model.spec, cfg, mesh),
            "pair_logps": make_reference_logps(model.spec, cfg, mesh),
        }
    state = _settled(init_state(params, optimizer))
    logprobs, placed = (
        make_logprobs(model.spec, cfg, mesh),
        make_publish(model.spec, cfg.policy.dtype, train_rules(cfg.mesh), mesh),
    )
    return Learner(name, cfg, model.spec, state, optimizer, functions, logprobs, placed, tuning, mesh)


def tunings(learners: dict[str, Learner]) -> dict[str, Tuning]:
    """What is frozen and what trains of every learner and of its critic, by name."""
    critics = {f"critic_{name}": learner.critic.tuning for name, learner in learners.items() if learner.critic is not None}
    return {name: learner.tuning for name, learner in learners.items()} | critics
