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
    from pippin.bayes.laplace import Laplace
    from pippin.bayes.uncertainty import uncertainty
    from pippin.engine.engine import Engine
    from pippin.kits.image.creator import ImageCreator
    from pippin.language.availability import availability
    from pippin.language.encoder import load_encoder
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
    from pippin.session.guardrails import Guardrails
    from pippin.session.identity import GenerationID
    from pippin.session.mcp_client import McpServer
    from pippin.session.openai_provider import OpenAIProvider
    from pippin.session.remote import RemoteModel

_HOMES = {
    "LanguageModel": "pippin.language.load",
    "load": "pippin.language.load",
    "Laplace": "pippin.bayes.laplace",
    "uncertainty": "pippin.bayes.uncertainty",
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
    "GenerationID": "pippin.session.identity",
    "OpenAIProvider": "pippin.session.openai_provider",
    "McpServer": "pippin.session.mcp_client",
    "Guardrails": "pippin.session.guardrails",
    "RemoteModel": "pippin.session.remote",
    "availability": "pippin.language.availability",
    "load_encoder": "pippin.language.encoder",
    "Engine": "pippin.engine.engine",
    "ImageCreator": "pippin.kits.image.creator",
    "tool": "pippin.session",
}

__all__ = [
    "Allow",
    "AnyOf",
    "Choice",
    "Deny",
    "Engine",
    "GenerationID",
    "GenerationOptions",
    "Guardrails",
    "Hooks",
    "ImageCreator",
    "LanguageModel",
    "Laplace",
    "Lark",
    "LocalModel",
    "McpServer",
    "OpenAIProvider",
    "Profile",
    "Provider",
    "Regex",
    "RemoteModel",
    "Replace",
    "Response",
    "Schema",
    "Session",
    "Skill",
    "Skills",
    "Snapshot",
    "Tool",
    "Transcript",
    "availability",
    "errors",
    "load",
    "load_encoder",
    "tool",
    "uncertainty",
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
