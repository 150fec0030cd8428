"""The memory of the batching engine: what is kept, what is copied, and a bound that holds after any history."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from pippin.core.errors import InvalidArgument
from pippin.engine.engine import common_prefix
from pippin.engine.slots import BLOCK, Slots
from pippin.nn.lora import Adapter


def fill(slots, slot, ids):
    """Pretend to compute the tokens that a slot does not hold yet; key i is the token itself."""
    new = ids[len(slot.ids) :]
    cache = slot.cache
    keys = torch.tensor(new, dtype=torch.float32)[None, None, :, None].expand(1, 2, -1, 8)
    for layer in range(2):
        cache.append(layer, keys, keys, None)
    cache.advance(len(new))
    slot.ids += new


def contents(slot):
    return slot.cache.store[0, 0, 0, 0, : slot.cache.length, 0].tolist()


def test_what_goes_on_is_taken_over_and_what_is_shared_is_copied(tiny):
    slots = Slots(tiny, 3, 2048)
    first = list(range(100))
    one = slots.acquire(first, None, 100)
    fill(slots, one, first)
    other = slots.acquire([*first[:40], 7, 8], None, 42)  # while the first is busy
    assert (other.ids, contents(other)) == (first[:40], first[:40])
    fill(slots, other, [*first[:40], 7, 8])
    assert contents(one) == first
    slots.release(one, keep=True)
    again = slots.acquire([*first, 5], None, 300)
    assert again is one
    assert contents(again) == first
    assert again.capacity == 384
    assert slots.acquire(first, Adapter("a", {}), 100).ids == []  # another adapter's keys are other keys
    assert slots.acquire(first, None, 100) is None  # all busy


def test_a_short_beginning_in_common_does_not_destroy_a_long_conversation(tiny):
    slots = Slots(tiny, 2, 2048)
    long = list(range(200))
    slot = slots.acquire(long, None, 200)
    fill(slots, slot, long)
    slots.release(slot, keep=True)
    short = slots.acquire([0, 1, 2, 250], None, 4)
    assert short is not slot
    assert (short.ids, contents(slot)) == ([0, 1, 2], long)


def test_memory_is_taken_from_what_is_idle_longest_and_never_from_what_is_busy(tiny):
    slots = Slots(tiny, 4, 4 * BLOCK)
    held = []
    for start in range(4):
        slot = slots.acquire([start] * 10, None, 10)
        fill(slots, slot, [start] * 10)
        held.append(slot)
    for slot in held[1:]:
        slots.release(slot, keep=True)
    assert not slots.extend(held[0], 4 * BLOCK + 1)
    assert slots.extend(held[0], 3 * BLOCK)
    assert [slot.capacity // BLOCK for slot in held] == [3, 0, 0, 1]
    assert contents(held[0]) == [0] * 10
    assert slots.acquire([9] * 10, None, 2 * BLOCK) is None
    assert slots.held == 4 * BLOCK
    slots.clear()
    assert slots.held == 0


@pytest.mark.parametrize(("count", "capacity", "message"), [(0, 1000, "slots must be"), (1, 127, "cache_tokens must")])
def test_impossible_sizes_are_refused(tiny, count, capacity, message):
    with pytest.raises(InvalidArgument, match=message):
        Slots(tiny, count, capacity)


steps = st.tuples(
    st.sampled_from(["acquire", "extend", "release", "forget"]),
    st.integers(0, 3),
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
    st.integers(0, 400),
)


@given(st.lists(steps, max_size=30))
@settings(max_examples=60, deadline=None)
def test_after_any_history_the_bound_holds_and_every_slot_holds_its_tokens(tiny, history):
    slots = Slots(tiny, 3, 5 * BLOCK)
    busy = []
    for what, which, ids, more in history:
        if what == "acquire":
            longest = max(min(common_prefix(slot.ids, ids), len(ids) - 1) for slot in slots.slots)
            slot = slots.acquire(ids, None, len(ids) + more)
            if slot is not None:
                assert slot not in busy
                assert slot.capacity >= len(ids) + more
                assert len(slot.ids) <= longest
                fill(slots, slot, ids)
                busy.append(slot)
            else:
                assert len(busy) == 3 or sum(slot.capacity for slot in busy) + len(ids) + more > 4 * BLOCK
        elif busy:
            slot = busy[which % len(busy)]
            if what == "extend":
                before = slot.capacity
                need = len(slot.ids) + more
                assert slots.extend(slot, need) == (slot.capacity >= need)
                assert slot.capacity >= before
            else:
                busy.remove(slot)
                slots.release(slot, keep=what == "release")
        assert slots.held <= 5 * BLOCK
        for slot in slots.slots:
            assert slot.busy == (slot in busy)
            assert slot.cache is None or contents(slot) == slot.ids
