"""Transcripts survive JSON unchanged, and nothing else passes for one."""

import pytest
from hypothesis import given, strategies as st

from pippin.core.errors import CorruptedFile
from pippin.session import Answer, Instructions, Prompt, ToolCall, ToolCalls, ToolOutput, Transcript

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
entries = st.one_of(
    st.builds(Instructions, text=st.text()),
    st.builds(Prompt, text=st.text()),
    st.builds(ToolCalls, calls=st.lists(calls, max_size=3).map(tuple), text=st.text()),
    st.builds(ToolOutput, call_id=st.text(), name=st.text(), text=st.text()),
    st.builds(Answer, text=st.text()),
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
        ('{"version": 2}', "version"),
        ('{"entries": [{"kind": "prompt"}]}', r"entries\.0\.prompt\.text"),
        ('{"entries": [{"kind": "song", "text": "la"}]}', r"entries\.0"),
        ('{"entries": [{"kind": "prompt", "text": "a", "more": 1}]}', r"entries\.0\.prompt\.more"),
    ],
)
def test_what_is_no_transcript_is_refused_with_the_place(text, message):
    with pytest.raises(CorruptedFile, match=f"not a transcript: {message}"):
        Transcript.from_json(text)
