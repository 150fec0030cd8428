"""The provider interface between a session and a model: one request at a time.

Notable here:
- a provider declares its capabilities; a request beyond them is refused before anything is sent
- input is a whole request (transcript, tools, schema, options), output are events: text, reasoning, tool calls, the end
- a custom provider is a class with `stream`; the session does the rest: tools, types, snapshots, guardrails
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any, Literal

from pippin.core.errors import UnsupportedCapability, UnsupportedContent
from pippin.engine.kv_eviction import CachePolicy, EpiCache
from pippin.engine.request import Token
from pippin.language.task_adapters import Task
from pippin.session.options import GenerationOptions
from pippin.session.response import Timing, Usage
from pippin.session.tools import ToolDefinition
from pippin.session.transcript import Instructions, Prompt, ToolCall, ToolOutput, Transcript
from pippin.session.types.schema import Schema

Reason = Literal["stop", "length", "tool_calls", "cancelled"]


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of a provider.

    Args:
        guided_generation: enforces a JSON Schema during decoding.
        grammars: enforces a regular expression, a list of choices or a Lark grammar.
        tool_calling: calls tools.
        required_tool_calls: can be forced to call a tool.
        reasoning: reasons before it answers, within a budget.
        vision: reads images.
        logprobs: reports log-probabilities of tokens.
        bounded_cache: keeps a conversation's keys and values within a budget.
    """

    guided_generation: bool = False
    grammars: bool = False
    tool_calling: bool = False
    required_tool_calls: bool = False
    reasoning: bool = False
    vision: bool = False
    logprobs: bool = False
    bounded_cache: bool = False


@dataclass(frozen=True)
class ProviderRequest:
    """One request to a model.

    Args:
        transcript: the conversation; its last entry is a prompt or a tool's output.
        tools: tools that the model may call. With ``options.tool_calling`` "required" it must call one of them.
        schema: schema of the answer; None for text.
        options: options for sampling and stopping.
        adapter: the adapter to answer with; None for the base model.
        cancel: once set, the request ends before its next token.
        memory: the provider's own state for one session (a KV cache, for example).
        cache: how the keys and values of the conversation are kept within a budget; None for all of them.
        owner: the owner of the request, where one provider serves many: the prefix cache of one owner is not used for
            another.
        ids: the exact tokens for a local model, instead of the transcript's; for plain text completion.
        priority: -10 to 10; where one provider serves many, higher priorities run first.
    """

    transcript: Transcript
    tools: tuple[ToolDefinition, ...] = ()
    schema: Schema[Any] | None = None
    options: GenerationOptions = GenerationOptions()
    adapter: str | None = None
    cancel: Event = field(default_factory=Event)
    memory: dict[str, Any] = field(default_factory=dict)
    cache: CachePolicy | EpiCache | None = None
    owner: str = ""
    ids: tuple[int, ...] | None = None
    priority: int = 0


@dataclass(frozen=True)
class TextDelta:
    """More of the answer, with its tokens if the provider knows them."""

    text: str
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True)
class ReasoningDelta:
    """More of the reasoning; ``signature`` comes with the last part, if the provider signs its reasoning."""

    text: str
    signature: bytes | None = None


@dataclass(frozen=True)
class ToolCallsMade:
    """The model called tools instead of answering; ``text`` is its output before the calls."""

    calls: tuple[ToolCall, ...]


@dataclass(frozen=True)
class Refused:
    """The model declined; the session raises `Refusal`."""

    explanation: str


@dataclass(frozen=True)
class Done:
    """The end of a request, always the last event.

    ``partial_call`` is the text of a tool call that ``max_tokens`` cut, beside the whole ones; ``exact`` whether
    speculation preserved the model's distribution of every token, or only of groups of tokens.
    """

    finish_reason: Reason
    usage: Usage = Usage()
    timing: Timing = Timing()
    partial_call: str = ""
    exact: Literal["token", "group"] = "token"


ProviderEvent = TextDelta | ReasoningDelta | ToolCallsMade | Refused | Done


class Provider(ABC):
    """A model that answers requests; subclass it to add your own.

    ``name`` and ``capabilities`` describe it; ``context_size`` is in tokens, None if it is not known.
    """

    name: str
    capabilities: Capabilities = Capabilities()
    context_size: int | None = None

    @abstractmethod
    def stream(self, request: ProviderRequest) -> Iterator[ProviderEvent]:
        """Answer one request.

        Errors that are known without computing or sending anything (a prompt that does not fit, for example) are raised
        by the call itself, everything else while iterating. Closing the iterator ends the request, as does
        ``request.cancel``.
        It may be called from any thread, and from several at once.
        """

    def token_count(self, item: str | ProviderRequest) -> int:
        """Tokens of a text, or of all that the model reads for a request.

        Raises:
            UnsupportedCapability: this provider cannot count.
        """
        raise UnsupportedCapability(f"{self.name} cannot count tokens before it is asked")

    def prewarm(self, request: ProviderRequest) -> int:
        """Prepare for a request that starts like this one; return how many tokens are ready (0 if that is not
        supported).

        The text of the last prompt is the beginning of the coming one.
        """
        return 0

    def save_cache(self, request: ProviderRequest, path: str | Path) -> int:
        """Write the bounded cache of a session to a file; return its bytes.

        Raises:
            UnsupportedCapability: this provider has none.
        """
        raise UnsupportedCapability(f"{self.name} keeps no bounded cache; take a model on this machine")

    def load_cache(self, request: ProviderRequest, path: str | Path) -> None:
        """Read it, for the conversation of a request.

        Raises:
            UnsupportedCapability: this provider has none.
        """
        raise UnsupportedCapability(f"{self.name} keeps no bounded cache; take a model on this machine")

    def task_adapter(self, task: Task) -> str | None:
        """The name of the adapter that comes with Pippin for a task of this model, loaded; None if there is none."""
        return None


def require(provider: Provider, request: ProviderRequest) -> None:
    """Check that a provider supports a request.

    Raises:
        UnsupportedCapability: it does not; the message names the capability. UnsupportedContent: an attachment that it
            cannot read.
    """
    can, options = provider.capabilities, request.options
    required = bool(request.tools) and options.tool_calling == "required"
    plain = request.schema is not None and request.schema.json_schema is None
    verbatim = request.schema is not None and request.schema.grammar.is_verbatim
    wanted = {
        "guided_generation": request.schema is not None and not plain,
        "grammars": plain or verbatim,
        "tool_calling": bool(request.tools),
        "required_tool_calls": required,
        "reasoning": options.reasoning != "off",
        "logprobs": options.logprobs is not None,
        "bounded_cache": request.cache is not None,
    }
    for name, is_wanted in wanted.items():
        if is_wanted and not getattr(can, name):
            raise UnsupportedCapability(
                f"{provider.name} has no {name.replace('_', ' ')}, which this request needs; ask without it or take "
                "another model"
            )
    if can.vision:
        return
    for entry in request.transcript:
        for attachment in entry.attachments if isinstance(entry, Instructions | Prompt | ToolOutput) else ():
            if not attachment.is_text:
                raise UnsupportedContent(
                    f"{provider.name} cannot read {attachment.media_type} ({attachment.label or 'an attachment'}); "
                    "leave it out or take a model that sees"
                )
