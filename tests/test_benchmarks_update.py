"""Benchmarks of the update and of the whole step: arithmetic, turns against stand-ins, our own sides on a tiny model."""

import json
import pathlib
import sys

import jax
import numpy as np
import pytest

REPO = pathlib.Path(__file__).parent.parent
sys.path[:0] = [str(REPO / "benchmarks"), str(REPO / "benchmarks" / "peers")]

import _g1  # noqa: E402
import _sampler  # noqa: E402
import _turns  # noqa: E402
import ours_step  # noqa: E402
import ours_update  # noqa: E402
import step as step_program  # noqa: E402
import update as update_program  # noqa: E402

from coevo_jax.errors import UserError  # noqa: E402
from coevo_jax.huge_pages import NAME  # noqa: E402

TINY = str(REPO / "coevo_jax" / "judges" / "tiny_world" / "model")
OURS = """import json, sys
asked = json.loads(sys.argv[1])
n = sum(asked["lengths"])
rate = {"product_rate": 6e3, "parameters": 5} if asked["products"] else {}
print(json.dumps({"rates": [2.0 * n, 4.0 * n, 9.0 * n], "loss": 1.0, "peak_gib": 3.0, **rate}))"""
TORCH = 'import json, sys\nn = sum(json.loads(sys.argv[1])["lengths"])\nprint(json.dumps({"rates": [n], "loss": 1.01}))'
SCRIPT = "import sys\nn = int(sys.argv[2]) * int(sys.argv[3])\nprint('warm-up 9.00 s  1 tokens/s')\n"
SCRIPT += "for r in (1, 2, 8):\n    print(f'step {1 / r:.2f} s  {n * r} tokens/s')"


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """Peers and our side as scripts that print and compute nothing."""
    (tmp_path / "peers").mkdir()
    for name, text in (("ours_update", OURS), ("torch_update", TORCH), ("torch_train_step", SCRIPT)):
        (tmp_path / "peers" / f"{name}.py").write_text(text)
    monkeypatch.setenv("COEVO_SHARED", str(tmp_path))
    monkeypatch.setattr(update_program, "PEERS", tmp_path / "peers")
    return tmp_path / "peers"


def test_updates_take_turns_with_the_shared_script(stand_ins, capsys):
    flags = ["--rounds=2", "--rows=2", "--tokens=32", f"--model={TINY}", f"--hf_python={sys.executable}", "--json"]
    assert update_program.main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert found["ratio"] == 4 / 2 and found["ratio_range"] == [2, 2] and found["ratio_mixed"] == 4
    assert found["product_share"] == pytest.approx(4 * 64 * 6 * 5 / 6e3) and found["matmul_gflops"] == [6e-6, 6e-6]
    assert found["loss_difference"] == pytest.approx(0.01 / 1.01) and found["ours_peak_gib"] == 3.0
    assert 0 < found["torch_peak_gib"] < 64  # the stand-in's; a child counts the memory of the process that it was forked from
    order = [line.split()[0] for line in lines if line.startswith("  ")]
    assert order == ["ours", "torch", "ours_mixed", "torch_mixed"] * 2


def test_a_turn_that_fails_says_why(stand_ins):
    (stand_ins / "bad.py").write_text("import sys\nprint('so far')\nprint('out of memory', file=sys.stderr)\nsys.exit(3)")
    with pytest.raises(RuntimeError, match=r"bad ended with exit code 3:\nso far[^$]*out of memory"):
        _turns.take_turn("bad", [sys.executable, str(stand_ins / "bad.py")], {})
    with pytest.raises(UserError, match="COEVO_SHARED"):
        _turns.shared_peer("absent.py")


