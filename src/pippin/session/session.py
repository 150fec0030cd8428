"""A session: one conversation with one model, in typed answers, streams and tools.

Notable here:
- one session, one transcript, one request at a time: a second request raises `ConcurrentRequests`, it never waits
- a request that fails or is cancelled leaves the transcript as it was, or what there is of it, as the session says
- instructions and earlier prompts stay computed between requests, so that a long beginning is paid for once
- every call has an ``async`` form; the model runs in a thread and the event loop stays free
"""

from __future__ import annotations

import asyncio
import json
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, overload

from pippin.core.errors import ConcurrentRequests, InvalidArgument, InvalidInput, TranscriptMutation
from pippin.language.load import LanguageModel
from pippin.session.history import HistoryPolicy
from pippin.session.hooks import Hooks
from pippin.session.local import LocalModel
from pippin.session.options import GenerationOptions
from pippin.session.profile import Profile, ProfileFunction
from pippin.session.provider import Provider, Turn
from pippin.session.response import Response, Stream, Usage
from pippin.session.running import Running
from pippin.session.schema import Schema
from pippin.session.settings import Settings
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

if TYPE_CHECKING:
    from pippin.session.guardrails import Guardrails

T = TypeVar("T")

OnError = Literal["revert", "preserve"]
Said = str | Prompt | Sequence[str | Segment]


