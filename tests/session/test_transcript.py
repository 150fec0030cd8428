"""Transcripts survive JSON unchanged, and nothing else passes for one."""

import base64
import json

import pytest
from hypothesis import given, strategies as st
from pydantic import ValidationError

from pippin.core.errors import CorruptedFile, InvalidInput
from pippin.session import (
    Answer,
    Attachment,
    Instructions,
    Prompt,
    Reasoning,
    StructuredSegment,
    TextSegment,
    ToolCall,
    ToolCalls,
    ToolOutput,
    Transcript,
)

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
calls = st.builds(ToolCall, id=st.text(), name=st.text(), arguments=st.dictionaries(st.text(), json_values, max_size=3))
segments = st.one_of(
    st.builds(TextSegment, text=st.text()),
    st.builds(StructuredSegment, text=json_values.map(json.dumps), schema_name=st.text()),
    st.builds(Attachment, media_type=st.just("image/png"), data=st.binary().map(base64.b64encode), label=st.text()),
)
parts = st.lists(segments, max_size=3).map(tuple)
entries = st.one_of(
    st.builds(Instructions, segments=parts),
    st.builds(Prompt, segments=parts),
    st.builds(Reasoning, text=st.text(), signature=st.none() | st.binary().map(base64.b64encode)),
    st.builds(ToolCalls, calls=st.lists(calls, max_size=3).map(tuple), text=st.text()),
    st.builds(ToolOutput, segments=parts, call_id=st.text(), name=st.text()),
    st.builds(Answer, segments=parts),
)


@given(st.lists(entries, max_size=6))
def test_round_trip_is_lossless(items):
    transcript = Transcript(entries=tuple(items))
    text = transcript.to_json()
    assert Transcript.from_json(text) == transcript
    assert Transcript.from_json(text).to_json() == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the text"),
        ("{}x", "the text"),
        ('{"version": 1}', "version"),
        ('{"entries": [{"kind": "prompt"}]}', r"entries\.0\.prompt\.segments"),
        ('{"entries": [{"kind": "song", "text": "la"}]}', r"entries\.0"),
        ('{"entries": [{"kind": "prompt", "segments": [], "more": 1}]}', r"entries\.0\.prompt\.more"),
    ],
)
def test_what_is_no_transcript_is_refused_with_the_place(text, message):
    with pytest.raises(CorruptedFile, match=f"not a transcript: {message}"):
        Transcript.from_json(text)


def test_text_is_all_that_can_be_read():
    note = Attachment(media_type="text/plain", data=base64.b64encode("Größe 7".encode()), label="note.txt")
    picture = Attachment(media_type="image/png", data=base64.b64encode(b"\x89PNG"))
    prompt = Prompt.of(["Read this.", note, picture, StructuredSegment(text='{"a": 1.0}')])
    assert prompt.text == 'Read this.\n\nnote.txt:\nGröße 7\n\n{"a": 1.0}'
    assert prompt.attachments == (note, picture)
    assert prompt.segments[3].value == {"a": 1.0}
    assert Prompt.of("Hi") == Prompt.of(Prompt("Hi")) == Prompt.of(["Hi"]) == Prompt("Hi")


def test_a_file_becomes_an_attachment(tmp_path):
    path = tmp_path / "dot.png"
    path.write_bytes(b"\x89PNG\r\n")
    made = Attachment.from_file(path)
    assert (made.media_type, made.data, made.label, made.text) == ("image/png", b"\x89PNG\r\n", "dot.png", "")
    assert Attachment.from_file(path, label="a dot").label == "a dot"
    assert Attachment.from_file(path, label="").label == ""
    with pytest.raises(InvalidInput, match="cannot read"):
        Attachment.from_file(tmp_path / "no.png")
    with pytest.raises(InvalidInput, match=r"'thing\.qqq' tells no media type"):
        Attachment.from_file(tmp_path / "thing.qqq")


@pytest.mark.parametrize("prompt", [3, [3], None, {"a": 1}])
def test_what_is_no_prompt_is_refused(prompt):
    with pytest.raises(InvalidInput, match=r"a prompt is text|a segment of a prompt"):
        Prompt.of(prompt)


def test_text_that_cannot_all_be_decoded_is_read_with_marks_in_its_place():
    data = Attachment(media_type="application/json", data=base64.b64encode(b'{"a": 1}'))
    assert (data.is_text, data.text) == (True, '{"a": 1}'), "without a label there is no line for it"
    broken = Attachment(media_type="text/plain", data=base64.b64encode(b"caf\xe9"), label="menu")
    assert broken.text == "menu:\ncaf\ufffd"


@pytest.mark.parametrize(
    "make",
    [
        lambda: Transcript(entries=(), title="x"),
        lambda: TextSegment(text="x", role="user"),
        lambda: ToolCall(id="a", name="b", arguments={}, result="c"),
        lambda: Answer("x", mood="good"),
    ],
)
def test_a_field_that_nobody_knows_is_refused(make):
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        make()
    with pytest.raises(CorruptedFile, match="not a transcript: title"):
        Transcript.from_json('{"title": "x"}')


@pytest.mark.parametrize("kind", [Instructions, Prompt, Answer])
def test_an_entry_of_text_alone_is_one_segment(kind):
    assert kind("Hi").segments == (TextSegment(text="Hi"),)
    assert ToolOutput("3", call_id="c", name="add").segments == (TextSegment(text="3"),)


def test_a_longer_transcript_is_a_new_one_and_its_entries_come_in_order():
    first = Transcript(entries=(Instructions("Be brief."),))
    longer = first.add(Prompt("Hi"), Answer("Hello."))
    assert [entry.text for entry in longer] == ["Be brief.", "Hi", "Hello."]
    assert (len(first), len(longer)) == (1, 3)
    assert [entry.text for entry in longer.history] == ["Hi", "Hello."]


def test_a_file_of_a_transcript_is_for_people_too():
    lines = Transcript(entries=(Prompt("Hi"),)).to_json().splitlines()
    assert lines[:3] == ["{", '  "version": 2,', '  "entries": [']
