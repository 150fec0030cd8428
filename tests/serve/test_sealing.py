"""Sealed requests over a real server and a proxy that keeps every byte: what is answered, refused, and never seen."""

import asyncio
import dataclasses
import json
import logging
import re
import time

import httpx2
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from pippin.claims.worlds.recording_proxy import RecordingProxy, serving
from pippin.core.errors import (
    AttestationError,
    BadSignature,
    ModelMismatch,
    NotInLog,
    ReplayedQuote,
    SealBroken,
    SettingsMismatch,
    StaleQuote,
    UnknownMeasurement,
    UnsupportedCapability,
)
from pippin.core.trust.attestation import AttestationPolicy, SoftwareRoot, TransparencyLog, measure
from pippin.serve import sealing
from pippin.serve.attestation import AttestedNode
from pippin.session.providers.sealed_transport import SealedTransport

SECRET = "the-quince-is-ripe-6f1b"
MODEL_HASH = "22" * 32
ROOT = SoftwareRoot.create()
LOG = TransparencyLog().add("aa" * 32).add(measure()).add("bb" * 32)
POLICY = AttestationPolicy([measure()], [ROOT.public], log_root=LOG.root, models={"m": MODEL_HASH})


def node() -> AttestedNode:
    return AttestedNode(ROOT, {"m": MODEL_HASH}, {"stateless": True, "log_prompts": False}, log=LOG)


def application(node: AttestedNode) -> FastAPI:
    """Routes that say what they were asked: whole, in pieces, and with an error before or after the beginning."""
    app = FastAPI()
    app.state.calls = []

    @app.exception_handler(KeyError)
    async def missing(request: Request, error: KeyError):
        return JSONResponse({"error": {"message": f"missing {error}"}}, 404)

    @app.middleware("http")
    async def know(request: Request, call_next):
        request.state.caller = request.headers.get("authorization", "nobody")
        response = await call_next(request)
        response.headers["x-ratelimit-remaining-requests"] = "7"
        return response

    @app.post("/v1/chat/completions")
    async def chat(request: Request):
        asked = await request.json()
        app.state.calls.append(request.state.caller)
        text = asked["text"]
        if asked.get("fail") == "known":
            raise KeyError(text)
        if asked.get("fail") == "unknown":
            raise RuntimeError(text)
        if not asked.get("stream"):
            return {"said": text, "caller": request.state.caller}

        async def pieces():
            for word in text.split():
                yield f"data: {word}\n\n"
                await asyncio.sleep(0)
                if asked.get("fail") == "late":
                    raise RuntimeError(text)

        return StreamingResponse(pieces(), media_type="text/event-stream")

    app.include_router(sealing.router(node))
    return app


@pytest.fixture(scope="module")
def app():
    return application(node())


@pytest.fixture(scope="module")
def port(app):
    with serving(app) as port:
        yield port


@pytest.fixture
def proxy(port):
    with RecordingProxy(port) as proxy:
        yield proxy


@pytest.fixture
def client(proxy):
    with sealed(proxy) as client:
        yield client


class Client:
    """httpx2's asynchronous client over a sealed transport, called from tests that are not asynchronous."""

    def __init__(self, proxy, policy: AttestationPolicy = POLICY, **options) -> None:
        self.runner = asyncio.Runner()
        self.transport = SealedTransport(proxy.url, policy, **options)
        headers = {"Authorization": "Bearer key-1"}
        self.inner = httpx2.AsyncClient(base_url=proxy.url, transport=self.transport, headers=headers)

    def request(self, method: str, path: str, **fields) -> httpx2.Response:
        return self.runner.run(self.inner.request(method, path, **fields))

    def get(self, path: str) -> httpx2.Response:
        return self.request("GET", path)

    def post(self, path: str, *, json) -> httpx2.Response:
        return self.request("POST", path, json=json)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.run(self.inner.aclose())
        self.runner.close()


sealed = Client


def ask(client, text: str = SECRET, **fields) -> httpx2.Response:
    return client.post("chat/completions", json={"model": "m", "text": text, **fields})


# --- answers ----------------------------------------------------------------------------------------------------------


def test_the_proxy_sees_what_is_not_sealed(proxy):
    with httpx2.Client(base_url=proxy.url) as client:
        assert ask(client).json()["said"] == SECRET
    assert proxy.saw(SECRET)


def test_an_answer_comes_through_and_nobody_sees_it(client, proxy):
    answer = ask(client)
    assert answer.status_code == 200
    assert answer.json()["said"] == SECRET
    assert b"/v1/sealed" in proxy.sent
    assert len(proxy.received) > 500
    assert not proxy.saw(SECRET)


def test_the_caller_and_the_limits_are_known_outside(client, app):
    answer = ask(client)
    assert app.state.calls[-1] == "Bearer key-1"
    assert answer.json()["caller"] == "Bearer key-1"
    assert answer.headers["x-ratelimit-remaining-requests"] == "7"


