"""The tools of real MCP servers, as programs and over HTTP; and of servers that hang, die, lie or talk nonsense."""

import json
import sys
import threading
import time

import psutil
import pytest
import uvicorn

from pippin.core.errors import InvalidArgument, InvalidTool, ToolCallError, ToolServerError
from pippin.session import Capabilities, Provider, Session
from pippin.session.mcp_client import McpServer
from pippin.session.providers.provider import Done, TextDelta, ToolCallsMade
from pippin.session.transcript import ToolCall, ToolOutput

SERVER = '''
import os, sys, time
from typing import Annotated, Literal
from pydantic import BaseModel
from mcp.server.mcpserver import Elicit, Image, MCPServer, Resolve
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("kitchen", instructions="A kitchen.")

class Dish(BaseModel):
    name: str
    minutes: int

@server.tool()
def cook(dish: Literal["soup", "pie"], servings: int = 2) -> str:
    """Cook a   dish."""
    return f"{servings} {dish}"

@server.tool(name="look.up.all")
def look_up(name: str) -> Dish:
    return Dish(name=name, minutes=3)

@server.tool()
def picture() -> list:
    return ["Look:", Image(data=b"\\x89PNG", format="png")]

@server.tool()
def menu() -> list[str]:
    return ["soup", "pie"]

@server.tool()
def count(dish: str) -> int:
    return len(dish)

class Table(BaseModel):
    guests: int
    name: str = "Ann"

def ask_for_table() -> Elicit[Table]:
    return Elicit("How many are you?", Table)

@server.tool()
def reserve(table: Annotated[Table, Resolve(ask_for_table)]) -> str:
    return f"{table.guests} guests, {table.name}"

@server.tool()
def burn() -> str:
    raise ToolError("it burnt")

@server.tool()
def environment() -> str:
    return os.environ.get("SECRET", "none") + os.environ.get("GIVEN", "none") + os.getcwd()

@server.tool()
def hang() -> str:
    time.sleep(60)
    return "late"

@server.tool()
def die() -> str:
    os._exit(3)
'''

# Speaks the protocol by hand; what it does with a list of tools is up to the test.
BY_HAND = """
import json, sys, time
for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    answer = {"jsonrpc": "2.0", "id": message["id"]}
    if message["method"] == "initialize":
        info = {"name": "hand", "version": "1"}
        version = message["params"]["protocolVersion"]
        answer["result"] = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
    elif message["method"] == "tools/list":
        LIST
    else:
        answer["error"] = {"code": -32601, "message": "unknown"}
    print(json.dumps(answer), flush=True)
"""


STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
time.sleep(60)
"""


def program(tmp_path, code, **arguments):
    path = tmp_path / "server.py"
    path.write_text(code)
    return McpServer.stdio(sys.executable, [str(path)], **arguments)


def by_hand(tmp_path, *tools, **arguments):
    return program(tmp_path, BY_HAND.replace("LIST", f"answer['result'] = {{'tools': {list(tools)!r}}}"), **arguments)


def children():
    return {process.pid for process in psutil.Process().children(recursive=True)}


@pytest.fixture(scope="module")
def kitchen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kitchen")
    environment = {"GIVEN": "given "}
    code = SERVER + '\nserver.run("stdio")\n'
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRET", "leaked")
        with program(folder, code, env=environment, cwd=folder, timeout=60) as server:
            yield server


def tool(server, name):
    return next(each for each in server.tools if each.name == name)


def test_tools_of_a_program(kitchen):
    assert [each.name for each in kitchen.tools][:3] == ["cook", "look_up_all", "picture"]
    assert kitchen.instructions == "A kitchen."
    assert (kitchen.skipped, kitchen.loosened) == ({}, {})
    assert "10 tools" in repr(kitchen)
    cook = tool(kitchen, "cook")
    assert cook.description == "Cook a dish."
    assert cook.schema.is_valid('{"dish": "pie", "servings": 3}')
    assert not cook.schema.is_valid('{"dish": "pie", "servings": 3, "more": 1}')
    assert not cook.schema.is_valid('{"dish": "cake"}')
    assert cook.call({"dish": "pie", "servings": 3}) == "3 pie"
    assert cook(dish="soup") == "2 soup"
    assert json.loads(tool(kitchen, "look_up_all").call({"name": "jam"})) == {"name": "jam", "minutes": 3}
    assert tool(kitchen, "picture").call({}) == "Look:\n\n[image of type image/png, which cannot be shown here]"
    assert [each.name for each in kitchen.refresh()] == [each.name for each in kitchen.tools]


def test_results_are_what_they_are(kitchen):
    assert tool(kitchen, "menu")() == ["soup", "pie"]
    assert json.loads(tool(kitchen, "menu").call({})) == ["soup", "pie"]
    assert tool(kitchen, "count")(dish="pie") == 3
    assert tool(kitchen, "look_up_all")(name="jam") == {"name": "jam", "minutes": 3}
    assert tool(kitchen, "cook")(dish="pie") == "2 pie"
    provider = Scripted(ToolCall(id="1", name="menu", arguments={}))
    assert Session(provider, tools=kitchen.tools).respond("What is there?").content == 'It is ["soup","pie"].'


# Asks its user in the middle of a call, as servers did until protocol 2025-11-25.
ASKING = """
import json, sys
def send(**message):
    print(json.dumps({"jsonrpc": "2.0"} | message), flush=True)
