"""All errors that Pippin raises deliberately, in one hierarchy under `PippinError`.

Notable here:
- a message says what is wrong, with the offending name and value, and how to fix it
- values that a caller may act on (the two sizes of an overflow, the tool that failed) are attributes
- an error with a built-in counterpart also inherits that one, so `except ValueError` works as expected
"""

from __future__ import annotations

from typing import Any

from pippin.core.warnings import *  # noqa: F403 - `pippin.errors` offers both


class PippinError(Exception):
    """The base class of all errors that Pippin raises deliberately."""


class InvalidArgument(PippinError, ValueError):
    """An argument is outside its documented range; raised before any work is done."""


class InvalidInput(PippinError, ValueError):
    """The input cannot be used: an empty prompt, bytes that are not text, a path that cannot be written."""


class MissingDependency(PippinError, ImportError):
    """An optional library is not installed; the message names the extra that installs it."""


# --- models and files -------------------------------------------------------------------------------------------------


class AssetError(PippinError):
    """A model or data set could not be found, downloaded or stored."""


class ModelNotFound(AssetError, LookupError):
    """A reference matches no catalog name, folder, file or hub repository."""


class DownloadFailed(AssetError):
    """A download failed or was interrupted; the next attempt resumes from the partial file."""


class OfflineError(AssetError):
    """A download is needed, but `PIPPIN_OFFLINE=1` forbids use of the network."""


class DiskFull(AssetError, OSError):
    """There is less free disk space than a file needs; an existing file is left unchanged."""


class HashMismatch(AssetError):
    """The hash of a file differs from the one in the catalog or the index."""


class CheckpointError(PippinError):
    """A model file was found but cannot be loaded; the subclasses say why."""


class CorruptedFile(CheckpointError):
    """A file is truncated or its contents contradict themselves."""


class UnsupportedModel(CheckpointError):
    """The file is intact, but Pippin does not support its architecture or number format."""


class UnsafeCheckpoint(CheckpointError):
    """The file is a pickle, which can run code when it is loaded; Pippin never loads one."""


class AdapterMismatch(CheckpointError):
    """An adapter was trained for another base model than the one it would be attached to."""


class VocabularyMismatch(CheckpointError, ValueError):
    """Two models that must share their vocabulary (draft and target, teacher and student) do not."""


class PromptCacheMismatch(CheckpointError):
    """A prompt cache was computed by another model, in another precision, or has another file format."""


class NotEnoughMemory(CheckpointError, MemoryError):
    """A model does not fit into the available memory or the memory limit for models."""


# --- training and shaping ---------------------------------------------------------------------------------------------


