"""The provider against real servers that stream, stall, break off, refuse and lie; nothing here is mocked."""

import base64
import json
import logging
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

import pytest
from pydantic import BaseModel

from pippin.core.errors import (
    AnswerTruncated,
    AuthenticationFailed,
    Cancelled,
    ContextOverflow,
    InvalidArgument,
    InvalidProviderAnswer,
    ModelNotFound,
    NetworkFailure,
    ProviderError,
    QuotaExceeded,
    RateLimited,
    Refusal,
    ServiceUnavailable,
    TimedOut,
    UnsupportedCapability,
    UnsupportedContent,
)
from pippin.session import Attachment, Capabilities, GenerationOptions, Prompt, Regex, Session, Transcript
from pippin.session.providers.openai import OpenAIProvider
from pippin.session.providers.openai_messages import context_numbers, failure, retry_after
from pippin.session.providers.provider import Done, ProviderRequest, TextDelta
from pippin.session.transcript import Answer, Instructions, Reasoning, ToolCall, ToolCalls, ToolOutput

KEY = "sk-very-secret-0123456789"
ALL = Capabilities(True, False, True, True, True, True, True)


class Server:
    """An HTTP server whose answers a test writes: each request takes the next script, the last one again and again."""

    def __init__(self):
        self.scripts, self.requests = [], []
        self.arrived, self.gone = threading.Event(), threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.requests.append((self.path, dict(self.headers), body))
                outer.arrived.set()
                script = outer.scripts.pop(0) if len(outer.scripts) > 1 else outer.scripts[0]
                self.close_connection = True
                script(self)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.http.handle_error = lambda *_: None  # clients leave; that is what is tested
        self.url = f"http://127.0.0.1:{self.http.server_port}/api"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self):
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()

    def provider(self, *scripts, **arguments):
        self.scripts = list(scripts)
        return OpenAIProvider(self.url, "m", **{"api_key": KEY, "timeout": 5, **arguments})

    def when_asked(self, act):
        """Act once a request has arrived."""
        threading.Thread(target=lambda: self.arrived.wait(20) and act()).start()

    def wait_until_gone(self, handler):
        """Note when the client closes the connection."""
        handler.connection.settimeout(30)
        try:
            if handler.connection.recv(1) == b"":
                self.gone.set()
        except ConnectionError:
            self.gone.set()


@pytest.fixture
def server():
    made = Server()
    yield made
    made.close()


def delta(reason=None, **fields):
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": reason}]}


USAGE = {
    "choices": [],
    "usage": {
        "prompt_tokens": 9,
        "completion_tokens": 4,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": 1},
    },
}


def sse(*messages, done=True):
    """Messages as server-sent events."""
    text = "".join(f"data: {json.dumps(message, ensure_ascii=False)}\n\n" for message in messages)
    return (text + ("data: [DONE]\n\n" if done else "")).encode()


def send(data, *, status=200, kind="text/event-stream", headers=(), split=None, cut=False):
    """A script: these bytes, in pieces; ``cut`` promises more than it sends."""

    def script(handler):
        handler.send_response(status)
        handler.send_header("Content-Type", kind)
        for name, value in headers:
            handler.send_header(name, value)
        if cut:
            handler.send_header("Content-Length", str(len(data) + 100))
        else:
            handler.send_header("Connection", "close")
        handler.end_headers()
        step = split or len(data) or 1
        for start in range(0, len(data), step):
            handler.wfile.write(data[start : start + step])
            handler.wfile.flush()
            if split:
                time.sleep(0.0005)

    return script


def refuse(status, message="no", code=None, headers=()):
    body = json.dumps({"error": {"message": message, "type": "x", "code": code}}).encode()
    return send(body, status=status, kind="application/json", headers=headers)


HELLO = (delta(role="assistant", content=""), delta(content="Grü"), delta(content="ße 😀"), delta("stop"), USAGE)


# --- answers ----------------------------------------------------------------------------------------------------------


