"""What trains of a loaded model: all of it, or adapters (lora.rank > 0) over a base that is frozen and held once."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from coevo_jax.config import Experiment
from coevo_jax.mesh import array_sharding, train_rules
from coevo_jax.models.forward import ParamInfo
from coevo_jax.models.load import LoadedModel
from coevo_jax.models.lora import adapted, fresh, frozen_part, merged, merged_matrix, whole
from coevo_jax.models.peft import adapter_hash, read_adapter
from coevo_jax.models.spec import ModelSpec
from coevo_jax.records.fingerprint import device_fingerprint, fingerprint
from coevo_jax.records.run_folder import Input
from coevo_jax.trained import trained_sources


@dataclasses.dataclass(frozen=True)
class Tuning:
    """spec: of programs that train; base: what is frozen, None where everything trains."""

    spec: ModelSpec
    base: Any = None

    def whole(self, trained: Any) -> Any:
        """Parameters for a forward pass."""
        return whole(self.spec, self.base, trained)

    def merged(self, trained: Any, dtype: str) -> Any:
        """Plain weights for the sampler; without adapters the trained ones as they are, which it casts itself."""
        return trained if self.base is None else merged(self.spec, self.base, trained, dtype)

    def fingerprint(self, trained: Any, dtype: str) -> str:
        """Of the plain weights in `dtype`, one matrix of all layers made at a time."""
        if self.base is None:
            return fingerprint(trained, dtype)
        base, kind = self.base, jnp.dtype(dtype)
        rest = {name: leaf for name, leaf in base.items() if name != "layers"}
        rest |= {"score": trained["score"]} if self.spec.scalar else {}
        parts = [device_fingerprint({name: leaf.astype(kind)}) for name, leaf in rest.items()]
        for name in base["layers"]:
            parts.append(device_fingerprint({"layers": {name: merged_matrix(self.spec, base, trained, name, dtype)}}))
        high, low = np.stack([np.asarray(part) for part in parts]).sum(0, dtype=np.uint32)
        return f"{int(high):08x}{int(low):08x}"

    @property
    def args(self) -> tuple[Any, ...]:
        """The last argument of updates, where they have one."""
        return () if self.base is None else (self.base,)


def tune(cfg: Experiment, name: str, model: LoadedModel, mesh: Any = None) -> tuple[Tuning, Any]:
    """What stays and what trains of the weights `name`. Adapters begin as lora.source where the weights begin as the policy's.

    UserError: a rank that a target does not have; as in models.peft.read_adapter.
    """
    if cfg.lora.rank == 0:
        return Tuning(model.spec), model.params
    spec, rules = adapted(model.spec, cfg.lora), train_rules(cfg.mesh)

    def place(info: ParamInfo) -> Any:
        return array_sharding(mesh, info.shape, info.axes, rules)

    where = None if mesh is None else place
    start = fresh(spec, model.params, cfg.lora.init, cfg.seed, name, where)
    own = trained_sources(cfg).get(name)
    if cfg.lora.source and own is not None and own.source == cfg.policy.source:
        start = read_adapter(_folder(cfg), cfg.lora, spec, start, where)
    return Tuning(spec, frozen_part(model.params)), start


def base_prints(tunings: Mapping[str, Tuning]) -> dict[str, str]:
    """Fingerprints of the frozen bases by 'base_' and the name of the weights: a run goes on over the same ones alone."""
    seen: dict[tuple[int, ...], str] = {}
    out = {}
    for name, tuning in tunings.items():
        if tuning.base is not None:
            same = tuple(id(leaf) for leaf in jax.tree.leaves(tuning.base))
            out[f"base_{name}"] = seen[same] if same in seen else seen.setdefault(same, fingerprint(tuning.base))
    return out


def adapter_input(cfg: Experiment) -> dict[str, Input]:
    """The starting adapter's identity, which the run folder binds."""
    if not cfg.lora.source:
        return {}
    return {"lora.source": Input(adapter_hash(_folder(cfg)), f"lora.source={cfg.lora.source}")}


def _folder(cfg: Experiment) -> pathlib.Path:
    return pathlib.Path(cfg.lora.source).expanduser()
