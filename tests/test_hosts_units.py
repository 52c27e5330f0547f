"""Several processes, the parts that one process can show: who owns what, joined numbers, verdicts of the watchdog, bad flags."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from learn_support import experiment, mesh_of, some_samples

from coevo_jax.config import LossConfig, SamplerConfig
from coevo_jax.distributed import global_rows, initialize, largest, own, to_all, to_first
from coevo_jax.errors import UserError
from coevo_jax.learn.packing import pack, with_micro_batches
from coevo_jax.loading import share_of
from coevo_jax.records.facts import Facts
from coevo_jax.records.rollouts import read_rollouts, write_rollouts
from coevo_jax.watchdog import Beat, Watchdog

# ------------------------------------------------------------------------------------------------------- what is whose


@pytest.mark.parametrize(("total", "count"), [(4, 2), (5, 2), (64, 4), (7, 3), (3, 3)])
def test_every_slot_has_one_owner(total: int, count: int) -> None:
    ranges = [own(total, index, count) for index in range(count)]
    assert [slot for slots in ranges for slot in slots] == list(range(total))
    sizes = [len(slots) for slots in ranges]
    assert max(sizes) - min(sizes) <= 1 and max(sizes) == -(-total // count)


def test_one_process_meets_nobody() -> None:
    assert own(5) == range(5) and largest([3, 7]) == [3, 7]
    assert to_first("x", {"a": 1}) == to_all("x", {"a": 1}) == [{"a": 1}]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("2", "", "0"), "needs the coordinator"),
        (("2", "localhost:1", ""), "needs the coordinator"),
        (("2", "localhost:1", "2"), "needs the coordinator"),
        (("two", "localhost:1", "0"), "--processes=two"),
        (("0", "", ""), "--processes=0"),
        (("", "localhost:1", ""), "one of several processes"),
    ],
)
def test_flags_that_do_not_go_together(flags: tuple[str, str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        initialize(*flags)


def test_a_process_takes_its_share_of_the_slots() -> None:
    cfg = SamplerConfig(slots=12, length_classes=((8, 64), (4, 128)), prefill_tokens=512, max_prompt=64, max_new=64)
    mine = share_of(cfg, 4)
    assert (mine.slots, mine.length_classes, mine.prefill_tokens) == (3, ((2, 64), (1, 128)), 128)
    cfg = SamplerConfig(slots=16, narrow=(2, 8))
    assert (share_of(cfg, 3).slots, share_of(cfg, 3).narrow) == (6, (2,)) and share_of(cfg, 1) is cfg


@pytest.mark.parametrize(("platforms", "chips", "joins"), [("", True, True), ("cpu", True, False), ("", False, False)])
def test_tpu_vms_find_each_other(platforms: str, chips: bool, joins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setattr("jax._src.cloud_tpu_init.running_in_cloud_tpu_vm", chips)
    monkeypatch.setattr(jax.distributed, "initialize", lambda **arguments: calls.append(arguments))
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    initialize("")
    assert len(calls) == joins and not any("coordinator_address" in call for call in calls)


@pytest.mark.parametrize(("error", "code"), [(RuntimeError("DEADLINE_EXCEEDED: barrier"), 75), (ValueError("bad address"), 2)])
def test_others_that_do_not_come_are_no_bad_input(error: Exception, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that starts an exit of 75 again is right to do so."""

    def fails(**arguments: Any) -> None:
        raise error

    monkeypatch.setattr(jax.distributed, "initialize", fails)
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    with pytest.raises(UserError, match=str(error)) as caught:
        initialize("2", "localhost:1", "1")
    assert caught.value.exit_code == code


# ------------------------------------------------------------------------------------------------------------ joined numbers


def facts_of(rewards: list[float], kept: int) -> Facts:
    facts = Facts()
    facts.mean_std("reward", rewards)
    facts.share("bad", [reward < 0 for reward in rewards])
    facts.alarm("alarm", [reward < 0 for reward in rewards], 0.4)
    facts.std("advantage/std", rewards)
    facts.total("made", len(rewards))
    facts.ratio("valid", kept, len(rewards))
    facts.add("rest", "dropped", [kept, len(rewards)])
    facts.add("least", "least", rewards)
    facts.add("most", "most", rewards)
    facts.mean("mean", rewards)
    return facts


