"""The objectives of instruction-following pruning: continued pre-training on chunks, then instruction tuning.

Notable here:
- a mask predicted from chunk j is trained on chunk j + 1, so it never depends on its own targets
- both stages convert a batch to examples (a prompt, a text, its targets), with one loss for both
- training begins with many channels and a soft selection, since an early hard selection would not change any more
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import torch
from annotated_types import Ge
from jaxtyping import Int
from torch import Tensor, nn

from pippin.core.checks import NonNegativeInt, PositiveFloat, checked
from pippin.data.token_batches import IGNORE, TokenBatch
from pippin.language.objectives import cross_entropy
from pippin.train.objective import CountsSteps, Loss


@checked
@dataclass(frozen=True)
class PruningSchedule:
    """Annealing of the selection: from all channels and ``initial_eps`` to the model's ``keep`` and ``eps``.

    Args:
        keep_steps: steps over which the number of kept channels decreases linearly to ``keep``; 0 for no annealing.
        eps_steps: steps over which eps decreases geometrically from ``initial_eps`` to ``eps``; 0 for no annealing.
        initial_eps: eps at the first step.

    >>> PruningSchedule(keep_steps=10, eps_steps=10, initial_eps=1.0).at(5, intermediate_size=512, keep=128, eps=0.25)
    (320, 0.5)
    """

    keep_steps: NonNegativeInt = 0
    eps_steps: NonNegativeInt = 0
    initial_eps: PositiveFloat = 1.0

    def at(self, step: int, *, intermediate_size: int, keep: int, eps: float) -> tuple[int, float]:
        """Number of kept channels, and eps, after ``step`` steps."""
        left = max(0.0, 1 - step / self.keep_steps) if self.keep_steps else 0.0
        warm = max(0.0, 1 - step / self.eps_steps) if self.eps_steps else 0.0
        return keep + round(left * (intermediate_size - keep)), eps * (self.initial_eps / eps) ** warm


class PromptExample(NamedTuple):
    """A text, the prompt that its mask is predicted from, and its targets."""

    prompt: Int[Tensor, prompt]
    ids: Int[Tensor, tokens]
    targets: Int[Tensor, tokens]


class _MaskedObjective(CountsSteps):
    """Base of both objectives: masks of the examples of a batch, and the loss under them."""

    unit = "tokens"

    def __init__(self, schedule: PruningSchedule) -> None:
        self.schedule = schedule

    def examples(self, batch: TokenBatch) -> list[list[PromptExample]]:
        """Groups of examples; each group is computed in one pass."""
        raise NotImplementedError

    def __call__(self, model: nn.Module, batch: TokenBatch, generator: torch.Generator | None = None) -> Loss:
        """The loss of a batch; ``generator`` is not used.

        The metric "in use" is the fraction of channels that any text of the batch keeps, "kept" that of a single text.
        """
        pruned: Any = model
        settings = {"intermediate_size": pruned.intermediate_size, "keep": pruned.keep, "eps": pruned.eps}
        keep, eps = self.schedule.at(self.step, **settings)
        groups = self.examples(batch)
        flat = [example for group in groups for example in group]
        count = sum(int((example.targets != IGNORE).sum()) for example in flat)
        if count == 0:
            nothing = next(p for p in model.parameters() if p.requires_grad).sum() * 0.0
            return Loss(nothing, 0.0, {"accuracy": 0.0, "in use": 0.0, "kept": 0.0})
        masks = pruned.masks(*_pack_texts([example.prompt for example in flat]), keep=keep, eps=eps)
        total, correct, first = masks.new_zeros(()), masks.new_zeros(()), 0
        for group in groups:
            part, first = masks[first : first + len(group)], first + len(group)
            ids, documents = _pack_texts([example.ids for example in group])
            targets = torch.cat([example.targets for example in group])
            hidden = pruned.hidden(ids, part, documents).flatten(0, 1)
            is_target = targets != IGNORE
            loss, hits = cross_entropy(pruned.base, hidden[is_target], targets[is_target])
            total, correct = total + loss, correct + hits
        shares = {
            "in use": (masks.detach() > 0).any(0).float().mean() * count,
            "kept": keep / pruned.intermediate_size * count,
        }
        return Loss(total, float(count), {"accuracy": correct, **shares})


class ChunkedPretraining(_MaskedObjective):
    """Stage 1, next tokens of plain text: the mask is predicted from one chunk of a document, the loss is on the next.

    An objective for `pippin.train.Trainer` and an `InstructionFollowingPruning` model. The tokens of chunk j + 1 are
    predicted with all tokens before them as context, under the mask of chunk j; those of the first chunk have no loss.

    Args:
        num_chunks: chunks of each document, at least 2; a document with fewer tokens has one chunk for each.
        schedule: schedule of the annealing; none by default, as for evaluation.

    Source: arXiv:2501.02086, section 3.2.
    """

    @checked
    def __init__(self, num_chunks: Annotated[int, Ge(2)] = 4, schedule: PruningSchedule = PruningSchedule()) -> None:
        super().__init__(schedule)
        self.num_chunks = num_chunks

    def examples(self, batch: TokenBatch) -> list[list[PromptExample]]:
        """One group for each chunk but the last."""
        groups: list[list[PromptExample]] = [[] for _ in range(self.num_chunks - 1)]
        for ids, targets in _texts(batch):
            count = min(self.num_chunks, len(ids))
            bounds = [round(len(ids) * part / count) for part in range(count + 1)]
            for j in range(count - 1):
                begin, middle, end = bounds[j : j + 3]
                last = end == len(ids)
                masked_targets = torch.full_like(targets[:end], IGNORE)
                # the target of a token is the token after it
                scored = slice(middle - 1, end if last else end - 1)
                masked_targets[scored] = targets[scored]
                if bool((masked_targets != IGNORE).any()):
                    groups[j].append(PromptExample(ids[begin:middle], ids[:end], masked_targets))
        return [group for group in groups if group]


class InstructionTuning(_MaskedObjective):
    """Stage 2, answers to prompts: the mask is predicted from all tokens before the first answer, the loss is on the
    answers.

    An objective for `pippin.train.Trainer` and an `InstructionFollowingPruning` model. In a conversation of several
    turns, the mask of the first serves all of them. Texts with a target at their first token have no prompt (plain
    texts, the later parts of conversations that are longer than a row) and are left out.

    Args:
        schedule: as for `ChunkedPretraining`.

    Source: arXiv:2501.02086, section 3.2 (fine-tuning; the mask of the first user message).
    """

    def __init__(self, schedule: PruningSchedule = PruningSchedule()) -> None:
        super().__init__(schedule)

    def examples(self, batch: TokenBatch) -> list[list[PromptExample]]:
        """One group."""
        group = []
        for ids, targets in _texts(batch):
            first = int((targets != IGNORE).to(torch.uint8).argmax())
            if first > 0:
                group.append(PromptExample(ids[: first + 1], ids, targets))
        return [group] if group else []


def _texts(batch: TokenBatch) -> Iterator[tuple[Tensor, Tensor]]:
    """The documents of a batch that have targets: ids and targets."""
    rows, length = batch.ids.shape
    counts = [length] * rows if batch.documents is None else list(batch.documents)
    parts = zip(batch.ids.flatten().split(counts), batch.targets.flatten().split(counts), strict=True)
    return ((ids, targets) for ids, targets in parts if bool((targets != IGNORE).any()))


def _pack_texts(parts: list[Tensor]) -> tuple[Tensor, list[int] | None]:
    """Texts of one length as rows; others packed in one row, with their lengths."""
    counts = [len(part) for part in parts]
    if len(set(counts)) == 1:
        return torch.stack(parts), None
    return torch.cat(parts)[None], counts
