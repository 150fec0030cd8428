"""Chat messages become a transcript; OpenAI's own types are what the messages are written with."""

import pytest
from openai.types.chat import ChatCompletionMessage
from pydantic import TypeAdapter

from pippin.core.errors import InvalidRequest
from pippin.serve.api.chat import input as conversation, types
from pippin.session.transcript import Answer, Instructions, Prompt, Reasoning, ToolCalls, ToolOutput

MESSAGES = TypeAdapter(list[types.Message])


def read(*messages):
    return conversation.transcript(MESSAGES.validate_python(list(messages))).entries


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def test_each_role_has_its_entry():
    entries = read(
        {"role": "developer", "content": "Be brief."},
        {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
        {"role": "user", "content": "Hi", "name": "ann"},
        {"role": "assistant", "content": "Hello", "reasoning_content": "a greeting"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    )
    assert [type(entry) for entry in entries] == [
        Instructions, Instructions, Prompt, Reasoning, Answer, Prompt, ToolCalls, ToolOutput,
    ]  # fmt: skip
    assert [segment.text for segment in entries[5].segments] == ["one", "two"]
    assert entries[6].calls[0].arguments == {"a": 1}
    assert (entries[7].name, entries[7].text) == ("add", "2")


def test_what_the_client_read_can_be_sent_back():
    said = ChatCompletionMessage.model_validate(
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALL]}
    ).model_dump()
    assert read(said, {"role": "tool", "tool_call_id": "c1", "content": "x"})[1].name == "add"


def test_a_refusal_is_what_the_model_said():
    (entry,) = read({"role": "assistant", "content": None, "refusal": "No."})
    assert entry.text == "No."
    (entry,) = read({"role": "assistant", "content": [{"type": "refusal", "refusal": "Never."}]})
    assert entry.text == "Never."


def test_files_and_sound_are_attachments():
    (entry,) = read(
        {
            "role": "user",
            "content": [
                {"type": "file", "file": {"file_data": "data:text/plain;base64,SGk=", "filename": "note.txt"}},
                {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
            ],
        }
    )
    assert entry.text == "note.txt:\nHi"
    assert [item.media_type for item in entry.attachments] == ["text/plain", "audio/wav"]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "tool_call_id": "nobody", "content": ""}, "messages[0]"),
        ({"role": "assistant", "content": None}, "messages[0].content"),
        (
            {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "[1]"}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "{"}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "[" * 10**6}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"role": "user", "content": [{"type": "file", "file": {"file_id": "f1"}}]}, "messages[0].content[0].file"),
    ],
)
def test_what_has_no_place_in_a_conversation_is_refused(message, param):
    with pytest.raises(InvalidRequest) as caught:
        read(message)
    assert caught.value.param == param