def test_numbers_of_three_processes_make_the_row_of_one() -> None:
    rewards = list(np.random.default_rng(0).normal(size=20))
    parts = [facts_of(rewards[:3], 1), facts_of([], 0), facts_of(rewards[3:], 9)]
    sent = [json.loads(json.dumps(part.state())) for part in parts]
    whole = facts_of(rewards, 10).row()
    assert Facts.joined(sent).row() == pytest.approx(whole, rel=1e-12)
    assert whole["reward/mean"] == np.mean(rewards) and whole["reward/std"] == np.std(rewards)
    assert whole["dropped"] == 0.5 and whole["bad"] == np.mean(np.asarray(rewards) < 0)
    mean_of_means = np.mean([part.row()["reward/mean"] for part in parts if part.row()["made"]])
    assert abs(mean_of_means - whole["reward/mean"]) > 1e-3  # which is why numbers travel, and not means


def test_no_numbers_are_left_out_or_0() -> None:
    row = facts_of([], 0).row()
    assert row == {"bad": 0.0, "alarm": 0.0, "advantage/std": 0.0, "made": 0.0, "valid": 0.0, "dropped": 1.0}
    with pytest.raises(ValueError, match="'made' is 'total' already"):
        facts_of([], 0).mean("made", [1.0])


def test_parts_of_a_rollout_file_are_read_in_the_order_of_one_process(tmp_path: Any) -> None:
    first, second = [{"group": g} for g in (0, 0, 1, 5)], [{"group": g} for g in (2, 2, 3)]
    write_rollouts(tmp_path, 3, "policy", first)
    write_rollouts(tmp_path, 3, "policy", second, process=1)
    assert [row["group"] for row in read_rollouts(tmp_path)] == [0, 0, 1, 2, 2, 3, 5]


# ------------------------------------------------------------------------------------------------------------ arrays


