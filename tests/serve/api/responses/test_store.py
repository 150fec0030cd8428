"""A store forgets what it must and shows nothing to others; checked against a plain model of it."""

import pytest
from hypothesis import given, strategies as st

from pippin.core.errors import InvalidArgument, ResponseNotFound
from pippin.serve.api.responses.store import ResponseStore, StoredResponse


def kept(id, owner="ann", nbytes=1):
    return StoredResponse(owner, {"id": id}, [], (), nbytes)


def test_a_response_is_found_by_its_owner_only():
    store = ResponseStore()
    store.put(kept("r1"))
    assert store.get("r1", "ann").response == {"id": "r1"}
    for id, owner in (("r1", "bob"), ("r2", "ann")):
        with pytest.raises(ResponseNotFound):
            store.get(id, owner)
        with pytest.raises(ResponseNotFound):
            store.delete(id, owner)
    store.delete("r1", "ann")
    assert (len(store), store.nbytes) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9), st.booleans()), max_size=40))
def test_bounds_hold_and_the_longest_unused_goes_first(steps):
    store, alive = ResponseStore(max_responses=3, max_bytes=12), []
    for number, (seen, size, looks) in enumerate(steps):
        if looks and alive:
            id = alive[seen % len(alive)][0]
            store.get(id, "ann")
            alive.sort(key=lambda one: one[0] == id)
        else:
            store.put(kept(str(number), nbytes=size))
            alive.append((str(number), size))
            while len(alive) > 3 or sum(size for _, size in alive) > 12:
                alive.pop(0)
        assert len(store) == len(alive) <= 3
        assert store.nbytes == sum(size for _, size in alive) <= 12


def test_what_is_larger_than_the_store_is_not_kept():
    store = ResponseStore(max_bytes=5)
    store.put(kept("big", nbytes=6))
    assert (len(store), store.nbytes) == (0, 0)


def test_bounds_are_not_negative():
    with pytest.raises(InvalidArgument):
        ResponseStore(max_responses=-1)
