"""Flags -> config -> train, or look without training (--print_config, --dry_run).

python run.py --config=configs/smollm2_demo.py --workdir=runs/demo --config.schedule.k=4
"""

from __future__ import annotations

import os
import sys

DEFAULT = "configs/smollm2_demo.py"


def main(argv: list[str]) -> int:
    """Exit code: 0 finished, 2 bad input, 75 another process was lost or did not come, 130 stopped by a signal; after the last
    two the same command goes on."""
    from coevo_jax.errors import UserError

    try:
        return _main(argv)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def _main(argv: list[str]) -> int:
    from coevo_jax.cli import parse_flags, resolve

    flags = parse_flags(argv, DEFAULT)
    cfg = resolve(flags)
    if flags.print_config:
        from coevo_jax.config.override import print_config

        print(print_config(cfg))
        return 0
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # local files only; nothing is downloaded without saying so
    if flags.dry_run:
        from coevo_jax.dry_run import dry_run

        dry_run(cfg)
        return 0
    from coevo_jax.distributed import initialize, watchdog
    from coevo_jax.progress import console_of
    from coevo_jax.train import train

    initialize(flags.processes, flags.coordinator, flags.process_id)
    with watchdog(cfg.run).watching() as watch:
        finished = train(cfg, flags.workdir or f"runs/{cfg.name}", console_of(watch.index, flags.verbose), watch)
    return 0 if finished else 130


if __name__ == "__main__":
    from coevo_jax.huge_pages import restart_with_huge_pages

    restart_with_huge_pages()
    sys.exit(main(sys.argv[1:]))
