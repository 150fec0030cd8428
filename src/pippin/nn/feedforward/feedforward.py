"""Feed-forward layers: gated (SwiGLU, GeGLU), plain, and a mixture of gated experts.

Notable here:
- the mixture drops no tokens: they are sorted by expert, and each expert processes exactly the tokens that chose it
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.nn.context import LayerContext
from pippin.nn.expert_mask import mask_scores, multiply_weights
from pippin.nn.feedforward.routing import RouterSpec, route
from pippin.nn.linear import Linear
from pippin.nn.norm import RMSNorm

Activation = Literal["silu", "gelu", "gelu_tanh", "gelu_sigmoid", "relu", "relu2", "xielu"]
"""Names of nonlinearities: "gelu_sigmoid" is ``x * sigmoid(1.702 x)``, "xielu" that of `XIELU`."""


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
        bias: whether the matrices of a dense layer or of each expert have biases.
        shared_intermediate_size: inner size of a dense layer beside the experts that every token takes; 0 for none.
        shared_gate: whether the output of that layer is weighted by a sigmoid gate of its own.
        router: how tokens choose experts.
        limit: bound of what enters a gated layer's product, which becomes ``act(min(gate, limit)) * (clamp(up) + 1)``
            with ``up`` within plus and minus the limit (gpt-oss); None for the product as it is.
        activation_sparsity: share of the gates that are cut off, if they are normally distributed: those below that
            quantile are 0, others are counted from it (Gemma 3n); 0 for none.
    """

    intermediate_size: int
    activation: Activation = "silu"
    gated: bool = True
    num_experts: int = 0
    num_experts_per_tok: int = 0
    norm_topk_prob: bool = True
    bias: bool = False
    shared_intermediate_size: int = 0
    shared_gate: bool = True
    router: RouterSpec = RouterSpec()
    limit: float | None = None
    activation_sparsity: float = 0.0


NO_FEED_FORWARD: Final = FeedForwardSpec(0, gated=False)
"""In place of a feed-forward layer, for a layer that has none."""


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Apply a nonlinearity by name."""
    if activation == "silu":
        return F.silu(x)
    if activation == "relu":
        return F.relu(x)
    if activation == "relu2":
        return F.relu(x).square()
    if activation == "gelu_sigmoid":
        return x * torch.sigmoid(1.702 * x)
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


class XIELU(nn.Module):
    r"""xIELU: $a_p x^2 + b x$ for positive x, $a_n (e^x - 1 - x) + b x$ for others, with learned $a_p$ and $a_n$.

    Source: Huang and Schlag 2024, arXiv:2411.13010.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p, self.alpha_n = nn.Parameter(torch.empty(1)), nn.Parameter(torch.empty(1))
        # constants that files hold
        self.beta: Tensor
        self.eps: Tensor
        self.register_buffer("beta", torch.empty(()))
        self.register_buffer("eps", torch.empty(()))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The paper's initial values: both slopes 0.8, and b = 0.5."""
        self.beta.fill_(0.5)
        self.eps.fill_(-1e-6)
        self.alpha_p.fill_(math.log(math.expm1(0.8)))
        self.alpha_n.fill_(math.log(math.expm1(0.8 - 0.5)))

    def coefficients(self) -> tuple[float, float, float, float]:
        """$a_p$, $a_n$ and $b$ as numbers, and a zero that fills up the kernels' four."""
        positive, negative = F.softplus(self.alpha_p), self.beta + F.softplus(self.alpha_n)
        return float(positive), float(negative), float(self.beta), 0.0

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        """Apply the function to each element."""
        positive, negative = F.softplus(self.alpha_p), self.beta + F.softplus(self.alpha_n)
        # what is not taken must stay finite, or its gradient is not a number
        curved = torch.where(x > 0, positive * x * x, (torch.expm1(torch.min(x, self.eps)) - x) * negative)
        return curved + self.beta * x


class FeedForward(nn.Module):
    """A dense feed-forward layer, gated or plain."""

    def __init__(self, spec: FeedForwardSpec, width: int) -> None:
        super().__init__()
        self.spec, bias = spec, spec.bias
        self.gate_proj = Linear(width, spec.intermediate_size, bias=bias) if spec.gated else None
        self.up_proj: Linear | None = Linear(width, spec.intermediate_size, bias=bias)
        self.down_proj = Linear(spec.intermediate_size, width, bias=bias)
        self.gate_up_proj: Linear | None = None  # gate and up as one, where packing fused them
        self.act_fn = XIELU() if spec.activation == "xielu" else None

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
        if gate is not None and self.spec.activation_sparsity:
            gate = _above_quantile(gate, self.spec.activation_sparsity)
        if gate is None:
            inner = self._activate(up)
        elif (limit := self.spec.limit) is None:
            inner = self._activate(gate) * up
        else:
            inner = self._activate(gate.clamp(max=limit)) * (up.clamp(-limit, limit) + 1)
        y: Tensor = self.down_proj(inner, adapters)
        return y

    def _activate(self, x: Tensor) -> Tensor:
        return activate(x, self.spec.activation) if self.act_fn is None else self.act_fn(x)


def _above_quantile(x: Tensor, share: float) -> Tensor:
    """What exceeds a quantile of the normal distribution that has the mean and deviation of each row."""
    # a constant: ONNX has no operator for the quantile
    deviations = torch.tensor(NormalDist().inv_cdf(share), dtype=x.dtype, device=x.device)
    return F.relu(x - (x.mean(-1, keepdim=True) + deviations * x.std(-1, keepdim=True, unbiased=False)))


