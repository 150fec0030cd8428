"""Request and response types of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pippin.serve.api.common.fields import (
    MOST_CHOICES,
    Format,
    Penalties,
    PriorityFields,
    Several,
    StreamOptions,
    TokenIds,
)
from pippin.serve.api.common.usage import CompletionUsage

MOST_PROMPTS = 256


class CompletionRequest(Penalties, PriorityFields):
    """Plain text to continue, without a chat template."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "smollm2-135m", "prompt": "Once upon a time", "max_tokens": 16}]}
    )

    model: str | None = Field(None, description="NAME or NAME:ADAPTER; None is the server's default.")
    prompt: (
        str
        | Annotated[Several[str], Field(min_length=1, max_length=MOST_PROMPTS)]
        | TokenIds
        | Annotated[Several[TokenIds], Field(min_length=1, max_length=MOST_PROMPTS)]
        | None
    ) = Field(None, description="Text, token ids, or several of either. Control tokens in text count as such.")
    suffix: str | None = Field(None, description="Refused: no model here fills in the middle.")
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        None, description="Longest answer in tokens; None is 16. 0 with echo and logprobs only scores the prompt."
    )
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    best_of: Annotated[int, Field(ge=1, le=20)] | None = Field(
        None, description="So many are written, the n likeliest (by the mean log-probability of a token) are returned."
    )
    echo: bool | None = Field(None, description="Begin the text with the prompt.")
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        None, description="How many likeliest tokens to report with each token; with echo for the prompt's as well."
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: Format | None = Field(None, description="What the text must look like. Not in OpenAI's interface.")
    user: str | None = None


class CompletionLogprobs(BaseModel):
    """The tokens of a text; the first of an echoed prompt has no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One generated text."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "content_filter"]


class Completion(BaseModel):
    """The texts of all prompts, n for each, in the prompts' order."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: CompletionUsage
    service_tier: str | None = None


STREAM: dict[str, Any] = {
    "text/event-stream": {
        "schema": {"type": "string", "description": "Events, where the request says `stream: true`."},
        "example": 'data: {"id":"cmpl-…","object":"text_completion",…}\n\ndata: [DONE]\n\n',
    }
}
