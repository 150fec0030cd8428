"""Requests beside each other: their order, who waits, who leaves, and what an interrupt does."""

import gc
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from pippin.core.errors import (
    Overloaded,
)
from pippin.engine import Engine, Request, SamplingOptions

from .asking import ENDLESS, ask, collect, is_idle, prompt, slowed, wait_until


def test_a_long_prompt_does_not_hold_up_the_others(tiny, fake):
    with Engine(tiny, max_num_seqs=2, max_num_batched_tokens=64, cache_tokens=4096) as engine:
        first = engine.stream(Request(prompt(0, 8), SamplingOptions(max_tokens=500, **ENDLESS)))
        next(first)
        before = engine.stats().tokens_generated
        ask(engine, prompt(1, 1500), options=SamplingOptions(max_tokens=1))
        # 1,500 tokens take 100 steps of a quarter of 64 less one, and the other request writes in each of them
        assert engine.stats().tokens_generated - before > 80
        first.close()


def test_requests_are_taken_in_the_order_in_which_they_come(tiny, fake):
    order = []
    with Engine(tiny, max_num_seqs=1) as engine:
        slowed(engine)
        streams = [engine.stream(Request(prompt(i, 10), SamplingOptions(max_tokens=3))) for i in range(6)]
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(lambda pair: (collect(pair[1]), order.append(pair[0])), enumerate(streams)))
    assert order == sorted(order)


def test_a_full_queue_refuses_at_the_call_and_says_when_to_come_back(tiny, fake):
    with slowed(Engine(tiny, max_num_seqs=1, max_waiting=1)) as engine:
        request = Request(prompt(0, 10), SamplingOptions(max_tokens=500, temperature=1.0, seed=0))
        streams = [engine.stream(request) for _ in range(2)]
        with pytest.raises(Overloaded, match="1 requests are running and 1 are waiting") as caught:
            engine.stream(request)
        assert caught.value.retry_after >= 1
        with pytest.raises(Overloaded):
            engine.score([65], [[66]])
        streams[0].close()
        assert collect(streams[1])[2].answer_tokens > 0
        assert engine.stats().refused == 2


@pytest.mark.parametrize("how", ["close", "drop", "event"])
def test_leaving_frees_the_place_within_a_step(tiny, fake, how):
    cancel = threading.Event()
    options = SamplingOptions(max_tokens=1500, temperature=1.0, seed=0, **ENDLESS)
    with Engine(tiny) as engine:
        stream = engine.stream(Request(prompt(0, 10), options, cancel=cancel))
        next(stream)
        steps = engine.stats().steps
        if how == "close":
            stream.close()
            assert list(stream) == []
        elif how == "drop":
            del stream
            gc.collect()
        else:
            cancel.set()
        wait_until(lambda: is_idle(engine))
        stats = engine.stats()
        assert stats.cancelled == 1
        assert stats.steps - steps < 1000
        if how == "event":
            assert list(stream)[-1].finish_reason == "cancelled"


def test_a_request_that_waits_can_be_cancelled(tiny, fake):
    with slowed(Engine(tiny, max_num_seqs=1)) as engine:
        cancel = threading.Event()
        options = SamplingOptions(max_tokens=500, temperature=1.0, seed=0, **ENDLESS)
        running = engine.stream(Request(prompt(0, 10), options))
        waiting = engine.stream(Request(prompt(1, 10), options, cancel=cancel))
        next(running)
        cancel.set()
        ids, text, last = collect(waiting)
        assert (ids, text, last.finish_reason) == ([], "", "cancelled")
        assert next(running).text


def test_a_slow_reader_holds_up_nobody(tiny, fake):
    with Engine(tiny, max_num_seqs=2) as engine:
        slow = engine.stream(Request(prompt(0, 10), SamplingOptions(max_tokens=200, **ENDLESS)))
        assert ask(engine, prompt(1, 10))[2].answer_tokens > 0
        wait_until(lambda: is_idle(engine))
        assert collect(slow)[2].answer_tokens == 200  # all of it was there, waiting


@pytest.fixture
def interruptible():
    """Python's own handler, also where the tests run in the background of a shell, which ignores interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_reaches_the_caller_at_once_and_ends_its_request(tiny, fake, interruptible):
    with slowed(Engine(tiny), 1.0) as engine:
        timer = threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            engine.prefill(prompt(0, 10))
        assert not is_idle(engine)  # the step that was interrupted is still being computed
        timer.join()
        wait_until(lambda: is_idle(engine))


def test_a_process_ends_while_its_engine_computes_and_leaves_its_prompts(tmp_path):
    script = """
import sys
sys.path.insert(0, sys.argv[1])
from pippin.engine import cache_size, engine as module
from fake import FakeRunner
module.make_runner, cache_size.runner_class = FakeRunner, lambda model: FakeRunner
from types import SimpleNamespace
import torch
config = SimpleNamespace(
    recurrent_layers=(), cached_layers=(0,), cache_groups=((0,),), group_window=lambda layers: None,
    original_max_position_embeddings=None,
)
model = SimpleNamespace(
    name="none", device=torch.device("cpu"), context_size=2048, cache_layout=config, adapter=lambda name: None,
    network=torch.nn.Linear(2, 2), source=None, vocab_size=260, placement=None,
)
engine = module.Engine(model, prompt_cache=sys.argv[2])
import threading
from contextlib import suppress
def ask():
    with suppress(module.PippinError):
        engine.prefill([65] * 2000)
threading.Thread(target=ask, daemon=True).start()
while not engine.stats().steps:
    pass
"""
    here = os.path.dirname(__file__)
    path = tmp_path / "prompts"
    done = subprocess.run([sys.executable, "-c", script, here, path], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert path.read_bytes().startswith(b"PIPPINKV")
