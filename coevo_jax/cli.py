"""Flags of run.py: --config=FILE, --config.KEY=VALUE, --workdir=DIR, --print_config, --dry_run; those of several processes."""

from __future__ import annotations

import dataclasses

from coevo_jax.config import Experiment
from coevo_jax.config.load import load_config
from coevo_jax.config.override import apply_overrides
from coevo_jax.config.scale import shrink
from coevo_jax.config.validate import validate
from coevo_jax.errors import UserError, nearest

HELP = """python run.py [--config=configs/NAME.py] [--config.KEY=VALUE ...] [--workdir=DIR] [--print_config] [--dry_run]

  --config        a Python file with get_config(); default {default}
  --config.KEY    overrides one field, for example --config.schedule.k=10; --config.scale=smoke shrinks it to seconds on a CPU
  --workdir       the run folder; default runs/<config name>; the same command goes on with a run that stopped
  --print_config  print the resolved config and stop
  --dry_run       load everything, print rendered prompts, batch arithmetic and memory, train nothing

Several processes, the same command on each (docs/hosts.md):
  --processes     how many, or auto: what Cloud TPU, GKE or Slurm say; without it auto on a TPU VM and else one
  --coordinator   HOST:PORT that process 0 opens and the others reach; not with auto
  --process_id    the number of this process, from 0; not with auto
  --verbose       processes other than 0 print their progress too"""
VALUES = ("--config", "--workdir", "--processes", "--coordinator", "--process_id")
SWITCHES = ("--print_config", "--dry_run", "--verbose")
FLAGS = (*VALUES, *SWITCHES, "--help")


@dataclasses.dataclass
class Flags:
    """Parsed flags; `overrides` are 'key=value'."""

    config: str
    workdir: str = ""
    print_config: bool = False
    dry_run: bool = False
    processes: str = ""
    coordinator: str = ""
    process_id: str = ""
    verbose: bool = False
    overrides: tuple[str, ...] = ()


def parse_flags(argv: list[str], default: str) -> Flags:
    """UserError for an unknown flag, with the nearest one. --help prints and exits 0."""
    flags, overrides, waiting = Flags(config=default), [], list(argv)
    while waiting:
        word = waiting.pop(0)
        name, equals, value = word.partition("=")
        if name in VALUES or name.startswith("--config."):
            if not equals:
                if not waiting:
                    raise UserError(f"{name} needs a value", where="command line", expected=f"{name}=VALUE")
                value = waiting.pop(0)
            if name.startswith("--config."):
                overrides.append(f"{name.removeprefix('--config.')}={value}")
            else:
                setattr(flags, name[2:], value)
        elif word in SWITCHES:
            setattr(flags, word[2:], True)
        elif word in ("--help", "-h"):
            print(HELP.format(default=default))
            raise SystemExit(0)
        else:
            raise UserError(
                f"unknown flag {word!r}", where="command line", expected=" ".join(FLAGS), nearest=nearest(name, FLAGS)
            )
    return dataclasses.replace(flags, overrides=tuple(overrides))


def resolve(flags: Flags) -> Experiment:
    """The validated experiment that the flags name. --config.scale=smoke comes first: other overrides change what it made."""
    cfg = load_config(flags.config)
    if apply_overrides(cfg, [o for o in flags.overrides if o.partition("=")[0].strip() == "scale"]).scale == "smoke":
        cfg = shrink(cfg)
    cfg = apply_overrides(cfg, flags.overrides)
    validate(cfg)
    return cfg
