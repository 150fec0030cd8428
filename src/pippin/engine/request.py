"""What an engine is asked, and what it answers with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Event
from typing import TYPE_CHECKING, Literal

from pippin.core.errors import InvalidArgument
from pippin.engine.sampling import SamplingOptions

if TYPE_CHECKING:
    from pippin.engine.constraint import Grammar
    from pippin.engine.speculation import Speculation

FinishReason = Literal["stop", "length", "cancelled"]
PRIORITIES = range(-10, 11)


@dataclass(frozen=True)
class Token:
    """One token of the answer.

    ``text`` is what may be shown since the token before; it lags behind an incomplete character or stop string.
    ``logprob`` and ``top_logprobs`` (natural logarithms, likeliest first) are those of the model before penalty,
    constraint and temperature; None unless asked for.
    """

    id: int
    text: str
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Finished:
    """The last event: why the answer ended, what it cost, and text that had been held back.

    ``reason`` is "stop" (end token, stop string or complete grammar), "length" (``max_tokens`` or the context's end)
    or "cancelled". Times are in seconds from the start of the request; ``first_token_seconds`` is 0 without a token.
    ``drafted`` and ``accepted`` count the tokens that speculation proposed and those that became part of the answer.
    ``exact`` says what speculation keeps of the model's distribution: that of every token, or of groups of tokens.
    """

    reason: FinishReason
    text: str
    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    prompt_seconds: float
    first_token_seconds: float
    total_seconds: float
    drafted: int = 0
    accepted: int = 0
    exact: Literal["token", "group"] = "token"


@dataclass(frozen=True)
class Request:
    """What is asked.

    Args:
        prompt: token ids, at least one.
        options: how to choose tokens and when to stop.
        grammar: what the answer must look like; None for free text.
        cancel: once set, the request ends before its next token.
        adapter: name of a loaded adapter to answer with; None for the plain model.
        owner: whose request it is; what was computed is shared only among requests of one owner.
        priority: -10 to 10; higher ones get a place, and keep it, before lower ones.
        speculation: how to guess several tokens ahead; None for one token at a time.

    Raises:
        InvalidArgument: a priority outside its range.
    """

    prompt: Sequence[int]
    options: SamplingOptions = SamplingOptions()
    grammar: Grammar | None = None
    cancel: Event | None = None
    adapter: str | None = None
    owner: str = ""
    priority: int = 0
    speculation: Speculation | None = None

    def __post_init__(self) -> None:
        if self.priority not in PRIORITIES:
            raise InvalidArgument(f"priority must be a whole number from -10 to 10, got {self.priority!r}")
