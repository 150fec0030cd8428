"""A session: one conversation with a model, with structured output, streaming and tools.

Notable here:
- one session, one transcript, one request at a time: a second request raises `ConcurrentRequests`, it never waits
- a request that fails or is cancelled leaves the transcript unchanged, or keeps the partial result (``on_error``)
- instructions and earlier prompts stay in the prefix cache between requests, so that they are computed once
- every call has an ``async`` form; the model runs in a thread and the event loop stays free
"""

from __future__ import annotations

import asyncio
import json
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

from pippin.core.checks import PositiveFloat, PositiveInt, checked
from pippin.core.errors import ConcurrentRequests, InvalidArgument, InvalidInput, TranscriptMutation
from pippin.data.text.tool_dialect_name import ToolDialectName
from pippin.engine.kv_eviction import CachePolicy, EpiCache
from pippin.language.language_model import LanguageModel
from pippin.language.task_adapters import Task
from pippin.session.history import HistoryPolicy
from pippin.session.hooks import Hooks
from pippin.session.options import GenerationOptions
from pippin.session.profile import Profile, ProfileFunction
from pippin.session.providers.local import LocalModel
from pippin.session.providers.provider import Provider, ProviderRequest
from pippin.session.request_loop import RequestLoop
from pippin.session.response import Response, ResponseStream, Usage, run_to_end
from pippin.session.settings import RequestSettings
from pippin.session.skills import Skills
from pippin.session.tools import Tool, ToolDefinition, as_tools
from pippin.session.transcript import (
    Answer,
    Instructions,
    Prompt,
    Reasoning,
    Segment,
    ToolCalls,
    ToolOutput,
    Transcript,
)
from pippin.session.types.schema import Schema

if TYPE_CHECKING:
    from pippin.session.extraction.extract import Extraction
    from pippin.session.guardrails import Guardrails

T = TypeVar("T")

OnError = Literal["revert", "preserve"]
OnProgress = Callable[[int, int], None]
PromptLike = str | Prompt | Sequence[str | Segment]


