"""Request and response types of /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from pippin.serve.api.common.body import RequestPart
from pippin.serve.api.common.fields import (
    MOST_MESSAGES,
    MOST_TOOLS,
    STRICT,
    TOOL_STRICT,
    Effort,
    Metadata,
    ObjectFormat,
    Parts,
    Positive,
    PriorityFields,
    RefusalPart,
    SamplingFields,
    Several,
    TextFormat,
    ThinkingFields,
    ToolName,
)

# --- input ------------------------------------------------------------------------------------------------------------


class InputText(RequestPart):
    """Text; "output_text" is earlier output of the model."""

    type: Literal["input_text", "output_text"]
    text: str


class InputImage(RequestPart):
    """An image as a data URL."""

    type: Literal["input_image"]
    image_url: str | None = None
    file_id: str | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None


class InputFile(RequestPart):
    """A file as a data URL; every model can read text."""

    type: Literal["input_file"]
    file_data: str | None = None
    filename: str | None = None
    file_id: str | None = None
    file_url: str | None = None


Part = Annotated[InputText | InputImage | InputFile | RefusalPart, Field(discriminator="type")]


class InputMessage(RequestPart):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts[Part]


class InputCall(RequestPart):
    """A tool call that the model made."""

    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1, max_length=200)]
    name: ToolName
    arguments: str = Field(description="A JSON object as text.")
    id: str | None = None


class InputOutput(RequestPart):
    """The output of a tool call."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Parts[Part]
    id: str | None = None


class ReasoningText(RequestPart):
    """Text of the model's reasoning."""

    type: Literal["reasoning_text"]
    text: str


class InputReasoning(RequestPart):
    """Earlier reasoning of the model."""

    type: Literal["reasoning"]
    id: str | None = None
    content: Several[ReasoningText] | None = None


def _kind(item: Any) -> Any:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if isinstance(kind, str) else None


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputOutput, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")],
    Discriminator(_kind),
]


# --- request ----------------------------------------------------------------------------------------------------------


class ResponseTool(RequestPart):
    """A function that the model may call; built-in tools are refused."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON Schema of the arguments, always enforced.")
    strict: bool | None = Field(None, description=TOOL_STRICT)


class NamedResponseTool(RequestPart):
    """A function by name."""

    type: Literal["function"]
    name: ToolName


class AllowedResponseTools(RequestPart):
    """A subset of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[Several[NamedResponseTool], Field(min_length=1, max_length=MOST_TOOLS)]


ResponseToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[NamedResponseTool | AllowedResponseTools, Field(discriminator="type")]
)


class ResponseSchemaFormat(RequestPart):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    name: ToolName
    schema_: dict[str, Any] = Field(alias="schema", description="Enforced, strict or not.")
    description: str | None = None
    strict: bool | None = Field(None, description=STRICT)


class TextSettings(RequestPart):
    """The format of the answer."""

    format: Annotated[TextFormat | ObjectFormat | ResponseSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="Taken and not used.")


class ReasoningSettings(RequestPart):
    """The reasoning effort."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="Taken; the text comes whole.")


class ResponseStreamOptions(RequestPart):
    """Accepted and ignored: this server pads nothing."""

    include_obfuscation: bool | None = None


class ResponseRequest(SamplingFields, ThinkingFields, PriorityFields):
    """An input to answer."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"model": "smollm2-135m", "input": "Hello", "max_output_tokens": 16}]}
    )

    model: str | None = Field(None, description="NAME or NAME:ADAPTER; None is the server's default.")
    input: str | Annotated[Several[Item], Field(min_length=1, max_length=MOST_MESSAGES)]
    instructions: str | None = Field(None, description="For this response only; not kept for the next.")
    tools: Annotated[Several[ResponseTool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Positive | None = Field(
        None, description="Most calls of functions in one response; None is 8, and no more than 64 are made."
    )
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    max_output_tokens: Positive | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: Several[str] | None = Field(None, description='"message.output_text.logprobs" is heeded.')
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = Field(None, description="Keep it for previous_response_id, in memory and for a while.")
    previous_response_id: Annotated[str, Field(max_length=200)] | None = None
    metadata: Metadata | None = None
    truncation: Literal["auto", "disabled"] | None = Field(None, description='"auto" is refused.')
    background: bool | None = Field(None, description="true is refused.")
    conversation: Any = Field(None, description="Refused.")
    prompt: Any = Field(None, description="Refused.")
    user: str | None = None


class InputTokensRequest(ResponseRequest):
    """An input to count: what a request of the same fields would read."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"model": "smollm2-135m", "input": "Hello"}]})

    input: str | Annotated[Several[Item], Field(min_length=1, max_length=MOST_MESSAGES)] | None = None  # type: ignore[assignment]


# --- response ---------------------------------------------------------------------------------------------------------


class OutputText(BaseModel):
    """Text of the answer."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Any]


class OutputRefusal(BaseModel):
    """A refusal of the model."""

    type: Literal["refusal"]
    refusal: str


class OutputMessage(BaseModel):
    """A message of the model."""

    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText | OutputRefusal]


class OutputCall(BaseModel):
    """A tool call for the client to run."""

    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: Literal["in_progress", "completed", "incomplete"]


class OutputReasoning(BaseModel):
    """Reasoning of the model."""

    type: Literal["reasoning"]
    id: str
    summary: list[Any]
    content: list[Any]
    status: Literal["in_progress", "completed", "incomplete"]


class InputDetails(BaseModel):
    """Details of the input tokens."""

    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(BaseModel):
    """Details of the output tokens."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """Input and output tokens."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseFault(BaseModel):
    """Why a response failed."""

    code: str
    message: str


class Incomplete(BaseModel):
    """Why a response ended early."""

    reason: Literal["max_output_tokens", "content_filter"]


class ResponseObject(BaseModel):
    """A response, with the request's settings."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFault | None
    incomplete_details: Incomplete | None
    model: str
    output: list[Annotated[OutputMessage | OutputCall | OutputReasoning, Field(discriminator="type")]]
    usage: ResponseUsage | None
    instructions: str | None
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    parallel_tool_calls: bool
    max_tool_calls: int | None
    text: dict[str, Any]
    reasoning: dict[str, Any]
    temperature: float | None
    top_p: float | None
    top_logprobs: int
    max_output_tokens: int | None
    previous_response_id: str | None
    store: bool
    metadata: dict[str, str]
    truncation: Literal["disabled"]
    background: Literal[False]
    user: str | None


class InputTokens(BaseModel):
    """How many tokens the model reads."""

    object: Literal["response.input_tokens"]
    input_tokens: int


class Deleted(BaseModel):
    """A response that was deleted."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(BaseModel):
    """The input of a response."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: Literal[False]


STREAM: dict[str, Any] = {
    "text/event-stream": {
        "schema": {"type": "string", "description": "Typed events, where the request says `stream: true`."},
        "example": 'event: response.created\ndata: {"type":"response.created","sequence_number":0,"response":{…}}\n\n',
    }
}
