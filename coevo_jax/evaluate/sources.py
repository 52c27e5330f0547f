"""From sources to systems: --generator=SOURCE and --judge=SOURCE with settings of their own behind '?', as in a data source.

    none | predefined | data                       no rubric, RaR's four generic items, the data's own
    smollm2 | tiny | FOLDER | FILE.gguf | run:FOLDER#rubric@UPDATE | api:MODEL
    smollm2?prompt=rubric_long                     settings of RubricConfig, for a generator
    smollm2?protocol=json_score&pairs=pairwise     settings of JudgeConfig, for a judge
    oracle | always_a | random | world             judges that check the harness; world: the small world's rules

A run as a generator brings its rubric prompt, schema and longest rubric; a run as a judge brings its judge's settings.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax

from coevo_jax import loading
from coevo_jax.bench import Seat
from coevo_jax.config import EndpointConfig, Experiment, JudgeConfig, ModelConfig, SamplerConfig, Sampling, api_model
from coevo_jax.config.check_modes import RUBRIC_FREE
from coevo_jax.config.load import load_config
from coevo_jax.config.override import apply_overrides, from_dict
from coevo_jax.config.validate import check_values
from coevo_jax.distributed import local_mesh
from coevo_jax.errors import UserError, nearest
from coevo_jax.evaluate.checking import CHECKS, Checking, System
from coevo_jax.evaluate.systems import RubricSystem, reads_rubric
from coevo_jax.evaluate.writers import GENERIC, NONE, Fixed, FromData, ModelWriter, RemoteWriter, Writer, unknown_slots
from coevo_jax.judges import MODEL_FREE, SCALAR
from coevo_jax.mesh import DECODE_RULES, make_mesh
from coevo_jax.models.load import LoadedModel
from coevo_jax.progress import RunConsole
from coevo_jax.records.run_folder import read_config
from coevo_jax.remote import Endpoint
from coevo_jax.rubrics import rar
from coevo_jax.text.chat import ChatTokenizer
from coevo_jax.trained import RUN, split

WORLD = "world"
FIXED = ("none", "predefined", "data")
# EvoLM's settings of evaluation: temperature 0.6, then 0.3 and 0.1 for an invalid rubric; top-p 0.95.
DEFAULTS = Experiment(
    name="evaluate",
    rubric_sampling=Sampling(temperature=0.6, top_p=0.95, max_new_tokens=512),
    judge=JudgeConfig(max_prompt=2048, sampling=Sampling(temperature=0.6, top_p=0.95, max_new_tokens=256)),
    sampler=SamplerConfig(slots=16, max_prompt=1024, max_new=512, prefill_tokens=4096),
)
# The small world's prompts and lengths, for models that have no room for others.
TINY = (
    "rubric.prompt=world_rubric", "rubric_sampling.max_new_tokens=48", "judge.max_prompt=0", "sampler.max_prompt=128",
    "sampler.max_new=48", "sampler.steps_per_dispatch=8", "sampler.prefill_tokens=512",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Source:
    """A source as the command line has it. text: the whole of it; settings: 'key=value'."""

    text: str
    name: str
    settings: tuple[str, ...] = ()


def parse_source(text: str, flag: str) -> Source:
    """UserError for a setting without a value."""
    name, mark, query = text.partition("?")
    settings = tuple(query.split("&")) if mark else ()
    if not name or any("=" not in s for s in settings):
        raise UserError(f"{text!r} is no source", where=flag, expected="SOURCE or SOURCE?key=value&key=value")
    return Source(text, name, settings)


class Loader:
    """Loads each model once. config: a file, '' = the defaults; overrides: 'key=value' of the command line, which win; out: where
    the replies of endpoints are kept."""

    def __init__(
        self,
        config: str = "",
        overrides: tuple[str, ...] = (),
        console: RunConsole | None = None,
        out: pathlib.Path | None = None,
    ):
        self.config, self.overrides, self.out = config, overrides, out
        self.console = console or RunConsole()
        self.mesh = local_mesh(make_mesh(self._settings().mesh)) if jax.device_count() > 1 else None
        self._models: dict[Any, LoadedModel] = {}
        self._engines: dict[Any, loading.Engines] = {}
        self._seats: dict[tuple[str, ...], tuple[Seat, str]] = {}
        self._endpoints: list[Endpoint] = []

    def system(self, generator: str, judge: str) -> System:
        """The system of two sources. UserError where they don't go together."""
        found = parse_source(judge, "--judge")
        if found.name in CHECKS:
            if found.settings or generator != "none":
                raise UserError(f"the judge {found.name!r} reads no rubric and has no settings", where="--judge, --generator",
                                expected=f"--judge={found.name} --generator=none")  # fmt: skip
            return Checking(found.name, self._settings().seed)
        seat, weights = self.seat(found)
        return RubricSystem(self.writer(parse_source(generator, "--generator"), seat.cfg), seat, weights)

    def close(self) -> None:
        """End what runs in the background."""
        for endpoint in self._endpoints:
            endpoint.close()

    # ---- settings -----------------------------------------------------------------------------------------------------

    def _settings(self, own: tuple[str, ...] = (), run: str = "", part: str = "", tiny: bool = False) -> Experiment:
        """Defaults or config, what a run brings of its `part`, the command line, the source's own settings."""
        cfg = load_config(self.config) if self.config else DEFAULTS
        if tiny and not self.config:
            cfg = apply_overrides(cfg, TINY)
        if run:
            cfg = _with_run(cfg, run, part)
        cfg = apply_overrides(apply_overrides(cfg, self.overrides), own)
        drawn = cfg.rubric_sampling  # a greedy rubric is no fault where nothing trains
        check_values(dataclasses.replace(cfg, rubric_sampling=dataclasses.replace(drawn, temperature=drawn.temperature or 1.0)))
        return cfg

    # ---- generators ---------------------------------------------------------------------------------------------------

    def writer(self, source: Source, judge: JudgeConfig) -> Writer:
        """Where rubrics come from, for a judge of these settings."""
        if not reads_rubric(judge):
            if source.name != "none":
                raise UserError(f"judge.protocol={judge.protocol} reads no rubric", where=f"--generator={source.text}",
                                expected="--generator=none, or a judge that reads a rubric")  # fmt: skip
            return Fixed("none", NONE)
        if source.name in FIXED:
            if source.name == "data":
                return FromData(self._settings(_prefixed("rubric", source.settings)))
            return Fixed(source.name, GENERIC if source.name == "none" else rar.PREDEFINED)
        cfg = self._settings(_prefixed("rubric", source.settings), source.name, "rubric", source.name == "tiny")
        if unknown := unknown_slots(cfg.rubric.prompt):
            raise UserError(f"the template {cfg.rubric.prompt!r} shows {', '.join(unknown)}, which no example has",
                            where=f"--generator={source.text}, rubric.prompt", expected="a template with a question")  # fmt: skip
        if name := api_model(source.name):
            return RemoteWriter(source.text, cfg, self._endpoint("generator", name, cfg.generator.endpoint))
        model = self._model(ModelConfig(source=source.name, dtype=cfg.policy.dtype, param_dtype=cfg.policy.dtype), "generator")
        tokenizer = ChatTokenizer.load(model.folder)
        cfg = dataclasses.replace(cfg, sampler=_room(cfg.sampler, cfg.rubric_sampling.max_new_tokens, model.spec.max_position))
        engine = self._engine(cfg).get(model.spec, tokenizer.stop_ids)
        return ModelWriter(source.text, cfg, engine, model.params, tokenizer, model.hash)

    # ---- judges -------------------------------------------------------------------------------------------------------

    def seat(self, source: Source) -> tuple[Seat, str]:
        """A judge ready to serve and the identity of its weights."""
        key = (source.text,)
        if key not in self._seats:
            self._seats[key] = self._make_seat(source)
        return self._seats[key]

    def _make_seat(self, source: Source) -> tuple[Seat, str]:
        world = source.name == WORLD
        given = ("source=oracle", "protocol=oracle") if world else (f"source={source.name}",)
        cfg = self._settings(_prefixed("judge", (*given, *source.settings)), source.name, "judge", source.name == "tiny")
        _check_judge(cfg.judge, source.text)
        alone = dataclasses.replace(cfg.schedule, mode="evolm")  # the one whose judges are loaded
        cfg = dataclasses.replace(cfg, panel=type(cfg.panel)(), schedule=alone)
        endpoint = None
        if name := api_model(cfg.judge.source):
            endpoint = self._endpoint("judge", name, cfg.judge.endpoint)
        model = self._judge_model(cfg)
        if model is not None:
            longest = cfg.judge.max_prompt or cfg.sampler.max_prompt
            room = _room(dataclasses.replace(cfg.sampler, max_prompt=longest), cfg.judge.sampling.max_new_tokens,
                         model.spec.max_position)  # fmt: skip
            cfg = dataclasses.replace(cfg, sampler=room, judge=dataclasses.replace(cfg.judge, max_prompt=0))
        seat = loading.make_seat("judge", cfg, model, self._engine(cfg), endpoint)
        return dataclasses.replace(seat, name=source.text), model.hash if model is not None else ""

    def _judge_model(self, cfg: Experiment) -> LoadedModel | None:
        judge = cfg.judge
        plain = judge.protocol not in (*MODEL_FREE, SCALAR) and judge.weights == "full" and not api_model(judge.source)
        if not plain:
            return loading.load_judge(cfg, None, self.mesh)
        return self._model(ModelConfig(judge.source, judge.dtype, judge.dtype, sha256=judge.sha256), "judge")

    def _endpoint(self, role: str, model: str, cfg: EndpointConfig) -> Endpoint:
        self._endpoints.append(Endpoint(role, model, cfg))
        if self.out is not None:
            self._endpoints[-1].open_cache(self.out)
        return self._endpoints[-1]

    # ---- models -------------------------------------------------------------------------------------------------------

    def _model(self, cfg: ModelConfig, group: str) -> LoadedModel:
        key = (cfg.source, cfg.dtype, cfg.sha256)
        if key not in self._models:
            self.console.note(f"loading {group} {cfg.source!r}")
            self._models[key] = loading.load_model(cfg, self.mesh, group, DECODE_RULES)
        return self._models[key]

    def _engine(self, cfg: Experiment) -> loading.Engines:
        key = (cfg.sampler, cfg.seed)
        if key not in self._engines:
            self._engines[key] = loading.Engines(cfg, self.mesh)
        return self._engines[key]


