"""Pippin's tasks as MCP tools: in this process, as a program over standard streams, and behind the server's door."""

import asyncio
import json
import logging
import math
import os
import sys
import threading
from contextlib import asynccontextmanager
from itertools import pairwise

import httpx2
import mcp_types
import pytest
from jsonschema import Draft202012Validator
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError

from pippin.core.errors import Cancelled, ToolCallError, ToolServerError
from pippin.engine import Engine
from pippin.kits.text import TextTasks
from pippin.serve import mcp
from pippin.serve.limits import Caller
from pippin.serve.service import Service
from pippin.serve.settings import ServerSettings
from pippin.serve.task_model import TaskCancellation, TaskModel
from pippin.session import Capabilities, Provider, Session
from pippin.session.mcp_client import McpServer
from pippin.session.providers.local import LocalModel
from pippin.session.providers.provider import Done, TextDelta
from pippin.session.response import Usage

from .conftest import TinyEncoder, eventually

TEXT = "Ann Smith is 41 years old and lives in Oslo. She works as a nurse and loves her job."
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tools(model):
    return mcp.build(model, encoder=TinyEncoder())


async def called(server, name, /, **arguments):
    async with Client(server) as client:
        return await client.call_tool(name, arguments)


async def test_each_tool_says_what_it_takes_and_gives(tools):
    async with Client(tools) as client:
        listed = {tool.name: tool for tool in (await client.list_tools()).tools}
    assert set(listed) == {"ask", "extract", "classify", "embed", "summarize"}
    for tool in listed.values():
        Draft202012Validator.check_schema(tool.input_schema)
        assert tool.description
        assert all(field.get("description") for field in tool.input_schema["properties"].values())
        assert "context" not in tool.input_schema["properties"]
        assert (tool.output_schema is None) == (tool.name == "ask")


