"""Which runs a sweep has: configs x seeds, each checked before the first one starts. Imports no JAX."""

from __future__ import annotations

import dataclasses
import glob
import pathlib
import re
import shlex
from collections.abc import Sequence

from coevo_jax.cli import Flags, resolve
from coevo_jax.config import Experiment
from coevo_jax.config.override import to_dict
from coevo_jax.errors import UserError, nearest
from coevo_jax.records.run_folder import CONFIG, config_differences, read_config

SLICE_NAME = 62  # characters of a queued resource's name (tpu/common.sh)


@dataclasses.dataclass(frozen=True)
class Member:
    """One run. `group` is its config's name, under which its seeds are summed up."""

    config: str  # the file
    seed: int
    overrides: tuple[str, ...]
    cfg: Experiment
    root: pathlib.Path  # of the sweep

    @property
    def group(self) -> str:
        return self.cfg.name

    @property
    def name(self) -> str:
        return f"{self.group}_seed{self.seed}"

    @property
    def folder(self) -> pathlib.Path:
        return self.root / "runs" / self.name

    @property
    def log(self) -> pathlib.Path:
        return self.root / "logs" / f"{self.name}.log"

    @property
    def flags(self) -> list[str]:
        """Those of run.py."""
        overrides = [f"--config.{text}" for text in (*self.overrides, f"seed={self.seed}")]
        return [f"--config={self.config}", f"--workdir={self.folder}", *overrides]


def members_of(patterns: Sequence[str], seeds: Sequence[int], overrides: Sequence[str], root: pathlib.Path) -> list[Member]:
    """All runs, config by config. UserError: no such file, a config or override that run.py refuses, names that meet."""
    if any(text.partition("=")[0].strip() == "seed" for text in overrides):
        raise UserError("a sweep sets the seed itself", where="--config.seed", expected="--seeds=1,2,3")
    members = [
        Member(config, seed, tuple(overrides), _resolved(config, overrides, seed), root)
        for config in config_files(patterns)
        for seed in seeds
    ]
    owners: dict[str, str] = {}
    for member in members:
        other = owners.setdefault(member.name, member.config)
        if other != member.config:
            raise UserError(
                f"{other} and {member.config} have one name, {member.group}",
                where="--configs",
                expected="configs of different names, which name their runs",
            )
    return members


def config_files(patterns: Sequence[str]) -> list[str]:
    """The files that the patterns name, each once, in order; '*' as the shell has it, for `--configs=a/*.py` comes unexpanded.
    Modules whose name begins with '_' are no experiments and are left out of a pattern."""
    files: dict[str, None] = {}
    for pattern in patterns:
        if pathlib.Path(pattern).is_file():
            found = [pattern]
        else:
            found = sorted(f for f in glob.glob(pattern) if f.endswith(".py") and not pathlib.Path(f).name.startswith("_"))
        if not found:
            folder = pathlib.Path(pattern).parent
            raise UserError(
                f"no config file {pattern}",
                where="--configs",
                expected="Python files with get_config(), or a pattern such as configs/ablations/*.py",
                nearest=nearest(pattern, map(str, sorted(folder.glob("*.py")) if folder.is_dir() else [])),
            )
        files |= dict.fromkeys(found)
    return list(files)


def _resolved(config: str, overrides: Sequence[str], seed: int) -> Experiment:
    try:
        return resolve(Flags(config, overrides=(*overrides, f"seed={seed}")))
    except UserError as error:
        raise UserError(f"{config}: {error.what}", where=error.where, expected=error.expected, nearest=error.nearest) from error


def check_folders(members: Sequence[Member]) -> None:
    """UserError when a run folder of the sweep holds another config than the command asks for: before anything runs."""
    for member in members:
        if (member.folder / CONFIG).exists():
            differences = config_differences(read_config(member.folder), to_dict(member.cfg))
            if differences:
                raise UserError(
                    f"the sweep holds another {member.name}: " + "; ".join(differences[:10]),
                    where=str(member.folder),
                    expected="the same configs and overrides as before, or another --workdir",
                )


def pod_commands(members: Sequence[Member], env: str) -> list[str]:
    """A line a run for a shell: tpu/resume.sh with a slice of its own, which is given back when the run is finished.

    A slice each: on one slice resume.sh would take the run before for the one that it is to start.
    """
    if not pathlib.Path(env).is_file():
        raise UserError(f"no settings file {env}", where="--pod", expected="a copy of tpu/example.env (docs/pods.md, 4)")
    root = members[0].root
    if "://" in str(root) or not root.is_absolute():
        raise UserError(
            "the run folders of a pod must lie in the share that all workers mount",
            where=f"--workdir={root}",
            expected="an absolute path in it, such as /mnt/shared/sweeps/x (docs/pods.md, 2)",
        )
    names = [slice_name(member) for member in members]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two runs would have one slice, {name}", where="--configs", expected="names that differ early on")
    words = [
        ["tpu/resume.sh", f"--env={env}", f"--name={name}", "--delete_when_done", "--", *member.flags]
        for name, member in zip(names, members)
    ]
    return [shlex.join(line) for line in words]


def slice_name(member: Member) -> str:
    """The run's name as one of a queued resource: small letters, digits and hyphens, a letter first; the seed is kept whole."""
    tail = f"-seed{member.seed}"
    head = re.sub(r"[^a-z0-9]+", "-", member.group.lower()).strip("-")
    head = head if head[:1].isalpha() else f"run-{head}"
    return head[: SLICE_NAME - len(tail)].rstrip("-") + tail
