"""Replay buffer: age, gap, eviction, order, fallbacks, exact save and restore by slot, and the released code's mode."""

from __future__ import annotations

import collections
import random

import numpy as np
import pytest

from coevo_jax.errors import UserError
from coevo_jax.preference.buffer import COUNTERS, ReplayBuffer, hashed


def filled(slots=2, updates=10, per_slot=8, min_gap=2, max_gap=5, **options) -> ReplayBuffer:
    buffer = ReplayBuffer(slots, per_slot, min_gap, max_gap, **options)
    for update in range(updates):
        for slot in buffer.slots:
            buffer.add(slot, update, f"r{slot}.{update}", f"q{slot}.{update} é", [slot, update, 7], "length", {"n": update})
    return buffer


def ages(buffer: ReplayBuffer, slot: int, now: int, draws: int = 400) -> collections.Counter:
    found: collections.Counter = collections.Counter()
    for key in range(draws):
        drawn = buffer.draw(slot, now, key)
        assert drawn.entry is not None and drawn.gap == now - drawn.entry.update and drawn.entry.slot == slot
        found[drawn.gap] += 1
    return found


def test_draw_is_uniform_inside_the_gap_and_only_there():
    found = ages(filled(), slot=1, now=10)
    assert set(found) == {2, 3, 4, 5}
    assert min(found.values()) > 60  # 100 expected each


def test_no_upper_bound_when_max_gap_is_zero():
    assert set(ages(filled(max_gap=0), 0, 10)) == set(range(2, 9))  # eight entries, updates 2..9; age 1 is too young


def test_gap_ends_are_inclusive():
    assert set(ages(filled(min_gap=3, max_gap=3), 0, 10)) == {3}


def test_draw_depends_on_key_slot_and_now_only():
    buffer, twin = filled(), filled()
    for _ in range(5):
        twin.draw(0, 10, "noise")  # earlier draws change nothing
    random.seed(1), np.random.seed(1)
    first = [buffer.draw(0, 10, ("k", key)).gap for key in range(50)]
    random.seed(2), np.random.seed(2)
    assert [twin.draw(0, 10, ("k", np.int64(key))).gap for key in range(50)] == first
    assert [buffer.draw(1, 10, ("k", key)).gap for key in range(50)] != first


def test_hash_is_the_same_on_every_machine():
    assert hashed("replay", 1, (2, "x")) == 0x3140602021FFB0A0
    assert hashed("replay", np.int32(1), (np.int64(2), "x")) == 0x3140602021FFB0A0
    assert hashed("a", 12) != hashed("a1", 2)


def test_an_answer_of_age_zero_is_no_older_answer():
    buffer = ReplayBuffer(1, 4, 1, 2)
    buffer.add(0, 5, "r", "q", [1])
    drawn = buffer.draw(0, 5, 0)
    assert (drawn.entry, drawn.fallback) == (None, "empty")
    assert buffer.draw(0, 6, 0).gap == 1
    assert buffer.counters["empty"] == 1


@pytest.mark.parametrize(
    ("stored", "now", "gap"),
    [([9, 10], 12, 3), ([0, 1, 9], 12, 11), ([3, 4], 40, 36)],
    ids=["too young", "some too old, some too young", "too old"],
)
def test_nearest_fallback_takes_the_age_nearest_to_the_gap(stored, now, gap):
    buffer = ReplayBuffer(1, 10, 8, 10)
    for update in stored:
        buffer.add(0, update, "r", "q", [1])
    drawn = buffer.draw(0, now, 3)
    assert (drawn.gap, drawn.fallback) == (gap, "nearest")
    assert buffer.counters["fallback"] == 1 and buffer.counters["drawn"] == 1


def test_nearest_fallback_breaks_ties_to_the_older():
    buffer = ReplayBuffer(1, 10, 5, 6)
    buffer.add(0, 0, "old", "q", [1])  # age 8 at now = 8: two above the gap
    buffer.add(0, 5, "young", "q", [1])  # age 3: two below
    assert {buffer.draw(0, 8, key).entry.record_id for key in range(20)} == {"old"}


def test_drop_fallback_gives_nothing_and_counts():
    buffer = filled(on_empty="drop", min_gap=5, max_gap=6)
    drawn = buffer.draw(0, 40, 0)
    assert (drawn.entry, drawn.gap, drawn.fallback) == (None, None, "drop")
    assert buffer.counters["dropped"] == 1 and buffer.counters["fallback"] == 0


def test_eviction_takes_the_oldest_of_the_slot_and_counts():
    buffer = filled(slots=2, updates=10, per_slot=8)
    assert len(buffer) == 16
    assert [entry.update for entry in buffer._all([0])] == list(range(2, 10))
    assert buffer.counters["added"] == 20 and buffer.counters["evicted"] == 4


def test_resampled_groups_do_not_push_out_what_the_gap_needs():
    buffer = ReplayBuffer(1, 4, 1, 4)
    for update in range(8):
        assert buffer.add(0, update, "first", "q", [update])
        assert not buffer.add(0, update, "again", "q", [update])
    assert set(ages(buffer, 0, 8)) == {1, 2, 3, 4}
    assert buffer.counters["surplus"] == 8


