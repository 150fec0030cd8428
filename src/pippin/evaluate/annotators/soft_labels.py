"""Training on label distributions: the shares of all annotations of an item instead of its majority label.

Notable here:
- a target is the distribution of an item's votes; cross-entropy with it has the gradient of KL(votes || model)
- votes are subsampled without replacement, and smaller subsamples are nested in larger ones
- label smoothing softens every item equally, votes only those that people disagree on; the metrics are the same

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

from pippin.core.checks import NonNegativeFloat, PositiveInt, Probability, checked
from pippin.core.errors import InferenceAtRisk, InvalidArgument, InvalidInput
from pippin.data.streams import Shuffled
from pippin.metrics import (
    accuracy,
    entropy,
    expected_calibration_error,
    pearson_correlation,
    spearman_correlation,
)
from pippin.train import AdamW, CosineSchedule, Loss, Trainer

METRICS = ("kl", "entropy_r", "entropy_rho", "accuracy", "jsd", "ece", "entropy_clear", "entropy_ambiguous")
FEWEST = 30
_FLOOR = 1e-9
_SUM = 1e-4
_ENTRIES = 4_000_000


def check_counts(counts: Any) -> Int[Tensor, "n classes"]:
    """Check vote counts and convert them to integers, [n, C].

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


@checked
def annotations_to_distribution(counts: Any, smoothing: NonNegativeFloat = 0.0) -> Float[Tensor, "n classes"]:
    """The share of each class in an item's votes.

    Args:
        counts: whole numbers [n, C]; at least one vote for each item.
        smoothing: pseudo-votes added to every class, 0 or more.

    Raises:
        InvalidInput: see `check_counts`.

    >>> annotations_to_distribution([[3, 1], [0, 2]]).tolist()
    [[0.75, 0.25], [0.0, 1.0]]
    """
    votes = check_counts(counts).double() + smoothing
    return (votes / votes.sum(1, keepdim=True)).float()


