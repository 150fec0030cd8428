"""Profiles: model, tools, instructions and options of the next request, chosen for each request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pippin.session.history import HistoryPolicy
from pippin.session.hooks import Hooks
from pippin.session.options import ReasoningLevel
from pippin.session.providers.provider import Provider
from pippin.session.tools import Tool

if TYPE_CHECKING:
    from pippin.language.language_model import LanguageModel
    from pippin.session.session import Session


@dataclass(frozen=True)
class Profile:
    """Settings of one request; None takes the session's setting.

    Args:
        name: identifies the profile; `Hooks.on_activate` is called when it changes.
        model: a model reference, a loaded model or a provider.
        instructions: replace the session's.
        tools: replace the session's.
        hooks: replace the session's.
        history: history policy.
        temperature: used unless the request sets another than the default.
        reasoning: used unless the request sets another than the default.
    """

    name: str = ""
    model: str | Path | LanguageModel | Provider | None = None
    instructions: str | None = None
    tools: Sequence[Tool[..., Any] | Callable[..., Any]] | None = None
    hooks: Hooks | None = None
    history: HistoryPolicy | None = None
    temperature: float | None = None
    reasoning: ReasoningLevel | int | None = None


ProfileFunction = Callable[["Session"], Profile]
