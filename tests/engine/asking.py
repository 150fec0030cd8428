"""Ways to ask an engine and to wait for it, for the tests of whole engines."""

import random
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from pippin.engine import Finished, Request, SamplingOptions

SAMPLED = {"temperature": 1.0, "top_p": 0.9}
ENDLESS = {"logit_bias": {256: -100}}


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(32, 127), k=length)


def collect(events):
    *tokens, last = events
    assert isinstance(last, Finished)
    return [token.id for token in tokens], "".join(token.text for token in tokens) + last.text, last


def ask(engine, ids, **fields):
    return collect(engine.stream(Request(ids, **{"options": SamplingOptions(max_tokens=20), **fields})))


def together(engine, requests, pause=0.0):
    """Send all requests, each from a thread of its own; their answers in order."""

    def one(request):
        time.sleep(random.Random(len(request.prompt)).random() * pause)
        return collect(engine.stream(request))

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(one, requests))


@torch.no_grad()
def bare_greedy(model, ids, count):
    """The loop that needs no engine: whole sequences, no cache."""
    ids, start = list(ids), len(ids)
    for _ in range(count):
        ids.append(int(model.module(torch.tensor([ids]))[0, -1].argmax()))
        if ids[-1] in model.tokenizer.eos_ids:
            return ids[start:-1]
    return ids[start:]


def at_once(engine, requests):
    """Send all requests before the engine takes the first in; their answers in order."""
    with engine._loop._wake:
        streams = [engine.stream(request) for request in requests]
    return [collect(stream) for stream in streams]


def wait_until(condition, seconds=10.0):
    end = time.perf_counter() + seconds
    while not condition():
        assert time.perf_counter() < end, "it did not happen"
        time.sleep(0.001)


def is_idle(engine):
    stats = engine.stats()
    return stats.active == stats.waiting == 0


def slowed(engine, seconds=0.002):
    """Make each step take a while, so that what happens in between does."""
    step = engine._loop._step
    engine._loop._step = lambda: (time.sleep(seconds), step())[1]
    return engine
