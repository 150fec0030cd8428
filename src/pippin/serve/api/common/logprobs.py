"""Log-probabilities of tokens in the two formats of OpenAI's API."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from typing import Any, Final

from pippin.data.text.tokenizer import Tokenizer
from pippin.engine.request import Token

# JSON has no minus infinity; OpenAI writes this.
IMPOSSIBLE: Final = -9999.0


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[Token]) -> list[dict[str, Any]]:
    """One entry for each token, with the most likely alternatives."""
    return [
        _entry(tokenizer, token.id, token.logprob)
        | {"top_logprobs": [_entry(tokenizer, id, logprob) for id, logprob in token.top_logprobs]}
        for token in tokens
    ]


def completion_logprobs(tokenizer: Tokenizer, tokens: Sequence[Token], start: int) -> dict[str, Any]:
    """Four parallel lists; ``start`` is the number of characters before the first token.

    A token without a log-probability (the first of an echoed prompt) has None. A token that is a part of a character
    has the offset of the character.
    """
    found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in tokens:
        data = tokenizer.token_bytes(token.id)
        known = token.logprob is not None
        best = {token_text(tokenizer.token_bytes(id)): number(logprob) for id, logprob in token.top_logprobs}
        found["tokens"].append(token_text(data))
        found["token_logprobs"].append(number(token.logprob) if token.logprob is not None else None)
        found["top_logprobs"].append(best if known else None)
        found["text_offset"].append(start)
        start += len(decoder.decode(data))
    return found


def token_text(data: bytes) -> str:
    r"""A token as text; bytes that are not a whole character are escaped.

    >>> token_text("é".encode()), token_text(b"\xc3")
    ('é', '\\xc3')
    """
    return data.decode("utf-8", "backslashreplace")


def number(logprob: float) -> float:
    """A log-probability that JSON can represent."""
    return logprob if math.isfinite(logprob) else IMPOSSIBLE


def _entry(tokenizer: Tokenizer, id: int, logprob: float | None) -> dict[str, Any]:
    data = tokenizer.token_bytes(id)
    return {
        "token": token_text(data),
        "logprob": IMPOSSIBLE if logprob is None else number(logprob),
        "bytes": list(data),
    }
