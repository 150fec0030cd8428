"""Settings of one request: the session's, overridden by its profile's, overridden by the request's own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pippin.core.errors import InvalidArgument
from pippin.session.history import HistoryPolicy
from pippin.session.hooks import Hooks
from pippin.session.options import GenerationOptions
from pippin.session.profile import Profile
from pippin.session.providers.provider import Provider
from pippin.session.tools import Tool, as_tools
from pippin.session.transcript import Instructions, Transcript

if TYPE_CHECKING:
    from pippin.session.session import Session

_DEFAULTS = GenerationOptions()


@dataclass(frozen=True)
class RequestSettings:
    """The settings of one request."""

    session: Session
    profile: Profile
    provider: Provider
    hooks: Hooks
    history: HistoryPolicy | None
    options: GenerationOptions

    @classmethod
    def of(cls, session: Session, profile: Profile, options: GenerationOptions) -> RequestSettings:
        """The session's settings, overridden by the profile's; a request's own options take precedence."""
        changes: dict[str, Any] = {
            name: value
            for name in ("temperature", "reasoning")
            if (value := getattr(profile, name)) is not None and getattr(options, name) == getattr(_DEFAULTS, name)
        }
        return cls(
            session,
            profile,
            session.provider if profile.model is None else session._provider(profile.model),
            session.hooks if profile.hooks is None else profile.hooks,
            session.history if profile.history is None else profile.history,
            replace(options, **changes),
        )

    def tools(self) -> dict[str, Tool[..., Any]]:
        """The tools that the model may call now; loading a skill changes them.

        Raises:
            InvalidTool: two tools with one name.
            InvalidArgument: a tool call is required, and there are no tools.
        """
        if self.options.tool_calling == "disallowed":
            return {}
        session, own = self.session, self.profile.tools
        tools = list((session.tools if own is None else as_tools(own)).values())
        if session.skills is not None:
            tools += session.skills.tools.values()
        if self.options.tool_calling == "required" and not tools:
            raise InvalidArgument("tool_calling is required, but the session has no tools")
        return as_tools(tools)

    def adapter(self) -> str | None:
        """The adapter of the request: the session's, or that of its task; with tools, their calls are the task."""
        if self.session.adapter != "auto":
            return self.session.adapter
        task = self.session.task or ("tools" if self.tools() else None)
        return None if task is None else self.provider.task_adapter(task)

    def view(self, transcript: Transcript) -> Transcript:
        """The transcript with the profile's instructions."""
        if self.profile.instructions is None:
            return transcript
        return Transcript(entries=(Instructions(self.profile.instructions), *transcript.history))
