"""Benchmarks of the sampler: their arithmetic, arguments and the workers' protocol. No model, no peer."""

import dataclasses
import itertools
import pathlib
import sys

import jax.numpy as jnp
import numpy as np
import pytest

BENCHMARKS = pathlib.Path(__file__).resolve().parent.parent / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "peers")]

import _sampler  # noqa: E402
import sampler as program  # noqa: E402
import sampler_host  # noqa: E402
import sampler_judge  # noqa: E402
import sampler_tail  # noqa: E402
from protocol import lengths_to_end  # noqa: E402

from coevo_jax.errors import UserError  # noqa: E402
from coevo_jax.models.spec import ModelSpec  # noqa: E402
from coevo_jax.sampler.state import FULL, LENGTH, new_rows  # noqa: E402

FAKE = """
import sys
sys.path.insert(0, {peers!r})
from protocol import serve
def run(asked):
    print("a library talks on stdout")
    return {{"lengths": [asked["seed"]] * 2, "seconds": 0.5}}
def products(asked):
    return {{"rate": 1000.0, "parameters": 5}}
def fail(asked):
    raise ValueError("out of order")
def leave(asked):
    print("last words", file=sys.stderr, flush=True)
    sys.exit(3)
serve({{"run": run, "products": products, "fail": fail, "leave": leave}})
"""


