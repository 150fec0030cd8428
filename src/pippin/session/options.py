"""Options of one request: sampling, stopping, tools and reasoning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

from pippin.core.checks import PositiveFloat, PositiveInt, checked
from pippin.engine.options import SamplingOptions

ToolCalling = Literal["allowed", "required", "disallowed"]
ReasoningLevel = Literal["off", "light", "moderate", "deep"]

# Reasoning budgets in tokens.
BUDGETS = {"off": 0, "light": 256, "moderate": 1024, "deep": 4096}

# Calls in one answer: each makes the grammar larger.
MOST_CALLS = 64


@checked
@dataclass(frozen=True)
class GenerationOptions(SamplingOptions):
    """Options for sampling, stopping, tools and typed answers.

    Args:
        tool_calling: whether the model may, must (before it answers) or must not call tools.
        parallel_tool_calls: whether the model may make several calls at once.
        max_tool_calls: how many calls it may make at once, 1 to 64.
        include_schema_in_prompt: whether the prompt includes a typed answer's schema. The grammar enforces it either
            way; without it the prompt is shorter and the model sees only what the prompt itself says.
        reasoning: budget for reasoning before the answer: "off", "light" (256 tokens), "moderate" (1,024), "deep"
            (4,096) or a number of tokens. Reasoning counts against ``max_tokens``.
        retries: how often the model is asked again, 0 to 16, where a validator of the answer's type (`field_validator`,
            `model_validator`, `AfterValidator` …) did not accept the answer; it reads its answer and what the validator
            said. 0 for never.
        timeout: seconds until `TimedOut` is raised; None for no limit.

    The other fields are those of `pippin.engine.SamplingOptions`.

    >>> GenerationOptions(temperature=-1)
    Traceback (most recent call last):
        ...
    pippin.core.errors.InvalidArgument: temperature must be at least 0 and finite, got -1
    """

    tool_calling: ToolCalling = "allowed"
    parallel_tool_calls: bool = True
    max_tool_calls: Annotated[int, Ge(1), Le(MOST_CALLS)] = 8
    include_schema_in_prompt: bool = True
    reasoning: ReasoningLevel | PositiveInt = "off"
    retries: Annotated[int, Ge(0), Le(16)] = 2
    timeout: PositiveFloat | None = None

    @property
    def reasoning_budget(self) -> int:
        """Maximum tokens of reasoning.

        >>> GenerationOptions(reasoning="light").reasoning_budget, GenerationOptions(reasoning=40).reasoning_budget
        (256, 40)
        """
        return BUDGETS[self.reasoning] if isinstance(self.reasoning, str) else self.reasoning
