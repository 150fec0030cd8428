r"""What a masked diffusion model is trained on: text of which some is hidden, and how likely it finds what is hidden.

Notable here:
- the mean of the loss is a bound of the negative log-likelihood in nats per token, whatever is packed into a row
- the end of a document is no input of a causal model, only a target; here it is put back, so that lengths are learnt
- what is masked is told by a mask of its own and never by an id
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument
from pippin.data.batches import IGNORE, TokenBatch
from pippin.language.readout import read_out
from pippin.nn.cache import Visible
from pippin.train.objective import Loss


class MaskedDiffusion:
    r"""The masked cross-entropy whose mean bounds the negative log-likelihood; an objective for `pippin.train.Trainer`.

    Each document draws $t \in (\epsilon, 1]$ and hides each of its tokens with probability t; the loss is
    $\frac1t \sum_{i\ \mathrm{masked}} -\log p(x_i \mid x_t)$. It counts the tokens that may be masked, so its mean is
    the bound in nats per token. Only tokens that the batch learns are ever masked: prompts are read as they are. The
    metric "accuracy" is weighted as the loss is.

    Args:
        mask_id: the token that stands for what is masked.
        shift: whether a token is predicted from the place before it; the first of a document is then never masked.
        anneal: over so many updates attention grows from causal to full: each pair of places that causal order hides is
            visible with a probability that rises to 1, drawn once for a whole pass; 0 for full attention at once.
        eps: the least t.
        weighting: "elbo" as above; "uniform" leaves 1/t out and counts the masked tokens.
        stratified: spread the t of a batch evenly, which lowers the variance; False draws each on its own.

    Raises:
        InvalidArgument: a value outside its range.

    Source: Gong et al. 2024, arXiv:2410.17891, eq. for L_t and algorithm 1.
    """

    unit = "tokens"

    def __init__(
        self,
        mask_id: int,
        *,
        shift: bool = True,
        anneal: int = 0,
        eps: float = 1e-3,
        weighting: str = "elbo",
        stratified: bool = True,
    ) -> None:
        if mask_id < 0:
            raise InvalidArgument(f"mask_id is {mask_id}; give the id of a token")
        if anneal < 0:
            raise InvalidArgument(f"anneal is {anneal}; give a number of updates, 0 for none")
        if not 0 < eps < 1:
            raise InvalidArgument(f"eps must be between 0 and 1, got {eps}")
        if weighting not in ("elbo", "uniform"):
            raise InvalidArgument(f"weighting is {weighting!r}; choose elbo or uniform")
        self.mask_id, self.shift, self.anneal, self.eps = mask_id, shift, anneal, eps
        self.weighting, self.stratified, self.step = weighting, stratified, 0

    @property
    def rho(self) -> float:
        """The probability with which a pair is visible that causal order hides."""
        return min(1.0, (self.step + 1) / self.anneal) if self.anneal else 1.0

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
            drawn = torch.rand(length, length, generator=generator, device=device) < self.rho
            visible &= drawn | drawn.new_ones(length, length).tril()
        hidden = masked_states(model, ids, masked, self.mask_id, self.shift, visible[:, None])
        targets, weights = ids[masked], t[masked].reciprocal()
        if self.weighting == "uniform":
            weights = torch.ones_like(weights)

        def score(logits: Tensor, part: slice) -> tuple[Tensor, dict[str, Tensor]]:
            scores, wanted = logits.float().log_softmax(-1), targets[part, None]
            chosen = scores.gather(-1, wanted)[:, 0]
            right = chosen >= scores.detach().amax(-1)
            return -(weights[part] * chosen).sum(), {"right": (weights[part] * right).sum()}

        total, sums = read_out(model, hidden, score)
        counted = maskable if self.weighting == "elbo" else masked
        return Loss(total, float(counted.sum()), {"accuracy": sums.get("right", total.detach().new_zeros(()))})

    def after_step(self, model: nn.Module, step: int) -> None:
        """Attention grows with the updates."""
        self.step = step

    def state_dict(self) -> dict[str, Tensor]:
        """How far it has grown."""
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from there."""
        self.step = int(state["step"])


def masked_states(
    model: Any,
    ids: Int[Tensor, "rows length"],
    masked: Bool[Tensor, "rows length"],
    mask_id: int,
    shift: bool,
    visible: Bool[Tensor, "#rows #heads length length"] | None = None,
) -> Float[Tensor, "masked width"]:
    """What the output matrix reads to predict each masked token, in the order of ``ids[masked]``.

    Args:
        model: a decoder.
        ids: the whole text; what stands where it is masked is not read.
        masked: what is hidden and to be predicted; with a shift, never the first token.
        mask_id: what is read in place of it.
        shift: whether a token is predicted from the place before it.
        visible: who sees whom; None for full attention.
    """
    if visible is None:
        visible = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool, device=ids.device)
    hidden: Tensor = model.hidden(torch.where(masked, mask_id, ids), cache=Visible(visible))
    return hidden[:, :-1][masked[:, 1:]] if shift else hidden[masked]


def _sequences(batch: TokenBatch, shift: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The documents of a batch with their last targets put back: ids, number of the document, whether it may be masked.

    Each (rows, length + documents in the fullest row); what fills the gaps has the number after the last document.
    """
    rows, length = batch.ids.shape
    counts = torch.tensor(batch.documents or (length,) * rows)
    ends = counts.cumsum(0)
    row = (ends - 1) // length
    first = torch.searchsorted(row, torch.arange(rows))  # the first document of each row
    number = torch.arange(len(counts)).repeat_interleave(counts)  # the document of each token
    place = torch.arange(rows * length)
    place = place % length + number - first[place // length]  # where it comes to stand in its row
    behind = torch.arange(len(counts))
    behind = (ends - 1) % length + 1 + behind - first[row]
    shape = (rows, length + int(row.bincount(minlength=rows).max()))
    device = batch.ids.device
    at = torch.arange(rows).repeat_interleave(length) * shape[1] + place
    at, slots, starts = at.to(device), (row * shape[1] + behind).to(device), (ends - counts).to(device)
    number, ends, targets = number.to(device), ends.to(device), batch.targets.flatten()

    wanted = targets != IGNORE
    ids = batch.ids.new_zeros(shape).flatten()
    ids[at], ids[slots] = batch.ids.flatten(), targets[ends - 1].clamp(min=0)
    document = torch.full_like(ids, len(counts))
    document[at] = number
    document[slots] = torch.where(wanted[ends - 1], number[ends - 1], len(counts))
    may = wanted.roll(1)  # a token is masked where the place before it was to learn it
    may[starts] = False if shift else wanted[starts]
    maskable = torch.zeros_like(ids, dtype=torch.bool)
    maskable[at], maskable[slots] = may, wanted[ends - 1]
    return ids.view(shape), document.view(shape), maskable.view(shape)
