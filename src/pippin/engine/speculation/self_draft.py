"""A model that guesses with its own first layers, where the last ones keep no keys of their own.

Notable here:
- the layers that make keys and values are computed once, while drafting; checking goes on from there, so a draft costs
  nothing that the check would not have cost
- what the first layers wrote into the cache is what the whole model would have written: nothing is copied or undone
- the draft reads early: final norm and head after the last layer with keys
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.core.errors import InvalidArgument
from pippin.engine.constraint import Constraint
from pippin.engine.runner import Work
from pippin.engine.sampling import Sampler
from pippin.engine.speculation.drafts import Draft, Place, continue_freely
from pippin.language.load import LanguageModel


def shared_depth(model: LanguageModel) -> int:
    """Layers up to the last one that has keys and values of its own.

    Raises:
        InvalidArgument: that is the model's last layer, so there is nothing to skip.
    """
    depth = 1 + model.config.cached_layers[-1]
    if depth == len(model.config.layers):
        raise InvalidArgument(
            f"{model.name} cannot draft for itself: its last layer has keys of its own, so no layer can be left out; "
            'use draft="ngram" or a smaller model'
        )
    return depth


class SelfDrafter:
    """Guesses with the first layers of the model that answers.

    Source: the layout is that of arXiv:2507.13575 (keys shared by the last layers); drafting by an early exit as in
    Elhoushi et al. 2024, arXiv:2404.16710.

    Args:
        model: whose last layers read the keys of an earlier one.
        generator: random numbers of the draft.
        skip_forced: write what the constraint forces without drawing.

    Raises:
        InvalidArgument: the model's last layer has keys of its own.
    """

    def __init__(self, model: LanguageModel, generator: torch.Generator, *, skip_forced: bool) -> None:
        self.depth, self.width = shared_depth(model), model.config.width
        self._ends, self._generator, self._skip_forced = model.tokenizer.eos_ids, generator, skip_forced

    def draft(
        self, ids: Sequence[int], room: int, sampler: Sampler, constraint: Constraint | None, place: Place | None
    ) -> Draft | None:
        """Guess at most ``room`` tokens after ``ids``; None without a place to compute them."""
        if place is None:
            return None
        pending = list(ids[place.held :])
        residual = torch.empty(len(pending) + room, self.width)
        done = 0

        def step(tokens: Sequence[int], wanted: bool = True) -> Float[Tensor, vocab]:
            nonlocal done
            part = residual[done : done + len(tokens)]
            outputs = [len(tokens) - 1] if wanted else []
            work = Work(tokens, place.held + done, place.table, outputs, place.adapter, self.depth, part)
            (logits,) = place.runner.forward([work])
            done += len(tokens)
            return logits[0] if wanted else logits.new_empty(0)

        draft = continue_freely(
            step(pending),
            step,
            room,
            sampler,
            constraint,
            generator=self._generator,
            ends=self._ends,
            skip_forced=self._skip_forced,
        )
        step(draft.tokens[done - len(pending) :], wanted=False)  # the check goes on from all tokens of the draft
        draft.resume, draft.residual = self.depth, residual[:done]
        return draft
