"""Speculative decoding: its settings, and its state for one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Le
from jaxtyping import Float
from torch import Tensor

from pippin.core.checks import checked
from pippin.core.errors import InvalidArgument
from pippin.engine.decoding.sampling import Sampler
from pippin.engine.grammar.constraint import Constraint
from pippin.engine.options import SamplingOptions
from pippin.engine.speculation.acceptance import AcceptanceRule, ExactAcceptance
from pippin.engine.speculation.draft_model import DraftPool, ModelDrafter, check_vocabulary
from pippin.engine.speculation.drafts import CachePosition, Draft, Drafter, DraftLength
from pippin.engine.speculation.ngram import NGramDrafter
from pippin.engine.speculation.self_draft import SelfDrafter, shared_depth
from pippin.language.language_model import LanguageModel

MAX_SPECULATIVE_TOKENS = 64


@checked
@dataclass(frozen=True)
class Speculation:
    """Speculative decoding: several draft tokens are verified in one pass of the model.

    Args:
        draft: the drafter. "ngram" repeats the continuation of an earlier occurrence of the last tokens, at no cost;
            good if the answer quotes the prompt. A `LanguageModel` is a draft model with the same vocabulary. "self"
            uses the model's own first layers, for models whose last layers read the keys and values of an earlier one.
        num_speculative_tokens: longest draft, 1 to 64; drafts get shorter when few tokens are accepted
            (`DraftLength`).
        acceptance: the acceptance rule. `ExactAcceptance` preserves the distribution over tokens, `CoarseAcceptance`
            the distribution over groups of tokens.

    One object may be used for any number of requests; those with one draft model share its cache.
    """

    draft: Literal["ngram", "self"] | LanguageModel = "ngram"
    num_speculative_tokens: Annotated[int, Ge(1), Le(MAX_SPECULATIVE_TOKENS)] = 4
    acceptance: AcceptanceRule = field(default_factory=ExactAcceptance)
    _pool: DraftPool | None = field(init=False, default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.draft, LanguageModel):
            object.__setattr__(self, "_pool", DraftPool(self.draft))

    def check(self, model: LanguageModel) -> None:
        """Check that this speculation can be used with a model.

        Raises:
            InvalidArgument: "self" and a model without shared keys, token groups of another vocabulary, or recurrent
                layers in either model.
            VocabularyMismatch: the draft model does not have the vocabulary of the model.
        """
        for one in (model, self.draft):
            if isinstance(one, LanguageModel) and one.cache_layout.recurrent_layers:
                raise InvalidArgument(
                    f"{one.name} has recurrent layers, whose state cannot be rolled back when a draft token is "
                    "rejected; leave speculation out"
                )
        self.acceptance.check(model.vocab_size)
        if isinstance(self.draft, LanguageModel):
            check_vocabulary(model, self.draft)
        elif self.draft == "self":
            shared_depth(model)

    def begin(self, model: LanguageModel, options: SamplingOptions, owner: str = "") -> SpeculationState:
        """The state of speculative decoding for one request.

        Raises:
            InvalidArgument, VocabularyMismatch: as `check`.
        """
        self.check(model)
        return SpeculationState(self, self._drafter(model, options, owner))

    def _drafter(self, model: LanguageModel, options: SamplingOptions, owner: str) -> Drafter:
        # a separate generator: the request uses the same random numbers as without a draft, and verification must be
        # independent of those of the draft; the constants decorrelate the two seeds
        generator = torch.Generator()
        if options.seed is None:
            generator.seed()
        else:
            generator.manual_seed((options.seed * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % 2**63)
        forced = options.logprobs is None
        if self._pool is not None:
            return ModelDrafter(self._pool, model, owner, generator, skip_forced=forced)
        if self.draft == "self":
            return SelfDrafter(model, generator, skip_forced=forced)
        return NGramDrafter(model.tokenizer.eos_ids)


class SpeculationState:
    """Speculative decoding of one request: the drafter, the length of drafts, and the acceptance rule.

    Attributes:
        exact: whether the answer follows the target's distribution over tokens or over groups.
        drafts_with_target: whether the drafter computes in the target's own cache.
    """

    def __init__(self, speculation: Speculation, drafter: Drafter) -> None:
        self.rule, self.drafter = speculation.acceptance, drafter
        self.drafts_with_target = speculation.draft == "self"
        self.exact = self.rule.exact
        self.length = DraftLength(speculation.num_speculative_tokens)

    @torch.inference_mode()
    def propose(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        sampler: Sampler,
        constraint: Constraint | None,
        position: CachePosition | None,
    ) -> Draft | None:
        """A draft of at most ``max_tokens`` tokens; None if there is none, or while drafting pauses."""
        max_tokens = min(max_tokens, self.length.next())
        return None if max_tokens < 1 else self.drafter.draft(token_ids, max_tokens, sampler, constraint, position)

    def update(self, drafted: int, accepted: int) -> None:
        """Adapt the length of drafts to how many tokens of the last one were accepted."""
        self.length.update(drafted, accepted)

    def choose(self, logits: Float[Tensor, vocab], draft: Draft, row: int, sampler: Sampler) -> int:
        """The token of the answer at the position of a draft token.

        Args:
            logits: after the penalties and the constraint.
            draft: the draft tokens.
            row: index of the draft token.
            sampler: sampler of the request; it observes the token.
        """
        q = None if draft.probabilities is None else draft.probabilities[row]
        if q is None and self.exact == "token":
            return sampler.sample(logits)
        token, _ = self.rule.step(draft.tokens[row], q, sampler.probabilities(logits), sampler.generator)
        sampler.observe(token)
        return token
