"""The server's logs by default: who, when, how many tokens, which class of error; never what was said."""

import io
import json
import logging

import httpx2
import pytest

from pippin.claims.worlds.recording_proxy import serving
from pippin.serve import logs
from pippin.serve.app import create_app
from pippin.serve.service import Service
from pippin.serve.settings import ServerSettings
from pippin.session.providers.local import LocalModel

SECRET = "quince-7c1f-medlar"


@pytest.fixture
def written():
    """All that any logger writes, down to DEBUG, as the server's own formatter writes it."""
    stream = io.StringIO()
    root, before = logging.getLogger(), logging.getLogger().level
    handler = logs.configure(stream)
    plain = logging.StreamHandler(stream)
    root.addHandler(plain)
    root.setLevel(logging.DEBUG)
    kept = {name: logging.getLogger(name).level for name in ("pippin", "uvicorn")}
    for name in kept:
        logging.getLogger(name).setLevel(logging.DEBUG)
    yield stream
    root.removeHandler(plain)
    root.setLevel(before)
    for name in kept:
        logger = logging.getLogger(name)
        logger.removeHandler(handler)
        logger.propagate = True
        logger.setLevel(logging.NOTSET)


def settings(**changes) -> ServerSettings:
    return ServerSettings(**{"models": ("tiny",), "page": False, "request_timeout": 60.0} | changes)


def use(port: int) -> list[int]:
    """Requests of every kind, the bad ones too; their statuses."""
    said = [{"role": "user", "content": f"tell me about {SECRET}"}]
    good = {"model": "tiny", "messages": said, "max_tokens": 4}
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    bodies = [
        good,
        good | {"stream": True},
        good
        | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "boolean"}}}},
        good | {"tools": [tool], "tool_choice": "required", "max_tokens": 60},
        good | {"temperature": SECRET},
        good | {"model": f"model-{SECRET}"},
        good | {"messages": [{"role": SECRET, "content": SECRET}]},
        good | {"messages": [{"role": "user", "content": SECRET * 3000}]},
        good | {"user": SECRET, "stop": [SECRET]},
    ]
    with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        answers = [client.post("/v1/chat/completions", json=body) for body in bodies]
        answers.append(client.post("/v1/chat/completions", content=b'{"model": "' + SECRET.encode()))
        answers.append(client.post("/v1/completions", json={"model": "tiny", "prompt": SECRET, "max_tokens": 4}))
        answers.append(client.post("/v1/responses", json={"model": "tiny", "input": SECRET, "max_output_tokens": 4}))
        answers.append(client.post("/v1/embeddings", json={"model": "tiny", "input": SECRET}))
        return [answer.status_code for answer in answers]


def test_no_line_says_what_was_said(tiny, written, capfd):
    with serving(create_app(settings(), service=Service(settings(), load=lambda reference: tiny))) as port:
        statuses = use(port)
    assert statuses[:3] == [200, 200, 200]
    assert {400, 404} <= set(statuses)
    lines = written.getvalue()
    assert '"path": "/v1/chat/completions"' in lines
    assert SECRET not in lines
    assert SECRET not in "".join(capfd.readouterr())


def test_an_unexpected_error_is_logged_by_its_class(tiny, written, monkeypatch):
    def break_down(self, turn):
        raise RuntimeError(f"cannot bear {turn.transcript.entries[-1].text}")

    monkeypatch.setattr(LocalModel, "stream", break_down)
    with serving(create_app(settings(), service=Service(settings(), load=lambda reference: tiny))) as port:
        assert use(port)[0] == 500
    assert "RuntimeError" in written.getvalue()
    assert SECRET not in written.getvalue()


def test_it_can_be_asked_for(tiny, written):
    chosen = settings(log_prompts=True)
    with serving(create_app(chosen, service=Service(chosen, load=lambda reference: tiny))) as port:
        use(port)
    assert SECRET in written.getvalue()
    assert all(json.loads(line) for line in written.getvalue().splitlines() if line.startswith("{"))
