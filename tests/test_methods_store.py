"""Records that a method keeps by slot: what one process saves, any number of processes restores."""

import json
from unittest import mock

import pytest

from coevo_jax.methods import store as store_module
from coevo_jax.methods.store import SlotStore


def test_a_store_keeps_the_order_of_a_slot_and_survives_json():
    store = SlotStore(3)
    for slot, record in ((2, {"a": 1}), (0, [1, 2]), (2, {"a": 2})):
        store.add(slot, record)
    assert store.of(2) == [{"a": 1}, {"a": 2}] and store.of(1) == [] and len(store) == 3
    again = SlotStore(3)
    again.restore([json.loads(json.dumps(store.state()))])
    assert [again.of(slot) for slot in range(3)] == [store.of(slot) for slot in range(3)]
    store.clear()
    assert len(store) == 0 and len(again) == 3
    with pytest.raises(ValueError, match="slot 3 of 3"):
        store.add(3, {})


def test_slots_go_to_the_process_that_owns_them():
    whole = SlotStore(4)
    for slot in range(4):
        whole.add(slot, slot)
    parts = []
    for mine in (range(0, 2), range(2, 4)):
        with mock.patch.object(store_module, "own", lambda slots, mine=mine: mine):
            part = SlotStore(4)
            part.restore([{str(slot): [slot] for slot in range(4)}])
            parts.append(part.state())
    assert parts == [{"0": [0], "1": [1]}, {"2": [2], "3": [3]}]
    joined = SlotStore(4)
    joined.restore(parts)
    assert joined.state() == whole.state()
