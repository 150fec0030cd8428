r"""Text from a masked diffusion model: which of the masked tokens are fixed at each step, and what they become.

Notable here:
- random order is the exact reverse of the noise; a step that fixes nothing is skipped, which changes nothing: where it
  fixes does not depend on what the model says, so there are never more passes than masked tokens
- order by confidence is a heuristic: fewer mistakes at few steps, less variety
- tokens are drawn from sums in float64: in lower precision rare tokens are lost, and text is surer than its model
- in blocks, what is finished keeps its keys and values and is not computed again; it then sees nothing after it
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pippin.core.errors import DecodingFailure, InvalidArgument
from pippin.language.readout import LOGITS
from pippin.nn.cache import Past, Visible

ORDERS = ("random", "confidence")

# Hidden states of the given tokens in some rows, moved so that each stands where the token is that it predicts.
Predict = Callable[[Int[Tensor, "rows length"], Tensor], Float[Tensor, "rows length width"]]


@dataclass(frozen=True)
class Unmasking:
    """How masked tokens are filled.

    Args:
        steps: of the reverse process, at least 1; one fixes everything at once, as many as there are tokens one by one.
        order: "random" follows the reverse process; "confidence" fixes the surest tokens first.
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_p: only the smallest set of likeliest tokens whose probabilities reach p, in (0, 1]; None for all.
        block_size: fill from left to right in blocks of so many tokens, each in all the steps; None fills everything
            together. For text that nothing follows.

    Raises:
        InvalidArgument: a value outside its range.

    Source: Gong et al. 2024, arXiv:2410.17891, algorithm 2; blocks with kept keys are of other works (Arriola et al.
    2025, arXiv:2503.09573; Wu et al. 2025, arXiv:2505.22618).
    """

    steps: int = 64
    order: str = "random"
    temperature: float = 1.0
    top_p: float | None = None
    block_size: int | None = None

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise InvalidArgument(f"steps must be at least 1, got {self.steps}")
        if self.order not in ORDERS:
            raise InvalidArgument(f"order is {self.order!r}; choose random or confidence")
        if not 0 <= self.temperature < math.inf:
            raise InvalidArgument(f"temperature must be a finite number, 0 or above, got {self.temperature}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InvalidArgument(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.block_size is not None and self.block_size < 1:
            raise InvalidArgument(f"block_size must be at least 1 token, got {self.block_size}")


DEFAULT: Final = Unmasking()


@dataclass(frozen=True, eq=False)
class Step:
    """The text after a step that fixed something.

    Attributes:
        number: of the step, counted from 1; skipped ones count.
        ids: all tokens, the mask token where none is fixed yet.
        masked: where none is fixed yet.
        fixed: what this step fixed.
    """

    number: int
    ids: Int[Tensor, "rows length"]
    masked: Bool[Tensor, "rows length"]
    fixed: Bool[Tensor, "rows length"]


def unmask(
    model: Any,
    ids: Int[Tensor, "rows length"],
    masked: Bool[Tensor, "rows length"],
    how: Unmasking,
    *,
    mask_id: int,
    shift: bool,
    generator: torch.Generator,
) -> Iterator[Step]:
    """The steps that fill all that is masked; nothing is checked.

    Args:
        model: a decoder.
        ids: what is known; anything where it is masked.
        masked: what to fill.
        how: steps, order, and how tokens are drawn.
        mask_id: the token that stands for what is masked; never drawn.
        shift: whether a token is predicted from the place before it.
        generator: on the model's device.
    """
    ids = torch.where(masked, mask_id, ids)
    if how.block_size is not None:
        yield from _in_blocks(model, ids, masked, how, mask_id, shift, generator)
        return

    def predict(ids: Tensor, rows: Tensor) -> Tensor:
        hidden = model.hidden(ids, cache=Visible(_everything(ids, 0)))
        return torch.cat([hidden[:, :1], hidden[:, :-1]], 1) if shift else hidden

    yield from reverse(model, predict, ids, masked, how, mask_id=mask_id, generator=generator)


@torch.no_grad()
def reverse(
    model: Any,
    predict: Predict,
    ids: Int[Tensor, "rows length"],
    masked: Bool[Tensor, "rows length"],
    how: Unmasking,
    *,
    mask_id: int,
    generator: torch.Generator,
) -> Iterator[Step]:
    """The reverse process over any part of a text.

    At step t = T, …, 1 each masked token is fixed with probability 1/t; or, in order of confidence, all but the
    ⌊n (t - 1) / T⌋ least sure of the n that were masked at first.

    Args:
        model: what has ``lm_head``, the output matrix, and a ``config``.
        predict: gives the hidden states of some rows (whose numbers come second), each where the token is that it
            predicts.
        ids: the mask token where a token is masked.
        masked: what to fill.
        how: steps, order, and how tokens are drawn.
        mask_id: never drawn.
        generator: on the device of ``ids``.

    Raises:
        DecodingFailure: logits that are not finite.
    """
    ids, masked = ids.clone(), masked.clone()
    total = masked.sum(1)
    for left in range(how.steps, 0, -1):
        if how.order == "random":
            chance = torch.rand(ids.shape, generator=generator, device=ids.device)
            asked = masked & (chance * left < 1)
            quota = asked.sum(1)
        else:
            asked = masked
            quota = masked.sum(1) - total * (left - 1) // how.steps
        (rows,) = quota.nonzero(as_tuple=True)
        if not len(rows):
            continue
        asked, here = asked[rows], ids[rows]
        drawn, sure = _draw(model, predict(here, rows)[asked], how, mask_id, generator)
        fixed = asked if how.order == "random" else _surest(asked, sure, quota[rows])
        new = torch.zeros_like(masked)
        new[rows] = fixed
        ids[rows] = torch.where(fixed, torch.zeros_like(here).masked_scatter(asked, drawn), here)
        masked = masked & ~new
        yield Step(how.steps - left + 1, ids.clone(), masked, new)


def _surest(asked: Tensor, sure: Tensor, quota: Tensor) -> Tensor:
    """Of the tokens asked for, so many of each row as its quota says: those with the highest confidence."""
    confidence = torch.full(asked.shape, -torch.inf, device=asked.device).masked_scatter(asked, sure)
    ranks = confidence.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return asked & (ranks < quota[:, None])


def _draw(
    model: Any,
    hidden: Float[Tensor, "tokens width"],
    how: Unmasking,
    mask_id: int,
    generator: torch.Generator,
) -> tuple[Int[Tensor, tokens], Float[Tensor, tokens]]:
    """A token for each hidden state, and its log-probability to the model at temperature 1."""
    drawn, sure = [], []
    for part in hidden.split(max(1, LOGITS // (4 * model.config.vocab_size))):
        logits = model.lm_head(part).float()
        logits[:, mask_id] = -torch.inf
        scores = logits.log_softmax(-1)
        if bool(scores.isnan().any()):
            raise DecodingFailure("cannot draw a token: the model's logits are not finite; check its weights")
        token = scores.argmax(-1) if how.temperature == 0 else _pick(scores, how, generator)
        drawn.append(token)
        sure.append(scores.gather(-1, token[:, None])[:, 0])
    return torch.cat(drawn), torch.cat(sure)


def _pick(scores: Float[Tensor, "tokens vocab"], how: Unmasking, generator: torch.Generator) -> Int[Tensor, tokens]:
    """Draw from each row by inverting its cumulative sum, in float64 where the device has it."""
    exact = torch.float32 if scores.device.type == "mps" else torch.float64
    weights = (scores.to(exact) / how.temperature).softmax(-1)
    if how.top_p is not None and how.top_p < 1:
        best, order = weights.sort(dim=-1, descending=True, stable=True)
        best = best * (best.cumsum(-1) - best < how.top_p)
        weights = torch.zeros_like(weights).scatter(-1, order, best)
    sums = weights.cumsum(-1)
    point = torch.rand(len(sums), 1, generator=generator, device=sums.device, dtype=exact) * sums[:, -1:]
    # a point that was rounded up to the end would lie behind every token
    point = torch.minimum(point, torch.nextafter(sums[:, -1:], torch.zeros_like(point)))
    return torch.searchsorted(sums, point, right=True)[:, 0]


@torch.no_grad()
def _in_blocks(
    model: Any,
    ids: Tensor,
    masked: Tensor,
    how: Unmasking,
    mask_id: int,
    shift: bool,
    generator: torch.Generator,
) -> Iterator[Step]:
    """Fill from left to right; a finished block is computed once more, and its keys and values are kept.

    With a shift, the last token before a block is computed with it, as its hidden state predicts the block's first.
    """
    assert how.block_size is not None
    ids, masked, past, before = ids.clone(), masked.clone(), Past(), int(shift)
    start = int(masked.any(0).nonzero()[0])
    for begin in range(start, ids.shape[1], how.block_size):
        end = min(begin + how.block_size, ids.shape[1])
        if begin - before > past.length:
            _keep(model, ids[:, past.length : begin], past, begin - before)

        def predict(block: Tensor, rows: Tensor, begin: int = begin) -> Tensor:
            new = torch.cat([ids[rows, begin - before : begin], block], 1)
            some = _rows(past, rows)
            hidden: Tensor = model.hidden(new, cache=Visible(_everything(new, past.length), some))
            return hidden[:, : hidden.shape[1] - before]

        place = (ids[:, begin:end], masked[:, begin:end])
        for step in reverse(model, predict, *place, how, mask_id=mask_id, generator=generator):
            fixed = torch.zeros_like(masked)
            fixed[:, begin:end] = step.fixed
            ids[:, begin:end], masked[:, begin:end] = step.ids, step.masked
            yield Step(step.number, ids.clone(), masked.clone(), fixed)


def _keep(model: Any, new: Tensor, past: Past, length: int) -> None:
    """Compute tokens that see each other and the past, and keep the keys and values of the first ``length`` of all."""
    model.hidden(new, cache=Visible(_everything(new, past.length), past, keep=True))
    past.layers = {layer: (k[:, :, :length], v[:, :, :length]) for layer, (k, v) in past.layers.items()}
    past.length = length


def _rows(past: Past, rows: Tensor) -> Past:
    """The past of some rows."""
    some = Past()
    some.length = past.length
    some.layers = {layer: (k[rows], v[rows]) for layer, (k, v) in past.layers.items()}
    return some


def _everything(new: Tensor, before: int) -> Tensor:
    """The mask under which new tokens see each other and all before them."""
    length = new.shape[1]
    return torch.ones(1, 1, length, before + length, dtype=torch.bool, device=new.device)
