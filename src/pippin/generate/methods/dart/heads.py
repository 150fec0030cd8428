r"""Parts of DART: a KV cache with block-causal attention, and a flow-matching head for single patches.

Notable here:
- blocks of tokens attend to themselves and to all blocks before them, by one cache in training and in sampling
- the head samples from the distribution of a patch, where its mean would be blurred
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument
from pippin.nn.images.adaptive_norm import BidirectionalCache
from pippin.nn.images.time_embedding import TimedHead, TimeEmbedding
from pippin.nn.kv_cache import New, VisibleKeyValues
from pippin.nn.linear import Linear


class BlockCache:
    """KV cache of a sequence of blocks; complete blocks are appended, one or more at a time.

    Args:
        layers: number of layers.
        blocks: block index of each position, not decreasing; all blocks attend to block 0.
        only_own: whether a block attends only to itself and block 0, rather than to all before it.
        prefix_mask: false where one of the first positions is padding, for each sample; None without padding.

    Raises:
        InvalidArgument: on `append`, more tokens than positions.
    """

    def __init__(
        self,
        layers: int,
        blocks: Int[Tensor, positions],
        *,
        only_own: bool = False,
        prefix_mask: Bool[Tensor, "n first"] | None = None,
    ) -> None:
        self.blocks, self.only_own, self.prefix_mask = blocks, only_own, prefix_mask
        self.positions: None = None
        self._length = 0
        self._cached: list[tuple[Tensor, Tensor] | None] = [None] * layers
        self._mask: tuple[int, int, Tensor | None] | None = None

    @property
    def length(self) -> int:
        """Number of cached tokens."""
        return self._length

    def append(self, layer: int, k: New, v: New, window: int | None) -> VisibleKeyValues:
        """Append new keys and values to the cached ones; returns those that the new tokens attend to."""
        start, new, capacity = self._length, k.shape[2], len(self.blocks)
        if start + new > capacity:
            raise InvalidArgument(f"a sequence of {capacity} positions holds {start} tokens and was given {new} more")
        keys, values = k, v
        if new < capacity:  # a complete sequence in one pass needs no cache
            cached = self._cached[layer]
            if cached is None:
                cached = self._cached[layer] = tuple(x.new_empty(*x.shape[:2], capacity, x.shape[3]) for x in (k, v))  # type: ignore[assignment]
            assert cached is not None
            for buffer, x in zip(cached, (k, v), strict=True):
                buffer[:, :, start : start + new] = x
            keys, values = (x[:, :, : start + new] for x in cached)
        mask = self.mask(start, new)
        return BidirectionalCache().append(layer, keys, values, window) if mask is None else (keys, values, mask)

    def advance(self, new: int) -> None:
        """Commit the new tokens."""
        self._length += new

    def mask(self, start: int, new: int) -> Bool[Tensor, "#n 1 new seen"] | None:
        """The attention mask of the new tokens; None if they attend to all positions."""
        if self._mask is None or self._mask[:2] != (start, new):
            queries, keys = self.blocks[start : start + new, None], self.blocks[None, : start + new]
            visible = (keys == queries) | (keys == 0) if self.only_own else keys <= queries  # (new, start + new)
            visible = visible[None, None]
            if self.prefix_mask is not None:
                mask = F.pad(self.prefix_mask, (0, start + new - self.prefix_mask.shape[1]), value=True)
                visible = visible & mask[:, None, None]  # (n, 1, new, start + new)
            self._mask = (start, new, None if bool(visible.all()) else visible)
        return self._mask[2]


class FlowHead(nn.Module):
    r"""Flow-matching head: the velocity $u(z_\tau, \tau, h)$ from a token ($\tau = 0$) to noise ($\tau = 1$).

    Args:
        inner: number of elements of a token.
        width: dimension of the transformer's hidden state h and of the head's layers.
        layers: number of residual layers of two matrices each.

    Source: Gu et al. 2025, arXiv:2410.08159, section 3.3; the layers are those of Li et al. 2024, arXiv:2406.11838.
    """

    def __init__(self, inner: int, width: int, layers: int) -> None:
        super().__init__()
        self.read = Linear(inner, width, bias=True)
        self.state = Linear(width, width, bias=True)
        self.time = TimeEmbedding(width)
        self.adapt = nn.ModuleList(Linear(width, 3 * width, bias=True) for _ in range(layers))
        self.up = nn.ModuleList(Linear(width, width, bias=True) for _ in range(layers))
        self.down = nn.ModuleList(Linear(width, width, bias=True) for _ in range(layers))
        self.out = TimedHead(width, inner)

    def forward(
        self, z: Float[Tensor, "*batch inner"], tau: Float[Tensor, "*batch"], state: Float[Tensor, "*batch width"]
    ) -> Float[Tensor, "*batch inner"]:
        """The velocity of each token, float32."""
        vector = self.state(state) + self.time(tau)
        x = self.read(z)
        for adapt, up, down in zip(self.adapt, self.up, self.down, strict=True):
            shift, scale, gate = adapt(F.silu(vector)).chunk(3, -1)
            y = torch.addcmul(shift, F.layer_norm(x, x.shape[-1:]), 1 + scale)
            x = x + gate * down(F.silu(up(y)))
        out: Tensor = self.out(x[..., None, :], vector)[..., 0, :]  # the head reads (..., tokens, width)
        return out

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> FlowHead:
        """Set random weights; modulation and velocity are zero at first."""
        for layer in [self.read, self.state, *self.up, *self.down, *self.adapt]:
            assert isinstance(layer, Linear)
            assert layer.bias is not None
            layer.weight.normal_(0.0, layer.inputs**-0.5, generator=generator)
            layer.bias.zero_()
        for layer in self.adapt:
            for parameter in layer.parameters():
                parameter.zero_()
        self.time.initialize(generator)
        self.out.initialize()
        return self
