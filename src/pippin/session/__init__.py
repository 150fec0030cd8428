"""The session API: typed answers, streams and tools over a model of this machine or any other."""

from pippin.session.hooks import Allow, Deny, Hooks, Replace
from pippin.session.identity import GenerationID
from pippin.session.local import LocalModel
from pippin.session.options import GenerationOptions
from pippin.session.profile import Profile
from pippin.session.provider import Capabilities, Provider, Turn
from pippin.session.response import PartialOf, Response, Snapshot, Stream, Timing, Usage
from pippin.session.schema import AnyOf, Choice, Lark, Regex, Schema
from pippin.session.session import Session
from pippin.session.skills import Skill, Skills
from pippin.session.tools import Tool, ToolDefinition, tool
from pippin.session.transcript import (
    Answer,
    Attachment,
    Instructions,
    Prompt,
    Reasoning,
    Structure,
    Text,
    ToolCall,
    ToolCalls,
    ToolOutput,
    Transcript,
)

__all__ = [
    "Allow",
    "Answer",
    "AnyOf",
    "Attachment",
    "Capabilities",
    "Choice",
    "Deny",
    "GenerationID",
    "GenerationOptions",
    "Hooks",
    "Instructions",
    "Lark",
    "LocalModel",
    "PartialOf",
    "Profile",
    "Prompt",
    "Provider",
    "Reasoning",
    "Regex",
    "Replace",
    "Response",
    "Schema",
    "Session",
    "Skill",
    "Skills",
    "Snapshot",
    "Stream",
    "Structure",
    "Text",
    "Timing",
    "Tool",
    "ToolCall",
    "ToolCalls",
    "ToolDefinition",
    "ToolOutput",
    "Transcript",
    "Turn",
    "Usage",
    "tool",
]
