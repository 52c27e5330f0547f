"""An exported reward model scores in transformers (AutoModelForSequenceClassification) as it does here, to 1e-4."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from train_support import REPO, run

from coevo_jax.config import ModelConfig, SamplerConfig
from coevo_jax.export import export_run
from coevo_jax.judges.scalar import RewardModel
from coevo_jax.models.export import export_hf
from coevo_jax.models.files import user_cache
from coevo_jax.models.load import load_scalar, load_with_head
from coevo_jax.text.chat import ChatTokenizer

PEER = user_cache() / "peers" / "hf" / "bin" / "python"  # of `python benchmarks/sampler.py --install hf`
QUESTIONS = ("write words with oak", "write 3 words first owl last bee", "write 4 words sorted once")


def python_with_torch() -> str:
    """This interpreter where it has torch, else the peers' environment; skips without either."""
    if importlib.util.find_spec("torch") is not None:
        return sys.executable
    if not PEER.exists():
        pytest.skip("needs torch: in this environment, or by `python benchmarks/sampler.py --install hf`")
    return str(PEER)


def scores_of_transformers(folder: pathlib.Path, rows: list[list[int]]) -> dict[str, list[float]]:
    listed = folder.parent / "rows.json"
    listed.write_text(json.dumps(rows))
    script = str(REPO / "tests" / "golden" / "hf_scores.py")
    done = subprocess.run([python_with_torch(), script, str(folder), str(listed)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def check(folder: pathlib.Path, rows: list[list[int]]) -> None:
    model, tokenizer = load_scalar(ModelConfig(source=str(folder))), ChatTokenizer.load(folder)
    ours = RewardModel(model.spec, model.params, tokenizer, SamplerConfig(max_prompt=128)).logits(rows)
    found = scores_of_transformers(folder, rows)
    assert found["wrong"] == [] and found["labels"] == 1 and np.ptp(ours) > 1e-3
    np.testing.assert_allclose(found["alone"], ours, atol=1e-4)
    np.testing.assert_allclose(found["together"], ours, atol=1e-4)  # by padding: its token is in no conversation


@pytest.mark.slow
def test_one_that_was_trained_here(tmp_path: pathlib.Path) -> None:
    python_with_torch()
    keys = ("schedule.mode=reward", "schedule.cycles=1", "schedule.k=2", "reward.pairs=8", "update.pack_length=64")
    run(tmp_path / "run", *keys, "optimizer.lr=1e-2")
    export_run(tmp_path / "run", tmp_path / "out")
    tokenizer = ChatTokenizer.load(tmp_path / "out")
    model = RewardModel(load_scalar(ModelConfig(source=str(tmp_path / "out"))).spec, None, tokenizer, SamplerConfig())
    answers = ("oak", "owl fox bee", "ant bee cow dog oak owl")
    check(tmp_path / "out", [model.ids(q, a) for q in QUESTIONS for a in answers])


@pytest.mark.slow
def test_random_weights_whose_head_was_tied(tmp_path: pathlib.Path) -> None:
    """The small world's shapes with random weights, exported by the function of any source."""
    python_with_torch()
    model = load_with_head(ModelConfig(source="tiny"), std=1.0, seed=3)
    assert model.spec.tied and dataclasses.asdict(model.spec)["scalar"]
    rng = np.random.default_rng(0)
    noisy = {**model.params, "final_norm": np.asarray(rng.normal(1.0, 0.5, model.params["final_norm"].shape), np.float32)}
    export_hf(noisy, model.spec, model.folder, tmp_path / "out")
    pad = json.loads((tmp_path / "out" / "config.json").read_text())["pad_token_id"]
    ids = [i for i in range(model.spec.vocab_size) if i != pad]
    check(tmp_path / "out", [rng.choice(ids, n).tolist() for n in (1, 7, 40, 33)])