def test_environments(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv(NAME, "glibc.malloc.arena_max=1")
    assert "hugetlb=1" in _turns.our_environment()[NAME]
    assert not {NAME, "PYTHONPATH"} & _turns.peer_environment().keys()


def test_lengths_and_padding():
    lengths = update_program.mixed_lengths(8, 256)
    assert len(lengths) == 16 and 24 <= min(lengths) < 64 and 200 < max(lengths) <= 256
    assert lengths == update_program.mixed_lengths(8, 256) != update_program.mixed_lengths(8, 256, seed=1)
    assert update_program.padded([3, 1, 2, 2], 2) == 6 + 4
    cfg = ours_update.update_config([5, 3, 2, 5], 8, ["remat=none"])
    assert (cfg.rows_per_micro, cfg.pack_length, cfg.max_segments, cfg.remat) == (3, 5, 8, "none")
    even = ours_update.batch_of([6, 6], 48, ours_update.update_config([6, 6], 2, []))
    assert even.tokens.shape == (1, 2, 6) and even.mask.sum() == 2 * 5


@pytest.mark.parametrize("module", [update_program, step_program])
def test_arguments(module, capsys):
    with pytest.raises(UserError, match="--rowz=3"):
        module.parse(["--rowz=3"])
    assert module.main(["--rounds=0"]) == 2 and "at least 1" in capsys.readouterr().err
    key = "update" if module is update_program else "config"
    assert module.parse([f"--{key}.a=b"])[1] == ["a=b"]


def test_our_update_runs(monkeypatch):
    monkeypatch.setattr(_sampler, "keep_programs", lambda: None)
    small = ["logprob_chunk=16", "pack_length=32"]
    found = ours_update.run({"model": TINY, "lengths": [24, 8, 24], "rows": 2, "steps": 1, "overrides": small, "products": False})
    assert len(found["rates"]) == 1 and found["rates"][0] > 0 and found["peak_gib"] > 0
    assert np.isfinite(found["loss"]) and "pack_length=32" in found["update"]


def test_steps_of_a_peer_are_read_and_paired():
    line = "step 1 150.0 s: rollout 50.0, reference 20.0, weight sync 0.5; 3000 completion tokens, 20.0 tokens/s; peak 13.00 GiB"
    steps = step_program.read_peer(_turns.Turn(["warm-up 300.0 s: rollout 1.0; 9 completion tokens", line], 1.0, 13.0))
    assert steps == [{"seconds": 150.0, "tokens": 3000.0, "rollout": 50.0, "reference": 20.0, "weight sync": 0.5}]
    with pytest.raises(ValueError, match="no line"):
        step_program.read_peer(_turns.Turn(["nothing"], 1.0, 1.0))
    ours = [{"seconds": 50.0, "tokens": 2000.0}]
    found = step_program.summary({"ours": [(ours, 5.0), (ours, 6.0)], "tunix": [(steps, 13.0), (steps, 12.0)]})
    assert found["ratio"] == 3.0 and found["ratio_per_token"] == pytest.approx(2.0) and found["memory_share"] == 6 / 13
    assert step_program.summary({"ours": [(ours, 5.0)]})["ratio"] is None


def test_vowels():
    assert _g1.vowels({}, "AbcE") == 0.5 and _g1.vowels({}, "") == 0.0


@pytest.mark.slow
def test_our_step_runs_the_loop(tmp_path):
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(8)))
    small = ["answer.max_new_tokens=8", "sampler.max_new=8", "sampler.slots=8", "sampler.narrow=()", "sampler.max_prompt=64",
             "schedule.prompts=2", "schedule.group=4", "data.max_prompt_tokens=64", "update.pack_length=128"]  # fmt: skip
    before = ours_step.learner_module.make_logprobs
    try:
        asked = {"prompts": str(tmp_path / "p.jsonl"), "workdir": str(tmp_path / "run"), "updates": 2, "model": TINY}
        found = ours_step.run(
            {**asked, "overrides": [*small, f"run.compile_cache={tmp_path / 'cache'}", "mesh.data=1", "mesh.fsdp=8"]}
        )
    finally:
        ours_step.learner_module.make_logprobs = before
        jax.config.update("jax_compilation_cache_dir", None)
    assert len(found["steps"]) == 2 and found["peak_gib"] > 0
    for step in found["steps"]:
        assert step["tokens"] > 0 and step["trained"] > 0 and not step["skipped"]
        parts = sum(step[name] for name in ("rollout", "reference", "update", "publish", "check"))
        assert min(step["reference"], step["update"]) > 0 and parts <= step["seconds"]