def test_a_streamed_answer(server):
    session = Session(server.provider(send(sse(*HELLO))), instructions="Be kind.")
    stream = session.stream(
        "Hello", options=GenerationOptions(seed=3, max_tokens=7, stop=["END"], temperature=0.5, top_p=0.9)
    )
    shown = [snapshot.content for snapshot in stream]
    assert shown[0] == "Grü"
    assert stream.response.content == shown[-1] == "Grüße 😀"
    usage = stream.response.usage
    assert (usage.input_tokens, usage.cached_tokens, usage.output_tokens, usage.reasoning_tokens) == (9, 3, 4, 1)
    path, headers, body = server.requests[0]
    assert path == "/api/chat/completions"
    assert headers["Authorization"] == f"Bearer {KEY}"
    assert body == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 3,
        "max_tokens": 7,
        "stop": ["END"],
    }


@pytest.mark.parametrize("split", [1, 2, 7])
def test_bytes_may_be_cut_anywhere_and_events_written_in_any_legal_way(server, split):
    pretty = "".join(
        f"data: {line}\r\n" for line in json.dumps(delta(content="ße"), ensure_ascii=False, indent=1).splitlines()
    )
    data = (
        ": a comment\r\n\r\nid: 1\r\nevent: message\r\nretry: 10\r\n"
        + f"data:{json.dumps(delta(content='Grü'), ensure_ascii=False)}\r\n\r\n"
        + f"{pretty}\r\n: ping\r\n\r\ndata:\r\n\r\n"
        + f"data: {json.dumps(delta('stop', content=' 😀'), ensure_ascii=False)}\r\n\r\n"
        + "data: [DONE]\r\n\r\ndata: junk\r\n\r\n"
    ).encode()
    assert Session(server.provider(send(data, split=split))).respond("Hi").content == "Grüße 😀"


def test_a_server_that_does_not_stream(server):
    whole = {"choices": [{"message": {"content": "Hi"}, "finish_reason": "stop"}], **{"usage": USAGE["usage"]}}
    response = Session(server.provider(send(json.dumps(whole).encode(), kind="application/json"))).respond("Hi")
    assert (response.content, response.usage.output_tokens) == ("Hi", 4)


def test_an_answer_without_the_last_line_is_complete_if_it_says_why_it_ended(server):
    assert Session(server.provider(send(sse(*HELLO, done=False)))).respond("Hi").content == "Grüße 😀"


def test_reasoning_and_logprobs(server):
    scored = delta(content="A")
    scored["choices"][0]["logprobs"] = {"content": [{"token": "A", "logprob": -0.25, "top_logprobs": []}]}
    answer = sse(delta(reasoning_content="Let me "), delta(reasoning="think."), scored, delta("stop"))
    session = Session(server.provider(send(answer), capabilities=ALL))
    response = session.respond("?", options=GenerationOptions(reasoning="moderate", logprobs=2))
    assert [entry.text for entry in response.transcript_entries if isinstance(entry, Reasoning)] == ["Let me think."]
    assert [(token.text, token.logprob) for token in response.tokens] == [("A", -0.25)]
    body = server.requests[0][2]
    assert (body["reasoning_effort"], body["logprobs"], body["top_logprobs"]) == ("medium", True, 2)


class Person(BaseModel):
    name: str
    age: int


def test_a_typed_answer(server):
    provider = server.provider(send(sse(delta(content='{"name": "An'), delta("stop", content='n", "age":  3}'))))
    stream = Session(provider).stream("Who?", generating=Person)
    assert next(stream).content.name == "An"
    assert [snapshot.content for snapshot in stream][-1] == stream.response.content == Person(name="Ann", age=3)
    body = server.requests[0][2]
    sent = body["response_format"]["json_schema"]
    assert (sent["name"], sent["strict"]) == ("Person", True)
    assert sent["schema"]["properties"]["age"] == {"type": "integer"}
    assert "x-order" not in json.dumps(body)
    assert "JSON Schema" in body["messages"][-1]["content"]
    assert not provider.stream(ProviderRequest(Transcript(entries=(Prompt("x"),)))).close()


