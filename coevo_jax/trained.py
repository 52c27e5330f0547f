"""The weights of a run as a model source: 'run:FOLDER', with '#rubric' or '#policy_1' behind it for other weights than the first
ones, and '@UPDATE' or '@best' for another checkpoint than the newest: 'run:runs/evolm#rubric@500'."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import sys
from typing import Any

import jax

from coevo_jax.config import Experiment, ModelConfig, api_model
from coevo_jax.config.override import from_dict
from coevo_jax.config.several import policy_names
from coevo_jax.config.validate import generator_learns
from coevo_jax.errors import UserError, nearest
from coevo_jax.mesh import RULES, ShardingRules, param_shardings
from coevo_jax.models.load import LoadedModel, critic_source, load_model, load_orbax, load_with_head, tokenizer_folder
from coevo_jax.models.lora import adapted, frozen_part, merged, trained_shapes
from coevo_jax.models.orbax_folder import BUCKET, OrbaxFolder
from coevo_jax.modes import MODES
from coevo_jax.records.checkpoint import Checkpoints
from coevo_jax.records.fingerprint import fingerprint
from coevo_jax.records.integrity import read_host
from coevo_jax.records.run_folder import read_config

RUN = "run:"
BEST = "best.json"
STATE = "state"  # of a checkpoint: the trained weights by name, each with params, opt_state and step


def load(cfg: ModelConfig, mesh: Any = None, *, rules: ShardingRules = RULES, prefer: str = "policy") -> LoadedModel:
    """load_model, which knows a run's weights too. prefer: which of them where the source names none."""
    if not cfg.source.startswith(RUN):
        return load_model(cfg, mesh, rules=rules)
    folder, weights, update = split(cfg.source)
    return load_trained(folder, weights, cfg, mesh, rules=rules, update=update, prefer=prefer)[0]


def split(source: str) -> tuple[pathlib.Path, str, int | None]:
    """(folder, weights or '', update or None) of a source 'run:FOLDER#WEIGHTS@UPDATE'."""
    match = re.fullmatch(r"(.+?)(?:#(\w+))?(?:@(\d+|best))?", source.removeprefix(RUN))
    if match is None:
        raise UserError(f"{source!r} names no run", where=source, expected="run:FOLDER, run:FOLDER#WEIGHTS or run:FOLDER@UPDATE")
    folder = pathlib.Path(match[1]).expanduser()
    return folder, match[2] or "", best_update(folder) if match[3] == "best" else int(match[3]) if match[3] else None


