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
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import ContextOverflow
from pippin.data.text.tool_dialect_name import ToolDialectName
from pippin.engine.decoding.thinking import Thinking
from pippin.engine.decoding.token_ids import common_prefix
from pippin.engine.engine import Engine
from pippin.engine.kv_eviction import BoundedCache, CachePolicy, EpiCache
from pippin.engine.options import SamplingOptions
from pippin.engine.request import Finished, Request, Token
from pippin.engine.shared import shared_engine
from pippin.language import task_adapters
from pippin.language.decoder import Decoder
from pippin.language.language_model import LanguageModel, load
from pippin.language.task_adapters import Task
from pippin.session import chat_format
from pippin.session.extraction.source import SourceText
from pippin.session.providers.bounded_conversation import BoundedConversation, Conversations, Render
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


Bounded = tuple[BoundedConversation, BoundedCache]
"""The conversation of a request, and the cache that it is computed in."""


class LocalModel(Provider):
    """A model on this machine.

    Args:
        model: a model reference (see `pippin.load`) or a loaded model.
        engine: runs the model; None for the engine that all sessions over this loaded model share, with its prefix
            cache.
        speculation: speculative decoding; None for one token at a time.
        tool_dialect: how the model writes calls of tools; None for what the model was opened with, or its template
            shows.
        cache: how conversations of requests that name no cache of their own are kept within a budget; None for all of
            their keys and values.
        max_conversations: so kept at once, each outside the engine's cache while it is not used.

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
        cache: CachePolicy | EpiCache | None = None,
        max_conversations: PositiveInt = 16,
    ) -> None:
        self.model = model if isinstance(model, LanguageModel) else load(model)
        self.engine = shared_engine(self.model) if engine is None else engine
        self.speculation = speculation
        self.tags = thinking_tags(self.model.template)
        self.dialect = chat_format.dialect_of(self.model, tool_dialect)
        if speculation is not None:
            speculation.check(self.model)
        self.cache = cache
        self._conversations = Conversations(lambda: self._new_conversation(cache), max_conversations)
        self.name = self.model.name
        self.context_size: int = self.engine.context_size
        self.capabilities = Capabilities(
            guided_generation=True,
            grammars=True,
            tool_calling=self.model.template is not None,
            required_tool_calls=self.model.template is not None,
            reasoning=self.tags is not None,
            logprobs=True,
            bounded_cache=True,
        )

    def stream(self, request: ProviderRequest) -> Iterator[ProviderEvent]:
        """Answer one request; see `Provider.stream`.

        Raises:
            UnsupportedCapability: tools for a base model, reasoning for a model that was not trained to.
            ContextOverflow: the request does not fit.
            InvalidArgument, UnsupportedModel, NotEnoughMemory: it cannot be kept in a bounded cache like this.
        """
        require(self, request)
        budget = request.options.reasoning_budget
        if (request.cache is not None or self.cache is not None) and request.ids is None:
            conversation = self.conversation(request)
            ids, cache = conversation.begin(request.transcript, self._render(request, budget))
            return self._answer(request, ids, (conversation, cache))
        self._check_length(request)
        ids = self._encode(request, budget=budget)
        self.engine.check(ids, request.options)
        return self._answer(request, ids)

    def conversation(self, request: ProviderRequest) -> BoundedConversation:
        """The tokens and caches of what a request is part of: of its session, in whose ``memory`` they are kept, or of
        an earlier request that it goes on from."""
        if request.cache is None:
            return self._conversations.take(request.owner, request.transcript)
        known = request.memory.get("conversation")
        if known is None or known.settings is not request.cache:
            known = request.memory["conversation"] = self._new_conversation(request.cache)
        assert isinstance(known, BoundedConversation)
        return known

    def _new_conversation(self, cache: CachePolicy | EpiCache | None) -> BoundedConversation:
        assert cache is not None
        return BoundedConversation(self.model, self.engine, cache)

    def save_cache(self, request: ProviderRequest, path: str | Path) -> int:
        """See `Provider.save_cache`."""
        return self.conversation(request).save(path)

    def load_cache(self, request: ProviderRequest, path: str | Path) -> None:
        """See `Provider.load_cache`."""
        self.conversation(request).load(path, request.transcript, self._render(request, 0))

    def _render(self, request: ProviderRequest, budget: int) -> Render:
        """Encodes a transcript in place of that of a request."""

        def render(transcript: Transcript, hint: bool) -> list[int]:
            options = request.options if hint else replace(request.options, include_schema_in_prompt=False)
            return self._encode(replace(request, transcript=transcript, options=options), budget=budget)

        return render

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
        bounded: Bounded | None = None,
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
            cache=None if bounded is None else bounded[1],
        )
        shown, stream = 0, cast("Generator[Token | Finished]", self.engine.stream(engine_request))
        with self._kept(request, bounded), closing(stream) as events:
            for event in events:
                if bounded is not None:
                    bounded[0].note(event)
                if isinstance(event, Finished):
                    if shown < event.answer_tokens and cancel.is_set():
                        event = replace(event, finish_reason="cancelled", text="", answer_tokens=shown)
                    yield event
                elif not cancel.is_set():
                    shown += 1
                    yield event

    @contextmanager
    def _kept(self, request: ProviderRequest, bounded: Bounded | None) -> Iterator[None]:
        """Keep the conversation of a request without a session for the next one."""
        try:
            yield
        finally:
            if bounded is not None and request.cache is None:
                self._conversations.give_back(request.owner, bounded[0])

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

    def _answer(
        self, request: ProviderRequest, ids: list[int], bounded: Bounded | None = None
    ) -> Iterator[ProviderEvent]:
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
            yield from self._text(request, ids, constraint, thinking, bounded)
            return
        answer = call_reader(dialect, {tool.name: tool.schema.json_schema for tool in tools}, typed=schema is not None)
        stop = _StopOrCancel(request.cancel)
        with closing(
            self._events(request, ids, options, constraint, thinking=thinking, stop=stop, bounded=bounded)
        ) as events:
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
        self,
        request: ProviderRequest,
        ids: list[int],
        constraint: Grammar | None,
        thinking: Thinking | None,
        bounded: Bounded | None,
    ) -> Iterator[ProviderEvent]:
        """An answer without tools."""
        reasoned = False  # and nothing answered yet
        with closing(
            self._events(request, ids, request.options, constraint, thinking=thinking, bounded=bounded)
        ) as events:
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
