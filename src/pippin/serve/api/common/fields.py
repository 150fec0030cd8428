"""Fields that several request types share: sampling, tools, response formats, content parts.

Notable here:
- ranges are OpenAI's; every list and text that costs more time than its size in the body has its own bound
- fields that other servers added are accepted under their names: top_k, min_p, repetition_penalty, priority
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from pippin.serve.api.common.body import RequestPart

T = TypeVar("T")


def _at_most(limit: int) -> BeforeValidator:
    """Refuse a mapping by its size alone, before its entries are validated one by one."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > limit:
            raise PydanticCustomError("too_long", "Should have at most {limit} entries, not {size}", {
                "limit": limit, "size": len(value),
            })  # fmt: skip
        return value

    return BeforeValidator(check)


# A list of a million wrong items is one error, not a million.
Several = Annotated[list[T], Field(fail_fast=True)]

MOST_BIASES = 1000
MOST_PARTS = 1000
MOST_MESSAGES = 10_000
MOST_TOOLS = 128
MOST_CHOICES = 128

ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
StopText = Annotated[str, Field(min_length=1, max_length=1000)]
Stop = StopText | Annotated[Several[StopText], Field(max_length=4)]
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenIds = Annotated[Several[TokenId], Field(min_length=1)]
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
    _at_most(16),
]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class SamplingFields(RequestPart):
    """Sampling options."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(
        None, description="0 takes the likeliest token; None is what the model recommends, else 0."
    )
    top_p: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="Only the likeliest tokens whose probabilities reach this."
    )
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = Field(
        None, description="Only so many of the likeliest tokens; 0 and -1 are all. Not in OpenAI's interface."
    )
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="Only tokens at least this share as likely as the likeliest. Not in OpenAI's interface."
    )


class Penalties(SamplingFields):
    """Sampling options with penalties for earlier tokens."""

    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = Field(
        None, description="Divides the logits of tokens seen before. Not in OpenAI's interface."
    )
    logit_bias: Annotated[dict[TokenKey, Bias], Field(max_length=MOST_BIASES), _at_most(MOST_BIASES)] | None = Field(
        None, description="Added to the logits of tokens, by their id in this model's vocabulary."
    )
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = Field(
        None, description="The same seed gives the same answer on the same server."
    )
    stop: Stop | None = Field(None, description="The answer ends before the first of these, at most 4.")


class ThinkingFields(RequestPart):
    """The thinking budget."""

    max_thinking_tokens: Positive | None = Field(
        None,
        description="Thinking budget: so many tokens of reasoning at most, then the model answers. With an effort, the "
        "budget of that effort otherwise. Not in OpenAI's interface.",
    )


class PriorityFields(RequestPart):
    """Priority of the request in the queue."""

    service_tier: Literal["auto", "default", "flex", "scale", "fast", "priority"] | None = Field(
        None,
        description='"flex" waits for others, "priority" (or "fast") goes before them where the server allows it; the '
        "other tiers are the usual turn. The answer says which it had.",
    )
    priority: Annotated[int, Field(ge=-10, le=10)] | None = Field(
        None,
        description="A number instead of a tier, as vLLM takes it: lower is earlier, 0 the usual turn. Below 0 only "
        "where the server allows it. Not in OpenAI's interface.",
    )


class StreamOptions(RequestPart):
    """Additional content of a stream."""

    include_usage: bool | None = Field(None, description="End with a chunk that holds the usage and no choices.")


Parts = Annotated[Several[T], Field(max_length=MOST_PARTS)]


# --- content ----------------------------------------------------------------------------------------------------------


class TextPart(RequestPart):
    """Text."""

    type: Literal["text"]
    text: str


class ImageURL(RequestPart):
    """The URL of an image."""

    url: str = Field(description="A data URL (data:image/png;base64,…); this server fetches nothing.")
    detail: Literal["auto", "low", "high", "original"] | None = None


class ImagePart(RequestPart):
    """An image."""

    type: Literal["image_url"]
    image_url: ImageURL


class AudioData(RequestPart):
    """Sound as base64."""

    data: str
    format: Literal["wav", "mp3"]


class AudioPart(RequestPart):
    """Sound."""

    type: Literal["input_audio"]
    input_audio: AudioData


class FileData(RequestPart):
    """A file as a data URL."""

    file_data: str | None = None
    filename: str | None = None
    file_id: str | None = None


class FilePart(RequestPart):
    """A file; every model can read text."""

    type: Literal["file"]
    file: FileData


class RefusalPart(RequestPart):
    """A refusal of the assistant."""

    type: Literal["refusal"]
    refusal: str


UserPart = Annotated[TextPart | ImagePart | AudioPart | FilePart, Field(discriminator="type")]
AssistantPart = Annotated[TextPart | RefusalPart, Field(discriminator="type")]


# --- tools ------------------------------------------------------------------------------------------------------------


TOOL_STRICT: Final = "Refuse what of the parameters is no keyword of JSON Schema; else it is ignored."


class FunctionDefinition(RequestPart):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        None, description="JSON Schema of the arguments. It is always enforced; what cannot be enforced is refused."
    )
    strict: bool | None = Field(None, description=TOOL_STRICT)


class FunctionTool(RequestPart):
    """A tool of a chat request."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(RequestPart):
    """The name of a function."""

    name: ToolName


class NamedTool(RequestPart):
    """Force the model to call this function."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(RequestPart):
    """A subset of the tools."""

    mode: Literal["auto", "required"]
    tools: Annotated[Several[NamedTool], Field(min_length=1, max_length=MOST_TOOLS)]


class AllowedChoice(RequestPart):
    """Restrict the model to a subset of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedChoice, Field(discriminator="type")]


# --- formats ----------------------------------------------------------------------------------------------------------


class TextFormat(RequestPart):
    """Free text."""

    type: Literal["text"]


class ObjectFormat(RequestPart):
    """Any JSON object."""

    type: Literal["json_object"]


STRICT: Final = "Refuse what is no keyword of JSON Schema; else it is ignored, and the header x-pippin-notes says so."


class NamedSchema(RequestPart):
    """A JSON Schema with a name."""

    name: ToolName
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="Enforced, strict or not.")
    strict: bool | None = Field(None, description=STRICT)


class SchemaFormat(RequestPart):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class RegexFormat(RequestPart):
    """Text that a regular expression matches from end to end. Not in OpenAI's API."""

    type: Literal["regex"]
    pattern: str


class ChoiceFormat(RequestPart):
    """One of several texts. Not in OpenAI's API."""

    type: Literal["choice"]
    choices: Annotated[Several[str], Field(min_length=1)]


class LarkFormat(RequestPart):
    """Text of a Lark grammar in llguidance's dialect. Not in OpenAI's API."""

    type: Literal["lark"]
    grammar: str


Format = Annotated[
    TextFormat | ObjectFormat | SchemaFormat | RegexFormat | ChoiceFormat | LarkFormat, Field(discriminator="type")
]
