r"""Acceptance of draft tokens: rules that turn draft and target distributions into a token of the answer.

Notable here:
- exact acceptance: a token sampled from q is accepted with probability min(1, p/q), else another is sampled from the
  residual distribution max(0, p - q); the answer's tokens follow p, for any q
- if the draft was not sampled (a look-up, a greedy draft), the target's own sample decides, with the random numbers of
  ordinary decoding: the answer is identical, token for token, to the one without speculation
- coarse acceptance compares the distributions of groups of similar tokens: more draft tokens are accepted, the groups
  follow the target's distribution exactly, and the tokens within a group follow the draft
- both use the same code; if each token is its own group, they make the same decisions
- the residual is sampled by thinning: sample from p, accept with probability 1 - q/p, at most `max_thinning` times;
  only then is the whole residual distribution computed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float64
from torch import Tensor

from pippin.core.errors import DecodingFailure, InvalidArgument
from pippin.engine.decoding.sampling import sample_index
from pippin.engine.speculation.groups import TokenGroups, check_distribution

Probabilities = Float64[Tensor, " vocab"]


@dataclass(frozen=True)
class Verified:
    """The result of verifying a whole draft.

    ``tokens`` are the accepted tokens and the one that follows them; ``exact`` says which distribution of the target is
    preserved.
    """

    accepted: int
    tokens: tuple[int, ...]
    exact: Literal["token", "group"]


@runtime_checkable
class AcceptanceRule(Protocol):
    """Decides whether draft tokens are accepted.

    Attributes:
        exact: the distribution of the target that is preserved: that of every token, or that of groups of tokens.
    """

    @property
    def exact(self) -> Literal["token", "group"]:
        """The distribution of the target that the rule preserves."""

    def check(self, vocab_size: int) -> None:
        """Raise `InvalidArgument` if the rule was made for another vocabulary."""

    def step(
        self, token: int, q: Probabilities | None, p: Probabilities, generator: torch.Generator
    ) -> tuple[int, bool]:
        """The token of the answer at the position of a draft token, and whether the draft token was accepted.

        Args:
            token: the draft token, sampled from ``q``.
            q: the distribution of the draft; None if it was not sampled.
            p: the distribution of the target.
            generator: random generator.
        """


@dataclass(frozen=True)
class ExactAcceptance:
    """The answer's tokens follow the target's distribution (speculative sampling).

    Args:
        max_thinning: samples of the target's distribution before the residual distribution is computed as a whole.

    Source: Leviathan et al. 2023, arXiv:2211.17192, algorithm 1; Chen et al. 2023, arXiv:2302.01318.
    """

    max_thinning: int = 64

    @property
    def exact(self) -> Literal["token", "group"]:
        """Every token follows the target's distribution."""
        return "token"

    def check(self, vocab_size: int) -> None:
        """Do nothing: the rule supports any vocabulary."""

    def step(
        self, token: int, q: Probabilities | None, p: Probabilities, generator: torch.Generator
    ) -> tuple[int, bool]:
        """The token at the position of a draft token, and whether the draft token was accepted.

        Raises:
            DecodingFailure: ``q`` gives the draft token no probability.
        """
        if q is None:  # the draft was not sampled: the target's sample decides
            chosen = sample_index(p, generator)
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
        """Verify a whole draft; see `verify`."""
        return verify(self, draft_tokens, q, p, generator)


