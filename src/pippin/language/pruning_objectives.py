"""What instruction-following pruning learns from: plain text in chunks, then prompts and answers.

Notable here:
- a mask made from chunk j is judged on chunk j + 1, so it never sees what it is judged on
- both stages make lessons of a batch (a prompt, a text, what is learnt of it); one function has the loss of all
- many channels and a soft choice at the beginning: an early hard choice would stay as it happened to be
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument
from pippin.data.batches import IGNORE, TokenBatch
from pippin.language.objectives import cross_entropy
from pippin.train.objective import Loss


@dataclass(frozen=True)
class Annealing:
    """How a run comes to its final choice: many channels and a soft choice first, ``keep`` and ``eps`` at the end.

    Args:
        narrow: steps over which the kept channels fall from all of them to the model's ``keep``; 0 for at once.
        cool: steps over which eps falls, by equal factors, from ``start`` to the model's ``eps``; 0 for at once.
        start: eps at the beginning.

    Raises:
        InvalidArgument: negative steps, ``start`` not above 0.

    >>> Annealing(narrow=10, cool=10, start=1.0).at(5, width=512, keep=128, eps=0.25)
    (320, 0.5)
    """

    narrow: int = 0
    cool: int = 0
    start: float = 1.0

    def __post_init__(self) -> None:
        if self.narrow < 0 or self.cool < 0:
            raise InvalidArgument(f"annealing takes 0 or more steps, got narrow={self.narrow}, cool={self.cool}")
        if not 0 < self.start < math.inf:
            raise InvalidArgument(f"start must be above 0 and finite, got {self.start}")

    def at(self, step: int, *, width: int, keep: int, eps: float) -> tuple[int, float]:
        """Kept channels and eps after so many updates."""
        left = max(0.0, 1 - step / self.narrow) if self.narrow else 0.0
        warm = max(0.0, 1 - step / self.cool) if self.cool else 0.0
        return keep + round(left * (width - keep)), eps * (self.start / eps) ** warm


class Lesson(NamedTuple):
    """A text, the prompt that decides about its mask, and what is learnt of it."""

    prompt: Int[Tensor, prompt]
    ids: Int[Tensor, tokens]
    targets: Int[Tensor, tokens]


class _Masked:
    """What both objectives share: lessons from a batch, their masks, the loss under them, and the step they are at."""

    unit = "tokens"

    def __init__(self, annealing: Annealing) -> None:
        self.annealing, self.step = annealing, 0

    def lessons(self, batch: TokenBatch) -> list[list[Lesson]]:
        """Groups of lessons; each is computed in one pass."""
        raise NotImplementedError

    def __call__(self, model: nn.Module, batch: TokenBatch, generator: torch.Generator | None = None) -> Loss:
        """The loss of a batch; ``generator`` is not used.

        The metric "in use" is the share of channels that any text of the batch chose, "kept" that of a single text.
        """
        pruned: Any = model
        settings = {"width": pruned.width, "keep": pruned.keep, "eps": pruned.eps}
        keep, eps = self.annealing.at(self.step, **settings)
        groups = self.lessons(batch)
        flat = [lesson for group in groups for lesson in group]
        count = sum(int((lesson.targets != IGNORE).sum()) for lesson in flat)
        if count == 0:
            nothing = next(p for p in model.parameters() if p.requires_grad).sum() * 0.0
            return Loss(nothing, 0.0, {"accuracy": 0.0, "in use": 0.0, "kept": 0.0})
        masks = pruned.masks(*_laid([lesson.prompt for lesson in flat]), keep=keep, eps=eps)
        total, right, first = masks.new_zeros(()), masks.new_zeros(()), 0
        for group in groups:
            part, first = masks[first : first + len(group)], first + len(group)
            ids, documents = _laid([lesson.ids for lesson in group])
            targets = torch.cat([lesson.targets for lesson in group])
            hidden = pruned.hidden(ids, part, documents).flatten(0, 1)
            learnt = targets != IGNORE
            loss, hits = cross_entropy(pruned.base, hidden[learnt], targets[learnt])
            total, right = total + loss, right + hits
        shares = {"in use": (masks.detach() > 0).any(0).float().mean() * count, "kept": keep / pruned.width * count}
        return Loss(total, float(count), {"accuracy": right, **shares})

    def after_step(self, model: nn.Module, step: int) -> None:
        """Remember how far the run is."""
        self.step = step

    def state_dict(self) -> dict[str, Any]:
        """How far the run is."""
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.step = int(state["step"])


class ChunkedPretraining(_Masked):
    """Next tokens of plain text: the mask is made from one chunk of a document, the loss is taken on the next one.

    An objective for `pippin.train.Trainer` and an `InstructionFollowing` model. The tokens of chunk j + 1 are predicted
    with all tokens before them as context, under the mask of chunk j; those of the first chunk are not learnt.

    Args:
        chunks: of each document; shorter documents have one a token.
        annealing: of the choice; without it, the model's own ``keep`` and ``eps`` from the first step on, as for
            measuring.

    Raises:
        InvalidArgument: fewer than two chunks.

    Source: arXiv:2501.02086, section 3.2.
    """

    def __init__(self, chunks: int = 4, annealing: Annealing = Annealing()) -> None:
        if chunks < 2:
            raise InvalidArgument(f"a mask from one chunk is judged on the next: give at least 2 chunks, got {chunks}")
        super().__init__(annealing)
        self.chunks = chunks

    def lessons(self, batch: TokenBatch) -> list[list[Lesson]]:
        """One group for each chunk but the last."""
        groups: list[list[Lesson]] = [[] for _ in range(self.chunks - 1)]
        for ids, targets in _texts(batch):
            count = min(self.chunks, len(ids))
            bounds = [round(len(ids) * part / count) for part in range(count + 1)]
            for j in range(count - 1):
                begin, middle, end = bounds[j : j + 3]
                last = end == len(ids)
                wanted = torch.full_like(targets[:end], IGNORE)
                # the target of a token is the token after it
                judged = slice(middle - 1, end if last else end - 1)
                wanted[judged] = targets[judged]
                if bool((wanted != IGNORE).any()):
                    groups[j].append(Lesson(ids[begin:middle], ids[:end], wanted))
        return [group for group in groups if group]


class InstructionTuning(_Masked):
    """Answers to prompts: the mask is made from all that stands before the first answer, the loss is the answers'.

    An objective for `pippin.train.Trainer` and an `InstructionFollowing` model. In a conversation of several turns, the
    mask of the first serves all of them. Texts that are learnt from their first token on have no prompt (plain texts,
    the later parts of conversations that are longer than a row) and are left out.

    Args:
        annealing: as for `ChunkedPretraining`.

    Source: arXiv:2501.02086, section 3.2 (fine-tuning; the mask of the first user message).
    """

    def __init__(self, annealing: Annealing = Annealing()) -> None:
        super().__init__(annealing)

    def lessons(self, batch: TokenBatch) -> list[list[Lesson]]:
        """One group."""
        group = []
        for ids, targets in _texts(batch):
            first = int((targets != IGNORE).to(torch.uint8).argmax())
            if first > 0:
                group.append(Lesson(ids[: first + 1], ids, targets))
        return [group] if group else []


def _texts(batch: TokenBatch) -> Iterator[tuple[Tensor, Tensor]]:
    """The documents of a batch of which something is learnt: ids and targets."""
    rows, length = batch.ids.shape
    counts = [length] * rows if batch.documents is None else list(batch.documents)
    parts = zip(batch.ids.flatten().split(counts), batch.targets.flatten().split(counts), strict=True)
    return ((ids, targets) for ids, targets in parts if bool((targets != IGNORE).any()))


def _laid(parts: list[Tensor]) -> tuple[Tensor, list[int] | None]:
    """Texts of one length as rows; others end to end in one row, with the number of tokens of each."""
    counts = [len(part) for part in parts]
    if len(set(counts)) == 1:
        return torch.stack(parts), None
    return torch.cat(parts)[None], counts