class Session:
    """A conversation with a model.

    Args:
        model: a model reference (see `pippin.load`), a loaded model, or a provider.
        instructions: instructions for the model; they take precedence over prompts.
        tools: functions that the model may call.
        hooks: callbacks that may allow, deny or replace prompts, tool calls, outputs and answers.
        profile: called before each request with the session; the settings that it returns override the session's.
        history: history policy for long conversations; None for all of it.
        cache: keeps the keys and values of the conversation within a budget, as long as it may become: a policy such as
            `pippin.engine.kv_eviction.SnapKV(budget=1024)`, or `pippin.engine.kv_eviction.EpiCache(budget=1024)`. Then
            the past is not rendered anew. None for all keys and values. For models on this machine.
        guardrails: rules for input and output; None for none.
        skills: instructions and tools that the model loads when it needs them.
        task: what the session is for: "extraction", "tools", "summaries" or "classification"; None for anything.
        adapter: name of a loaded adapter (`LanguageModel.load_adapter`); "auto" for the adapter that comes with Pippin
            for the task, if this model has one (with tools and no task, that of tool calls); None for the model itself.
        on_error: "revert" restores the transcript after a failed or cancelled request; "preserve" keeps the prompt, the
            tools' outputs and the partial answer.
        max_tool_rounds: maximum number of consecutive rounds of tool calls.
        tool_timeout: seconds for one call; None for no limit.
        tool_dialect: how the model writes calls of tools, such as "hermes"; None for what its chat template shows. For
            models on this machine.
        transcript: a conversation to continue; its instructions are used if none are given.

    Raises:
        ModelNotFound, DownloadFailed, CheckpointError: the model cannot be loaded.
        InvalidTool: a function that cannot become a tool.
        InvalidArgument: a tool dialect for a provider, or a history policy beside a bounded cache.

    ``state`` is a dictionary for the application: profiles and tools may read and write it.

    >>> session = Session("smollm2-135m", instructions="Answer briefly.")           # doctest: +SKIP
    >>> session.respond("What is the capital of Japan?").content                    # doctest: +SKIP
    'The capital of Japan is Tokyo.'
    """

    @checked
    def __init__(
        self,
        model: str | Path | LanguageModel | Provider = "smollm2-135m",
        *,
        instructions: str | None = None,
        tools: Sequence[Tool[..., Any] | Callable[..., Any]] = (),
        hooks: Hooks = Hooks(),
        profile: ProfileFunction | None = None,
        history: HistoryPolicy | None = None,
        cache: CachePolicy | EpiCache | None = None,
        guardrails: Guardrails | None = None,
        skills: Skills | None = None,
        task: Task | None = None,
        adapter: str | None = "auto",
        on_error: OnError = "revert",
        max_tool_rounds: PositiveInt = 8,
        tool_timeout: PositiveFloat | None = 60.0,
        tool_dialect: ToolDialectName | None = None,
        transcript: Transcript | None = None,
    ) -> None:
        if cache is not None and history is not None:
            raise InvalidArgument(
                "a history policy changes what was said, whose keys a bounded cache keeps; leave one of the two out"
            )
        self.tools, self.cache = as_tools(tools), cache
        self.hooks, self.profile, self.history, self.guardrails = hooks, profile, history, guardrails
        self.skills, self.task, self.adapter, self.on_error = skills, task, adapter, on_error
        self.max_tool_rounds, self.tool_timeout, self.tool_dialect = max_tool_rounds, tool_timeout, tool_dialect
        self._providers: dict[str | Path | int, Provider] = {}  # by reference, or by the identity of a loaded model
        self.provider = self._provider(model)
        self.state: dict[str, Any] = {}
        begin = Transcript() if instructions is None else Transcript(entries=(Instructions(instructions),))
        if transcript is not None:
            begin = begin.add(*(transcript if instructions is None else transcript.history))
        self._instructions = begin.instructions
        self._transcript = begin
        self._usage = Usage()
        self._active: str | None = None
        self._memory: dict[int, tuple[weakref.ref[Provider], dict[str, Any]]] = {}
        self._busy = threading.Lock()

    @property
    def transcript(self) -> Transcript:
        """The conversation so far. It may be replaced between requests.

        Raises:
            TranscriptMutation: (when set) a request is running.
        """
        return self._transcript

    @transcript.setter
    def transcript(self, transcript: Transcript) -> None:
        with self._locked("replace the transcript", TranscriptMutation):
            self._transcript = transcript

    @property
    def is_responding(self) -> bool:
        """Whether a request is running."""
        return self._busy.locked()

    @property
    def usage(self) -> Usage:
        """Token counts of all requests of this session, including failed ones."""
        return self._usage

    def reset(self) -> None:
        """Clear the conversation and the loaded skills; the instructions stay.

        Raises:
            TranscriptMutation: a request is running.
        """
        self.transcript = Transcript(entries=self._instructions)
        if self.skills is not None:
            self.skills.unload()

    @overload
    def respond(self, prompt: PromptLike, *, options: GenerationOptions = ...) -> Response[str]: ...
    @overload
    def respond(
        self, prompt: PromptLike, *, generating: type[T] | Schema[T], options: GenerationOptions = ...
    ) -> Response[T]: ...
    @overload
    def respond(self, prompt: PromptLike, *, generating: Any, options: GenerationOptions = ...) -> Response[Any]: ...
    def respond(
        self, prompt: PromptLike, *, generating: Any = None, options: GenerationOptions = GenerationOptions()
    ) -> Response[Any]:
        """Answer a prompt.

        Args:
            prompt: the user's message: text, a `Prompt`, or a list of texts and segments.
            generating: the type of the answer: anything that `Schema` takes. None for free text.
            options: options for sampling and stopping.

        Raises:
            InvalidInput: an empty prompt.
            SchemaError: ``generating`` cannot be enforced.
            UnsupportedCapability: the provider does not support the request; raised before anything is sent.
            ContextOverflow: the conversation does not fit; raised before anything is computed.
            ConcurrentRequests: the session is still answering.
            AnswerTruncated: a typed answer reached ``max_tokens`` before it was complete.
            InvalidAnswer: a validator of ``generating`` accepted none of the answers; see ``options.retries``.
            ToolCallError: a tool failed. TooManyToolRounds: the model did not stop calling tools.
            GuardrailViolation: a rule blocked the prompt or the answer. Refusal: the model declined.
            Denied: a hook denied the prompt or the answer. TimedOut: the request exceeded ``options.timeout``.
            ProviderError: a remote provider failed.
        """
        stream: ResponseStream[Any] = self._start(prompt, generating, options, snapshots=False)
        for _ in stream:
            pass
        return stream.response

    async def arespond(
        self, prompt: PromptLike, *, generating: Any = None, options: GenerationOptions = GenerationOptions()
    ) -> Response[Any]:
        """`respond` for asyncio; cancelling the task cancels the request before its next token.

        When the cancellation returns, the session is free. Hooks, guardrails and the history policy run in a thread
        too. Those of `stream` run where it is called.
        """
        opened: list[ResponseStream[Any]] = []

        def start() -> None:
            opened.append(self._start(prompt, generating, options, snapshots=False))

        try:
            await run_to_end(start, lambda: None)
            async for _ in opened[0]:
                pass
        except asyncio.CancelledError:
            for stream in opened:
                stream.close()
            raise
        return opened[0].response

    @overload
    def stream(self, prompt: PromptLike, *, options: GenerationOptions = ...) -> ResponseStream[str]: ...
    @overload
    def stream(
        self, prompt: PromptLike, *, generating: type[T] | Schema[T], options: GenerationOptions = ...
    ) -> ResponseStream[T]: ...
    @overload
    def stream(
        self, prompt: PromptLike, *, generating: Any, options: GenerationOptions = ...
    ) -> ResponseStream[Any]: ...
    def stream(
        self, prompt: PromptLike, *, generating: Any = None, options: GenerationOptions = GenerationOptions()
    ) -> ResponseStream[Any]:
        """Answer a prompt in snapshots; arguments and errors as for `respond`, with errors of the prompt raised at
        once."""
        return self._start(prompt, generating, options, snapshots=True)

    @overload
    def extract(
        self,
        source: str,
        into: type[T] | Schema[T],
        *,
        question: str = "",
        options: GenerationOptions = ...,
        language: str | None = None,
        region: str | None = None,
        adapter: str | None = "auto",
        part_tokens: int | None = None,
        on_progress: OnProgress = ...,
    ) -> Extraction[T]: ...
    @overload
    def extract(
        self,
        source: str,
        into: Any,
        *,
        question: str = "",
        options: GenerationOptions = ...,
        language: str | None = None,
        region: str | None = None,
        adapter: str | None = "auto",
        part_tokens: int | None = None,
        on_progress: OnProgress = ...,
    ) -> Extraction[Any]: ...
    @checked
    def extract(
        self,
        source: str,
        into: Any,
        *,
        question: str = "",
        options: GenerationOptions = GenerationOptions(),
        language: str | None = None,
        region: str | None = None,
        adapter: str | None = "auto",
        part_tokens: PositiveInt | None = None,
        on_progress: OnProgress = lambda done, total: None,
    ) -> Extraction[Any]:
        """Fill in a value of a type from a text; what is not in the text cannot be written.

        Strings are parts of the text; numbers, dates, times and durations are read from its parts, whatever their
        spelling; flags and choices come with the part that shows them. Fields that may be missing are None or their
        default where the text does not say them. The conversation is not read and does not change.

        Args:
            source: the text, of any length; a long one is read in parts.
            into: a Python type or JSON Schema, as `Schema` takes it. Names and descriptions of its fields say what to
                look for.
            question: what to look for, where they do not say it.
            options: options for sampling and stopping; the likeliest parts are chosen unless a temperature is given.
            language: tag of the text's language, for dates and numbers that can be read in two ways; None detects it.
            region: country such as "US", for the same.
            adapter: name of a loaded adapter; "auto" for that of the session, which is the adapter for extraction that
                comes with Pippin unless it has another; None for the model itself.
            part_tokens: most tokens of a part of a long text; None for 700, or less in a small context.
            on_progress: called with the characters that were read, and those that there are.

        Returns:
            A response with the value as ``content``, and ``spans`` with the place and the confidence of everything.

        Raises:
            InvalidInput: the text is empty.
            UnsupportedGuide: a field that no part of a text can fill in.
            EmptySchema: a value that must be there and cannot, such as a date in a text without any.
            InvalidAnswer: what was found does not fit the type; see ``options.retries``.
            UnsupportedCapability: the provider cannot hold a grammar.
            GuardrailViolation, TimedOut, AnswerTruncated: as `respond`.
        """
        from pippin.session.extraction.extract import extract

        if adapter == "auto":
            adapter = self.provider.task_adapter("extraction") if self.adapter == "auto" else self.adapter
        return extract(
            self,
            source,
            Schema.of(into),
            question=question,
            options=options,
            language=language,
            region=region,
            adapter=adapter,
            part_tokens=part_tokens or min(700, (self.provider.context_size or 8192) // 4),
            on_progress=on_progress,
        )

    def prewarm(self, prompt_prefix: str = "") -> int:
        """Compute instructions, tools and the given beginning of a prompt in advance; return how many tokens are ready.

        A request that starts in this way is faster; with the native kernels its logits are bit-identical.

        Raises:
            ConcurrentRequests: a request is running. ContextOverflow: the beginning alone is too long.
        """
        with self._locked("prewarm"):
            settings = self._settings(GenerationOptions())
            transcript = settings.view(self._transcript).add(Prompt(prompt_prefix))
            return settings.provider.prewarm(self._provider_request(settings, transcript))

    def save_cache(self, path: str | Path) -> int:
        """Write the bounded cache of the conversation to a file, so that a restart loses nothing; return its bytes.

        Keep the transcript too: another session goes on with ``transcript=`` and `load_cache`.

        Args:
            path: the file; its folder must exist. Only its owner may read it.

        Raises:
            InvalidArgument: the session has no ``cache``, or nothing was said yet.
            DiskFull: the disk has no room for it. InvalidInput: nothing may be written there.
            ConcurrentRequests: a request is running.
        """
        with self._locked("save its cache"):
            settings = self._cache_settings()
            return settings.provider.save_cache(self._provider_request(settings, self._transcript), path)

    def load_cache(self, path: str | Path) -> None:
        """Read what `save_cache` wrote, for the same conversation, model and ``cache``.

        Args:
            path: the file.

        Raises:
            InvalidArgument: the session has no ``cache``.
            InvalidInput: the file cannot be read, or there is none.
            CorruptedFile: it is no such file, or is truncated or changed.
            PromptCacheMismatch: it is of another model, another ``cache`` or another conversation.
            ConcurrentRequests: a request is running.
        """
        with self._locked("load a cache"):
            settings = self._cache_settings()
            settings.provider.load_cache(self._provider_request(settings, self._transcript), path)

    def token_count(self, item: Any) -> int:
        """Count the tokens of an object in a prompt.

        Args:
            item: text, or an entry of a transcript; a `Tool`; a `Transcript`, counted as the model reads it; or a type
                or `Schema`, counted as its text in the prompt.

        Raises:
            UnsupportedCapability: the provider cannot count.
        """
        if isinstance(item, Transcript):
            settings = self._settings(GenerationOptions())
            return settings.provider.token_count(self._provider_request(settings, item))
        if isinstance(item, ToolCalls):
            item = "\n".join([item.text, *(call.model_dump_json(include={"name", "arguments"}) for call in item.calls)])
        elif isinstance(item, Instructions | Prompt | Reasoning | ToolOutput | Answer):
            item = item.text
        elif isinstance(item, ToolDefinition):
            item = json.dumps(item.definition()["function"], ensure_ascii=False)
        return self.provider.token_count(item if isinstance(item, str) else Schema.of(item).prompt_text())

    def _outside(self, transcript: Transcript, adapter: str | None) -> Session:
        """A session for a request about a text, outside of this conversation, with its model and hooks."""
        return Session(self.provider, transcript=transcript, hooks=self.hooks, adapter=adapter)

    def _provider(self, model: str | Path | LanguageModel | Provider) -> Provider:
        """The provider of a model; a reference is loaded once, and a model has one engine."""
        if isinstance(model, Provider):
            if self.tool_dialect is not None:
                raise InvalidArgument(
                    f"tool_dialect {self.tool_dialect!r} is for a model on this machine, and {model.name} is a "
                    "provider; give it to LocalModel, or leave it out"
                )
            return model
        key = id(model) if isinstance(model, LanguageModel) else model
        if key not in self._providers:
            self._providers[key] = LocalModel(
                model, tool_dialect=self.tool_dialect
            )  # which references the model, so that no other gets its identity
        return self._providers[key]

    def _provider_memory(self, provider: Provider) -> dict[str, Any]:
        """The provider's state for this session; state of providers that are gone is dropped."""
        self._memory = {key: entry for key, entry in self._memory.items() if entry[0]() is not None}
        return self._memory.setdefault(id(provider), (weakref.ref(provider), {}))[1]

    def _settings(self, options: GenerationOptions) -> RequestSettings:
        """The settings of the next request: the session's, overridden by those of its profile."""
        profile = Profile() if self.profile is None else self.profile(self)
        if not isinstance(profile, Profile):
            raise InvalidArgument(f"a profile function must return a Profile, got {profile!r}")
        return RequestSettings.of(self, profile, options)

    def _cache_settings(self) -> RequestSettings:
        if self.cache is None:
            raise InvalidArgument("the session has no bounded cache; begin it with cache=")
        return self._settings(GenerationOptions())

    def _provider_request(self, settings: RequestSettings, transcript: Transcript) -> ProviderRequest:
        return ProviderRequest(
            transcript,
            tuple(settings.tools().values()),
            adapter=settings.adapter(),
            memory=self._provider_memory(settings.provider),
            cache=self.cache,
        )

    def _locked(self, what: str, error: type[ConcurrentRequests] = ConcurrentRequests) -> _SessionLock:
        return _SessionLock(self._busy, what, error)

    def _start(
        self, prompt: PromptLike, generating: Any, options: GenerationOptions, *, snapshots: bool
    ) -> ResponseStream[Any]:
        """Validate everything, lock the session, and return the stream that unlocks it."""
        given = Prompt.of(prompt)
        if not given.text.strip() and not given.attachments:
            raise InvalidInput(f"the prompt is empty ({prompt!r:.40}); say what the model should do")
        schema = None if generating is None or generating is str else Schema.of(generating)
        if schema is not None and options.stop:
            raise InvalidArgument(
                f"stop strings {list(options.stop)} would cut a typed answer; leave one of the two out"
            )
        lock = self._locked("answer another request")
        lock.__enter__()
        try:
            running = RequestLoop(self, given, schema, self._settings(options), snapshots)
            events = running.ask(0)
        except BaseException:
            lock.__exit__()
            raise
        return ResponseStream(running.steps(events), running.cancel, lock.__exit__)


class _SessionLock:
    """Lock of a session for one request; entering raises `ConcurrentRequests`, leaving twice is harmless."""

    def __init__(self, lock: threading.Lock, what: str, error: type[ConcurrentRequests]) -> None:
        self.lock, self.what, self.error, self.held = lock, what, error, False

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            raise self.error(
                f"the session is still answering and cannot {self.what}; wait for it, cancel it, or use another"
            )
        self.held = True

    def __exit__(self, *_: object) -> None:
        if self.held:
            self.held = False
            self.lock.release()
