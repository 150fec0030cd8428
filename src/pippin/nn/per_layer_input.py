"""Inputs of each layer of a decoder beside the hidden states: small embeddings of the token, one for each layer.

Notable here:
- the table is large and needs no computing: a token reads one row of it for all layers
- a layer gates its input by the hidden states and adds its projection to them

Source: Gemma 3n and Gemma 4 (per-layer embeddings), Google 2025 and 2026.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.nn.embedding import TokenEmbedding
from pippin.nn.feedforward.feedforward import Activation, activate
from pippin.nn.linear import Linear
from pippin.nn.lora import AdapterSlices
from pippin.nn.norm import RMSNorm


class PerLayerEmbedding(nn.Module):
    """The inputs of all layers: the embeddings of a token, and projections of its embedding in the decoder.

    Args:
        rows: number of ids that have embeddings here; others have that of id 0.
        layers: number of layers.
        width: size of a layer's input.
        hidden_size: hidden size of the decoder.
        eps: epsilon of the norm.
    """

    def __init__(self, rows: int, layers: int, width: int, hidden_size: int, *, eps: float) -> None:
        super().__init__()
        self.rows, self.width = rows, width
        self.embed = TokenEmbedding(rows, layers * width)
        self.proj = Linear(hidden_size, layers * width)
        self.norm = RMSNorm(width, eps=eps)

    def forward(
        self, ids: Int[Tensor, "batch new"], x: Float[Tensor, "batch new hidden"]
    ) -> Float[Tensor, "layers batch new width"]:
        """The inputs of the layers.

        Args:
            ids: token ids.
            x: their scaled embeddings, before the first layer.
        """
        ids = ids.where(ids < self.rows, 0)  # special tokens may have no row
        own = self.embed(ids) * torch.tensor(math.sqrt(self.width), dtype=x.dtype)
        projected = self.norm((self.proj(x) * x.shape[-1] ** -0.5).unflatten(-1, (-1, self.width)))
        both = (projected + own.unflatten(-1, (-1, self.width))) * 2**-0.5
        inputs: Tensor = both.movedim(2, 0)
        return inputs


class PerLayerInput(nn.Module):
    """One layer's use of its input.

    Args:
        width: size of the input.
        hidden_size: hidden size of the decoder.
        activation: nonlinearity of the gate.
        eps: epsilon of the norm.
    """

    def __init__(self, width: int, hidden_size: int, activation: Activation, *, eps: float) -> None:
        super().__init__()
        self.activation: Activation = activation
        self.gate = Linear(hidden_size, width)
        self.proj = Linear(width, hidden_size)
        self.norm = RMSNorm(hidden_size, eps=eps)

    def forward(
        self,
        x: Float[Tensor, "batch new hidden"],
        given: Float[Tensor, "batch new width"],
        adapters: AdapterSlices | None = None,
    ) -> Float[Tensor, "batch new hidden"]:
        """What is added to the hidden states ``x`` for the input ``given``."""
        y: Tensor = self.norm(self.proj(activate(self.gate(x, adapters), self.activation) * given, adapters))
        return y
