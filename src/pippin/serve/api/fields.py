"""Fields that several kinds of request share: sampling, tools, formats of answers, parts of content.

Notable here:
- ranges are OpenAI's; every list and text that costs time beyond the body's own size has a bound of its own
- fields that other servers added are taken under their names: top_k, min_p, repetition_penalty, priority
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from pippin.serve.api.body import Asked

T = TypeVar("T")


def _at_most(limit: int) -> BeforeValidator:
    """Refuse a mapping by its size alone, before its entries are looked at one by one."""

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
Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
    _at_most(16),
]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class Sampling(Asked):
    """How tokens are chosen."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(
        None, description="0 takes the likeliest token; None is 1."
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


class Penalties(Sampling):
    """How tokens are chosen, with what is known of those before."""

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


class Urgency(Asked):
    """How soon it is answered, where others wait too."""

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


class StreamOptions(Asked):
    """What a stream tells besides the answer."""

    include_usage: bool | None = Field(None, description="End with a chunk that holds the usage and no choices.")


Parts = Annotated[Several[T], Field(max_length=MOST_PARTS)]


# --- content ----------------------------------------------------------------------------------------------------------


class TextPart(Asked):
    """Text."""

    type: Literal["text"]
    text: str


class ImageURL(Asked):
    """Where an image is."""

    url: str = Field(description="A data URL (data:image/png;base64,…); this server fetches nothing.")
    detail: Literal["auto", "low", "high", "original"] | None = None


class ImagePart(Asked):
    """An image."""

    type: Literal["image_url"]
    image_url: ImageURL


class AudioData(Asked):
    """Sound as base64."""

    data: str
    format: Literal["wav", "mp3"]


class AudioPart(Asked):
    """Sound."""

    type: Literal["input_audio"]
    input_audio: AudioData


class FileData(Asked):
    """A file as a data URL."""

    file_data: str | None = None
    filename: str | None = None
    file_id: str | None = None


class FilePart(Asked):
    """A file; text can be read by every model."""

    type: Literal["file"]
    file: FileData


class RefusalPart(Asked):
    """What an assistant said when it declined."""

    type: Literal["refusal"]
    refusal: str


UserPart = Annotated[TextPart | ImagePart | AudioPart | FilePart, Field(discriminator="type")]
AssistantPart = Annotated[TextPart | RefusalPart, Field(discriminator="type")]


# --- tools ------------------------------------------------------------------------------------------------------------


class Function(Asked):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(
        None, description="JSON Schema of the arguments. It is always enforced; what cannot be enforced is refused."
    )
    strict: bool | None = None


class FunctionTool(Asked):
    """A tool of a chat request."""

    type: Literal["function"]
    function: Function


class NamedFunction(Asked):
    """The name of a function."""

    name: ToolName


class NamedTool(Asked):
    """Make the model call this function."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Asked):
    """Some of the tools."""

    mode: Literal["auto", "required"]
    tools: Annotated[Several[NamedTool], Field(min_length=1, max_length=MOST_TOOLS)]


class AllowedChoice(Asked):
    """Let the model call some of the tools only."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedChoice, Field(discriminator="type")]


# --- formats ----------------------------------------------------------------------------------------------------------


class TextFormat(Asked):
    """Free text."""

    type: Literal["text"]


class ObjectFormat(Asked):
    """Some JSON object."""

    type: Literal["json_object"]


class NamedSchema(Asked):
    """A JSON Schema with a name."""

    name: ToolName
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="Enforced, strict or not.")
    strict: bool | None = None


class SchemaFormat(Asked):
    """JSON that fits a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class RegexFormat(Asked):
    """Text that a regular expression matches from end to end. Not in OpenAI's interface."""

    type: Literal["regex"]
    pattern: str


class ChoiceFormat(Asked):
    """One of some texts. Not in OpenAI's interface."""

    type: Literal["choice"]
    choices: Annotated[Several[str], Field(min_length=1)]


class LarkFormat(Asked):
    """Text of a Lark grammar in llguidance's dialect. Not in OpenAI's interface."""

    type: Literal["lark"]
    grammar: str


Format = Annotated[
    TextFormat | ObjectFormat | SchemaFormat | RegexFormat | ChoiceFormat | LarkFormat, Field(discriminator="type")
]
