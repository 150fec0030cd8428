"""One linear layer for every weight format.

Notable here:
- a `Linear` holds its weight as an ordinary parameter until `pack()` replaces it by a format that is quick to read
- on a CPU the packed form is that of the native kernels; without them it is oneDNN's blocked layout, which still more
  than doubles the speed of a matrix-vector product, because the plain BLAS routine leaves most of the bandwidth unused
- where torch does the work, several layers that read the same input become one (`Linear.fused`), so that a decode step
  makes fewer, larger calls; the native kernels need no such thing
- a packed weight is frozen, but gradients pass through it to its input (and its bias), so that what lies before it or
  beside it can be trained: an adapter over a quantised model needs no dense copy of that model
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pippin.nn.lora import Shares, adapt
from pippin.nn.packed import NativeWeight
from pippin.nn.product import product


@runtime_checkable
class PackedWeight(Protocol):
    """A weight in a format of its own: what a kernel provides to be used by `Linear`."""

    @property
    def nbytes(self) -> int:
        """Bytes that a product with one vector reads."""

    def matmul(self, x: Float[Tensor, "*batch inputs"], bias: Tensor | None) -> Float[Tensor, "*batch outputs"]:
        """Return ``x @ weight.T + bias``; without gradients."""

    def matmul_transposed(self, y: Float[Tensor, "*batch outputs"]) -> Float[Tensor, "*batch inputs"]:
        """Return ``y @ weight``: what the gradient of the outputs is for the inputs."""

    def dense(self) -> Float[Tensor, "outputs inputs"]:
        """Return the weight as an ordinary matrix."""


class _Product(torch.autograd.Function):
    """``x @ weight.T + bias`` for a packed weight, with gradients for ``x`` and ``bias``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, weight: PackedWeight) -> Tensor:
        ctx.weight = weight
        return weight.matmul(x, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, change: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        weight: PackedWeight = ctx.weight
        of_x = weight.matmul_transposed(change) if ctx.needs_input_grad[0] else None
        of_bias = change.sum(0) if ctx.needs_input_grad[1] else None
        return of_x, of_bias, None


def _trained_through(weight: PackedWeight, x: Tensor, bias: Tensor | None) -> Tensor:
    """The product with gradients; under autocast in its precision, as torch's own products are."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    y: Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), bias, weight)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], y.shape[-1])


class Linear(nn.Module):
    """``y = x W^T + b`` with a weight that may be packed for inference.

    Args:
        inputs: width of the input.
        outputs: width of the output.
        bias: whether a bias is added.
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False) -> None:
        super().__init__()
        self.inputs = inputs
        self.outputs = outputs
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        self.packed: PackedWeight | None = None

    @classmethod
    def fused(cls, layers: Sequence[Linear]) -> Linear:
        """One layer whose output is the concatenation of the outputs of ``layers``, which must share their input."""
        first = layers[0]
        fused = cls.__new__(cls)
        nn.Module.__init__(fused)
        fused.inputs, fused.outputs, fused.packed = first.inputs, sum(layer.outputs for layer in layers), None
        weights: list[Tensor] = [layer.dense_weight() for layer in layers]
        fused.weight = nn.Parameter(torch.cat(weights), requires_grad=False)
        biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
        fused.bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
        return fused

    def forward(
        self, x: Float[Tensor, "*batch inputs"], adapters: Shares | None = None
    ) -> Float[Tensor, "*batch outputs"]:
        """Apply the layer to the last dimension, and the adapters to their tokens."""
        packed, bias = self.packed, self.bias
        if packed is None:
            y = product(x, self.weight, bias)  # type: ignore[arg-type]
        elif x.requires_grad or (bias is not None and bias.requires_grad):
            y = _trained_through(packed, x, bias)
        else:
            y = packed.matmul(x, bias)
        return y if adapters is None else adapt(self, x, y, adapters)

    def dense_weight(self) -> Tensor:
        """The weight as a matrix, unpacked if need be."""
        if self.packed is not None:
            return self.packed.dense()
        assert self.weight is not None
        return self.weight.data

    @property
    def fusible(self) -> bool:
        """Whether it pays to make this layer and its neighbours one before they are packed."""
        return self.packed is None and not NativeWeight.supports(self.weight)

    def pack(self) -> Linear:
        """Replace the weight by its packed form, if this device and precision have one. It can no longer be trained."""
        if self.packed is None and self.weight is not None:
            if NativeWeight.supports(self.weight):
                self.packed = NativeWeight.from_dense(self.weight)
            elif OneDNNWeight.supports(self.weight):
                self.packed = OneDNNWeight(self.weight.data)
            self.weight = self.weight if self.packed is None else None
        return self


class OneDNNWeight:
    """A dense fp32 or bf16 matrix in oneDNN's blocked layout (CPU only)."""

    # oneDNN picks a layout for a number of rows; this one is within a few per cent of the best from 1 row to 512.
    ROWS = 128

    def __init__(self, weight: Float[Tensor, "outputs inputs"]) -> None:
        self.blocks = torch.ops.mkldnn._reorder_linear_weight(weight, self.ROWS)
        self.nbytes = weight.nbytes

    @staticmethod
    def supports(weight: Tensor) -> bool:
        """Whether the layout exists for this weight."""
        if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return False
        if weight.dtype == torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        return weight.dtype == torch.float32

    def matmul(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``x @ weight.T + bias``; without gradients."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.blocks, bias, "none", [], "")
        return y

    def matmul_transposed(self, y: Tensor) -> Tensor:
        """Return ``y @ weight``; oneDNN has no rows to give, so the weight is unpacked as a whole for the moment."""
        return y @ self.dense().to(y.dtype)

    def dense(self) -> Tensor:
        """Return the weight as an ordinary matrix."""
        weight: Tensor = self.blocks.to_dense()
        return weight