class Router(Linear):
    """The router of a mixture: which experts each token takes, and with which weights.

    Args:
        spec: the mixture.
        width: size of its input.
        eps: epsilon of the norm of its input, where it has one.
    """

    def __init__(self, spec: FeedForwardSpec, width: int, *, eps: float = 1e-6) -> None:
        super().__init__(width, spec.num_experts, bias=spec.router.bias)
        self.spec, self.eps = spec, eps
        # a buffer: balancing moves it, not a gradient
        bias = torch.zeros(spec.num_experts) if spec.router.choice_bias else None
        self.e_score_correction_bias: Tensor | None
        self.register_buffer("e_score_correction_bias", bias)
        if spec.router.scaled:
            self.scale = nn.Parameter(torch.ones(width))
            self.per_expert_scale = nn.Parameter(torch.ones(spec.num_experts))

    def choose(
        self, x: Float[Tensor, "tokens width"], context: LayerContext | None = None
    ) -> tuple[Float[Tensor, "tokens chosen"], Int[Tensor, "tokens chosen"]]:
        """Weights and indices of each token's experts, computed in float32; of the context it uses the masks."""
        scaled = self.spec.router.scaled
        if scaled:
            x = F.rms_norm(x, x.shape[-1:], eps=self.eps) * self.scale.to(x.dtype) * x.shape[-1] ** -0.5
        scores: Tensor = self(x).float()
        if context is not None and context.experts:
            scores = mask_scores(scores, context.layer, context.experts)
        weights, chosen = route(
            scores,
            self.spec.router,
            self.spec.num_experts_per_tok,
            normalized=self.spec.norm_topk_prob,
            choice_bias=self.e_score_correction_bias,
        )
        if context is not None and context.experts:
            weights = multiply_weights(weights, chosen, context.layer, context.experts)
        return weights * self.per_expert_scale.float()[chosen] if scaled else weights, chosen


class MixtureOfExperts(nn.Module):
    """Top-k routed experts without token drop.

    Source: Shazeer et al. 2017, arXiv:1701.06538; the drop-free form is that of MegaBlocks, arXiv:2211.15841.
    """

    def __init__(self, spec: FeedForwardSpec, width: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.spec = spec
        self.gate = Router(spec, width, eps=eps)
        self.experts = nn.ModuleList(FeedForward(spec, width) for _ in range(spec.num_experts))
        self.shared_expert: FeedForward | None = None
        if spec.shared_intermediate_size:
            dense = FeedForwardSpec(spec.shared_intermediate_size, spec.activation, spec.gated)
            self.shared_expert = FeedForward(dense, width)
            if spec.shared_gate:
                self.shared_expert_gate = Linear(width, 1)

    def forward(
        self,
        x: Float[Tensor, "batch seq width"],
        context: LayerContext | None = None,
        *,
        routed_by: Float[Tensor, "batch seq width"] | None = None,
    ) -> Float[Tensor, "batch seq width"]:
        """Route each token to its experts and add up their weighted outputs in float32; experts have no adapters.

        Args:
            x: inputs of the experts.
            context: masks of experts; None for none.
            routed_by: inputs of the router; None for ``x``.
        """
        routed = self._routed(x, x if routed_by is None else routed_by, context)
        if self.shared_expert is None:
            return routed
        shared: Tensor = self.shared_expert(x)
        if self.spec.shared_gate:
            shared = shared * self.shared_expert_gate(x).sigmoid()
        return routed + shared

    def _routed(self, x: Tensor, routed_by: Tensor, context: LayerContext | None) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate.choose(routed_by.reshape(-1, x.shape[-1]), context)
        order = chosen.flatten().argsort(stable=True)
        rows = order // self.spec.num_experts_per_tok
        counts = chosen.flatten().bincount(minlength=self.spec.num_experts).tolist()
        outputs = torch.cat(
            [expert(part) for expert, part in zip(self.experts, tokens[rows].split(counts), strict=True) if len(part)]
        )
        weighted = outputs.float() * weights.flatten()[order, None]
        return torch.zeros_like(tokens, dtype=torch.float32).index_add_(0, rows, weighted).to(x.dtype).view_as(x)


class ExpertBranch(nn.Module):
    """Experts beside a dense feed-forward layer, both with norms of their own (Gemma 4).

    Args:
        spec: the experts.
        width: hidden size of the decoder.
        eps: epsilon of the norms.
    """

    def __init__(self, spec: FeedForwardSpec, width: int, *, eps: float) -> None:
        super().__init__()
        self.mlp = MixtureOfExperts(spec, width, eps=eps)
        self.input_norm, self.output_norm, self.dense_norm = (RMSNorm(width, eps=eps) for _ in range(3))

    def forward(
        self,
        x: Float[Tensor, "batch seq width"],
        dense: Float[Tensor, "batch seq width"],
        context: LayerContext | None = None,
    ) -> Float[Tensor, "batch seq width"]:
        """The normalized outputs of both.

        Args:
            x: hidden states before any norm.
            dense: output of the dense layer.
            context: masks of experts; None for none.
        """
        y: Tensor = self.dense_norm(dense) + self.output_norm(self.mlp(self.input_norm(x), context, routed_by=x))
        return y
