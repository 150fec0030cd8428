r"""Objectives of experts chosen by the prompt: together with the language model, or for a mixture that is trained.

Notable here:
- the set chosen from one stretch of a document serves the next stretch, so it never depends on its own targets, and
  keys and values that were computed under other sets are in sight, as they are when an answer goes on
- the first stretch is read under the set that it leads to, as a prompt is, and has no loss
- the balance loss is that of a mixture, over sets in place of tokens: $E \sum_e f_e p_e$ with $f_e$ the share of the
  choices that fell on an expert and $p_e$ its mean share of the weights

Source: the schedule and the chunks: Hou et al. 2025, arXiv:2501.02086, section 3; the balance loss: Fedus et al. 2022,
arXiv:2101.03961, equation 4. That experts of AFM 3 Core Advanced are trained so is our reconstruction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.core.checks import NonNegativeFloat, PositiveInt, checked
from pippin.data.token_batches import IGNORE, TokenBatch
from pippin.language.decoder import Decoder
from pippin.language.methods.instruction_pruning.loss import PruningSchedule
from pippin.language.methods.prompt_experts.router import PromptRouter
from pippin.language.objectives import cross_entropy
from pippin.language.router_losses import watch_routers
from pippin.nn.expert_mask import ExpertMaskSlices
from pippin.nn.feedforward.feedforward import Router
from pippin.nn.kv_cache import NoCache, PackedDocuments
from pippin.nn.soft_top_k import soft_top_k, top_k_indices
from pippin.train.objective import CountsSteps, Loss

_AS_IT_ENDS: Final = PruningSchedule()


class PromptRoutedDecoder(nn.Module):
    """A decoder with the router of its prompts, to be trained together.

    Args:
        base: a mixture of experts, not packed.
        router: chooses its experts.
        router_lr_scale: factor on the learning rate of the router; at the full rate, beside a base that is trained as
            well, its sets differ from stretch to stretch of the same text.

    Raises:
        InvalidArgument: the router was made for another decoder.
    """

    def __init__(self, base: Decoder, router: PromptRouter, *, router_lr_scale: float = 0.1) -> None:
        super().__init__()
        router.check(base.config)
        self.base, self.router = base, router
        for parameter in router.parameters():
            parameter.lr_scale = router_lr_scale  # type: ignore[attr-defined]

    def hidden(
        self, ids: Int[Tensor, "rows tokens"], masks: ExpertMaskSlices, documents: Sequence[int] | None = None
    ) -> Float[Tensor, "rows tokens width"]:
        """Normalized hidden states under masks.

        Args:
            ids: documents of one length, or one row of packed documents.
            masks: of slices of the flattened tokens.
            documents: lengths of packed documents; None for rows.
        """
        base = self.base
        cache = NoCache() if documents is None else PackedDocuments(documents)
        x = base.embed(ids, cache.positions)
        x = base.forward_layers(x, cache, per_layer=base.per_layer_inputs(ids, x), experts=masks)
        hidden: Tensor = base.norm(x)
        return hidden


class _Stretches(NamedTuple):
    """The documents of a batch that are longer than a stretch, packed, and the stretches behind which tokens follow."""

    ids: Int[Tensor, "rows tokens"]
    targets: Int[Tensor, tokens]
    documents: list[int] | None
    whole: Int[Tensor, "stretches length"]
    spans: list[list[slice]]
    """Of each document and each of its whole stretches the tokens that its set serves, in the flattened ids."""


class _Chunked:
    """Base of both objectives: documents in stretches."""

    unit = "tokens"

    def stretches(self, batch: TokenBatch, length: int) -> _Stretches | None:
        """The stretches of a batch; None where no document is longer than one."""
        texts = [(ids, targets) for ids, targets in _documents(batch) if len(ids) > length]
        if not texts:
            return None
        counts = [len(ids) for ids, _ in texts]
        packed, alike = torch.cat([ids for ids, _ in texts]), len(set(counts)) == 1
        whole, spans, targets, start = [], [], [], 0
        for ids, wanted in texts:
            used = (len(ids) - 1) // length  # whole stretches behind which tokens follow
            whole.append(ids[: used * length].view(used, length))
            ends = [*range(2 * length, (used + 1) * length, length), len(ids)]
            begins = [0, *ends[:-1]]
            spans.append([slice(start + begin, start + end) for begin, end in zip(begins, ends, strict=True)])
            scored = wanted.clone()
            scored[: length - 1] = IGNORE  # the set was chosen by what these would predict
            targets.append(scored)
            start += len(ids)
        rows = packed.view(len(texts), -1) if alike else packed[None]
        return _Stretches(rows, torch.cat(targets), None if alike else counts, torch.cat(whole), spans)


class PromptRouting(_Chunked, CountsSteps):
    """Next tokens, each stretch under the experts that were chosen from the one before it.

    An objective for `pippin.train.Trainer` and a `PromptRoutedDecoder`. The metrics are "accuracy"; "balance", 1 where
    all experts are chosen equally often; and "swapped", the share of a set that the next one of its document replaces.

    Args:
        balance: weight of the balance loss.
        stability: weight of the share that is swapped, of soft weights.
        schedule: how the number of chosen experts and the temperature come down; none for evaluation.
        keeps: numbers of experts that steps take in turn, for a model that is run with several; empty for the model's.
    """

    @checked
    def __init__(
        self,
        *,
        balance: NonNegativeFloat = 0.01,
        stability: NonNegativeFloat = 0.0,
        schedule: PruningSchedule = _AS_IT_ENDS,
        keeps: Sequence[PositiveInt] = (),
    ) -> None:
        self.balance, self.stability, self.schedule, self.keeps = balance, stability, schedule, tuple(keeps)

    def __call__(self, model: nn.Module, batch: TokenBatch, generator: torch.Generator | None = None) -> Loss:
        """The loss of a batch; ``generator`` is not used."""
        assert isinstance(model, PromptRoutedDecoder)
        router, config = model.router, model.router.config
        found = self.stretches(batch, config.stretch)
        if found is None:
            nothing = next(p for p in model.parameters() if p.requires_grad).sum() * 0.0
            return Loss(nothing, 0.0, {"accuracy": 0.0, "balance": 0.0, "swapped": 0.0})
        keep = self.keeps[self.step % len(self.keeps)] if self.keeps else config.keep
        keep, eps = self.schedule.at(self.step, intermediate_size=config.num_experts, keep=keep, eps=config.eps or 1.0)
        keep = max(keep, config.num_experts_per_tok)
        with torch.no_grad():  # what reads is trained by the language model alone
            states = router.read(model.base, found.whole)
        scores = router(states)
        chosen = top_k_indices(scores.detach(), keep)
        spans = [span for spans in found.spans for span in spans]
        masks = [(router.mask(own, by, eps), span) for own, by, span in zip(chosen, scores, spans, strict=True)]
        hidden = model.hidden(found.ids, masks, found.documents).flatten(0, 1)
        is_target = found.targets != IGNORE
        total, correct = cross_entropy(model.base, hidden[is_target], found.targets[is_target])
        count = float(is_target.sum())
        weights = soft_top_k(scores, keep, eps)
        balance, swapped = _balance(weights, chosen), _swapped(weights, [len(spans) for spans in found.spans])
        total = total + count * (self.balance * balance + self.stability * swapped)
        metrics = {"accuracy": correct, "balance": count * balance.detach(), "swapped": count * swapped.detach()}
        return Loss(total, count, metrics)


class ExpertForecast(_Chunked):
    """For a mixture that is trained: the router forecasts how often the next stretch will take each expert.

    An objective for `pippin.train.Trainer` and a `PromptRoutedDecoder` whose base needs no gradients. The loss is the
    cross-entropy of the shares of the choices, over the mixtures; the metric "covered" is the share of the choices that
    fall on the experts that would be chosen.
    """

    unit = "stretches"

    def __call__(self, model: nn.Module, batch: TokenBatch, generator: torch.Generator | None = None) -> Loss:
        """The loss of a batch; ``generator`` is not used."""
        assert isinstance(model, PromptRoutedDecoder)
        found = self.stretches(batch, model.router.config.stretch)
        if found is None:
            nothing = next(p for p in model.parameters() if p.requires_grad).sum() * 0.0
            return Loss(nothing, 0.0, {"covered": 0.0})
        with torch.no_grad():
            states = model.router.read(model.base, found.whole)
            shares = self._shares(model, found)
        scores = model.router(states)
        total = -(shares * F.log_softmax(scores, -1)).sum((-1, -2)).sum() / scores.shape[1]
        best = scores.detach().topk(model.router.config.keep, -1).indices
        covered = shares.gather(-1, best).sum(-1).mean(-1).sum()
        return Loss(total, float(len(scores)), {"covered": covered})

    def _shares(self, model: PromptRoutedDecoder, found: _Stretches) -> Float[Tensor, "stretches layers experts"]:
        """The shares of the choices that tokens behind each stretch make, all experts allowed."""
        with watch_routers(model.base) as log:
            model.hidden(found.ids, (), found.documents)
        chosen = {id(router): each for (router, _), each in zip(log.shares, log.chosen, strict=True)}
        own = [chosen[id(router)] for router in _routers(model)]
        length, experts = model.router.config.stretch, model.router.config.num_experts
        rows = []
        for spans in found.spans:
            for number, span in enumerate(spans):
                behind = slice(span.start + length, span.stop) if number == 0 else span  # not the stretch itself
                counts = [each[behind].flatten().bincount(minlength=experts) for each in own]
                rows.append(torch.stack([each / each.sum() for each in counts]))
        return torch.stack(rows)


def _routers(model: PromptRoutedDecoder) -> list[Router]:
    """The routers of the mixtures whose experts are chosen."""
    layers = [model.base.layers[index] for index in model.router.config.layers]
    return [next(part for part in layer.modules() if isinstance(part, Router)) for layer in layers]


def _documents(batch: TokenBatch) -> Iterator[tuple[Tensor, Tensor]]:
    """The documents of a batch: ids and targets."""
    rows, length = batch.ids.shape
    counts = [length] * rows if batch.documents is None else list(batch.documents)
    return zip(batch.ids.flatten().split(counts), batch.targets.flatten().split(counts), strict=True)


def _balance(
    weights: Float[Tensor, "sets layers experts"], chosen: Int[Tensor, "sets layers kept"]
) -> Float[Tensor, ""]:
    """The balance loss of sets, the mean over the mixtures: 1 where all experts are alike."""
    experts = weights.shape[-1]
    frequency = F.one_hot(chosen, experts).float().mean((0, 2))
    affinity = (weights / weights.sum(-1, keepdim=True)).mean(0)
    return experts * (frequency * affinity).sum(-1).mean()


def _swapped(weights: Float[Tensor, "sets layers experts"], counts: Sequence[int]) -> Float[Tensor, ""]:
    """The share of a set's weights that the next one of its document replaces; 0 without a next one."""
    kept = weights[0, 0].sum().detach()
    moved = [(own[1:] - own[:-1]).abs().sum(-1).flatten() / (2 * kept) for own in weights.split(list(counts))]
    shares = torch.cat(moved)
    return shares.mean() if len(shares) else weights.sum() * 0.0
