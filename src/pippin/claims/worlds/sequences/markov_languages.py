"""Synthetic languages: random chains over a few symbols, a small network that learns them, and exact losses.

Notable here:
- the losses are of all pairs of language and symbol, weighted as the chains visit them, and not of a sample
- the last language is the one that a fine-tuning has as its target
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import Tensor, nn

SYMBOLS, LANGUAGES = 24, 24
BLOCK = 1024
"""Triples that are sampled together, and a step of pretraining."""


class Languages:
    """Chains of symbols: for each language a matrix of transitions and how often each symbol comes up."""

    def __init__(self, seed: int) -> None:
        import torch

        generator = torch.Generator().manual_seed(seed)
        scores = 1.6 * torch.randn(LANGUAGES + 1, SYMBOLS, SYMBOLS, generator=generator)
        self.transitions = scores.softmax(-1)
        visits = torch.full((LANGUAGES + 1, 1, SYMBOLS), 1.0 / SYMBOLS)
        for _ in range(200):
            visits = visits @ self.transitions
        self.visits = visits[:, 0]

    def sample(self, languages: Tensor, generator: Any) -> Tensor:
        """Triples of language, symbol and the one after it [rows, 3]."""
        import torch

        before = self.visits[languages].multinomial(1, generator=generator)[:, 0]
        after = self.transitions[languages, before].multinomial(1, generator=generator)[:, 0]
        return torch.stack([languages, before, after], 1)

    def loss(self, languages: range) -> Callable[[nn.Module], Mapping[str, float]]:
        """The exact cross-entropy of a model over these languages."""
        import torch

        chosen = torch.tensor([*languages])
        pairs = torch.cartesian_prod(chosen, torch.arange(SYMBOLS))
        weights = (self.visits[chosen][..., None] * self.transitions[chosen]).flatten(0, 1) / len(chosen)

        def measure(model: nn.Module) -> Mapping[str, float]:
            with torch.no_grad():
                return {"loss": float(-(weights * model(pairs).log_softmax(-1)).sum())}

        return measure

    def old_loss(self) -> Callable[[nn.Module], Mapping[str, float]]:
        """Of the languages of pretraining."""
        return self.loss(range(LANGUAGES))

    def target_loss(self) -> Callable[[nn.Module], Mapping[str, float]]:
        """Of the language of fine-tuning."""
        return self.loss(range(LANGUAGES, LANGUAGES + 1))


class Fresh:
    """Triples of the pretraining languages without end, one at a time; a seed and a number fix each."""

    def __init__(self, world: Languages, seed: int) -> None:
        self.world, self.seed, self.drawn = world, seed, 0

    def __iter__(self) -> Iterator[Tensor]:
        """The triples from the cursor on."""
        while True:
            block, place = divmod(self.drawn, BLOCK)
            for row in self.block(block)[place:].unbind():
                self.drawn += 1
                yield row

    def block(self, number: int) -> Tensor:
        """So many triples at once: those from ``number * BLOCK`` on."""
        import torch

        generator = torch.Generator().manual_seed((self.seed << 32) + number)
        return self.world.sample(torch.randint(LANGUAGES, (BLOCK,), generator=generator), generator)

    def state_dict(self) -> dict[str, Any]:
        """How many were drawn."""
        return {"drawn": self.drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.drawn = int(state["drawn"])


class LanguageBatches:
    """The items of a stream, stacked."""

    def __init__(self, stream: Any, rows: int) -> None:
        self.stream, self.rows = stream, rows

    def __iter__(self) -> Iterator[Tensor]:
        """Batches of so many rows."""
        import torch

        items = iter(self.stream)
        while rows := list(itertools.islice(items, self.rows)):
            yield torch.stack(rows)


def network(width: int, seed: int) -> nn.Module:
    """Embeddings of language and symbol, two hidden layers, scores of the next symbol."""
    import torch
    from torch import nn

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.language, self.symbol = nn.Embedding(LANGUAGES + 1, 16), nn.Embedding(SYMBOLS, 16)
            self.layers = nn.Sequential(
                nn.Linear(32, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, SYMBOLS)
            )

        def forward(self, pairs: Tensor) -> Tensor:
            joined = torch.cat([self.language(pairs[:, 0]), self.symbol(pairs[:, 1])], -1)
            scores: Tensor = self.layers(joined)
            return scores

    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return Network()


def next_symbol(model: nn.Module, batch: Tensor, generator: Any) -> Any:
    """The objective of training."""
    import torch.nn.functional as F

    from pippin.train import Loss

    return Loss(F.cross_entropy(model(batch[:, :2]), batch[:, 2], reduction="sum"), len(batch))