@pytest.fixture
def fake_worker(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(FAKE.format(peers=str(BENCHMARKS / "peers")))
    workers = []

    def make(name="fake"):
        workers.append(_sampler.Worker(name, [sys.executable, str(script)]))
        return workers[-1]

    yield make
    for worker in workers:
        worker.stop()


def test_a_worker_answers_fails_goes_on_and_ends(fake_worker):
    worker = fake_worker()
    assert worker.ask("run", seed=7) == {"lengths": [7, 7], "seconds": 0.5}
    with pytest.raises(RuntimeError, match="out of order"):
        worker.ask("fail")
    with pytest.raises(RuntimeError, match="unknown command 'dance'"):
        worker.ask("dance")
    assert worker.ask("run", seed=8)["lengths"] == [8, 8]
    with pytest.raises(RuntimeError, match=r"exit code 3.*\n[^$]*last words"):
        worker.ask("leave")
    worker.stop()
    worker.stop()


def test_runs_alternate_with_seeds_of_their_own(fake_worker):
    runs, rates, parameters = program.measure({"ours": fake_worker("ours"), "hf": fake_worker("hf")}, rounds=2)
    assert [r["lengths"][0] for r in runs["ours"]] == [1, 3] and [r["lengths"][0] for r in runs["hf"]] == [2, 4]
    found = program.summary(runs, rates, parameters)
    assert found["ours"] == 8.0 and found["peer"] == 12.0  # tokens/s: 2 x seed / 0.5
    assert found["ratio"] == pytest.approx((1 / 2 + 3 / 4) / 2)
    assert found["roofline_share"] == pytest.approx(8.0 * 2 * 5 / 1000)
    assert {"ours", "peer", "ratio", "roofline_share"} <= found.keys()


def test_the_summary_quotes_the_fastest_peer_and_none_without_one():
    runs = {name: [{"rate": rate}] for name, rate in (("ours", 6.0), ("slow", 1.0), ("fast", 3.0))}
    assert program.summary(runs, [1.0], 1)["peer_name"] == "fast"
    assert program.summary({"ours": [{"rate": 6.0}]}, [1.0], 1)["ratio"] is None


def test_ratios_are_of_neighbours():
    assert _sampler.paired_ratio([4, 9, 8], [2, 3, 1]) == {"median": 3, "min": 2, "max": 8}
    with pytest.raises(ValueError, match="nothing to pair"):
        _sampler.paired_ratio([1], [1, 2])


def test_parameters_count_each_product_once():
    spec = ModelSpec("llama", vocab_size=11, hidden_size=4, layers=2, heads=3, kv_heads=1, head_dim=2, mlp_size=5, tied=True)
    layer = 4 * 6 + 2 * 4 * 2 + 6 * 4 + 3 * 4 * 5
    assert _sampler.product_parameters(spec) == 2 * layer + 4 * 11
    chain = _sampler.ProductChain(spec, slots=3)
    assert chain.flops == 2 * 3 * (2 * layer + 44) and chain.measure(0.01) > 0
    moved = np.asarray(chain.program(chain.weights, chain.x_BxD, np.int32(50)))
    assert np.isfinite(moved).all()


def test_lengths_have_a_heavy_tail():
    lengths = _sampler.heavy_tail(20_000, seed=0)
    assert lengths.min() == 8 and 900 < lengths.max() <= 1024
    shares = [float((lengths > x).mean()) for x in (16, 32, 64, 128)]
    assert all(0.4 < b / a < 0.55 for a, b in itertools.pairwise(shares))  # exponent 1: twice as long, half as many
    np.testing.assert_array_equal(lengths, _sampler.heavy_tail(20_000, seed=0))
    assert not np.array_equal(lengths, _sampler.heavy_tail(20_000, seed=1))


def test_steps_of_a_schedule():
    assert _sampler.steps_without_refill([5, 1, 2, 2], 2) == 7
    assert _sampler.steps_with_refill([5, 1, 2, 2], 2) == 5
    assert _sampler.steps_with_refill([1, 1, 6], 2) == 7


def test_lengths_end_with_the_end_token():
    assert lengths_to_end([[5, 2, 0, 2], [5, 5, 5, 5], [2, 0, 0, 0]], end=2) == [2, 4, 1]


def test_workload_falls_back_to_bundled_prompts(tmp_path, monkeypatch):
    monkeypatch.setenv("COEVO_SHARED", str(tmp_path))
    prompts, source = _sampler.workload(count=16)
    assert len(prompts) == 16 and "bundled" in source
    (tmp_path / "w.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert _sampler.workload(str(tmp_path / "w.jsonl"))[0] == ["a", "b"]
    with pytest.raises(UserError, match="not there"):
        _sampler.workload(str(tmp_path / "absent"))


@pytest.mark.parametrize("module", [program, sampler_tail, sampler_judge, sampler_host])
def test_arguments(module):
    args, overrides = module.parse(["--json", "--sampler.steps_per_dispatch=5"])
    assert args.json and _sampler.sampler_config(4, 8, 8, overrides).steps_per_dispatch == 5
    with pytest.raises(UserError, match="--slotz=3"):
        module.parse(["--slotz=3"])
    with pytest.raises(UserError, match="steps_per_dispatch"):
        _sampler.sampler_config(4, 8, 8, ["steps_per_dispatc=5"])


def test_a_missing_environment_names_its_command(tmp_path, monkeypatch):
    monkeypatch.setenv("COEVO_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="--install tunix"):
        program.interpreter("tunix", "")
    assert program.main(["--slots=0"]) == 2


def test_judge_gains():
    answers, criteria = (sampler_judge.WORKLOADS[n] for n in ("answers", "criteria"))
    assert answers.gain == pytest.approx(8 * 540 / (350 + 8 * 190)) and criteria.gain == pytest.approx(40 * 700 / 4600)
    prompts = answers.prompts(1000, seed=1)
    assert {len(p) for p in prompts} == {540} and all(np.array_equal(p[:350], prompts[0][:350]) for p in prompts)
    assert len({p.tobytes() for p in prompts}) == 8


def test_decode_stand_in_leaves_when_the_real_one_would():
    rows = new_rows(4)
    rows = dataclasses.replace(rows, active=np.array([True, True, True, False]), max_new=np.array([3, 5, 9, 0], np.int32))
    room = np.full(4, 100, np.int32)
    for steps, leave_at, expected in ((2, 0, 2), (20, 0, 9), (20, 2, 3), (20, 1, 5), (20, 3, 0), (4, 2, 3)):
        after, done, used = sampler_host.decode_rows(rows, jnp.int32(steps), jnp.int32(leave_at), room)
        assert int(done) == expected and int(used) == sum(min(n, expected) for n in (3, 5, 9))
        np.testing.assert_array_equal(after.active, [expected < 3, expected < 5, expected < 9, False])
    after, done, used = sampler_host.decode_rows(rows, jnp.int32(20), jnp.int32(0), np.array([100, 4, 100, 100], np.int32))
    np.testing.assert_array_equal(after.finish[:3], [LENGTH, FULL, LENGTH])  # the second fills its class one short of its limit
    assert int(done) == 9 and int(used) == 3 + 4 + 9


def test_modelled_time_is_bytes_over_bandwidth():
    weights = 2 * _sampler.product_parameters(sampler_host.QWEN3_8B)
    assert 14.5e9 < weights < 15.5e9  # 8.2 billion less the input embedding
    found = sampler_host.modelled_seconds(sampler_host.QWEN3_8B, 10, 100, 2, 4)
    assert found == pytest.approx(2 * (weights + 10 * 100 * 144 * 1024) / (0.8 * 2765e9 * 4))


@pytest.mark.slow
def test_the_hosts_benchmark_runs_the_real_scheduler():
    found = sampler_host.benchmark(*sampler_host.parse(["--slots=4", "--completions=8", "--steps=8"]))
    assert found["completions"] == 8 and found["dispatches"] == found["programs_called"]["decode"] > 8
    assert found["programs_called"]["admit"] > 0 and found["share"] > 0