def nested_annotations(counts: Any, sizes: Sequence[int], *, seed: int = 0) -> list[Int[Tensor, "n classes"]]:
    """Subsample votes without replacement at several sizes; smaller subsamples are nested in larger ones.

    Args:
        counts: vote counts [n, C].
        sizes: votes to keep of each item.
        seed: seed of the subsampling.

    Returns:
        For each size, vote counts [n, C].

    Raises:
        InvalidArgument: a size below 1, or above the number of votes of some item.
        InvalidInput: see `check_counts`.
    """
    votes = check_counts(counts)
    fewest = int(votes.sum(1).min())
    for size in sizes:
        if not 1 <= size <= fewest:
            raise InvalidArgument(f"{size} votes cannot be taken from items that have {fewest}; give 1 to {fewest}")
    generator = torch.Generator().manual_seed(seed)
    step = max(1, _ENTRIES // int(votes.sum(1).max()))
    parts = [_prefixes(part, sizes, generator) for part in votes.split(step)]
    return [torch.cat(part) for part in zip(*parts, strict=True)]


def _prefixes(votes: Tensor, sizes: Sequence[int], generator: torch.Generator) -> list[Tensor]:
    """Shuffle each item's votes once and count the first ones."""
    classes, totals = votes.shape[1], votes.sum(1)
    most = int(totals.max())
    # vote v of an item, counted from 0, is for the first class at which the running sum exceeds v: labels [n, most]
    index = torch.arange(most).expand(len(votes), most).contiguous()
    labels = torch.searchsorted(votes.cumsum(1), index, right=True)
    # sorting by random keys shuffles; votes beyond an item's own number get the largest key and come last
    keys = torch.rand(len(votes), most, generator=generator, dtype=torch.float64)
    order = keys.masked_fill(index >= totals[:, None], 2.0).argsort(1)
    shuffled = labels.gather(1, order)
    ones = torch.ones(len(votes), most, dtype=torch.long)
    return [
        torch.zeros(len(votes), classes, dtype=torch.long).scatter_add_(1, shuffled[:, :size], ones[:, :size])
        for size in sizes
    ]


@checked
def subsample_annotations(
    counts: Any, n: PositiveInt, *, replace: bool = False, generator: torch.Generator | None = None
) -> Int[Tensor, "items classes"]:
    """Subsample n votes of each item at random.

    Args:
        counts: vote counts [items, C].
        n: votes to keep, 1 or more; without replacement at most as many as each item has.
        replace: whether to sample with replacement, which underestimates what new annotators would add.
        generator: source of randomness; None takes a new one with seed 0.

    Raises:
        InvalidArgument: more votes than an item has.
        InvalidInput: see `check_counts`.

    >>> subsample_annotations([[3, 0], [0, 5]], 2).tolist()
    [[2, 0], [0, 2]]
    """
    votes = check_counts(counts)
    generator = generator or torch.Generator().manual_seed(0)
    if not replace:
        return nested_annotations(votes, [n], seed=int(torch.randint(2**62, (), generator=generator)))[0]
    labels = torch.multinomial(votes.double(), n, replacement=True, generator=generator)  # [items, n]
    return torch.zeros_like(votes).scatter_add_(1, labels, torch.ones_like(labels))


def hard_labels(counts: Any, *, seed: int = 0) -> Int[Tensor, " n"]:
    """The class with the most votes of each item; ties are broken at random by the seed.

    Raises:
        InvalidInput: see `check_counts`.
    """
    votes = check_counts(counts)
    noise = torch.rand(votes.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (votes + 0.5 * noise).argmax(1)


@checked
def smoothed_labels(labels: Int[Tensor, " n"], classes: int, amount: Probability) -> Float[Tensor, "n classes"]:
    """Label smoothing: ``1 - amount`` on the label plus ``amount`` spread evenly over all classes."""
    return (1 - amount) * nn.functional.one_hot(labels, classes).float() + amount / classes


class SoftLabelLoss(nn.Module):
    r"""Cross-entropy with a distribution for each item, $-\sum_j p_j \log \mathrm{softmax}(z)_j$, in nats.

    Args:
        reduction: "mean" over the items, "sum", or "none".

    >>> loss = SoftLabelLoss()(torch.zeros(1, 2), torch.tensor([[0.3, 0.7]]))
    >>> round(float(loss), 4)
    0.6931
    """

    @checked
    def __init__(self, reduction: Literal["mean", "sum", "none"] = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, logits: Float[Tensor, "n classes"], target_probs: Float[Tensor, "n classes"]) -> Tensor:
        """The loss of a batch, in nats.

        Raises:
            InvalidInput: different shapes, NaN, negative targets, or rows that do not sum to 1 within 1e-4.
        """
        target = check_distribution(target_probs, "targets")
        if logits.shape != target.shape:
            raise InvalidInput(f"logits are {tuple(logits.shape)}, targets {tuple(target.shape)}; they must be equal")
        each = -(target * logits.log_softmax(-1)).sum(-1)
        return each if self.reduction == "none" else each.sum() if self.reduction == "sum" else each.mean()


def check_distribution(probs: Any, name: str) -> Float[Tensor, "n classes"]:
    """Check that every row of a tensor [n, C] is a probability distribution.

    Args:
        probs: floating-point probabilities.
        name: what to call them in messages.

    Raises:
        InvalidInput: another shape, integers, NaN, negative values, or rows that do not sum to 1 within 1e-4.
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
    """How close predicted label distributions are to those of human annotators.

    Args:
        probs: [n, C], predicted probabilities.
        target_probs: [n, C], shares of all human votes, none of which the model was trained on.

    Returns:
        "kl", KL(people || model) in nats, with the model's probabilities clamped to at least 1e-9; "entropy_r" and
        "entropy_rho", Pearson and Spearman correlation over items of the two entropies; "accuracy" and "ece"
        against the majority class; "jsd", the Jensen-Shannon distance (square root of nats); and the model's mean
        entropy on the third of the items on which people agree most ("entropy_clear") and least
        ("entropy_ambiguous").

    Raises:
        InvalidInput: invalid distributions (see `check_distribution`), or different shapes.

    Warns:
        InferenceAtRisk: fewer than 30 items, or entropies that are all equal, whose correlation is NaN.

    >>> people = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).repeat(20, 1)
    >>> model = torch.tensor([[0.6, 0.4], [0.9, 0.1]]).repeat(20, 1)
    >>> found = distribution_metrics(model, people)
    >>> round(found["kl"], 4), round(found["entropy_r"], 4)
    (0.0102, 1.0)
    """
    f, q = check_distribution(probs, "predictions").double(), check_distribution(target_probs, "targets").double()
    if f.shape != q.shape:
        raise InvalidInput(f"predictions are {tuple(f.shape)}, targets {tuple(q.shape)}; they must be equal")
    if len(q) < FEWEST:
        warnings.warn(f"{len(q)} items: give {FEWEST} or more for reliable figures", InferenceAtRisk, 2)
    f, q = f / f.sum(1, keepdim=True), q / q.sum(1, keepdim=True)
    mixture = (f + q) / 2
    predicted, target, labels = entropy(f), entropy(q), q.argmax(1)  # each [n]
    pearson, spearman = _correlations(predicted, target)
    order, third = target.argsort(stable=True), max(1, len(q) // 3)
    return {
        "kl": float(_kl(q, f.clamp_min(_FLOOR)).mean()),
        "entropy_r": pearson,
        "entropy_rho": spearman,
        "accuracy": accuracy(f, labels),
        "jsd": float(((_kl(f, mixture) + _kl(q, mixture)) / 2).clamp_min(0).sqrt().mean()),
        "ece": expected_calibration_error(f, labels),
        "entropy_clear": float(predicted[order[:third]].mean()),
        "entropy_ambiguous": float(predicted[order[-third:]].mean()),
    }


def _kl(p: Tensor, q: Tensor) -> Tensor:
    return (torch.xlogy(p, p) - torch.where(p > 0, p * q.log(), 0.0)).sum(1)


def _correlations(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Pearson and Spearman correlation of two vectors of entropies; warns where they are undefined."""
    found = pearson_correlation(a, b), spearman_correlation(a, b)
    if any(map(math.isnan, found)):
        warnings.warn("all items have the same entropy, so entropies have no correlation", InferenceAtRisk, 3)
    return found


def _row(row: Tensor) -> str:
    shown = ", ".join(f"{value:.4g}" for value in row[:6].tolist())
    return f"[{shown}{', ...' if len(row) > 6 else ''}]"


# --- training ---------------------------------------------------------------------------------------------------------


class _SoftObjective:
    """`SoftLabelLoss` for targets that have already been checked."""

    unit = "items"

    def __call__(self, model: nn.Module, batch: Any, generator: torch.Generator) -> Loss:
        x, target = batch
        return Loss(nn.functional.cross_entropy(model(x), target, reduction="sum"), len(x))


@dataclass(frozen=True)
class SoftLabelFit:
    """Trains a classifier on label distributions with `pippin.train.Trainer`.

    Attributes:
        steps: number of updates.
        batch_size: items per update.
        lr: peak learning rate of AdamW, reached after a tenth of the steps and then decayed along a cosine.
        weight_decay: weight decay of AdamW; large by default, as the items are few and are seen many times.
    """

    steps: int = 250
    batch_size: int = 128
    lr: float = 5e-3
    weight_decay: float = 1.0

    def __call__(self, model: nn.Module, x: Tensor, target_probs: Tensor, seed: int = 0) -> None:
        """Train in place, and leave the model in evaluation mode.

        Args:
            model: maps inputs [b, ...] to logits [b, C].
            x: inputs [n, ...].
            target_probs: target distributions [n, C].
            seed: seed of the order of the items.

        Raises:
            InvalidInput: invalid distributions, or another number of them than of inputs.
        """
        target = check_distribution(target_probs, "targets").float()
        if len(x) != len(target):
            raise InvalidInput(f"there are {len(x)} inputs and {len(target)} targets")

        def collate(items: list[int]) -> tuple[Tensor, Tensor]:
            chosen = torch.tensor(items)
            return x[chosen], target[chosen]

        order = Shuffled(range(len(x)), min(self.batch_size, len(x)), seed=seed, collate=collate)
        model.train()
        Trainer(
            model,
            _SoftObjective(),
            order,
            steps=self.steps,
            optimizer=AdamW(lr=self.lr, weight_decay=self.weight_decay),
            schedule=CosineSchedule(warmup_steps=0.1),
            seed=seed,
            show_progress=False,
        ).fit()
        model.eval()
