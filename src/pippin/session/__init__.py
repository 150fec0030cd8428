"""The session API: typed answers, streams and tools over any model that `pippin.load` reads."""

from pippin.session.options import GenerationOptions
from pippin.session.response import Response, Snapshot, Stream, Timing, Usage
from pippin.session.schema import AnyOf, Choice, Lark, Regex, Schema
from pippin.session.session import Session
from pippin.session.tools import Allow, Deny, Replace, Tool, tool
from pippin.session.transcript import Answer, Instructions, Prompt, ToolCall, ToolCalls, ToolOutput, Transcript

__all__ = [
    "Allow",
    "Answer",
    "AnyOf",
    "Choice",
    "Deny",
    "GenerationOptions",
    "Instructions",
    "Lark",
    "Prompt",
    "Regex",
    "Replace",
    "Response",
    "Schema",
    "Session",
    "Snapshot",
    "Stream",
    "Timing",
    "Tool",
    "ToolCall",
    "ToolCalls",
    "ToolOutput",
    "Transcript",
    "Usage",
    "tool",
]
