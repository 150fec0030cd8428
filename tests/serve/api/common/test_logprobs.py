"""Tokens as text, bytes and numbers; OpenAI's own types read them."""

import json
import math

from hypothesis import given, strategies as st
from openai.types import CompletionChoice
from openai.types.chat.chat_completion import ChoiceLogprobs

from pippin.engine.request import Token
from pippin.serve.api.common.logprobs import IMPOSSIBLE, chat_logprobs, completion_logprobs, token_text


@given(st.binary(max_size=8))
def test_text_is_kept_and_no_byte_is_lost(data):
    text = token_text(data)
    try:
        assert data.decode() == text
    except UnicodeDecodeError:
        assert "\\x" in text


def test_a_broken_character_shows_its_bytes(tiny):
    first, second = tiny.tokenizer.encode("é")
    tokens = [Token(first, "", -0.5, ((first, -0.5), (second, -1.0))), Token(second, "é", -math.inf)]
    entries = chat_logprobs(tiny.tokenizer, tokens)
    parsed = ChoiceLogprobs.model_validate({"content": entries, "refusal": None})
    assert [entry.bytes for entry in parsed.content] == [[0xC3], [0xA9]]
    assert [entry.token for entry in parsed.content] == ["\\xc3", "\\xa9"]
    assert parsed.content[1].logprob == IMPOSSIBLE
    assert [(top.bytes, top.logprob) for top in parsed.content[0].top_logprobs] == [([0xC3], -0.5), ([0xA9], -1.0)]
    json.dumps(entries, allow_nan=False)


def test_offsets_point_at_the_tokens(tiny):
    text = "aé€c"
    ids = tiny.tokenizer.encode(text)
    tokens = [Token(id, "", None if at == 0 else -1.0) for at, id in enumerate(ids)]
    found = completion_logprobs(tiny.tokenizer, tokens, 10)
    assert found["tokens"] == ["a", "\\xc3", "\\xa9", "\\xe2", "\\x82", "\\xac", "c"]
    assert found["text_offset"] == [10, 11, 11, 12, 12, 12, 13]  # of the character that a byte belongs to
    assert found["token_logprobs"] == [None] + [-1.0] * 6
    assert found["top_logprobs"] == [None] + [{}] * 6
    # OpenAI's type knows no None, though its server sends it for the first token of an echoed prompt
    rest = {name: values[1:] for name, values in found.items()}
    CompletionChoice.model_validate({"index": 0, "text": text, "finish_reason": "stop", "logprobs": rest})
