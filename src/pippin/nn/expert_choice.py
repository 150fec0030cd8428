r"""Feed-forward layers with experts: experts that choose their tokens, or tokens that choose their experts.

Notable here:
- where experts choose, all have the same load by construction and no loss has to see to it; a token may be taken by
  all of them or by none, so work goes where the picture asks for it
- a choice is a list of rows: tokens are gathered, multiplied expert by expert in one batched product, and added back;
  nothing of the size tokens x experts x capacity is ever built
- whoever has the same affinity for all tokens takes them in turn, each expert from where the one before it stopped, so
  a router of zeros gives every token to equally many experts
- to choose among tokens is to look ahead: a layer that does so says it (`looks_ahead`), and causal blocks refuse it
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument
from pippin.nn.feedforward import Activation, activate


@dataclass(frozen=True)
class Routing:
    """Who worked on what in one pass.

    Attributes:
        indices: where experts choose, the tokens of each expert, counted within their group; where tokens choose, the
            experts of each token.
        gates: the weights of those choices; 0 where a place stayed empty.
        per_token: experts that work on each token.
        per_expert: tokens that each expert works on.
    """

    indices: Int[Tensor, "groups choosers chosen"]
    gates: Float[Tensor, "groups choosers chosen"]
    per_token: Int[Tensor, "n tokens"]
    per_expert: Int[Tensor, experts]


class Experts(nn.Module):
    """Feed-forward layers of two matrices and one shape, kept as one.

    Args:
        count: of the experts.
        width: of their input and output.
        hidden: their inner width.
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
            bias.no_decay = True  # type: ignore[attr-defined]  # which `pippin.train` looks for

    def forward(self, x: Float[Tensor, "experts rows width"]) -> Float[Tensor, "experts rows width"]:
        """Every expert on rows of its own, all in one batched product."""
        inner = activate(torch.baddbmm(self.up_bias, x, self.up), self.activation)
        return torch.baddbmm(self.down_bias, inner, self.down)

    def ragged(self, x: Float[Tensor, "rows width"], counts: list[int]) -> Float[Tensor, "rows width"]:
        """The first ``counts[0]`` rows through the first expert, the next ``counts[1]`` through the second, and on."""
        answers = []
        for expert, part in enumerate(x.split(counts)):
            if len(part):
                inner = activate(torch.addmm(self.up_bias[expert], part, self.up[expert]), self.activation)
                answers.append(torch.addmm(self.down_bias[expert], inner, self.down[expert]))
        return torch.cat(answers) if answers else x

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> Experts:
        """Random weights that keep the size of what passes; biases zero."""
        for weight in (self.up, self.down):
            weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)
        for bias in (self.up_bias, self.down_bias):
            bias.zero_()
        return self


