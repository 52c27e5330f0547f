"""The walk of prompt slots: epochs, resume, resampling, other numbers of processes, mixtures (wrong_results.md B16)."""

from __future__ import annotations

import collections
import json

import pytest

from coevo_jax.data import PromptSet, SlotStream
from coevo_jax.errors import UserError

PINNED = ["0", "4", "5", "1", "3", "2", "4", "1", "2", "5", "0", "3"]
PINNED_MIXTURE = ["4", "0", "3", "5", "1", "2", "2", "4", "0", "3", "5", "1"]


def made(n: int) -> PromptSet:
    return PromptSet.of({"id": str(i), "prompt": f"q{i}"} for i in range(n))


def mixture(sizes: list[int], shares: list[float]) -> PromptSet:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    records = tuple({"id": str(i), "prompt": f"q{i}"} for i in range(sum(sizes)))
    return PromptSet(records, tuple(zip(starts, sizes, shares)), "mixture")


def step(stream: SlotStream) -> list[str]:
    return [stream.next(slot)["id"] for slot in range(stream.slots)]


def steps(stream: SlotStream, count: int) -> list[str]:
    return [name for _ in range(count) for name in step(stream)]


def test_resume_in_an_epoch_sees_the_rest_once():
    """10 prompts, batch 2: stopped after step 3, steps 4 and 5 see the other four."""
    stream = SlotStream(made(10), seed=1, slots=2)
    before = steps(stream, 3)
    resumed = SlotStream(made(10), seed=1, slots=2)
    resumed.restore(json.loads(json.dumps(stream.state())))
    assert sorted(before + steps(resumed, 2)) == sorted(map(str, range(10)))


def test_resume_at_the_epoch_edge_walks_a_second_epoch():
    """Stopped after step 5 of 5, a resumed run has all ten again, in another order."""
    stream = SlotStream(made(10), seed=1, slots=2)
    first = steps(stream, 5)
    resumed = SlotStream(made(10), seed=1, slots=2)
    resumed.restore(stream.state())
    second = steps(resumed, 5)
    assert sorted(first) == sorted(second) == sorted(map(str, range(10))) and first != second
    assert second == steps(stream, 5), "as the unbroken run"
    assert resumed.epochs() == 2.0


@pytest.mark.parametrize("n, slots", [(10, 3), (7, 4), (3, 8), (1, 2), (64, 64), (5, 1)])
def test_equal_consumption_walks_each_epoch_once_whatever_divides(n, slots):
    walk = steps(SlotStream(made(n), seed=5, slots=slots), 3 * n)
    for epoch in range(3 * slots):
        assert sorted(walk[epoch * n : (epoch + 1) * n]) == sorted(map(str, range(n)))


def test_unequal_consumption_draws_nothing_twice_in_an_epoch_and_loses_nothing():
    """12 prompts, 3 slots: 4 draws a slot are an epoch, in whatever order they come; slot 0 runs ahead into the next one."""
    stream = SlotStream(made(12), seed=2, slots=3)
    drawn: dict[int, list[str]] = {0: [], 1: [], 2: []}
    for slot in (0, 0, 0, 0, 1, 0, 2, 1, 0, 1, 1, 2, 2, 2):
        drawn[slot].append(stream.next(slot)["id"])
    first = [name for slot in range(3) for name in drawn[slot][:4]]
    assert sorted(first) == sorted(map(str, range(12)))
    second = drawn[0][4:] + [stream.next(slot)["id"] for slot in (0, 0, 1, 1, 1, 1, 2, 2, 2, 2)]
    assert sorted(second) == sorted(map(str, range(12)))


def test_a_slot_does_not_depend_on_the_others():
    busy, alone = SlotStream(made(20), seed=2, slots=4), SlotStream(made(20), seed=2, slots=4)
    for _ in range(7):
        busy.next(0)
        busy.next(3)
    assert [busy.next(2)["id"] for _ in range(9)] == [alone.next(2)["id"] for _ in range(9)]


