r"""Which experts a token takes, and with which weights.

Notable here:
- affinities are a softmax over the experts or a sigmoid of each; a bias may move the choice without the weights
- experts may form groups, of which a token takes the best ones first
- SparseMixer normalizes the weight of each choice over the experts that are nearly as good
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class RouterSpec:
    """How a mixture routes its tokens.

    Args:
        scores: affinities: "softmax" over all experts; "sigmoid" of each; or "sparsemixer" (see `sparsemixer`).
        bias: whether the router's matrix has a bias.
        choice_bias: whether there is a bias that is added to affinities for the choice alone, such as DeepSeek 3's.
        num_groups: number of groups of equal size that the experts form, in order.
        num_chosen_groups: number of groups that the experts of a token are from.
        group_score: affinity of a group: that of its best expert ("max"), or the sum of its best two ("top two").
        scale: multiplier on the weights.
        jitter: "sparsemixer": the relative distance within which experts compete.
        softcap: bound of the router's logits, which become ``softcap * tanh(logit / softcap)``; None for no bound.
        scaled: whether the router normalizes its input and has weights for it, and a multiplier for each expert (Gemma
            4).

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.2.2; DeepSeek-V3, arXiv:2412.19437, section 2.1.2.
    """

    scores: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    bias: bool = False
    choice_bias: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_score: Literal["max", "top two"] = "max"
    scale: float = 1.0
    jitter: float = 0.0
    softcap: float | None = None
    scaled: bool = False


def route(
    logits: Float[Tensor, "tokens experts"],
    spec: RouterSpec,
    count: int,
    *,
    normalized: bool,
    choice_bias: Float[Tensor, experts] | None = None,
) -> tuple[Float[Tensor, "tokens chosen"], Int[Tensor, "tokens chosen"]]:
    """Weights and indices of the experts of each token, the best first.

    Args:
        logits: the router's outputs, float32; minus infinity for experts that must not be chosen.
        spec: how they become affinities.
        count: number of experts for each token.
        normalized: whether the weights of a token sum to one (before the scale).
        choice_bias: added to the affinities for the choice; None for none.

    >>> logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    >>> route(logits, RouterSpec(), 2, normalized=True)[1]
    tensor([[2, 1]])
    >>> route(logits, RouterSpec(num_groups=2), 2, normalized=True)[1]
    tensor([[2, 3]])
    """
    if spec.softcap is not None:  # which never brings an expert back that is masked
        bounded = spec.softcap * torch.tanh(logits / spec.softcap)
        logits = bounded.masked_fill(logits.isneginf(), -torch.inf)
    if spec.scores == "sparsemixer":
        return sparsemixer(logits, count, spec.jitter)
    scores = logits.softmax(-1) if spec.scores == "softmax" else logits.sigmoid()
    choice = scores
    if choice_bias is not None:  # which never brings an expert back that is masked
        choice = (scores + choice_bias).masked_fill(logits.isneginf(), -torch.inf)
    if spec.num_chosen_groups < spec.num_groups:
        choice = _within_groups(choice, spec)
    chosen = choice.topk(count, -1).indices
    weights = scores.gather(-1, chosen)
    if normalized:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)  # sigmoids may all be zero
    return weights if spec.scale == 1.0 else weights * spec.scale, chosen


def _within_groups(choice: Tensor, spec: RouterSpec) -> Tensor:
    """The affinities, those of experts outside the best groups at minus infinity."""
    grouped = choice.unflatten(-1, (spec.num_groups, -1))
    best = grouped.topk(1 if spec.group_score == "max" else 2, -1).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(
        -1, best.topk(spec.num_chosen_groups, -1).indices, value=True
    )
    masked: Tensor = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    return masked


def sparsemixer(
    logits: Float[Tensor, "tokens experts"], count: int, jitter: float
) -> tuple[Float[Tensor, "tokens chosen"], Int[Tensor, "tokens chosen"]]:
    r"""The best experts, each with its share of a softmax over the experts that were not taken before it and are near.

    An expert with logit s is near the best one, m, if $(m - s) / \max(|s|, m) \le 2 \epsilon$.

    Source: Liu et al. 2023, arXiv:2310.00811, as in Phi-3.5-MoE's inference.

    >>> sparsemixer(torch.tensor([[1.0, 0.99, -1.0]]), 2, 0.01)
    (tensor([[0.5025, 1.0000]]), tensor([[0, 1]]))
    """
    weights, chosen, left = [], [], logits
    for _ in range(count):
        best, index = left.max(-1, keepdim=True)
        far = (best - logits) / logits.abs().clamp(min=best) > 2 * jitter
        shares = left.masked_fill(far, -torch.inf).softmax(-1)
        weights.append(shares.gather(-1, index))
        chosen.append(index)
        left = left.scatter(-1, index, -torch.inf)
    return torch.cat(weights, -1), torch.cat(chosen, -1)