def test_only_what_the_strict_mode_takes_is_asked_in_it(server):
    class Loose(BaseModel):
        name: str = "x"

    for target, strict in ((Person, True), (Loose, False), (list[Person], False), (dict[str, int], False)):
        provider = server.provider(send(sse(delta("stop", content="{}"))))
        with pytest.raises(InvalidProviderAnswer) if target is not Loose and target != dict[str, int] else _nothing():
            Session(provider).respond("x", generating=target, options=GenerationOptions(include_schema_in_prompt=False))
        body = server.requests[-1][2]
        assert body["response_format"]["json_schema"]["strict"] is strict
        assert body["messages"][-1]["content"] == "x"


class _nothing:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


@pytest.mark.parametrize("text", ['{"name": "A"}', "Sure! Here is", '{"name": "A", "age": "old"}', ""])
def test_a_typed_answer_that_does_not_hold_to_the_type(server, text):
    session = Session(server.provider(send(sse(delta("stop", content=text)))))
    with pytest.raises(InvalidProviderAnswer, match="did not hold to the type"):
        session.respond("Who?", generating=Person)
    assert len(session.transcript) == 0


def test_a_typed_answer_cut_short(server):
    with pytest.raises(AnswerTruncated) as caught:
        Session(server.provider(send(sse(delta("length", content='{"name"'))))).respond("Who?", generating=Person)
    assert caught.value.partial == '{"name"'


# --- tools ------------------------------------------------------------------------------------------------------------


def part(index, id=None, name=None, arguments=None):
    function = {k: v for k, v in (("name", name), ("arguments", arguments)) if v is not None}
    return {"index": index, **({"id": id} if id else {}), "function": function}


def weather(city: Literal["Rome", "Oslo"]) -> str:
    """How the weather is."""
    return f"sun in {city}"


