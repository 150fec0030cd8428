"""Synthetic languages: random Markov chains over a few symbols, a small network that learns them, and exact losses.

Notable here:
- losses are exact: over all pairs of language and symbol, weighted by the stationary distributions
- the last language is the target of fine-tuning
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
    """Markov chains: for each language a transition matrix and its stationary distribution."""

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
        """Sample triples of language, symbol and next symbol [rows, 3]."""
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
        """Exact loss on the pretraining languages."""
        return self.loss(range(LANGUAGES))

    def target_loss(self) -> Callable[[nn.Module], Mapping[str, float]]:
        """Exact loss on the fine-tuning language."""
        return self.loss(range(LANGUAGES, LANGUAGES + 1))


class Fresh:
    """Endless stream of triples of the pretraining languages; seed and index determine each."""

    def __init__(self, world: Languages, seed: int) -> None:
        self.world, self.seed, self.triples = world, seed, 0

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the triples from the cursor on."""
        while True:
            block, place = divmod(self.triples, BLOCK)
            for row in self.block(block)[place:].unbind():
                self.triples += 1
                yield row

    def block(self, number: int) -> Tensor:
        """The ``BLOCK`` triples from ``number * BLOCK`` on."""
        import torch

        generator = torch.Generator().manual_seed((self.seed << 32) + number)
        return self.world.sample(torch.randint(LANGUAGES, (BLOCK,), generator=generator), generator)

    def state_dict(self) -> dict[str, Any]:
        """The number of triples so far."""
        return {"triples": self.triples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.triples = int(state["triples"])


class LanguageBatches:
    """Stacked batches of a stream."""

    def __init__(self, stream: Any, rows: int) -> None:
        self.stream, self.rows = stream, rows

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the batches."""
        import torch

        items = iter(self.stream)
        while rows := list(itertools.islice(items, self.rows)):
            yield torch.stack(rows)


def network(width: int, seed: int) -> nn.Module:
    """A network over embeddings of language and symbol: two hidden layers, logits of the next symbol."""
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
    """Training objective: cross-entropy of the next symbol."""
    import torch.nn.functional as F

    from pippin.train import Loss

    return Loss(F.cross_entropy(model(batch[:, :2]), batch[:, 2], reduction="sum"), len(batch))
