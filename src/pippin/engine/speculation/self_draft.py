"""Self-speculation: drafts from the first layers of the model itself, for models whose last layers share a KV cache.

Notable here:
- the layers that compute keys and values run once, while drafting; verification resumes after them, so drafting adds
  only the head
- the first layers write the same keys and values as the whole model: nothing is copied or undone
- the draft's logits are an early exit: final norm and head after the last layer with its own KV cache
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.core.errors import InvalidArgument
from pippin.engine.decoding.sampling import Sampler
from pippin.engine.grammar.constraint import Constraint
from pippin.engine.model_runner import ModelInput
from pippin.engine.speculation.drafts import CachePosition, Draft, sample_draft
from pippin.language.language_model import LanguageModel


def shared_depth(model: LanguageModel) -> int:
    """Number of layers up to the last one with its own KV cache.

    Raises:
        InvalidArgument: that is the model's last layer, so no layer can be skipped.
    """
    depth = 1 + model.config.cached_layers[-1]
    if depth == len(model.config.layers):
        raise InvalidArgument(
            f"{model.name} cannot draft for itself: its last layer has keys of its own, so no layer can be left out; "
            'use draft="ngram" or a smaller model'
        )
    return depth


class SelfDrafter:
    """Drafts with the first layers of the target model.

    Source: the layout is that of arXiv:2507.13575 (keys shared by the last layers); drafting by an early exit as in
    Elhoushi et al. 2024, arXiv:2404.16710.

    Args:
        model: a model whose last layers read the keys and values of an earlier one.
        generator: random generator of the draft.
        skip_forced: append tokens that the constraint forces without sampling.

    Raises:
        InvalidArgument: the model's last layer has its own KV cache.
    """

    def __init__(self, model: LanguageModel, generator: torch.Generator, *, skip_forced: bool) -> None:
        self.depth, self.width = shared_depth(model), model.config.residual_width
        self._ends, self._generator, self._skip_forced = model.tokenizer.eos_ids, generator, skip_forced

    def draft(
        self,
        token_ids: Sequence[int],
        max_tokens: int,
        sampler: Sampler,
        constraint: Constraint | None,
        position: CachePosition | None,
    ) -> Draft | None:
        """Draft at most ``max_tokens`` tokens after ``token_ids``; None without a position in the cache."""
        if position is None:
            return None
        pending = list(token_ids[position.num_computed_tokens :])
        residual = torch.empty(len(pending) + max_tokens, self.width)
        done = 0

        def step(tokens: Sequence[int], with_logits: bool = True) -> Float[Tensor, vocab]:
            nonlocal done
            part = residual[done : done + len(tokens)]
            outputs = [len(tokens) - 1] if with_logits else []
            model_input = ModelInput(
                tokens,
                position.num_computed_tokens + done,
                position.block_table,
                outputs,
                position.adapter,
                self.depth,
                part,
                other_tables=position.other_tables,
            )
            (logits,) = position.runner.forward([model_input])
            done += len(tokens)
            return logits[0] if with_logits else logits.new_empty(0)

        draft = sample_draft(
            step(pending),
            step,
            max_tokens,
            sampler,
            constraint,
            generator=self._generator,
            ends=self._ends,
            skip_forced=self._skip_forced,
        )
        step(
            draft.tokens[done - len(pending) :], with_logits=False
        )  # verification resumes from all tokens of the draft
        draft.resume, draft.residual = self.depth, residual[:done]
        return draft
