"""Old data among new: the share at every moment, what the two sides see, cursors, errors."""

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.data.injection import Injected
from pippin.data.streams import Mapped, Shuffled


def stream(items, **how):
    return Mapped(Shuffled(items, 1, **how), iter)


def injected(share, **how):
    return Injected(stream(range(1000)), stream(range(1000, 9000)), share, **how)


@settings(max_examples=25, deadline=None)
@given(st.floats(0.001, 0.95), st.integers(0, 9))
def test_the_share_is_kept_to_within_one_item_all_along(share, seed):
    old = np.cumsum([item >= 1000 for item in itertools.islice(injected(share, seed=seed), 600)])
    assert np.abs(old - share * np.arange(1, 601)).max() <= 1 + 1e-6


def test_batches_of_64_at_one_in_a_thousand_get_one_at_most_and_independent_draws_do_not():
    even, drawn = (
        np.array([item >= 1000 for item in itertools.islice(injected(1 / 128, stratified=how, seed=4), 64 * 150)])
        for how in (True, False)
    )
    counts = {name: flags.reshape(-1, 64).sum(1) for name, flags in (("even", even), ("drawn", drawn))}
    assert counts["even"].max() == 1
    assert counts["even"].sum() == 75
    assert counts["drawn"].max() > 1
    # binomial: the variance of the number in a batch is n p (1 - p)
    assert counts["drawn"].var() == pytest.approx(64 / 128 * (1 - 1 / 128), rel=0.25)


def test_a_share_of_tokens_where_pieces_differ_in_length():
    long, short = stream([100] * 50), stream([7] * 50)
    given_ = list(itertools.islice(Injected(long, short, 0.2, size=float), 3000))
    tokens = np.cumsum(given_)
    old = np.cumsum([size if size == 7 else 0 for size in given_])
    assert old[-1] / tokens[-1] == pytest.approx(0.2, abs=1e-3)
    assert np.abs(old - 0.2 * tokens).max() <= 100


def test_without_old_data_it_is_the_target_itself_and_old_data_is_never_read():
    class Unreadable:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

        def __iter__(self):
            raise AssertionError

    target = stream(range(50), seed=3, epochs=2)
    assert list(Injected(target, Unreadable(), 0.0)) == list(stream(range(50), seed=3, epochs=2))


def test_target_data_keeps_its_order_and_ends_the_stream_while_old_data_begins_again():
    target, old = stream(range(40), epochs=1, seed=1), stream(range(100, 103), epochs=1)
    items = list(Injected(target, old, 0.5))
    assert [item for item in items if item < 100] == list(stream(range(40), epochs=1, seed=1))
    counts = [items.count(item) for item in range(100, 103)]
    assert sum(counts) == pytest.approx(40, abs=1)
    assert max(counts) - min(counts) <= 1
    assert len(items) == pytest.approx(40 / (1 - 0.5), abs=1)


@pytest.mark.parametrize("how", [{}, {"stratified": False}, {"size": float}])
def test_a_cursor_of_json_values_goes_on_to_the_item(how):
    whole = list(itertools.islice(injected(0.3, seed=5, **how), 90))
    first = injected(0.3, seed=5, **how)
    begun = list(itertools.islice(first, 37))
    cursor = json.loads(json.dumps(first.state_dict()))
    second = injected(0.3, seed=5, **how)
    second.load_state_dict(cursor)
    assert begun + list(itertools.islice(second, 53)) == whole


@pytest.mark.parametrize("share", [-0.1, 1.0, math.nan, 2])
def test_a_share_out_of_range_is_refused(share):
    with pytest.raises(InvalidArgument, match="from 0 to below 1"):
        injected(share)


def test_no_old_data_is_refused_before_anything_is_read():
    empty = Mapped(Shuffled([1], 1, epochs=1), lambda item: ())
    with pytest.raises(InvalidInput, match="nothing to inject"):
        Injected(stream([1]), empty, 0.1)
    with pytest.raises(InvalidArgument, match="leave size out"):
        injected(0.1, size=float, stratified=False)
