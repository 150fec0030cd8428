"""A profile: which model, tools, instructions and options the next turn has, decided anew for each turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pippin.session.history import HistoryPolicy
from pippin.session.hooks import Hooks
from pippin.session.options import ReasoningLevel
from pippin.session.provider import Provider
from pippin.session.tools import Tool

if TYPE_CHECKING:
    from pippin.language.load import LanguageModel
    from pippin.session.session import Session


@dataclass(frozen=True)
class Profile:
    """Settings of a turn; what is None is as the session has it.

    Args:
        name: tells profiles apart; `Hooks.on_activate` is called when it changes.
        model: a model reference, a loaded model or a provider.
        instructions: instead of the session's.
        tools: instead of the session's.
        hooks: instead of the session's.
        history: what of the conversation the model reads.
        temperature: unless the request says more than the default.
        reasoning: unless the request says more than the default.
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