def test_tool_calls_are_put_together_by_index(server):
    calls = sse(
        delta(content="One moment. "),
        delta(tool_calls=[part(0, "a", "weather", ""), part(1, "b", "weather", '{"ci')]),
        delta(tool_calls=[part(0, arguments='{"city": "Ro')]),
        delta(tool_calls=[part(1, arguments='ty": "Oslo"}'), part(0, arguments='me"}')]),
        delta("tool_calls"),
    )
    session = Session(server.provider(send(calls), send(sse(*HELLO))), tools=[weather])
    response = session.respond("Weather?")
    assert response.content == "Grüße 😀"
    made = next(entry for entry in response.transcript_entries if isinstance(entry, ToolCalls))
    assert [(call.id, call.arguments) for call in made.calls] == [("a", {"city": "Rome"}), ("b", {"city": "Oslo"})]
    first, second = (body for _, _, body in server.requests)
    assert first["tools"][0]["function"]["name"] == "weather"
    assert first["tool_choice"] == "auto"
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "tool", "tool"]
    assert second["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'
    assert second["messages"][2:] == [
        {"role": "tool", "tool_call_id": "a", "content": "sun in Rome"},
        {"role": "tool", "tool_call_id": "b", "content": "sun in Oslo"},
    ]


def test_a_call_may_be_required_and_a_server_may_forget_ids_and_indices(server):
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    whole = {"choices": [{"message": {"tool_calls": [call]}, "finish_reason": "stop"}]}
    session = Session(
        server.provider(send(json.dumps(whole).encode(), kind="application/json"), send(sse(*HELLO))), tools=[weather]
    )
    response = session.respond("?", options=GenerationOptions(tool_calling="required", parallel_tool_calls=False))
    assert next(entry.calls[0].id for entry in response.transcript_entries if isinstance(entry, ToolCalls)) == "call_0"
    assert [body["tool_choice"] for _, _, body in server.requests] == ["required", "auto"]
    assert server.requests[0][2]["parallel_tool_calls"] is False


def test_calls_that_meet_the_limit(server):
    whole, cut = part(0, "a", "weather", '{"city": "Rome"}'), part(1, "b", "weather", '{"ci')
    provider = server.provider(send(sse(delta(tool_calls=[whole]), delta("length"))))
    calls, done = provider.stream(ProviderRequest(Transcript(entries=(Prompt("?"),))))
    assert (calls.calls[0].arguments, done.finish_reason) == ({"city": "Rome"}, "length")
    answers = send(sse(delta(tool_calls=[whole, cut]), delta("length"))), send(sse(*HELLO))
    response = Session(server.provider(*answers), tools=[weather]).respond("?")
    assert [entry.kind for entry in response.transcript_entries] == ["prompt", "tool_calls", "tool_output", "response"]
    assert ([call.id for call in response.transcript_entries[1].calls], response.transcript_entries[1].partial) == (
        ["a"],
        '{"ci',
    )
    with pytest.raises(AnswerTruncated, match="max_tokens") as caught:
        Session(server.provider(send(sse(delta(tool_calls=[cut]), delta("length"))))).respond("?")
    assert caught.value.partial == '{"ci'


def test_more_calls_than_asked_for_are_not_run(server):
    four = [part(at, f"id{at}", "weather", f'{{"city": "{city}"}}') for at, city in enumerate(["Rome", "Oslo"] * 2)]
    for options, count in (({"max_tool_calls": 2}, 2), ({"parallel_tool_calls": False}, 1)):
        provider = server.provider(send(sse(delta(tool_calls=four), delta("tool_calls"))), send(sse(*HELLO)))
        response = Session(provider, tools=[weather]).respond("?", options=GenerationOptions(**options))
        assert len(response.transcript_entries[1].calls) == count
    assert "max_tool_calls" not in server.requests[0][2], "which is not OpenAI's"


@pytest.mark.parametrize(
    "parts",
    [
        [part(0, "a", "weather", '{"city"')],
        [part(0, "a", "weather", "[1]")],
        [part(0, "a", "weather", "[" * 100_000)],
        [part(0, "a", None, "{}")],
        [part(99, "a", "weather", "{}")],
        [part("0", "a", "weather", "{}")],
        [part(0, 7, "weather", "{}")],
    ],
)
def test_tool_calls_that_cannot_be_read(server, parts):
    with pytest.raises(InvalidProviderAnswer):
        Session(server.provider(send(sse(delta(tool_calls=parts), delta("tool_calls")))), tools=[weather]).respond("?")


def test_images(server):
    image = Attachment(media_type="image/png", data=base64.b64encode(b"\x89PNG"), label="a")
    note = Attachment(media_type="text/plain", data=base64.b64encode(b"note"))
    transcript = Transcript(
        entries=(
            Instructions("I"),
            Prompt.of(["Look", image, note]),
            ToolCalls(calls=(ToolCall(id="1", name="camera", arguments={}), ToolCall(id="2", name="t", arguments={}))),
            ToolOutput(segments=(image,), call_id="1", name="camera"),
            ToolOutput("done", call_id="2", name="t"),
            Reasoning(text="hidden"),
            Answer("A dot."),
        )
    )
    provider = server.provider(send(sse(*HELLO)), capabilities=ALL)
    Session(provider, transcript=transcript).respond("And now?")
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw=="}}
    messages = server.requests[0][2]["messages"]
    assert messages[1] == {"role": "user", "content": [{"type": "text", "text": "Look\n\nnote"}, url]}
    roles = "system user assistant tool tool user assistant user"
    assert [message["role"] for message in messages] == roles.split()
    assert messages[5]["content"] == [url]
    assert "hidden" not in json.dumps(messages)


# --- what is refused before anything is sent --------------------------------------------------------------------------


def test_what_cannot_be_done_is_not_sent(server):
    provider = server.provider(send(sse(*HELLO)))
    image = Attachment(media_type="image/png", data=base64.b64encode(b"\x89PNG"))
    film = Attachment(media_type="video/mp4", data=base64.b64encode(b"film"))
    with pytest.raises(UnsupportedCapability, match="grammars"):
        Session(provider).respond("?", generating=Regex("a+"))
    with pytest.raises(UnsupportedCapability, match="reasoning"):
        Session(provider).respond("?", options=GenerationOptions(reasoning="light"))
    with pytest.raises(UnsupportedCapability, match="top_k"):
        Session(provider).respond("?", options=GenerationOptions(top_k=3))
    with pytest.raises(UnsupportedContent, match="image/png"):
        Session(provider).respond([image])
    with pytest.raises(UnsupportedContent, match="video/mp4"):
        Session(server.provider(send(b""), capabilities=ALL)).respond([film])
    with pytest.raises(UnsupportedCapability, match="count"):
        provider.token_count("text")
    assert server.requests == []
    extended = server.provider(send(sse(*HELLO)), extensions=True)
    Session(extended).respond(
        "?", options=GenerationOptions(top_k=3, min_p=0.1, repetition_penalty=1.1, logit_bias={5: 2.0})
    )
    body = server.requests[0][2]
    assert (body["top_k"], body["min_p"], body["repetition_penalty"], body["logit_bias"]) == (3, 0.1, 1.1, {"5": 2.0})


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"base_url": "ftp://host"}, "http"),
        ({"base_url": "localhost:80"}, "http"),
        ({"base_url": "http://"}, "http"),
        ({"base_url": f"http://me:{KEY}@host/v1"}, "password"),
        ({"base_url": "http://host:port"}, "address"),
        ({"api_key": f"{KEY}\n"}, "api_key"),
        ({"headers": {"X": f"{KEY}é"}}, "header 'X'"),
        ({"max_retries": 11}, "max_retries must be from 0 to 10"),
    ],
)
def test_arguments_that_cannot_be(arguments, match):
    with pytest.raises(InvalidArgument, match=match) as caught:
        OpenAIProvider(**{"base_url": "http://localhost", "model": "m", **arguments})
    assert KEY not in str(caught.value)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (refuse(401, f"Incorrect API key provided: {KEY}"), AuthenticationFailed),
        (refuse(403), AuthenticationFailed),
        (refuse(404, "no model m"), ModelNotFound),
        (refuse(400, "bad"), ProviderError),
        (refuse(400, "This is filtered", "content_filter"), Refusal),
        (refuse(400, "too long", "context_length_exceeded"), ProviderError),
        (refuse(429, "too fast", headers=[("Retry-After", "3600")]), RateLimited),
        (refuse(429, "pay", "insufficient_quota"), QuotaExceeded),
        (refuse(500), ServiceUnavailable),
        (refuse(503, headers=[("Retry-After", "3600")]), ServiceUnavailable),
        (send(b"<html>502</html>", status=502, kind="text/html"), ServiceUnavailable),
        (send(b"", status=302, headers=[("Location", "http://localhost:1/")]), InvalidProviderAnswer),
        (send(b"<html>Login</html>", kind="text/html"), InvalidProviderAnswer),
        (send(b"\xff\xfe" * 50_000, status=400, kind="text/plain"), ProviderError),
        (send(b"data: {nonsense\n\n"), InvalidProviderAnswer),
        (send(b"data: [1]\n\n"), InvalidProviderAnswer),
        (send(sse({"choices": 3})), InvalidProviderAnswer),
        (send(sse({"choices": [{"delta": {"content": 3}}]})), InvalidProviderAnswer),
        (send(sse({"choices": [{"delta": {"content": "a"}, "logprobs": {"content": [{}]}}]})), InvalidProviderAnswer),
        (send(sse({"usage": "many"})), InvalidProviderAnswer),
        (send(b'data: {"choices": [], "usage": {"prompt_tokens": 1e999}}\n\n'), InvalidProviderAnswer),
        (send(b"data: " + b"[" * 200_000 + b"\n\n"), InvalidProviderAnswer),
        (send(b"[" * 60_000, status=400, kind="application/json"), ProviderError),
        (send(b"{", kind="application/json"), InvalidProviderAnswer),
        (send(b"data: " + b"x" * 2_000_000), InvalidProviderAnswer),
        (send(sse(delta(content="a"), {"error": {"message": "broke", "code": "server_error"}})), ProviderError),
        (send(sse(delta(content="a"), {"error": {"message": "slow", "code": "rate_limit_exceeded"}})), RateLimited),
        (send(sse(delta(refusal="I will"), delta("stop", refusal=" not."))), Refusal),
        (send(sse(delta(content="a"), delta("content_filter"))), Refusal),
        (send(b""), NetworkFailure),
        (send(sse(delta(content="a"), done=False)), NetworkFailure),
        (send(sse(delta(content="a"))), NetworkFailure),
        (send(sse(delta(content="a"), delta("stop"), done=False)[:-20]), NetworkFailure),
        (send(sse(delta(content="a"))[:-20], cut=True), NetworkFailure),
        (send("data: ü".encode()[:-1], cut=True), NetworkFailure),
        (lambda handler: handler.connection.shutdown(socket.SHUT_RDWR), NetworkFailure),
        (lambda handler: handler.wfile.write(b"220 mail.example.com ESMTP\r\n"), NetworkFailure),
    ],
)  # fmt: skip
def test_each_failure_is_an_error_of_its_own(server, script, error, caplog):
    caplog.set_level(logging.DEBUG)
    provider = server.provider(script)
    session = Session(provider)
    with pytest.raises(error) as caught:
        session.respond("Hi")
    assert type(caught.value) is error
    assert len(session.transcript) == 0
    assert not session.is_responding
    assert len(server.requests) == 1
    said = f"{caught.value} {caught.value!r} {provider!r} {vars(caught.value)} {caplog.text}"
    assert KEY not in said
    assert len(str(caught.value)) < 1500


