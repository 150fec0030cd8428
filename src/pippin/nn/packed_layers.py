"""Packing: replace trainable modules by modules with weights in a layout for fast inference.

Notable here:
- `pack` replaces each `Linear` by a `PackedLinear` and an embedding by a `PackedTokenEmbedding`; the trainable modules
  do not depend on packing
- on a CPU the packed format is that of the native kernels; without them it is oneDNN's blocked layout, which more than
  doubles the speed of a matrix-vector product over the plain BLAS
- where torch multiplies, layers with the same input are fused (`fuse`), so that a decode step makes fewer, larger
  calls; the native kernels do not need this
- a packed weight is frozen, but gradients pass through it to its input and bias, so that adapters can be trained over a
  quantized model without a dense copy of it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pippin.core.errors import InvalidArgument
from pippin.nn.attention.attention import Attention
from pippin.nn.embedding import TokenEmbedding
from pippin.nn.feedforward.feedforward import FeedForward, MixtureOfExperts
from pippin.nn.linear import Linear
from pippin.nn.lora import AdapterSlices, apply_adapters
from pippin.nn.norm import RMSNorm
from pippin.nn.quantization.packed import NativeWeight, PackedEmbedding


@runtime_checkable
class PackedWeight(Protocol):
    """The interface of a packed weight, which `PackedLinear` uses."""

    @property
    def nbytes(self) -> int:
        """Bytes that a product with one vector reads."""

    def matmul(self, x: Float[Tensor, "*batch inputs"], bias: Tensor | None) -> Float[Tensor, "*batch outputs"]:
        """Return ``x @ weight.T + bias``; without gradients."""

    def matmul_transposed(self, y: Float[Tensor, "*batch outputs"]) -> Float[Tensor, "*batch inputs"]:
        """Return ``y @ weight``, which maps gradients of the outputs to gradients of the inputs."""

    def dense(self) -> Float[Tensor, "outputs inputs"]:
        """Return the unpacked weight as an ordinary matrix."""


class PackedLinear(Linear):
    """A linear layer whose weight is packed. Its parameter ``weight`` is None.

    Args:
        packed: the packed weight.
        inputs: size of the input.
        outputs: size of the output.
        bias: bias of the outputs; None for none.
    """

    weight: None  # type: ignore[assignment]

    def __init__(self, packed: PackedWeight, inputs: int, outputs: int, bias: nn.Parameter | None = None) -> None:
        nn.Module.__init__(self)
        self.inputs, self.outputs, self.packed = inputs, outputs, packed
        self.register_parameter("weight", None)
        self.bias = bias

    def forward(
        self, x: Float[Tensor, "*batch inputs"], adapters: AdapterSlices | None = None
    ) -> Float[Tensor, "*batch outputs"]:
        """Apply the layer to the last dimension, and the adapters to their tokens."""
        bias = self.bias
        if x.requires_grad or (bias is not None and bias.requires_grad):
            y = _trained_through(self.packed, x, bias)
        else:
            y = self.packed.matmul(x, bias)
        return y if adapters is None else apply_adapters(self, x, y, adapters)

    def dense_weight(self) -> Tensor:
        """The unpacked weight as an ordinary matrix."""
        return self.packed.dense()


class PackedTokenEmbedding(TokenEmbedding):
    """An embedding with a packed table, whose rows are unpacked on lookup. Its parameter ``weight`` is None.

    Args:
        packed: the table; in a model with tied embeddings it may be the output matrix itself.
        rows: number of ids.
        width: size of each vector.
    """

    weight: None  # type: ignore[assignment]

    def __init__(self, packed: PackedEmbedding, rows: int, width: int) -> None:
        nn.Module.__init__(self)
        self.rows, self.width, self.packed = rows, width, packed
        self.register_parameter("weight", None)

    @property
    def device(self) -> torch.device:
        """Device of the table."""
        return self.packed.device

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the vectors that `forward` returns."""
        return self.packed.dtype

    def forward(self, ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch width"]:
        """The vectors of these ids.

        Raises:
            InvalidArgument: an id out of range.
        """
        return self.packed.select(ids)

    def dense_weight(self) -> Float[Tensor, "rows width"]:
        """The unpacked table as an ordinary matrix."""
        return self.packed.dense()


def pack(module: nn.Module) -> nn.Module:
    """Pack the weights of a module and its submodules, where there is a packed format for their device and dtype.

    Linear layers, embeddings and norms are packed. Other parameters do not change, nor do routers of experts, which are
    small. The result can no longer be trained; packing it again changes nothing. Adapters must be attached after
    packing, as they refer to the layers themselves.

    Args:
        module: changed in place, unless it is a linear layer or an embedding itself.

    Returns:
        The module, or the replacement of a linear layer or an embedding.
    """
    if isinstance(module, Linear):
        return _pack_linear(module)
    if isinstance(module, TokenEmbedding):
        return _pack_embedding(module)
    if isinstance(module, RMSNorm):
        module.pack()
        return module
    if isinstance(module, Attention):
        own = ("q_proj", "k_proj", "v_proj") if module.spec.kv_source is None else ()
        _pack_together(module, own, "qkv_proj")
        _pack_children(module, "q_proj", "k_proj", "v_proj", "gate_proj", "o_proj")
    elif isinstance(module, FeedForward):
        _pack_together(module, ("gate_proj", "up_proj") if module.spec.gated else (), "gate_up_proj")
        _pack_children(module, "gate_proj", "up_proj", "down_proj")
    elif isinstance(module, MixtureOfExperts):
        pack(module.experts)
        _pack_children(module, "shared_expert")
    else:
        _pack_children(module, *(name for name, _ in module.named_children()))
    return module


def check_not_packed(module: nn.Module, name: str = "the model") -> None:
    """Check that a module has no packed weights, which can be neither trained nor saved.

    Raises:
        InvalidArgument: some are packed; ``name`` is the module's name in the message.
    """
    if any(isinstance(part, PackedLinear | PackedTokenEmbedding) for part in module.modules()):
        raise InvalidArgument(f"{name} is packed for inference; load it with pack=False")


def fuse(layers: Sequence[Linear]) -> Linear:
    """One layer whose output is the concatenation of the outputs of ``layers``, which must share their input."""
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    with torch.device("meta"):
        fused = Linear(layers[0].inputs, sum(layer.outputs for layer in layers))
    fused.weight = nn.Parameter(torch.cat([layer.dense_weight() for layer in layers]), requires_grad=False)
    fused.bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
    return fused


def replace_submodule(root: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the submodule with this name, such as "layers.0.mlp.up_proj"."""
    parent, _, leaf = name.rpartition(".")
    setattr(root.get_submodule(parent), leaf, module)


class OneDNNWeight:
    """A dense fp32 or bf16 matrix in oneDNN's blocked layout (CPU only)."""

    # oneDNN chooses a layout by the number of rows; this one is within a few percent of the best from 1 to 512 rows.
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
        """Return ``y @ weight``; oneDNN has no transposed product, so the weight is unpacked temporarily."""
        return y @ self.dense().to(y.dtype)

    def dense(self) -> Tensor:
        """Return the weight as an ordinary matrix."""
        weight: Tensor = self.blocks.to_dense()
        return weight


def _pack_linear(layer: Linear) -> Linear:
    if isinstance(layer, PackedLinear):
        return layer
    packed: PackedWeight
    if NativeWeight.supports(layer.weight):
        packed = NativeWeight.from_dense(layer.weight)
    elif OneDNNWeight.supports(layer.weight):
        packed = OneDNNWeight(layer.weight.data)
    else:
        return layer
    return PackedLinear(packed, layer.inputs, layer.outputs, layer.bias).train(layer.training)


def _pack_embedding(table: TokenEmbedding) -> TokenEmbedding:
    if isinstance(table, PackedTokenEmbedding) or not NativeWeight.supports(table.weight):
        return table
    return PackedTokenEmbedding(NativeWeight.from_dense(table.weight.data), table.rows, table.width)


def _pack_children(module: nn.Module, *names: str) -> None:
    for name in names:
        child = getattr(module, name, None)
        if child is not None:
            setattr(module, name, pack(child))


def _pack_together(module: nn.Module, names: Sequence[str], fused: str) -> None:
    """Fuse layers with the same input into one packed layer, where torch multiplies; their attributes become None."""
    layers: list[Linear | None] = [getattr(module, name) for name in names]
    if layers and all(_fusible(layer) for layer in layers):
        setattr(module, fused, _pack_linear(fuse([layer for layer in layers if layer is not None])))
        for name in names:
            setattr(module, name, None)


def _fusible(layer: Linear | None) -> bool:
    return layer is not None and not isinstance(layer, PackedLinear) and not NativeWeight.supports(layer.weight)


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
    """The product with gradients; under autocast in its dtype, like torch's own products."""
    device = x.device.type
    if torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    y: Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), bias, weight)  # type: ignore[no-untyped-call]
    return y.view(*x.shape[:-1], y.shape[-1])
