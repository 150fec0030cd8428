"""The local model as a provider: prompts, grammars and tool calls around an engine.

Notable here:
- tool calls are decoded under the grammar of their signatures and hidden from the text that is shown
- reasoning is a pass of its own with its own budget: the model thinks freely, only the answer is constrained
- what was computed of a prompt stays with the engine: the next turn of a conversation, a round of tool calls, or
  another session that begins alike computes only what is new
- whatever can be told from the request alone is told by the call, before anything is computed
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from pippin.core.errors import ContextOverflow
from pippin.engine.engine import Engine, shared
from pippin.engine.request import Finished, Request, Token
from pippin.engine.sampling import SamplingOptions
from pippin.engine.text import TextStream
from pippin.engine.writer import common_prefix
from pippin.language.load import LanguageModel, load
from pippin.session import prompting
from pippin.session.provider import (
    CallsMade,
    Capabilities,
    Done,
    Provider,
    ReasoningDelta,
    TextDelta,
    Turn,
    TurnEvent,
    require,
)
from pippin.session.response import Timing, Usage
from pippin.session.transcript import Prompt

if TYPE_CHECKING:
    from pippin.engine.constraint import Grammar
    from pippin.engine.speculation import Speculation


class LocalModel(Provider):
    """A model on this machine.

    Args:
        model: a model reference (see `pippin.load`) or a loaded model.
        engine: what runs it; None for the one that all sessions over this loaded model share, so that what one of
            them has computed no other computes again.
        speculation: how to guess several tokens ahead; None for one token at a time.

    Raises:
        ModelNotFound, DownloadFailed, CheckpointError: the model cannot be had.
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
        self.engine = shared(self.model) if engine is None else engine
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
            reasoning=prompting.can_think(self.model),
            logprobs=True,
        )

    def stream(self, turn: Turn) -> Iterator[TurnEvent]:
        """Answer one turn; see `Provider.stream`.

        Raises:
            UnsupportedCapability: tools for a base model, reasoning for a model that was not trained to.
            ContextOverflow: the turn does not fit.
        """
        require(self, turn)
        self._refuse_huge(turn)
        thinking = turn.options.reasoning_budget > 0
        ids = self._encode(turn, thinking=thinking)
        self.engine.check(ids, turn.options)
        return self._think_and_answer(turn, ids) if thinking else self._answer(turn, ids, Usage(), Timing())

    def token_count(self, item: str | Turn) -> int:
        """Tokens of a text, or of all that the model reads in a turn."""
        if isinstance(item, Turn):
            return len(self._encode(item))
        return len(self.model.tokenizer.encode(item))

    def prewarm(self, turn: Turn) -> int:
        """Compute what this turn has in common with any other that begins like it; return how many tokens that are."""
        *before, last = turn.transcript
        # what two prompts have in common is what does not depend on how the prompt goes on
        one, other = (
            self._encode(replace(turn, transcript=turn.transcript.model_copy(update={"entries": (*before, prompt)})))
            for prompt in (Prompt(last.text + end) for end in ("a", "b"))
        )
        self.engine.check(one, SamplingOptions())
        common = one[: common_prefix(one, other)]
        return self.engine.prefill(common, adapter=turn.adapter, owner=turn.owner)

    def _encode(self, turn: Turn, *, thinking: bool = False) -> list[int]:
        if turn.ids is not None:
            return list(turn.ids)
        shown = turn.schema is not None and turn.options.include_schema_in_prompt
        hint = turn.schema.prompt_text() if turn.schema is not None and shown else ""
        return prompting.encode(self.model, turn.transcript, turn.tools, hint, thinking=thinking)

    def _events(
        self, turn: Turn, ids: list[int], options: SamplingOptions, grammar: Grammar | None = None
    ) -> Generator[Token | Finished]:
        """The events of one pass of a turn; once it is cancelled, no token more, not even one that is written already.

        The engine writes ahead of who reads.
        """
        request = Request(
            ids,
            options,
            grammar,
            cancel=turn.cancel,
            adapter=turn.adapter,
            owner=turn.owner,
            priority=turn.priority,
            speculation=self.speculation,
        )
        shown, stream = 0, cast("Generator[Token | Finished]", self.engine.stream(request))
        with closing(stream) as events:
            for event in events:
                if isinstance(event, Finished):
                    if shown < event.answer_tokens and turn.cancel.is_set():
                        event = replace(event, reason="cancelled", text="", answer_tokens=shown)
                    yield event
                elif not turn.cancel.is_set():
                    shown += 1
                    yield event

    def _refuse_huge(self, turn: Turn) -> None:
        """Raise `ContextOverflow` for text that cannot fit, without cutting megabytes of it into tokens."""
        characters = max((len(entry.text) for entry in turn.transcript), default=0)
        least = characters // self.model.tokenizer.longest_token
        if least > self.context_size:
            raise ContextOverflow(
                f"a text of {characters:,} characters is at least {least:,} tokens, the context of {self.name} holds "
                f"{self.context_size:,}; shorten it or take another model",
                context_size=self.context_size,
                token_count=least,
            )

    def _think_and_answer(self, turn: Turn, ids: list[int]) -> Iterator[TurnEvent]:
        """A free pass up to the end of the reasoning or of its budget, then the answer."""
        options = turn.options
        room = (options.max_tokens or self.context_size - len(ids)) - 1
        budget = min(options.reasoning_budget, max(room, 1))
        free = replace(options, max_tokens=budget, stop=(prompting.ANSWER,), logprobs=None)
        thought: list[int] = []
        with closing(self._events(turn, ids, free)) as events:
            for event in events:
                if event.text:
                    yield ReasoningDelta(event.text)
                if isinstance(event, Token):
                    thought.append(event.id)
        assert isinstance(event, Finished)
        usage, timing = _account(event, Usage(reasoning_tokens=event.answer_tokens), Timing())
        if event.reason == "cancelled":
            yield Done("cancelled", usage, timing)
            return
        text = self.model.tokenizer.decode(thought)
        whole = prompting.ANSWER in text
        ids = ids + (thought if not whole else self.model.tokenizer.encode(text[: text.index(prompting.ANSWER)]))
        ids += self.model.tokenizer.encode(f"{prompting.ANSWER}\n\n")
        left = None if options.max_tokens is None else max(options.max_tokens - event.answer_tokens, 1)
        rest = replace(turn, options=replace(options, max_tokens=left))
        self.engine.check(ids, rest.options)
        yield from self._answer(rest, ids, usage, timing)

    def _answer(self, turn: Turn, ids: list[int], usage: Usage, timing: Timing) -> Iterator[TurnEvent]:
        tools, schema = turn.tools, turn.schema
        grammar = prompting.grammar(
            schema,
            tools,
            required=turn.options.tool_calling == "required",
            parallel=turn.options.parallel_tool_calls,
        )
        visible = TextStream([prompting.OPEN] if tools and schema is None else [])
        raw = told = ""
        with closing(self._events(turn, ids, turn.options, grammar)) as events:
            for event in events:
                raw += event.text
                visible.push(event.text.encode("utf-8", "surrogatepass"))
                if isinstance(event, Finished):
                    visible.finish()
                # a typed answer never begins like a call, so what does is one, or is about to be
                calling = bool(schema and tools) and prompting.OPEN.startswith(raw[: len(prompting.OPEN)])
                tokens = (event,) if isinstance(event, Token) else ()
                if not calling and (visible.text != told or tokens):
                    yield TextDelta(visible.text[len(told) :], tokens)
                    told = visible.text
        assert isinstance(event, Finished)
        usage, timing = _account(event, usage, timing)
        # a call that is not complete is no call
        cut = event.reason == "length" and bool(tools) and raw.rfind(prompting.OPEN) > raw.rfind(prompting.CLOSE)
        calls = prompting.calls(raw, turn.transcript) if tools and not cut else ()
        if calls:
            yield CallsMade(calls)
        called = bool(calls) and event.reason == "stop"
        yield Done("tool_calls" if called else event.reason, usage, timing, raw if cut else "", event.exact)


def speculation(name: str, *, load: Callable[[str], LanguageModel] = load) -> Speculation:
    """How to guess ahead, by its name.

    Args:
        name: "ngram" repeats what followed the same words before, "self" lets the model's own lower layers guess;
            anything else is a reference of a smaller model with the same vocabulary.
        load: gives the model of a reference.

    Raises:
        ModelNotFound, DownloadFailed, CheckpointError: the model cannot be had.
    """
    from pippin.engine.speculation import Speculation

    return Speculation("ngram" if name == "ngram" else "self" if name == "self" else load(name))


def _account(event: Finished, usage: Usage, timing: Timing) -> tuple[Usage, Timing]:
    """Usage and timing with those of one more pass."""
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
