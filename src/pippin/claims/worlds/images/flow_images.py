"""Quantized images for the claims on flows: synthetic scenes, and digits with a held-out part; and their training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pippin.core.errors import MissingDependency

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from pippin.data.synthetic.scenes import SceneSpec
    from pippin.generate.conditions import Samples
    from pippin.generate.flows.tarflow import TarFlow, TarFlowConfig

RATE = 2e-3


@dataclass(frozen=True)
class Net:
    """Architecture of a flow of small images: layers of each block, width, heads; patches of 2."""

    layers: tuple[int, ...]
    width: int
    heads: int

    def config(self, size: int, levels: int = 256, *, classes: int = 0, **changes: object) -> TarFlowConfig:
        """The configuration for grayscale images of this size."""
        from pippin.generate.conditions import ConditioningSpec
        from pippin.generate.flows.tarflow import TarFlowConfig

        form = TarFlowConfig(
            (1, size, size),
            layers_per_block=self.layers,
            hidden_size=self.width,
            num_attention_heads=self.heads,
            levels=levels,
        )
        return _replaced(form, condition=ConditioningSpec(num_classes=classes, null=bool(classes)), **changes)


SMALL = Net((2, 2, 2, 2), 48, 1)
LARGE = Net((4, 4, 4, 4), 512, 8)


class SceneBatches:
    """Endless batches of fresh scenes."""

    def __init__(self, spec: SceneSpec, batch: int, seed: int) -> None:
        self.spec, self.batch, self.seed = spec, batch, seed

    def __iter__(self) -> Iterator[Samples]:
        """The batches from the first one on."""
        from pippin.data.synthetic.scenes import SceneStream
        from pippin.generate.conditions import Samples

        for scenes in SceneStream(self.spec, self.batch, seed=self.seed):
            yield Samples(scenes.x)


class SetBatches:
    """Endless random batches of a set of quantized images, with labels or without."""

    def __init__(self, images: Tensor, labels: Tensor | None, levels: int, batch: int, seed: int) -> None:
        self.images, self.labels, self.levels, self.batch, self.seed = images, labels, levels, batch, seed

    def __iter__(self) -> Iterator[Samples]:
        """The batches from the first one on."""
        import torch

        from pippin.generate.conditions import Conditioning, Samples

        generator = torch.Generator().manual_seed(self.seed)
        while True:
            rows = torch.randint(len(self.images), (self.batch,), generator=generator)
            x = self.images[rows] * (2 / (self.levels - 1)) - 1
            yield Samples(x, None if self.labels is None else Conditioning(labels=self.labels[rows]))


def digits(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """scikit-learn's 1,797 digits of 8 by 8 pixels in 17 levels: training images and labels, then 360 held-out ones."""
    import numpy as np
    import torch

    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingDependency("this claim's digits come with scikit-learn: pip install 'pippin[claims]'") from error
    found = load_digits()
    order = np.random.default_rng(900 + seed).permutation(len(found.images))
    images = torch.from_numpy(found.images[order].astype(np.int64))[:, None]
    labels = torch.from_numpy(found.target[order].astype(np.int64))
    return images[360:], labels[360:], images[:360], labels[:360]


def trained(
    config: TarFlowConfig, data: object, steps: int, seed: int, device: str = "cpu", rate: float | None = None
) -> TarFlow:
    """Train a flow on these batches; returned in evaluation mode. The default learning rate depends on its width."""
    from pippin.generate.flows.tarflow import FlowLikelihood, TarFlow
    from pippin.train import AdamW, CosineSchedule, Trainer

    flow = TarFlow(config).initialize(seed).to(device)
    Trainer(
        flow,
        FlowLikelihood(),
        data,  # type: ignore[arg-type]
        steps=steps,
        optimizer=AdamW(
            lr=rate or (RATE if config.hidden_size < 256 else RATE / 4), betas=(0.9, 0.95), weight_decay=1e-4
        ),
        schedule=CosineSchedule(warmup_steps=0.05),
        seed=seed,
        show_progress=False,
    ).fit()
    return flow.requires_grad_(False).eval()


def bits(flow: TarFlow, images: Tensor, seed: int, rows: int = 256) -> float:
    """Mean bits per dimension of quantized images."""
    import torch

    device = next(flow.parameters()).device
    parts = images.split(rows)
    values = [flow.bits_per_dim(part.long().to(device), seed=seed + rows * i) for i, part in enumerate(parts)]
    return float(torch.cat(values).mean())


def gaussian_bits(known: Tensor, images: Tensor, levels: int, seed: int) -> float:
    """Mean bits per dimension under a Gaussian fitted to ``known``, with the same dequantization."""
    import math

    import torch

    generator = torch.Generator().manual_seed(seed)

    def spread(levels_of: Tensor) -> Tensor:
        noise = torch.rand(levels_of.shape, generator=generator, dtype=torch.float64)
        return ((levels_of + noise) * (2 / levels) - 1).flatten(1)

    fitted = spread(known)
    law = torch.distributions.MultivariateNormal(fitted.mean(0), torch.cov(fitted.T))
    nats = -law.log_prob(spread(images)).mean() / fitted.shape[1]
    return float(nats) / math.log(2) + math.log2(levels / 2)


def histogram_bits(known: Tensor, images: Tensor, levels: int) -> float:
    """Mean bits per dimension under an add-one smoothed histogram of each pixel."""
    import torch

    counts = torch.nn.functional.one_hot(known.long().flatten(1), levels).sum(0) + 1.0
    logs = (counts / counts.sum(-1, keepdim=True)).log2()
    return -float(logs.gather(1, images.long().flatten(1).T).mean())


def mixture_bits(known: Tensor, images: Tensor, levels: int, seed: int, components: int = 16) -> float:
    """Mean bits per dimension under a mixture of Gaussians, dequantized as for `gaussian_bits`."""
    import math

    import torch
    from sklearn.mixture import GaussianMixture

    generator = torch.Generator().manual_seed(seed)

    def dequantized(x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=generator, dtype=torch.float64)
        return ((x + noise) * (2 / levels) - 1).flatten(1)

    fitted = dequantized(known)
    law = GaussianMixture(min(components, 1 + len(fitted) // 200), reg_covar=1e-4, max_iter=20, random_state=seed)
    nats = -law.fit(fitted.numpy()).score(dequantized(images).numpy()) / fitted.shape[1]
    return float(nats) / math.log(2) + math.log2(levels / 2)


def _replaced(config: TarFlowConfig, **changes: object) -> TarFlowConfig:
    import dataclasses

    return dataclasses.replace(config, **changes)  # type: ignore[arg-type]
