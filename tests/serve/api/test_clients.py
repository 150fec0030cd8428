"""Programs that speak OpenAI's interface, as their users write them: instructor, langchain-openai, the Node client."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import Literal

import instructor
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field


class Pet(BaseModel):
    """A pet."""

    kind: Literal["cat", "dog"]
    legs: int = Field(ge=3, le=5)


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_instructor(client, mode):
    asked = instructor.from_openai(client, mode=mode)
    pet, raw = asked.create_with_completion(
        model="tiny", messages=MESSAGES, response_model=Pet, max_retries=0, max_tokens=300, seed=1
    )
    assert isinstance(pet, Pet)
    assert raw.usage.completion_tokens > 0


def test_instructor_with_a_list_of_values(client):
    asked = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    parts = list(
        asked.create_partial(model="tiny", messages=MESSAGES, response_model=Pet, max_tokens=300, seed=1, max_retries=0)
    )
    assert parts[-1].kind in ("cat", "dog")
    assert len(parts) > 3


@pytest.fixture(scope="module")
def chat(server):
    options = {"max_retries": 0, "max_tokens": 300, "seed": 1, "stream_usage": True}
    return ChatOpenAI(model="tiny", base_url=f"{server.url}/v1", api_key=server.key, **options)


@tool
def feed(pet: Literal["cat", "dog"], meals: Literal[1, 2]) -> str:
    """Feed a pet."""
    return f"{pet} fed {meals}"


def test_langchain_answers_and_streams(chat):
    short = chat.bind(max_tokens=9)
    whole = short.invoke([HumanMessage("hi")])
    assert whole.usage_metadata["output_tokens"] == 9
    chunks = list(short.stream([HumanMessage("hi")]))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata] == [9]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structured_output(chat, method):
    assert isinstance(chat.with_structured_output(Pet, method=method).invoke("hi"), Pet)


def test_langchain_tools_there_and_back(chat):
    asked = chat.bind_tools([feed], tool_choice="feed", parallel_tool_calls=False)
    said = asked.invoke("hi")
    (call,) = said.tool_calls
    assert call["name"] == "feed"
    back = ToolMessage(feed.invoke(call["args"]), tool_call_id=call["id"])
    assert isinstance(chat.bind(max_tokens=5).invoke([HumanMessage("hi"), said, back]), AIMessage)
    streamed = None
    for chunk in asked.stream("hi"):
        streamed = chunk if streamed is None else streamed + chunk
    assert [(one["name"], one["args"]) for one in streamed.tool_calls] == [("feed", call["args"])]


def test_langchain_over_responses(server):
    chat = ChatOpenAI(
        model="tiny", base_url=f"{server.url}/v1", api_key=server.key, use_responses_api=True, max_tokens=200
    )
    assert isinstance(chat.with_structured_output(Pet).invoke("hi"), Pet)
    assert chat.bind_tools([feed], tool_choice="required", parallel_tool_calls=False).invoke("hi").tool_calls


def test_langchain_embeddings(server):
    vectors = OpenAIEmbeddings(
        model="tiny-encoder", base_url=f"{server.url}/v1", api_key=server.key, check_embedding_ctx_length=False
    ).embed_documents(["cat", "dog"])
    assert [len(vector) for vector in vectors] == [26, 26]


# --- Node -------------------------------------------------------------------------------------------------------------

SCRIPT = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.env.BASE, apiKey: process.env.KEY, maxRetries: 0 });
const ask = { model: "tiny", messages: [{ role: "user", content: "hi" }], max_tokens: 8, seed: 1 };
const whole = await client.chat.completions.create(ask);
let text = "", usage = null;
for await (const chunk of await client.chat.completions.create({
  ...ask, stream: true, stream_options: { include_usage: true } })) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
const ok = { ok: { type: "boolean" } };
const schema = { type: "object", properties: ok, required: ["ok"], additionalProperties: false };
const tools = [{ type: "function", function: { name: "feed", parameters: schema, strict: true } }];
const called = await client.chat.completions.create({ ...ask, max_tokens: 300, tools, tool_choice: "required" });
const kinds = [];
for await (const event of await client.responses.create({
  model: "tiny", input: "hi", stream: true, max_output_tokens: 200,
  text: { format: { type: "json_schema", name: "f", schema } } })) kinds.push(event.type);
const vectors = await client.embeddings.create({ model: "tiny-encoder", input: ["a", "b"] });
const models = []; for await (const model of client.models.list()) models.push(model.id);
let error = null;
try { await client.chat.completions.create({ ...ask, temperature: 3 }); }
catch (e) { error = { name: e.constructor.name, status: e.status, code: e.code, param: e.param }; }
console.log(JSON.stringify({ whole: whole.choices[0].message.content, text, tokens: usage.completion_tokens,
  calls: called.choices[0].message.tool_calls.map((c) => c.function), first: kinds[0], last: kinds.at(-1),
  widths: vectors.data.map((v) => v.embedding.length), models, error }));
"""


@pytest.fixture(scope="session")
def node_client(tmp_path_factory):
    """A folder with the Node client in it."""
    if os.environ.get("PIPPIN_OFFLINE") or shutil.which("npm") is None:
        pytest.skip("npm is not here, or the network is not to be used")
    folder = tmp_path_factory.mktemp("node")
    command = ["npm", "install", "openai@7", "--no-audit", "--no-fund", "--silent", "--prefix", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        pytest.skip("the npm registry does not answer")
    if done.returncode:
        pytest.skip(f"npm cannot install the client: {done.stderr[-200:]}")
    return folder


@pytest.mark.network
def test_node(server, node_client):
    script = node_client / "ask.mjs"
    script.write_text(SCRIPT)
    environment = os.environ | {"BASE": f"{server.url}/v1", "KEY": server.key}
    done = subprocess.run(["node", str(script)], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["text"] == told["whole"]
    assert told["tokens"] == 8
    assert {call["name"] for call in told["calls"]} == {"feed"}
    assert all(set(json.loads(call["arguments"])) == {"ok"} for call in told["calls"])
    assert (told["first"], told["last"]) == ("response.created", "response.completed")
    assert told["widths"] == [26, 26]
    assert told["models"] == ["tiny", "tiny-encoder"]
    assert told["error"] == {"name": "BadRequestError", "status": 400, "code": "invalid_value", "param": "temperature"}
