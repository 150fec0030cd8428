r"""What becomes of a guess: the rules that turn draft and target laws into a token of the answer.

Notable here:
- exact acceptance: a token drawn from q stays with probability min(1, p/q), else another is drawn from what p has
  over q; the answer's tokens follow p, whatever q is
- where nothing was drawn (a look-up, a greedy guess), the target's own draw decides, with the very random numbers that
  it would have used: the answer is the same token for token as without speculation
- coarse acceptance compares the laws of groups of like tokens: more guesses stay, the groups follow the target's law
  exactly, and the tokens within a group follow the draft
- both are one computation; where each token is its own group, they agree draw for draw
- what p has over q is drawn by thinning: draw from p, keep with probability 1 - q/p, at most so many times; only then
  is the whole law computed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float64
from torch import Tensor

from pippin.core.errors import DecodingFailure, InvalidArgument
from pippin.engine.sampling import pick
from pippin.engine.speculation.groups import TokenGroups, check_law

Law = Float64[Tensor, " vocab"]


@dataclass(frozen=True)
class Verified:
    """What becomes of a whole draft.

    ``tokens`` are the accepted ones and the one that follows them; ``exact`` says what of the target's law they keep.
    """

    accepted: int
    tokens: tuple[int, ...]
    exact: Literal["token", "group"]


@runtime_checkable
class AcceptanceRule(Protocol):
    """Decides about guesses.

    Attributes:
        exact: what it keeps of the target's law: that of every token, or of groups of tokens.
    """

    @property
    def exact(self) -> Literal["token", "group"]:
        """What the rule keeps of the target's law."""

    def check(self, vocab_size: int) -> None:
        """Raise `InvalidArgument` where the rule was made for another vocabulary."""

    def step(self, token: int, q: Law | None, p: Law, generator: torch.Generator) -> tuple[int, bool]:
        """The token of the answer at the place of a guess, and whether the guess was accepted.

        Args:
            token: the guess, drawn from ``q``.
            q: the law of the draft; None where nothing was drawn.
            p: the law of the target.
            generator: random numbers.
        """


@dataclass(frozen=True)
class ExactAcceptance:
    """The answer's tokens follow the target's law (speculative sampling).

    Args:
        max_thinning: draws from the target's law before what it has over the draft's is computed as a whole.

    Source: Leviathan et al. 2023, arXiv:2211.17192, algorithm 1; Chen et al. 2023, arXiv:2302.01318.
    """

    max_thinning: int = 64

    @property
    def exact(self) -> Literal["token", "group"]:
        """Every token follows the target's law."""
        return "token"

    def check(self, vocab_size: int) -> None:
        """Any vocabulary will do."""

    def step(self, token: int, q: Law | None, p: Law, generator: torch.Generator) -> tuple[int, bool]:
        """The token at the place of a guess, and whether that is the guess.

        Raises:
            DecodingFailure: the guess cannot come from ``q``.
        """
        if q is None:  # nothing was drawn: the target's draw decides
            chosen = pick(p, generator)
            return chosen, chosen == token
        chosen, _, accepted = decide(token, q, p, generator, None, self.max_thinning)
        return chosen, accepted

    def __call__(
        self,
        draft_tokens: Sequence[int],
        q: Float64[Tensor, "drafted vocab"],
        p: Float64[Tensor, "rows vocab"],
        generator: torch.Generator,
    ) -> Verified:
        """Check a whole draft; see `verify`."""
        return verify(self, draft_tokens, q, p, generator)


@dataclass(frozen=True)
class CoarseAcceptance:
    """The answer's groups follow the target's law; a token stands for its group.

    Within a group an accepted token follows the draft, so tokens are not distributed as the target's: right where the
    members of a group mean the same, as the codes of sounds do.

    Args:
        groups: which tokens are alike.
        max_thinning: draws from the target's law before what it has over the draft's is computed as a whole.

    Source: arXiv:2511.13732 (the groups and their weights); the rule step by step is ours.
    """

    groups: TokenGroups
    max_thinning: int = 64

    @property
    def exact(self) -> Literal["token", "group"]:
        """Groups of tokens follow the target's law."""
        return "group"

    def check(self, vocab_size: int) -> None:
        """Raise where the groups are of another vocabulary.

        Raises:
            InvalidArgument: the groups have another number of tokens.
        """
        if self.groups.vocab_size != vocab_size:
            raise InvalidArgument(
                f"the token groups are of {self.groups.vocab_size:,} tokens, the model's vocabulary has {vocab_size:,}"
            )

    def step(self, token: int, q: Law | None, p: Law, generator: torch.Generator) -> tuple[int, bool]:
        """The token at the place of a guess, and whether the guess was accepted.

        Tokens that a constraint forbids have probability 0 in ``p`` and ``q``: the groups are then what is allowed of
        them, and no forbidden token can come out.

        Raises:
            DecodingFailure: the guess cannot come from ``q``.
        """
        if q is None:
            q = torch.zeros_like(p)
            q[token] = 1
        chosen, _, accepted = decide(token, q, p, generator, self.groups, self.max_thinning)
        return chosen, accepted

    def __call__(
        self,
        draft_tokens: Sequence[int],
        q: Float64[Tensor, "drafted vocab"],
        p: Float64[Tensor, "rows vocab"],
        generator: torch.Generator,
    ) -> Verified:
        """Check a whole draft; see `verify`."""
        self.check(p.shape[-1])
        return verify(self, draft_tokens, q, p, generator)