def test_the_root_logger_is_left_alone(monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    before = root.level
    mcp.build(Endless())
    assert (root.handlers, root.level) == ([], before)


async def test_ask(tools):
    result = await called(tools, "ask", prompt="What is the capital of France? Answer in one word.", max_tokens=12)
    assert not result.is_error
    assert "Paris" in result.content[0].text


async def test_extract_holds_the_schema(tools):
    result = await called(tools, "extract", text=TEXT, schema=PERSON)
    assert not result.is_error, result.content
    Draft202012Validator(PERSON).validate(result.structured_content["value"])
    assert result.structured_content["value"]["age"] == 41
    assert all(TEXT[span["start"] : span["end"]] == span["text"] for span in result.structured_content["spans"])
    assert len(result.structured_content["spans"]) == 2
    city = {"enum": ["Rome", "Oslo", "Lima"]}
    result = await called(tools, "extract", text=TEXT, schema=city, question="In which city does she live?")
    assert result.structured_content["value"] in city["enum"]


async def test_classify_gives_the_probabilities_of_the_kit(tools, model):
    labels = ["sport", "medicine", "cooking"]
    result = await called(tools, "classify", text=TEXT, labels=labels, about="the topic")
    found = result.structured_content
    assert math.isclose(sum(found["probabilities"].values()), 1, abs_tol=1e-6)
    own = TextTasks(model).classify(TEXT, labels, about="the topic")
    assert found["label"] == own.label
    assert found["probabilities"] == pytest.approx(own.probabilities, rel=1e-3)


async def test_summarize(tools):
    result = await called(tools, "summarize", text=TEXT * 2, sentences=1)
    assert result.structured_content["text"]
    assert isinstance(result.structured_content["unverified"], list)


async def test_embed(tools):
    result = await called(tools, "embed", texts=["abc", "cab", "zzz"])
    assert result.structured_content["model"] == "tiny-encoder"
    one, two, three = result.structured_content["vectors"]
    assert one == two != three
    assert math.isclose(math.hypot(*three), 1, abs_tol=1e-5)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("ask", {"prompt": ""}, "prompt"),
        ("ask", {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ("ask", {"prompt": "long " * 50_000}, "ContextOverflow"),
        ("extract", {"text": "x", "schema": {"enum": []}}, "EmptySchema"),
        ("extract", {"text": "x", "schema": {"$ref": "#/$defs/none"}}, "UndefinedReference"),
        ("extract", {"text": "x", "schema": {"type": "string", "pattern": r"(a)\1"}}, "UnsupportedGuide"),
        ("classify", {"text": "x", "labels": ["one"]}, "labels"),
        ("classify", {"text": "x", "labels": ["one", "one"]}, "InvalidArgument"),
        ("summarize", {"text": " "}, "InvalidInput"),
        ("embed", {"texts": []}, "texts"),
    ],
)
async def test_errors_are_told(tools, name, arguments, said):
    result = await called(tools, name, **arguments)
    assert result.is_error
    assert said in result.content[0].text


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_what_is_not_there_is_not_advertised_and_has_the_code_of_the_protocol(tools, mode):
    async with Client(tools, mode=mode) as client:
        has = client.server_capabilities.model_dump(exclude_none=True)
        assert set(has) == {"tools"}
        assert not has["tools"].get("list_changed")
        for ask, code in (
            (lambda: client.get_prompt("nothing"), mcp_types.INVALID_PARAMS),
            (lambda: client.call_tool("nothing", {}), mcp_types.INVALID_PARAMS),
            (lambda: client.read_resource("file:///nothing"), mcp_types.METHOD_NOT_FOUND),
            (client.list_prompts, mcp_types.METHOD_NOT_FOUND),
        ):
            with pytest.raises(MCPError) as caught:
                await ask()
            assert caught.value.error.code == code, caught.value.error
            assert "nothing" in caught.value.error.message or code == mcp_types.METHOD_NOT_FOUND


@pytest.mark.parametrize(
    ("name", "arguments", "what", "total"),
    [
        ("ask", {"prompt": "Count to ten.", "max_tokens": 12}, "tokens written", None),
        ("extract", {"text": TEXT, "schema": PERSON}, "tokens written", None),
        ("summarize", {"text": TEXT, "sentences": 1}, "tokens written", None),
        ("classify", {"text": TEXT, "labels": ["sport", "medicine"]}, "labels scored", 2),
        ("embed", {"texts": ["a", "b", "c"]}, "texts read", 3),
    ],
)
async def test_progress_is_told_to_those_who_ask_for_it(tools, name, arguments, what, total):
    told = []

    async def listen(*progress):
        told.append(progress)

    async with Client(tools, mode="legacy") as client:
        assert not (await client.call_tool(name, arguments, progress_callback=listen)).is_error
        await client.list_tools()  # what was sent before its answer has arrived before it
    counts = [count for count, _, _ in told]
    assert counts[0] == 0 < counts[-1]
    assert all(one < other for one, other in pairwise(counts))
    assert {of for _, of, _ in told} == {total}
    assert told[-1][2] == f"{counts[-1]:g} {what}"
    if total is not None:
        assert counts[-1] == total


class Endless(Provider):
    """Writes until it is told to stop."""

    name = "endless"
    capabilities = Capabilities(guided_generation=True)

    def __init__(self):
        self.began, self.ended = threading.Event(), threading.Event()

    def stream(self, turn):
        self.began.set()
        yield TextDelta("a")
        turn.cancel.wait(20)
        self.ended.set()
        yield Done("cancelled", Usage())


async def test_a_call_that_is_cancelled_ends_the_turn():
    provider = Endless()
    async with Client(mcp.build(provider)) as client:
        call = asyncio.create_task(client.call_tool("ask", {"prompt": "Go on."}))
        await asyncio.to_thread(provider.began.wait, 10)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await asyncio.to_thread(provider.ended.wait, 10)


async def test_what_a_provider_cannot_do_is_told():
    result = await called(mcp.build(Endless()), "classify", text="x", labels=["a", "b"])
    assert "UnsupportedCapability" in result.content[0].text


def test_over_standard_streams(default_model_path):
    arguments = ["-c", "from pippin.cli import main; main()", "serve", "--mcp", "--stdio", str(default_model_path)]
    wanted = ("OMP_NUM_THREADS", "PIPPIN_HOME", "PIPPIN_OFFLINE")
    environment = {name: os.environ[name] for name in wanted if name in os.environ}
    with McpServer.stdio(sys.executable, arguments, env=environment, timeout=90) as server:
        assert (server.skipped, server.loosened) == ({}, {})
        assert "private" in server.instructions
        by_name = {tool.name: tool for tool in server.tools}
        found = json.loads(by_name["extract"].call({"text": TEXT, "schema": PERSON}))
        assert found["value"]["age"] == 41
        assert [span["name"] for span in found["spans"]] == ["name", "age"]
        with pytest.raises(ToolCallError, match="EmptySchema"):
            by_name["extract"].call({"text": TEXT, "schema": {"enum": []}})


# --- behind the door --------------------------------------------------------------------------------------------------


def test_over_http_with_a_key(make_server):
    server = make_server(mcp=True)
    headers = {"Authorization": f"Bearer {server.key}"}
    with McpServer.http(f"{server.url}/mcp", headers=headers) as remote:
        by_name = {tool.name: tool for tool in remote.tools}
        said = by_name["ask"].call({"prompt": "Hello", "max_tokens": 5})
        assert len(said) <= 5
        vectors = json.loads(by_name["embed"].call({"texts": ["ab", "ba"]}))["vectors"]
        assert vectors[0] == vectors[1]
        with pytest.raises(ToolCallError, match="ContextOverflow"):
            by_name["ask"].call({"prompt": "x" * 5000})
        Session(Endless(), tools=remote.tools)
    figures = server.service.metrics.text()
    assert b'pippin_requests_total{model="tiny",outcome="complete"} 1.0' in (
        figures if isinstance(figures, bytes) else figures.encode()
    )
    with pytest.raises(ToolServerError), McpServer.http(f"{server.url}/mcp", timeout=10):
        pass
    with pytest.raises(ToolServerError), McpServer.http(f"{server.url}/mcp", headers={"Authorization": "Bearer no"}):
        pass


async def test_scored_texts_are_their_callers_and_count(tiny, monkeypatch):
    with Engine(tiny) as engine:
        expected = engine.score([1, 2, 3], [[4, 5], [6]])
    owners, score = [], Engine.score
    monkeypatch.setattr(Engine, "score", lambda *a, **k: owners.append(k["owner"]) or score(*a, **k))
    service = Service(ServerSettings(models=("tiny",), tokens_per_day=1000), load=lambda _: tiny)
    caller = Caller("key:alice", "alice")

    def work(provider):
        return provider.engine.score([1, 2, 3], [[4, 5], [6]])

    assert await service.task("", work, caller) == pytest.approx(expected, rel=1e-4)
    assert owners == ["key:alice"]
    assert service.limits.headers(caller)["x-quota-remaining-tokens"] == str(1000 - 6)
    service.close()


def test_a_task_that_was_given_up_scores_nothing(tiny):
    leash = TaskCancellation()
    leash.cancel()
    with pytest.raises(Cancelled):
        TaskModel(LocalModel(tiny), leash).engine.score([1], [[2]])


def test_a_client_that_leaves_frees_its_slot(make_server):
    server = make_server(mcp=True, max_num_seqs=1, seconds_per_token=0.01)
    headers = {"Authorization": f"Bearer {server.key}"}
    with McpServer.http(f"{server.url}/mcp", headers=headers) as remote:
        ask = next(tool for tool in remote.tools if tool.name == "ask")
        remote.timeout = 0.5
        with pytest.raises(ToolCallError, match="within"):
            ask.call({"prompt": "Hello", "max_tokens": 1900})
        eventually(lambda: server.service.active == 0, 10, "the slot")


# --- cancellation, as each version of the protocol has it -------------------------------------------------------------


@asynccontextmanager
async def endless_call(server, mode, **options):
    """A client of a server, whose endless call has begun."""
    async with (
        httpx2.AsyncClient(headers=server.headers, timeout=60) as http,
        Client(streamable_http_client(f"{server.url}/mcp", http_client=http, **options), mode=mode) as client,
    ):
        call = asyncio.create_task(client.call_tool("ask", {"prompt": "Hello", "max_tokens": 1900}))
        await asyncio.to_thread(eventually, lambda: server.service.active == 1)
        yield client, call, http


@pytest.fixture
def slow_server(make_server):
    """A server that answers one request at a time, each for as long as it is asked to."""
    return make_server(mcp=True, max_num_seqs=1, seconds_per_token=0.01)


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_a_client_cancels_over_http(slow_server, mode):
    async with endless_call(slow_server, mode) as (client, call, _):
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.to_thread(eventually, lambda: slow_server.service.active == 0)
        assert not (await client.call_tool("ask", {"prompt": "Hello", "max_tokens": 3})).is_error


@pytest.mark.parametrize("mode", ["legacy", "auto"])
async def test_a_client_that_closes_ends_its_calls(slow_server, mode):
    async with endless_call(slow_server, mode) as (_, call, _):
        pass
    await asyncio.gather(call, return_exceptions=True)
    await asyncio.to_thread(eventually, lambda: slow_server.service.active == 0)


async def test_nobody_cancels_the_call_of_another(slow_server):
    async with endless_call(slow_server, "legacy") as (_, call, http):
        headers = {"accept": "application/json, text/event-stream", "mcp-protocol-version": "2025-11-25"}
        sent = [{"method": "notifications/cancelled", "params": {"requestId": id}} for id in range(1, 9)]
        for session in ({}, {"mcp-session-id": "0" * 32}):
            for message in sent:
                answer = await http.post(
                    f"{slow_server.url}/mcp", json={"jsonrpc": "2.0"} | message, headers=headers | session
                )
                assert answer.status_code == 202
        assert slow_server.service.active == 1
        assert not call.done()
        assert (await http.get(f"{slow_server.url}/mcp", headers=headers)).status_code == 405
        many = b'{"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {"x": [' + b"[]," * 300_000 + b"[]]}}"
        answer = await http.post(f"{slow_server.url}/mcp", headers=headers, content=many)
        assert (answer.status_code, "262,144 values" in answer.text) == (413, True)


def test_without_the_switch_there_is_nothing(make_server):
    server = make_server()
    with server.client() as client:
        assert client.post("/mcp", json={}).status_code == 404
