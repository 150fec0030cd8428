"""Several streams of hidden states of which each layer computes one (AltUp), and a low-rank residual path (LAuReL).

Notable here:
- before a layer all streams are predicted as mixtures of each other; the layer transforms the first; then all are
  corrected by the difference between what the layer gave and what was predicted
- the mixtures depend on the token: their coefficients are linear in a small router's outputs
- streams are a dimension before the last, (batch, tokens, streams, width), so that tokens stay where they are
- routers and coefficients are tiny, and stay as they are where matrices are packed, quantized or adapted

Source: AltUp, Baykal et al. 2023, arXiv:2301.13310, algorithm 1; LAuReL, Menghani et al. 2024, arXiv:2411.07501; as in
Gemma 3n, Google 2025.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pippin.nn.linear import Linear
from pippin.nn.lora import AdapterSlices
from pippin.nn.norm import RMSNorm

_SMALLEST = 1e-5
"""Bound of a stream's mean square."""


class Streams(nn.Module):
    """Makes the streams of embeddings: the first are the embeddings, others projections of them with the same norm.

    Args:
        count: number of streams.
        width: size of the hidden states.
    """

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.projections = nn.ModuleList(Linear(width, width) for _ in range(count - 1))

    def forward(self, x: Float[Tensor, "batch new width"]) -> Float[Tensor, "batch new streams width"]:
        """The streams before the first layer."""
        return torch.stack([x, *(_with_norm_of(x, project(x)) for project in self.projections)], -2)


class MergingNorm(nn.Module):
    """The last norm of a decoder with streams, of their mean: the first as it is, others projected to its norm.

    Args:
        count: number of streams.
        width: size of the hidden states.
        eps: epsilon of the norm.
    """

    def __init__(self, count: int, width: int, *, eps: float) -> None:
        super().__init__()
        self.projections = nn.ModuleList(Linear(width, width) for _ in range(count - 1))
        self.norm = RMSNorm(width, eps=eps)

    def merged(self, x: Float[Tensor, "batch new streams width"]) -> Float[Tensor, "batch new width"]:
        """The mean of the streams."""
        first, *others = x.unbind(-2)
        found = [_with_norm_of(first, project(one)) for project, one in zip(self.projections, others, strict=True)]
        return torch.stack([first, *found]).mean(0)

    def forward(self, x: Float[Tensor, "batch new streams width"]) -> Float[Tensor, "batch new width"]:
        """The normalized mean of the streams."""
        normalized: Tensor = self.norm(self.merged(x))
        return normalized


def _with_norm_of(x: Tensor, y: Tensor) -> Tensor:
    """``y`` with the root mean square of ``x``, over the last dimension."""
    target = x.square().mean(-1, keepdim=True).sqrt()
    return y * target / y.square().mean(-1, keepdim=True).clamp(min=_SMALLEST).sqrt()


class AlternatingUpdates(nn.Module):
    """One layer's prediction and correction of the streams.

    Args:
        count: number of streams.
        width: size of the hidden states.
        eps: epsilon of the router's norm.
    """

    def __init__(self, count: int, width: int, *, eps: float) -> None:
        super().__init__()
        self.router_norm = RMSNorm(width, eps=eps)
        self.router = nn.Linear(width, count, bias=False)
        self.prediction = nn.Linear(count, count * count, bias=False)
        self.correction = nn.Linear(count, count, bias=False)
        self.output_scale = nn.Parameter(torch.ones(width))

    def predict(self, streams: Float[Tensor, "batch new streams width"]) -> Float[Tensor, "batch new streams width"]:
        """What the streams will be after the layer, before it is computed."""
        count = streams.shape[-2]
        mixtures = self.prediction(self._modalities(streams[..., 0, :])).unflatten(-1, (count, count))
        predicted: Tensor = streams + mixtures @ streams
        return predicted

    def correct(
        self, predicted: Float[Tensor, "batch new streams width"], computed: Float[Tensor, "batch new width"]
    ) -> Float[Tensor, "batch new streams width"]:
        """The streams after the layer.

        Args:
            predicted: the result of `predict`.
            computed: the first stream, as the layer transformed the prediction of it.
        """
        innovation = (computed - predicted[..., 0, :])[..., None, :]
        coefficients = self.correction(self._modalities(computed))[..., None] + 1.0
        corrected: Tensor = predicted + coefficients * innovation
        return corrected

    def _modalities(self, x: Float[Tensor, "batch new width"]) -> Float[Tensor, "batch new streams"]:
        routed: Tensor = self.router(self.router_norm(x) * x.shape[-1] ** -1.0)
        return torch.tanh(routed.float()).to(x.dtype)


class LowRankResidual(nn.Module):
    """The input of a layer plus a normalized low-rank map of it (LAuReL-LR).

    Args:
        width: size of the hidden states.
        rank: inner size.
        eps: epsilon of the norm.
    """

    def __init__(self, width: int, rank: int, *, eps: float) -> None:
        super().__init__()
        self.left, self.right, self.norm = Linear(width, rank), Linear(rank, width), RMSNorm(width, eps=eps)

    def forward(
        self, x: Float[Tensor, "batch new width"], adapters: AdapterSlices | None = None
    ) -> Float[Tensor, "batch new width"]:
        """The residual path of the normalized input ``x`` of a layer."""
        mapped: Tensor = self.norm(self.right(self.left(x, adapters), adapters))
        return x + mapped
