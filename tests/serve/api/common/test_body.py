"""The strict reader of bodies, apart from any route."""

import json
import threading

import pytest
from fastapi import FastAPI
from hypothesis import given, strategies as st
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.testclient import TestClient

from pippin.serve.api.common import body, errors
from pippin.serve.api.common.body import JSONRoute, RequestPart


class Thing(RequestPart):
    number: int = 0
    share: float = 0.0
    flag: bool = False
    text: str = ""


@pytest.fixture(scope="module")
def echo():
    app = FastAPI()
    app.router.route_class = JSONRoute
    errors.install(app)

    @app.post("/echo")
    async def route(thing: Thing) -> Thing:
        return thing

    with TestClient(app) as client:
        yield client


@given(st.integers(-(2**63), 2**63), st.floats(allow_nan=False, allow_infinity=False), st.text())
def test_what_is_valid_arrives_as_it_was_sent(echo, number, share, text):
    body = {"number": number, "share": share, "flag": True, "text": text}
    answer = echo.post("/echo", content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.json() == body


@pytest.mark.parametrize(
    "body", [{"number": "1"}, {"number": 1.5}, {"number": True}, {"flag": 1}, {"text": 1}, {"share": "0"}]
)
def test_types_are_exact(body):
    with pytest.raises(ValidationError):
        Thing.model_validate(body)


def test_a_whole_number_is_a_number_and_unknown_fields_are_ignored():
    assert Thing.model_validate({"share": 1, "unknown": 2}).share == 1.0


@pytest.mark.parametrize(
    "kind", ["application/json", "application/json; charset=UTF-8", "application/merge-patch+json"]
)
def test_kinds_of_json(echo, kind):
    assert echo.post("/echo", content=b"{}", headers={"content-type": kind}).status_code == 200


@pytest.mark.parametrize("kind", ["text/json", "application/jsonx", "multipart/form-data; boundary=x", "nonsense"])
def test_other_kinds(echo, kind):
    assert echo.post("/echo", content=b"{}", headers={"content-type": kind}).status_code == 415


def test_values_are_counted_before_they_are_made(monkeypatch):
    made = []
    monkeypatch.setattr(body, "from_json", lambda *_, **__: made.append(1))
    for item in (b"[]", b"{}", b"1", b'""', b'{"":0}', b"[[[["):
        with pytest.raises(HTTPException, match="262,144 values") as caught:
            body.parse(b"[" + b",".join([item] * body.MAX_VALUES) + b"]")
        assert caught.value.status_code == 413
    assert not made
    body.parse(b"[" + b"0," * (body.MAX_VALUES - 2) + b"0]")
    assert made


@pytest.mark.parametrize("piece", [",", "[", '":"', "\\", '\\",', "é,", "\n,"])
def test_separators_in_texts_are_no_values(piece):
    text = piece * (body.MAX_VALUES + 1)
    assert body.parse(json.dumps({"a": [text, text]}).encode()) == {"a": [text, text]}


def test_a_text_without_an_end_is_no_json_however_long():
    for end in (b"", b"\\", b"\\\\"):
        with pytest.raises(body.InvalidJSON):
            body.parse(b'["' + b',"",' * body.MAX_VALUES + b'\\",' + end)


def test_a_large_body_is_parsed_off_the_loop_and_a_small_one_on_it(echo, monkeypatch):
    threads, parse = [], body.parse
    monkeypatch.setattr(body, "parse", lambda data: threads.append(threading.current_thread().name) or parse(data))
    for size in (10, 1 << 17):
        sent = {"text": "a" * size}
        answer = echo.post("/echo", content=json.dumps(sent), headers={"content-type": "application/json"})
        assert answer.json()["text"] == sent["text"]
    assert [name.startswith("asyncio_") for name in threads] == [False, True]