def test_capacity_is_checked_against_the_gap():
    with pytest.raises(UserError, match=r"(?s)holds 99 answers a slot; a gap up to 100 needs 100.*pairs.per_slot"):
        ReplayBuffer(4, 99, 20, 100)
    ReplayBuffer(4, 100, 20, 100)
    with pytest.raises(UserError, match="needs 200"):
        ReplayBuffer(4, 199, 20, 100, per_update=2)
    with pytest.raises(UserError, match="is empty"):
        ReplayBuffer(4, 99, 5, 4)
    with pytest.raises(UserError, match="is empty"):
        ReplayBuffer(4, 99, 0, 4)


def test_updates_come_in_order():
    buffer = filled()
    with pytest.raises(ValueError, match="update 3 after one of 9"):
        buffer.add(0, 3, "r", "q", [1])


def test_tokens_are_copied_and_compact():
    buffer, ids = ReplayBuffer(1, 4, 1, 2), np.array([1, 2, 151_000], np.int64)
    buffer.add(0, 0, "r", "q", ids)
    ids[:] = 0
    entry = buffer.draw(0, 1, 0).entry
    assert entry.tokens.dtype == np.int32 and entry.tokens.tolist() == [1, 2, 151_000]
    assert buffer.nbytes == 12


def same(left: ReplayBuffer, right: ReplayBuffer) -> None:
    for one, other in zip(left._all(), right._all(), strict=True):
        assert (one.slot, one.update, one.record_id, one.question, one.finish) == (
            other.slot,
            other.update,
            other.record_id,
            other.question,
            other.finish,
        )
        assert dict(one.extra) == dict(other.extra) and one.tokens.dtype == other.tokens.dtype
        np.testing.assert_array_equal(one.tokens, other.tokens)
    assert left._counters == right._counters


def test_state_round_trip_is_exact_and_the_runs_stay_equal():
    buffer = filled(slots=3)
    buffer.add(0, 10, "empty", "lone \ud800 surrogate", [])
    for key in range(5):
        buffer.draw(1, 10, key)
    state = buffer.state()
    assert all(isinstance(array, np.ndarray) and array.dtype != object for array in state.values())
    twin = ReplayBuffer(3, 8, 2, 5)
    twin.restore(state)
    same(buffer, twin)
    for update in range(11, 30):
        for one in (buffer, twin):
            one.add(2, update, "r", "q", [update])
        assert buffer.draw(2, update + 1, 0).gap == twin.draw(2, update + 1, 0).gap
    same(buffer, twin)


def test_any_number_of_processes_restores_what_others_saved():
    whole = filled(slots=6)
    whole.draw(4, 10, 1)
    two = [ReplayBuffer(range(0, 3), 8, 2, 5), ReplayBuffer(range(3, 6), 8, 2, 5)]
    for part in two:
        part.restore(whole.state())
    three = [ReplayBuffer(slots, 8, 2, 5) for slots in (range(0, 2), range(2, 4), range(4, 6))]
    for part in three:
        part.restore([part.state() for part in two])
    again = ReplayBuffer(6, 8, 2, 5)
    again.restore([part.state() for part in reversed(three)])
    same(whole, again)
    one_slot = ReplayBuffer([4], 8, 2, 5)
    one_slot.restore(whole.state(slots=range(4, 6)))
    assert one_slot.draw(4, 10, 7).entry.update == whole.draw(4, 10, 7).entry.update


def test_restore_of_missing_slots_is_an_error():
    with pytest.raises(UserError, match=r"lacks prompt slots \[2, 3\]"):
        ReplayBuffer(4, 8, 2, 5).restore(filled(slots=2).state())


def test_empty_state_round_trip():
    buffer = ReplayBuffer(2, 8, 2, 5)
    buffer.restore(ReplayBuffer(2, 8, 2, 5).state())
    assert len(buffer) == 0 and buffer.counters == dict.fromkeys(COUNTERS, 0)


def test_released_mode_is_one_global_fifo_with_relaxed_gaps():
    buffer = filled(slots=4, updates=10, per_slot=1, min_gap=2, max_gap=3, fifo_entries=16)  # spans four updates: 6..9
    assert len(buffer) == 16 and buffer.counters["evicted"] == 24
    drawn = [buffer.draw(0, 50, key) for key in range(200)]
    assert {draw.gap for draw in drawn} == {2, 3}  # from the newest entry, not from now
    assert {draw.entry.slot for draw in drawn} == {0, 1, 2, 3}  # any slot serves
    wide = filled(slots=4, updates=10, per_slot=1, min_gap=4, max_gap=9, fifo_entries=16)
    assert {(draw.gap, draw.fallback) for draw in (wide.draw(0, 50, key) for key in range(200))} == {
        (2, "half_min_gap"),
        (3, "half_min_gap"),
    }
    far = filled(slots=4, updates=10, per_slot=1, min_gap=100, max_gap=300, fifo_entries=16)
    assert {draw.fallback for draw in (far.draw(0, 50, key) for key in range(50))} == {"oldest_half"}
    assert {draw.gap for draw in (far.draw(0, 50, key) for key in range(200))} == {2, 3}
    fresh = filled(slots=4, updates=1, per_slot=1, min_gap=2, max_gap=3, fifo_entries=16)
    assert fresh.draw(0, 50, 1).fallback == "any"
    twin = ReplayBuffer(4, 1, 2, 3, fifo_entries=16)
    twin.restore(buffer.state())
    same(buffer, twin)
