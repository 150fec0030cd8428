"""Items with 100 annotations each: a synthetic world with known disagreement, and digits with trees as annotators.

Notable here:
- in the synthetic world, disagreement depends on another direction of the input than the label does, so it can be
  learned, and from the annotations only
- digits are annotated by 100 small trees, each trained on few other images and few pixels
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    Annotated = tuple[Tensor, Tensor]
    """Inputs and counts of annotations."""

CLASSES = 3
DISAGREE, LOGITS = 0.7, 2.0
"""Standard deviation of the logarithm of people's temperature along its direction, and the size of the logits."""


class AnnotatedWorld:
    """Items of d features with 100 annotations each, sampled from softmax(x W / T(x)), log T linear in x."""

    def __init__(self, features: int, seed: int) -> None:
        import torch

        self.generator = torch.Generator().manual_seed(3_000 + seed)
        self.W = torch.randn(features, CLASSES, generator=self.generator) / features**0.5
        self.u = torch.randn(features, generator=self.generator) / features**0.5

    def distribution(self, x: Tensor) -> Tensor:
        """The distribution that each item's annotations are sampled from."""
        logits: Tensor = LOGITS * x @ self.W / (DISAGREE * (x @ self.u)).exp()[:, None]
        return logits.softmax(-1)

    def sample(self, n: int) -> Annotated:
        """Inputs and counts of annotations."""
        import torch

        x = torch.randn(n, len(self.u), generator=self.generator)
        labels = torch.multinomial(self.distribution(x), 100, replacement=True, generator=self.generator)
        return x, torch.zeros(n, CLASSES, dtype=torch.long).scatter_add_(1, labels, torch.ones_like(labels))


def digits(seeds: int) -> Iterator[Annotated]:
    """Digits, annotated by 100 trees, each trained on 16 pixels of 60 images that are not among the items."""
    import numpy as np
    import torch
    from sklearn.datasets import load_digits
    from sklearn.tree import DecisionTreeClassifier

    images, labels = load_digits(return_X_y=True)
    for seed in range(seeds):
        rng = np.random.default_rng((7_000, seed))
        order = rng.permutation(len(images))
        known, items = order[:600], order[600:]
        counts = np.zeros((len(items), 10), dtype=np.int64)
        for annotator in range(100):
            seen, pixels = rng.choice(known, 60, replace=False), rng.permutation(64)[:16]
            tree = DecisionTreeClassifier(max_depth=6, random_state=annotator)
            annotations = tree.fit(images[seen][:, pixels], labels[seen]).predict(images[items][:, pixels])
            counts[np.arange(len(items)), annotations] += 1
        yield torch.tensor(images[items] / 8 - 1, dtype=torch.float32), torch.from_numpy(counts)
