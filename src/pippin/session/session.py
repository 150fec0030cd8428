"""A session: one conversation with one model, in typed answers, streams and tools.

Notable here:
- one session, one transcript, one request at a time: a second request raises `ConcurrentRequests`, it never waits
- a request that fails or is cancelled leaves the transcript as it was
- instructions and earlier prompts stay computed between requests, so that a long beginning is paid for once
- every call has an ``async`` form; the model runs in a thread and the event loop stays free
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload

from pippin.core.errors import (
    AnswerTruncated,
    Cancelled,
    ConcurrentRequests,
    ContextOverflow,
    InvalidArgument,
    InvalidInput,
    ToolCallError,
    TooManyToolRounds,
)
from pippin.engine.engine import Engine, Finished, Prefix, Request, Token, common_prefix
from pippin.engine.text import TextStream
from pippin.language.load import LanguageModel, load
from pippin.session import prompting
from pippin.session.options import GenerationOptions
from pippin.session.response import Response, Snapshot, Stream, Timing, Usage
from pippin.session.schema import Schema
from pippin.session.tools import Decision, Deny, Replace, Tool, as_tools, decide, parse_call
from pippin.session.transcript import Answer, Instructions, Prompt, ToolCall, ToolCalls, ToolOutput, Transcript

T = TypeVar("T")


class Session:
    """A conversation with a model.

    Args:
        model: a model reference (see `pippin.load`) or a loaded model.
        instructions: what the model is to be and do; outranks every prompt.
        tools: functions that the model may call.
        on_tool_call: asked before each call; returns `Allow`, `Deny` or `Replace`.
        max_tool_rounds: how often in a row the model may call tools before it must have answered.
        tool_timeout: seconds that one call may take; None for no limit.
        transcript: a conversation to go on with; its instructions are used if none are given.

    Raises:
        ModelNotFound, DownloadFailed, CheckpointError: the model cannot be had.
        InvalidTool: a function that cannot become a tool.

    >>> session = Session("smollm2-135m", instructions="Answer briefly.")           # doctest: +SKIP
    >>> session.respond("What is the capital of France?").content                   # doctest: +SKIP
    'The capital of France is Paris.'
    """

    def __init__(
        self,
        model: str | Path | LanguageModel = "smollm2-135m",
        *,
        instructions: str | None = None,
        tools: Sequence[Tool[..., Any] | Callable[..., Any]] = (),
        on_tool_call: Callable[[ToolCall], Decision] | None = None,
        max_tool_rounds: int = 8,
        tool_timeout: float | None = 60.0,
        transcript: Transcript | None = None,
    ) -> None:
        if max_tool_rounds < 1:
            raise InvalidArgument(f"max_tool_rounds must be at least 1, got {max_tool_rounds}")
        if tool_timeout is not None and not tool_timeout > 0:
            raise InvalidArgument(f"tool_timeout must be above 0 seconds, or None, got {tool_timeout}")
        self.tools = as_tools(tools)
        self.on_tool_call, self.max_tool_rounds, self.tool_timeout = on_tool_call, max_tool_rounds, tool_timeout
        self.model = model if isinstance(model, LanguageModel) else load(model)
        self.engine = Engine(self.model)
        begin = Transcript() if instructions is None else Transcript(entries=(Instructions(text=instructions),))
        if transcript is not None:
            entries = [e for e in transcript if instructions is None or not isinstance(e, Instructions)]
            begin = begin.add(*entries)
        self._instructions = tuple(entry for entry in begin if isinstance(entry, Instructions))
        self._transcript = begin
        self._prefix = Prefix()
        self._busy = threading.Lock()

    @property
    def transcript(self) -> Transcript:
        """The conversation so far. It may be replaced between requests.

        Raises:
            ConcurrentRequests: (when set) a request is running.
        """
        return self._transcript

    @transcript.setter
    def transcript(self, transcript: Transcript) -> None:
        with self._alone("replace the transcript"):
            self._transcript = transcript

    @property
    def is_responding(self) -> bool:
        """Whether a request is running."""
        return self._busy.locked()

    def reset(self) -> None:
        """Forget the conversation; the instructions stay.

        Raises:
            ConcurrentRequests: a request is running.
        """
        self.transcript = Transcript(entries=self._instructions)

    @overload
    def respond(self, prompt: str, *, options: GenerationOptions = ...) -> Response[str]: ...
    @overload
    def respond(
        self, prompt: str, *, generating: type[T] | Schema[T], options: GenerationOptions = ...
    ) -> Response[T]: ...
    @overload
    def respond(self, prompt: str, *, generating: Any, options: GenerationOptions = ...) -> Response[Any]: ...
    def respond(
        self, prompt: str, *, generating: Any = None, options: GenerationOptions = GenerationOptions()
    ) -> Response[Any]:
        """Answer a prompt.

        Args:
            prompt: what the user says.
            generating: the type of the answer: anything that `Schema` takes. None for free text.
            options: how to choose tokens and when to stop.

        Raises:
            InvalidInput: an empty prompt.
            SchemaError: ``generating`` cannot be enforced.
            ContextOverflow: the conversation does not fit; raised before anything is computed.
            ConcurrentRequests: the session is still answering.
            AnswerTruncated: a typed answer met ``max_tokens`` before it was complete.
            ToolCallError: a tool failed. TooManyToolRounds: the model did not stop calling tools.
        """
        stream: Stream[Any] = self._start(prompt, generating, options, snapshots=False)
        for _ in stream:
            pass
        return stream.response

    async def arespond(
        self, prompt: str, *, generating: Any = None, options: GenerationOptions = GenerationOptions()
    ) -> Response[Any]:
        """`respond` for asyncio; cancelling the task ends the answer before its next token."""
        stream: Stream[Any] = self._start(prompt, generating, options, snapshots=False)
        async for _ in stream:
            pass
        return stream.response

    @overload
    def stream(self, prompt: str, *, options: GenerationOptions = ...) -> Stream[str]: ...
    @overload
    def stream(
        self, prompt: str, *, generating: type[T] | Schema[T], options: GenerationOptions = ...
    ) -> Stream[T]: ...
    @overload
    def stream(self, prompt: str, *, generating: Any, options: GenerationOptions = ...) -> Stream[Any]: ...
    def stream(
        self, prompt: str, *, generating: Any = None, options: GenerationOptions = GenerationOptions()
    ) -> Stream[Any]:
        """Answer a prompt in snapshots; arguments and errors as for `respond`, those of the prompt at once."""
        return self._start(prompt, generating, options, snapshots=True)

    def prewarm(self, prompt_prefix: str = "") -> int:
        """Compute instructions, tools and the given beginning of a prompt now; return how many tokens are ready.

        A request that begins like this starts sooner, with the same logits, bit for bit.

        Raises:
            ConcurrentRequests: a request is running. ContextOverflow: the beginning alone is too long.
        """
        with self._alone("prewarm"):
            # what two prompts have in common is what does not depend on how the prompt goes on
            one, other = (
                prompting.encode(self.model, self._transcript.add(Prompt(text=prompt_prefix + end)), self.tools)
                for end in ("a", "b")
            )
            self.engine.check(one, GenerationOptions())
            return self.engine.prefill(one[: common_prefix(one, other)], self._prefix)

    def token_count(self, item: Any) -> int:
        """How many tokens something costs in a prompt.

        Args:
            item: text; a `Tool`; a `Transcript`; or a type or `Schema`, counted as its text in the prompt.
        """
        if isinstance(item, Transcript):
            return len(prompting.encode(self.model, item, self.tools))
        if isinstance(item, Tool):
            item = json.dumps(item.definition()["function"], ensure_ascii=False)
        text = item if isinstance(item, str) else Schema(item).prompt_text()
        return len(self.model.tokenizer.encode(text))

    def _alone(self, what: str) -> _Alone:
        return _Alone(self._busy, what)

    def _start(self, prompt: str, generating: Any, options: GenerationOptions, *, snapshots: bool) -> Stream[Any]:
        """Check everything, take the session, and return the stream that gives it back."""
        if not isinstance(prompt, str) or not prompt.strip():
            raise InvalidInput(f"the prompt is empty ({prompt!r:.40}); say what the model should do")
        self._refuse_huge(prompt)
        schema = None if generating is None or generating is str else Schema.of(generating)
        if schema is not None and options.stop:
            raise InvalidArgument(
                f"stop strings {list(options.stop)} would cut a typed answer; leave one of the two out"
            )
        if options.tool_calling == "required" and not self.tools:
            raise InvalidArgument("tool_calling is required, but the session has no tools")
        alone = self._alone("answer another request")
        alone.__enter__()
        try:
            turn = _Turn(self, prompt, schema, options, snapshots)
            first = turn.request(0)
        except BaseException:
            alone.__exit__()
            raise
        return Stream(turn.steps(first), turn.cancel, alone.__exit__)

    def _least_tokens(self, text: str) -> int:
        """A number of tokens that a text has in any case, from its length alone."""
        return len(text) // self.model.tokenizer.longest_token

    def _refuse_huge(self, prompt: str) -> None:
        """Raise `ContextOverflow` for a prompt that cannot fit, without cutting megabytes of it into tokens."""
        size, least = self.model.context_size, self._least_tokens(prompt)
        if least > size:
            raise ContextOverflow(
                f"a prompt of {len(prompt):,} characters is at least {least:,} tokens, the context of "
                f"{self.model.name} holds {size:,}; shorten the prompt or take another model",
                context_size=size,
                token_count=least,
            )


class _Alone:
    """Holds a session for one request; entering raises `ConcurrentRequests`, leaving twice is harmless."""

    def __init__(self, lock: threading.Lock, what: str) -> None:
        self.lock, self.what, self.held = lock, what, False

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            raise ConcurrentRequests(
                f"the session is still answering and cannot {self.what}; wait for it, cancel it, or use another"
            )
        self.held = True

    def __exit__(self, *_: object) -> None:
        if self.held:
            self.held = False
            self.lock.release()


class _Turn:
    """One request: rounds of tool calls, then the answer."""

    def __init__(
        self, session: Session, prompt: str, schema: Schema[Any] | None, options: GenerationOptions, snapshots: bool
    ) -> None:
        self.session, self.schema, self.options, self.snapshots = session, schema, options, snapshots
        self.cancel = threading.Event()
        self.entries: list[Any] = [Prompt(text=prompt)]
        self.tools = {} if options.tool_calling == "disallowed" else session.tools
        self.usage, self.timing = Usage(), Timing()
        self.tokens: list[Token] = []

    def request(self, round: int) -> Request:
        """What the engine is asked in a round; raises `ContextOverflow` if it does not fit."""
        session = self.session
        hint = ""
        if self.schema is not None and self.options.include_schema_in_prompt:
            hint = self.schema.prompt_text()
        ids = prompting.encode(session.model, session.transcript.add(*self.entries), self.tools, hint)
        session.engine.check(ids, self.options)
        required = self.options.tool_calling == "required" and round == 0
        grammar = prompting.grammar(
            self.schema, self.tools.values(), required=required, parallel=self.options.parallel_tool_calls
        )
        return Request(ids, self.options, grammar, session._prefix, self.cancel)

    def steps(self, request: Request) -> Generator[Snapshot, None, Response[Any]]:
        """Snapshots, beginning with the first request; at the end the transcript is replaced, the response returned."""
        session = self.session
        for round in range(session.max_tool_rounds + 1):
            finished, raw = yield from self._write(request)
            written = dict.fromkeys(prompting.CALL.findall(raw))  # a call that is written twice is one call
            calls = [parse_call(text, f"call_{round}_{i}") for i, text in enumerate(written)]
            if not (self.tools and calls):
                break
            if round == session.max_tool_rounds:
                raise TooManyToolRounds(
                    f"the model called tools in {round} rounds and again ({calls[0].name}); raise max_tool_rounds, "
                    "give it less to do in one prompt, or set tool_calling to 'disallowed'"
                )
            said = raw[: raw.index(prompting.OPEN)].strip()
            self.entries.append(ToolCalls(calls=tuple(calls), text=said))
            self.entries += [self._call(call) for call in calls]
            request = self.request(round + 1)
        content: Any = raw
        if self.schema is not None:
            content = self.schema.parse(raw)
        self.entries.append(Answer(text=raw))
        session._transcript = session._transcript.add(*self.entries)
        return Response(content, raw, self.usage, finished.reason, tuple(self.entries), self.timing, tuple(self.tokens))

    def _write(self, request: Request) -> Generator[Snapshot, None, tuple[Finished, str]]:
        """Let the model write once; yield snapshots of what is not a tool call."""
        raw = told = ""
        content: Any = None
        visible = TextStream([prompting.OPEN] if self.tools and self.schema is None else [])
        self.tokens = []
        for event in self.session.engine.stream(request):
            raw += event.text
            visible.push(event.text.encode("utf-8", "surrogatepass"))
            if isinstance(event, Finished):
                visible.finish()
            else:
                self.tokens.append(event)
            calling = self.schema is not None and self.tools and prompting.OPEN.startswith(raw[: len(prompting.OPEN)])
            if self.snapshots and not calling and visible.text != told:
                delta, told = visible.text[len(told) :], visible.text
                content = told if self.schema is None else self.schema.snapshot(told)
                yield Snapshot(content, told, delta)
        assert isinstance(event, Finished)
        if self.snapshots and self.schema is not None and event.reason == "stop" and not calling:
            whole = self.schema.snapshot(told, complete=True)  # only now does a number show that it is complete
            if whole != content:
                yield Snapshot(whole, told, "")
        self._account(event)
        if event.reason == "cancelled":
            raise Cancelled(f"the answer was cancelled after {event.answer_tokens} tokens")
        cut = raw.rfind(prompting.OPEN) > raw.rfind(prompting.CLOSE) if self.tools else False
        if event.reason == "length" and (self.schema is not None or cut):
            what = "a tool call" if cut else "the typed answer"
            raise AnswerTruncated(
                f"{what} was not complete after {event.answer_tokens} tokens; raise max_tokens or ask for less",
                partial=raw,
            )
        return event, raw

    def _account(self, event: Finished) -> None:
        self.usage += Usage(event.prompt_tokens, event.cached_tokens, event.answer_tokens)
        self.timing = Timing(
            self.timing.prompt_seconds + event.prompt_seconds,
            self.timing.answer_seconds + event.total_seconds - event.prompt_seconds,
            self.timing.first_token_seconds or event.first_token_seconds,
        )

    def _call(self, call: ToolCall) -> ToolOutput:
        """Decide on a call, run it, and check that the model can read what it returned."""
        session = self.session
        decision = decide(call, session.on_tool_call)
        if isinstance(decision, Deny):
            return ToolOutput(call_id=call.id, name=call.name, text=decision.reason)
        arguments = decision.arguments if isinstance(decision, Replace) else call.arguments
        text = session.tools[call.name].call(arguments, timeout=session.tool_timeout)
        count = session._least_tokens(text)  # megabytes are told by their length, the rest is counted
        count = count if count >= session.model.context_size else session.token_count(text)
        if count >= session.model.context_size:
            cause = ContextOverflow(
                f"{count:,} tokens in a context of {session.model.context_size:,}",
                context_size=session.model.context_size,
                token_count=count,
            )
            raise ToolCallError(
                f"tool {call.name!r} returned {len(text):,} characters, more than the context of {session.model.name} "
                f"({session.model.context_size:,} tokens) holds; return a part or a summary",
                tool=call.name,
                cause=cause,
                arguments=arguments,
            )
        return ToolOutput(call_id=call.id, name=call.name, text=text)
