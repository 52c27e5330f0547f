"""Two judges, Qwen3-1.7B and Llama-3.1-8B-Instruct: scores and margins are the means of theirs.

    python run.py --config=configs/ablations/panel_mean.py --workdir=/mnt/shared/panel_mean
    python run.py --config=configs/ablations/panel_mean.py --config.scale=smoke  # on a CPU

Hardware: v5p-16 by an estimate, no plan compiled; the other flags (sources, data) of configs/evolm/qwen3_8b.py apply here too;
never run on a TPU.
Paper (arXiv 2605.03871): Eq. 9 with weights 0.7, 0.3, 0 (MF); Table 22, with five judges: RewardBench 2 46.2,
JudgeBench 49.3, 12-task average 66.4. Its five judges are Qwen3-1.7B, Llama-3.2-1B-Instruct, OLMo-2-1B-Instruct,
Gemma-3-1B-IT and Qwen3-4B. The released second judge of two is Llama-3-8B-Instruct, whose 8,192 tokens would cut all to
that length; here it is 3.1.
Expected: margins are less often decided by one judge's slip; the share of rubrics on which both agree is
panel/agreement.
"""

import dataclasses

from coevo_jax.config import Experiment, PanelConfig, Sampling
from configs.evolm.qwen3_8b import get_config as main


def get_config() -> Experiment:
    cfg = main()
    llama = dataclasses.replace(
        cfg.judge, source="/models/Llama-3.1-8B-Instruct", thinking=False, length_classes=((32, 6144), (16, 28672)),
        sampling=Sampling(temperature=0.6, top_p=0.95, max_new_tokens=2048),
    )  # fmt: skip
    return dataclasses.replace(cfg, name="panel_mean", panel=PanelConfig(judges=(llama,)))