def test_a_stream_comes_piece_by_piece_and_each_piece_is_as_long_as_the_other(client, proxy):
    words = f"{SECRET} a word {'long' * 20} or two"
    answer = ask(client, words, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.splitlines() if line]
    assert lines == [f"data: {word}" for word in words.split()]
    assert not proxy.saw(SECRET)
    chunks = re.findall(rb"\r\n([0-9a-f]+)\r\n", proxy.received.partition(b"vnd.pippin.sealed")[2])
    # the head behind the salt, one chunk per word however long, the end
    assert [int(size, 16) for size in chunks if size != b"0"] == [32 + 532, *[532] * len(words.split()), 532]


def test_one_quote_serves_until_it_is_old(proxy):
    now = time.time()
    with sealed(proxy, clock=lambda: now) as client:
        ask(client), ask(client)
        assert bytes(proxy.sent).count(b"GET /v1/attestation") == 1
        now += 601
        with pytest.raises(StaleQuote):  # for this clock the node's new quote is old too
            ask(client)
    assert bytes(proxy.sent).count(b"GET /v1/attestation") == 2
    assert bytes(proxy.sent).count(b"POST /v1/sealed") == 2


# --- errors inside ----------------------------------------------------------------------------------------------------


def test_an_error_of_the_inner_route_comes_through_sealed(client, proxy):
    answer = ask(client, fail="known")
    assert answer.status_code == 404
    assert SECRET in answer.json()["error"]["message"]
    assert not proxy.saw(SECRET)


def test_an_unexpected_error_says_nothing_to_the_log(client, proxy, caplog):
    with caplog.at_level(logging.DEBUG):
        answer = ask(client, fail="unknown")
    assert answer.status_code == 500
    assert SECRET not in answer.text
    assert "RuntimeError" in caplog.text
    assert SECRET not in caplog.text
    assert not proxy.saw(SECRET)


def test_an_answer_that_breaks_off_is_no_answer(client, proxy):
    with pytest.raises(SealBroken, match="cut off"):
        ask(client, text=f"{SECRET} more", stream=True, fail="late")
    assert not proxy.saw(SECRET)


def test_only_the_listed_paths_can_be_asked_inside(client):
    answer = client.post("sealed", json={"model": "m"})
    assert answer.status_code == 404
    assert "/v1/chat/completions" in answer.json()["error"]["message"]


# --- refusals, before anything is sent --------------------------------------------------------------------------------


def quoting(monkeypatch, **changes):
    """Let the node sign other quotes than the true one."""
    sign = ROOT.sign

    def changed(quote, inclusion=None):
        proof = changes.get("inclusion", inclusion)
        fields = {name: value for name, value in changes.items() if name != "inclusion"}
        return sign(dataclasses.replace(quote, **fields), proof)

    monkeypatch.setattr(ROOT, "sign", changed)


@pytest.mark.parametrize(
    ("changes", "policy", "error"),
    [
        ({"models": {"m": "99" * 32}}, {}, ModelMismatch),
        ({"time": time.time() - 700}, {}, StaleQuote),
        ({"nonce": "99" * 32}, {}, ReplayedQuote),
        ({"inclusion": None}, {}, NotInLog),
        ({}, {"log_root": TransparencyLog().add("cc" * 32).root}, NotInLog),
        ({"measurement": "99" * 32}, {}, UnknownMeasurement),
        ({"settings": {"stateless": False}}, {}, SettingsMismatch),
        ({}, {"roots": [SoftwareRoot.create().public]}, BadSignature),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_node_that_cannot_prove_itself_is_sent_nothing(proxy, monkeypatch, changes, policy, error):
    quoting(monkeypatch, **changes)
    with sealed(proxy, dataclasses.replace(POLICY, **policy)) as client, pytest.raises(error) as caught:
        ask(client)
    assert type(caught.value) is error
    assert bytes(proxy.sent).count(b"GET /v1/attestation") == 1
    assert b"POST" not in proxy.sent
    assert not proxy.saw(SECRET)


def test_a_quote_that_is_changed_on_the_way_is_refused(proxy):
    proxy.meddle = lambda data: data.replace(MODEL_HASH.encode(), b"99" * 32)
    with sealed(proxy) as client, pytest.raises(BadSignature, match="changed"):
        ask(client)
    assert b"POST" not in proxy.sent


def test_what_is_no_quote_is_refused(proxy):
    proxy.meddle = lambda data: data.replace(b'{"statement"', b'["statement"')
    with sealed(proxy) as client, pytest.raises(BadSignature, match="not JSON"):
        ask(client)
    assert b"POST" not in proxy.sent


def test_a_server_without_quotes_is_sent_nothing(proxy):
    proxy.url = proxy.url.replace("/v1", "/v2")
    with sealed(proxy) as client, pytest.raises(AttestationError, match="404"):
        ask(client)
    assert b"POST" not in proxy.sent
    with pytest.raises(AttestationError, match="404"):
        asyncio.run(SealedTransport(proxy.url, POLICY).verify("m"))


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "files"), ("DELETE", "models/m"), ("POST", "http://127.0.0.1:9/v1/x")]
)
def test_what_cannot_be_sealed_is_not_sent(client, proxy, method, path):
    with pytest.raises(UnsupportedCapability):
        client.request(method, path, json={"model": "m", "text": SECRET})
    with pytest.raises(UnsupportedCapability, match="names no model"):
        client.post("chat/completions", json={"text": SECRET})
    assert bytes(proxy.sent) == b""


