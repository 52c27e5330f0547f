"""Loading of the weights that train."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from coevo_jax.config import Experiment, ModelConfig
from coevo_jax.loading import load_model
from coevo_jax.mesh import train_rules
from coevo_jax.models.load import LoadedModel
from coevo_jax.trained import RUN


class Bases:
    """Loads the weights that train. With adapters, which leave them alone, equal sources are one copy in memory."""

    def __init__(self, cfg: Experiment, mesh: Any):
        self.cfg, self.mesh = cfg, mesh
        self._held: dict[tuple[Any, ...], LoadedModel] = {}

    def load(self, wanted: ModelConfig, key: str, head: Callable[..., LoadedModel] | None = None) -> LoadedModel:
        """loading.load_model; head: models.load.load_with_head with its settings, where a scalar head trains."""
        rules = train_rules(self.cfg.mesh)
        if self.cfg.lora.rank == 0:
            return load_model(wanted, self.mesh, key, rules, head)

        def once(wanted: ModelConfig, mesh: Any, rules: Any = rules) -> LoadedModel:
            of_generator = key == "generator" and wanted.source.startswith(RUN)  # a run's generator, where it has one
            same = wanted.source, wanted.sha256, wanted.param_dtype, of_generator
            if same not in self._held:
                self._held[same] = load_model(wanted, mesh, key, rules)
            return self._held[same]

        if head is None:
            return once(wanted, self.mesh)
        return load_model(wanted, self.mesh, key, rules, functools.partial(head, load=once))
