"""Feed-forward layers: gated (SwiGLU, GeGLU), plain, and a mixture of gated experts.

Notable here:
- the mixture drops no token: tokens are sorted by expert and each expert sees exactly those that chose it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from pippin.nn.linear import Linear
from pippin.nn.lora import Shares

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


@dataclass(frozen=True)
class FeedForwardSpec:
    """The shape of one feed-forward layer.

    Args:
        size: inner width (of each expert, in a mixture).
        activation: the nonlinearity.
        gated: ``down(act(gate(x)) * up(x))`` if true, ``down(act(up(x)))`` otherwise.
        experts: number of experts; 0 for a single dense layer.
        active: experts that each token uses.
        renormalise: whether the weights of the chosen experts are scaled to sum to one.
    """

    size: int
    activation: Activation = "silu"
    gated: bool = True
    experts: int = 0
    active: int = 0
    renormalise: bool = True


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Apply a nonlinearity by name."""
    if activation == "silu":
        return F.silu(x)
    if activation == "relu":
        return F.relu(x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


class FeedForward(nn.Module):
    """A dense feed-forward layer, gated or plain."""

    def __init__(self, spec: FeedForwardSpec, width: int, *, bias: bool = False) -> None:
        super().__init__()
        self.spec = spec
        self.gate_proj = Linear(width, spec.size, bias=bias) if spec.gated else None
        self.up_proj: Linear | None = Linear(width, spec.size, bias=bias)
        self.down_proj = Linear(spec.size, width, bias=bias)
        self.gate_up_proj: Linear | None = None  # gate and up as one, where packing fused them

    def forward(
        self, x: Float[Tensor, "*batch width"], adapters: Shares | None = None
    ) -> Float[Tensor, "*batch width"]:
        """Apply the layer, and the adapters to their tokens."""
        if self.gate_up_proj is not None:
            gate, up = self.gate_up_proj(x, adapters).chunk(2, -1)
        else:
            assert self.up_proj is not None
            up = self.up_proj(x, adapters)
            gate = None if self.gate_proj is None else self.gate_proj(x, adapters)
        inner = activate(up, self.spec.activation) if gate is None else activate(gate, self.spec.activation) * up
        y: Tensor = self.down_proj(inner, adapters)
        return y

    def pack(self) -> None:
        """Pack the weights for inference; fuse gate and up where that is quicker."""
        assert self.up_proj is not None
        if self.gate_proj is not None and self.gate_proj.fusible:
            self.gate_up_proj = Linear.fused([self.gate_proj, self.up_proj]).pack()
            self.gate_proj = self.up_proj = None
        else:
            for projection in (self.gate_proj, self.up_proj):
                if projection is not None:
                    projection.pack()
        self.down_proj.pack()


class MixtureOfExperts(nn.Module):
    """Top-k routed experts without token drop.

    Source: Shazeer et al. 2017, arXiv:1701.06538; the drop-free form is that of MegaBlocks, arXiv:2211.15841.
    """

    def __init__(self, spec: FeedForwardSpec, width: int) -> None:
        super().__init__()
        self.spec = spec
        self.gate = Linear(width, spec.experts)
        self.experts = nn.ModuleList(FeedForward(spec, width) for _ in range(spec.experts))

    def forward(
        self, x: Float[Tensor, "batch seq width"], adapters: Shares | None = None
    ) -> Float[Tensor, "batch seq width"]:
        """Send each token to its experts and add up their weighted answers (in float32); experts have no adapters."""
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(tokens).float().softmax(-1).topk(self.spec.active, -1)
        if self.spec.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        rows = order // self.spec.active
        counts = chosen.flatten().bincount(minlength=self.spec.experts).tolist()
        answers = torch.cat(
            [expert(part) for expert, part in zip(self.experts, tokens[rows].split(counts), strict=True) if len(part)]
        )
        weighted = answers.float() * weights.flatten()[order, None]
        return torch.zeros_like(tokens, dtype=torch.float32).index_add_(0, rows, weighted).to(x.dtype).view_as(x)

    def pack(self) -> None:
        """Pack every expert; the router stays as it is."""
        for expert in self.experts:
            assert isinstance(expert, FeedForward)
            expert.pack()
