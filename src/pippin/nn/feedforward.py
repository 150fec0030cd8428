"""Feed-forward layers: gated (SwiGLU, GeGLU), plain, and a mixture of gated experts.

Notable here:
- the mixture drops no tokens: they are sorted by expert, and each expert processes exactly the tokens that chose it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from pippin.nn.context import LayerContext
from pippin.nn.linear import Linear

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]


@dataclass(frozen=True)
class FeedForwardSpec:
    """The shape of one feed-forward layer.

    Args:
        intermediate_size: inner size (of each expert, in a mixture).
        activation: the nonlinearity.
        gated: ``down(act(gate(x)) * up(x))`` if true, ``down(act(up(x)))`` otherwise.
        num_experts: number of experts; 0 for a single dense layer.
        num_experts_per_tok: number of experts for each token.
        norm_topk_prob: whether the weights of the chosen experts are normalized to sum to one.
        bias: whether the matrices of a dense layer have biases.
        shared_intermediate_size: inner size of a dense layer beside the experts that every token takes, weighted by a
            sigmoid gate of its own; 0 for none.
    """

    intermediate_size: int
    activation: Activation = "silu"
    gated: bool = True
    num_experts: int = 0
    num_experts_per_tok: int = 0
    norm_topk_prob: bool = True
    bias: bool = False
    shared_intermediate_size: int = 0


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Apply a nonlinearity by name."""
    if activation == "silu":
        return F.silu(x)
    if activation == "relu":
        return F.relu(x)
    if activation == "relu2":
        return F.relu(x).square()
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


class FeedForward(nn.Module):
    """A dense feed-forward layer, gated or plain."""

    def __init__(self, spec: FeedForwardSpec, width: int) -> None:
        super().__init__()
        self.spec, bias = spec, spec.bias
        self.gate_proj = Linear(width, spec.intermediate_size, bias=bias) if spec.gated else None
        self.up_proj: Linear | None = Linear(width, spec.intermediate_size, bias=bias)
        self.down_proj = Linear(spec.intermediate_size, width, bias=bias)
        self.gate_up_proj: Linear | None = None  # gate and up as one, where packing fused them

    def forward(
        self, x: Float[Tensor, "*batch width"], context: LayerContext | None = None
    ) -> Float[Tensor, "*batch width"]:
        """Apply the layer; of the context it uses the adapters."""
        adapters = None if context is None else context.adapters
        if self.gate_up_proj is not None:
            gate, up = self.gate_up_proj(x, adapters).chunk(2, -1)
        else:
            assert self.up_proj is not None
            up = self.up_proj(x, adapters)
            gate = None if self.gate_proj is None else self.gate_proj(x, adapters)
        inner = activate(up, self.spec.activation) if gate is None else activate(gate, self.spec.activation) * up
        y: Tensor = self.down_proj(inner, adapters)
        return y


class MixtureOfExperts(nn.Module):
    """Top-k routed experts without token drop.

    Source: Shazeer et al. 2017, arXiv:1701.06538; the drop-free form is that of MegaBlocks, arXiv:2211.15841.
    """

    def __init__(self, spec: FeedForwardSpec, width: int) -> None:
        super().__init__()
        self.spec = spec
        self.gate = Linear(width, spec.num_experts)
        self.experts = nn.ModuleList(FeedForward(spec, width) for _ in range(spec.num_experts))
        self.shared_expert: FeedForward | None = None
        if spec.shared_intermediate_size:
            dense = FeedForwardSpec(spec.shared_intermediate_size, spec.activation, spec.gated)
            self.shared_expert, self.shared_expert_gate = FeedForward(dense, width), Linear(width, 1)

    def forward(
        self, x: Float[Tensor, "batch seq width"], context: LayerContext | None = None
    ) -> Float[Tensor, "batch seq width"]:
        """Route each token to its experts and add up their weighted outputs in float32; experts have no adapters."""
        routed = self._routed(x)
        if self.shared_expert is None:
            return routed
        shared: Tensor = self.shared_expert(x) * self.shared_expert_gate(x).sigmoid()
        return routed + shared

    def _routed(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(tokens).float().softmax(-1).topk(self.spec.num_experts_per_tok, -1)
        if self.spec.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        rows = order // self.spec.num_experts_per_tok
        counts = chosen.flatten().bincount(minlength=self.spec.num_experts).tolist()
        outputs = torch.cat(
            [expert(part) for expert, part in zip(self.experts, tokens[rows].split(counts), strict=True) if len(part)]
        )
        weighted = outputs.float() * weights.flatten()[order, None]
        return torch.zeros_like(tokens, dtype=torch.float32).index_add_(0, rows, weighted).to(x.dtype).view_as(x)
