"""Pippin: private foundation models on the machine you have.

Importing the package is cheap: torch and everything heavy load when a name is first used.

>>> import pippin
>>> pippin.GenerationOptions(temperature=0.7, seed=1).temperature
0.7
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pippin import errors

if TYPE_CHECKING:
    from pippin.language.load import LanguageModel, load
    from pippin.session import (
        Allow,
        AnyOf,
        Choice,
        Deny,
        GenerationOptions,
        Hooks,
        Lark,
        LocalModel,
        Profile,
        Provider,
        Regex,
        Replace,
        Response,
        Schema,
        Session,
        Skill,
        Skills,
        Snapshot,
        Tool,
        Transcript,
        tool,
    )

_HOMES = {
    "LanguageModel": "pippin.language.load",
    "load": "pippin.language.load",
    "Allow": "pippin.session",
    "AnyOf": "pippin.session",
    "Choice": "pippin.session",
    "Deny": "pippin.session",
    "GenerationOptions": "pippin.session",
    "Lark": "pippin.session",
    "Regex": "pippin.session",
    "Replace": "pippin.session",
    "Response": "pippin.session",
    "Schema": "pippin.session",
    "Session": "pippin.session",
    "Snapshot": "pippin.session",
    "Tool": "pippin.session",
    "Transcript": "pippin.session",
    "Hooks": "pippin.session",
    "LocalModel": "pippin.session",
    "Profile": "pippin.session",
    "Provider": "pippin.session",
    "Skill": "pippin.session",
    "Skills": "pippin.session",
    "tool": "pippin.session",
}

__all__ = [
    "Allow",
    "AnyOf",
    "Choice",
    "Deny",
    "GenerationOptions",
    "Hooks",
    "LanguageModel",
    "Lark",
    "LocalModel",
    "Profile",
    "Provider",
    "Regex",
    "Replace",
    "Response",
    "Schema",
    "Session",
    "Skill",
    "Skills",
    "Snapshot",
    "Tool",
    "Transcript",
    "errors",
    "load",
    "tool",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("pippin")
    if name not in _HOMES:
        raise AttributeError(f"module 'pippin' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
