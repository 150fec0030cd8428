"""Experts that the prompt chooses, and that are chosen again as the answer goes on.

Notable here:
- one set of experts serves many tokens, so that with experts in storage next to nothing is read between two choices
- a choice depends on the tokens of the request alone: the answer is the same beside others, and after a preemption
- a later choice keeps what it has unless something else is better by a margin, and replaces no more than a few experts

Source: a reconstruction of AFM 3 Core Advanced as it was announced (Apple 2026): which rules decide about a swap was
not published.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pippin.core.checks import NonNegativeFloat, NonNegativeInt, PositiveInt, checked
from pippin.core.errors import UnsupportedModel
from pippin.engine.options import ModelOptions
from pippin.language.language_model import LanguageModel
from pippin.language.methods.prompt_experts.router import PromptRouter
from pippin.nn.expert_mask import ExpertMask
from pippin.nn.soft_top_k import top_k_indices


@checked
@dataclass(frozen=True, eq=False)
class PromptExperts:
    """How experts are chosen by the prompt.

    Answers are others than with all experts: by how much is a matter of the model and its router.

    Args:
        router: of the model, `PromptRouter.load` reads one.
        keep: experts of each mixture that are chosen, no fewer than a token takes; None for what the router was trained
            for.
        reselect_every: tokens of the answer after which experts are chosen again; 0 for never.
        max_swaps: the most experts of a mixture that a later choice replaces; None for all.
        margin: by how much the score of an expert must exceed that of the one that it replaces.
    """

    router: PromptRouter
    keep: PositiveInt | None = None
    reselect_every: NonNegativeInt = 128
    max_swaps: PositiveInt | None = None
    margin: NonNegativeFloat = 0.0

    @property
    def num_kept(self) -> int:
        """Experts of each mixture that are chosen."""
        return self.router.config.keep if self.keep is None else self.keep

    def check(self, model: LanguageModel) -> None:
        """Check that it can be used with a model.

        Raises:
            UnsupportedModel: the model is computed by transformers or by several processes, or the layers that read
                have experts in storage.
            InvalidArgument: the router was made for another model, or ``keep`` is out of range.
        """
        if model.module.collectives is not None:
            raise UnsupportedModel(
                f"{model.name} is computed by several processes, and its router would be read by one"
            )
        self.router.check(model.config)
        config = self.router.config
        config.check_keep(self.num_kept)
        reading = (layer.experts or layer.feedforward for layer in model.config.layers[: config.depth])
        stored = model.placement is not None and model.placement.experts is not None
        if stored and any(spec.num_experts for spec in reading):
            raise UnsupportedModel(
                f"the router reads behind {config.depth} layers of {model.name}, which have experts in storage; take "
                "one that reads dense layers or embeddings alone, or load the model with more memory"
            )


def from_options(options: ModelOptions) -> PromptExperts | None:
    """What the options of a model say; None where its prompts choose no experts.

    Raises:
        ModelNotFound, UnsupportedModel, CorruptedFile: the router cannot be read.
    """
    if options.prompt_router is None:
        return None
    every = PromptExperts.reselect_every if options.reselect_every is None else options.reselect_every
    return PromptExperts(PromptRouter.load(options.prompt_router), options.keep_experts, every)


class ExpertChoice:
    """The sets of experts of one request.

    Args:
        policy: how they are chosen.
        model: the model.
        prompt: its token ids; the first set is chosen here.
    """

    def __init__(self, policy: PromptExperts, model: LanguageModel, prompt: Sequence[int]) -> None:
        self.policy, self._base, self._device = policy, model.module, model.device
        self._prompt_tokens = len(prompt)
        self._chosen = [top_k_indices(scores := self._scores(prompt), policy.num_kept)]
        self._masks = [policy.router.mask(self._chosen[0], scores)]

    def extend(self, token_ids: Sequence[int]) -> ExpertMask | None:
        """Choose the next set, where it is needed for the next token.

        Args:
            token_ids: all tokens so far; with one call for each token no choice is missed.

        Returns:
            The new set; None where the last one serves on.
        """
        every = self.policy.reselect_every
        if self._segment(len(token_ids) - 1) < len(self._masks):
            return None
        end = self._prompt_tokens + len(self._masks) * every
        scores = self._scores(token_ids[end - every : end])
        self._chosen.append(swap(self._chosen[-1], scores, self.policy.max_swaps, self.policy.margin))
        self._masks.append(self.policy.router.mask(self._chosen[-1], scores))
        return self._masks[-1]

    def mask_at(self, index: int) -> ExpertMask:
        """The set that serves a token.

        Args:
            index: of the token in the sequence.
        """
        return self._masks[min(self._segment(index), len(self._masks) - 1)]

    def end_of_set(self, index: int) -> int | None:
        """The first token behind one that another set serves; None where there is none."""
        if not self.policy.reselect_every:
            return None
        return self._prompt_tokens + (self._segment(index) + 1) * self.policy.reselect_every

    def _segment(self, index: int) -> int:
        every = self.policy.reselect_every
        return max(0, (index - self._prompt_tokens) // every) if every else 0

    def _scores(self, token_ids: Sequence[int]) -> Float[Tensor, "layers experts"]:
        return self.policy.router.scores(self._base, torch.tensor(token_ids, device=self._device))


def swap(
    chosen: Int[Tensor, "layers kept"], scores: Float[Tensor, "layers experts"], most: int | None, margin: float
) -> Int[Tensor, "layers kept"]:
    """Replace the worst of the chosen experts by better ones.

    Args:
        chosen: experts of each layer, ascending.
        scores: of all.
        most: how many are replaced in a layer at most; None for all.
        margin: by how much the new one must be better.

    >>> swap(torch.tensor([[0, 1]]), torch.tensor([[0.0, 1.0, 3.0, 2.0]]), 1, 0.5).tolist()
    [[1, 2]]
    """
    inside = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, chosen, True)
    worst = scores.masked_fill(~inside, torch.inf).sort(-1)
    best = scores.masked_fill(inside, -torch.inf).sort(-1, descending=True)
    count = min(chosen.shape[1], scores.shape[1] - chosen.shape[1], chosen.shape[1] if most is None else most)
    better = best.values[:, :count] > worst.values[:, :count] + margin  # the first ones of a row, if any
    inside.scatter_(1, worst.indices[:, :count], inside.gather(1, worst.indices[:, :count]) & ~better)
    inside.scatter_(1, best.indices[:, :count], better)
    return inside.nonzero()[:, 1].view_as(chosen)
