"""Sequential decoding with a flow block by native kernels: one call for each pass, or for a complete inverse.

Notable here:
- for blocks in float32 on a CPU with learned positions and an unchanged first token; all others decode with torch
- the KV cache is preallocated in the kernels' layout, so a pass may be repeated or truncated
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from pippin.core import native
from pippin.nn.feedforward.feedforward import FeedForward
from pippin.nn.images.adaptive_norm import AdaptiveBlock
from pippin.nn.linear import Linear
from pippin.nn.packed_layers import fuse
from pippin.nn.quantization.packed import NativeWeight

if TYPE_CHECKING:
    from pippin.generate.flows.block import FlowBlock

_LANES = 16  # the kernels' vector width


def supports(block: FlowBlock) -> bool:
    """Whether the kernels can decode with this block."""
    spec = block.spec
    supported = spec.start == "zero" and spec.position_embedding == "learned" and not spec.text
    if not supported or spec.hidden_size % (_LANES * spec.num_attention_heads) or native.library() is None:
        return False
    return all(p.device.type == "cpu" and p.dtype == torch.float32 for p in block.parameters())


class NativeBlock:
    """The weights of a block in the kernels' layout.

    Args:
        block: a block that `supports` accepts; later changes of its weights have no effect.
    """

    def __init__(self, block: FlowBlock) -> None:
        self._owners: list[Any] = []  # keeps the memory behind the addresses alive
        layers = [self._layer(layer) for layer in block.layers if isinstance(layer, AdaptiveBlock)]
        first = block.layers[0]
        assert isinstance(first, AdaptiveBlock)
        spec, self._array = block.spec, (native.FlowLayer * len(layers))(*layers)
        (inputs, in_bias), (outputs, out_bias) = self._weight(block.proj_in), self._weight(block.proj_out)
        self.inner = block.inner
        self.shape = (spec.num_hidden_layers, 2 * spec.hidden_size)
        self.flow = native.Flow(
            *(
                spec.num_hidden_layers,
                spec.hidden_size,
                spec.num_attention_heads,
                block.inner,
                layers[0].up.rows,
                first.attention_norm.eps,
                0,
            ),
            *(inputs, outputs, in_bias, out_bias, self._array),
        )

    def _layer(self, layer: AdaptiveBlock) -> native.FlowLayer:
        """Weights, biases and norms of a layer, in the order of the kernels' struct."""
        attention, feed_forward = layer.attention, layer.feed_forward
        assert isinstance(feed_forward, FeedForward)
        assert feed_forward.up_proj is not None
        assert attention.v_proj is not None
        assert attention.v_proj is not None
        qkv = fuse([attention.q_proj, attention.k_proj, attention.v_proj])
        linears = (qkv, attention.o_proj, feed_forward.up_proj, feed_forward.down_proj)
        weights = [self._weight(linear) for linear in linears]
        norms = [self._address(p) for norm in (layer.attention_norm, layer.feed_norm) for p in (norm.weight, norm.bias)]
        return native.FlowLayer(*(matrix for matrix, _ in weights), *(bias for _, bias in weights), *norms)

    def _weight(self, linear: Linear) -> tuple[native.NativeMatrix, int]:
        """The packed weight of a layer, and the address of its bias."""
        weight = NativeWeight.from_dense(linear.dense_weight())
        self._owners.append(weight)
        assert linear.bias is not None
        return weight.matrix, self._address(linear.bias)

    def _address(self, x: Tensor) -> int:
        """Address of a contiguous copy of x, which is kept alive."""
        self._owners.append(x.detach().clone(memory_format=torch.contiguous_format))
        address: int = self._owners[-1].data_ptr()
        return address


class NativeDecoding:
    """The state of decoding a batch with native kernels.

    Args:
        block: the weights.
        added: sum of position embedding and condition, which is added to each input.
        samples: number of samples; ``added`` has as many rows, or twice as many with guidance.
        score_scale: factor on the attention scores of each row; None for 1.
    """

    def __init__(
        self, block: NativeBlock, added: Float[Tensor, "rows inputs width"], samples: int, score_scale: Tensor | None
    ) -> None:
        library = native.library()
        assert library is not None
        self._library, self._block = library, block
        self._added = added.contiguous()
        self._score_scale = None if score_scale is None else score_scale.flatten().contiguous()
        (layers, kv_size), (rows, inputs) = block.shape, added.shape[:2]
        capacity = -(-inputs // _LANES) * _LANES  # rounded up to full vectors
        self._cache = torch.zeros(layers, rows, kv_size, capacity)  # positions last, as the kernels read them
        scales = None if self._score_scale is None else self._score_scale.data_ptr()
        addresses = (self._added.data_ptr(), scales, self._cache.data_ptr())
        self._rows = rows
        self._batch = native.FlowBatch(samples, rows // samples, inputs + 1, capacity, *addresses)

    def fits(self, x: Tensor) -> bool:
        """Whether x is on a CPU and has this batch's number of samples and dimension of a token."""
        samples, tokens, inner = x.shape
        same = samples == self._batch.samples and tokens <= self._batch.tokens and inner == self._block.inner
        return same and x.device.type == "cpu"

    def forward(
        self, x: Float[Tensor, "samples tokens inner"], first: int, stop: int
    ) -> Float[Tensor, "rows new outputs"]:
        """Append tokens ``first`` to ``stop - 1`` of ``x`` to the cache; return the outputs after each of them."""
        if x.shape[1] < self._batch.tokens:  # the kernels expect the full length
            x = F.pad(x, (0, 0, 0, self._batch.tokens - x.shape[1]))
        output = torch.empty(self._rows, stop - first, 2 * self._block.inner)
        x = _contiguous_float(x)
        self._library.flow_read(self._block.flow, self._batch, x.data_ptr(), first, stop - first, output.data_ptr())
        return output

    def invert(
        self,
        x: Float[Tensor, "samples tokens inner"],
        z: Float[Tensor, "samples tokens inner"],
        weights: Float[Tensor, "tokens 1"] | None,
        first: int,
    ) -> None:
        """Compute tokens of ``x`` from ``first`` on, in place.

        Args:
            x: the sequence, whose tokens before ``first`` are known.
            z: the noise.
            weights: guidance weight w of each token; None without guidance.
            first: first token to compute, at least 1.
        """
        z = _contiguous_float(z)
        address = None if weights is None else weights.data_ptr()
        target = _contiguous_float(x)
        self._library.flow_invert(
            *(self._block.flow, self._batch, target.data_ptr(), z.data_ptr(), address, first, x.shape[1])
        )
        if target is not x:
            x.copy_(target)


def _contiguous_float(x: Tensor) -> Tensor:
    """x itself, if it is contiguous float32, or else a copy that is."""
    return x if x.dtype == torch.float32 and x.is_contiguous() else x.float().contiguous()
