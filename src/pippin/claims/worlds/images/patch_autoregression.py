"""An autoregressive transformer of quantized images: patch by patch, and element by element within a patch.

Notable here:
- it has the layers, width and tokens of the flow that it is compared with, and exact bits without dequantization
- an element is predicted from all patches before its own, and from the elements of its own patch before it
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class PatchAutoregression(nn.Module):
    """Autoregressive model of quantized grayscale images.

    Args:
        side: side of the images in pixels.
        levels: number of values of an element.
        layers: number of layers.
        width: hidden size.
        heads: attention heads.
        patch: side of a patch.
    """

    def __init__(self, side: int, levels: int, layers: int, width: int, heads: int, patch: int = 2) -> None:
        super().__init__()
        self.levels, self.patch = levels, patch
        inner, tokens = patch**2, (side // patch) ** 2
        self.read = nn.Linear(inner, width)
        self.positions = nn.Parameter(0.02 * torch.randn(tokens, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.values = nn.Embedding(levels, width)
        self.places = nn.Parameter(0.02 * torch.randn(inner, width))
        self.mix = nn.Linear(2 * width, width)
        self.out = nn.Linear(width, levels)

    def nats(self, images: Tensor) -> Tensor:
        """Negative log-probability of each image, (n, 1, side, side) of integers."""
        tokens = functional.pixel_unshuffle(images.float(), self.patch).flatten(2).transpose(1, 2).long()
        scaled = 2 * tokens / (self.levels - 1) - 1
        before = functional.pad(self.read(scaled)[:, :-1], (0, 0, 1, 0)) + self.positions
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=images.device)
        hidden = self.layers(before, mask=mask, is_causal=True)[:, :, None]
        # elements before each one within its patch, summed with their places so that none is mistaken for another
        own = (self.values(tokens) * (1 + self.places)).cumsum(2)
        own = functional.pad(own[:, :, :-1], (0, 0, 1, 0)) + self.places
        logits = self.out(functional.gelu(self.mix(torch.cat([hidden.expand_as(own), own], -1))))
        return (
            functional.cross_entropy(logits.flatten(0, 2), tokens.flatten(), reduction="none")
            .view(len(images), -1)
            .sum(1)
        )


def trained(
    model: PatchAutoregression, data: Iterable[Any], steps: int, seed: int, device: str, rate: float
) -> PatchAutoregression:
    """Train on batches of images in -1..1; the model is returned in evaluation mode."""
    from pippin.claims.worlds.training import fit
    from pippin.train import Loss

    def likelihood(model: Any, batch: Any, generator: torch.Generator) -> Loss:
        images = ((batch.x + 1) * (model.levels - 1) / 2).round().long()
        nats: Tensor = model.nats(images)
        return Loss(nats.sum(), images.numel())

    fit(
        model, likelihood, data,
        steps=steps, seed=seed, lr=rate, weight_decay=1e-4, device=device, precision="float32",
    )  # fmt: skip
    return model.requires_grad_(False)


def bits(model: PatchAutoregression, images: Tensor) -> float:
    """Mean bits per dimension."""
    device = model.out.weight.device
    with torch.no_grad():
        nats = torch.cat([model.nats(part.long().to(device)) for part in images.split(256)])
    return float(nats.mean()) / images[0].numel() / torch.log(torch.tensor(2.0)).item()
