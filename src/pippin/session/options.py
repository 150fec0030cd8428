"""What a caller may say about one answer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from pippin.core.errors import InvalidArgument
from pippin.engine.sampling import SamplingOptions

ToolCalling = Literal["allowed", "required", "disallowed"]
ReasoningLevel = Literal["off", "light", "moderate", "deep"]

# Tokens that a model may think for; a level is a name for a budget.
BUDGETS = {"off": 0, "light": 256, "moderate": 1024, "deep": 4096}


@dataclass(frozen=True)
class GenerationOptions(SamplingOptions):
    """How to choose tokens, when to stop, and how to use tools and schema.

    Args:
        tool_calling: whether the model may, must (before it answers) or must not call tools.
        parallel_tool_calls: whether the model may call several tools in one turn, at most 8.
        include_schema_in_prompt: whether a typed answer's schema is also shown to the model. The grammar holds either
            way; without the text the prompt is shorter and the model sees only what the prompt itself says.
        reasoning: how long the model may think before it answers: "off", "light" (256 tokens), "moderate" (1,024),
            "deep" (4,096) or a number of tokens. Thinking counts against ``max_tokens``.
        timeout: seconds until `TimedOut` is raised; None for no limit.

    The other fields are those of `pippin.engine.SamplingOptions`.

    >>> GenerationOptions(temperature=-1)
    Traceback (most recent call last):
        ...
    pippin.core.errors.InvalidArgument: temperature must be a finite number, 0 or above, got -1
    """

    tool_calling: ToolCalling = "allowed"
    parallel_tool_calls: bool = True
    include_schema_in_prompt: bool = True
    reasoning: ReasoningLevel | int = "off"
    timeout: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tool_calling not in get_args(ToolCalling):
            raise InvalidArgument(f"tool_calling must be allowed, required or disallowed, got {self.tool_calling!r}")
        level = self.reasoning
        if isinstance(level, bool) or (level < 1 if isinstance(level, int) else level not in BUDGETS):
            raise InvalidArgument(f"reasoning must be off, light, moderate, deep or a number of tokens, got {level!r}")
        self._check(
            "timeout", (int, float), lambda s: math.isfinite(s) and s > 0, "a number of seconds above 0, or None"
        )

    @property
    def reasoning_budget(self) -> int:
        """Tokens that the model may think for.

        >>> GenerationOptions(reasoning="light").reasoning_budget, GenerationOptions(reasoning=40).reasoning_budget
        (256, 40)
        """
        return BUDGETS[self.reasoning] if isinstance(self.reasoning, str) else self.reasoning
