from .dialect import ToolDialect as ToolDialect, detect as detect
from .grammar import grammar as grammar
from .reader import CallReader as CallReader, reader as reader