fields = {"guests": {"type": "integer"}, "name": {"type": "string", "default": "Ann"}}
question = {"message": "How many are you?", "requestedSchema": {"type": "object", "properties": fields}}
for line in sys.stdin:
    message = json.loads(line)
    if message.get("method") == "initialize":
        able = message["params"]["capabilities"]
        result = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}}
        send(id=message["id"], result=result | {"serverInfo": {"name": "hand", "version": "1"}})
    elif message.get("method") == "tools/list":
        send(id=message["id"], result={"tools": [{"name": "reserve", "inputSchema": {"type": "object"}}]})
    elif message.get("method") == "tools/call":
        call = message["id"]
        send(id="question", method="elicitation/create", params=question)
    elif message.get("id") == "question":
        said = {"able": "elicitation" in able, "answer": message.get("result"), "error": message.get("error")}
        send(id=call, result={"content": [{"type": "text", "text": json.dumps(said)}]})
    elif "id" in message:
        send(id=message["id"], error={"code": -32601, "message": "unknown"})
"""


def answer_slowly(asked):
    time.sleep(1.5)
    return {"guests": 3}


def fail(asked):
    raise RuntimeError("no user")


@pytest.mark.parametrize(
    ("on_elicit", "answer"),
    [
        (lambda asked: {"guests": 3}, {"action": "accept", "content": {"guests": 3, "name": "Ann"}}),
        (lambda asked: {"guests": 3, "name": "Bob"}, {"action": "accept", "content": {"guests": 3, "name": "Bob"}}),
        (lambda asked: None, {"action": "decline"}),
        (fail, {"action": "decline"}),
        (answer_slowly, {"action": "accept", "content": {"guests": 3, "name": "Ann"}}),
    ],
)
def test_what_a_server_asks_is_answered(tmp_path, on_elicit, answer):
    asked = []

    def listen(question):
        asked.append(question)
        return on_elicit(question)

    with program(tmp_path, ASKING, timeout=20, on_elicit=listen) as server:
        server.timeout = 1.0
        assert json.loads(tool(server, "reserve")()) == {"able": True, "answer": answer, "error": None}
    (question,) = asked
    assert (question.message, question.url) == ("How many are you?", None)
    assert set(question.schema["properties"]) == {"guests", "name"}


def test_without_a_callback_nobody_is_asked(tmp_path, kitchen):
    with program(tmp_path, ASKING, timeout=20) as server:
        told = json.loads(tool(server, "reserve")())
    assert (told["able"], told["answer"]) == (False, None)
    assert "not supported" in told["error"]["message"]
    with pytest.raises(ToolCallError, match="elicitation"):
        tool(kitchen, "reserve").call({})


def test_elicitation_of_the_newest_protocol(tmp_path):
    code = SERVER + '\nserver.run("stdio")\n'
    with program(tmp_path, code, timeout=60, on_elicit=lambda asked: {"guests": 4}) as server:
        assert tool(server, "reserve")() == "4 guests, Ann"
    with (
        program(tmp_path, code, timeout=60, on_elicit=lambda asked: False) as server,
        pytest.raises(ToolCallError, match="decline"),
    ):
        tool(server, "reserve").call({})


def test_a_program_sees_only_what_it_was_given(kitchen, tmp_path_factory):
    assert tool(kitchen, "environment").call({}).startswith("nonegiven ")
    assert "kitchen" in tool(kitchen, "environment").call({})


def test_a_tool_that_fails_and_arguments_that_do_not_fit(kitchen):
    with pytest.raises(ToolCallError, match="it burnt") as caught:
        tool(kitchen, "burn").call({})
    assert caught.value.tool == "burn"
    with pytest.raises(ToolCallError, match="do not fit"):
        tool(kitchen, "cook").call({"dish": "cake"})


def test_many_calls_at_once(kitchen):
    cook, results = tool(kitchen, "cook"), []
    threads = [
        threading.Thread(target=lambda n=n: results.append(cook.call({"dish": "pie", "servings": n}))) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == sorted(f"{n} pie" for n in range(8))


class Scripted(Provider):
    """Calls one tool, then says what it returned."""

    name = "scripted"
    capabilities = Capabilities(tool_calling=True)

    def __init__(self, call):
        self.call = call

    def stream(self, turn):
        last = turn.transcript.entries[-1]
        if isinstance(last, ToolOutput):
            yield TextDelta(f"It is {last.text}.")
            yield Done("stop")
        else:
            yield ToolCallsMade((self.call,))
            yield Done("tool_calls")


def test_a_session_uses_them(kitchen):
    provider = Scripted(ToolCall(id="1", name="cook", arguments={"dish": "soup", "servings": 4}))
    assert Session(provider, tools=kitchen.tools).respond("Cook!").content == "It is 4 soup."


def test_a_server_that_hangs_in_a_call_and_then_dies(tmp_path):
    before = children()
    with program(tmp_path, SERVER + '\nserver.run("stdio")\n', timeout=30) as server:
        hang, die, cook = (tool(server, name) for name in ("hang", "die", "cook"))
        server.timeout = 0.3
        began = time.monotonic()
        with pytest.raises(ToolCallError, match=r"did not answer the call of 'hang' within 0\.3 seconds") as caught:
            hang.call({})
        assert isinstance(caught.value.cause, ToolServerError)
        assert time.monotonic() - began < 5
        server.timeout = 10
        with pytest.raises(ToolCallError, match="did not answer the call of 'die'"):
            die.call({})
        with pytest.raises(ToolCallError, match="did not answer the call of 'cook'"):
            cook.call({"dish": "soup"})
        with pytest.raises(ToolServerError, match="list its tools"):
            server.refresh()
    with pytest.raises(ToolCallError, match="is closed"):
        cook.call({"dish": "soup"})
    assert children() <= before


@pytest.mark.parametrize(
    ("code", "timeout", "match"),
    [
        ("import time; time.sleep(60)", 0.5, r"not ready within 0\.5 seconds"),
        (STUBBORN, 2, "not ready within 2 seconds"),
        ("import sys; sys.exit('no key: set KITCHEN_KEY')", 20, "it said: no key: set KITCHEN_KEY"),
        ("print('hello, I speak no JSON', flush=True)\nimport time; time.sleep(60)", 1, "not ready"),
        (BY_HAND.replace("LIST", "time.sleep(60)"), 2, "not ready"),
        (BY_HAND.replace("LIST", "sys.exit('list?')"), 20, "it said: list?"),
        (BY_HAND.replace("LIST", "answer['result'] = {'tools': [3]}"), 20, "ValidationError"),
        (BY_HAND.replace("LIST", "answer['result'] = {'tools': [], 'nextCursor': 'again'}"), 20, "more than 100 pages"),
    ],
)  # fmt: skip
def test_programs_that_are_no_good_servers(tmp_path, code, timeout, match):
    before, began = children(), time.monotonic()
    server = program(tmp_path, code, timeout=timeout)
    with pytest.raises(ToolServerError, match=match), server:
        pass
    assert time.monotonic() - began < timeout + 12
    assert children() <= before  # not even one that hears no signal, nor what it has started


def test_a_program_that_is_not_ready_in_time_is_not_given_more(tmp_path):
    mark = tmp_path / "asked to end"
    code = f"import pathlib, sys; sys.stdin.read(); pathlib.Path({str(mark)!r}).touch()"
    with pytest.raises(ToolServerError, match="not ready"), program(tmp_path, code, timeout=2):
        pass
    assert not mark.exists()


def test_a_program_that_is_not_there():
    with pytest.raises(ToolServerError, match="no-such-program"), McpServer.stdio("no-such-program"):
        pass


def schema(**properties):
    return {"type": "object", "properties": properties}


def test_schemas_that_cannot_be_held(tmp_path):
    tools = [
        {"name": "a b", "inputSchema": schema(url={"type": "string", "format": "color"}, format={"type": "integer"})},
        {"name": "a.b", "inputSchema": schema(x={"type": "array", "uniqueItems": True, "items": {"format": "color"}})},
        {"name": "a/b", "description": "d", "inputSchema": {**schema(x={"$dynamicRef": "#x"}), "$id": "urn:x"}},
        {
            "name": "empty",
            "inputSchema": {**schema(x={"type": "integer", "minimum": 1, "maximum": 0}), "required": ["x"]},
        },
        {"name": "named", "inputSchema": {**schema(), "required": ["x"]}},
        {"name": "x" * 100, "inputSchema": {"type": "object", "additionalProperties": {"type": "integer"}}},
        {"name": "größe", "title": "Size", "inputSchema": {"type": "object"}},
    ]
    with by_hand(tmp_path, *tools, prefix="my-", timeout=20) as server:
        assert [each.name for each in server.tools] == ["my-a_b", "my-a_b_2", "my-named", "my-" + "x" * 61, "my-gr_e"]
        assert server.loosened == {}  # a format without a definition is ignored
        assert set(server.skipped) == {"a/b", "empty"}
        first, second, named, third, fourth = server.tools
        assert first.schema.is_valid('{"url": "anything", "format": 3}')
        assert not first.schema.is_valid('{"url": 3}')
        assert second.schema.is_valid('{"x": [1, 2]}')
        assert not second.schema.is_valid('{"x": [1, 1]}')
        assert named.schema.is_valid('{"x": 1}')
        assert third.schema.is_valid('{"free": 3}')
        assert fourth.description == "Size"
        with pytest.raises(ToolCallError, match="unknown"):
            fourth.call({})


def test_two_servers_of_one_kind_need_a_prefix(tmp_path):
    listed = {"name": "t", "inputSchema": schema()}
    with by_hand(tmp_path, listed) as one, by_hand(tmp_path, listed, prefix="b_") as two:
        assert [each.name for each in (*one.tools, *two.tools)] == ["t", "b_t"]
        Session(Scripted(None), tools=[*one.tools, *two.tools])
        with pytest.raises(InvalidTool):
            Session(Scripted(None), tools=[*one.tools, *one.tools])
        with pytest.raises(InvalidArgument, match="in use"), one:
            pass


# --- over HTTP --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address():
    """The same kitchen, served over streamable HTTP to those who know the word."""
    from starlette.responses import PlainTextResponse

    space: dict = {}
    exec(SERVER.replace("server.run", "#"), space)
    app = space["server"].streamable_http_app()

    async def guarded(scope, receive, send):
        if scope["type"] == "http" and (b"authorization", b"Bearer word") not in scope["headers"]:
            await PlainTextResponse("who are you?", 401)(scope, receive, send)
        else:
            await app(scope, receive, send)

    config = uvicorn.Config(guarded, port=0, log_level="critical", ws="none", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/mcp"
    server.should_exit = True
    thread.join()


def test_tools_over_http(address):
    with McpServer.http(address, headers={"Authorization": "Bearer word"}) as server:
        assert tool(server, "cook").call({"dish": "pie"}) == "2 pie"
        with pytest.raises(ToolCallError, match="it burnt"):
            tool(server, "burn").call({})
        provider = Scripted(ToolCall(id="1", name="cook", arguments={"dish": "soup"}))
        assert Session(provider, tools=server.tools).respond("Cook!").content == "It is 2 soup."


def test_a_server_that_does_not_know_us(address):
    with pytest.raises(ToolServerError) as caught, McpServer.http(address, headers={"Authorization": "Bearer no-word"}):
        pass
    assert "no-word" not in str(caught.value)


def test_nobody_at_that_address():
    began = time.monotonic()
    with pytest.raises(ToolServerError), McpServer.http("http://127.0.0.1:9/mcp", timeout=5):
        pass
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    "make",
    [
        lambda: McpServer.http("file:///etc/passwd"),
        lambda: McpServer.http("http://me:word@host/mcp"),
        lambda: McpServer.http("http://host:port"),
        lambda: McpServer.stdio("x", timeout=0),
        lambda: McpServer.stdio("x", prefix="a b"),
    ],
)
def test_arguments_that_cannot_be(make):
    with pytest.raises(InvalidArgument):
        make()