class InvalidRecord(InvalidInput):
    """A line of a training data file is not a valid record; ``path`` is the file, ``line`` counts from 1."""

    def __init__(self, message: str, *, path: str, line: int | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.line = line


class InvalidImage(InvalidInput):
    """An image file cannot be read, or has the wrong size or number of channels; ``path`` is the file."""

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class TrainingError(PippinError):
    """A training run could not continue."""


class NonFiniteLoss(TrainingError, ArithmeticError):
    """A loss or gradient is infinite or NaN at ``step``; ``saved`` is the file with the batch, None if not written."""

    def __init__(self, message: str, *, step: int, saved: str | None = None) -> None:
        super().__init__(message)
        self.step = step
        self.saved = saved


class ResumeMismatch(TrainingError):
    """A training checkpoint was written with another model, optimizer or data set than the run that resumes from it."""


class NewtonDivergence(TrainingError, ArithmeticError):
    """Newton's method did not solve a recurrence: after ``iterations`` the residual is ``residual``."""

    def __init__(self, message: str, *, iterations: int, residual: float) -> None:
        super().__init__(message)
        self.iterations, self.residual = iterations, residual


class UnsupportedLayer(PippinError, TypeError):
    """A model has layers that a method does not support; the message lists all of them."""


class NotPrepared(PippinError, RuntimeError):
    """A model to be converted was not prepared for it, or its observers never saw data."""


class ExportError(PippinError):
    """A model could not be exported, or an exported model cannot run as requested."""


class BackendUnavailable(ExportError, ImportError):
    """A backend is not installed, or does not run on this operating system; the message says which."""


class UnsupportedOperator(ExportError):
    """A backend does not support an operator; the message names the module and the line that use it."""


class SignatureMismatch(ExportError, ValueError):
    """An exported model was called with an input name, shape or dtype that its signature does not have."""


class PrecisionMismatch(ExportError):
    """A backend computed in another precision than requested, or its error exceeds the tolerance."""


class SilentFallback(ExportError):
    """A backend placed part of a model on another device than requested."""


# --- uncertainty and inference ----------------------------------------------------------------------------------------


class InferenceError(PippinError):
    """A posterior, a chain or a transport plan could not be computed."""


class NotFitted(InferenceError, RuntimeError):
    """A result was requested of an estimator before it was fitted; the message names the call that fits it."""


class SingularPosterior(InferenceError, ArithmeticError):
    """The sum of curvature and prior precision is not positive definite, so there is no Gaussian posterior."""


class NonFiniteEvidence(InferenceError, ArithmeticError):
    """A marginal likelihood is infinite or NaN; the message names the term that is."""


class ChainDiverged(InferenceError, ArithmeticError):
    """A Markov chain left the region where its target is finite, at step ``step``."""

    def __init__(self, message: str, *, step: int) -> None:
        super().__init__(message)
        self.step = step


class NotConverged(InferenceError, ArithmeticError):
    """An iterative method did not reach its tolerance: after ``iterations`` the residual is ``residual``."""

    def __init__(self, message: str, *, iterations: int, residual: float) -> None:
        super().__init__(message)
        self.iterations, self.residual = iterations, residual


# --- schemas ----------------------------------------------------------------------------------------------------------


class SchemaError(PippinError, ValueError):
    """A type or JSON Schema cannot be used for structured output; raised where it is declared."""


class UnsupportedGuide(SchemaError):
    """The grammar cannot enforce a constraint; the message names the field and the constraint."""

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
    """A structured answer reached `max_tokens` before it was complete; ``partial`` is the text so far."""

    def __init__(self, message: str, *, partial: str) -> None:
        super().__init__(message)
        self.partial = partial


class InvalidAnswer(GenerationError, ValueError):
    """A validator of the answer's type, written in Python, did not accept a complete answer.

    ``value`` is the answer as JSON values, before any validator; ``text`` as the model wrote it; ``reason`` what the
    validators said; ``tries`` how many answers were asked for.
    """

    def __init__(self, message: str, *, value: object, text: str, reason: str, tries: int = 1) -> None:
        super().__init__(message)
        self.value = value
        self.text = text
        self.reason = reason
        self.tries = tries


class DecodingFailure(GenerationError):
    """The constraint allows no token that the model can produce, or the logits are not finite."""


class Cancelled(GenerationError):
    """The caller cancelled the request."""


class ConcurrentRequests(GenerationError):
    """A session received a request while it was still answering another one."""


class TranscriptMutation(ConcurrentRequests):
    """The transcript of a session was replaced while the session was still answering."""


class UnsupportedCapability(GenerationError):
    """The model or provider cannot do what the request needs, such as tools without a chat template."""


class UnsupportedContent(UnsupportedCapability):
    """The transcript contains content that the model or provider does not accept, such as an image."""


class UnsupportedLanguage(GenerationError):
    """A feature has no rules or data for a language or locale; ``language`` is its tag."""

    def __init__(self, message: str, *, language: str) -> None:
        super().__init__(message)
        self.language = language


class TimedOut(GenerationError, TimeoutError):
    """The answer was not complete within the timeout of the request; ``partial`` is its text so far."""

    def __init__(self, message: str, *, partial: str = "") -> None:
        super().__init__(message)
        self.partial = partial


class Denied(GenerationError):
    """A hook of the session denied the prompt or the answer; the message is its reason."""


class GuardrailViolation(GenerationError):
    """A guardrail blocked an input or an output.

    ``verdict`` holds rule, category, score, threshold and span; ``safe_prefix`` is the number of characters of a
    streamed answer that were already released.
    """

    def __init__(self, message: str, *, verdict: Any, safe_prefix: int = 0) -> None:
        super().__init__(message)
        self.verdict = verdict
        self.safe_prefix = safe_prefix


class Refusal(GenerationError):
    """The model declined to answer; ``explanation`` is its reply."""

    def __init__(self, message: str, *, explanation: str) -> None:
        super().__init__(message)
        self.explanation = explanation


class RateLimited(GenerationError):
    """Too many requests; ``retry_after`` is the number of seconds to wait, None if unknown."""

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QuotaExceeded(RateLimited):
    """The quota of requests or tokens for this period is used up."""


class Overloaded(RateLimited):
    """The queue of requests is full, or the service is shutting down; nothing was computed."""


class NonFiniteSample(GenerationError, ArithmeticError):
    """Sampling produced infinite values or NaN after ``step`` steps; in a flow, in ``block`` at ``token``.

    The message says what to change (less guidance, another seed, float32).
    """

    def __init__(self, message: str, *, step: int, block: int | None = None, token: int | None = None) -> None:
        super().__init__(message)
        self.step, self.block, self.token = step, block, token


class ImageCreationError(GenerationError):
    """An image could not be generated or edited as requested."""


class CreationNotSupported(ImageCreationError, UnsupportedCapability):
    """The model of an image creator cannot edit, animate or generate at this size; the message says which can."""


class CreationUnavailable(ImageCreationError):
    """No image model is available; ``reason`` says what is missing, and the message how to install it."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class UnsupportedInputImage(ImageCreationError, ValueError):
    """An input image cannot be used: it is not an image, damaged, or in a format that the model does not accept."""


class ConceptsBlocked(ImageCreationError):
    """A guardrail blocked the prompt or a generated image; ``category`` says why."""

    def __init__(self, message: str, *, category: str) -> None:
        super().__init__(message)
        self.category = category


class OverMemoryBudget(ImageCreationError, MemoryError):
    """An image would need ``estimate`` bytes of memory, more than its ``budget``; nothing was computed."""

    def __init__(self, message: str, *, estimate: int, budget: int) -> None:
        super().__init__(message)
        self.estimate, self.budget = estimate, budget


class CreationFailed(ImageCreationError):
    """Image generation failed at step ``step``."""

    def __init__(self, message: str, *, step: int) -> None:
        super().__init__(message)
        self.step = step


# --- providers --------------------------------------------------------------------------------------------------------


class ProviderError(PippinError):
    """A remote model could not be reached, or its answer cannot be used."""


class NetworkFailure(ProviderError, ConnectionError):
    """The provider could not be reached, or the connection broke before the answer was complete."""


class AuthenticationFailed(ProviderError):
    """The provider rejected the API key."""


class ServiceUnavailable(ProviderError):
    """The provider is temporarily unable to answer."""


class InvalidProviderAnswer(ProviderError):
    """The provider's response does not follow its API."""


class SealBroken(InvalidProviderAnswer):
    """A sealed message was modified, truncated, repeated or encrypted to another key; none of it may be used."""


class AttestationError(ProviderError):
    """A node did not prove that it runs the expected software; nothing was sent to it."""


class BadSignature(AttestationError):
    """A quote is not signed by a trusted root, or its signature is invalid."""


class UnknownMeasurement(AttestationError):
    """A quote names software that the policy does not trust."""


class StaleQuote(AttestationError):
    """A quote is older than the policy allows, or from the future."""


class ReplayedQuote(StaleQuote):
    """A quote contains another nonce than the one just sent, so it was recorded earlier."""


class NotInLog(AttestationError):
    """There is no valid proof that the measurement of a quote is in the public log."""


class ModelMismatch(AttestationError):
    """The node serves another model than the requested one."""


class SettingsMismatch(AttestationError):
    """The node's settings (what it stores and logs) differ from those that the policy requires."""


class ToolError(PippinError):
    """A tool could not be declared or called; the subclasses say why."""


class InvalidTool(ToolError, ValueError):
    """A function cannot become a tool: an argument has no type, or two tools have the same name."""


class ToolCallError(ToolError):
    """A tool raised, timed out or returned a value that cannot be sent to the model; ``cause`` is the exception."""

    def __init__(self, message: str, *, tool: str, cause: BaseException | None = None, arguments: Any = None) -> None:
        super().__init__(message)
        self.tool = tool
        self.cause = cause
        self.arguments = arguments


class ToolServerError(ToolError):
    """A tool server could not be started, does not answer, or violated the protocol."""


class TooManyToolRounds(ToolError):
    """The model exceeded the session's limit on rounds of tool calls."""


# --- server -----------------------------------------------------------------------------------------------------------


class InvalidRequest(InvalidInput):
    """A request to the server is malformed; ``param`` is the field, ``code`` a machine-readable error code."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ResponseNotFound(PippinError, LookupError):
    """The server has no response with this id: it never existed, was deleted, or belongs to another API key."""


# --- claims -----------------------------------------------------------------------------------------------------------


class ClaimError(PippinError):
    """A claim is malformed or unknown, or its evidence file does not match it."""