def test_order_depends_on_seed_and_name_and_on_nothing_else():
    assert steps(SlotStream(made(30), 1, 2), 15) == steps(SlotStream(made(30), 1, 2), 15)
    orders = [steps(SlotStream(made(30), seed, 2, name), 15) for seed, name in [(1, ""), (2, ""), (1, "rubric")]]
    assert len(set(map(tuple, orders))) == 3


def test_the_order_is_pinned():
    """A change of the walk would break the resume of every run that was started before it."""
    assert steps(SlotStream(made(6), seed=1, slots=2), 6) == PINNED
    assert steps(SlotStream(mixture([3, 3], [0.5, 0.5]), seed=1, slots=2), 6) == PINNED_MIXTURE


def test_processes_save_their_slots_and_any_number_restores_them():
    whole = SlotStream(made(50), seed=1, slots=6)
    parts = [SlotStream(made(50), seed=1, slots=6) for _ in range(2)]
    for slot in (0, 1, 2, 3, 4, 5, 0, 4, 4):
        assert whole.next(slot) == parts[slot // 3].next(slot)
    saved = [parts[0].state(range(0, 3)), parts[1].state(range(3, 6))]
    restored = SlotStream(made(50), seed=1, slots=6)
    restored.restore(saved)
    assert restored.state() == whole.state()
    with pytest.raises(UserError, match=r"lacks prompt slots \[3, 4, 5\]"):
        restored.restore(saved[0])


def test_the_state_is_small_and_json():
    stream = SlotStream(made(50_000), seed=1, slots=64)
    steps(stream, 2)
    assert len(json.dumps(stream.state())) < 1500


def changed(**options):
    arguments = {"prompts": made(10), "seed": 1, "slots": 2, "name": ""} | options
    return SlotStream(**arguments)


@pytest.mark.parametrize(
    "options, what",
    [
        ({"prompts": made(11)}, "the data changed"),
        ({"seed": 2}, "seed=1, not 2"),
        ({"slots": 3}, "schedule.prompts=2, not 3"),
        ({"name": "rubric"}, "stream name"),
    ],
)
def test_a_cursor_of_other_data_is_refused(options, what):
    state = changed().state()
    stream = changed(**options)
    stream.next(0)
    kept = stream.state()
    with pytest.raises(UserError, match=what):
        stream.restore(state)
    assert stream.state() == kept, "a refused state changes nothing"


def test_a_mixture_keeps_its_shares_and_each_component_its_epochs():
    prompts = mixture([70, 30, 11], [0.7, 0.25, 0.05])
    stream = SlotStream(prompts, seed=3, slots=8)
    walk = [int(name) for name in steps(stream, 96)]
    counts = collections.Counter(0 if i < 70 else 1 if i < 100 else 2 for i in walk)
    for part, (_, _, share) in enumerate(prompts.parts):
        assert abs(counts[part] - share * len(walk)) <= 1
    for start, size, _ in prompts.parts:
        own = [i for i in walk if start <= i < start + size]
        for epoch in range(len(own) // size):
            assert sorted(own[epoch * size : (epoch + 1) * size]) == list(range(start, start + size))


def test_a_mixture_is_mixed_within_a_slot():
    """Every slot sees both components early: no resonance between the number of slots and the interleaving."""
    stream = SlotStream(mixture([500, 500], [0.5, 0.5]), seed=3, slots=8)
    for slot in range(8):
        seen = {int(stream.next(slot)["id"]) < 500 for _ in range(16)}
        assert seen == {True, False}


def test_a_mixture_resumes():
    prompts = mixture([10, 4], [0.6, 0.4])
    stream = SlotStream(prompts, seed=3, slots=3)
    steps(stream, 150)
    resumed = SlotStream(prompts, seed=3, slots=3)
    resumed.restore(stream.state())
    assert steps(resumed, 100) == steps(stream, 100)