@dataclass(frozen=True)
class CoarseAcceptance:
    """Groups of tokens follow the target's distribution; a token represents its group.

    Within a group an accepted token follows the draft, so single tokens do not follow the target's distribution: this
    is suitable if the members of a group are interchangeable, such as codes of a speech codec.

    Args:
        groups: groups of interchangeable tokens.
        max_thinning: samples of the target's distribution before the residual distribution is computed as a whole.

    Source: arXiv:2511.13732 (the groups and their weights); the rule step by step is ours.
    """

    groups: TokenGroups
    max_thinning: int = 64

    @property
    def exact(self) -> Literal["token", "group"]:
        """Groups of tokens follow the target's distribution."""
        return "group"

    def check(self, vocab_size: int) -> None:
        """Check that the groups cover the vocabulary.

        Raises:
            InvalidArgument: the groups have another number of tokens.
        """
        if self.groups.vocab_size != vocab_size:
            raise InvalidArgument(
                f"the token groups are of {self.groups.vocab_size:,} tokens, the model's vocabulary has {vocab_size:,}"
            )

    def step(
        self, token: int, q: Probabilities | None, p: Probabilities, generator: torch.Generator
    ) -> tuple[int, bool]:
        """The token at the position of a draft token, and whether the draft token was accepted.

        Tokens that a constraint forbids have probability 0 in ``p`` and ``q``: groups then consist of their allowed
        tokens, and no forbidden token is returned.

        Raises:
            DecodingFailure: ``q`` gives the draft token no probability.
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
        """Verify a whole draft; see `verify`."""
        self.check(p.shape[-1])
        return verify(self, draft_tokens, q, p, generator)


def verify(
    rule: AcceptanceRule,
    draft_tokens: Sequence[int],
    q: Float64[Tensor, "drafted vocab"],
    p: Float64[Tensor, "rows vocab"],
    generator: torch.Generator,
) -> Verified:
    """Verify a draft: the accepted tokens up to the first rejection, and one more.

    Args:
        rule: the acceptance rule.
        draft_tokens: the draft tokens, each sampled from its row of ``q``.
        q: distributions of the draft.
        p: distributions of the target, with one row more: the distribution after the last draft token.
        generator: random generator.

    Raises:
        InvalidArgument: rows that are not distributions, a wrong number of rows, or a token outside the vocabulary.
        DecodingFailure: a draft token that has no probability in its distribution.

    >>> distribution = torch.tensor([[0.5, 0.5], [0.0, 1.0]], dtype=torch.float64)
    >>> verify(ExactAcceptance(), [0], distribution[:1], distribution, torch.Generator().manual_seed(0))
    Verified(accepted=1, tokens=(0, 1), exact='token')
    """
    if len(q) != len(draft_tokens) or len(p) != len(draft_tokens) + 1:
        raise InvalidArgument(
            f"{len(draft_tokens)} guesses need as many distributions of the draft and one more of the target, got "
            f"{len(q)} and "
            f"{len(p)}"
        )
    check_distribution(q, p.shape[-1])
    check_distribution(p, p.shape[-1])
    tokens: list[int] = []
    for index, token in enumerate(draft_tokens):
        if not 0 <= token < p.shape[-1]:
            raise InvalidArgument(f"token id {token} is outside the vocabulary of {p.shape[-1]:,}")
        chosen, accepted = rule.step(token, q[index], p[index], generator)
        tokens.append(chosen)
        if not accepted:
            return Verified(index, tuple(tokens), rule.exact)
    tokens.append(sample_index(p[-1], generator))
    return Verified(len(draft_tokens), tuple(tokens), rule.exact)


class AcceptanceDecision(NamedTuple):
    """The decision about one draft token: the answer's token, its group, and whether the draft token was accepted."""

    token: int
    group: int
    accepted: bool


def decide(
    token: int,
    q: Probabilities,
    p: Probabilities,
    generator: torch.Generator,
    groups: TokenGroups | None,
    max_thinning: int,
) -> AcceptanceDecision:
    r"""Decide about one draft token.

    A group k of the draft token is chosen uniformly, and the token is accepted with probability
    $\min(1, P_c(k) / Q_c(k))$. Otherwise a token and a group are sampled from the target's distribution until one is
    accepted, with probability $\max(0, 1 - Q_c(k) / P_c(k))$. So k follows $P_c$ exactly: accepted draft tokens
    contribute $\min(P_c, Q_c)$, and the others the residual.

    Args:
        token: the draft token, sampled from ``q``.
        q: the distribution of the draft.
        p: the distribution of the target.
        generator: random generator.
        groups: groups of tokens; None if each token is its own group.
        max_thinning: samples of the target's distribution before the residual distribution is computed as a whole.

    Raises:
        DecodingFailure: ``q`` gives the draft token no probability.
    """
    group = _group(groups, token, generator)
    draft_probability = _probability(groups, q, group)
    if draft_probability <= 0:
        raise DecodingFailure(f"the draft gave token {token}, to which its own distribution gives no probability")
    if _uniform(generator) * draft_probability < _probability(groups, p, group):
        return AcceptanceDecision(token, group, True)
    sums = p.cumsum(0)
    for _ in range(max_thinning):
        at = int(torch.searchsorted(sums, _uniform(generator) * float(sums[-1]), right=True))
        other = at if at < len(sums) else int(p.nonzero()[-1])
        group = _group(groups, other, generator)
        if _uniform(generator) < 1 - _probability(groups, q, group) / _probability(groups, p, group):
            return AcceptanceDecision(other, group, False)
    return _sample_residual(q, p, generator, groups)


def _sample_residual(
    q: Probabilities, p: Probabilities, generator: torch.Generator, groups: TokenGroups | None
) -> AcceptanceDecision:
    """Sample a group from the residual distribution, then one of its tokens."""
    coarse_q, coarse_p = (distribution if groups is None else groups.coarse(distribution) for distribution in (q, p))
    residual = (coarse_p - coarse_q).clamp(min=0)
    group = sample_index(
        residual if float(residual.sum()) > 0 else coarse_p, generator
    )  # no residual: p and q are equal up to rounding
    if groups is None or int(groups.sizes[group]) == 1:
        return AcceptanceDecision(group, group, False)
    members = groups.group_of(group)
    return AcceptanceDecision(int(members[sample_index(p[members] / groups.sizes[members], generator)]), group, False)


def _group(groups: TokenGroups | None, token: int, generator: torch.Generator) -> int:
    return token if groups is None else groups.sample_group(token, generator)


def _probability(groups: TokenGroups | None, distribution: Tensor, group: int) -> float:
    return float(distribution[group]) if groups is None else groups.group_probability(distribution, group)


def _uniform(generator: torch.Generator) -> float:
    return float(torch.rand((), generator=generator, dtype=torch.float64))
