"""Every error that Pippin raises on purpose, in one tree under `PippinError`.

Notable here:
- a message says what was wrong, with the offending name and value, and what to do about it
- what a caller may act on (the two numbers of an overflow, the tool that failed) is an attribute, not only prose
- an error that is also a plain Python mistake inherits the built-in too, so `except ValueError` works as expected
"""

from __future__ import annotations

from typing import Any


class PippinError(Exception):
    """The root: everything that Pippin raises on purpose."""


class InvalidArgument(PippinError, ValueError):
    """An argument is outside its documented range; raised before any work is done."""


class InvalidInput(PippinError, ValueError):
    """What the user gave to work on cannot be used: an empty prompt, bytes that are not text."""


class MissingDependency(PippinError, ImportError):
    """An optional library is not installed; the message names the extra that brings it."""


# --- models and files -------------------------------------------------------------------------------------------------


class AssetError(PippinError):
    """A model or a data set could not be found, fetched or stored."""


class ModelNotFound(AssetError, LookupError):
    """No catalogue name, folder, file or hub repository answers to this reference."""


class DownloadFailed(AssetError):
    """A download ended before its end; what arrived is kept and the next try resumes it."""


class OfflineError(AssetError):
    """The network is needed but `PIPPIN_OFFLINE=1` forbids it."""


class DiskFull(AssetError, OSError):
    """There is less free space than the file needs; nothing was written."""


class HashMismatch(AssetError):
    """A file is not the one that the catalogue names."""


class CheckpointError(PippinError):
    """A model file was found but cannot be loaded."""


class CorruptedFile(CheckpointError):
    """A file is truncated or its contents contradict themselves."""


class UnsupportedModel(CheckpointError):
    """The file is sound, but its architecture or its number format is not one that Pippin runs."""


class UnsafeCheckpoint(CheckpointError):
    """The file is a pickle, which runs code when it is opened; refused."""


# --- schemas ----------------------------------------------------------------------------------------------------------


class SchemaError(PippinError, ValueError):
    """A type or a JSON Schema cannot describe an answer; raised where it is declared."""


class UnsupportedGuide(SchemaError):
    """A constraint that the grammar cannot enforce; the message names the field and the guide."""

    def __init__(self, message: str, *, field: str = "", guide: str = "") -> None:
        super().__init__(message)
        self.field = field
        self.guide = guide


class EmptySchema(SchemaError):
    """The schema has no instances: its constraints contradict each other."""


class UndefinedReference(SchemaError):
    """A `$ref` points at nothing."""


# --- generation -------------------------------------------------------------------------------------------------------


class GenerationError(PippinError):
    """An answer could not be completed."""


class ContextOverflow(GenerationError):
    """Prompt and answer do not fit into the context window; raised before decoding."""

    def __init__(self, message: str, *, context_size: int, token_count: int) -> None:
        super().__init__(message)
        self.context_size = context_size
        self.token_count = token_count


class AnswerTruncated(GenerationError):
    """A typed answer met `max_tokens` before its grammar could close; `partial` holds the text so far."""

    def __init__(self, message: str, *, partial: str) -> None:
        super().__init__(message)
        self.partial = partial


class DecodingFailure(GenerationError):
    """The constraint and the model left no token to choose, or the logits were not finite."""


class Cancelled(GenerationError):
    """The request was cancelled by its owner."""


class ConcurrentRequests(GenerationError):
    """A session was asked while it was still answering."""


class UnsupportedCapability(GenerationError):
    """The model or provider cannot do what the request needs (tools without a chat template, say)."""


class ToolError(PippinError):
    """Something about tools; the subclasses tell what."""


class InvalidTool(ToolError, ValueError):
    """A function cannot become a tool: an argument without a type, two tools of one name."""


class ToolCallError(ToolError):
    """A tool raised, timed out or returned something that cannot be sent to the model; `cause` is the reason."""

    def __init__(self, message: str, *, tool: str, cause: BaseException | None = None, arguments: Any = None) -> None:
        super().__init__(message)
        self.tool = tool
        self.cause = cause
        self.arguments = arguments


class TooManyToolRounds(ToolError):
    """The model kept calling tools beyond the bound of the session."""


# --- claims -----------------------------------------------------------------------------------------------------------


class ClaimError(PippinError):
    """A claim is malformed, unknown, or its evidence file does not fit it."""
