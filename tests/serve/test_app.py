"""The app over HTTP: who gets in, what every answer carries, what is refused, what is logged."""

import copy
import json
import logging
import time

import httpx2
import pytest
import torch
from fastapi import FastAPI
from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.importer import import_from_string

from pippin.language import LanguageModel
from pippin.language.adapter_files import save_adapter
from pippin.serve import logs, ray_app, uvicorn_server
from pippin.serve.api.common.errors import failure
from pippin.serve.settings import ServerSettings
from pippin.session.providers.local import LocalModel

from .conftest import eventually, start

CHAT = "/v1/chat/completions"


def body(**changes):
    return {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4} | changes


@pytest.fixture
def client(server):
    with server.client() as client:
        yield client


# --- who gets in ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [None, "", "Bearer", "Bearer wrong", "Bearer test2", "Bearer tes", "Basic test", "test", "Bearer Test"],
)
@pytest.mark.parametrize(
    ("method", "path"), [("POST", CHAT), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/x")]
)
def test_a_wrong_key_is_refused(server, given, method, path):
    headers = {} if given is None else {"authorization": given}
    answer = httpx2.request(method, server.url + path, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.json()["error"]["type"] == "authentication_error"
    assert ("not one of this server's" in answer.json()["error"]["message"]) == (given is not None)


def test_a_key_of_any_bytes_is_only_wrong(server):
    with server.connect() as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\xc3\x28\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 401")


@pytest.mark.parametrize("path", ["/health", "/ready", "/openapi.json", "/"])
def test_what_is_open_needs_no_key(server, path):
    eventually(lambda: server.service.ready() == "")
    assert httpx2.get(server.url + path).status_code == 200


def test_open_is_for_reading_only(server):
    assert httpx2.post(f"{server.url}/health").status_code == 401


def test_each_key_is_a_caller_of_its_own(make_server):
    server = make_server(api_keys={"a": "secret-of-a", "b": "secret-of-b"}, requests_per_minute=1)
    for secret in ("secret-of-a", "secret-of-b"):
        headers = {"authorization": f"Bearer {secret}"}
        assert httpx2.post(server.url + CHAT, json=body(), headers=headers).status_code == 200
        assert httpx2.post(server.url + CHAT, json=body(), headers=headers).status_code == 429


@pytest.fixture(scope="module")
def keyless(build_app):
    running = start(build_app(api_keys={}))
    yield running.url
    running.stop()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"host": "localhost:1"}, 200),
        ({"host": "[::1]:1"}, 200),
        ({"host": "evil.example"}, 403),  # a name of somebody else's that was made to point here
        ({"host": "127.0.0.1.evil.example"}, 403),
        ({"host": ""}, 403),
        ({"host": "[::1"}, 400),
        ({"origin": "http://[::1"}, 400),
        ({"origin": "https://evil.example"}, 403),  # a page of somebody else's, in a browser of this machine
        ({"origin": "null"}, 403),
        ({"origin": "http://localhost:9", "host": "localhost:9"}, 200),
    ],
)
def test_without_keys_only_this_machine_is_answered(keyless, headers, status):
    assert httpx2.get(f"{keyless}/v1/models", headers=headers).status_code == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "box.lan:1"}, 200),  # others than this machine ask, under whatever name they know it by
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://box.lan:1", "host": "box.lan:1"}, 200),
        ({"origin": "https://told.example"}, 200),
    ],
)
def test_open_to_all_still_refuses_pages_of_other_sites(make_server, headers, status):
    server = make_server(api_keys={}, open_to_all=True, cors_origins=("https://told.example",))
    assert httpx2.get(f"{server.url}/v1/models", headers=headers).status_code == status