def test_an_overflow_tells_both_numbers(server):
    message = "This model's maximum context length is 4,096 tokens. However, your messages resulted in 5000 tokens."
    with pytest.raises(ContextOverflow) as caught:
        Session(server.provider(refuse(400, message, "context_length_exceeded"))).respond("Hi")
    assert (caught.value.context_size, caught.value.token_count) == (4096, 5000)


@pytest.mark.parametrize(
    ("message", "numbers"),
    [
        (
            "a prompt of 3,000 tokens and an answer need 3,001 tokens, the context of smollm2-135m holds 2,048; s",
            (2048, 3001),
        ),
        ("the request exceeds the available context size (8192 tokens), got 9000", (8192, 9000)),
        ("maximum context length is 100 tokens", None),
        ("too long: 5000", None),
    ],
)
def test_numbers_of_an_overflow(message, numbers):
    assert context_numbers(message) == numbers


def test_shapes_of_error_bodies():
    assert "plain" in str(failure("p", 500, "plain", {}))
    assert "why" in str(failure("p", 400, '{"detail": "why"}', {}))
    assert "why" in str(failure("p", 400, '{"error": "why"}', {}))
    assert "nothing" in str(failure("p", 400, "", {}))
    assert isinstance(failure("p", 400, '{"error": {"type": "insufficient_quota"}}', {}), QuotaExceeded)
    assert isinstance(failure("p", None, '{"error": {"code": "model_not_found"}}', {}), ModelNotFound)
    assert retry_after({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}) is None
    assert retry_after({"retry-after": "-1"}) is None
    assert retry_after({"retry-after": "1.5"}) == 1.5


