"""Every error that Pippin raises on purpose, in one tree under `PippinError`.

Notable here:
- a message says what was wrong, with the offending name and value, and what to do about it
- what a caller may act on (the two numbers of an overflow, the tool that failed) is an attribute, not only prose
- an error that is also a plain Python mistake inherits the built-in too, so `except ValueError` works as expected
"""

from __future__ import annotations

from typing import Any

from pippin.core.warnings import *  # noqa: F403 - part of the same face


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
    """No catalog name, folder, file or hub repository answers to this reference."""


class DownloadFailed(AssetError):
    """A download ended before its end; what arrived is kept and the next try resumes it."""


class OfflineError(AssetError):
    """The network is needed but `PIPPIN_OFFLINE=1` forbids it."""


class DiskFull(AssetError, OSError):
    """There is less free space than the file needs; nothing was written."""


class HashMismatch(AssetError):
    """A file is not the one that the catalog names."""


class CheckpointError(PippinError):
    """A model file was found but cannot be loaded."""


class CorruptedFile(CheckpointError):
    """A file is truncated or its contents contradict themselves."""


class UnsupportedModel(CheckpointError):
    """The file is sound, but its architecture or its number format is not one that Pippin runs."""


class UnsafeCheckpoint(CheckpointError):
    """The file is a pickle, which runs code when it is opened; refused."""


class AdapterMismatch(CheckpointError):
    """An adapter was made for another base model than the one it is to be attached to."""


class VocabularyMismatch(CheckpointError, ValueError):
    """Two models that must share their vocabulary (draft and target, teacher and student) do not."""


class PromptCacheMismatch(CheckpointError):
    """A prompt cache was computed by another model, in another precision, or written in another form."""


class NotEnoughMemory(CheckpointError, MemoryError):
    """A model does not fit into the memory that models may take."""


# --- training and shaping ---------------------------------------------------------------------------------------------