def best_update(folder: pathlib.Path) -> int:
    """The update whose checkpoint a run kept as its best (evaluate.best). UserError where it kept none."""
    try:
        return int(json.loads((folder / BEST).read_text(encoding="utf-8"))["update"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            "the run kept no best checkpoint", where=str(folder / BEST), expected="a run with evaluate.best"
        ) from error


def load_trained(
    run: pathlib.Path, weights: str = "", cfg: ModelConfig | None = None, mesh: Any = None, *, rules: ShardingRules = RULES,
    update: int | None = None, prefer: str = "policy",
) -> tuple[LoadedModel, int]:  # fmt: skip
    """Weights of a run's newest good checkpoint, or of that of an update, as a model, and the checkpoint's number of updates. The
    optimizer's state is not read. cfg: the dtype; by default that of the run.

    UserError: no run folder, no checkpoint, or no such weights (single-model mode has 'policy' alone).
    """
    found = _open(run, weights, update, prefer)
    if found.cfg.lora.rank > 0:
        return _merged(found, cfg, mesh, rules), found.step
    wanted = dataclasses.replace(cfg or found.source, source=found.name)
    folder = tokenizer_folder(_base(found.source.source))
    return load_orbax(wanted, found.stored, folder, found.stored.hash(), mesh, rules, found.scalar), found.step


@dataclasses.dataclass(frozen=True)
class _Stored:
    """A checkpoint of a run, open at the weights of one name."""

    run: pathlib.Path
    cfg: Experiment
    weights: str
    step: int
    path: pathlib.Path
    stored: OrbaxFolder

    @property
    def source(self) -> ModelConfig:
        """What these weights began as."""
        return trained_sources(self.cfg)[self.weights]

    @property
    def name(self) -> str:
        """As a model source."""
        return f"{RUN}{self.run}#{self.weights}@{self.step}"

    @property
    def scalar(self) -> bool:
        return self.weights.startswith("critic_") or self.cfg.schedule.mode == "reward"


def _open(run: pathlib.Path, weights: str, update: int | None, prefer: str) -> _Stored:
    if not (run / "config.json").is_file() or not (run / "checkpoints").is_dir():
        raise UserError("not a run folder", where=str(run), expected="config.json and checkpoints/ of a run")
    run_cfg = from_dict(Experiment, read_config(run), where=str(run / "config.json"))
    sources = trained_sources(run_cfg)
    weights = weights or (prefer if prefer in sources else "policy")
    if weights not in sources:
        raise UserError(f"the run trained no weights {weights!r}", where=str(run), expected=f"one of {', '.join(sources)}",
                        nearest=nearest(weights, sources))  # fmt: skip
    checkpoints = Checkpoints(run / "checkpoints")
    try:
        step, path, skipped = checkpoints.good(update)
    finally:
        checkpoints.close()
    for reason in skipped:
        print(f"checkpoint skipped: {reason}", file=sys.stderr)
    return _Stored(run, run_cfg, weights, step, path, OrbaxFolder(str(path), STATE, f"{weights}.params."))


def load_adapters(run: pathlib.Path, weights: str = "") -> tuple[LoadedModel, Any, Experiment]:
    """(the base, whose spec has the adapters; what trained over it; the run's config) of a run with lora.rank > 0.

    UserError as in load_trained, or for a run without adapters.
    """
    found = _open(run, weights, None, "policy")
    if found.cfg.lora.rank == 0:
        raise UserError("the run trained all weights and no adapter", where=str(run), expected="a run with lora.rank above 0")
    return *_adapters(found, None, RULES), found.cfg


def _adapters(found: _Stored, mesh: Any, rules: ShardingRules) -> tuple[LoadedModel, Any]:
    """UserError: the base is no longer that of the run."""
    source = found.source
    if found.scalar and not source.source.startswith((RUN, BUCKET)):
        base = load_with_head(source, mesh, rules=rules, std=0.0, seed=0)
    else:
        base = load(source, mesh, rules=rules, prefer="rubric" if found.weights == "rubric" else "policy")
    body = frozen_part(base.params)
    known = read_host(found.path / "host")[0][0]["host"]["frozen"].get(f"base_{found.weights}")
    if known != (now := fingerprint(body)):
        raise UserError(f"the base of {found.weights}, {source.source!r}, has fingerprint {now}", where=str(found.run),
                        expected=f"{known}, that of the run")  # fmt: skip
    spec = adapted(base.spec, found.cfg.lora)
    infos, one = trained_shapes(spec), jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    alone = jax.tree.map(lambda _: one, infos, is_leaf=lambda x: hasattr(x, "axes"))
    places = alone if mesh is None else param_shardings(infos, mesh, rules)
    return dataclasses.replace(base, spec=spec, params=body), found.stored.params(spec, "float32", places)


def _merged(found: _Stored, cfg: ModelConfig | None, mesh: Any, rules: ShardingRules) -> LoadedModel:
    """The base and its adapters as plain weights."""
    base, adapters = _adapters(found, mesh, rules)
    params = merged(base.spec, base.params, adapters, (cfg or found.source).param_dtype)
    return LoadedModel(dataclasses.replace(base.spec, lora=None), params, base.folder, found.name, found.stored.hash())


def _base(source: str) -> str:
    """The source that a run began with, itself a run's or not: it holds the shapes and the tokenizer."""
    while source.startswith(RUN):
        folder, weights, _ = split(source)
        sources = trained_sources(from_dict(Experiment, read_config(folder), where=str(folder / "config.json")))
        source = sources.get(weights, sources["policy"]).source
    return source


def trained_sources(cfg: Experiment) -> dict[str, ModelConfig]:
    """Where the weights that a run trains came from, by name."""
    sources = dict(zip(policy_names(cfg), (cfg.policy, *cfg.policies)))
    if cfg.generator.mode == "two" and not api_model(cfg.generator.source) and generator_learns(cfg):
        sources["rubric"] = dataclasses.replace(cfg.policy, source=cfg.generator.source or cfg.policy.source, sha256="")
    sources |= {name: wanted.model for name, wanted in MODES[cfg.schedule.mode].models(cfg).items()}
    if cfg.advantage.kind == "gae":  # a critic for each that trains
        sources |= {f"critic_{name}": critic_source(cfg, name) for name in list(sources)}
    return sources
