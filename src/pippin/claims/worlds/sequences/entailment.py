"""Synthetic entailment with a known law of annotator disagreement, and transformers that are trained on it.

Notable here:
- a premise orders some of eight things, and each of its statements may be hedged; a hypothesis follows, is
  contradicted, or neither
- each of 100 annotators believes a hedged statement by chance and then reasons correctly except for rare slips, so the
  disagreement follows from the sentence
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

THINGS, STATEMENTS, PEOPLE = 8, 5, 100
BELIEF = (1.0, 0.8, 0.5, 0.2)
"""How likely a person believes a statement that is plain, or hedged by "probably", "maybe", "hardly"."""
SLIP = 0.05
HYPOTHESIS = THINGS + len(BELIEF)
VOCABULARY = HYPOTHESIS + 1


class Sentences:
    """Pairs of premise and hypothesis with 100 annotations each: yes, no, or neither.

    Args:
        seed: seed of the sentences and the annotators.
    """

    def __init__(self, seed: int) -> None:
        import torch

        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, n: int) -> tuple[Tensor, Tensor]:
        """Sample tokens [n, 18] and counts of labels [n, 3]."""
        import torch

        parts = [self._draw(min(500, n - start)) for start in range(0, n, 500)]
        return torch.cat([tokens for tokens, _ in parts]), torch.cat([counts for _, counts in parts])

    def _draw(self, n: int) -> tuple[Tensor, Tensor]:
        import torch

        def pairs(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
            first = torch.randint(THINGS, shape, generator=self.generator)
            step = torch.randint(1, THINGS, shape, generator=self.generator)
            return first, (first + step) % THINGS

        place = torch.rand(n, THINGS, generator=self.generator).argsort(1)  # the order that premises do not contradict
        low, high = pairs((n, STATEMENTS))
        swap = place.gather(1, low) > place.gather(1, high)
        low, high = torch.where(swap, high, low), torch.where(swap, low, high)
        left, right = (part[:, 0] for part in pairs((n, 1)))
        hedge = torch.randint(len(BELIEF), (n, STATEMENTS), generator=self.generator)
        statements = torch.stack([THINGS + hedge, low, high], -1).reshape(n, -1)
        mark = torch.full((n,), HYPOTHESIS)
        tokens = torch.cat([statements, torch.stack([mark, left, right], 1)], 1)
        return tokens, self._answers(hedge, low, high, left, right)

    def _answers(self, hedge: Tensor, low: Tensor, high: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """Conclusion of each annotator from the statements that they believe."""
        import torch

        n = len(hedge)
        chance = torch.tensor(BELIEF)[hedge]
        believed = torch.rand(n, PEOPLE, STATEMENTS, generator=self.generator) < chance[:, None]
        below = torch.zeros(n, PEOPLE, THINGS * THINGS)
        where = (low * THINGS + high)[:, None].expand(n, PEOPLE, STATEMENTS)
        below.scatter_reduce_(2, where, believed.float(), "amax")
        reach = below.view(n * PEOPLE, THINGS, THINGS)
        for _ in range(3):  # paths of up to eight statements
            reach = (reach + reach @ reach).clamp_max(1)
        reach = reach.view(n, PEOPLE, THINGS, THINGS)
        rows = torch.arange(n)
        yes, no = reach[rows, :, left, right] > 0, reach[rows, :, right, left] > 0
        label = torch.where(yes, 0, torch.where(no, 1, 2))
        slip = torch.rand(n, PEOPLE, generator=self.generator) < SLIP
        label = torch.where(slip, torch.randint(3, (n, PEOPLE), generator=self.generator), label)
        return torch.zeros(n, 3, dtype=torch.long).scatter_add_(1, label, torch.ones_like(label))


def reader(width: int, seed: int, layers: int = 8) -> nn.Module:
    """A transformer with logits of the three labels; 6 to 25 million parameters at widths of 256 to 512."""
    import torch
    from torch import nn

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(3 * STATEMENTS + 3, width)
            layer = nn.TransformerEncoderLayer(
                width, max(1, width // 64), 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
            )
            self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
            self.out = nn.Linear(width, 3)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.out(self.layers(self.tokens(x) + self.places.weight).mean(1))
            return found

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Reader()
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def trained_reader(source: Sentences, width: int, items: int, steps: int, seed: int) -> nn.Module:
    """Train a reader on the majority labels of sampled sentences."""
    from pippin.evaluate.annotators.soft_labels import SoftLabelFit, hard_labels, smoothed_labels

    tokens, counts = source.draw(items)
    model = reader(width, seed)
    fit: Any = SoftLabelFit(steps=steps, batch_size=256, lr=3e-4, weight_decay=0.01)
    fit(model, tokens, smoothed_labels(hard_labels(counts, seed=seed), 3, 0.0), seed)
    return model
