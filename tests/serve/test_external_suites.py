"""Suites and agents of others, for `make nightly`: MCP's conformance cases, LiteLLM, OpenAI's Agents SDK."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys

import pytest

from pippin.serve.app import create_app
from pippin.serve.settings import ServerSettings

from .conftest import start

pytestmark = pytest.mark.nightly

# of the cases of @modelcontextprotocol/conformance those that ask for no tool, prompt or resource of its own server
SERVER_CASES = (
    "server-initialize",
    "ping",
    "tools-list",
    "server-sse-multiple-streams",
    "dns-rebinding-protection",
)
CLIENT_CASES = ("initialize", "tools_call", "elicitation-sep1034-client-defaults", "sse-retry")


@pytest.fixture(scope="module")
def served(default_model_path):
    """A server of the default model without keys, with MCP."""
    running = start(create_app(ServerSettings(models=(f"small={default_model_path}",), port=0, mcp=True)), key="none")
    yield running
    running.stop()


# --- MCP --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def conformance(tmp_path_factory):
    """The command of MCP's conformance suite, which needs a Node of its own."""
    if os.environ.get("PIPPIN_OFFLINE") or shutil.which("npm") is None:
        pytest.skip("npm is not here, or the network is not to be used")
    folder = tmp_path_factory.mktemp("conformance")
    wanted = ("@modelcontextprotocol/conformance@0.1", "node@22")
    command = ["npm", "install", *wanted, "--no-audit", "--no-fund", "--silent", "--prefix", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        pytest.skip(f"npm cannot install the suite: {done.stderr[-200:]}")
    modules = folder / "node_modules"
    return [modules / ".bin" / "node", modules / "@modelcontextprotocol" / "conformance" / "dist" / "index.js"]


def passes(*command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert ", 0 failed" in said
    assert "Passed: 0/0" not in said


@pytest.mark.network
@pytest.mark.parametrize("case", SERVER_CASES)
def test_the_mcp_server_conforms(served, conformance, case):
    passes(*conformance, "server", "--url", f"{served.url}/mcp", "--scenario", case)


CLIENT = """
import sys
from pippin.session.mcp_client import McpServer

with McpServer.http(sys.argv[-1], timeout=30, on_elicit=lambda asked: {}) as server:
    for tool in server.tools:
        tool.call({"a": 2, "b": 3} if tool.name == "add_numbers" else {})
"""


@pytest.mark.network
@pytest.mark.parametrize("case", CLIENT_CASES)
def test_the_mcp_client_conforms(conformance, tmp_path, case):
    script = tmp_path / "client.py"
    script.write_text(CLIENT)
    passes(*conformance, "client", "--command", f"{sys.executable} {script}", "--scenario", case)


# --- OpenAI's API -----------------------------------------------------------------------------------------------------


def told(package, script, url):
    """What a program prints as JSON that uses a package of the extra `nightly`, in a process of its own."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; it is in the extra nightly")
    environment = os.environ | {"BASE": f"{url}/v1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


LITELLM = """
import json, os
import litellm

to = {"model": "openai/small", "api_base": os.environ["BASE"], "api_key": "none", "num_retries": 0}
hi = [{"role": "user", "content": "Hello"}]
short = {"max_tokens": 8, "temperature": 0}
whole = litellm.completion(messages=hi, **short, **to)
chunks = litellm.completion(messages=hi, stream=True, **short, **to)
streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
parameters = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
call = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
(called,) = litellm.completion(messages=hi, **call, **to).choices[0].message.tool_calls
errors = []
for more in ({"messages": [{"role": "user", "content": "hello " * 20000}]}, {"messages": hi, "temperature": 3}):
    try:
        litellm.completion(**more, **to)
    except Exception as error:
        errors.append(type(error).__name__)
print(json.dumps({"whole": whole.choices[0].message.content, "tokens": whole.usage.completion_tokens,
    "streamed": streamed, "call": [called.function.name, json.loads(called.function.arguments)], "errors": errors}))
"""


def test_litellm(served):
    found = told("litellm", LITELLM, served.url)
    assert found["streamed"] == found["whole"]
    assert found["tokens"] == 8
    assert (found["call"][0], found["call"][1]["city"] in ("Oslo", "Rome")) == ("weather", True)
    assert found["errors"] == ["ContextWindowExceededError", "BadRequestError"]


AGENTS = """
import asyncio, json, os
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from agents import set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=os.environ["BASE"], api_key="none", max_retries=0)
called = []

@function_tool
def weather(city: str) -> str:
    called.append(city)
    return f"sunny in {city}"

class City(BaseModel):
    name: str

async def main():
    told = {}
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model="small", openai_client=client)
        short = ModelSettings(max_tokens=60, temperature=0)
        plain = Agent(name="plain", instructions="Be brief.", model=model, model_settings=short)
        text = (await Runner.run(plain, "Hello")).final_output
        streamed = Runner.run_streamed(plain, "Hello")
        async for _ in streamed.stream_events():
            pass
        called.clear()
        must = ModelSettings(max_tokens=60, temperature=0, tool_choice="required", parallel_tool_calls=False)
        asked = Agent(name="asked", model=model, tools=[weather], model_settings=must)
        await Runner.run(asked, "How is the weather in Oslo?", max_turns=4)
        typed = Agent(name="typed", model=model, output_type=City, model_settings=short)
        city = (await Runner.run(typed, "Name a city.")).final_output
        told[kind.__name__] = [bool(text), streamed.final_output == text, len(called), type(city).__name__]
    print(json.dumps(told))

asyncio.run(main())
"""


def test_openai_agents(served):
    found = told("agents", AGENTS, served.url)
    assert set(found) == {"OpenAIChatCompletionsModel", "OpenAIResponsesModel"}
    assert all(one == [True, True, 1, "City"] for one in found.values()), found
