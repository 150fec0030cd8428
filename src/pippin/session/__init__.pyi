from . import extraction as extraction, guardrails as guardrails, providers as providers, types as types
from .extraction.extract import Extraction as Extraction, SourceSpan as SourceSpan
from .generation_id import GenerationID as GenerationID
from .hooks import Allow as Allow, Deny as Deny, Hooks as Hooks, Replace as Replace
from .options import GenerationOptions as GenerationOptions
from .profile import Profile as Profile
from .providers.local import LocalModel as LocalModel
from .providers.provider import Capabilities as Capabilities, Provider as Provider, ProviderRequest as ProviderRequest
from .response import (
    PartialOf as PartialOf,
    Response as Response,
    ResponseStream as ResponseStream,
    Snapshot as Snapshot,
    Timing as Timing,
    Usage as Usage,
)
from .session import Session as Session
from .skills import Skill as Skill, Skills as Skills
from .tools import Tool as Tool, ToolDefinition as ToolDefinition, tool as tool
from .transcript import (
    Answer as Answer,
    Attachment as Attachment,
    Instructions as Instructions,
    Prompt as Prompt,
    Reasoning as Reasoning,
    StructuredSegment as StructuredSegment,
    TextSegment as TextSegment,
    ToolCall as ToolCall,
    ToolCalls as ToolCalls,
    ToolOutput as ToolOutput,
    Transcript as Transcript,
)
from .types.schema import AnyOf as AnyOf, Choice as Choice, Lark as Lark, Regex as Regex, Schema as Schema
