"""Request and response types of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pippin.serve.api.common.body import RequestPart
from pippin.serve.api.common.fields import (
    MOST_CHOICES,
    MOST_MESSAGES,
    MOST_TOOLS,
    AssistantPart,
    Effort,
    Format,
    FunctionTool,
    Parts,
    Penalties,
    Positive,
    PriorityFields,
    Several,
    StreamOptions,
    TextPart,
    ThinkingFields,
    ToolChoice,
    ToolName,
    UserPart,
)
from pippin.serve.api.common.usage import CompletionUsage

# --- messages ---------------------------------------------------------------------------------------------------------


class SystemMessage(RequestPart):
    """Instructions of the developer; "developer" and "system" are the same."""

    role: Literal["system", "developer"]
    content: str | Parts[TextPart]
    name: str | None = None


class UserMessage(RequestPart):
    """A message of the user."""

    role: Literal["user"]
    content: str | Parts[UserPart]
    name: str | None = None


class CalledFunction(RequestPart):
    """A function with the arguments that the model wrote."""

    name: ToolName
    arguments: str = Field(description="A JSON object as text.")


class CallOfTool(RequestPart):
    """A tool call that the model made."""

    id: Annotated[str, Field(min_length=1, max_length=200)]
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(RequestPart):
    """A message of the model."""

    role: Literal["assistant"]
    content: str | Parts[AssistantPart] | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: Annotated[Several[CallOfTool], Field(max_length=MOST_TOOLS)] | None = None
    name: str | None = None


class ToolMessage(RequestPart):
    """The output of a tool call."""

    role: Literal["tool"]
    content: str | Parts[TextPart]
    tool_call_id: str


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


# --- request ----------------------------------------------------------------------------------------------------------


class TemplateSettings(RequestPart):
    """What other servers take as variables of the chat template: whether the model reasons. Not in OpenAI's API."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


class ChatRequest(Penalties, ThinkingFields, PriorityFields):
    """A conversation to continue."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"model": "smollm2-135m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16}
            ]
        }
    )

    model: str | None = Field(None, description="NAME or NAME:ADAPTER; None is the server's default.")
    messages: Annotated[Several[Message], Field(min_length=1, max_length=MOST_MESSAGES)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Positive | None = Field(None, description="Superseded by max_completion_tokens.")
    max_completion_tokens: Positive | None = Field(
        None, description="Longest answer in tokens, reasoning included; None is what the context leaves."
    )
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(None, description="Needs logprobs.")
    response_format: Format | None = None
    include_schema_in_prompt: bool | None = Field(
        None, description="Whether the model also reads the schema (default); it is enforced either way. Not OpenAI's."
    )
    tools: Annotated[Several[FunctionTool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Positive | None = Field(
        None, description="Most calls in one answer; None is 8, and no more than 64 are made. Not OpenAI's."
    )
    reasoning_effort: Effort | None = None
    chat_template_kwargs: TemplateSettings | None = None
    user: str | None = Field(None, description="Taken and not used, as metadata and store.")


# --- response ---------------------------------------------------------------------------------------------------------


class FunctionCall(BaseModel):
    """A function with the arguments that the model wrote; they fit its schema."""

    name: str
    arguments: str


class MessageCall(BaseModel):
    """A tool call for the client to run."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(BaseModel):
    """A message of the model."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str | None = None
    tool_calls: list[MessageCall] | None = None


class TopLogprob(BaseModel):
    """An alternative token."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of the answer; log-probabilities are those of the model, before penalties, temperature and schema."""

    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(BaseModel):
    """The tokens of an answer."""

    content: list[TokenLogprob] | None
    refusal: list[TokenLogprob] | None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls", "content_filter"]


class ChatCompletion(BaseModel):
    """A complete answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: CompletionUsage
    service_tier: str | None = None


STREAM: dict[str, Any] = {
    "text/event-stream": {
        "schema": {"type": "string", "description": "Events, where the request says `stream: true`."},
        "example": 'data: {"id":"chatcmpl-…","object":"chat.completion.chunk",…}\n\ndata: [DONE]\n\n',
    }
}
