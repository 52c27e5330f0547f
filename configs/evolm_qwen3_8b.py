"""The old place of configs/evolm/qwen3_8b.py, for commands and imports that name it: the same experiment, and its hardware too.

python run.py --config=configs/evolm_qwen3_8b.py --print_config
"""

from configs.evolm.qwen3_8b import get_config as get_config
