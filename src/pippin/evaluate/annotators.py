"""Learning from what many people said of each item, not from the winner only.

Notable here:
- a target is the distribution of an item's votes; cross-entropy with it has the gradient of KL(votes || model)
- fewer votes are drawn without replacement from those that there are, and small draws are part of larger ones
- label smoothing softens every item alike; votes soften those that people disagree on: both are measured the same way

Source: G. Kohli, Metric-Dependent Annotation Saturation for Learning from Label Distributions, arXiv:2605.29797.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.bayes.metrics import accuracy, ece, entropy
from pippin.core.errors import InferenceAtRisk, InvalidArgument, InvalidInput
from pippin.data.ordering import Shuffled
from pippin.train import AdamW, Cosine, Loss, Trainer

METRICS = ("kl", "entropy_r", "entropy_rho", "accuracy", "jsd", "ece", "entropy_clear", "entropy_ambiguous")
FEWEST = 30
_FLOOR = 1e-9
_SUM = 1e-4
_ENTRIES = 4_000_000


def check_counts(counts: Any) -> Int[Tensor, "n classes"]:
    """Votes as whole numbers, [n, C].

    Raises:
        InvalidInput: another shape, fewer than two classes, negative numbers, fractions, NaN, or an item without votes.
    """
    table = torch.as_tensor(counts)
    if table.ndim != 2 or not len(table) or table.shape[1] < 2:
        raise InvalidInput(f"counts must be [items, classes] with 2 classes or more; got shape {tuple(table.shape)}")
    whole = table.long() if not table.is_floating_point() else table.nan_to_num(nan=-1.0).round().long()
    odd = (whole < 0) | (whole != table)
    if odd.any():
        item, label = odd.nonzero()[0].tolist()
        raise InvalidInput(
            f"item {item} has {table[item, label].item():g} votes for class {label}; counts are whole numbers from 0 on"
        )
    silent = whole.sum(1) == 0
    if silent.any():
        raise InvalidInput(f"item {int(silent.nonzero()[0, 0])} has no votes; leave it out")
    return whole


def votes_to_distribution(counts: Any, smoothing: float = 0.0) -> Float[Tensor, "n classes"]:
    """The share of each class in an item's votes.

    Args:
        counts: whole numbers [n, C]; each item has a vote.
        smoothing: votes added to every class, 0 or more.

    Raises:
        InvalidInput: see `check_counts`. InvalidArgument: a negative or infinite ``smoothing``.

    >>> votes_to_distribution([[3, 1], [0, 2]]).tolist()
    [[0.75, 0.25], [0.0, 1.0]]
    """
    if not 0 <= smoothing < float("inf"):
        raise InvalidArgument(f"smoothing is {smoothing}; give a finite number of votes, 0 or more")
    votes = check_counts(counts).double() + smoothing
    return (votes / votes.sum(1, keepdim=True)).float()


def nested_votes(counts: Any, sizes: Sequence[int], *, seed: int = 0) -> list[Int[Tensor, "n classes"]]:
    """Fewer votes of each item, without replacement; the votes of a smaller size are among those of a larger one.

    Args:
        counts: whole numbers [n, C].
        sizes: votes to keep of each item.
        seed: of the draw.

    Raises:
        InvalidArgument: a size below 1, or above the votes that an item has.
        InvalidInput: see `check_counts`.
    """
    votes = check_counts(counts)
    fewest = int(votes.sum(1).min())
    for size in sizes:
        if not 1 <= size <= fewest:
            raise InvalidArgument(f"{size} votes cannot be drawn of items that have {fewest}; give 1 to {fewest}")
    generator = torch.Generator().manual_seed(seed)
    step = max(1, _ENTRIES // int(votes.sum(1).max()))
    parts = [_prefixes(part, sizes, generator) for part in votes.split(step)]
    return [torch.cat(part) for part in zip(*parts, strict=True)]


def _prefixes(votes: Tensor, sizes: Sequence[int], generator: torch.Generator) -> list[Tensor]:
    """Shuffle each item's votes once and count the first ones."""
    classes, totals = votes.shape[1], votes.sum(1)
    most = int(totals.max())
    # vote number v of an item is for the first class at which the running sum passes v
    place = torch.arange(most).expand(len(votes), most).contiguous()
    labels = torch.searchsorted(votes.cumsum(1), place, right=True)
    keys = torch.rand(len(votes), most, generator=generator, dtype=torch.float64)
    order = keys.masked_fill(place >= totals[:, None], 2.0).argsort(1)
    shuffled = labels.gather(1, order)
    ones = torch.ones(len(votes), most, dtype=torch.long)
    return [
        torch.zeros(len(votes), classes, dtype=torch.long).scatter_add_(1, shuffled[:, :size], ones[:, :size])
        for size in sizes
    ]