def test_another_model_of_the_same_server_is_judged_too(client, proxy):
    ask(client)
    with pytest.raises(ModelMismatch):
        client.post("chat/completions", json={"model": "other", "text": SECRET})
    assert bytes(proxy.sent).count(b"POST") == 1


def test_the_list_of_models_is_asked_in_the_open(client, proxy):
    assert client.get("models").status_code == 404
    assert b"GET /v1/models" in proxy.sent


# --- a proxy that meddles ---------------------------------------------------------------------------------------------


def test_an_answer_in_the_open_is_not_taken_for_one(proxy):
    proxy.meddle = lambda data: data.replace(b"application/vnd.pippin.sealed", b"application/json;x=xxxxxxxxxx")
    with sealed(proxy) as client, pytest.raises(SealBroken, match="in the open"):
        ask(client)


class Meddler(httpx2.AsyncBaseTransport):
    """Changes one byte of each sealed answer."""

    def __init__(self, at: int) -> None:
        self.at, self.inner = at, httpx2.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        answer = await self.inner.handle_async_request(request)
        if request.url.path.endswith("sealed"):
            content = bytearray(b"".join([part async for part in answer.stream]))
            content[self.at] ^= 1
            answer.stream = httpx2.ByteStream(bytes(content))
        return answer

    async def aclose(self) -> None:
        await self.inner.aclose()


@pytest.mark.parametrize("at", [0, 36, 200, -1], ids=["salt", "first part", "its middle", "last part"])
def test_a_changed_byte_of_the_answer_is_noticed(proxy, at):
    with sealed(proxy, transport=Meddler(at)) as client, pytest.raises(SealBroken):
        ask(client)


def test_a_sealed_request_is_answered_once(client, proxy, port):
    ask(client)
    head, _, body = bytes(proxy.sent).partition(b"POST /v1/sealed")[2].partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(body) in head.lower()
    again = httpx2.post(f"http://127.0.0.1:{port}/v1/sealed", content=body)
    assert (again.status_code, again.json()["error"]["code"]) == (400, "bad_seal")
    assert "opened before" in again.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"{}", b"PIPPIN-SEALED-1\n" + bytes(200)])
def test_what_is_no_sealed_request_is_refused(port, body):
    answer = httpx2.post(f"http://127.0.0.1:{port}/v1/sealed", content=body)
    assert answer.status_code in (400, 409)
    nonce = httpx2.get(f"http://127.0.0.1:{port}/v1/attestation", params={"nonce": "short"})
    assert nonce.status_code == 400


# --- keys -------------------------------------------------------------------------------------------------------------


def test_a_client_follows_a_node_that_has_new_keys():
    served = node()
    with serving(application(served)) as port, RecordingProxy(port) as proxy, sealed(proxy) as client:
        ask(client)
        served.rotate_after = served.keep_for = 0.0  # every look at the clock makes a new key and forgets the old
        served.quote("00" * 32)
        served.rotate_after = served.keep_for = 3600.0
        assert ask(client).json()["said"] == SECRET
    assert bytes(proxy.sent).count(b"GET /v1/attestation") == 2
    assert not proxy.saw(SECRET)


def test_a_node_whose_state_changed_after_the_quote_opens_nothing():
    served = node()
    with serving(application(served)) as port, RecordingProxy(port) as proxy, sealed(proxy) as client:
        ask(client)
        served.models["m"] = "99" * 32
        with pytest.raises(ModelMismatch):  # the request does not open, and the new quote says why
            ask(client)
    assert bytes(proxy.sent).count(b"POST /v1/sealed") == 2
    assert not proxy.saw(SECRET)


def test_a_quote_lists_the_log_that_the_client_pinned(proxy):
    older = TransparencyLog(LOG.entries[:2])
    with sealed(proxy, dataclasses.replace(POLICY, log_root=older.root)) as client:
        assert ask(client).status_code == 200


def test_nothing_of_a_request_is_kept_by_the_transport(client):
    ask(client)
    transport = client.transport
    assert SECRET not in json.dumps({name: repr(value) for name, value in vars(transport).items()})
