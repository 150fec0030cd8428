"""One request of a session: rounds of tool calls, then the answer, with hooks, guardrails and history policy.

Notable here:
- everything that can be checked is checked before the first token: prompt, capabilities, constraints, context
- what is streamed has passed the guardrails; what is stored has passed the hooks
- tool calls are approved in their order and run in parallel; their outputs keep that order
- an answer that a validator of its type does not accept is asked for again, at most `retries` times; the transcript
  keeps the accepted answer alone, the usage counts all
- calls that were whole when max_tokens cut the answer are run; without any, the request ends with `AnswerTruncated`
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from pydantic_core import to_json

from pippin.core.errors import (
    AnswerTruncated,
    Cancelled,
    ContextOverflow,
    Denied,
    InvalidAnswer,
    InvalidArgument,
    InvalidInput,
    InvalidProviderAnswer,
    Refusal,
    TimedOut,
    ToolCallError,
    TooManyToolRounds,
    UnsupportedCapability,
)
from pippin.engine.request import Token
from pippin.session.hooks import Deny, Replace
from pippin.session.options import GenerationOptions
from pippin.session.providers.provider import (
    Done,
    ProviderEvent,
    ProviderRequest,
    ReasoningDelta,
    Refused,
    TextDelta,
    ToolCallsMade,
    require,
)
from pippin.session.response import Response, Snapshot, Timing, Usage
from pippin.session.settings import RequestSettings
from pippin.session.tools import Tool
from pippin.session.transcript import (
    Answer,
    Instructions,
    Prompt,
    Reasoning,
    StructuredSegment,
    TextSegment,
    ToolCall,
    ToolCalls,
    ToolOutput,
    Transcript,
)
from pippin.session.types.schema import Schema

if TYPE_CHECKING:
    from pippin.session.guardrails.value_checker import ValueChecker
    from pippin.session.session import Session


_CORRECTION: Final = "Your last answer was not accepted: {reason}. Write the whole answer again, corrected."


@dataclass
class _RoundOutput:
    """The model's output in one round."""

    shown: str = ""
    reasoning: str = ""
    signature: bytes | None = None
    calls: tuple[ToolCall, ...] = ()
    refusal: str | None = None
    safe: str = ""  # of a typed answer under guardrails, the part that may be shown
    tokens: list[Token] = field(default_factory=list)
    done: Done | None = None


