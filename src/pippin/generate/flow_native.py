"""Reading a sequence with a flow block in one call of the native kernels for each pass, or for a whole inverse.

Notable here:
- plain blocks in float32 on a CPU alone: places learnt, a first token that is passed on; torch reads with all others
- keys and values lie as the kernels want them, in memory taken beforehand, so a pass may be repeated or wound back
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from pippin.core import native
from pippin.nn.adaptive import AdaptiveBlock
from pippin.nn.feedforward import FeedForward
from pippin.nn.linear import Linear
from pippin.nn.packed import NativeWeight

if TYPE_CHECKING:
    from pippin.generate.flow_block import FlowBlock

_LANES = 16  # of the kernels


def supports(block: FlowBlock) -> bool:
    """Whether the kernels can read with this block."""
    spec = block.spec
    plain = spec.start == "zero" and spec.positions == "learned" and not spec.text
    if not plain or spec.width % (_LANES * spec.heads) or native.library() is None:
        return False
    return all(p.device.type == "cpu" and p.dtype == torch.float32 for p in block.parameters())


class NativeBlock:
    """The weights of a block as the kernels read them.

    Args:
        block: one that `supports` says yes to; later changes of it are not followed.
    """

    def __init__(self, block: FlowBlock) -> None:
        self._kept: list[Any] = []  # what the addresses lead to
        layers = [self._layer(layer) for layer in block.layers if isinstance(layer, AdaptiveBlock)]
        first = block.layers[0]
        assert isinstance(first, AdaptiveBlock)
        spec, self._array = block.spec, (native.FlowLayer * len(layers))(*layers)
        (inputs, in_bias), (outputs, out_bias) = self._weight(block.proj_in), self._weight(block.proj_out)
        self.inner = block.inner
        self.shape = (spec.layers, 2 * spec.width)
        self.flow = native.Flow(
            *(spec.layers, spec.width, spec.heads, block.inner, layers[0].up.rows, first.attention_norm.eps, 0),
            *(inputs, outputs, in_bias, out_bias, self._array),
        )

    def _layer(self, layer: AdaptiveBlock) -> native.FlowLayer:
        attention, feed = layer.attention, layer.feed_forward
        assert isinstance(feed, FeedForward)
        assert feed.up_proj is not None
        read = Linear.fused([attention.q_proj, attention.k_proj, attention.v_proj])
        pairs = [self._weight(linear) for linear in (read, attention.o_proj, feed.up_proj, feed.down_proj)]
        norms = [self._address(p) for norm in (layer.attention_norm, layer.feed_norm) for p in (norm.weight, norm.bias)]
        return native.FlowLayer(*(matrix for matrix, _ in pairs), *(bias for _, bias in pairs), *norms)

    def _weight(self, linear: Linear) -> tuple[native.Matrix, int]:
        weight = NativeWeight.from_dense(linear.dense_weight())
        self._kept.append(weight)
        assert linear.bias is not None
        return weight.matrix, self._address(linear.bias)

    def _address(self, x: Tensor) -> int:
        """Of a copy, as all weights are copied."""
        self._kept.append(x.detach().clone(memory_format=torch.contiguous_format))
        address: int = self._kept[-1].data_ptr()
        return address


class NativeReading:
    """What a block has read of a batch.

    Args:
        block: whose weights.
        added: what is added to each input.
        samples: of the batch; ``added`` has as many rows, or twice as many for two branches.
        heat: factors of the attention scores of each row; None for none.
    """

    def __init__(
        self, block: NativeBlock, added: Float[Tensor, "rows inputs width"], samples: int, heat: Tensor | None
    ) -> None:
        library = native.library()
        assert library is not None
        self._library, self._block = library, block
        self._added = added.contiguous()
        self._heat = None if heat is None else heat.flatten().contiguous()
        (layers, both), (rows, inputs) = block.shape, added.shape[:2]
        capacity = -(-inputs // _LANES) * _LANES
        self._cache = torch.zeros(layers, rows, both, capacity)
        heats = None if self._heat is None else self._heat.data_ptr()
        addresses = (self._added.data_ptr(), heats, self._cache.data_ptr())
        self._rows = rows
        self._batch = native.FlowBatch(samples, rows // samples, inputs + 1, capacity, *addresses)

    def fits(self, x: Tensor) -> bool:
        """Whether these are tokens of this batch, on a CPU."""
        samples, tokens, inner = x.shape
        same = samples == self._batch.samples and tokens <= self._batch.tokens and inner == self._block.inner
        return same and x.device.type == "cpu"

    def read(self, x: Float[Tensor, "samples tokens inner"], first: int, stop: int) -> Float[Tensor, "rows new told"]:
        """Read tokens ``first`` to ``stop`` of ``x`` and tell what follows each."""
        if x.shape[1] < self._batch.tokens:  # the kernels count on all
            x = F.pad(x, (0, 0, 0, self._batch.tokens - x.shape[1]))
        told = torch.empty(self._rows, stop - first, 2 * self._block.inner)
        x = _plain(x)
        self._library.flow_read(self._block.flow, self._batch, x.data_ptr(), first, stop - first, told.data_ptr())
        return told

    def invert(
        self,
        x: Float[Tensor, "samples tokens inner"],
        z: Float[Tensor, "samples tokens inner"],
        weights: Float[Tensor, "tokens 1"] | None,
        first: int,
    ) -> None:
        """Compute tokens of ``x`` from ``first`` on, in place.

        Args:
            x: known before ``first``.
            z: the noise.
            weights: w of each token, for two branches.
            first: at least 1.
        """
        z = _plain(z)
        address = None if weights is None else weights.data_ptr()
        target = _plain(x)
        self._library.flow_invert(
            *(self._block.flow, self._batch, target.data_ptr(), z.data_ptr(), address, first, x.shape[1])
        )
        if target is not x:
            x.copy_(target)


def _plain(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float32 and x.is_contiguous() else x.float().contiguous()