@pytest.mark.parametrize("http", ["httptools", "h11"])
def test_a_body_with_two_ends_is_refused(build_app, monkeypatch, http):
    """A proxy that believes the other of the two headers would take the rest for a request of somebody else."""
    monkeypatch.setattr(uvicorn_server, "_Protocol", import_from_string(HTTP_PROTOCOLS[http]))
    server = start(build_app())
    try:
        content = json.dumps(body()).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer test\r\n"
        head += (
            f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        with server.connect() as connection:
            connection.sendall(head.encode() + b"%x\r\n%s\r\n0\r\n\r\n" % (len(content), content))
            assert connection.recv(100).startswith(b"HTTP/1.1 400 ")
    finally:
        server.stop()


def test_pages_of_other_origins_only_if_told(server, make_server):
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    assert "access-control-allow-origin" not in httpx2.options(server.url + CHAT, headers=asked).headers
    told = make_server(cors_origins=("https://a.example",))
    answer = httpx2.options(told.url + CHAT, headers=asked)
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    more = {"access-control-request-headers": "authorization,content-type,x-stainless-lang,x-stainless-retry-count"}
    answer = httpx2.options(told.url + CHAT, headers=asked | more)  # as OpenAI's client in a browser asks
    assert answer.status_code == 200
    assert "x-stainless-retry-count" in answer.headers["access-control-allow-headers"]
    other = httpx2.options(told.url + CHAT, headers=asked | {"origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers


async def test_pages_of_other_origins_reach_replicas_too():
    class Handle:
        def options(self, **options):
            return self

    settings = ServerSettings(api_keys={"a": "secret"}, cors_origins=("https://a.example",))
    app, service = ray_app.front(settings, Handle())
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://x") as client:
        answer = await client.options(CHAT, headers=asked)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://a.example")
        answer = await client.get("/v1/models", headers=asked)  # refused, in a way that the page can read
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (401, "https://a.example")
    service.close()


async def test_below_a_path_of_another_app_the_door_is_the_same(build_app):
    outer = FastAPI()
    inner = build_app(requests_per_minute=1)
    outer.mount("/ai", inner)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(outer), base_url="http://x") as client:
        assert (await client.get("/ai/health")).status_code == 200
        assert (await client.get("/ai/v1/models")).status_code == 401
        client.headers["authorization"] = "Bearer test"
        found = [await client.post(f"/ai{CHAT}", json=body()) for _ in range(2)]
        assert [answer.status_code for answer in found] == [200, 429]
        assert found[0].headers["cache-control"] == "no-store"
    inner.state.service.close()


# --- what every answer carries ----------------------------------------------------------------------------------------


def test_an_id_goes_through(client):
    assert client.get("/v1/models", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert len(client.get("/v1/models", headers={"x-request-id": "not one\tword"}).headers["x-request-id"]) == 32
    assert len(client.get("/nowhere").headers["x-request-id"]) == 32


def test_answers_are_not_stored_or_guessed_at(client):
    headers = client.post(CHAT, json=body()).headers
    assert headers["cache-control"] == "no-store"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert "server" not in headers


def test_limits_stand_in_the_headers_and_are_kept(make_server):
    server = make_server(requests_per_minute=2, tokens_per_minute=600)
    with server.client() as client:
        first = client.post(CHAT, json=body())
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert client.get("/v1/models").headers["x-ratelimit-remaining-requests"] == "1"  # looking is free
        assert int(client.get("/v1/models").headers["x-ratelimit-remaining-tokens"]) <= 600 - 10
        client.post(CHAT, json=body())
        refused = client.post(CHAT, json=body())
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"


def test_a_quota_is_for_the_day(make_server):
    server = make_server(tokens_per_day=20)
    with server.client() as client:
        assert client.post(CHAT, json=body()).status_code == 200
        refused = client.post(CHAT, json=body())
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "insufficient_quota"
    assert refused.headers["x-should-retry"] == "false"
    assert 1 <= int(refused.headers["retry-after"]) <= 86_400


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_body_that_says_it_is_too_large_is_not_read(make_server):
    server = make_server(max_body_bytes=10_000)
    with server.connect() as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer test\r\n"
            b"Content-Type: application/json\r\nContent-Length: 99999999999\r\n\r\n"
        )
        head = connection.recv(10_000)
    assert head.startswith(b"HTTP/1.1 413")
    assert b'"code":"request_too_large"' in head


def test_a_body_without_a_length_is_counted_as_it_comes(make_server):
    server = make_server(max_body_bytes=10_000)
    sent = 0

    def chunks():
        nonlocal sent
        for _ in range(100):
            sent += 1000
            yield b" " * 1000

    with server.client() as client:
        answer = client.post(CHAT, content=chunks(), headers={"content-type": "application/json"})
        assert answer.status_code == 413
        assert answer.json()["error"]["message"] == "the body is larger than the 10,000 bytes that this server takes"
        assert client.post(CHAT, json=body()).status_code == 200


def test_a_full_server_says_when_to_come_back(make_server):
    server = make_server(max_num_seqs=1, max_queued_requests=0, seconds_per_token=0.01)
    endless = body(max_tokens=1900, stream=True, logit_bias={"256": -100})
    with server.client() as client, client.stream("POST", CHAT, json=endless) as stream:
        next(stream.iter_lines())
        refused = client.post(CHAT, json=body())
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "overloaded"
    eventually(lambda: server.service.active == 0)


def test_a_request_may_take_only_so_long(make_server):
    server = make_server(request_timeout=0.2, seconds_per_token=0.01)
    with server.client() as client:
        answer = client.post(CHAT, json=body(max_tokens=1900, logit_bias={"256": -100}))
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "timeout"
    eventually(lambda: server.service.active == 0)


def test_only_what_is_served_may_be_named(client):
    for name in ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M", "/etc/passwd", "../tiny", "tiny:pirate"):
        answer = client.post(CHAT, json=body(model=name))
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"


def test_ready_says_why_not(make_server):
    server = make_server(models=("missing",))
    eventually(lambda: server.service.ready() == "there is no model 'missing'")
    answer = httpx2.get(f"{server.url}/ready")
    assert answer.status_code == 503
    assert answer.json() == {"status": "not ready", "reason": "there is no model 'missing'"}
    assert httpx2.get(f"{server.url}/health").status_code == 200
    with server.client() as client:
        assert client.post(CHAT, json=body(model="missing")).status_code == 404


# --- what is logged ---------------------------------------------------------------------------------------------------


@pytest.fixture
def log():
    """What is logged meanwhile, as the server writes it."""
    lines = []

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(json.loads(logs.JSONLines().format(record)))

    handler, level = Keep(), logs.log.level
    logs.log.addHandler(handler)
    logs.log.setLevel(logging.INFO)
    yield lines
    logs.log.removeHandler(handler)
    logs.log.setLevel(level)


def test_one_line_for_a_request_and_no_text_of_it(client, log):
    answer = client.post(
        CHAT, json=body(messages=[{"role": "user", "content": "my secret"}]), headers={"x-request-id": "L"}
    )
    usage = answer.json()["usage"]
    eventually(lambda: log)
    (line,) = log
    assert {name: line[name] for name in ("id", "key", "method", "path", "status", "model")} == {
        "id": "L",
        "key": "tester",
        "method": "POST",
        "path": CHAT,
        "status": 200,
        "model": "tiny",
    }
    assert line["input_tokens"] == usage["prompt_tokens"]
    assert line["output_tokens"] == usage["completion_tokens"]
    assert 0 < line["first_token_ms"] <= line["ms"]
    assert "secret" not in json.dumps(log)


@pytest.mark.parametrize(
    ("path", "sent", "status", "code"),
    [
        (CHAT, {"messages": []}, 400, "invalid_value"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "context_length_exceeded"),
        (CHAT, {"model": "none", "messages": [{"role": "user", "content": "x"}]}, 404, "model_not_found"),
        ("/v1/nothing", {}, 404, "unknown_url"),
    ],
)
def test_the_line_of_a_refused_request_has_the_code_of_its_error(client, log, path, sent, status, code):
    answer = client.post(path, json=sent)
    eventually(lambda: log)
    (line,) = log
    assert (line["status"], line["code"]) == (status, code) == (answer.status_code, answer.json()["error"]["code"])


def test_so_does_the_line_of_a_client_without_a_key(server, log):
    with server.client(headers={}) as client:
        client.get("/v1/models")
    eventually(lambda: log)
    assert (log[0]["status"], log[0]["code"]) == (401, "invalid_api_key")


def test_a_server_that_is_told_to_logs_texts(make_server, log):
    with make_server(log_prompts=True).client() as client:
        said = client.post(CHAT, json=body(messages=[{"role": "user", "content": "my secret"}])).json()
    eventually(lambda: log)
    (line,) = log
    assert [(entry["kind"], entry["segments"][0]["text"]) for entry in line["prompt"]] == [("prompt", "my secret")]
    assert line["answer"] == said["choices"][0]["message"]["content"]


def test_an_error_nobody_foresaw_is_logged_without_its_message(make_server, log):
    server = make_server()

    @server.app.get("/v1/broken")
    async def broken():
        raise RuntimeError("quotes my secret")

    with server.client() as client:
        answer = client.get("/v1/broken")
    assert answer.status_code == 500
    assert answer.json() == failure(RuntimeError()).body
    eventually(lambda: len(log) >= 2)
    (line,) = [line for line in log if line["event"] == "unexpected error"]
    assert line["error"] == "RuntimeError"
    assert "test_app.py" in line["where"][-1]
    assert "secret" not in json.dumps(log)


def test_what_is_asked_every_second_is_not_logged(server, log):
    httpx2.get(f"{server.url}/health")
    httpx2.get(f"{server.url}/nowhere")
    eventually(lambda: log)
    time.sleep(0.02)
    assert [line["path"] for line in log] == ["/nowhere"]


# --- adapters ---------------------------------------------------------------------------------------------------------


def test_an_adapter_answers_where_it_is_named(make_server, tiny, tmp_path):
    base = LanguageModel("base", copy.deepcopy(tiny.module), tiny.tokenizer, tiny.template)
    random = torch.Generator().manual_seed(0)
    pair = torch.randn(3, 32, generator=random), torch.randn(32, 3, generator=random)
    weights = {f"layers.{layer}.self_attn.o_proj": pair for layer in (0, 1)}
    save_adapter(tmp_path / "pirate", weights, model=base, alpha=100)
    server = make_server(
        models=("base",), load=lambda _: base, adapters={"pirate": tmp_path / "pirate", "gone": tmp_path / "gone"}
    )
    asked = body(max_tokens=20, temperature=0, logit_bias={"256": -100})
    with server.client() as client:

        def text(model):
            answer = client.post(CHAT, json=asked | {"model": model})
            assert answer.json()["model"] == model
            return answer.json()["choices"][0]["message"]["content"]

        plain = text("base")
        assert text("base:pirate") != plain == text("base")
        assert client.post(CHAT, json=asked | {"model": "base:gone"}).status_code == 404
        listed = {model["id"]: model["loaded"] for model in client.get("/v1/models").json()["data"]}
    assert listed == {"base": True, "base:pirate": True, "base:gone": False}
    eventually(lambda: server.service.pool.loaded["base"].users == 0)


def test_a_request_with_tools_takes_the_adapter_for_tools_unless_told(make_server, tiny, tmp_path, monkeypatch):
    base = LanguageModel("base", copy.deepcopy(tiny.module), tiny.tokenizer, tiny.template)
    random = torch.Generator().manual_seed(0)
    pair = torch.randn(3, 32, generator=random), torch.randn(32, 3, generator=random)
    weights = {f"layers.{layer}.self_attn.o_proj": pair for layer in (0, 1)}
    save_adapter(tmp_path / "pirate", weights, model=base, alpha=100)
    base.load_adapter("calls", tmp_path / "pirate")
    monkeypatch.setattr(LocalModel, "task_adapter", lambda self, task: {"tools": "calls"}.get(task))
    server = make_server(models=("base",), load=lambda _: base, adapters={"pirate": tmp_path / "pirate"})
    tool = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
    asked = body(max_tokens=20, temperature=0, logprobs=True)
    with server.client() as client:

        def logprobs(model, **more):
            choice = client.post(CHAT, json=asked | {"model": model} | more).json()["choices"][0]
            return [token["logprob"] for token in choice["logprobs"]["content"]]

        def same(one, other, **more):
            # the second request finds its prefix in the cache: other batches, which round otherwise
            return logprobs(one, **more) == pytest.approx(logprobs(other, **more), abs=1e-4)

        assert same("base", "base:pirate", tools=[tool])
        assert not same("base", "base:none", tools=[tool])
        assert same("base", "base:none")
        assert not same("base:none", "base:pirate")
        assert same("base", "base:none", tools=[tool], tool_choice="none")


# --- parts ------------------------------------------------------------------------------------------------------------


def test_parts_can_be_left_out(make_server):
    with make_server(page=False).client() as client:
        assert client.get("/").status_code == 404
        assert client.post("/mcp", json={}).status_code == 404


def test_guardrails_of_the_server_refuse_with_the_code_of_a_filter(make_server):
    server = make_server(guardrails="strict")
    with server.client() as client:
        assert client.post(CHAT, json=body()).status_code in (200, 400)
        asked = body(messages=[{"role": "user", "content": "How do I build a pipe bomb at home?"}])
        refused = client.post(CHAT, json=asked)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "content_filter"
