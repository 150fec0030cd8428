"""Policies on traces: the optimum, the published regimes, the wrong readings of the rule, and time on a link."""

import itertools

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pippin.claims.worlds.expert_traces import zipf_trace
from pippin.core.errors import InvalidArgument
from pippin.engine.experts import ExpertTrace, LeastStale, Prefetch, compare, simulate
from pippin.engine.experts.eviction import POLICIES

SMALL_CACHE = 13  # 5 % of the experts of `worlds`
ONLINE = [name for name in POLICIES if name != "belady"]
SMALL = st.lists(
    st.lists(st.sets(st.integers(0, 3), min_size=1, max_size=2), min_size=2, max_size=2), min_size=1, max_size=6
)


def trace_of(passes):
    return ExpertTrace.of([[sorted(layer) for layer in each] for each in passes], np.ones((2, 4), dtype=np.int64))


@given(SMALL, st.integers(2, 6), st.sampled_from(ONLINE))
def test_no_policy_has_fewer_misses_than_beladys(passes, capacity, name):
    trace = trace_of(passes)
    assert (
        simulate(trace, capacity=capacity, eviction=name).stats.hits.sum()
        <= simulate(trace, capacity=capacity, eviction="belady").stats.hits.sum()
    )


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(1, 3))
def test_beladys_misses_are_the_fewest_that_any_choice_has(needed, capacity):
    """Every sequence of victims is tried, for one layer of which each pass needs one expert."""
    trace = ExpertTrace.of([[[each]] for each in needed], np.ones((1, 4), dtype=np.int64))
    states = {frozenset(): 0}
    for expert in needed:
        following = {}
        for state, misses in states.items():
            if expert in state:
                options = [(state, misses)]
            elif len(state) < capacity:
                options = [(state | {expert}, misses + 1)]
            else:
                options = [(state - {victim} | {expert}, misses + 1) for victim in state]
            for found, count in options:
                following[found] = min(count, following.get(found, count))
        states = following
    stats = simulate(trace, capacity=capacity, eviction="belady").stats
    assert stats.misses.sum() == min(states.values())


@pytest.fixture(scope="module")
def worlds():
    return [zipf_trace(seed, passes=20, layers=8, experts=32, active=4) for seed in range(2)]


def figures(worlds, name, capacity, depth):
    found = [simulate(world, capacity=capacity, eviction=name, prefetch=Prefetch(depth)).stats for world in worlds]
    return np.mean([each.hit_rate for each in found]), sum(int(each.collisions.sum()) for each in found)


def test_least_stale_wins_where_a_small_cache_is_fed_far_ahead(worlds):
    """The published regime: 5 % of the experts, and more of them predicted than there is room for."""
    hits, collisions = figures(worlds, "least-stale", SMALL_CACHE, 8)
    others = {name: figures(worlds, name, SMALL_CACHE, 8) for name in ("lru", "fifo", "lfu")}
    for name, (theirs, collided) in others.items():
        assert hits >= theirs + 0.3, name
        assert collided >= 20 * max(1, collisions), name


def test_least_stale_does_not_win_elsewhere(worlds):
    for capacity, depth in [(SMALL_CACHE, 1), (4 * SMALL_CACHE, 1)]:
        ours, theirs = (figures(worlds, name, capacity, depth)[0] for name in ("least-stale", "lru"))
        assert abs(ours - theirs) < 0.1, (capacity, depth)


class LowestLayerFirst(LeastStale):
    """A wrong reading: it throws away what is needed next."""

    def rank(self, cached, now):
        return np.where(cached.last_pass == now.pass_index, now.layers, 0) + cached.layer


def test_the_order_of_the_layers_is_that_of_their_next_use(worlds):
    assert (
        figures(worlds, LowestLayerFirst(), SMALL_CACHE, 8)[0] < figures(worlds, "least-stale", SMALL_CACHE, 8)[0] - 0.3
    )


def test_all_that_fits_is_read_once():
    trace = zipf_trace(0, passes=10, layers=3, experts=8, active=2)
    for name in POLICIES:
        stats = simulate(trace, capacity=24, eviction=name).stats
        assert stats.misses.sum() == stats.first.sum() == len(np.unique(trace.experts + 8 * layers_of(trace)))


def layers_of(trace):
    places = np.repeat(np.arange(trace.num_passes * trace.num_layers), np.diff(trace.offsets))
    return places % trace.num_layers


def test_time_on_a_link_is_computed_by_hand():
    sizes = np.full((2, 4), 100)
    scores = np.full((2, 1, 2, 4), np.nan, dtype=np.float16)
    scores[:, 0, 1, :2] = 1.0
    trace = ExpertTrace.of([[[0], [0, 1]], [[0], [0, 1]]], sizes, predicted=scores)
    alone = simulate(trace, capacity=800, eviction="lru", bandwidth=100.0, layer_seconds=1.5)
    # 1 s for the first expert, 1.5 s of computing, 2 s for the other two, 1.5 s; then all are there
    assert alone.first_seconds == pytest.approx(6.0)
    assert alone.later_seconds == pytest.approx(3.0)
    assert alone.stalled == pytest.approx(3.0)
    ahead = simulate(trace, capacity=800, eviction="lru", prefetch=Prefetch(1), bandwidth=100.0, layer_seconds=1.5)
    # the link has time for one of the two while the first layer is computed
    assert ahead.stats.prefetches.tolist() == [0, 1]
    assert ahead.first_seconds == pytest.approx(5.0)


def test_scores_decide_what_is_prefetched():
    scores = np.array([0.1, 0.4, np.nan, 0.3, 0.2])
    assert Prefetch(1).ranked(scores) == [1, 3, 4, 0]
    assert Prefetch(1, count=2).ranked(scores) == [1, 3]
    assert Prefetch(1, quantile=0.5).ranked(scores) == [1, 3]
    assert Prefetch(1).ranked(np.full(3, np.nan)) == []


def test_every_combination_is_compared():
    trace = zipf_trace(1, passes=4, layers=2, experts=8, active=2, depth=1)
    found = compare(trace, ["lru", "belady"], [4, 8], [Prefetch(), Prefetch(1)])
    assert [(each.policy, each.capacity, each.prefetch.depth) for each in found] == [
        (name, capacity, depth) for depth, capacity, name in itertools.product([0, 1], [4, 8], ["lru", "belady"])
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"eviction": "mru"}, "'mru' is none of lru"),
        ({"prefetch": Prefetch(3)}, "depth 2, not 3"),
        ({"bandwidth": -1.0}, "bandwidth"),
        ({"layer_seconds": -1.0}, "layer_seconds"),
        ({"capacity": 0}, "capacity"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    trace = zipf_trace(0, passes=2, layers=3, experts=4, active=2, depth=2)
    with pytest.raises(InvalidArgument, match=message):
        simulate(trace, **{"capacity": 6, "eviction": "lru", **arguments})


def test_the_oracle_needs_a_trace():
    from pippin.engine.experts.eviction import policy

    with pytest.raises(InvalidArgument, match="needs the trace"):
        policy("belady")
