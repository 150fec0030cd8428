"""Training with keys and values rounded to 8 bits, in ranges that are observed on the way.

Notable here:
- the rounding is a cache like any other, laid around whichever one a pass uses (whole sequences, several documents), so
  no objective and no layer knows of it
- one range for the keys and one for the values of each layer: a running mean of the largest magnitudes of each batch
- evaluation reads the ranges and moves them no more; what lies beyond is clamped

The engine's own 8-bit cache needs no ranges: it has a scale for each token and head, which is never coarser than a
frozen range that covers all of them, and clamps nothing. So the ranges are kept in the folder for other runtimes, and
training under them is training for a cache that is somewhat worse than the one that will be used.

Source: arXiv:2507.13575, section on 2-bit quantisation-aware training (8-bit cache).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.core.errors import NotPrepared
from pippin.nn.attention import Attention
from pippin.nn.cache import KVCache, New, Seen

MOMENTUM = 0.99
"""Share of the old range that stays when a batch was seen."""
_NAME = "cache_ranges"
_TOP = 127


@dataclass(frozen=True)
class Ranges:
    """The largest magnitudes of keys and values, by layer; None for a layer without keys of its own."""

    keys: tuple[float | None, ...]
    values: tuple[float | None, ...]

    def to_json(self) -> dict[str, Any]:
        """As `config.json` holds it."""
        return {"bits": 8, "keys": list(self.keys), "values": list(self.values)}


class CacheRanges(nn.Module):
    """The ranges of a decoder that is in training: buffers, so they are saved and resumed with it.

    Args:
        layers: how many there are.
    """

    largest: Float[Tensor, "2 layers"]

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.register_buffer("largest", torch.zeros(2, layers))
        self.layers: list[int] = []  # those with keys of their own

    def round(self, layer: int, kind: int, x: Float[Tensor, ...]) -> Float[Tensor, ...]:
        """Round keys (kind 0) or values (kind 1) of a layer; in training, the range follows them.

        Raises:
            NotPrepared: outside training, of a layer that was never seen in training.
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
    """A cache that rounds what is appended to another one.

    Args:
        inner: where it goes.
        found: the ranges.
    """

    def __init__(self, inner: KVCache, found: CacheRanges) -> None:
        self.inner, self.found = inner, found

    @property
    def length(self) -> int:
        """As the inner one's."""
        return self.inner.length

    @property
    def positions(self) -> Int[Tensor, new] | None:
        """As the inner one's."""
        return self.inner.positions

    def append(self, layer: int, k: New, v: New, window: int | None) -> Seen:
        """Round the new keys and values; what the inner cache shows is returned."""
        k, v = self.found.round(layer, 0, k), self.found.round(layer, 1, v)
        return self.inner.append(layer, k, v, window)

    def advance(self, new: int) -> None:
        """As the inner one's."""
        self.inner.advance(new)


def attach(module: nn.Module) -> None:
    """Lay a `RoundedCache` around every cache that the layers of a decoder are given, from now on."""
    attentions = [part for part in module.modules() if isinstance(part, Attention)]
    found = CacheRanges(len(attentions))
    found.layers = [index for index, part in enumerate(attentions) if part.spec.source is None]
    found.train(module.training)
    device = next((parameter.device for parameter in module.parameters()), None)
    setattr(module, _NAME, found.to(device))
    for index in found.layers:
        attentions[index].register_forward_pre_hook(_Around(found))


def detach(module: nn.Module) -> None:
    """Undo `attach`."""
    for part in module.modules():
        if isinstance(part, Attention):
            for key, hook in list(part._forward_pre_hooks.items()):
                if isinstance(hook, _Around):
                    del part._forward_pre_hooks[key]
    if hasattr(module, _NAME):
        delattr(module, _NAME)


def ranges(module: nn.Module) -> Ranges | None:
    """The ranges that training observed; None for a model whose cache is not rounded.

    Raises:
        NotPrepared: it was never trained since it was prepared.
    """
    found = getattr(module, _NAME, None)
    if found is None:
        return None
    largest = found.largest.tolist()
    if missing := [layer for layer in found.layers if not (largest[0][layer] > 0 and largest[1][layer] > 0)]:
        raise NotPrepared(
            f"the ranges of the 8-bit cache were never observed (layer {missing[0]}): train the prepared model first, "
            "or show it some text in training mode"
        )
    kept = [[row[index] if index in found.layers else None for index in range(len(row))] for row in largest]
    return Ranges(tuple(kept[0]), tuple(kept[1]))


class _Around:
    """A hook that lays the rounding around the cache that a layer is given."""

    def __init__(self, found: CacheRanges) -> None:
        self.ranges = found

    def __call__(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        x, turn, cache, *rest = arguments
        return x, turn, RoundedCache(cache, self.ranges), *rest