class InvalidRecord(InvalidInput):
    """A file of training data holds something that is no record: ``path`` names it, ``line`` counts from 1."""

    def __init__(self, message: str, *, path: str, line: int | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.line = line


class InvalidImage(InvalidInput):
    """A file is no picture that can be read, or not of the size and channels that are wanted; ``path`` names it."""

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class TrainingError(PippinError):
    """A training run could not go on."""


class NonFiniteLoss(TrainingError, ArithmeticError):
    """A loss or a gradient is infinite or NaN; ``saved`` is the file that holds the batch, None if none was written."""

    def __init__(self, message: str, *, step: int, saved: str | None = None) -> None:
        super().__init__(message)
        self.step = step
        self.saved = saved


class ResumeMismatch(TrainingError):
    """A training checkpoint was written by another model, optimizer or data than the run that would go on from it."""


class NewtonDivergence(TrainingError, ArithmeticError):
    """Newton's method did not solve a recurrence; ``iterations`` were made and ``residual`` is left."""

    def __init__(self, message: str, *, iterations: int, residual: float) -> None:
        super().__init__(message)
        self.iterations, self.residual = iterations, residual


class UnsupportedLayer(PippinError, TypeError):
    """A model holds layers that a method has no rule for; the message lists all of them."""


class NotPrepared(PippinError, RuntimeError):
    """A model was to be converted that was not prepared for it, or whose ranges were never observed."""


class ExportError(PippinError):
    """A model could not be exported, or the exported one cannot be run as asked."""


class BackendUnavailable(ExportError, ImportError):
    """A back end is not installed, or runs on another system only; the message says which."""


class UnsupportedOperator(ExportError):
    """A back end has no form of an operator; the message names the module and the line that use it."""


class SignatureMismatch(ExportError, ValueError):
    """An exported model was called with a name, a shape or a precision that it does not have."""


class PrecisionMismatch(ExportError):
    """A back end computed in another precision than it was asked for, or beyond the error that was allowed."""


class SilentFallback(ExportError):
    """A back end put part of a model on another device than it was asked for."""


# --- uncertainty and inference ----------------------------------------------------------------------------------------


class InferenceError(PippinError):
    """A posterior, a chain or a transport plan could not be computed."""


class NotFitted(InferenceError, RuntimeError):
    """Something was asked of an estimator before it was fitted; the message names the call that fits it."""


class SingularPosterior(InferenceError, ArithmeticError):
    """Curvature and prior together are not positive definite, so there is no Gaussian with that precision."""


class NonFiniteEvidence(InferenceError, ArithmeticError):
    """A marginal likelihood is infinite or NaN; the message names the term that is."""


class ChainDiverged(InferenceError, ArithmeticError):
    """A Markov chain left the region where its target is finite, at step ``step``."""

    def __init__(self, message: str, *, step: int) -> None:
        super().__init__(message)
        self.step = step


class NotConverged(InferenceError, ArithmeticError):
    """An iteration ended above its tolerance; ``iterations`` were made and ``residual`` is left."""

    def __init__(self, message: str, *, iterations: int, residual: float) -> None:
        super().__init__(message)
        self.iterations, self.residual = iterations, residual


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
    """The schema has no instances: its constraints contradict each other, or there is nothing to choose from."""


class DuplicateProperty(SchemaError):
    """An object names a property twice."""


class DuplicateType(SchemaError):
    """Two different types of one schema have the same name."""


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


class TranscriptMutation(ConcurrentRequests):
    """The transcript of a session was to be replaced while it was still answering."""


class UnsupportedCapability(GenerationError):
    """The model or provider cannot do what the request needs (tools without a chat template, say)."""


class UnsupportedContent(UnsupportedCapability):
    """The transcript holds something that the model or provider cannot read, such as an image."""


class UnsupportedLanguage(GenerationError):
    """A language or locale that this part has no rules or data for; `language` is its tag."""

    def __init__(self, message: str, *, language: str) -> None:
        super().__init__(message)
        self.language = language


class TimedOut(GenerationError, TimeoutError):
    """The answer was not complete within the seconds that the request allowed."""


class Denied(GenerationError):
    """A hook of the session denied the prompt or the answer; the message is its reason."""


class GuardrailViolation(GenerationError):
    """A rule of the guardrails blocked an input or an output.

    ``verdict`` names rule, category, score, threshold and span; ``safe_prefix`` is the number of characters of a
    streamed answer that had been released before.
    """

    def __init__(self, message: str, *, verdict: Any, safe_prefix: int = 0) -> None:
        super().__init__(message)
        self.verdict = verdict
        self.safe_prefix = safe_prefix


class Refusal(GenerationError):
    """The model declined to answer; ``explanation`` is what it said."""

    def __init__(self, message: str, *, explanation: str) -> None:
        super().__init__(message)
        self.explanation = explanation


class RateLimited(GenerationError):
    """Too many requests; ``retry_after`` is the number of seconds to wait, None if nobody said."""

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QuotaExceeded(RateLimited):
    """The requests or tokens of a period are used up."""


class Overloaded(RateLimited):
    """Every slot is taken and the queue is full, or the service is about to stop; nothing was computed."""


class NonFiniteSample(GenerationError, ArithmeticError):
    """A sampling ended in infinite values or NaN: after ``step`` steps; in a flow, in this ``block`` at this ``token``.

    The message says what to change (less guidance, another seed, float32).
    """

    def __init__(self, message: str, *, step: int, block: int | None = None, token: int | None = None) -> None:
        super().__init__(message)
        self.step, self.block, self.token = step, block, token


class ImageCreationError(GenerationError):
    """A picture could not be made or changed as asked for."""


class CreationNotSupported(ImageCreationError, UnsupportedCapability):
    """The model behind an image creator cannot do this: edit, animate, draw at that size; the message says what can."""


class CreationUnavailable(ImageCreationError):
    """There is nothing to draw with; ``reason`` says what is missing, and the message how to get it."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class UnsupportedInputImage(ImageCreationError, ValueError):
    """A picture that was given cannot be used: no picture, damaged, or of a form that the model cannot take."""


class ConceptsBlocked(ImageCreationError):
    """A guard blocked what was asked for, or a picture that was made; ``category`` says why."""

    def __init__(self, message: str, *, category: str) -> None:
        super().__init__(message)
        self.category = category


class OverMemoryBudget(ImageCreationError, MemoryError):
    """A picture would need more memory than it may have: ``estimate`` bytes of a ``budget``; nothing was computed."""

    def __init__(self, message: str, *, estimate: int, budget: int) -> None:
        super().__init__(message)
        self.estimate, self.budget = estimate, budget


class CreationFailed(ImageCreationError):
    """Drawing began and could not be completed; ``step`` is the step it came to."""

    def __init__(self, message: str, *, step: int) -> None:
        super().__init__(message)
        self.step = step


# --- providers --------------------------------------------------------------------------------------------------------


class ProviderError(PippinError):
    """A model behind a network could not be asked, or answered in a way that cannot be used."""


class NetworkFailure(ProviderError, ConnectionError):
    """The provider could not be reached, or the connection broke before the answer was complete."""


class AuthenticationFailed(ProviderError):
    """The provider refused the key."""


class ServiceUnavailable(ProviderError):
    """The provider is there but cannot answer now."""


class InvalidProviderAnswer(ProviderError):
    """What the provider sent is not what its interface promises."""


class SealBroken(InvalidProviderAnswer):
    """A sealed message was changed, cut off, sent twice or made for another key; nothing in it may be used."""


class AttestationError(ProviderError):
    """A node could not prove that it runs what it should; nothing was sent to it."""


class BadSignature(AttestationError):
    """A quote is not signed by a trusted root, or its signature does not fit."""


class UnknownMeasurement(AttestationError):
    """A quote names software that the policy does not trust."""


class StaleQuote(AttestationError):
    """A quote is older than the policy allows, or from the future."""


class ReplayedQuote(StaleQuote):
    """A quote answers another nonce than the one that was just sent: it was recorded earlier."""


class NotInLog(AttestationError):
    """The measurement of a quote is not proved to be in the public log."""


class ModelMismatch(AttestationError):
    """The node serves another model than the one that was asked for."""


class SettingsMismatch(AttestationError):
    """The node works under other settings (what it keeps, what it logs) than the policy demands."""


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


class ToolServerError(ToolError):
    """A server of tools could not be started, does not answer, or broke its protocol."""


class TooManyToolRounds(ToolError):
    """The model kept calling tools beyond the bound of the session."""


# --- server -----------------------------------------------------------------------------------------------------------


class InvalidRequest(InvalidInput):
    """A request to the server is malformed; ``param`` names the field, ``code`` is a word for programs."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ResponseNotFound(PippinError, LookupError):
    """The server keeps no response of this id: it never did, it was deleted, or it belongs to another key."""


# --- claims -----------------------------------------------------------------------------------------------------------


class ClaimError(PippinError):
    """A claim is malformed, unknown, or its evidence file does not fit it."""