class RequestLoop:
    """One request of a session."""

    def __init__(
        self, session: Session, prompt: Prompt, schema: Schema[Any] | None, settings: RequestSettings, snapshots: bool
    ) -> None:
        self.session, self.schema, self.settings, self.snapshots = session, schema, settings, snapshots
        self.cancel = threading.Event()
        self.usage, self.timing = Usage(), Timing()
        self.identity = uuid.uuid4().hex
        self.output = _RoundOutput()
        self.timed_out = False
        self.values: ValueChecker | None = None
        self.correction: tuple[Any, ...] = ()  # entries that the model reads while it is asked again
        self.loaded = () if session.skills is None else tuple(session.skills.loaded)
        if settings.profile.name != session._active:
            session._active = settings.profile.name
            if settings.hooks.on_activate is not None:
                settings.hooks.on_activate(settings.profile)
        decision = settings.hooks.decide("on_prompt", prompt)
        if isinstance(decision, Deny):
            raise Denied(decision.reason)
        if isinstance(decision, Replace):
            prompt = Prompt.of(decision.value)
        self.entries: list[Any] = [self._checked(prompt)]
        self.tools: dict[str, Tool[..., Any]] = {}

    def _checked(self, prompt: Prompt) -> Prompt:
        """The prompt after the guardrails, which may have masked parts of its text."""
        if self.session.guardrails is None:
            return prompt
        text = self.session.guardrails.enforce(prompt.text, role="input")
        if text == prompt.text:
            return prompt
        return Prompt(segments=(TextSegment(text=text), *(part for part in prompt.attachments if not part.is_text)))

    def ask(self, round: int) -> Iterator[ProviderEvent]:
        """Send a round to the provider; raises errors that are known without computing or sending anything."""
        session, settings = self.session, self.settings
        options = settings.options
        if round and options.tool_calling == "required":
            options = replace(options, tool_calling="allowed")
        self.tools = settings.tools()
        request = ProviderRequest(
            settings.view(session.transcript.add(*self.entries)),
            tuple(self.tools.values()),
            self.schema,
            options,
            settings.adapter(),
            self.cancel,
            session._provider_memory(settings.provider),
            session.cache,
        )
        require(settings.provider, request)
        if settings.history is not None:
            request = replace(request, transcript=settings.history(request.transcript, _HistoryModel(self, request)))
        return settings.provider.stream(request)

    def steps(self, events: Iterator[ProviderEvent]) -> Generator[Snapshot[Any], None, Response[Any]]:
        """Snapshots, starting with the first round; at the end the transcript is replaced, the response returned."""
        timer = None
        if self.settings.options.timeout is not None:
            timer = threading.Timer(self.settings.options.timeout, self._expire)
            timer.daemon = True
            timer.start()
        try:
            response = yield from self._rounds(events)
        except BaseException as error:
            if self.session.on_error == "preserve":
                self._preserve(error)
            elif self.session.skills is not None:
                self.session.skills.loaded[:] = self.loaded  # their instructions are not in the transcript any more
            raise
        finally:
            if timer is not None:
                timer.cancel()
            self.session._usage += self.usage
        self.session._transcript = self.session._transcript.add(*self.entries)
        return response

    def _expire(self) -> None:
        self.timed_out = True
        self.cancel.set()

    def _rounds(self, events: Iterator[ProviderEvent]) -> Generator[Snapshot[Any], None, Response[Any]]:
        """The answer, asked for again as long as a validator does not accept it and there are retries left."""
        most = self.settings.options.retries
        for tries in range(1, most + 2):
            kept = len(self.entries)
            yield from self._tool_rounds(events)
            try:
                content = self._parsed()
            except InvalidAnswer as error:
                if tries > most:
                    said = f"{error} (tries: {tries}); raise retries, say in the prompt what is checked, or "
                    raise InvalidAnswer(
                        said + "ease the validator",
                        value=error.value,
                        text=error.text,
                        reason=error.reason,
                        tries=tries,
                    ) from error
                events = self._ask_again(error, kept)
                continue
            break
        if self.snapshots and self.schema is not None and self.schema.validators:
            yield self._shown(content, "", complete=True)
        self._forget_correction()
        return self._respond(content)

    def _ask_again(self, error: InvalidAnswer, kept: int) -> Iterator[ProviderEvent]:
        """Send the conversation with the answer that was not accepted, and why."""
        calls = [i for i, entry in enumerate(self.entries[kept:], kept) if isinstance(entry, ToolOutput)]
        del self.entries[(calls[-1] + 1 if calls else kept) :]  # reasoning about the answer that is dropped
        self._forget_correction()
        self.correction = (self._answer(error.text), Prompt(_CORRECTION.format(reason=error.reason)))
        self.entries += self.correction
        self.output = _RoundOutput()
        return self.ask(1)

    def _forget_correction(self) -> None:
        self.entries = [entry for entry in self.entries if not any(entry is each for each in self.correction)]
        self.correction = ()

    def _tool_rounds(self, events: Iterator[ProviderEvent]) -> Generator[Snapshot[Any], None, None]:
        """Rounds of tool calls until the model answers, whose answer is then in `output`."""
        most = self.session.max_tool_rounds
        for round in range(most + 1):
            yield from self._write(events)
            output = self.output
            if output.reasoning:
                self._add_reasoning(output)
            if not output.calls:
                break
            if round == most:
                raise TooManyToolRounds(
                    f"the model called tools in {round} rounds and again ({output.calls[0].name}); raise "
                    "max_tool_rounds, give it less to do in one prompt, or set tool_calling to 'disallowed'"
                )
            partial = "" if output.done is None else self._allowed(output.done.partial_call)
            self.entries.append(ToolCalls(calls=output.calls, text=self._text_before_calls(output), partial=partial))
            self.output = _RoundOutput()
            self.entries += self._call(output.calls)
            events = self.ask(round + 1)

    def _allowed(self, text: str) -> str:
        """A call that was cut, as the guardrails let it pass; nothing of one that they block."""
        guardrails = self.session.guardrails
        if guardrails is None or not text:
            return text
        verdict = guardrails.check(text, role="output")
        return (text if verdict.text is None else verdict.text) if verdict.allowed else ""

    def _text_before_calls(self, output: _RoundOutput) -> str:
        """The model's text before its tool calls, after the guardrails."""
        guardrails, text = self.session.guardrails, output.shown.strip()
        return guardrails.enforce(text, role="output") if guardrails is not None and self._typed and text else text

    # --- one round ------------------------------------------------------------------------------------------------

    def _write(self, events: Iterator[ProviderEvent]) -> Generator[Snapshot[Any], None, None]:
        """Run one round; yield snapshots of what is not a tool call."""
        output = self.output = _RoundOutput()
        guardrails = self.session.guardrails
        checker = guardrails.stream() if guardrails is not None and not self._typed else None
        thoughts = None if guardrails is None else guardrails.stream()
        self.values = guardrails.stream_value() if guardrails is not None and self._typed else None
        try:
            for event in events:
                if isinstance(event, TextDelta):
                    output.tokens += event.tokens
                    released = event.text if checker is None else checker.push(event.text)
                    output.shown += released
                    if released and self.snapshots:
                        yield self._snapshot(released)
                else:
                    self._record_event(event)
                    if isinstance(event, ReasoningDelta) and self.snapshots:
                        released = event.text if thoughts is None else thoughts.push(event.text)
                        if released:
                            yield self._reasoning_snapshot(released)
        finally:
            if isinstance(events, Generator):
                events.close()  # now, not when the last traceback that refers to it is gone: frees the engine
        self._end(output)
        released = "" if checker is None else checker.finish()
        output.shown += released
        unchecked = self.schema is not None and bool(output.calls or self.schema.validators)
        if self.snapshots and output.shown and not unchecked:
            yield self._snapshot(released, complete=not output.calls)

    def _record_event(self, event: ProviderEvent) -> None:
        """Record an event other than text."""
        output = self.output
        if isinstance(event, ReasoningDelta):
            output.reasoning += event.text
            output.signature = event.signature or output.signature
        elif isinstance(event, ToolCallsMade):
            output.calls += self._numbered(event.calls)
            output.calls = output.calls[: self._max_calls]
            if self.session.guardrails is not None:
                for call in event.calls:
                    self.session.guardrails.enforce_value(call.arguments, role="output")
        elif isinstance(event, Refused):
            output.refusal = event.explanation
        elif isinstance(event, Done):
            output.done = event

    @property
    def _max_calls(self) -> int:
        """How many calls of one round are run; a model that is not constrained may write more."""
        options = self.settings.options
        return options.max_tool_calls if options.parallel_tool_calls else 1

    def _numbered(self, calls: tuple[ToolCall, ...]) -> tuple[ToolCall, ...]:
        """The calls with ids that no other call of the conversation has, not even one the model did not read."""
        known = (*self.session.transcript, *self.entries, ToolCalls(calls=self.output.calls))
        taken = {call.id for entry in known if isinstance(entry, ToolCalls) for call in entry.calls}
        found = []
        for call in calls:
            number = len(taken)
            while call.id in taken:
                call = call.model_copy(update={"id": f"call_{number}"})
                number += 1
            taken.add(call.id)
            found.append(call)
        return tuple(found)

    @property
    def _typed(self) -> bool:
        """Whether the answer is JSON, as opposed to text, free or under a grammar."""
        return self.schema is not None and self.schema.json_schema is not None

    def _reasoning_snapshot(self, delta: str) -> Snapshot[Any]:
        """A snapshot before the answer begins."""
        content = "" if self.schema is None else self.schema.snapshot("", complete=False, identity=self.identity)
        return Snapshot(content, "", "", reasoning_delta=delta)

    def _snapshot(self, delta: str, *, complete: bool = False) -> Snapshot[Any]:
        text = self.output.shown
        if self.schema is None:
            return Snapshot(text, text, delta, complete)
        return self._shown(
            self.schema.snapshot(text, complete=complete, identity=self.identity), delta, complete=complete
        )

    def _shown(self, content: Any, delta: str, *, complete: bool) -> Snapshot[Any]:
        """A snapshot of a typed answer, after the guardrails."""
        if self.values is None:
            return Snapshot(content, self.output.shown, delta, complete)
        content = self.values.push(content, complete=complete)
        # the text itself may contain parts of strings that must not be shown yet
        self.output.safe = to_json(content).decode()
        return Snapshot(content, self.output.safe, "", complete)

    def _end(self, output: _RoundOutput) -> None:
        """Count the usage of the round; raise if it did not end as it should."""
        provider, done = self.settings.provider, output.done
        if done is None and output.refusal is not None:
            raise _refusal(output.refusal)
        if done is None:
            raise InvalidProviderAnswer(f"{provider.name} ended its answer without saying why; ask again")
        self.usage += done.usage
        self.timing += done.timing
        if output.refusal is not None:
            raise _refusal(output.refusal)
        if done.finish_reason == "cancelled":
            raise self.stopped(done)
        typed = self.schema is not None and not output.calls
        if done.finish_reason == "length" and not output.calls and (done.partial_call or typed):
            what = "a tool call" if done.partial_call else "the typed answer"
            raise AnswerTruncated(
                f"{what} was not complete after {done.usage.output_tokens} tokens; raise max_tokens or ask for less",
                partial=self._allowed(done.partial_call) or self._released_text,
            )

    def stopped(self, done: Done) -> TimedOut | Cancelled:
        """The error for a round that was cancelled or timed out."""
        if self.timed_out:
            seconds = self.settings.options.timeout
            return TimedOut(
                f"no complete answer within {seconds:g} seconds; raise timeout or ask for less",
                partial=self._released_text,
            )
        return Cancelled(f"the answer was cancelled after {done.usage.output_tokens} tokens")

    @property
    def _released_text(self) -> str:
        """The part of the answer that may be shown: under guardrails, what they have released."""
        return self.output.shown if self.values is None else self.output.safe

    def _add_reasoning(self, output: _RoundOutput) -> None:
        if self.session.guardrails is not None:
            output.reasoning = self.session.guardrails.enforce(output.reasoning, role="output")
        # model_construct, since validation would take the signature for base64
        entry = Reasoning.model_construct(text=output.reasoning.strip(), signature=output.signature)
        decision = self.settings.hooks.decide("on_reasoning", entry)
        if isinstance(decision, Deny):
            raise Denied(decision.reason)
        if isinstance(decision, Replace):
            entry = entry.model_copy(update={"text": str(decision.value)})
        self.entries.append(entry)

    # --- the answer -----------------------------------------------------------------------------------------------

    def _parsed(self) -> Any:
        """The answer as a value of its type."""
        if self.schema is None:
            return self.output.shown
        try:
            return self.schema.parse(self.output.shown, identity=self.identity)
        except InvalidInput as error:
            name = self.settings.provider.name
            raise InvalidProviderAnswer(f"{name} did not hold to the type: {error}") from error

    def _respond(self, content: Any) -> Response[Any]:
        """Check, build and store the answer."""
        guardrails = self.session.guardrails
        assert self.output.done is not None
        raw: str = self.output.shown
        if guardrails is not None and self._typed:
            checked = guardrails.enforce_value(content, role="output")
            if checked is not content:
                content, raw = checked, self._as_text(checked)
        elif guardrails is not None and guardrails.detect_refusals and (explanation := guardrails.refusal(raw)):
            raise _refusal(explanation)
        reason = "length" if self.output.done.finish_reason == "length" else "stop"
        entries = (*self.entries, self._answer(raw))
        tokens, exact = tuple(self.output.tokens), self.output.done.exact
        notes = () if self.schema is None else self.schema.notes
        response = Response(content, raw, self.usage, reason, entries, self.timing, tokens, exact, notes)  # type: ignore[arg-type]
        decision = self.settings.hooks.decide("on_response", response)
        if isinstance(decision, Deny):
            raise Denied(decision.reason)
        if isinstance(decision, Replace):
            raw = self._as_text(decision.value)
            entries = (*self.entries, self._answer(raw))
            response = replace(response, content=decision.value, raw_content=raw, transcript_entries=entries)
        self.entries = list(entries)
        return response

    def _answer(self, raw: str) -> Answer:
        """The transcript entry of the answer."""
        if self.schema is None or self.schema.json_schema is None:
            return Answer(raw)
        return Answer(
            segments=(StructuredSegment(text=raw, schema_name=str(self.schema.json_schema.get("title", ""))),)
        )

    def _as_text(self, content: Any) -> str:
        """The content that a hook or guardrail returned, as the model would have written it."""
        if not self._typed:
            if not isinstance(content, str):
                raise InvalidArgument(f"on_response must replace text by text, got {content!r:.80}")
            return content
        return to_json(content, by_alias=True).decode()

    # --- tools ----------------------------------------------------------------------------------------------------

    def _call(self, calls: tuple[ToolCall, ...]) -> list[ToolOutput]:
        """Approve the calls, run the allowed ones, and check that the model can read their outputs."""
        decisions = [self.settings.hooks.decide("on_tool_call", call) for call in calls]
        with ThreadPoolExecutor(max_workers=len(calls), thread_name_prefix="tool calls") as pool:
            waiting = [
                None if isinstance(decision, Deny) else pool.submit(self._run, call, decision)
                for call, decision in zip(calls, decisions, strict=True)
            ]
        outputs = []
        for call, decision, result in zip(calls, decisions, waiting, strict=True):
            text = decision.reason if isinstance(decision, Deny) else result.result() if result else ""
            outputs.append(self._after_hook(ToolOutput(text, call_id=call.id, name=call.name)))
        return outputs

    def _run(self, call: ToolCall, decision: object) -> str:
        arguments = decision.value if isinstance(decision, Replace) else call.arguments
        tool = self.tools.get(call.name)
        if tool is None:
            raise ToolCallError(
                f"the model called {call.name!r}, which is not one of its tools ({', '.join(self.tools)})",
                tool=call.name,
                arguments=arguments,
            )
        try:
            text = tool.call(arguments, timeout=self.session.tool_timeout, cancel=self.cancel)
        except Cancelled:
            raise self.stopped(Done("cancelled", self.usage)) from None
        self._check_output_size(call, text, arguments)
        return text

    def _after_hook(self, output: ToolOutput) -> ToolOutput:
        """The output after its hook."""
        decision = self.settings.hooks.decide("on_tool_output", output)
        if isinstance(decision, Deny):
            return ToolOutput(decision.reason, call_id=output.call_id, name=output.name)
        if isinstance(decision, Replace):
            return ToolOutput(str(decision.value), call_id=output.call_id, name=output.name)
        return output

    def _check_output_size(self, call: ToolCall, text: str, arguments: Any) -> None:
        """Raise `ToolCallError` for an output that exceeds the context; by its length, or else by its tokens."""
        provider = self.settings.provider
        size = provider.context_size
        if size is None or len(text) < size:  # a token is at least one character
            return
        try:
            count = size if len(text) > 1000 * size else provider.token_count(text)
        except UnsupportedCapability:
            return
        if count < size:
            return
        cause = ContextOverflow(
            f"{len(text):,} characters in a context of {size:,} tokens", context_size=size, token_count=count
        )
        raise ToolCallError(
            f"tool {call.name!r} returned {len(text):,} characters, more than the context of {provider.name} "
            f"({size:,} tokens) holds; return a part or a summary",
            tool=call.name,
            cause=cause,
            arguments=arguments,
        )

    # --- when it fails --------------------------------------------------------------------------------------------

    def _preserve(self, error: BaseException) -> None:
        """Store the partial result: no call without an output, and the part of the answer that may be shown."""
        self._forget_correction()
        entries, known = list(self.entries), {e.call_id for e in self.entries if isinstance(e, ToolOutput)}
        for entry in self.entries:
            for call in entry.calls if isinstance(entry, ToolCalls) else ():
                if call.id not in known:
                    text = f"No result: {error}" if str(error) else "No result."
                    entries.append(ToolOutput(text, call_id=call.id, name=call.name))
        part = self._released_text
        if part and not isinstance(error, Denied) and not isinstance(entries[-1], Answer):
            entries.append(Answer(part))
        self.session._transcript = self.session._transcript.add(*entries)


class _HistoryModel:
    """The model interface for a history policy."""

    def __init__(self, running: RequestLoop, request: ProviderRequest) -> None:
        self.running, self.request = running, request
        self.provider = running.settings.provider
        self.context_size = self.provider.context_size

    def token_count(self, transcript: Transcript) -> int:
        """Tokens of a transcript, with the tools and the schema of the request."""
        return self.provider.token_count(replace(self.request, transcript=transcript))

    def ask(self, instructions: str, prompt: str) -> str:
        """A request outside the conversation; its tokens are counted, its text is not shown."""
        transcript = Transcript(entries=(Instructions(instructions), Prompt(prompt)))
        options = GenerationOptions(max_tokens=256, temperature=self.request.options.temperature)
        text = ""
        for event in self.provider.stream(ProviderRequest(transcript, options=options, cancel=self.running.cancel)):
            if isinstance(event, TextDelta):
                text += event.text
            elif isinstance(event, Done):
                self.running.usage += event.usage
                if event.finish_reason == "cancelled":
                    raise self.running.stopped(event)
        return text


def _refusal(explanation: str) -> Refusal:
    said = " ".join(explanation.split())
    return Refusal(f"the model declined: {said[:200]}", explanation=explanation)
