r"""Mixture-of-experts feed-forward layers with expert-choice or token-choice routing.

Notable here:
- in expert-choice routing all experts have the same load by construction, without a balancing loss; a token may be
  processed by any number of experts, so computation adapts to the image
- tokens are gathered by index, processed in one batched product over experts, and added back; no tensor of size
  tokens x experts x capacity is created
- an expert with equal affinities for all tokens takes them in order, starting where the previous expert stopped, so
  that a router of zeros gives every token to the same number of experts
- expert choice looks ahead at later tokens: the layer has the attribute `looks_ahead`, and causal blocks refuse it
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from pippin.core.checks import PositiveFloat, PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.nn.feedforward.feedforward import Activation, activate


@dataclass(frozen=True)
class Routing:
    """The routing of one forward pass.

    Attributes:
        indices: in expert choice, the tokens of each expert, as indices within their group; in token choice, the
            experts of each token.
        gates: weights of these choices; 0 for an unused slot.
        per_token: number of experts of each token.
        per_expert: number of tokens of each expert.
    """

    indices: Int[Tensor, "groups choosers chosen"]
    gates: Float[Tensor, "groups choosers chosen"]
    per_token: Int[Tensor, "n tokens"]
    per_expert: Int[Tensor, experts]


class Experts(nn.Module):
    """Feed-forward layers of equal shape with stacked parameters.

    Args:
        count: number of experts.
        width: size of input and output.
        hidden: inner size.
        activation: the nonlinearity.
    """

    def __init__(self, count: int, width: int, hidden: int, activation: Activation = "gelu_tanh") -> None:
        super().__init__()
        self.count, self.width, self.hidden, self.activation = count, width, hidden, activation
        self.up = nn.Parameter(torch.empty(count, width, hidden))
        self.up_bias = nn.Parameter(torch.zeros(count, 1, hidden))
        self.down = nn.Parameter(torch.empty(count, hidden, width))
        self.down_bias = nn.Parameter(torch.zeros(count, 1, width))
        for bias in (self.up_bias, self.down_bias):
            bias.no_decay = True  # type: ignore[attr-defined]  # the optimizers of `pippin.train` check this

    def forward(self, x: Float[Tensor, "experts rows width"]) -> Float[Tensor, "experts rows width"]:
        """Apply each expert to its rows, in one batched product."""
        inner = activate(torch.baddbmm(self.up_bias, x, self.up), self.activation)
        return torch.baddbmm(self.down_bias, inner, self.down)

    def ragged(self, x: Float[Tensor, "rows width"], counts: list[int]) -> Float[Tensor, "rows width"]:
        """Apply the experts to different numbers of rows: ``counts[0]`` rows for the first expert, and so on."""
        outputs = []
        for expert, part in enumerate(x.split(counts)):
            if len(part):
                inner = activate(torch.addmm(self.up_bias[expert], part, self.up[expert]), self.activation)
                outputs.append(torch.addmm(self.down_bias[expert], inner, self.down[expert]))
        return torch.cat(outputs) if outputs else x

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> Experts:
        """Initialize weights so that activations keep their variance; biases are zero."""
        for weight in (self.up, self.down):
            weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)
        for bias in (self.up_bias, self.down_bias):
            bias.zero_()
        return self


class _Routed(nn.Module):
    """Base of both layers: a router in float32, experts, and optionally the routing of the last pass."""

    @checked
    def __init__(self, width: PositiveInt, hidden: PositiveInt, experts: PositiveInt) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.zeros(experts, width))
        self.experts = Experts(experts, width, hidden)
        self.capture = False
        self.last_routing: Routing | None = None

    def affinities(self, x: Float[Tensor, "n tokens width"]) -> Float[Tensor, "n tokens experts"]:
        """The router's softmax over experts for each token."""
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.router.float()).softmax(-1)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> _Routed:
        """Initialize the router and the experts."""
        self.router.normal_(0.0, self.router.shape[1] ** -0.5, generator=generator)
        self.experts.initialize(generator)
        return self

    def _remember(self, indices: Tensor, gates: Tensor, per_token: Tensor, per_expert: Tensor) -> None:
        if self.capture:
            self.last_routing = Routing(indices, gates.detach(), per_token, per_expert)