def _prefixed(group: str, settings: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{group}.{setting}" for setting in settings)


def _check_judge(judge: JudgeConfig, text: str) -> None:
    scalar = judge.protocol in RUBRIC_FREE
    if judge.pairs != "scores" and scalar:
        raise UserError(f"judge.protocol={judge.protocol} can't judge pairs side by side", where=f"--judge={text}",
                        expected="pairs=scores, or another protocol")  # fmt: skip
    if not judge.source:
        names = (*CHECKS, WORLD, "smollm2", "tiny")
        raise UserError("the judge has no source", where="--judge", expected=", ".join(names), nearest=nearest(text, names))


def _with_run(cfg: Experiment, source: str, part: str) -> Experiment:
    """What a run brings: of a generator its rubrics' settings, of a judge the judge's."""
    if not source.startswith(RUN):
        return cfg
    folder, _, _ = split(source)
    own = run_config(folder)
    if part == "rubric":
        generator = dataclasses.replace(own.generator, endpoint=cfg.generator.endpoint)
        drawn = dataclasses.replace(cfg.rubric_sampling, max_new_tokens=own.rubric_sampling.max_new_tokens)
        return dataclasses.replace(
            cfg, rubric=own.rubric, generator=generator, policy=own.policy, seed=own.seed, rubric_sampling=drawn
        )
    return dataclasses.replace(cfg, judge=dataclasses.replace(own.judge, sha256=""))


def _room(sampler: SamplerConfig, new: int, positions: int) -> SamplerConfig:
    """An engine that holds completions of `new` tokens, and prompts as long as the model's positions allow."""
    return dataclasses.replace(sampler, max_new=new, max_prompt=min(sampler.max_prompt, max(positions - new, 1)))


def run_config(folder: pathlib.Path) -> Experiment:
    """The config of a run folder. UserError where there is none."""
    if not (folder / "config.json").is_file():
        raise UserError("not a run folder", where=str(folder), expected="a folder with config.json")
    return from_dict(Experiment, read_config(folder), where=str(folder / "config.json"))
