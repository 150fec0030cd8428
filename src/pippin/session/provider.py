"""What stands between a session and a model: a provider, asked for one turn at a time.

Notable here:
- a provider declares what it can do; what it cannot is refused before anything is sent
- a turn goes in whole (transcript, tools, schema, options), events come out: text, reasoning, tool calls, the end
- a provider of your own is a class with `stream`; the session does the rest: tools, types, snapshots, guardrails
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import Event
from typing import Any, Literal

from pippin.core.errors import UnsupportedCapability, UnsupportedContent
from pippin.engine.request import Token
from pippin.session.options import GenerationOptions
from pippin.session.response import Timing, Usage
from pippin.session.schema import Schema
from pippin.session.tools import ToolDefinition
from pippin.session.transcript import Instructions, Prompt, ToolCall, ToolOutput, Transcript

Reason = Literal["stop", "length", "tool_calls", "cancelled"]


@dataclass(frozen=True)
class Capabilities:
    """What a provider can do.

    Args:
        guided_generation: hold an answer to a JSON Schema while it is written.
        grammars: hold it to a regular expression, a list of choices or a Lark grammar.
        tool_calling: call tools.
        required_tool_calls: be made to call one.
        reasoning: think before it answers, within a budget.
        vision: read images.
        logprobs: report log-probabilities of tokens.
    """

    guided_generation: bool = False
    grammars: bool = False
    tool_calling: bool = False
    required_tool_calls: bool = False
    reasoning: bool = False
    vision: bool = False
    logprobs: bool = False


@dataclass(frozen=True)
class Turn:
    """One turn of a model.

    Args:
        transcript: the conversation; its last entry is a prompt or a tool's output.
        tools: what the model may call. With ``options.tool_calling`` "required" it must call one of them in this turn.
        schema: what an answer must look like; None for text.
        options: how to choose tokens and when to stop.
        adapter: the adapter to answer with; None for the plain model.
        cancel: once set, the turn ends before its next token.
        memory: the provider's own, kept from turn to turn of one session (a cache of keys and values, say).
        owner: whose turn it is, where one provider serves many: nothing computed for one owner is used for another.
        ids: the very tokens that a local model reads, in place of the transcript's; for text to be continued as it is.
        priority: -10 to 10; where one provider serves many, higher ones go before lower ones.
    """

    transcript: Transcript
    tools: tuple[ToolDefinition, ...] = ()
    schema: Schema[Any] | None = None
    options: GenerationOptions = GenerationOptions()
    adapter: str | None = None
    cancel: Event = field(default_factory=Event)
    memory: dict[str, Any] = field(default_factory=dict)
    owner: str = ""
    ids: tuple[int, ...] | None = None
    priority: int = 0


@dataclass(frozen=True)
class TextDelta:
    """More of the answer, with the tokens that it came from where the provider knows them."""

    text: str
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True)
class ReasoningDelta:
    """More of what the model thinks; ``signature`` comes with the last part, if the provider signs its reasoning."""

    text: str
    signature: bytes | None = None


@dataclass(frozen=True)
class CallsMade:
    """The model called tools instead of answering; ``text`` of the turn so far is what it said before."""

    calls: tuple[ToolCall, ...]


@dataclass(frozen=True)
class Refused:
    """The model declined; the session raises `Refusal`."""

    explanation: str


@dataclass(frozen=True)
class Done:
    """The end of a turn, always the last event.

    ``cut`` is what there is of a tool call that met ``max_tokens``; ``exact`` whether speculation kept the model's
    distribution of every token, or only of groups of tokens.
    """

    reason: Reason
    usage: Usage = Usage()
    timing: Timing = Timing()
    cut: str = ""
    exact: Literal["token", "group"] = "token"


TurnEvent = TextDelta | ReasoningDelta | CallsMade | Refused | Done


class Provider(ABC):
    """A model that answers turns; subclass it to bring your own.

    ``name`` and ``capabilities`` describe it; ``context_size`` is in tokens, None if it is not known.
    """

    name: str
    capabilities: Capabilities = Capabilities()
    context_size: int | None = None

    @abstractmethod
    def stream(self, turn: Turn) -> Iterator[TurnEvent]:
        """Answer one turn.

        Errors that show without computing or sending anything (a prompt that does not fit, say) are raised by the
        call itself, everything else while iterating. Closing the iterator ends the turn, as does ``turn.cancel``.
        It may be called from any thread, and from several at once.
        """

    def token_count(self, item: str | Turn) -> int:
        """Tokens of a text, or of all that the model reads in a turn.

        Raises:
            UnsupportedCapability: this provider cannot count.
        """
        raise UnsupportedCapability(f"{self.name} cannot count tokens before it is asked")

    def prewarm(self, turn: Turn) -> int:
        """Prepare for a turn that begins like this one; return how many tokens are ready (0 if there is no such thing).

        The text of the turn's last prompt is the beginning of the one to come.
        """
        return 0


def require(provider: Provider, turn: Turn) -> None:
    """Check that a provider can do what a turn asks for.

    Raises:
        UnsupportedCapability: it cannot; the message names the capability. UnsupportedContent: an attachment that it
            cannot read.
    """
    can, options = provider.capabilities, turn.options
    required = bool(turn.tools) and options.tool_calling == "required"
    plain = turn.schema is not None and turn.schema.json_schema is None
    wanted = {
        "guided_generation": turn.schema is not None and not plain,
        "grammars": plain,
        "tool_calling": bool(turn.tools),
        "required_tool_calls": required,
        "reasoning": options.reasoning != "off",
        "logprobs": options.logprobs is not None,
    }
    for name, is_wanted in wanted.items():
        if is_wanted and not getattr(can, name):
            raise UnsupportedCapability(
                f"{provider.name} has no {name.replace('_', ' ')}, which this request needs; ask without it or take "
                "another model"
            )
    if can.vision:
        return
    for entry in turn.transcript:
        for attachment in entry.attachments if isinstance(entry, Instructions | Prompt | ToolOutput) else ():
            if not attachment.is_text:
                raise UnsupportedContent(
                    f"{provider.name} cannot read {attachment.media_type} ({attachment.label or 'an attachment'}); "
                    "leave it out or take a model that sees"
                )
