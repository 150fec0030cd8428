"""A request to an engine, and the events that it answers with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Event
from typing import Annotated, Literal

from annotated_types import Ge, Le
from jaxtyping import Float, Int
from torch import Tensor

from pippin.core.checks import checked
from pippin.engine.decoding.thinking import Thinking
from pippin.engine.experts.prompt_experts import PromptExperts
from pippin.engine.grammar.constraint import Grammar
from pippin.engine.kv_eviction.bounded_cache import BoundedCache
from pippin.engine.options import SamplingOptions
from pippin.engine.prompt_extras import PromptEmbeddings, PromptExtras
from pippin.engine.speculation.speculation import Speculation
from pippin.nn.expert_mask import ExpertMask
from pippin.nn.steering import Steering

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Token:
    """One token of the answer.

    ``text`` is the new text; it is withheld while a character or a possible stop string is incomplete.
    ``logprob`` and ``top_logprobs`` (natural logarithms, likeliest first) are those of the model before penalty,
    constraint and temperature, or those of another law (`SamplingOptions.logprobs_mode`); None unless requested.
    ``hidden`` is the hidden state before the last norm that the token was predicted from; None unless requested, and
    for a token that a grammar forced.
    ``reasoning`` is the new text of the reasoning before the answer; None for a token of the answer.
    """

    id: int
    text: str
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    hidden: Float[Tensor, width] | None = None
    reasoning: str | None = None


@dataclass(frozen=True)
class Finished:
    """The last event: why the answer ended, counts, times, and the text that was held back until then.

    ``finish_reason`` is "stop" (end token, stop string or complete grammar), "length" (``max_tokens`` or the context's
    end) or "cancelled". Times are in seconds from the start of the request; ``first_token_seconds`` is 0 without a
    token. ``drafted`` and ``accepted`` count the tokens that speculation proposed and those that became part of the
    answer.

    ``end_token`` is the end token that ended the answer, and ``end_logprob`` its log-probability, as for a
    `Token`; None if something else ended it. ``exact`` says which distribution of the model speculation preserves: that
    of every token, or that of groups of tokens. ``reasoning_tokens`` of the answer's tokens were
    reasoning, and ``reasoning`` is the rest of its text.
    """

    finish_reason: FinishReason
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
    end_token: int | None = None
    end_logprob: float | None = None
    reasoning_tokens: int = 0
    reasoning: str = ""


@checked
@dataclass(frozen=True)
class Request:
    """One request to an engine.

    Args:
        prompt: token ids, at least one.
        options: how tokens are sampled, and when the answer ends.
        grammar: grammar that the answer must satisfy; None for free text.
        cancel: once set, the request ends before its next token.
        adapter: name of the loaded adapter to answer with; None for the base model.
        owner: owner of the request; cached blocks are shared only among requests of one owner.
        priority: -10 to 10; higher ones are admitted first and preempted last.
        speculation: speculative decoding; None for one token at a time.
        embeddings: embeddings in place of those of some prompt tokens, such as those of images.
        positions: position of each prompt token, (axes, tokens); None for 0, 1, 2, ... The answer follows the largest.
        steering: changes of hidden states; None for none.
        experts: the experts that tokens may be routed to, or how the prompt chooses them; None for all.
        return_hidden_states: whether tokens come with the hidden state that they were predicted from.
        thinking: how the model reasons before it answers, with its budget; None if all that it writes is the answer.
        cache: of `Engine.bounded_cache`, in which the sequence is kept in place of the shared cache. A prompt goes on
            from the tokens that it holds if it begins with them; otherwise they are forgotten.
        skip_special_tokens: leave control tokens out of the text; False spells them, for formats that consist of them.
    """

    prompt: Sequence[int]
    options: SamplingOptions = SamplingOptions()
    grammar: Grammar | None = None
    cancel: Event | None = None
    adapter: str | None = None
    owner: str = ""
    priority: Annotated[int, Ge(-10), Le(10)] = 0
    speculation: Speculation | None = None
    embeddings: Sequence[PromptEmbeddings] = ()
    positions: Int[Tensor, "axes tokens"] | None = None
    steering: Steering | None = None
    experts: ExpertMask | PromptExperts | None = None
    return_hidden_states: bool = False
    skip_special_tokens: bool = True
    thinking: Thinking | None = None
    cache: BoundedCache | None = None

    def extras(self) -> PromptExtras | None:
        """What it has beside tokens; None for nothing."""
        experts = self.experts if isinstance(self.experts, ExpertMask) else None
        beside = (self.positions, self.steering, experts)
        if not self.embeddings and not self.return_hidden_states and all(each is None for each in beside):
            return None
        return PromptExtras(
            len(self.prompt), self.embeddings, self.positions, self.steering, experts, self.return_hidden_states
        )
