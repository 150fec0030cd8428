"""A linear layer that supports low-rank adapters for some of its tokens.

`pippin.nn.packed_layers.PackedLinear` replaces it for inference.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pippin.nn.lora import AdapterSlices, apply_adapters
from pippin.nn.matmul import product


class Linear(nn.Module):
    """``y = x W^T + b``.

    Args:
        inputs: size of the input.
        outputs: size of the output.
        bias: whether there is a bias.
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.inputs = inputs
        self.outputs = outputs
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(
        self, x: Float[Tensor, "*batch inputs"], adapters: AdapterSlices | None = None
    ) -> Float[Tensor, "*batch outputs"]:
        """Apply the layer to the last dimension, and the adapters to their tokens."""
        y = product(x, self.weight, self.bias)
        return y if adapters is None else apply_adapters(self, x, y, adapters)

    def dense_weight(self) -> Tensor:
        """The weight as a matrix; a packed weight is unpacked."""
        return self.weight.data