class ExpertChoiceFFN(_Routed):
    r"""Expert-choice routing: each expert takes the same number of tokens, those with the highest affinity.

    With affinities $A = \mathrm{softmax}_{\mathrm{experts}}(x W_r)$, expert i takes the
    $C = \lceil S f / E \rceil$ tokens with the largest $A_{si}$ of a group of S tokens, and the output of a token is
    $g \sum_{i \text{ took } s} A_{si}\, E_i(x_s)$, which is 0 if no expert took it.

    Args:
        width: hidden size.
        hidden: inner size of each expert.
        experts: number of experts E.
        capacity: f, average number of experts per token.
        group: the tokens that compete: "image" for those of one image, or a number of tokens of the flattened batch, in
            which case outputs depend on other images of the batch.
        gate_scale: g. Affinities start near 1/E, so with 1 the initial output is ``E / f`` times smaller than that of a
            dense layer; with ``E / f`` it is of the same size.

    Attributes:
        capture: whether forward passes store their `Routing` in ``last_routing``.

    Raises:
        InvalidArgument: a capacity above E.

    Source: Zhou et al. 2022, arXiv:2202.09368, section 3.2; in diffusion, Sun et al. 2024, arXiv:2410.02098,
    section 3.2.
    """

    looks_ahead = True

    @checked
    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        *,
        capacity: PositiveFloat = 2.0,
        group: PositiveInt | Literal["image"] = "image",
        gate_scale: PositiveFloat = 1.0,
    ) -> None:
        super().__init__(width, hidden, experts)
        if capacity > experts:
            raise InvalidArgument(f"capacity is {capacity}; {experts} experts take each token at most {experts} times")
        self.capacity, self.group, self.gate_scale = capacity, group, gate_scale

    def forward(
        self, x: Float[Tensor, "n tokens width"], mask: Bool[Tensor, "mask_n mask_tokens"] | None = None
    ) -> Float[Tensor, "n tokens width"]:
        """Apply the layer.

        Args:
            x: hidden states.
            mask: true for tokens that are not padding; padding is never chosen, and capacity does not count it.

        Raises:
            InvalidArgument: a group that does not divide the batch, or a mask of another shape.
        """
        n, tokens, width = x.shape
        if mask is not None and mask.shape != (n, tokens):
            raise InvalidArgument(f"the mask is of shape {tuple(mask.shape)}, the tokens are {n} by {tokens}")
        size = tokens if self.group == "image" else self.group
        if n * tokens % size:
            raise InvalidArgument(
                f"groups of {size} do not divide {n} images of {tokens} tokens; set group='image' or another batch"
            )
        affinities = self.affinities(x).view(-1, size, self.experts.count)
        indices, gates = choose_tokens(affinities, self.capacity, None if mask is None else mask.view(-1, size))
        first = size * torch.arange(len(indices), device=x.device)[:, None, None]
        rows = (indices + first).transpose(0, 1).flatten()  # rows of the flat batch, sorted by expert, then group
        weights = gates.transpose(0, 1).flatten()
        flat = x.reshape(-1, width)
        outputs = self.experts(flat[rows].view(self.experts.count, -1, width)).view(-1, width)
        weighted = outputs.float() * (self.gate_scale * weights)[:, None]
        out = torch.zeros(len(flat), width, device=x.device).index_add(0, rows, weighted)
        if self.capture:
            taken = gates > 0
            per_token = rows[weights > 0].bincount(minlength=len(flat)).view(n, tokens)
            self._remember(indices, gates, per_token, taken.sum((0, 2)))
        return out.to(x.dtype).view_as(x)


