"""Provider for local models: prompts, grammars and tool calls around an engine.

Notable here:
- tool calls are decoded under the grammar of their signatures, in the dialect of the model, and hidden from the text
- an answer that writes a call again is ended: forbidding the repetition in the grammar would make the model change an
  argument, and run a tool that nobody asked for
- the engine keeps reasoning apart from the answer, within its budget: it is not constrained, only the answer is
- the engine's prefix cache is shared: the next request of a conversation, a round of tool calls, or another session
  with the same beginning computes only what is new
- errors that are known from the request alone are raised by the call, before anything is computed
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pippin.core.checks import checked
from pippin.core.errors import ContextOverflow
from pippin.data.text.tool_dialect_name import ToolDialectName
from pippin.engine.engine import Engine, shared_engine
from pippin.engine.options import SamplingOptions
from pippin.engine.request import Finished, Request, Token
from pippin.engine.thinking import Thinking
from pippin.engine.token_ids import common_prefix
from pippin.language import task_adapters
from pippin.language.decoder import Decoder
from pippin.language.language_model import LanguageModel, load
from pippin.language.task_adapters import Task
from pippin.session import chat_format
from pippin.session.extraction.source import SourceText
from pippin.session.providers.provider import (
    Capabilities,
    Done,
    Provider,
    ProviderEvent,
    ProviderRequest,
    Reason,
    ReasoningDelta,
    TextDelta,
    ToolCallsMade,
    require,
)
from pippin.session.response import Timing, Usage
from pippin.session.thinking_tags import thinking_tags
from pippin.session.tool_dialects.grammar import tool_grammar
from pippin.session.tool_dialects.reader import call_reader
from pippin.session.transcript import Prompt, ToolCall, ToolCalls, ToolOutput, Transcript

if TYPE_CHECKING:
    from pippin.engine.grammar.constraint import Grammar
    from pippin.engine.speculation import Speculation
    from pippin.session.types.schema import Schema


class LocalModel(Provider):
    """A model on this machine.

    Args:
        model: a model reference (see `pippin.load`) or a loaded model.
        engine: runs the model; None for the engine that all sessions over this loaded model share, with its prefix
            cache.
        speculation: speculative decoding; None for one token at a time.
        tool_dialect: how the model writes calls of tools; None for what the model was opened with, or its template
            shows.

    Raises:
        ModelNotFound, DownloadFailed, CheckpointError: the model cannot be loaded.
        InvalidArgument, VocabularyMismatch: the speculation cannot be used with this model.
    """

    @checked
    def __init__(
        self,
        model: str | Path | LanguageModel = "smollm2-135m",
        *,
        engine: Engine | None = None,
        speculation: Speculation | None = None,
        tool_dialect: ToolDialectName | None = None,
    ) -> None:
        self.model = model if isinstance(model, LanguageModel) else load(model)
        self.engine = shared_engine(self.model) if engine is None else engine
        self.speculation = speculation
        self.tags = thinking_tags(self.model.template)
        self.dialect = chat_format.dialect_of(self.model, tool_dialect)
        if speculation is not None:
            speculation.check(self.model)
        self.name = self.model.name
        self.context_size: int = self.engine.context_size
        self.capabilities = Capabilities(
            guided_generation=True,
            grammars=True,
            tool_calling=self.model.template is not None,
            required_tool_calls=self.model.template is not None,
            reasoning=self.tags is not None,
            logprobs=True,
        )

    def stream(self, request: ProviderRequest) -> Iterator[ProviderEvent]:
        """Answer one request; see `Provider.stream`.

        Raises:
            UnsupportedCapability: tools for a base model, reasoning for a model that was not trained to.
            ContextOverflow: the request does not fit.
        """
        require(self, request)
        self._check_length(request)
        ids = self._encode(request, budget=request.options.reasoning_budget)
        self.engine.check(ids, request.options)
        return self._answer(request, ids)

    def token_count(self, item: str | ProviderRequest) -> int:
        """Tokens of a text, or of all that the model reads for a request."""
        if isinstance(item, ProviderRequest):
            return len(self._encode(item))
        return len(self.model.tokenizer.encode(item))

    def prewarm(self, request: ProviderRequest) -> int:
        """Compute the prefix that this request shares with others that start like it; return its number of tokens."""
        *before, last = request.transcript
        # the common prefix of two prompts does not depend on how the prompt continues
        one, other = (
            self._encode(
                replace(request, transcript=request.transcript.model_copy(update={"entries": (*before, prompt)}))
            )
            for prompt in (Prompt(last.text + end) for end in ("a", "b"))
        )
        self.engine.check(one, SamplingOptions())
        common = one[: common_prefix(one, other)]
        return self.engine.prefill(common, adapter=request.adapter, owner=request.owner)

    def task_adapter(self, task: Task) -> str | None:
        """See `Provider.task_adapter`.

        Raises:
            CorruptedFile: its weights are damaged.
        """
        known = isinstance(self.model.network, Decoder)
        return task_adapters.load(self.model, task) if known else None

    def _encode(self, request: ProviderRequest, *, budget: int = 0) -> list[int]:
        if request.ids is not None:
            return list(request.ids)
        shown = request.schema is not None and request.options.include_schema_in_prompt
        hint = request.schema.prompt_text() if request.schema is not None and shown else ""
        return chat_format.encode(
            self.model, request.transcript, request.tools, hint, dialect=self.dialect, budget=budget
        )

    def _thinking(self, request: ProviderRequest, ids: list[int]) -> Thinking | None:
        """The reasoning that an answer begins with; a template may begin it although nobody asked for it."""
        if self.tags is None or request.ids is not None:
            return None
        begun = chat_format.ends_with(self.model, ids, self.tags.begin)
        if not begun and self.dialect.channels:  # the answer is read message by message
            return None
        return replace(self.tags, begun=begun, max_tokens=request.options.reasoning_budget or None)

    @cached_property
    def _writes_answer_tags(self) -> bool:
        """Whether answers without reasoning have tags around them too, as the template writes earlier answers."""
        template, begin = self.model.template, "" if self.tags is None else self.tags.around[0]
        return bool(begin) and template is not None and template.begins_answers_with(begin)

    def _answer_tags(self, ids: list[int], thinking: Thinking | None) -> tuple[str, str]:
        """The tags that a grammar has around what the model writes, the first only if it is not written by then."""
        if thinking is None or not self._writes_answer_tags:
            return "", ""
        begin, end = thinking.around
        return "" if thinking.begun or chat_format.ends_with(self.model, ids, begin) else begin, end

    def _events(
        self,
        request: ProviderRequest,
        ids: list[int],
        options: SamplingOptions,
        constraint: Grammar | None = None,
        *,
        thinking: Thinking | None = None,
        stop: threading.Event | None = None,
    ) -> Generator[Token | Finished]:
        """The events of one pass; after cancellation no token more, not even one that is generated already.

        The engine generates ahead of the reader. With ``stop``, which ends the pass as cancellation does, control
        tokens are spelled.
        """
        cancel = request.cancel if stop is None else stop
        engine_request = Request(
            ids,
            options,
            constraint,
            cancel=cancel,
            adapter=request.adapter,
            owner=request.owner,
            priority=request.priority,
            speculation=self.speculation,
            skip_special_tokens=stop is None,
            thinking=thinking,
        )
        shown, stream = 0, cast("Generator[Token | Finished]", self.engine.stream(engine_request))
        with closing(stream) as events:
            for event in events:
                if isinstance(event, Finished):
                    if shown < event.answer_tokens and cancel.is_set():
                        event = replace(event, finish_reason="cancelled", text="", answer_tokens=shown)
                    yield event
                elif not cancel.is_set():
                    shown += 1
                    yield event

    def _check_length(self, request: ProviderRequest) -> None:
        """Raise `ContextOverflow` for text that cannot fit, without tokenizing megabytes of it."""
        characters = max((len(entry.text) for entry in request.transcript), default=0)
        least = characters // self.model.tokenizer.longest_token
        if least > self.context_size:
            raise ContextOverflow(
                f"a text of {characters:,} characters is at least {least:,} tokens, the context of {self.name} holds "
                f"{self.context_size:,}; shorten it or take another model",
                context_size=self.context_size,
                token_count=least,
            )

    def _answer(self, request: ProviderRequest, ids: list[int]) -> Iterator[ProviderEvent]:
        tools, schema, options = request.tools, _over(request.schema, request.transcript), request.options
        thinking = self._thinking(request, ids)
        dialect = self.dialect
        constraint = tool_grammar(
            dialect,
            self.model.tokenizer,
            schema,
            tools,
            required=bool(tools) and options.tool_calling == "required",
            max_calls=options.max_tool_calls if options.parallel_tool_calls else 1,
            reasoned=thinking is not None and thinking.begun,
            around=self._answer_tags(ids, thinking),
        )
        if not tools and not dialect.channels:
            yield from self._text(request, ids, constraint, thinking)
            return
        answer = call_reader(dialect, {tool.name: tool.schema.json_schema for tool in tools}, typed=schema is not None)
        stop = _StopOrCancel(request.cancel)
        with closing(self._events(request, ids, options, constraint, thinking=thinking, stop=stop)) as events:
            for event in events:
                if event.reasoning is not None:
                    if event.reasoning:
                        yield ReasoningDelta(event.reasoning)
                    if isinstance(event, Token):
                        continue
                text = answer.push(event.text)
                if isinstance(event, Finished):
                    text += answer.finish(cut=event.finish_reason == "length")
                if answer.repeated:
                    stop.set()
                if thought := answer.take_reasoning():
                    yield ReasoningDelta(thought)
                # tokens of a typed answer are its own: those of calls are not among them
                tokens = (event,) if isinstance(event, Token) and not (schema and answer.begun) else ()
                if text or tokens:
                    yield TextDelta(text, tokens)
        assert isinstance(event, Finished)
        usage, timing = _account(event)
        stopped = answer.repeated and not request.cancel.is_set()
        reason: Reason = "stop" if stopped else event.finish_reason
        if calls := _numbered(answer.calls, request.transcript):
            yield ToolCallsMade(calls)
        called = bool(calls) and reason == "stop"
        yield Done("tool_calls" if called else reason, usage, timing, answer.partial, event.exact)

    def _text(
        self, request: ProviderRequest, ids: list[int], constraint: Grammar | None, thinking: Thinking | None
    ) -> Iterator[ProviderEvent]:
        """An answer without tools."""
        reasoned = False  # and nothing answered yet
        with closing(self._events(request, ids, request.options, constraint, thinking=thinking)) as events:
            for event in events:
                if event.reasoning:
                    yield ReasoningDelta(event.reasoning)
                if isinstance(event, Token) and event.reasoning is not None:
                    reasoned = True
                    continue
                text = event.text.lstrip() if reasoned and constraint is None else event.text
                reasoned = reasoned and not text
                tokens = (event,) if isinstance(event, Token) else ()
                if text or tokens:
                    yield TextDelta(text, tokens)
        assert isinstance(event, Finished)
        usage, timing = _account(event)
        yield Done(event.finish_reason, usage, timing, exact=event.exact)


class _StopOrCancel(threading.Event):
    """Set when the reader of an answer has enough, or when the request is cancelled."""

    def __init__(self, cancel: threading.Event) -> None:
        super().__init__()
        self._cancel = cancel

    def is_set(self) -> bool:
        return super().is_set() or self._cancel.is_set()


def _over(schema: Schema[Any] | None, transcript: Transcript) -> Schema[Any] | None:
    """The schema with verbatim strings held to the prompts and the outputs of tools."""
    if schema is None or not schema.grammar.is_verbatim:
        return schema
    text = "\n\n".join(entry.text for entry in transcript if isinstance(entry, Prompt | ToolOutput))
    return schema.over(SourceText(text).grammar)


def _numbered(calls: Sequence[tuple[str, dict[str, Any]]], transcript: Transcript) -> tuple[ToolCall, ...]:
    """The calls with ids that continue those of the transcript."""
    before = sum(len(entry.calls) for entry in transcript if isinstance(entry, ToolCalls))
    return tuple(
        ToolCall(id=f"call_{before + index}", name=name, arguments=values) for index, (name, values) in enumerate(calls)
    )


def speculation(name: str, *, load: Callable[[str], LanguageModel] = load) -> Speculation:
    """A speculation by its name.

    Args:
        name: "ngram" drafts what followed the same tokens before, "self" drafts with the model's own first layers;
            anything else is a reference of a smaller model with the same vocabulary.
        load: returns the model of a reference.

    Raises:
        ModelNotFound, DownloadFailed, CheckpointError: the model cannot be loaded.
    """
    from pippin.engine.speculation import Speculation

    return Speculation("ngram" if name == "ngram" else "self" if name == "self" else load(name))


def _account(event: Finished) -> tuple[Usage, Timing]:
    """Usage and timing of a pass."""
    return (
        Usage(
            event.prompt_tokens,
            event.cached_tokens,
            event.answer_tokens,
            event.reasoning_tokens,
            event.drafted,
            event.accepted,
        ),
        Timing(event.prompt_seconds, event.total_seconds - event.prompt_seconds, event.first_token_seconds),
    )
