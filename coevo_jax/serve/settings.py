"""From sources to the settings of a system that serves: those of the run that a source names, of a config, or the defaults.

Imports no JAX.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable
from typing import Any

from coevo_jax.config import Experiment, JudgeConfig, ModelConfig, PanelConfig, api_model, arm
from coevo_jax.config.check_modes import RUBRIC_FREE
from coevo_jax.config.endpoints import check_endpoint
from coevo_jax.config.load import load_config
from coevo_jax.config.override import apply_overrides, from_dict, replace_at
from coevo_jax.config.several import require
from coevo_jax.config.validate import check_values
from coevo_jax.errors import UserError

RUN = "run:"
RULES = "oracle"  # a judge without a model: the small world's rules
FREE = ("oracle", "random")  # protocols without a model
JUDGE_LENGTH = "judge.sampling.max_new_tokens"
# The small world's prompts and lengths (configs/tiny.py), for a source 'tiny' that no run or config describes.
TINY: dict[str, Any] = {
    "rubric.prompt": "world_rubric",
    "rubric_sampling.max_new_tokens": 48,
    "answer.max_new_tokens": 12,
    "sampler.slots": 16,
    "sampler.max_prompt": 128,
    "sampler.max_new": 48,
    "sampler.steps_per_dispatch": 8,
    "sampler.prefill_tokens": 512,
    JUDGE_LENGTH: 32,
}
# Room for people's own questions and answers, where no run or config says how much there is.
ROOM: dict[str, Any] = {
    "rubric_sampling.max_new_tokens": 256,
    "answer.max_new_tokens": 256,
    "sampler.slots": 16,
    "sampler.max_prompt": 1024,
    "sampler.max_new": 256,
}


@dataclasses.dataclass(frozen=True)
class Roles:
    """Sources of the roles that are loaded; '' = none. The judge's is in its record, cfg.judge.source."""

    generator: str = ""
    policy: str = ""
    judge: bool = False


def serving_settings(
    generator: str | None = None, judge: str | None = None, policy: str | None = None,
    config: str | Experiment | None = None, overrides: Iterable[str] = (),
) -> tuple[Experiment, Roles]:  # fmt: skip
    """What a system is loaded by. A role that is None comes from `config` (a file, a run folder or a record), else from the first
    run among the sources, else there is none; '' is none.

    UserError: no role at all, an unreadable run or config, settings that can't serve.
    """
    given = [source for source in (generator, judge, policy) if source]
    base = _base(config, given)
    cfg = base.cfg if base else _defaults(given)
    if generator is None:
        generator = base.generator() if base and cfg.rubric.source == "generator" else ""
    elif generator:
        cfg = replace_at(cfg, "rubric.source", "generator")
    if policy is None:  # in single-model mode one set of weights plays both roles
        policy = generator if base and cfg.generator.mode == "single" and not api_model(generator) else ""
    cfg = _alone(_with_judge(cfg, judge, base), generator, policy)
    cfg = apply_overrides(cfg, overrides := list(overrides))
    if cfg.judge.protocol == "criterion_logits" and not any(text.startswith(JUDGE_LENGTH) for text in overrides):
        new = min(cfg.judge.sampling.max_new_tokens, cfg.sampler.max_new)  # it writes of pairs alone, and training may have none
        cfg = replace_at(cfg, JUDGE_LENGTH, new)
    roles = Roles(generator, policy, cfg.judge.source != "")
    _check(cfg, roles)
    return cfg, roles


def rubric_free(cfg: Experiment) -> bool:
    """Does the judge read no rubric?"""
    return cfg.judge.protocol in RUBRIC_FREE


def side_by_side(cfg: Experiment) -> bool:
    """Can the judge be asked about two answers at once? Else they are compared by their scores."""
    return cfg.judge.protocol not in (*FREE, *RUBRIC_FREE)


@dataclasses.dataclass(frozen=True)
class _Base:
    """Settings that describe a system as a whole. folder: of the run that they are of, '' for a config's; update: of that run."""

    cfg: Experiment
    folder: str = ""
    update: int | None = None

    def generator(self) -> str:
        """The source of its rubric generator."""
        own = self.cfg.generator.source or self.cfg.policy.source
        if not self.folder or api_model(own):
            return own
        if self.cfg.generator.mode == "single":
            return self.weights("policy")
        return self.weights("rubric") if "rubric" in self._trained() else own

    def judge(self) -> str:
        """The source of its judge: weights that the run trained, else those that served in it."""
        return self.weights("judge") if self.folder and "judge" in self._trained() else self.cfg.judge.source

    def weights(self, name: str) -> str:
        return f"{RUN}{self.folder}#{name}" + ("" if self.update is None else f"@{self.update}")

    def _trained(self) -> Iterable[str]:
        from coevo_jax.trained import trained_sources

        return trained_sources(self.cfg)


def _base(config: str | Experiment | None, sources: list[str]) -> _Base | None:
    """What describes the system as a whole, or None."""
    if isinstance(config, Experiment):
        return _Base(config)
    if config:
        folder = pathlib.Path(config).expanduser()
        return _Base(_run_config(folder), str(folder)) if folder.is_dir() else _Base(load_config(config))
    run = next((source for source in sources if source.startswith(RUN)), "")
    return _of_run(run) if run else None


