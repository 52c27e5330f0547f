"""Does a config fit a pod slice, and how well? Compiled for the slice, never run. See --help and docs/performance.md.

python tpu/plan.py --config=configs/evolm/qwen3_8b.py --topology=v5p:2x2x4
"""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from coevo_jax.plan.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