def choose_tokens(
    affinities: Float[Tensor, "groups tokens experts"],
    capacity: float,
    present: Bool[Tensor, "groups tokens"] | None = None,
) -> tuple[Int[Tensor, "groups experts chosen"], Float[Tensor, "groups experts chosen"]]:
    r"""The $\lceil S f / E \rceil$ tokens of each group with the highest affinity for each expert, and that affinity.

    Equal affinities are ordered by position, where expert i starts after the tokens of expert i - 1.

    Args:
        affinities: positive affinities.
        capacity: f, average number of experts per token.
        present: true for tokens that are not padding; S is their number. In groups with fewer tokens than others the
            last slots are unused, with gate 0.

    >>> choose_tokens(torch.full((1, 4, 2), 0.5), 1.0)[0].tolist()
    [[[0, 1], [2, 3]]]
    """
    groups, size, experts = affinities.shape
    device = affinities.device
    most = math.ceil(size * capacity / experts - 1e-9)
    turns = torch.arange(experts, device=device)[:, None]
    own = affinities.detach().transpose(1, 2)
    if present is None:
        filled = None
        order = ((torch.arange(size, device=device) + turns * most) % size).expand(groups, -1, -1)
    else:
        there = present.sum(1)
        filled = torch.ceil(there * (capacity / experts) - 1e-6).long()
        rank = (present.cumsum(1) - 1)[:, None] - turns * filled[:, None, None]
        rank = (rank % there.clamp(min=1)[:, None, None]).masked_fill(~present[:, None], size)
        order = rank.argsort(-1)
        own = own.masked_fill(~present[:, None], -torch.inf)
    # a stable sort, so that equal affinities stay in the order above
    ranked = own.gather(2, order).sort(dim=-1, descending=True, stable=True).indices[..., :most]
    indices = order.gather(2, ranked)
    gates = affinities.transpose(1, 2).gather(2, indices)
    if filled is not None:
        gates = gates * (torch.arange(most, device=device) < filled[:, None, None])
    return indices, gates


class TokenChoiceFFN(_Routed):
    r"""Token-choice routing: each token takes the k experts with the highest affinity; no token is dropped.

    The output of a token is $\sum_i w_i E_i(x)$ over its k experts, with the affinities normalized to sum to 1 as
    weights w. The loads of the experts are balanced only by a loss, $E \sum_i f_i \bar A_i$ (f: shares of the choices,
    $\bar A$: mean affinities), which is 1 if all are equal.

    Args:
        width: hidden size.
        hidden: inner size of each expert.
        experts: number of experts E.
        active: number k of experts per token.

    Attributes:
        capture: whether forward passes store their `Routing` in ``last_routing``.
        balance: the balancing loss of the last forward pass in training mode; None before it, or after it was consumed.

    Raises:
        InvalidArgument: k outside 1 to E.

    Source: Lepikhin et al. 2020, arXiv:2006.16668, section 2.2; the loss as Fedus et al. 2021, arXiv:2101.03961, eq. 4.
    """

    def __init__(self, width: int, hidden: int, experts: int, *, active: int = 2) -> None:
        super().__init__(width, hidden, experts)
        if not 1 <= active <= experts:
            raise InvalidArgument(f"active is {active}; each token takes 1 to {experts} experts")
        self.active = active
        self.balance: Tensor | None = None

    def forward(self, x: Float[Tensor, "n tokens width"]) -> Float[Tensor, "n tokens width"]:
        """Apply the layer."""
        count, width = self.experts.count, x.shape[-1]
        affinities = self.affinities(x)
        indices = affinities.detach().sort(dim=-1, descending=True, stable=True).indices[..., : self.active]
        weights = affinities.gather(-1, indices)
        weights = weights / weights.sum(-1, keepdim=True)
        per_expert = indices.flatten().bincount(minlength=count)
        if self.training:
            shares = per_expert / per_expert.sum()
            self.balance = count * (shares * affinities.mean((0, 1))).sum()
        order = indices.flatten().argsort(stable=True)
        rows = order // self.active
        flat = x.reshape(-1, width)
        outputs = self.experts.ragged(flat[rows], per_expert.tolist())
        weighted = outputs.float() * weights.flatten()[order, None]
        out = torch.zeros(len(flat), width, device=x.device).index_add(0, rows, weighted)
        per_token = torch.full(x.shape[:2], self.active, device=x.device)
        self._remember(indices, weights, per_token, per_expert)
        return out.to(x.dtype).view_as(x)