def subsample_votes(
    counts: Any, n: int, *, replace: bool = False, generator: torch.Generator | None = None
) -> Int[Tensor, "items classes"]:
    """So many votes of each item, drawn at random.

    Args:
        counts: whole numbers [items, C].
        n: votes to keep, 1 or more; without replacement no more than each item has.
        replace: whether a vote may be drawn again, which understates what fresh people would add.
        generator: of the draw; None takes a fresh one with seed 0.

    Raises:
        InvalidArgument: ``n`` out of range. InvalidInput: see `check_counts`.

    >>> subsample_votes([[3, 0], [0, 5]], 2).tolist()
    [[2, 0], [0, 2]]
    """
    votes = check_counts(counts)
    generator = generator or torch.Generator().manual_seed(0)
    if not replace:
        return nested_votes(votes, [n], seed=int(torch.randint(2**62, (), generator=generator)))[0]
    if n < 1:
        raise InvalidArgument(f"{n} votes cannot be drawn; give 1 or more")
    drawn = torch.multinomial(votes.double(), n, replacement=True, generator=generator)
    return torch.zeros_like(votes).scatter_add_(1, drawn, torch.ones_like(drawn))


def hard_labels(counts: Any, *, seed: int = 0) -> Int[Tensor, " n"]:
    """The class with most votes; ties are broken at random by the seed.

    Raises:
        InvalidInput: see `check_counts`.
    """
    votes = check_counts(counts)
    noise = torch.rand(votes.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (votes + 0.5 * noise).argmax(1)


def smoothed_labels(labels: Int[Tensor, " n"], classes: int, amount: float) -> Float[Tensor, "n classes"]:
    """``(1 - amount)`` for the label and ``amount`` divided evenly among all classes.

    Raises:
        InvalidArgument: ``amount`` outside 0 to 1.
    """
    if not 0 <= amount <= 1:
        raise InvalidArgument(f"label smoothing of {amount}; give 0 to 1")
    return (1 - amount) * nn.functional.one_hot(labels, classes).float() + amount / classes


class SoftLabelLoss(nn.Module):
    r"""Cross-entropy with a distribution for each item, $-\sum_j p_j \log \mathrm{softmax}(z)_j$, in nats.

    Args:
        reduction: "mean" over the items, "sum", or "none".

    Raises:
        InvalidArgument: another reduction.

    >>> loss = SoftLabelLoss()(torch.zeros(1, 2), torch.tensor([[0.3, 0.7]]))
    >>> round(float(loss), 4)
    0.6931
    """

    def __init__(self, reduction: Literal["mean", "sum", "none"] = "mean") -> None:
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise InvalidArgument(f"reduction {reduction!r} is not known; use 'mean', 'sum' or 'none'")
        self.reduction = reduction

    def forward(self, logits: Float[Tensor, "n classes"], target_probs: Float[Tensor, "n classes"]) -> Tensor:
        """The loss of a batch.

        Raises:
            InvalidInput: shapes that differ, NaN, negative targets, or rows that do not add up to 1 within 1e-4.
        """
        target = check_distribution(target_probs, "targets")
        if logits.shape != target.shape:
            raise InvalidInput(f"logits are {tuple(logits.shape)}, targets {tuple(target.shape)}; they must be alike")
        each = -(target * logits.log_softmax(-1)).sum(-1)
        return each if self.reduction == "none" else each.sum() if self.reduction == "sum" else each.mean()


def check_distribution(probs: Any, name: str) -> Float[Tensor, "n classes"]:
    """Rows of probabilities.

    Raises:
        InvalidInput: another shape, whole numbers, NaN, negative numbers, or rows that do not add up to 1.
    """
    table = torch.as_tensor(probs)
    if table.ndim != 2 or not len(table) or table.shape[1] < 2 or not table.is_floating_point():
        raise InvalidInput(
            f"{name} must be probabilities [items, classes] with 2 classes or more; got shape {tuple(table.shape)} of "
            f"{table.dtype}"
        )
    wrong = ~(((table.sum(1) - 1).abs() <= _SUM) & (table >= 0).all(1))
    if wrong.any():
        item = int(wrong.nonzero()[0, 0])
        raise InvalidInput(f"row {item} of {name} is {_row(table[item])}; it must be probabilities that add up to 1")
    return table


def distribution_metrics(probs: Any, target_probs: Any) -> dict[str, float]:
    """How near predicted distributions are to those of people.

    Args:
        probs: [n, C], of a model.
        target_probs: [n, C], of people; all the votes there are, and none that the model was trained on.

    Returns:
        "kl", KL(people || model) in nats, with the model's probabilities at 1e-9 at least; "entropy_r" and
        "entropy_rho", Pearson's and Spearman's correlation over items of the two entropies; "accuracy" and "ece"
        against the likeliest class of people; "jsd", the Jensen-Shannon distance (root of nats); and the model's mean
        entropy on the third of the items on which people agree most ("entropy_clear") and least
        ("entropy_ambiguous").

    Raises:
        InvalidInput: see `check_distribution`; shapes that differ.

    Warns:
        InferenceAtRisk: fewer than 30 items; entropies that are all the same, whose correlation is NaN.

    >>> people = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).repeat(20, 1)
    >>> model = torch.tensor([[0.6, 0.4], [0.9, 0.1]]).repeat(20, 1)
    >>> found = distribution_metrics(model, people)
    >>> round(found["kl"], 4), round(found["entropy_r"], 4)
    (0.0102, 1.0)
    """
    f, q = check_distribution(probs, "predictions").double(), check_distribution(target_probs, "targets").double()
    if f.shape != q.shape:
        raise InvalidInput(f"predictions are {tuple(f.shape)}, targets {tuple(q.shape)}; they must be alike")
    if len(q) < FEWEST:
        warnings.warn(f"{len(q)} items: give {FEWEST} or more for figures that mean something", InferenceAtRisk, 2)
    f, q = f / f.sum(1, keepdim=True), q / q.sum(1, keepdim=True)
    middle = (f + q) / 2
    mine, people, labels = entropy(f), entropy(q), q.argmax(1)
    order, third = people.argsort(stable=True), max(1, len(q) // 3)
    return {
        "kl": float(_kl(q, f.clamp_min(_FLOOR)).mean()),
        "entropy_r": _pearson(mine, people),
        "entropy_rho": _pearson(_ranks(mine), _ranks(people)),
        "accuracy": accuracy(f, labels),
        "jsd": float(((_kl(f, middle) + _kl(q, middle)) / 2).clamp_min(0).sqrt().mean()),
        "ece": ece(f, labels),
        "entropy_clear": float(mine[order[:third]].mean()),
        "entropy_ambiguous": float(mine[order[-third:]].mean()),
    }


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (torch.xlogy(p, p) - torch.where(p > 0, p * q.log(), 0.0)).sum(1)


def _pearson(a: Tensor, b: Tensor) -> float:
    a, b = a - a.mean(), b - b.mean()
    spread = float(a.square().sum() * b.square().sum())
    if spread <= 1e-24 * len(a) ** 2:
        warnings.warn("all items have the same entropy, so entropies have no correlation", InferenceAtRisk, 3)
        return float("nan")
    return float((a * b).sum()) / math.sqrt(spread)


def _ranks(values: Tensor) -> Tensor:
    """Ranks; equal values share the mean of theirs."""
    _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    end = counts.cumsum(0).double()
    middle: Tensor = end - (counts.double() - 1) / 2
    return middle[inverse]


def _row(row: Tensor) -> str:
    shown = ", ".join(f"{value:.4g}" for value in row[:6].tolist())
    return f"[{shown}{', ...' if len(row) > 6 else ''}]"


# --- training ---------------------------------------------------------------------------------------------------------


class _SoftObjective:
    """`SoftLabelLoss` of targets that were checked before."""

    unit = "items"

    def __call__(self, model: nn.Module, batch: Any, generator: torch.Generator) -> Loss:
        x, target = batch
        return Loss(nn.functional.cross_entropy(model(x), target, reduction="sum"), len(x))


@dataclass(frozen=True)
class SoftFit:
    """Trains a classifier on distributions, by the library's one trainer.

    Attributes:
        steps: updates.
        batch: items of each.
        lr: learning rate of AdamW, after a warm-up of a tenth of the steps down along a cosine.
        weight_decay: of AdamW, large, as there are few items and every one is seen often.
    """

    steps: int = 250
    batch: int = 128
    lr: float = 5e-3
    weight_decay: float = 1.0

    def __call__(self, model: nn.Module, x: Tensor, target_probs: Tensor, seed: int = 0) -> None:
        """Train in place, and leave the model in evaluation mode.

        Args:
            model: gives logits [b, C] for inputs [b, ...].
            x: inputs [n, ...].
            target_probs: [n, C].
            seed: of the order of the items.

        Raises:
            InvalidInput: distributions that are none, or another number of them than of inputs.
        """
        target = check_distribution(target_probs, "targets").float()
        if len(x) != len(target):
            raise InvalidInput(f"there are {len(x)} inputs and {len(target)} targets")

        def collate(items: list[int]) -> tuple[Tensor, Tensor]:
            chosen = torch.tensor(items)
            return x[chosen], target[chosen]

        order = Shuffled(range(len(x)), min(self.batch, len(x)), seed=seed, collate=collate)
        model.train()
        Trainer(
            model,
            _SoftObjective(),
            order,
            steps=self.steps,
            optimiser=AdamW(lr=self.lr, weight_decay=self.weight_decay),
            schedule=Cosine(warmup=0.1),
            seed=seed,
            show=False,
        ).fit()
        model.eval()
