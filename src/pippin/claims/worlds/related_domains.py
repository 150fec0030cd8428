"""A synthetic world of related domains, and a small classifier for it.

Notable here:
- domains differ in where their inputs lie, and in how much of each of a few shared factors decides the label
- a batch comes with the weights of the domains it was sampled by, as a soup of experts wants it
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
    """The world of a seed."""

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
        """Inputs and labels of one example in each of these domains."""
        x = self.shift[domains] + torch.randn(len(domains), INPUTS, generator=generator)
        logits = torch.einsum("bi,bic->bc", torch.tanh(2 * x @ self.hidden), self.out[domains])
        return x, torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]

    def documents(self, domains: Tensor, generator: torch.Generator) -> Tensor:
        """The mean input of a document in each of these domains: what is known of it without labels."""
        x, _ = self.draw(domains.repeat_interleave(DOCUMENT), generator)
        return x.view(len(domains), DOCUMENT, INPUTS).mean(1)


class WeightedBatches:
    """Weights and a batch sampled by them, without end.

    Args:
        world: where from.
        sampler: samples weights; a tensor stands for the same weights always.
        seed: of the batches.
        within: the share of each domain in what a weight stands for; None where that is the domain itself.
    """

    def __init__(
        self, world: RelatedDomains, sampler: MetaSampler | Tensor, seed: int, within: Tensor | None = None
    ) -> None:
        self.world, self.sampler, self.seed, self.within = world, sampler, seed, within

    def __iter__(self) -> Iterator[tuple[Tensor, Labeled]]:
        """The batches from the first one on."""
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            weights = self.sampler if isinstance(self.sampler, Tensor) else self.sampler.sample(generator)
            shares = weights if self.within is None else weights @ self.within
            yield weights, self.world.draw(torch.multinomial(shares, BATCH, True, generator=generator), generator)


def cross_entropy(model: nn.Module, batch: Labeled, generator: Any) -> Loss:
    """Of the labels."""
    return Loss(F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))


@torch.no_grad()
def loss(model: nn.Module, batch: Labeled) -> float:
    """Mean cross-entropy of a batch."""
    return float(F.cross_entropy(model(batch[0]), batch[1]))


def classifier(seed: int) -> nn.Module:
    """16-24-24-8, in the initialization of torch."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES)
        )
