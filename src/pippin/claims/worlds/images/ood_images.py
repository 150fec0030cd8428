"""In-distribution and out-of-distribution images for a generative model: four cases.

Notable here:
- three cases are chosen so that a likelihood succeeds (digits), fails (gratings), and prefers the wrong images (dots)
- the fourth is the published pair, Fashion-MNIST against MNIST, smaller
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from pippin.bayes.latent.vae import VAEConfig


@dataclass(frozen=True)
class OODImages:
    """Training and held-out images [n, pixels] in 0..1, OOD images by name, and the config of a VAE."""

    name: str
    train: Tensor
    held_out: Tensor
    ood: dict[str, Tensor]
    config: VAEConfig


def digits(seed: int, count: int) -> OODImages:
    """Digits 0-4 of scikit-learn; 5-9, noise and inverted digits are OOD: here the likelihood is right."""
    import torch
    from sklearn.datasets import load_digits

    from pippin.bayes.latent.vae import VAEConfig

    generator = torch.Generator().manual_seed(1000 + seed)
    found = load_digits()
    x, y = torch.tensor(found.data / 16).float(), torch.tensor(found.target)
    order = torch.randperm(len(x), generator=generator)
    x, y = x[order], y[order]
    known = x[y < 5]
    held_out = known[600 : 600 + count]
    ood = {"5-9": x[y >= 5][:count], "noise": torch.rand(count, 64, generator=generator), "inverted": 1 - held_out}
    return OODImages("digits", known[:600], held_out, ood, VAEConfig((64,), latent_dim=5))


def gratings(seed: int, count: int) -> OODImages:
    """Gratings of 0-60 degrees; flat gray, gratings of 90-150 degrees and noise are OOD."""
    import torch

    from pippin.bayes.latent.vae import VAEConfig

    generator = torch.Generator().manual_seed(2000 + seed)
    known = _gratings(3000, (0, 60), (0.4, 1.0), generator)
    level = 0.45 + 0.1 * torch.rand(count, 1, generator=generator)
    ood = {
        "flat gray": level + 0.05 * torch.randn(count, 64, generator=generator),
        "rotated, low contrast": _gratings(count, (90, 150), (0.1, 0.2), generator),
        "rotated, full contrast": _gratings(count, (90, 150), (0.8, 1.0), generator),
        "noise": torch.rand(count, 64, generator=generator),
    }
    config = VAEConfig((64,), latent_dim=6, likelihood="gaussian", noise_std=0.1)
    return OODImages("gratings", known, _gratings(count, (0, 60), (0.4, 1.0), generator), ood, config)


def _gratings(n: int, degrees: tuple[float, float], contrast: tuple[float, float], generator: Any) -> Tensor:
    """Gratings of 8 by 8 pixels around 0.5, 0.2 cycles per pixel, random phase, noise of 0.05."""
    import torch

    def between(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(n, 1, 1, generator=generator)

    angle, phase, high = between(*degrees) * math.pi / 180, between(0, 2 * math.pi), between(*contrast)
    rows, columns = torch.meshgrid(torch.arange(8.0), torch.arange(8.0), indexing="ij")
    wave = torch.sin(2 * math.pi * 0.2 * (columns * angle.cos() + rows * angle.sin()) + phase)
    return (0.5 + 0.5 * high * wave + 0.05 * torch.randn(n, 8, 8, generator=generator)).flatten(1)


def rectangles(seed: int, count: int) -> OODImages:
    """Unions of two filled rectangles; one to four dots, which are likely, noise and inverted images are OOD."""
    import torch

    from pippin.bayes.latent.vae import VAEConfig

    generator = torch.Generator().manual_seed(3000 + seed)
    known, held_out = _unions(3000, generator), _unions(count, generator)
    ood = {}
    for dots in (1, 2, 3, 4):
        at = torch.rand(count, 64, generator=generator).argsort(1)[:, :dots]
        ood["1 dot" if dots == 1 else f"{dots} dots"] = torch.zeros(count, 64).scatter_(1, at, 1.0)
    ood |= {"noise": torch.rand(count, 64, generator=generator).round(), "inverted": 1 - held_out}
    return OODImages("rectangles", known, held_out, ood, VAEConfig((64,), latent_dim=5))


def _unions(n: int, generator: Any) -> Tensor:
    """Unions of two filled rectangles with sides of 2 to 5 pixels on 8 by 8."""
    import torch

    at = torch.arange(8)
    x = torch.zeros(n, 8, 8)
    for _ in range(2):
        sides = torch.randint(2, 6, (n, 2), generator=generator)
        corner = (torch.rand(n, 2, generator=generator) * (9 - sides)).long()
        inside = (at >= corner[..., None]) & (at < (corner + sides)[..., None])  # [n, 2, 8]
        x = torch.maximum(x, (inside[:, 0, :, None] & inside[:, 1, None, :]).float())
    return x.flatten(1)


def fashion_mnist(count: int, side: int, images: int, *, convolutional: bool = False) -> OODImages:
    """Fashion-MNIST with MNIST as OOD images; below 1,000 images, transposed Fashion-MNIST, to avoid a download."""
    from pippin.bayes.latent.vae import VAEConfig
    from pippin.core.store import store
    from pippin.data import images as sets

    def levels(name: str, split: Literal["train", "test"], limit: int) -> Tensor:
        store.pull(name, show_progress=False)
        found = sets.load(name, split=split, size=side, limit=limit, show_progress=False).images
        return (found.float() / 255).flatten(1)

    known, held_out = levels("fashion-mnist", "train", images), levels("fashion-mnist", "test", count)
    transposed = images < 1000
    ood = held_out.view(-1, side, side).mT.flatten(1) if transposed else levels("mnist", "test", count)
    config = VAEConfig((side**2,), latent_dim=10, hidden_sizes=(200,))
    if convolutional:
        config = VAEConfig((1, side, side), latent_dim=20, hidden_sizes=(32, 64, 256), architecture="conv")
        known, held_out, ood = (x.view(-1, *config.shape) for x in (known, held_out, ood))
    return OODImages("Fashion-MNIST", known, held_out, {"transposed" if transposed else "MNIST": ood}, config)