class Session:
    """A conversation with a model.

    Args:
        model: a model reference (see `pippin.load`), a loaded model, or a provider.
        instructions: what the model is to be and do; outranks every prompt.
        tools: functions that the model may call.
        hooks: callbacks that see what passes and may allow, deny or replace it.
        profile: called before each turn with the session; what it returns overrides the settings of that turn.
        history: what of a long conversation the model reads; None for all of it.
        guardrails: rules for what goes in and comes out; None for none.
        skills: instructions and tools that the model loads when it needs them.
        adapter: name of a loaded adapter (`LanguageModel.load_adapter`) to answer with.
        on_error: "revert" leaves the transcript of a failed or cancelled request as it was before; "preserve" keeps
            the prompt, the tools' outputs and the part of the answer that there is.
        max_tool_rounds: how often in a row the model may call tools before it must have answered.
        tool_timeout: seconds that one call may take; None for no limit.
        transcript: a conversation to go on with; its instructions are used if none are given.

    Raises:
        ModelNotFound, DownloadFailed, CheckpointError: the model cannot be had.
        InvalidTool: a function that cannot become a tool.

    ``state`` is a dictionary for the application: profiles and tools may read and write it.

    >>> session = Session("smollm2-135m", instructions="Answer briefly.")           # doctest: +SKIP
    >>> session.respond("What is the capital of Japan?").content                    # doctest: +SKIP
    'The capital of Japan is Tokyo.'
    """

    def __init__(
        self,
        model: str | Path | LanguageModel | Provider = "smollm2-135m",
        *,
        instructions: str | None = None,
        tools: Sequence[Tool[..., Any] | Callable[..., Any]] = (),
        hooks: Hooks = Hooks(),
        profile: ProfileFunction | None = None,
        history: HistoryPolicy | None = None,
        guardrails: Guardrails | None = None,
        skills: Skills | None = None,
        adapter: str | None = None,
        on_error: OnError = "revert",
        max_tool_rounds: int = 8,
        tool_timeout: float | None = 60.0,
        transcript: Transcript | None = None,
    ) -> None:
        if max_tool_rounds < 1:
            raise InvalidArgument(f"max_tool_rounds must be at least 1, got {max_tool_rounds}")
        if tool_timeout is not None and not tool_timeout > 0:
            raise InvalidArgument(f"tool_timeout must be above 0 seconds, or None, got {tool_timeout}")
        if on_error not in get_args(OnError):
            raise InvalidArgument(f"on_error must be revert or preserve, got {on_error!r}")
        self.tools = as_tools(tools)
        self.hooks, self.profile, self.history, self.guardrails = hooks, profile, history, guardrails
        self.skills, self.adapter, self.on_error = skills, adapter, on_error
        self.max_tool_rounds, self.tool_timeout = max_tool_rounds, tool_timeout
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
        with self._alone("replace the transcript", TranscriptMutation):
            self._transcript = transcript

    @property
    def is_responding(self) -> bool:
        """Whether a request is running."""
        return self._busy.locked()

    @property
    def usage(self) -> Usage:
        """Tokens of all requests of this session, the failed ones too."""
        return self._usage

    def reset(self) -> None:
        """Forget the conversation and the loaded skills; the instructions stay.

        Raises:
            TranscriptMutation: a request is running.
        """
        self.transcript = Transcript(entries=self._instructions)
        if self.skills is not None:
            self.skills.unload()

    @overload
    def respond(self, prompt: Said, *, options: GenerationOptions = ...) -> Response[str]: ...
    @overload
    def respond(
        self, prompt: Said, *, generating: type[T] | Schema[T], options: GenerationOptions = ...
    ) -> Response[T]: ...
    @overload
    def respond(self, prompt: Said, *, generating: Any, options: GenerationOptions = ...) -> Response[Any]: ...
    def respond(
        self, prompt: Said, *, generating: Any = None, options: GenerationOptions = GenerationOptions()
    ) -> Response[Any]:
        """Answer a prompt.

        Args:
            prompt: what the user says: text, a `Prompt`, or a list of texts and segments.
            generating: the type of the answer: anything that `Schema` takes. None for free text.
            options: how to choose tokens and when to stop.

        Raises:
            InvalidInput: an empty prompt.
            SchemaError: ``generating`` cannot be enforced.
            UnsupportedCapability: the provider cannot do what is asked; raised before anything is sent.
            ContextOverflow: the conversation does not fit; raised before anything is computed.
            ConcurrentRequests: the session is still answering.
            AnswerTruncated: a typed answer met ``max_tokens`` before it was complete.
            ToolCallError: a tool failed. TooManyToolRounds: the model did not stop calling tools.
            GuardrailViolation: a rule blocked the prompt or the answer. Refusal: the model declined.
            Denied: a hook denied the prompt or the answer. TimedOut: ``options.timeout`` is over.
            ProviderError: a provider behind a network failed.
        """
        stream: Stream[Any] = self._start(prompt, generating, options, snapshots=False)
        for _ in stream:
            pass
        return stream.response

    async def arespond(
        self, prompt: Said, *, generating: Any = None, options: GenerationOptions = GenerationOptions()
    ) -> Response[Any]:
        """`respond` for asyncio; cancelling the task ends the answer before its next token.

        Hooks, guardrails and the history policy work in a thread too. Those of `stream` work where it is called.
        """
        stream: Stream[Any] = await asyncio.to_thread(self._start, prompt, generating, options, snapshots=False)
        async for _ in stream:
            pass
        return stream.response

    @overload
    def stream(self, prompt: Said, *, options: GenerationOptions = ...) -> Stream[str]: ...
    @overload
    def stream(
        self, prompt: Said, *, generating: type[T] | Schema[T], options: GenerationOptions = ...
    ) -> Stream[T]: ...
    @overload
    def stream(self, prompt: Said, *, generating: Any, options: GenerationOptions = ...) -> Stream[Any]: ...
    def stream(
        self, prompt: Said, *, generating: Any = None, options: GenerationOptions = GenerationOptions()
    ) -> Stream[Any]:
        """Answer a prompt in snapshots; arguments and errors as for `respond`, those of the prompt at once."""
        return self._start(prompt, generating, options, snapshots=True)

    def prewarm(self, prompt_prefix: str = "") -> int:
        """Compute instructions, tools and the given beginning of a prompt now; return how many tokens are ready.

        A request that begins like this starts sooner; with the native kernels its logits are the same, bit for bit.

        Raises:
            ConcurrentRequests: a request is running. ContextOverflow: the beginning alone is too long.
        """
        with self._alone("prewarm"):
            settings = self._settings(GenerationOptions())
            transcript = settings.view(self._transcript).add(Prompt(prompt_prefix))
            return settings.provider.prewarm(self._turn(settings, transcript))

    def token_count(self, item: Any) -> int:
        """How many tokens something costs in a prompt.

        Args:
            item: text, or an entry of a transcript; a `Tool`; a `Transcript`, counted as the model reads it; or a type
                or `Schema`, counted as its text in the prompt.

        Raises:
            UnsupportedCapability: the provider cannot count.
        """
        if isinstance(item, Transcript):
            settings = self._settings(GenerationOptions())
            return settings.provider.token_count(self._turn(settings, item))
        if isinstance(item, ToolCalls):
            item = "\n".join([item.text, *(call.model_dump_json(include={"name", "arguments"}) for call in item.calls)])
        elif isinstance(item, Instructions | Prompt | Reasoning | ToolOutput | Answer):
            item = item.text
        elif isinstance(item, ToolDefinition):
            item = json.dumps(item.definition()["function"], ensure_ascii=False)
        return self.provider.token_count(item if isinstance(item, str) else Schema.of(item).prompt_text())

    def _provider(self, model: str | Path | LanguageModel | Provider) -> Provider:
        """The provider of a model; a reference is loaded once, and a model has one engine."""
        if isinstance(model, Provider):
            return model
        key = id(model) if isinstance(model, LanguageModel) else model
        if key not in self._providers:
            self._providers[key] = LocalModel(model)  # which holds the model, so that no other gets its identity
        return self._providers[key]

    def _remembered(self, provider: Provider) -> dict[str, Any]:
        """What a provider keeps from turn to turn; of those that are gone nothing is kept."""
        self._memory = {key: kept for key, kept in self._memory.items() if kept[0]() is not None}
        return self._memory.setdefault(id(provider), (weakref.ref(provider), {}))[1]

    def _settings(self, options: GenerationOptions) -> Settings:
        """What holds for the next turn: the session's settings under those of its profile."""
        profile = Profile() if self.profile is None else self.profile(self)
        if not isinstance(profile, Profile):
            raise InvalidArgument(f"a profile function must return a Profile, got {profile!r}")
        return Settings.of(self, profile, options)

    def _turn(self, settings: Settings, transcript: Transcript) -> Turn:
        return Turn(
            transcript,
            tuple(settings.tools().values()),
            adapter=self.adapter,
            memory=self._remembered(settings.provider),
        )

    def _alone(self, what: str, error: type[ConcurrentRequests] = ConcurrentRequests) -> _Alone:
        return _Alone(self._busy, what, error)

    def _start(self, prompt: Said, generating: Any, options: GenerationOptions, *, snapshots: bool) -> Stream[Any]:
        """Check everything, take the session, and return the stream that gives it back."""
        said = Prompt.of(prompt)
        if not said.text.strip() and not said.attachments:
            raise InvalidInput(f"the prompt is empty ({prompt!r:.40}); say what the model should do")
        schema = None if generating is None or generating is str else Schema.of(generating)
        if schema is not None and options.stop:
            raise InvalidArgument(
                f"stop strings {list(options.stop)} would cut a typed answer; leave one of the two out"
            )
        alone = self._alone("answer another request")
        alone.__enter__()
        try:
            running = Running(self, said, schema, self._settings(options), snapshots)
            events = running.ask(0)
        except BaseException:
            alone.__exit__()
            raise
        return Stream(running.steps(events), running.cancel, alone.__exit__)


class _Alone:
    """Holds a session for one request; entering raises `ConcurrentRequests`, leaving twice is harmless."""

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
