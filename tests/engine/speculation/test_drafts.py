"""How the length of drafts moves."""

from itertools import pairwise

import pytest
from hypothesis import given, settings, strategies as st

from pippin.engine.speculation.drafts import MAX_PAUSE, DraftLength


def test_drafts_that_hold_grow_and_drafts_that_fail_shrink():
    length = DraftLength(8)
    sizes = []
    for held in (0, 0, 1, 2, 4, 5, 6, 8):
        sizes.append(length.next())
        length.update(sizes[-1], min(held, sizes[-1]))
    assert sizes == [8, 4, 2, 2, 4, 8, 6, 8]
    assert length.next() == 8


def test_hopeless_drafts_become_rare_but_never_stop_and_come_back():
    length, drafted = DraftLength(4), []
    for step in range(200):
        if size := length.next():
            drafted.append(step)
            length.update(size, 0)
    pauses = [after - before for before, after in pairwise(drafted)]
    assert pauses == sorted(pauses)
    assert max(pauses) == MAX_PAUSE + 1
    assert len(drafted) < 20
    while not (size := length.next()):
        pass
    length.update(size, size)
    assert [length.next(), length.next()] == [2, 2]


@given(st.integers(1, 64), st.lists(st.integers(0, 64)))
@settings(deadline=None)
def test_a_draft_is_never_longer_than_asked_for(most, history):
    length = DraftLength(most)
    for held in history:
        size = length.next()
        assert 0 <= size <= most
        if size:
            length.update(size, min(held, size))


@pytest.mark.parametrize("limit", [1, 3])
def test_a_draft_cut_by_its_room_counts_as_held_when_it_held(limit):
    length = DraftLength(8)
    length.next()
    length.update(limit, limit)
    assert length.next() == 8
