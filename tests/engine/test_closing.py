"""How an engine ends: with what was taken in, at once, or by itself when there is nothing to do."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pippin.core.errors import (
    InvalidArgument,
    Overloaded,
)
from pippin.engine import Engine, Request, SamplingOptions

from .asking import ENDLESS, ask, collect, prompt, slowed, wait_until


def test_draining_answers_what_was_taken_in_and_takes_no_more(tiny, fake):
    engine = slowed(Engine(tiny, max_num_seqs=1))
    streams = [engine.stream(Request(prompt(i, 10), SamplingOptions(max_tokens=5, **ENDLESS))) for i in range(3)]
    engine.close(drain=True)
    assert [collect(stream)[2].finish_reason for stream in streams] == ["length"] * 3
    for call in (lambda: engine.stream(Request([65])), lambda: engine.prefill([65]), engine.load_prompt_cache):
        with pytest.raises((Overloaded, InvalidArgument), match=r"closed|no prompt cache"):
            call()
    engine.close()
    assert engine.stats().cache_tokens_used == 0


@pytest.mark.parametrize("timeout", [None, 0.01])
def test_closing_cancels_what_runs_and_waits(tiny, fake, timeout):
    engine = slowed(Engine(tiny, max_num_seqs=1))
    options = SamplingOptions(max_tokens=1000, temperature=1.0, seed=0, **ENDLESS)
    streams = [engine.stream(Request(prompt(i, 10), options)) for i in range(3)]
    next(streams[0])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(engine.prefill, prompt(9, 10))
        wait_until(lambda: engine.stats().requests == 4)
        engine.close(drain=timeout is not None, timeout=timeout)
        with pytest.raises(Overloaded, match="closed"):
            waiting.result()
    assert [collect(stream)[2].finish_reason for stream in streams] == ["cancelled"] * 3
    assert not any(thread is engine._loop._thread for thread in threading.enumerate())


def test_the_thread_ends_when_there_is_nothing_to_do_and_comes_back(tiny, fake, monkeypatch):
    monkeypatch.setattr("pippin.engine.loop.IDLE_SECONDS", 0.01)
    engine = Engine(tiny)
    for _ in range(2):
        ask(engine, [65, 66])
        wait_until(lambda: engine._loop._thread is None)
    assert engine.stats().finished == 2


@pytest.mark.parametrize("cached", [True, False])
def test_blocks_that_hold_nothing_are_given_back_when_there_is_nothing_to_do(tiny, fake, monkeypatch, cached):
    monkeypatch.setattr("pippin.engine.loop.IDLE_SECONDS", 0.01)
    engine = Engine(tiny, enable_prefix_caching=cached)
    wanted = ask(engine, prompt(0, 100))[:2]
    wait_until(lambda: engine._loop._thread is None)
    stats, given_back = engine.stats(), len(engine._runner.given_back)
    assert stats.blocks_cached + given_back >= 7  # 100 tokens and some more
    assert (stats.blocks_cached > 0) is cached
    assert ask(engine, prompt(0, 100))[:2] == wanted
    wait_until(lambda: engine._loop._thread is None)
    assert cached or len(engine._runner.given_back) == 2 * given_back
