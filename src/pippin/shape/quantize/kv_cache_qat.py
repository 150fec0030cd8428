"""Quantization-aware training of an 8-bit KV cache, with observed ranges.

Notable here:
- implemented as a cache that wraps the cache of a forward pass, so objectives and layers need no changes
- one range for the keys and one for the values of each layer: a moving average of the largest magnitude per batch
- in evaluation the ranges are fixed, and values outside are clamped

The engine's 8-bit cache needs no ranges: it has a scale for each token and head and clamps nothing. The ranges are
stored for other runtimes; training with them assumes a cache that is slightly less precise than the engine's.

Source: arXiv:2507.13575, section on 2-bit quantization-aware training (8-bit cache).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.core.errors import NotPrepared
from pippin.nn.attention.attention import Attention
from pippin.nn.attention.latent_attention import LatentAttention
from pippin.nn.context import LayerContext
from pippin.nn.kv_cache import KVCache, New, VisibleKeyValues

MOMENTUM = 0.99
"""Momentum of the moving average of the ranges, per batch."""
_NAME = "cache_ranges"
_TOP = 127


@dataclass(frozen=True)
class Ranges:
    """The largest magnitudes of keys and values, by layer; None for a layer without keys of its own."""

    keys: tuple[float | None, ...]
    values: tuple[float | None, ...]

    def to_json(self) -> dict[str, Any]:
        """The entry of `config.json`."""
        return {"bits": 8, "keys": list(self.keys), "values": list(self.values)}


class CacheRanges(nn.Module):
    """The observed ranges of a decoder in training: buffers, which checkpoints include.

    Args:
        layers: number of layers.
    """

    largest: Float[Tensor, "2 layers"]

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(2, layers))
        self.layers: list[int] = []  # those with keys of their own

    def round(self, layer: int, kind: int, x: Float[Tensor, ...]) -> Float[Tensor, ...]:
        """Round keys (kind 0) or values (kind 1) of a layer; in training, the range is updated first.

        Raises:
            NotPrepared: outside training, for a layer without an observed range.
        """
        seen = self.largest[kind, layer]
        if self.training:
            now = x.detach().abs().amax().to(seen.dtype)
            with torch.no_grad():
                seen.copy_(torch.where(seen > 0, MOMENTUM * seen + (1 - MOMENTUM) * now, now))
        elif not float(seen) > 0:
            raise NotPrepared(f"layer {layer} never saw a key or value in training, so its 8-bit cache has no range")
        scale = seen.clamp(min=torch.finfo(torch.float32).tiny) / _TOP
        zero = torch.zeros((), dtype=torch.int32, device=x.device)
        rounded: Tensor = torch.fake_quantize_per_tensor_affine(x.float(), scale, zero, -_TOP, _TOP)
        return rounded.to(x.dtype)


class RoundedCache:
    """A cache that rounds keys and values before it appends them to another one.

    Args:
        inner: the wrapped cache.
        found: the ranges.
    """

    def __init__(self, inner: KVCache, found: CacheRanges) -> None:
        self.inner, self.found = inner, found

    @property
    def length(self) -> int:
        """See the wrapped cache."""
        return self.inner.length

    @property
    def positions(self) -> Int[Tensor, new] | None:
        """See the wrapped cache."""
        return self.inner.positions

    def append(self, layer: int, k: New, v: New, window: int | None) -> VisibleKeyValues:
        """Round and append the new keys and values; returns the visible ones of the wrapped cache."""
        k, v = self.found.round(layer, 0, k), self.found.round(layer, 1, v)
        return self.inner.append(layer, k, v, window)

    def advance(self, new: int) -> None:
        """See the wrapped cache."""
        self.inner.advance(new)


def attach(module: nn.Module) -> None:
    """Wrap every cache that is passed to the layers of a decoder in a `RoundedCache`."""
    attentions = [part for part in module.modules() if isinstance(part, Attention | LatentAttention)]
    found = CacheRanges(len(attentions))
    found.layers = [index for index, part in enumerate(attentions) if part.spec.kv_source is None]
    found.train(module.training)
    device = next((parameter.device for parameter in module.parameters()), None)
    setattr(module, _NAME, found.to(device))
    for index in found.layers:
        attentions[index].register_forward_pre_hook(_WrapCache(found))


def detach(module: nn.Module) -> None:
    """Undo `attach`."""
    for part in module.modules():
        if isinstance(part, Attention | LatentAttention):
            for key, hook in list(part._forward_pre_hooks.items()):
                if isinstance(hook, _WrapCache):
                    del part._forward_pre_hooks[key]
    if hasattr(module, _NAME):
        delattr(module, _NAME)


def ranges(module: nn.Module) -> Ranges | None:
    """The ranges observed in training; None for a model whose cache is not rounded.

    Raises:
        NotPrepared: the model was not trained since it was prepared.
    """
    found = getattr(module, _NAME, None)
    if found is None:
        return None
    largest = found.largest.tolist()
    if missing := [layer for layer in found.layers if not (largest[0][layer] > 0 and largest[1][layer] > 0)]:
        raise NotPrepared(
            f"the ranges of the 8-bit cache were never observed (layer {missing[0]}): train the prepared model first, "
            "or run forward passes in training mode"
        )
    own = [[row[index] if index in found.layers else None for index in range(len(row))] for row in largest]
    return Ranges(tuple(own[0]), tuple(own[1]))


class _WrapCache:
    """A hook that wraps the cache passed to an attention layer in a `RoundedCache`."""

    def __init__(self, found: CacheRanges) -> None:
        self.ranges = found

    def __call__(self, module: nn.Module, arguments: tuple[Tensor, LayerContext]) -> tuple[Tensor, LayerContext]:
        x, context = arguments
        return x, replace(context, cache=RoundedCache(context.cache, self.ranges))
