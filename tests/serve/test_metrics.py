"""What `/metrics` and `/v1/stats` say against what really happened."""

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pippin.serve.metrics import Metrics

from .conftest import eventually
from .stub import make_service, turn
from .test_service import ALICE, answer

CHAT = "/v1/chat/completions"


def read(text):
    """All samples of a page of metrics, by name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_figures_equal_what_happened(make_server):
    """Requests of every kind, counted beside the server from its answers alone."""
    server = make_server(max_num_seqs=2)
    tokens = {"input": 0, "cached": 0, "output": 0}
    statuses: dict[tuple[str, str], int] = {}

    def note(route, response):
        statuses[route, str(response.status_code)] = statuses.get((route, str(response.status_code)), 0) + 1
        return response

    with server.client() as client:
        for number in range(12):
            asked = {
                "model": "tiny",
                "messages": [{"role": "user", "content": f"{number % 3} hello"}],
                "max_tokens": number + 1,
                "logit_bias": {"256": -100},
            }
            usage = note(CHAT, client.post(CHAT, json=asked)).json()["usage"]
            tokens["input"] += usage["prompt_tokens"]
            tokens["cached"] += usage["prompt_tokens_details"]["cached_tokens"]
            tokens["output"] += usage["completion_tokens"]
        note(CHAT, client.post(CHAT, json={"model": "tiny"}))
        note(CHAT, client.post(CHAT, json=asked | {"model": "other"}))
        note("other", client.get("/nowhere/at/all"))
        note("other", client.get("/nowhere/else"))
        note("/health", client.get("/health"))
        embedded = note("/v1/embeddings", client.post("/v1/embeddings", json={"model": "tiny-encoder", "input": "a b"}))
        eventually(lambda: server.service.active == 0)
        found = read(client.get("/metrics").text)
        stats = client.get("/v1/stats").json()

    assert tokens["cached"] > 0
    for kind, count in tokens.items():
        assert found["pippin_tokens_total", (("kind", kind), ("model", "tiny"))] == count
    embedding = found["pippin_tokens_total", (("kind", "input"), ("model", "tiny-encoder"))]
    assert embedding == embedded.json()["usage"]["prompt_tokens"] == 2
    counted = {
        (labels["route"], labels["status"]): value
        for (name, pairs), value in found.items()
        if name == "pippin_http_requests_total" and (labels := dict(pairs))
    }
    assert counted == statuses
    assert found["pippin_requests_total", (("model", "tiny"), ("outcome", "complete"))] == 12
    for name in ("pippin_time_to_first_token_seconds", "pippin_request_seconds", "pippin_queue_seconds"):
        assert found[f"{name}_count", (("model", "tiny"),)] == 12
        assert found[f"{name}_sum", (("model", "tiny"),)] > 0
    assert found["pippin_tokens_per_second_count", (("model", "tiny"),)] == 11  # one token alone has no speed
    assert found["pippin_requests_active", ()] == found["pippin_requests_waiting", ()] == 0
    assert found["pippin_models_loaded", ()] == 2
    engine = server.service.pool.loaded["tiny"].engine.stats()
    assert found["pippin_cache_tokens_used", (("model", "tiny"),)] == engine.cache_tokens_used > 0
    assert found["pippin_cache_tokens_capacity", (("model", "tiny"),)] == engine.cache_tokens_capacity
    fields = {
        "pippin_cache_blocks": "blocks_total",
        "pippin_cache_blocks_free": "blocks_free",
        "pippin_cache_blocks_cached": "blocks_cached",
        "pippin_passes_total": "steps",
        "pippin_prefix_hits_total": "prefix_hits",
        "pippin_preemptions_total": "preempted",
        "pippin_drafted_tokens_total": "drafted",
        "pippin_accepted_tokens_total": "accepted",
    }
    for name, field in fields.items():
        assert found[name, (("model", "tiny"),)] == getattr(engine, field), name
    assert engine.blocks_total >= engine.blocks_free + engine.blocks_cached > 0
    assert engine.steps > 0
    assert found["pippin_memory_used_bytes", ()] == server.service.pool.nbytes
    assert stats["memory"] == {"models": server.service.pool.nbytes, "budget": server.service.pool.budget}
    assert stats["cache"]["tokens_used"] == engine.cache_tokens_used
    assert 0 < stats["tokens_per_second"] <= tokens["output"] / 5 + 0.01
    assert {model["id"]: model["loaded"] for model in stats["models"]} == {"tiny": True, "tiny-encoder": True}


async def test_active_and_waiting_while_it_happens():
    import threading

    from .stub import Stub

    service, stub = make_service(Stub(gate=threading.Semaphore(0)), max_num_seqs=2)
    running = [asyncio.create_task(answer(service)) for _ in range(5)]
    while stub.running < 2:
        await asyncio.sleep(0.002)
    found = read(service.metrics.text().decode())
    assert (found["pippin_requests_active", ()], found["pippin_requests_waiting", ()]) == (2, 3)
    stub.gate.release(100)
    await asyncio.gather(*running)
    service.close()


async def test_ends_are_counted_by_their_kind():
    service, stub = make_service()
    await answer(service)
    stub.error = RuntimeError("x")
    with pytest.raises(RuntimeError):
        await answer(service)
    stub.error = None
    events = service.run("stub", turn(100), ALICE)
    await anext(events)
    await events.aclose()
    found = read(service.metrics.text().decode())
    ends = {
        dict(labels)["outcome"]: value for (name, labels), value in found.items() if name == "pippin_requests_total"
    }
    assert ends == {"complete": 1, "RuntimeError": 1, "cancelled": 1}
    service.close()


def test_tokens_per_second_is_of_the_last_seconds():
    now = 0.0
    metrics = Metrics(clock=lambda: now)
    for step in range(100):
        now = step * 0.1
        metrics.written(3)
    assert metrics.tokens_per_second == pytest.approx(30, rel=0.05)
    now += 100
    assert metrics.tokens_per_second == 0
    assert not metrics._recent
