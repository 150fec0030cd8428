"""Provider for local models: prompts, grammars and tool calls around an engine.

Notable here:
- tool calls are decoded under the grammar of their signatures and hidden from the text that is shown
- reasoning is a pass of its own with its own budget: it is not constrained, only the answer is
- the engine's prefix cache is shared: the next request of a conversation, a round of tool calls, or another session
  with the same beginning computes only what is new
- errors that are known from the request alone are raised by the call, before anything is computed
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from pippin.core.errors import ContextOverflow
from pippin.engine.detokenizer import Detokenizer
from pippin.engine.engine import Engine, shared_engine
from pippin.engine.options import SamplingOptions
from pippin.engine.request import Finished, Request, Token
from pippin.engine.token_ids import common_prefix
from pippin.language.language_model import LanguageModel, load
from pippin.session import chat_format
from pippin.session.providers.provider import (
    Capabilities,
    Done,
    Provider,
    ProviderEvent,
    ProviderRequest,
    ReasoningDelta,
    TextDelta,
    ToolCallsMade,
    require,
)
from pippin.session.response import Timing, Usage
from pippin.session.transcript import Prompt

if TYPE_CHECKING:
    from pippin.engine.grammar.constraint import Grammar
    from pippin.engine.speculation import Speculation


class LocalModel(Provider):
    """A model on this machine.

    Args:
        model: a model reference (see `pippin.load`) or a loaded model.
        engine: runs the model; None for the engine that all sessions over this loaded model share, with its prefix
            cache.
        speculation: speculative decoding; None for one token at a time.

    Raises:
        ModelNotFound, DownloadFailed, CheckpointError: the model cannot be loaded.
        InvalidArgument, VocabularyMismatch: the speculation cannot be used with this model.
    """

    def __init__(
        self,
        model: str | Path | LanguageModel = "smollm2-135m",
        *,
        engine: Engine | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self.model = model if isinstance(model, LanguageModel) else load(model)
        self.engine = shared_engine(self.model) if engine is None else engine
        self.speculation = speculation
        if speculation is not None:
            speculation.check(self.model)
        self.name = self.model.name
        self.context_size: int = self.engine.context_size
        self.capabilities = Capabilities(
            guided_generation=True,
            grammars=True,
            tool_calling=self.model.template is not None,
            required_tool_calls=self.model.template is not None,
            reasoning=chat_format.can_think(self.model),
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
        thinking = request.options.reasoning_budget > 0
        ids = self._encode(request, thinking=thinking)
        self.engine.check(ids, request.options)
        return self._reason_and_answer(request, ids) if thinking else self._answer(request, ids, Usage(), Timing())

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

    def _encode(self, request: ProviderRequest, *, thinking: bool = False) -> list[int]:
        if request.ids is not None:
            return list(request.ids)
        shown = request.schema is not None and request.options.include_schema_in_prompt
        hint = request.schema.prompt_text() if request.schema is not None and shown else ""
        return chat_format.encode(self.model, request.transcript, request.tools, hint, thinking=thinking)

    def _events(
        self, request: ProviderRequest, ids: list[int], options: SamplingOptions, grammar: Grammar | None = None
    ) -> Generator[Token | Finished]:
        """The events of one pass; after cancellation no token more, not even one that is generated already.

        The engine generates ahead of the reader.
        """
        engine_request = Request(
            ids,
            options,
            grammar,
            cancel=request.cancel,
            adapter=request.adapter,
            owner=request.owner,
            priority=request.priority,
            speculation=self.speculation,
        )
        shown, stream = 0, cast("Generator[Token | Finished]", self.engine.stream(engine_request))
        with closing(stream) as events:
            for event in events:
                if isinstance(event, Finished):
                    if shown < event.answer_tokens and request.cancel.is_set():
                        event = replace(event, finish_reason="cancelled", text="", answer_tokens=shown)
                    yield event
                elif not request.cancel.is_set():
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

    def _reason_and_answer(self, request: ProviderRequest, ids: list[int]) -> Iterator[ProviderEvent]:
        """An unconstrained pass up to the end of the reasoning or of its budget, then the answer."""
        options = request.options
        most = (options.max_tokens or self.context_size - len(ids)) - 1
        budget = min(options.reasoning_budget, max(most, 1))
        free = replace(options, max_tokens=budget, stop=(chat_format.ANSWER,), logprobs=None)
        reasoning: list[int] = []
        with closing(self._events(request, ids, free)) as events:
            for event in events:
                if event.text:
                    yield ReasoningDelta(event.text)
                if isinstance(event, Token):
                    reasoning.append(event.id)
        assert isinstance(event, Finished)
        usage, timing = _account(event, Usage(reasoning_tokens=event.answer_tokens), Timing())
        if event.finish_reason == "cancelled":
            yield Done("cancelled", usage, timing)
            return
        text = self.model.tokenizer.decode(reasoning)
        whole = chat_format.ANSWER in text
        ids = ids + (reasoning if not whole else self.model.tokenizer.encode(text[: text.index(chat_format.ANSWER)]))
        ids += self.model.tokenizer.encode(f"{chat_format.ANSWER}\n\n")
        left = None if options.max_tokens is None else max(options.max_tokens - event.answer_tokens, 1)
        rest = replace(request, options=replace(options, max_tokens=left))
        self.engine.check(ids, rest.options)
        yield from self._answer(rest, ids, usage, timing)

    def _answer(
        self, request: ProviderRequest, ids: list[int], usage: Usage, timing: Timing
    ) -> Iterator[ProviderEvent]:
        tools, schema = request.tools, request.schema
        grammar = chat_format.grammar(
            schema,
            tools,
            required=request.options.tool_calling == "required",
            parallel=request.options.parallel_tool_calls,
        )
        visible = Detokenizer([chat_format.OPEN] if tools and schema is None else [])
        raw = sent = ""
        with closing(self._events(request, ids, request.options, grammar)) as events:
            for event in events:
                raw += event.text
                visible.push(event.text.encode("utf-8", "surrogatepass"))
                if isinstance(event, Finished):
                    visible.finish()
                # a typed answer never starts like a call, so what does is one, or is about to be
                calling = bool(schema and tools) and chat_format.OPEN.startswith(raw[: len(chat_format.OPEN)])
                tokens = (event,) if isinstance(event, Token) else ()
                if not calling and (visible.text != sent or tokens):
                    yield TextDelta(visible.text[len(sent) :], tokens)
                    sent = visible.text
        assert isinstance(event, Finished)
        usage, timing = _account(event, usage, timing)
        # an incomplete call is not a call
        cut = (
            event.finish_reason == "length"
            and bool(tools)
            and raw.rfind(chat_format.OPEN) > raw.rfind(chat_format.CLOSE)
        )
        calls = chat_format.calls(raw, request.transcript) if tools and not cut else ()
        if calls:
            yield ToolCallsMade(calls)
        called = bool(calls) and event.finish_reason == "stop"
        yield Done("tool_calls" if called else event.finish_reason, usage, timing, raw if cut else "", event.exact)


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


def _account(event: Finished, usage: Usage, timing: Timing) -> tuple[Usage, Timing]:
    """Usage and timing including one more pass."""
    return (
        usage
        + Usage(
            event.prompt_tokens,
            event.cached_tokens,
            event.answer_tokens,
            drafted_tokens=event.drafted,
            accepted_tokens=event.accepted,
        ),
        timing + Timing(event.prompt_seconds, event.total_seconds - event.prompt_seconds, event.first_token_seconds),
    )
