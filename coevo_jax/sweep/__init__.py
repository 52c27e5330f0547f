"""Several configs with several seeds, one run after another, and one table of them all.

    python -m coevo_jax.sweep --configs=configs/ablations/k_*.py --seeds=1,2,3 --workdir=sweeps/k --config.scale=smoke

The folder: runs/NAME_seedS (run folders of run.py), logs/, state.json (what ended how), table.md, table.csv, runs.csv, plot.svg,
plot.png. The same command goes on where a sweep stopped. docs/sweeps.md.
"""
