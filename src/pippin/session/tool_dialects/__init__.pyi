from .dialect import ToolDialect as ToolDialect, detect as detect
from .grammar import tool_grammar as tool_grammar
from .reader import CallReader as CallReader, call_reader as call_reader