def test_what_a_header_holds_is_not_told_either(server):
    provider = server.provider(refuse(401, f"who is {KEY}?"), api_key=None, headers={"X-Api-Key": KEY})
    with pytest.raises(AuthenticationFailed, match=r"who is \*\*\*\?"):
        Session(provider).respond("Hi")
    assert server.requests[0][1]["X-Api-Key"] == KEY
    assert "Authorization" not in server.requests[0][1]


def test_nobody_is_there():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        with pytest.raises(NetworkFailure, match="cannot reach"):
            Session(OpenAIProvider(url, "m", max_retries=0)).respond("Hi")


# --- repeating --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 503])
def test_a_failure_of_the_moment_is_tried_again(server, status):
    again = refuse(status, headers=[("Retry-After", "0.05")])
    assert Session(server.provider(again, again, send(sse(*HELLO)))).respond("Hi").content == "Grüße 😀"
    assert len(server.requests) == 3


def test_so_often_and_no_more(server):
    with pytest.raises(RateLimited) as caught:
        Session(server.provider(refuse(429, headers=[("Retry-After", "0.01")]), max_retries=3)).respond("Hi")
    assert caught.value.retry_after == 0.01
    assert len(server.requests) == 4


def test_an_answer_that_began_is_not_asked_for_again(server):
    with pytest.raises(NetworkFailure):
        Session(server.provider(send(sse(delta(content="a"), done=False)), max_retries=3)).respond("Hi")
    assert len(server.requests) == 1