def test_rows_lie_where_their_process_put_them() -> None:
    """One process that holds every device: what it packed is the global batch, on every mesh."""
    batch = pack(some_samples(), experiment(LossConfig()).update, devices=4, rows=16)
    mesh = mesh_of(2, 2, 2)
    placed = global_rows(batch, NamedSharding(mesh, PartitionSpec(None, ("data", "fsdp"))))
    for got, wanted in zip(jax.tree.leaves(placed), jax.tree.leaves(batch), strict=True):
        np.testing.assert_array_equal(np.asarray(got), wanted)
    assert {shard.data.shape[1] for shard in placed.tokens.addressable_shards} == {batch.tokens.shape[1] // 4}


def test_micro_batches_that_others_need_are_empty() -> None:
    batch = pack(some_samples(), experiment(LossConfig()).update)
    wide = with_micro_batches(batch, batch.tokens.shape[0] + 3)
    assert wide.tokens.shape[0] == batch.tokens.shape[0] + 3 and with_micro_batches(wide, 1) is wide
    np.testing.assert_array_equal(wide.tokens[: len(batch.tokens)], batch.tokens)
    assert not wide.mask[-3:].any() and not wide.segment_ids[-3:].any() and (wide.owner[-3:] == -1).all()
    empty = pack([], experiment(LossConfig()).update, rows=5)
    assert not empty.mask.any() and (empty.owner == -1).all() and empty.tokens.shape[:2] == (3, 2)


# ------------------------------------------------------------------------------------------------------------ watchdog


class Store:
    """The coordinator's store, shared by the watchdogs of a test."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}
        self.broken = False

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        if self.broken:
            raise RuntimeError("UNAVAILABLE: Socket closed")
        self.kept[key] = value

    def key_value_dir_get(self, prefix: str) -> list[tuple[str, str]]:
        if self.broken:
            raise RuntimeError("UNAVAILABLE: Socket closed")
        return [(key, value) for key, value in self.kept.items() if key.startswith(prefix)]


class Pack:
    """Watchdogs of several processes, moved by hand."""

    def __init__(self, count: int, dead_after: float = 10.0, hang_after: float = 100.0):
        self.store, self.now = Store(), 0.0
        self.dogs = [Watchdog(i, count, self.store) for i in range(count)]
        for dog in self.dogs:
            dog.dead_after, dog.hang_after = dead_after, hang_after

    def pass_time(self, seconds: float, silent: tuple[int, ...] = ()) -> list[str]:
        """Verdicts of all after `seconds`, in which the silent ones told nothing."""
        for dog in self.dogs:
            dog._since -= seconds
            dog._inside_since -= seconds
            if dog.index not in silent:
                dog._tell()
        return [dog._listen() or dog.verdict(seconds) for dog in self.dogs]


def test_a_process_without_a_sign_of_life_is_named_with_what_it_did() -> None:
    pack = Pack(3)
    pack.dogs[2].at("judge", 7)
    assert pack.pass_time(1) == ["", "", ""]
    assert pack.pass_time(9.9, silent=(2,)) == ["", "", ""]
    assert pack.pass_time(0.05) == ["", "", ""]  # it spoke in time: its silence counts from now
    found = pack.pass_time(10.5, silent=(2,))
    assert found[0] == "no sign of life from process 2 for 10 s: process 2 was last heard at 'judge' of update 7, for 11 s"
    assert found[1] == found[0] and found[2] == ""


def test_a_process_that_was_never_heard_is_lost_too() -> None:
    assert "process 1 was never heard" in Pack(2).pass_time(11, silent=(1,))[0]


def test_who_does_not_come_to_a_meeting_hangs() -> None:
    pack = Pack(3)
    pack.dogs[1].at("judge", 4)
    with pack.dogs[0].meeting("update"), pack.dogs[2].meeting("update"):
        assert pack.pass_time(99) == ["", "", ""]
        found = pack.pass_time(2)
    wanted = "process 1 hangs at 'judge' of update 4, for 101 s; waiting at 'update' of update 0, for 101 s: process 0, 2"
    assert found == [wanted] * 3


def test_a_slow_process_that_nobody_waits_for_is_left_alone() -> None:
    pack = Pack(2, hang_after=10)
    pack.dogs[1].at("batch", 1)
    assert [pack.pass_time(9) for _ in range(20)] == [["", ""]] * 20


def test_a_meeting_of_all_that_does_not_end() -> None:
    pack = Pack(2)
    with pack.dogs[0].meeting("save"), pack.dogs[1].meeting("save"):
        assert pack.pass_time(50) == ["", ""]
        assert all("all processes are at 'save'" in found for found in pack.pass_time(51))


def test_an_error_of_one_ends_the_others_and_a_good_end_does_not() -> None:
    pack = Pack(2)
    pack.dogs[1].at("judge", 2)
    pack.dogs[1].finish("UserError: the disk is full")
    assert pack.pass_time(1, silent=(1,))[0] == "process 1 ended at 'judge' of update 2, for 0 s: UserError: the disk is full"
    pack = Pack(2)
    pack.dogs[1].finish()
    assert pack.pass_time(1000, silent=(1,))[0] == ""


def test_all_say_what_the_first_one_found() -> None:
    pack = Pack(3)
    pack.store.kept["coevo/beat/verdict"] = "process 1 hangs"
    assert pack.pass_time(1) == ["process 1 hangs"] * 3


def test_marks_nest_and_an_error_leaves_the_mark_where_it_happened() -> None:
    dog = Watchdog()
    dog.at("batch", 3)
    with dog.stage("sample"):
        assert dog.own.where().startswith("at 'sample' of update 3")
    assert dog.own.stage == "batch" and isinstance(dog.own, Beat)
    with pytest.raises(ZeroDivisionError), dog.stage("judge"):
        _ = 1 / 0
    assert dog.own.stage == "judge" and dog.own.update == 3


def test_the_thread_ends_its_process_with_the_verdict_and_a_machine_that_slept_blames_nobody(monkeypatch: Any) -> None:
    ended: list[str] = []
    clock = iter([0.0, 0.5, 500.0, *(500.0 + 0.5 * i for i in range(1, 100))])  # asleep for 500 s after the first tick
    dog = Watchdog(0, 2, Store(), ended.append)
    dog.dead_after = 10.0
    monkeypatch.setattr("coevo_jax.watchdog.time.monotonic", lambda: 0.0)
    monkeypatch.setattr(dog._closed, "wait", lambda seconds: False)
    ticks = 0

    def tick() -> float:
        nonlocal ticks
        ticks += 1
        return next(clock)

    monkeypatch.setattr(dog, "_tell", lambda: None)
    monkeypatch.setattr("coevo_jax.watchdog.time.monotonic", tick)
    dog._run()
    assert ticks >= 20 and len(ended) == 1 and "process 1 was never heard" in ended[0]


def test_a_lost_connection_blames_the_coordinator(monkeypatch: Any) -> None:
    ended: list[str] = []
    dog = Watchdog(1, 2, Store(), ended.append)
    dog.dead_after, dog.store.broken = 10.0, True
    times = iter(0.5 * i for i in range(1000))
    monkeypatch.setattr(dog._closed, "wait", lambda seconds: False)
    monkeypatch.setattr("coevo_jax.watchdog.time.monotonic", lambda: next(times))
    dog._run()
    assert ended == ["process 0 can't be reached (UNAVAILABLE: Socket closed); it was never heard"]