def _of_run(source: str) -> _Base:
    from coevo_jax.trained import split  # brings JAX, which a source without a run does without

    folder, _, update = split(source)
    return _Base(_run_config(folder), str(folder), update)


def _run_config(folder: pathlib.Path) -> Experiment:
    from coevo_jax.records.run_folder import read_config

    if not (folder / "config.json").is_file():
        raise UserError("not a run folder", where=str(folder), expected="config.json and checkpoints/ of a run")
    return from_dict(Experiment, read_config(folder), where=str(folder / "config.json"))


def _defaults(sources: list[str]) -> Experiment:
    cfg = Experiment()
    for key, value in (TINY if "tiny" in sources else ROOM).items():
        cfg = replace_at(cfg, key, value)
    return replace_at(cfg, "judge.source", "")


def _with_judge(cfg: Experiment, judge: str | None, base: _Base | None) -> Experiment:
    """The judge's record: that of the base, or one for another source. A run named as judge brings its own."""
    own = cfg.judge
    if judge is None:
        source = base.judge() if base else ""
        own = _trained_judge(own, base) if base else own
        return replace_at(
            cfg, "judge", dataclasses.replace(own, source=source, sha256=own.sha256 if source == own.source else "")
        )
    if judge.startswith(RUN):
        own = _of_run(judge).cfg.judge
    protocol = own.protocol
    if judge == RULES:
        protocol = RULES
    elif protocol in FREE and judge:
        protocol = "json_score" if api_model(judge) else "criterion_logits"
    return replace_at(cfg, "judge", dataclasses.replace(own, source=judge, protocol=protocol, sha256=""))


def _trained_judge(own: JudgeConfig, base: _Base) -> JudgeConfig:
    """Rubric-ARM's own judge: it was trained to compare two answers, in its form and at its temperature."""
    if base.cfg.schedule.mode != arm.MODE or base.cfg.arm.judge != "trained":
        return own
    protocol = "criterion_logits" if own.protocol in FREE else own.protocol  # what answers alone are scored by
    return dataclasses.replace(
        own, protocol=protocol, pairs="comparison", pairs_prompt=base.cfg.arm.judge_prompt, sampling=base.cfg.arm.judge_sampling
    )


def _alone(cfg: Experiment, generator: str, policy: str) -> Experiment:
    """The settings without what only training has: a panel, further policies, pairs."""
    judge = cfg.judge
    if side_by_side(cfg):
        judge = judge if judge.pairs == "comparison" else dataclasses.replace(judge, pairs="pairwise")
    elif judge.pairs != "scores":
        judge = dataclasses.replace(judge, pairs="scores")
    model = cfg.policy if cfg.policy.source == policy else dataclasses.replace(cfg.policy, source=policy, sha256="")
    author = dataclasses.replace(cfg.generator, source=generator)
    if generator and not api_model(generator):
        author = dataclasses.replace(author, endpoint=type(author.endpoint)())
    heldout = dataclasses.replace(cfg.heldout_judge, source="")
    kept = dataclasses.replace(cfg, policy=model, generator=author, judge=judge, heldout_judge=heldout)
    schedule = dataclasses.replace(cfg.schedule, mode="evolm")  # whose judge serves, also that of a run that had none
    return dataclasses.replace(kept, panel=PanelConfig(), policies=(), schedule=schedule)


def _check(cfg: Experiment, roles: Roles) -> None:
    require(bool(roles.generator or roles.policy or roles.judge or cfg.rubric.source == "predefined"),
            "the system has no role to play", "generator, judge, policy", "a source of at least one of them")  # fmt: skip
    check_values(cfg)
    if roles.judge:
        rules = (cfg.judge.source == RULES, cfg.judge.protocol == RULES)
        what = f"judge.source={cfg.judge.source!r} does not go with judge.protocol={cfg.judge.protocol!r}"
        require(rules[0] == rules[1], what, "judge.source, judge.protocol", "both 'oracle' or neither")
        check_endpoint("judge", cfg.judge.source, cfg.judge.thinking, cfg.judge.endpoint)
    if roles.generator:
        check_endpoint("generator", roles.generator, cfg.generator.thinking, cfg.generator.endpoint)
        _fits(cfg, "rubric_sampling", cfg.rubric_sampling.max_new_tokens, bool(api_model(roles.generator)))
    if roles.judge and side_by_side(cfg):
        _fits(cfg, "judge.sampling", cfg.judge.sampling.max_new_tokens, bool(api_model(cfg.judge.source)))


def _fits(cfg: Experiment, key: str, new: int, remote: bool) -> None:
    what = f"sampler.max_new={cfg.sampler.max_new} is below {key}.max_new_tokens={new}"
    require(remote or cfg.sampler.max_new >= new, what, f"sampler.max_new, {key}.max_new_tokens", f"at least {new}")


def model_settings(cfg: Experiment, source: str) -> ModelConfig:
    """A role's model: weights in the dtype of the computation, since nothing trains them."""
    sha256 = cfg.policy.sha256 if source == cfg.policy.source else ""
    return dataclasses.replace(cfg.policy, source=source, param_dtype=cfg.policy.dtype, sha256=sha256)
