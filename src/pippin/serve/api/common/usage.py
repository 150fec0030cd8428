"""Token usage, as chat and text completions report it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from pippin.session.response import Usage


class PromptDetails(BaseModel):
    """Details of the prompt's tokens."""

    cached_tokens: int


class CompletionDetails(BaseModel):
    """Details of the answer's tokens; with speculative decoding, the drafted tokens that were accepted and rejected."""

    reasoning_tokens: int
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class CompletionUsage(BaseModel):
    """Input and output tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


def usage(used: Usage) -> dict[str, Any]:
    """Token usage in the format of the API."""
    guessed = {}
    if used.drafted_tokens:
        wrong = used.drafted_tokens - used.accepted_tokens
        guessed = {"accepted_prediction_tokens": used.accepted_tokens, "rejected_prediction_tokens": wrong}
    return {
        "prompt_tokens": used.input_tokens,
        "completion_tokens": used.output_tokens,
        "total_tokens": used.input_tokens + used.output_tokens,
        "prompt_tokens_details": {"cached_tokens": used.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": used.reasoning_tokens, **guessed},
    }