class _Routed(nn.Module):
    """What both layers have: a router in float32, experts, and a look at the last pass where it is asked for."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()
        for name, value in (("width", width), ("hidden", hidden), ("experts", experts)):
            if value < 1:
                raise InvalidArgument(f"{type(self).__name__}: {name} is {value}; give 1 or more")
        self.router = nn.Parameter(torch.zeros(experts, width))
        self.experts = Experts(experts, width, hidden)
        self.capture = False
        self.last_routing: Routing | None = None

    def affinities(self, x: Float[Tensor, "n tokens width"]) -> Float[Tensor, "n tokens experts"]:
        """How much each token and each expert have to do with each other, adding up to 1 for each token."""
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.float(), self.router.float()).softmax(-1)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> _Routed:
        """Random weights."""
        self.router.normal_(0.0, self.router.shape[1] ** -0.5, generator=generator)
        self.experts.initialise(generator)
        return self

    def _remember(self, indices: Tensor, gates: Tensor, per_token: Tensor, per_expert: Tensor) -> None:
        if self.capture:
            self.last_routing = Routing(indices, gates.detach(), per_token, per_expert)


class ExpertChoiceFFN(_Routed):
    r"""Each expert takes the tokens that it has the highest affinity for, the same number as every other.

    With affinities $A = \mathrm{softmax}_{\mathrm{experts}}(x W_r)$, expert i takes the
    $C = \lceil S f / E \rceil$ tokens of a group of S with the largest $A_{si}$, and a token gets
    $g \sum_{i \text{ took } s} A_{si}\, E_i(x_s)$: nothing where nobody took it.

    Args:
        width: of the tokens.
        hidden: inner width of each expert.
        experts: E.
        capacity: f, experts per token on average.
        group: tokens that compete: those of one picture, or so many of the flattened batch; a picture then depends
            on its neighbours.
        gate_scale: g. Affinities begin near 1/E, so at 1 a layer begins ``E / f`` times weaker than a dense one; at
            ``E / f`` as strong.

    Attributes:
        capture: whether passes leave their `Routing` in ``last_routing``.

    Raises:
        InvalidArgument: sizes below 1, a capacity outside 0 to E, a group below 1, a scale that is not positive.

    Source: Zhou et al. 2022, arXiv:2202.09368, section 3.2; in diffusion, Sun et al. 2024, arXiv:2410.02098,
    section 3.2.
    """

    looks_ahead = True

    def __init__(
        self,
        width: int,
        hidden: int,
        experts: int,
        *,
        capacity: float = 2.0,
        group: int | Literal["image"] = "image",
        gate_scale: float = 1.0,
    ) -> None:
        super().__init__(width, hidden, experts)
        if not 0 < capacity <= experts:
            raise InvalidArgument(f"capacity is {capacity}; {experts} experts take each token 0 to {experts} times")
        if group != "image" and group < 1:
            raise InvalidArgument(f"group is {group}; give 'image' or a number of tokens")
        if not 0 < gate_scale < math.inf:
            raise InvalidArgument(f"gate_scale is {gate_scale}; give a positive number")
        self.capacity, self.group, self.gate_scale = capacity, group, gate_scale

    def forward(
        self, x: Float[Tensor, "n tokens width"], mask: Bool[Tensor, "pictures places"] | None = None
    ) -> Float[Tensor, "n tokens width"]:
        """Apply the layer.

        Args:
            x: the tokens.
            mask: which of them are there; the others are never chosen, and capacity counts only those that are there.

        Raises:
            InvalidArgument: a group that does not divide the batch, or a mask of another shape.
        """
        n, tokens, width = x.shape
        if mask is not None and mask.shape != (n, tokens):
            raise InvalidArgument(f"the mask is of shape {tuple(mask.shape)}, the tokens are {n} by {tokens}")
        size = tokens if self.group == "image" else self.group
        if n * tokens % size:
            raise InvalidArgument(
                f"groups of {size} do not divide {n} pictures of {tokens} tokens; set group='image' or another batch"
            )
        affinities = self.affinities(x).view(-1, size, self.experts.count)
        indices, gates = choose_tokens(affinities, self.capacity, None if mask is None else mask.view(-1, size))
        first = size * torch.arange(len(indices), device=x.device)[:, None, None]
        rows = (indices + first).transpose(0, 1).flatten()  # expert by expert, group by group within each
        weights = gates.transpose(0, 1).flatten()
        flat = x.reshape(-1, width)
        answers = self.experts(flat[rows].view(self.experts.count, -1, width)).view(-1, width)
        weighted = answers.float() * (self.gate_scale * weights)[:, None]
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

    Args:
        affinities: positive.
        capacity: f, experts per token on average.
        present: which tokens are there; S counts them. A group with fewer than another leaves its last places empty:
            gate 0.

    Equal affinities are settled by position, expert i beginning where expert i - 1 has stopped.

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
        place = (present.cumsum(1) - 1)[:, None] - turns * filled[:, None, None]
        place = (place % there.clamp(min=1)[:, None, None]).masked_fill(~present[:, None], size)
        order = place.argsort(-1)
        own = own.masked_fill(~present[:, None], -torch.inf)
    # stable, so that what is equal stays in the order above
    ranked = own.gather(2, order).sort(dim=-1, descending=True, stable=True).indices[..., :most]
    indices = order.gather(2, ranked)
    gates = affinities.transpose(1, 2).gather(2, indices)
    if filled is not None:
        gates = gates * (torch.arange(most, device=device) < filled[:, None, None])
    return indices, gates


class TokenChoiceFFN(_Routed):
    r"""Each token takes the experts that it has the highest affinity for; none is ever turned away.

    A token gets $\sum_i w_i E_i(x)$ over its k experts, with weights w that are the affinities scaled to add up to 1.
    Nothing keeps the experts' loads apart but a loss, $E \sum_i f_i \bar A_i$ (f: shares of the choices, $\bar A$: mean
    affinities), which is 1 where all are equal.

    Args:
        width: of the tokens.
        hidden: inner width of each expert.
        experts: E.
        active: k.

    Attributes:
        capture: whether passes leave their `Routing` in ``last_routing``.
        balance: the loss of the last pass in training mode; None before it, and after it was taken away.

    Raises:
        InvalidArgument: sizes below 1, or k outside 1 to E.

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
        answers = self.experts.ragged(flat[rows], per_expert.tolist())
        weighted = answers.float() * weights.flatten()[order, None]
        out = torch.zeros(len(flat), width, device=x.device).index_add(0, rows, weighted)
        per_token = torch.full(x.shape[:2], self.active, device=x.device)
        self._remember(indices, weights, per_token, per_expert)
        return out.to(x.dtype).view_as(x)
