"""What a request says about guessing ahead, and the guessing of one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.core.errors import InvalidArgument
from pippin.engine.constraint import Constraint
from pippin.engine.sampling import Sampler
from pippin.engine.speculation.acceptance import AcceptanceRule, ExactAcceptance
from pippin.engine.speculation.draft_model import DraftPool, ModelDrafter, check_vocabulary
from pippin.engine.speculation.drafts import Draft, Drafter, Length, NGramDrafter, Place
from pippin.engine.speculation.self_draft import SelfDrafter, shared_depth
from pippin.language.load import LanguageModel

if TYPE_CHECKING:
    from pippin.engine.request import Request

MOST_TOKENS = 64


@dataclass(frozen=True)
class Speculation:
    """How to guess several tokens ahead, so that one pass of the model writes more than one.

    Args:
        draft: who guesses. "ngram" repeats what followed the same tokens before: no cost, good where the answer quotes
            the prompt. A `LanguageModel` with the same vocabulary guesses by itself. "self" takes the model's own
            first layers; for models whose last layers read the keys and values of an earlier one.
        tokens: longest draft, 1 to 64; shorter ones follow where they do not pay (`Length`).
        acceptance: the rule. `ExactAcceptance` keeps the law of every token, `CoarseAcceptance` that of groups.

    Raises:
        InvalidArgument: a value outside its range.

    One object may serve any number of requests; those with one draft model share its cache.
    """

    draft: Literal["ngram", "self"] | LanguageModel = "ngram"
    tokens: int = 4
    acceptance: AcceptanceRule = field(default_factory=ExactAcceptance)
    _pool: DraftPool | None = field(init=False, default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.tokens, bool) or not isinstance(self.tokens, int) or not 1 <= self.tokens <= MOST_TOKENS:
            raise InvalidArgument(f"tokens must be a whole number from 1 to {MOST_TOKENS}, got {self.tokens!r}")
        if not isinstance(self.draft, LanguageModel) and self.draft not in ("ngram", "self"):
            raise InvalidArgument(f"draft must be 'ngram', 'self' or a loaded model, got {self.draft!r}")
        if isinstance(self.draft, LanguageModel):
            object.__setattr__(self, "_pool", DraftPool(self.draft))

    def check(self, model: LanguageModel) -> None:
        """Raise what this model cannot do.

        Raises:
            InvalidArgument: "self" and a model without shared keys, token groups of another vocabulary, or recurrent
                layers in either model.
            VocabularyMismatch: the draft model does not have the vocabulary of the model.
        """
        for one in (model, self.draft):
            if isinstance(one, LanguageModel) and one.config.recurrent_layers:
                raise InvalidArgument(
                    f"{one.name} has recurrent layers, whose state cannot be taken back when a guess was wrong; "
                    "leave speculation out"
                )
        self.acceptance.check(model.config.vocab_size)
        if isinstance(self.draft, LanguageModel):
            check_vocabulary(model, self.draft)
        elif self.draft == "self":
            shared_depth(model)

    def begin(self, model: LanguageModel, request: Request) -> Guess:
        """The guessing of one request.

        Raises:
            InvalidArgument, VocabularyMismatch: as `check`.
        """
        self.check(model)
        return Guess(self, self._drafter(model, request))

    def _drafter(self, model: LanguageModel, request: Request) -> Drafter:
        # Numbers of the draft's own: those of the request are drawn as without a draft, and the check must not depend
        # on what the guess was drawn with. Generators of one seed would go in step; the factors keep them apart.
        generator = torch.Generator()
        if request.options.seed is None:
            generator.seed()
        else:
            generator.manual_seed((request.options.seed * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % 2**63)
        forced = request.options.logprobs is None
        if self._pool is not None:
            return ModelDrafter(self._pool, model, request.owner, generator, skip_forced=forced)
        if self.draft == "self":
            return SelfDrafter(model, generator, skip_forced=forced)
        return NGramDrafter(model.tokenizer.eos_ids)


class Guess:
    """The guessing of one request: who drafts, how long, and what becomes of it.

    Attributes:
        exact: what the answer keeps of the target's law.
        here: whether the drafter works in the target's own cache.
    """

    def __init__(self, speculation: Speculation, drafter: Drafter) -> None:
        self.rule, self.drafter = speculation.acceptance, drafter
        self.here = speculation.draft == "self"
        self.exact = self.rule.exact
        self.length = Length(speculation.tokens)

    @torch.inference_mode()
    def propose(
        self, ids: Sequence[int], room: int, sampler: Sampler, constraint: Constraint | None, place: Place | None
    ) -> Draft | None:
        """A draft of at most ``room`` tokens; None where there is nothing to guess or guesses do not pay."""
        tokens = min(room, self.length.next())
        return None if tokens < 1 else self.drafter.draft(ids, tokens, sampler, constraint, place)

    def learn(self, drafted: int, held: int) -> None:
        """Take in how many tokens of a draft became part of the answer."""
        self.length.learn(drafted, held)

    def choose(self, logits: Float[Tensor, vocab], draft: Draft, row: int, sampler: Sampler) -> int:
        """The token at the place of a guess.

        Args:
            logits: after the penalties and the constraint.
            draft: the guesses.
            row: which.
            sampler: draws, and remembers what was chosen.
        """
        q = None if draft.probabilities is None else draft.probabilities[row]
        if q is None and self.exact == "token":
            return sampler.choose(logits)
        token, _ = self.rule.step(draft.tokens[row], q, sampler.law(logits), sampler.generator)
        sampler.note(token)
        return token
