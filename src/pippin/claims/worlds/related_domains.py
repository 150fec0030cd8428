"""A synthetic world of related domains, and a small classifier for it.

Notable here:
- domains differ in the mean of their inputs, and in the weights of a few shared factors that decide the label
- a batch comes with the domain weights that it was sampled by, as a soup of experts needs
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pippin.language.methods.soup_of_experts.mixtures import MetaSampler
from pippin.train import Loss

DOMAINS, INPUTS, HIDDEN, CLASSES, FACTORS = 32, 16, 24, 8, 5
SHIFT, LOADS = 0.35, 0.67
BATCH = 128
DOCUMENT = 64
"""Inputs of one document."""
Labeled = tuple[Tensor, Tensor]


class RelatedDomains:
    """The domains of a seed."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(7_000 + seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self.shift = SHIFT * normal(DOMAINS, INPUTS)
        self.hidden = normal(INPUTS, INPUTS) / INPUTS**0.5
        base, factors = normal(INPUTS, CLASSES), normal(FACTORS, INPUTS, CLASSES)
        loads = LOADS * normal(DOMAINS, FACTORS)
        self.out = base + torch.einsum("df,fic->dic", loads, factors)

    def draw(self, domains: Tensor, generator: torch.Generator) -> Labeled:
        """Sample inputs and labels, one example for each of these domains."""
        x = self.shift[domains] + torch.randn(len(domains), INPUTS, generator=generator)
        logits = torch.einsum("bi,bic->bc", torch.tanh(2 * x @ self.hidden), self.out[domains])
        return x, torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]

    def documents(self, domains: Tensor, generator: torch.Generator) -> Tensor:
        """Mean inputs of sampled documents, one for each of these domains: unlabeled data for clustering."""
        x, _ = self.draw(domains.repeat_interleave(DOCUMENT), generator)
        return x.view(len(domains), DOCUMENT, INPUTS).mean(1)


class WeightedBatches:
    """Endless pairs of domain weights and a batch that is sampled by them.

    Args:
        world: the domains.
        sampler: samples weights; a tensor is used as constant weights.
        seed: seed of the batches.
        within: share of each domain in each component that has a weight; None where the components are the domains.
    """

    def __init__(
        self, world: RelatedDomains, sampler: MetaSampler | Tensor, seed: int, within: Tensor | None = None
    ) -> None:
        self.world, self.sampler, self.seed, self.within = world, sampler, seed, within

    def __iter__(self) -> Iterator[tuple[Tensor, Labeled]]:
        """Yield the batches."""
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            weights = self.sampler if isinstance(self.sampler, Tensor) else self.sampler.sample(generator)
            shares = weights if self.within is None else weights @ self.within
            yield weights, self.world.draw(torch.multinomial(shares, BATCH, True, generator=generator), generator)


def cross_entropy(model: nn.Module, batch: Labeled, generator: Any) -> Loss:
    """Training objective: mean cross-entropy of the labels."""
    return Loss(F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))


@torch.no_grad()
def loss(model: nn.Module, batch: Labeled) -> float:
    """Mean cross-entropy of a batch."""
    return float(F.cross_entropy(model(batch[0]), batch[1]))


def classifier(seed: int) -> nn.Module:
    """An MLP of sizes 16-24-24-8 with torch's initialization."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
        )