def verify(
    rule: AcceptanceRule,
    draft_tokens: Sequence[int],
    q: Float64[Tensor, "drafted vocab"],
    p: Float64[Tensor, "rows vocab"],
    generator: torch.Generator,
) -> Verified:
    """What becomes of a draft: the tokens up to the first that is not accepted, and one more.

    Args:
        rule: decides.
        draft_tokens: the guesses, each drawn from its row of ``q``.
        q: laws of the draft.
        p: laws of the target, with one row more: the law after the last guess.
        generator: random numbers.

    Raises:
        InvalidArgument: something that is no law, rows that do not fit, or a token outside the vocabulary.
        DecodingFailure: a guess that cannot come from its law.

    >>> law = torch.tensor([[0.5, 0.5], [0.0, 1.0]], dtype=torch.float64)
    >>> verify(ExactAcceptance(), [0], law[:1], law, torch.Generator().manual_seed(0))
    Verified(accepted=1, tokens=(0, 1), exact='token')
    """
    if len(q) != len(draft_tokens) or len(p) != len(draft_tokens) + 1:
        raise InvalidArgument(
            f"{len(draft_tokens)} guesses need as many laws of the draft and one more of the target, got {len(q)} and "
            f"{len(p)}"
        )
    check_law(q, p.shape[-1])
    check_law(p, p.shape[-1])
    tokens: list[int] = []
    for index, token in enumerate(draft_tokens):
        if not 0 <= token < p.shape[-1]:
            raise InvalidArgument(f"token id {token} is outside the vocabulary of {p.shape[-1]:,}")
        chosen, accepted = rule.step(token, q[index], p[index], generator)
        tokens.append(chosen)
        if not accepted:
            return Verified(index, tuple(tokens), rule.exact)
    tokens.append(pick(p[-1], generator))
    return Verified(len(draft_tokens), tuple(tokens), rule.exact)


class Decision(NamedTuple):
    """What becomes of one guess: the answer's token, the group that it stands for, and whether the guess stayed."""

    token: int
    group: int
    accepted: bool


def decide(
    token: int, q: Law, p: Law, generator: torch.Generator, groups: TokenGroups | None, max_thinning: int
) -> Decision:
    r"""What becomes of one guess.

    The guess stands for one of its groups k, each as likely, and stays with probability $\min(1, P_c(k) / Q_c(k))$.
    Else a token and a group are drawn from the target's law, until one is kept, with probability
    $\max(0, 1 - Q_c(k) / P_c(k))$. So k follows $P_c$ exactly: accepted guesses bring $\min(P_c, Q_c)$, and the
    others what is missing.

    Args:
        token: drawn from ``q``.
        q: the law of the draft.
        p: the law of the target.
        generator: random numbers.
        groups: None where each token is its own group.
        max_thinning: draws from the target's law before what it has over the draft's is computed as a whole.

    Raises:
        DecodingFailure: the guess cannot come from ``q``.
    """
    group = _group(groups, token, generator)
    drawn = _share(groups, q, group)
    if drawn <= 0:
        raise DecodingFailure(f"the draft gave token {token}, to which its own law gives no probability")
    if _uniform(generator) * drawn < _share(groups, p, group):
        return Decision(token, group, True)
    sums = p.cumsum(0)
    for _ in range(max_thinning):
        at = int(torch.searchsorted(sums, _uniform(generator) * float(sums[-1]), right=True))
        other = at if at < len(sums) else int(p.nonzero()[-1])
        group = _group(groups, other, generator)
        if _uniform(generator) < 1 - _share(groups, q, group) / _share(groups, p, group):
            return Decision(other, group, False)
    return _rest(q, p, generator, groups)


def _rest(q: Law, p: Law, generator: torch.Generator, groups: TokenGroups | None) -> Decision:
    """The same without thinning: a group from what the target has over the draft, then one of its tokens."""
    coarse_q, coarse_p = (law if groups is None else groups.coarse(law) for law in (q, p))
    rest = (coarse_p - coarse_q).clamp(min=0)
    group = pick(rest if float(rest.sum()) > 0 else coarse_p, generator)  # no rest: they agree but for rounding
    if groups is None or int(groups.sizes[group]) == 1:
        return Decision(group, group, False)
    members = groups.of(group)
    return Decision(int(members[pick(p[members] / groups.sizes[members], generator)]), group, False)


def _group(groups: TokenGroups | None, token: int, generator: torch.Generator) -> int:
    return token if groups is None else groups.sample_group(token, generator)


def _share(groups: TokenGroups | None, law: Tensor, group: int) -> float:
    return float(law[group]) if groups is None else groups.share(law, group)


def _uniform(generator: torch.Generator) -> float:
    return float(torch.rand((), generator=generator, dtype=torch.float64))
