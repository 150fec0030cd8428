"""The same session over the engine of this process and over our own server: answers, transcripts, errors."""

import json
import re
from typing import Literal

import pytest
from pydantic import BaseModel, Field

import pippin
from pippin.cli import main
from pippin.core.errors import (
    AuthenticationFailed,
    Cancelled,
    ContextOverflow,
    InvalidArgument,
    ModelNotFound,
    UnsupportedCapability,
)
from pippin.session import GenerationOptions, Session
from pippin.session.providers.openai import OpenAIProvider

FEW = GenerationOptions(max_tokens=12)


class Mood(BaseModel):
    name: Literal["Ada", "Bob"]
    happy: bool
    score: int = Field(ge=0, le=9)


@pippin.tool
def look(where: Literal["up", "down"]) -> str:
    """Look somewhere."""
    return f"nothing {where} there"


@pytest.fixture
def server(make_server):
    # a server of its own for each test: what is cached changes the last bits of the logits, and weights that are random
    # know many ties
    return make_server(models=("tiny",))


@pytest.fixture
def provider(server):
    with OpenAIProvider(f"{server.url}/v1", "tiny", api_key=server.key) as made:
        yield made


def written(transcript):
    """A transcript as JSON, its calls numbered as they come: the ids of a server are its own."""
    text = transcript.to_json()
    for number, id in enumerate(dict.fromkeys(re.findall(r"call_\w+", text))):
        text = re.sub(rf"\b{id}\b", f"call {number}", text)
    return json.loads(text)


@pytest.mark.parametrize(
    ("request_", "tools"),
    [
        ({"options": FEW}, []),
        ({"options": GenerationOptions(max_tokens=20, temperature=1.0, seed=7, stop=["q"])}, []),
        ({"generating": Mood, "options": GenerationOptions(max_tokens=100)}, []),
        ({"options": GenerationOptions(max_tokens=120, tool_calling="required", parallel_tool_calls=False)}, [look]),
    ],
    ids=["text", "sampled", "typed", "tools"],
)
def test_the_transcript_is_the_same_as_that_of_this_process(provider, tiny, request_, tools):
    here = Session(tiny, instructions="Be brief.", tools=tools)
    there = Session(provider, instructions="Be brief.", tools=tools)
    mine, theirs = here.respond("Who?", **request_), there.respond("Who?", **request_)
    assert theirs.content == mine.content
    assert written(there.transcript) == written(here.transcript)
    assert theirs.usage.output_tokens == mine.usage.output_tokens
    assert theirs.finish_reason == mine.finish_reason


def test_snapshots_come_over_the_network(provider):
    stream = Session(provider).stream("Who?", generating=Mood, options=GenerationOptions(max_tokens=100))
    snapshots = [snapshot.content for snapshot in stream]
    assert len(snapshots) > 5
    assert snapshots[-1] == stream.response.content


def test_cancelling_frees_the_slot(provider, server):
    stream = Session(provider).stream("Tell me", options=GenerationOptions(max_tokens=1500))
    next(stream)
    stream.cancel()
    with pytest.raises(Cancelled):
        for _ in stream:
            pass
    assert Session(provider).respond("Again", options=FEW).content


def test_errors_keep_their_kind(provider, server):
    with pytest.raises(ContextOverflow) as caught:
        Session(provider).respond("a" * 3000, options=FEW)
    assert caught.value.context_size == 2048 < caught.value.token_count
    with pytest.raises(UnsupportedCapability, match="no reasoning"):
        Session(provider).respond("Hi", options=GenerationOptions(reasoning="light"))
    with (
        OpenAIProvider(f"{server.url}/v1", "tiny", api_key="wrong") as stranger,
        pytest.raises(AuthenticationFailed),
    ):
        Session(stranger).respond("Hi")
    with OpenAIProvider(f"{server.url}/v1", "huge", api_key=server.key) as other, pytest.raises(ModelNotFound):
        Session(other).respond("Hi")


def test_the_command_asks_an_address(server, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PIPPIN_API_KEY", server.key)
    monkeypatch.setattr("sys.stdin", None)
    schema = tmp_path / "mood.json"
    schema.write_text(json.dumps(Mood.model_json_schema()))
    words = ["ask", "Who?", "--url", f"{server.url}/v1", "--model", "tiny", "--schema", str(schema), "--json"]
    assert main(words) == 0
    said = json.loads(capsys.readouterr().out)
    assert Mood.model_validate(said["content"])
    assert main([*words, "--device", "cpu", "--kv-cache-dtype", "int8"]) == 2
    assert "--device, --kv-cache-dtype: only for local models; leave out with" in capsys.readouterr().err
    with pytest.raises(InvalidArgument):
        OpenAIProvider("ftp://example", "tiny")
