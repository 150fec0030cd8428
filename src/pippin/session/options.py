"""What a caller may say about one answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from pippin.core.errors import InvalidArgument
from pippin.engine.sampling import SamplingOptions

ToolCalling = Literal["allowed", "required", "disallowed"]


@dataclass(frozen=True)
class GenerationOptions(SamplingOptions):
    """How to choose tokens, when to stop, and how to use tools and schema.

    Args:
        tool_calling: whether the model may, must (before it answers) or must not call tools.
        parallel_tool_calls: whether the model may call several tools in one turn, at most 8.
        include_schema_in_prompt: whether a typed answer's schema is also shown to the model. The grammar holds either
            way; without the text the prompt is shorter and the model sees only what the prompt itself says.

    The other fields are those of `pippin.engine.SamplingOptions`.

    >>> GenerationOptions(temperature=-1)
    Traceback (most recent call last):
        ...
    pippin.core.errors.InvalidArgument: temperature must be a finite number, 0 or above, got -1
    """

    tool_calling: ToolCalling = "allowed"
    parallel_tool_calls: bool = True
    include_schema_in_prompt: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tool_calling not in get_args(ToolCalling):
            raise InvalidArgument(f"tool_calling must be allowed, required or disallowed, got {self.tool_calling!r}")
