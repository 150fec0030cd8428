"""What holds for one turn: the session's settings, those of its profile over them, a request's own over both."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pippin.core.errors import InvalidArgument
from pippin.session.history import HistoryPolicy
from pippin.session.hooks import Hooks
from pippin.session.options import GenerationOptions
from pippin.session.profile import Profile
from pippin.session.provider import Provider
from pippin.session.tools import Tool, as_tools
from pippin.session.transcript import Instructions, Transcript

if TYPE_CHECKING:
    from pippin.session.session import Session

_DEFAULTS = GenerationOptions()


@dataclass(frozen=True)
class Settings:
    """What holds for one turn."""

    session: Session
    profile: Profile
    provider: Provider
    hooks: Hooks
    history: HistoryPolicy | None
    options: GenerationOptions

    @classmethod
    def of(cls, session: Session, profile: Profile, options: GenerationOptions) -> Settings:
        """The session's settings with those of the profile over them; a request's own options count most."""
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
        """What the model may call now; loading a skill changes it.

        Raises:
            InvalidTool: two tools of one name.
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

    def view(self, transcript: Transcript) -> Transcript:
        """The transcript under the profile's instructions."""
        if self.profile.instructions is None:
            return transcript
        return Transcript(entries=(Instructions(self.profile.instructions), *transcript.history))
