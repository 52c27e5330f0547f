"""Three judges of three families: Qwen3-1.7B, Llama-3.2-1B-Instruct and Olmo-3-7B-Think; means of scores and margins.

    python run.py --config=configs/ablations/panel_three_families.py --workdir=/mnt/shared/panel_three_families
    python run.py --config=configs/ablations/panel_three_families.py --config.scale=smoke  # on a CPU

Hardware: v5p-16 by an estimate, no plan compiled; the other flags (sources, data) of configs/evolm/qwen3_8b.py apply here too;
never run on a TPU.
Paper (arXiv 2605.03871): no row of three; its five judges (configs/ablations/panel_mean.py) are of four families.
Expected: an answer is no longer scored high for one family's habits.
"""

import dataclasses

from coevo_jax.config import Experiment, PanelConfig, Sampling
from configs.evolm.qwen3_8b import get_config as main


def get_config() -> Experiment:
    cfg = main()
    llama = dataclasses.replace(
        cfg.judge, source="/models/Llama-3.2-1B-Instruct", thinking=False, length_classes=((96, 6144), (32, 28672)),
        sampling=Sampling(temperature=0.6, top_p=0.95, max_new_tokens=2048),
    )  # fmt: skip
    olmo = dataclasses.replace(cfg.judge, source="/models/Olmo-3-7B-Think", length_classes=((32, 6144), (16, 12288), (8, 40960)))
    return dataclasses.replace(cfg, name="panel_three_families", panel=PanelConfig(judges=(llama, olmo)))
