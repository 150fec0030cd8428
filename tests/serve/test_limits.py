"""Limits against their law: never more than the capacity plus what time gives back, and never less."""

import math

import pytest
from hypothesis import given, settings as checks, strategies as st

from pippin.core.errors import InvalidArgument, QuotaExceeded, RateLimited
from pippin.serve.limits import DAY, Bucket, Caller, Limits
from pippin.serve.settings import ServerSettings

ALICE, BOB = Caller("key:alice", "alice"), Caller("key:bob", "bob")


class Clock:
    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@given(
    capacity=st.integers(1, 50),
    rate=st.floats(0.01, 20),
    steps=st.lists(st.tuples(st.floats(0, 30), st.integers(1, 60)), max_size=60),
)
@checks(deadline=None, max_examples=200)
def test_a_bucket_gives_what_the_law_allows_and_no_more(capacity, rate, steps):
    clock = Clock()
    bucket = Bucket(capacity, rate, clock=clock)
    taken, level = 0.0, float(capacity)  # the level by the book, beside the bucket's own
    for pause, tokens in steps:
        clock.now += pause
        level = min(capacity, level + pause * rate)
        wait = bucket.take(tokens)
        if wait == 0.0:
            level -= tokens
            taken += tokens
        elif tokens > capacity:
            assert wait == math.inf
        else:
            assert wait == pytest.approx((tokens - level) / rate, rel=1e-6, abs=1e-9)
        assert bucket.level == pytest.approx(level, rel=1e-6, abs=1e-6)
        assert taken <= capacity + clock.now * rate + 1e-6


@given(capacity=st.integers(1, 50), rate=st.floats(0.01, 20), tokens=st.integers(1, 50), debt=st.integers(0, 500))
def test_whoever_waits_as_long_as_told_gets_in(capacity, rate, tokens, debt):
    clock = Clock()
    bucket = Bucket(capacity, rate, clock=clock)
    bucket.charge(debt)
    wait = bucket.wait(min(tokens, capacity))
    clock.now += wait * (1 + 1e-9) + 1e-9
    assert bucket.take(min(tokens, capacity)) == 0.0


def test_a_clock_that_goes_back_gives_nothing():
    clock = Clock(100.0)
    bucket = Bucket(2, 1, clock=clock)
    bucket.charge(2)
    clock.now = 50.0
    assert bucket.level == 0.0
    clock.now = 101.0
    assert bucket.level == pytest.approx(1.0)


@pytest.mark.parametrize(("capacity", "rate"), [(0, 1), (1, 0), (-1, 1), (1, math.nan)])
def test_a_bucket_without_room_or_inflow_is_refused(capacity, rate):
    with pytest.raises(InvalidArgument, match="above 0"):
        Bucket(capacity, rate)


def make(**limits):
    clock, date = Clock(), Clock(1000 * DAY + 3600)
    return Limits(ServerSettings(**limits), clock=clock, date=date), clock, date


def test_requests_of_a_minute():
    limits, clock, _ = make(requests_per_minute=3)
    for _ in range(3):
        limits.admit(ALICE)
    with pytest.raises(RateLimited, match="more than 3 requests") as caught:
        limits.admit(ALICE)
    assert caught.value.retry_after == pytest.approx(20.0)
    limits.admit(BOB)  # another caller has an account of its own
    clock.now += 20.0
    limits.admit(ALICE)


def test_tokens_of_a_minute_are_paid_off_before_the_next_request():
    limits, clock, _ = make(tokens_per_minute=600)
    limits.admit(ALICE)
    limits.charge(ALICE, 900)
    with pytest.raises(RateLimited, match="600 tokens in a minute") as caught:
        limits.admit(ALICE)
    assert caught.value.retry_after == pytest.approx(30.1)
    clock.now += 30.2
    limits.admit(ALICE)


def test_tokens_of_a_day_return_at_midnight():
    limits, _, date = make(tokens_per_day=100)
    limits.admit(ALICE)
    limits.charge(ALICE, 100)
    with pytest.raises(QuotaExceeded, match="100 tokens of this day") as caught:
        limits.admit(ALICE)
    assert caught.value.retry_after == pytest.approx(DAY - 3600)
    limits.admit(BOB)
    date.now += caught.value.retry_after
    limits.admit(ALICE)


def test_what_is_left_stands_in_the_headers():
    limits, clock, _ = make(requests_per_minute=60, tokens_per_minute=600, tokens_per_day=1000)
    limits.admit(ALICE)
    limits.charge(ALICE, 100)
    clock.now += 0.5
    assert limits.headers(ALICE) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "0.500s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "505",
        "x-ratelimit-reset-tokens": "9.500s",
        "x-quota-limit-tokens": "1000",
        "x-quota-remaining-tokens": "900",
    }


def test_without_limits_nothing_is_kept_and_nothing_said():
    limits, _, _ = make()
    for number in range(10):
        limits.admit(Caller(str(number)))
        limits.charge(Caller(str(number)), 10**9)
    assert limits.headers(ALICE) == {}
    assert not limits._accounts


def test_many_callers_do_not_fill_the_memory():
    limits, _, _ = make(requests_per_minute=1)
    for number in range(10_050):
        limits.admit(Caller(str(number)))
    assert len(limits._accounts) == 10_000
    with pytest.raises(RateLimited):
        limits.admit(Caller("10049"))