# --- time and cancelling ----------------------------------------------------------------------------------------------


def test_a_server_that_says_nothing(server):
    with pytest.raises(NetworkFailure, match="nothing for 1 seconds"):
        Session(server.provider(server.wait_until_gone, timeout=1)).respond("Hi")
    assert server.gone.wait(10)


def test_the_time_of_a_request_is_limited_while_nothing_comes(server):
    began = time.monotonic()
    with pytest.raises(TimedOut):
        Session(server.provider(server.wait_until_gone)).respond("Hi", options=GenerationOptions(timeout=1))
    assert time.monotonic() - began < 10
    assert server.gone.wait(10)


def stall(server, data):
    def script(handler):
        send(data)(handler)
        server.wait_until_gone(handler)

    return script


@pytest.mark.parametrize("begin", [None, sse(delta(content="a"), done=False)])
def test_cancelling_closes_the_connection_at_once(server, begin):
    session = Session(server.provider(server.wait_until_gone if begin is None else stall(server, begin)))
    stream = session.stream("Hi")
    if begin is not None:
        assert next(stream).content == "a"
    server.when_asked(stream.cancel)
    began = time.monotonic()
    with pytest.raises(Cancelled):
        list(stream)
    assert time.monotonic() - began < 10
    assert server.gone.wait(10)
    assert not session.is_responding


def test_closing_the_stream_closes_the_connection(server):
    session = Session(server.provider(stall(server, sse(delta(content="a"), done=False))))
    with session.stream("Hi") as stream:
        next(stream)
    assert server.gone.wait(10)


def test_cancelling_ends_the_wait_between_two_tries(server):
    provider = server.provider(refuse(429, headers=[("Retry-After", "15")]))
    turn = ProviderRequest(Transcript(entries=(Prompt("Hi"),)))
    server.when_asked(turn.cancel.set)
    began = time.monotonic()
    assert list(provider.stream(turn))[-1].finish_reason == "cancelled"
    assert time.monotonic() - began < 10
    assert [event.finish_reason for event in provider.stream(turn)] == ["cancelled"]  # nothing is sent any more
    assert len(server.requests) == 1


def test_a_fast_server_waits_for_a_slow_reader(server):
    count = 5000
    data = sse(*(delta(content="x") for _ in range(count)), delta("stop"))
    with server.provider(send(data)) as provider:
        events = provider.stream(ProviderRequest(Transcript(entries=(Prompt("Hi"),))))
        assert next(events) == TextDelta("x")
        time.sleep(0.1)
        rest = list(events)
    assert sum(isinstance(event, TextDelta) for event in rest) == count - 1
    assert isinstance(rest[-1], Done)


def test_many_turns_at_once(server):
    provider = server.provider(send(sse(*HELLO), split=3))
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(Session(provider).respond("Hi").content)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == ["Grüße 😀"] * 8
