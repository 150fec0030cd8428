"""Callbacks of a session: they see what passes, and may let it pass, stop it or put something else in its place."""

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
    """Go on."""


@dataclass(frozen=True)
class Deny:
    """Stop it: a tool call is not run and the model is told the reason; anything else raises `Denied`."""

    reason: str = "The user declined this."


@dataclass(frozen=True)
class Replace:
    """Go on with something else: arguments of a call (a dict), text of a prompt or an output, content of an answer."""

    value: Any


Decision = Allow | Deny | Replace


@dataclass(frozen=True)
class Hooks:
    """What a session calls on its way; a hook that is None allows everything.

    They run in the thread that computes the answer, so a hook may wait for a person.

    Args:
        on_prompt: before the prompt is sent. Replace: text or a `Prompt`.
        on_reasoning: when the model has thought. Replace: the text that is kept.
        on_tool_call: before a tool runs. Replace: other arguments. Deny: the model reads the reason and goes on.
        on_tool_output: before the model reads it. Replace: other text. Deny: the model reads the reason instead.
        on_response: before the answer is returned and remembered. Replace: other content.
        on_activate: told when a turn begins under a profile that is not the last turn's; its result is ignored.
    """

    on_prompt: Callable[[Prompt], Decision] | None = None
    on_reasoning: Callable[[Reasoning], Decision] | None = None
    on_tool_call: Callable[[ToolCall], Decision] | None = None
    on_tool_output: Callable[[ToolOutput], Decision] | None = None
    on_response: Callable[[Response[Any]], Decision] | None = None
    on_activate: Callable[[Profile], object] | None = None

    def decide(self, name: str, subject: Any) -> Decision:
        """Ask the hook of that name.

        Raises:
            InvalidArgument: it returned something else than a decision.
        """
        hook = getattr(self, name)
        decision = Allow() if hook is None else hook(subject)
        if not isinstance(decision, Decision):
            raise InvalidArgument(f"{name} must return Allow, Deny or Replace, got {decision!r}")
        return decision
