"""The cache against an independent LRU, its bound of memory, waves, classes of misses, and its loader."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pippin.core.errors import InvalidArgument, NotEnoughMemory
from pippin.engine.experts import FIFO, LFU, LRU, ExpertCache, LeastStale

LAYERS, EXPERTS = 3, 6
SIZES = np.full((LAYERS, EXPERTS), 10)
PASS = st.lists(st.sets(st.integers(0, EXPERTS - 1), min_size=1), min_size=LAYERS, max_size=LAYERS)
POLICIES = [LRU(), LFU(), FIFO(), LeastStale()]


class Loader:
    """Holds what the cache asks for, and fails if that is impossible."""

    def __init__(self, sizes, capacity):
        self.sizes, self.capacity, self.rows, self.waited = sizes, capacity, {}, set()

    def fetch(self, layer, expert, row, *, ahead):
        assert row not in self.rows
        self.rows[row] = (layer, expert)
        assert sum(self.sizes[key] for key in self.rows.values()) <= self.capacity

    def drop(self, layer, expert, row):
        assert self.rows.pop(row) == (layer, expert)

    def wait(self, layer, experts):
        assert {(layer, expert) for expert in experts} <= set(self.rows.values())


def run(cache, passes, each=lambda layer, wave, last: None):
    for layers in passes:
        cache.begin_pass()
        for layer, needed in enumerate(layers):
            for wave, last in cache.waves(layer, sorted(needed)):
                each(layer, wave, last)


@given(st.lists(PASS, max_size=8), st.integers(EXPERTS, LAYERS * EXPERTS))
def test_lru_hits_are_those_of_an_ordered_dict(passes, room):
    cache = ExpertCache(SIZES, 10 * room, LRU())
    run(cache, passes)
    known, hits = OrderedDict(), 0
    for layers in passes:
        for layer, needed in enumerate(layers):
            there = [expert for expert in sorted(needed) if (layer, expert) in known]
            hits += len(there)
            for expert in there + [expert for expert in sorted(needed) if expert not in there]:
                known[layer, expert] = None
                known.move_to_end((layer, expert))
                if len(known) > room:
                    known.popitem(last=False)
    assert cache.stats.hits.sum() == hits
    assert set(cache.cached()) == set(known)


@given(
    st.lists(PASS, max_size=6),
    st.lists(st.integers(1, 20), min_size=LAYERS * EXPERTS, max_size=LAYERS * EXPERTS),
    st.integers(20, 200),
    st.sampled_from(POLICIES),
    st.randoms(use_true_random=False),
)
def test_memory_is_never_exceeded_and_each_needed_expert_comes_once(passes, sizes, capacity, policy, rng):
    sizes = np.array(sizes).reshape(LAYERS, EXPERTS)
    loader = Loader(sizes, capacity)
    cache = ExpertCache(sizes, capacity, policy, loader=loader)
    for layers in passes:
        cache.begin_pass()
        for layer, needed in enumerate(layers):
            seen = []
            for wave, last in cache.waves(layer, sorted(needed)):
                assert wave
                assert all(loader.rows[cache.row(layer, expert)] == (layer, expert) for expert in wave)
                seen += wave
                assert last == (len(seen) == len(needed))
                if last and layer + 1 < LAYERS:
                    guess = rng.sample(range(EXPERTS), 3)
                    assert cache.prefetch(layer, 1, guess, rng.randrange(60)) <= 60
                    assert {(layer, expert) for expert in wave} <= set(cache.cached())  # the wave is being computed
            assert sorted(seen) == sorted(needed)
    stats = cache.stats
    assert stats.peak <= capacity
    assert (stats.demands == stats.hits + stats.misses).all()
    assert (stats.wasted <= stats.prefetches).all()
    assert set(cache.cached()) == set(loader.rows.values())
    assert cache.used == sum(sizes[key] for key in cache.cached())


def test_a_prompt_that_needs_all_experts_goes_through_room_for_two():
    loader = Loader(SIZES, 20)
    cache = ExpertCache(SIZES, 20, LRU(), loader=loader)
    waves = []
    run(cache, [[range(EXPERTS)] * LAYERS], lambda layer, wave, last: waves.append((layer, wave, len(loader.rows))))
    assert [wave for layer, wave, _ in waves if layer == 0] == [[0], [1], [2], [3], [4], [5]]
    assert [there for _, _, there in waves][:-1] == [2] * (len(waves) - 1)  # the next one is on its way


def test_experts_that_are_there_are_computed_while_the_others_come():
    cache = ExpertCache(SIZES, 60, LRU())
    waves = []
    run(cache, [[{0, 1}, {0}, {0}], [{1, 2, 3}, {0}, {0}]], lambda layer, wave, last: waves.append((layer, wave, last)))
    assert waves[3:5] == [(0, [1], False), (0, [2, 3], True)]


def test_each_class_of_misses():
    cache = ExpertCache(SIZES, 30, LRU())
    cache.begin_pass()
    list(cache.waves(0, [0]))  # never seen
    assert cache.prefetch(0, 1, [1, 2], 100) == 20
    assert cache.prefetch(0, 2, [3], 100) == 10  # which takes the room of expert 0, the least recently used
    assert cache.prefetch(0, 2, [4], 100) == 10  # and this that of a prefetched one
    list(cache.waves(1, [1, 2]))  # 1 was evicted between its prefetch and its use
    list(cache.waves(2, [4, 5]))  # 5 was never seen
    cache.begin_pass()
    list(cache.waves(0, [0]))  # nobody predicted it
    assert cache.stats.first.tolist() == [1, 0, 1]
    assert cache.stats.collisions.tolist() == [0, 1, 0]
    assert cache.stats.unpredicted.tolist() == [1, 0, 0]
    assert cache.stats.hits.tolist() == [0, 1, 1]


def test_what_was_fetched_for_nothing_is_counted_once():
    cache = ExpertCache(SIZES, 60, LRU())
    cache.begin_pass()
    list(cache.waves(0, [0]))
    cache.prefetch(0, 1, [0, 1, 2], 30)
    list(cache.waves(1, [0]))
    list(cache.waves(2, [0]))
    cache.begin_pass()
    cache.begin_pass()
    assert cache.stats.wasted.tolist() == [0, 2, 0]
    assert cache.stats.bytes_ahead.tolist() == [0, 30, 0]
    assert cache.stats.totals()["bytes_read"] == 50


def test_nothing_is_prefetched_over_the_wave_that_is_computed():
    cache = ExpertCache(SIZES, 20, LRU())
    cache.begin_pass()
    for _, last in cache.waves(0, [0, 1]):
        assert last
        assert cache.prefetch(0, 1, [3], 100) == 0
    assert cache.prefetch(0, 1, [3], 100) == 10


@pytest.mark.parametrize("capacity", [0, -5])
def test_a_capacity_must_be_positive(capacity):
    with pytest.raises(InvalidArgument, match=str(capacity)):
        ExpertCache(SIZES, capacity, LRU())


def test_the_least_capacity_is_named_and_works():
    with pytest.raises(NotEnoughMemory, match="10 bytes, the largest"):
        ExpertCache(SIZES, 9, LRU())
    cache = ExpertCache(SIZES, 10, LRU())
    run(cache, [[range(EXPERTS)] * LAYERS])
    assert cache.stats.peak == 10


def test_bad_calls_are_refused():
    cache = ExpertCache(SIZES, 30, LRU())
    with pytest.raises(InvalidArgument, match="begin_pass"):
        list(cache.waves(0, [0]))
    cache.begin_pass()
    with pytest.raises(InvalidArgument, match="expert 6 is none of the 6 of layer 1"):
        list(cache.waves(1, [6]))
