r"""The objective of masked diffusion: the cross-entropy of masked tokens, weighted to bound the likelihood.

Notable here:
- the mean of the loss bounds the negative log-likelihood in nats per token, whatever is packed into a row
- the end token of a document is only a target of a causal model, not an input; here it is appended, so that the model
  learns lengths
- masked positions are given by a boolean mask, never by comparing ids with the mask token
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from pippin.core.checks import NonNegativeInt, OpenFraction, checked
from pippin.data.token_batches import IGNORE, TokenBatch
from pippin.language.chunked_loss import sum_in_chunks
from pippin.nn.kv_cache import MaskedCache
from pippin.train.objective import CountsSteps, Loss


class MaskedDiffusion(CountsSteps):
    r"""The masked cross-entropy whose mean bounds the negative log-likelihood; an objective for `pippin.train.Trainer`.

    For each document $t \in (\epsilon, 1]$ is sampled and each token is masked with probability t; the loss is
    $\frac1t \sum_{i\ \mathrm{masked}} -\log p(x_i \mid x_t)$. It counts the maskable tokens, so its mean is the bound
    in nats per token. Only tokens with a target are maskable: prompts are read as they are. The metric "accuracy" is
    weighted like the loss.

    Args:
        mask_id: the mask token.
        shift: whether a token is predicted from the position before it; the first of a document is then never masked.
        anneal_steps: steps of attention annealing: each pair of positions that causal attention hides becomes visible
            with a probability that rises to 1, sampled once for a whole pass; 0 for full attention from the start.
        eps: the smallest t.
        weighting: "elbo" as above; "uniform" leaves 1/t out and counts the masked tokens.
        stratified: spread the t of a batch evenly, which lowers the variance; False samples each independently.

    Source: Gong et al. 2024, arXiv:2410.17891, eq. for L_t and algorithm 1.
    """

    unit = "tokens"

    @checked
    def __init__(
        self,
        mask_id: NonNegativeInt,
        *,
        shift: bool = True,
        anneal_steps: NonNegativeInt = 0,
        eps: OpenFraction = 1e-3,
        weighting: Literal["elbo", "uniform"] = "elbo",
        stratified: bool = True,
    ) -> None:
        self.mask_id, self.shift, self.anneal_steps, self.eps = mask_id, shift, anneal_steps, eps
        self.weighting, self.stratified = weighting, stratified

    @property
    def rho(self) -> float:
        """The probability with which a pair of positions is visible that causal attention hides."""
        return min(1.0, (self.step + 1) / self.anneal_steps) if self.anneal_steps else 1.0

    def __call__(self, model: nn.Module, batch: TokenBatch, generator: torch.Generator) -> Loss:
        """The loss of a batch."""
        ids, document, maskable = _sequences(batch, self.shift)
        device = ids.device
        count = len(batch.documents or ids) + 1  # of documents; the last one is padding
        t = torch.rand(1 if self.stratified else count, generator=generator, device=device)
        if self.stratified:
            t = (t + torch.arange(count, device=device) / (count - 1)) % 1
        t = (self.eps + (1 - self.eps) * t)[document]
        masked = maskable & (torch.rand(ids.shape, generator=generator, device=device) < t)
        visible = document[:, :, None] == document[:, None, :]
        if self.rho < 1:
            length = ids.shape[1]
            revealed = torch.rand(length, length, generator=generator, device=device) < self.rho
            visible &= revealed | revealed.new_ones(length, length).tril()
        hidden = masked_states(model, ids, masked, self.mask_id, self.shift, visible[:, None])
        targets, weights = ids[masked], t[masked].reciprocal()
        if self.weighting == "uniform":
            weights = torch.ones_like(weights)

        def score(logits: Tensor, part: slice) -> tuple[Tensor, dict[str, Tensor]]:
            scores, wanted = logits.float().log_softmax(-1), targets[part, None]
            chosen = scores.gather(-1, wanted)[:, 0]
            correct = chosen >= scores.detach().amax(-1)
            return -(weights[part] * chosen).sum(), {"right": (weights[part] * correct).sum()}

        total, sums = sum_in_chunks(model, hidden, score)
        counted = maskable if self.weighting == "elbo" else masked
        return Loss(total, float(counted.sum()), {"accuracy": sums.get("right", total.detach().new_zeros(()))})


def masked_states(
    model: Any,
    ids: Int[Tensor, "rows length"],
    masked: Bool[Tensor, "rows length"],
    mask_id: int,
    shift: bool,
    visible: Bool[Tensor, "#rows #heads length length"] | None = None,
) -> Float[Tensor, "masked width"]:
    """The hidden states that each masked token is predicted from, in the order of ``ids[masked]``.

    Args:
        model: a decoder.
        ids: the whole text; values at masked positions are not read.
        masked: the positions to predict; with a shift, never the first.
        mask_id: the mask token, which is read there.
        shift: whether a token is predicted from the position before it.
        visible: which position attends to which; None for full attention.
    """
    if visible is None:
        visible = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device)
    hidden: Tensor = model.hidden(torch.where(masked, mask_id, ids), cache=MaskedCache(visible))
    return hidden[:, :-1][masked[:, 1:]] if shift else hidden[masked]


def _sequences(batch: TokenBatch, shift: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The documents of a batch with their last targets put back: ids, number of the document, maskable.

    Each of shape (rows, length + documents in the fullest row); padding has the number after the last document.
    """
    rows, length = batch.ids.shape
    counts = torch.tensor(batch.documents or (length,) * rows)
    ends = counts.cumsum(0)
    row = (ends - 1) // length
    first = torch.searchsorted(row, torch.arange(rows))  # the first document of each row
    number = torch.arange(len(counts)).repeat_interleave(counts)  # the document of each token
    position = torch.arange(rows * length)
    position = position % length + number - first[position // length]  # where it comes to stand in its row
    behind = torch.arange(len(counts))
    behind = (ends - 1) % length + 1 + behind - first[row]
    shape = (rows, length + int(row.bincount(minlength=rows).max()))
    device = batch.ids.device
    at = torch.arange(rows).repeat_interleave(length) * shape[1] + position
    at, slots, starts = at.to(device), (row * shape[1] + behind).to(device), (ends - counts).to(device)
    number, ends, targets = number.to(device), ends.to(device), batch.targets.flatten()

    wanted = targets != IGNORE
    ids = batch.ids.new_zeros(shape).flatten()
    ids[at], ids[slots] = batch.ids.flatten(), targets[ends - 1].clamp(min=0)
    document = torch.full_like(ids, len(counts))
    document[at] = number
    document[slots] = torch.where(wanted[ends - 1], number[ends - 1], len(counts))
    is_maskable = wanted.roll(1)  # maskable where the position before it has a target
    is_maskable[starts] = False if shift else wanted[starts]
    maskable = torch.zeros_like(ids, dtype=torch.bool)
    maskable[at], maskable[slots] = is_maskable, wanted[ends - 1]
    return ids.view(shape), document.view(shape), maskable.view(shape)
