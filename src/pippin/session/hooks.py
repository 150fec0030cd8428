"""Hooks: callbacks of a session that may allow, deny or replace prompts, tool calls, outputs and answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pippin.core.errors import InvalidArgument

if TYPE_CHECKING:
    from pippin.session.profile import Profile
    from pippin.session.response import Response
    from pippin.session.transcript import Prompt, Reasoning, ToolCall, ToolOutput


@dataclass(frozen=True)
class Allow:
    """Continue unchanged."""


@dataclass(frozen=True)
class Deny:
    """Deny it: a tool call is not run and the model reads the reason; anything else raises `Denied`."""

    reason: str = "The user declined this."


@dataclass(frozen=True)
class Replace:
    """Continue with a replacement: arguments of a call (a dict), text of a prompt or an output, content of an
    answer."""

    value: Any


Decision = Allow | Deny | Replace


@dataclass(frozen=True)
class Hooks:
    """The hooks of a session; a hook that is None allows everything.

    They run in the thread that computes the answer, so a hook may wait for a person to decide.

    Args:
        on_prompt: before the prompt is sent. Replace: text or a `Prompt`.
        on_reasoning: after the model's reasoning. Replace: the text that is stored.
        on_tool_call: before a tool runs. Replace: other arguments. Deny: the model reads the reason and continues.
        on_tool_output: before the model reads it. Replace: other text. Deny: the model reads the reason instead.
        on_response: before the answer is returned and stored. Replace: other content.
        on_activate: called when the profile differs from that of the previous request; its result is ignored.
    """

    on_prompt: Callable[[Prompt], Decision] | None = None
    on_reasoning: Callable[[Reasoning], Decision] | None = None
    on_tool_call: Callable[[ToolCall], Decision] | None = None
    on_tool_output: Callable[[ToolOutput], Decision] | None = None
    on_response: Callable[[Response[Any]], Decision] | None = None
    on_activate: Callable[[Profile], object] | None = None

    def decide(self, name: str, subject: Any) -> Decision:
        """Call the hook of that name.

        Raises:
            InvalidArgument: it returned something other than a decision.
        """
        hook = getattr(self, name)
        decision = Allow() if hook is None else hook(subject)
        if not isinstance(decision, Decision):
            raise InvalidArgument(f"{name} must return Allow, Deny or Replace, got {decision!r}")
        return decision
