r"""Sampling from a masked diffusion model: which masked tokens are fixed at each step, and what they become.

Notable here:
- random order is the exact reverse process; a step that fixes nothing is skipped, which is exact too, as the positions
  do not depend on the model: there are never more passes than masked tokens
- order by confidence is a heuristic: fewer mistakes with few steps, less diversity
- tokens are sampled by cumulative sums in float64: lower precision loses rare tokens and lowers the entropy
- in semi-autoregressive blocks, finished blocks are cached and attend to nothing after them
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import torch
from annotated_types import Gt, Le
from jaxtyping import Bool, Float, Int
from torch import Tensor

from pippin.core.checks import NonNegativeFloat, PositiveInt, checked
from pippin.core.errors import DecodingFailure
from pippin.language.chunked_loss import MAX_LOGITS
from pippin.language.decoder import logits_of
from pippin.nn.kv_cache import MaskedCache, PastKeyValues

# Hidden states for the tokens of some rows of the batch, shifted to the position of the token that each predicts.
Predict = Callable[[Int[Tensor, "rows length"], Tensor], Float[Tensor, "rows length width"]]


@checked
@dataclass(frozen=True)
class UnmaskingOptions:
    """How masked tokens are filled.

    Args:
        steps: steps of the reverse process; 1 fixes all tokens at once.
        order: "random" follows the reverse process; "confidence" fixes the most confident tokens first.
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_p: sample from the smallest set of likeliest tokens whose probabilities reach p; None for all tokens.
        block_size: fill semi-autoregressively, from left to right in blocks of this many tokens, each in ``steps``
            steps; None fills all tokens at once. For masked tokens at the end of a text.

    Source: Gong et al. 2024, arXiv:2410.17891, algorithm 2; cached blocks are of other works (Arriola et al. 2025,
    arXiv:2503.09573; Wu et al. 2025, arXiv:2505.22618).
    """

    steps: PositiveInt = 64
    order: Literal["random", "confidence"] = "random"
    temperature: NonNegativeFloat = 1.0
    top_p: Annotated[float, Gt(0), Le(1)] | None = None
    block_size: PositiveInt | None = None


DEFAULT: Final = UnmaskingOptions()


@dataclass(frozen=True, eq=False)
class UnmaskingStep:
    """The text after a step that fixed at least one token.

    Attributes:
        step: number of the step, from 1; skipped ones count.
        ids: all tokens, with the mask token where none is fixed yet.
        masked: the positions where none is fixed yet.
        fixed: the positions that this step fixed.
    """

    step: int
    ids: Int[Tensor, "rows length"]
    masked: Bool[Tensor, "rows length"]
    fixed: Bool[Tensor, "rows length"]


def unmask(
    model: Any,
    ids: Int[Tensor, "rows length"],
    masked: Bool[Tensor, "rows length"],
    options: UnmaskingOptions,
    *,
    mask_id: int,
    shift: bool,
    generator: torch.Generator,
) -> Iterator[UnmaskingStep]:
    """The steps that fill all masked tokens; arguments are not checked.

    Args:
        model: a decoder.
        ids: known tokens; any value where masked.
        masked: the positions to fill.
        options: steps, order and sampling.
        mask_id: the mask token; never sampled.
        shift: whether a token is predicted from the position before it.
        generator: on the model's device.
    """
    ids = torch.where(masked, mask_id, ids)
    if options.block_size is not None:
        yield from _in_blocks(model, ids, masked, options, mask_id, shift, generator)
        return

    def predict(ids: Tensor, rows: Tensor) -> Tensor:
        hidden = model.hidden(ids, cache=MaskedCache(_full_mask(ids, 0)))
        return torch.cat([hidden[:, :1], hidden[:, :-1]], 1) if shift else hidden

    yield from reverse_process(model, predict, ids, masked, options, mask_id=mask_id, generator=generator)


@torch.no_grad()
def reverse_process(
    model: Any,
    predict: Predict,
    ids: Int[Tensor, "rows length"],
    masked: Bool[Tensor, "rows length"],
    options: UnmaskingOptions,
    *,
    mask_id: int,
    generator: torch.Generator,
) -> Iterator[UnmaskingStep]:
    """The reverse process over any part of a text.

    At step t = T, …, 1 each masked token is fixed with probability 1/t; or, in order of confidence, all but the
    ⌊n (t - 1) / T⌋ least confident of the n that were masked at first.

    Args:
        model: a model with ``lm_head``, the output matrix, and a ``config``.
        predict: returns hidden states of some rows (given with their indices), each at the position that it predicts.
        ids: the text, with the mask token where masked.
        masked: the positions to fill.
        options: steps, order and sampling.
        mask_id: the mask token; never sampled.
        generator: on the device of ``ids``.

    Raises:
        DecodingFailure: logits that are not finite.
    """
    ids, masked = ids.clone(), masked.clone()
    total = masked.sum(1)
    for left in range(options.steps, 0, -1):
        if options.order == "random":
            chance = torch.rand(ids.shape, generator=generator, device=ids.device)
            asked = masked & (chance * left < 1)
            quota = asked.sum(1)
        else:
            asked = masked
            quota = masked.sum(1) - total * (left - 1) // options.steps
        (rows,) = quota.nonzero(as_tuple=True)
        if not len(rows):
            continue
        asked, here = asked[rows], ids[rows]
        sampled, confidence = _sample(model, predict(here, rows)[asked], options, mask_id, generator)
        fixed = asked if options.order == "random" else _most_confident(asked, confidence, quota[rows])
        new = torch.zeros_like(masked)
        new[rows] = fixed
        ids[rows] = torch.where(fixed, torch.zeros_like(here).masked_scatter(asked, sampled), here)
        masked = masked & ~new
        yield UnmaskingStep(options.steps - left + 1, ids.clone(), masked, new)


def _most_confident(asked: Tensor, log_prob: Tensor, quota: Tensor) -> Tensor:
    """The tokens of each row with the highest confidence, as many as its quota."""
    confidence = torch.full(asked.shape, -torch.inf, device=asked.device).masked_scatter(asked, log_prob)
    ranks = confidence.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return asked & (ranks < quota[:, None])


def _sample(
    model: Any,
    hidden: Float[Tensor, "tokens width"],
    options: UnmaskingOptions,
    mask_id: int,
    generator: torch.Generator,
) -> tuple[Int[Tensor, tokens], Float[Tensor, tokens]]:
    """A sampled token for each hidden state, and its log-probability under the model at temperature 1."""
    sampled, confidence = [], []
    for part in hidden.split(max(1, MAX_LOGITS // (4 * model.config.vocab_size))):
        logits = logits_of(model, part).float()
        logits[:, mask_id] = -torch.inf
        scores = logits.log_softmax(-1)
        if bool(scores.isnan().any()):
            raise DecodingFailure("cannot sample a token: the model's logits are not finite; check its weights")
        token = scores.argmax(-1) if options.temperature == 0 else _pick(scores, options, generator)
        sampled.append(token)
        confidence.append(scores.gather(-1, token[:, None])[:, 0])
    return torch.cat(sampled), torch.cat(confidence)


def _pick(
    scores: Float[Tensor, "tokens vocab"], options: UnmaskingOptions, generator: torch.Generator
) -> Int[Tensor, tokens]:
    """Sample from each row by inverting its cumulative sum, in float64 where the device has it."""
    exact = torch.float32 if scores.device.type == "mps" else torch.float64
    weights = (scores.to(exact) / options.temperature).softmax(-1)
    if options.top_p is not None and options.top_p < 1:
        best, order = weights.sort(dim=-1, descending=True, stable=True)
        best = best * (best.cumsum(-1) - best < options.top_p)
        weights = torch.zeros_like(weights).scatter(-1, order, best)
    sums = weights.cumsum(-1)
    point = torch.rand(len(sums), 1, generator=generator, device=sums.device, dtype=exact) * sums[:, -1:]
    # rounded up to the total, a point would lie after every token
    point = torch.minimum(point, torch.nextafter(sums[:, -1:], torch.zeros_like(point)))
    return torch.searchsorted(sums, point, right=True)[:, 0]


@torch.no_grad()
def _in_blocks(
    model: Any,
    ids: Tensor,
    masked: Tensor,
    options: UnmaskingOptions,
    mask_id: int,
    shift: bool,
    generator: torch.Generator,
) -> Iterator[UnmaskingStep]:
    """Fill from left to right; a finished block is computed once more, to cache its keys and values.

    With a shift, the last token before a block is computed with it, as its hidden state predicts the block's first.
    """
    assert options.block_size is not None
    ids, masked, past, before = ids.clone(), masked.clone(), PastKeyValues(), int(shift)
    start = int(masked.any(0).nonzero()[0])
    for begin in range(start, ids.shape[1], options.block_size):
        end = min(begin + options.block_size, ids.shape[1])
        if begin - before > past.length:
            _cache(model, ids[:, past.length : begin], past, begin - before)

        def predict(block: Tensor, rows: Tensor, begin: int = begin) -> Tensor:
            new = torch.cat([ids[rows, begin - before : begin], block], 1)
            some = _rows(past, rows)
            hidden: Tensor = model.hidden(new, cache=MaskedCache(_full_mask(new, past.length), some))
            return hidden[:, : hidden.shape[1] - before]

        block = (ids[:, begin:end], masked[:, begin:end])
        for step in reverse_process(model, predict, *block, options, mask_id=mask_id, generator=generator):
            fixed = torch.zeros_like(masked)
            fixed[:, begin:end] = step.fixed
            ids[:, begin:end], masked[:, begin:end] = step.ids, step.masked
            yield UnmaskingStep(step.step, ids.clone(), masked.clone(), fixed)


def _cache(model: Any, new: Tensor, past: PastKeyValues, length: int) -> None:
    """Compute tokens that attend to each other and to the past; cache the first ``length`` positions of all."""
    model.hidden(new, cache=MaskedCache(_full_mask(new, past.length), past, keep=True))
    past.layers = {layer: (k[:, :, :length], v[:, :, :length]) for layer, (k, v) in past.layers.items()}
    past.length = length


def _rows(past: PastKeyValues, rows: Tensor) -> PastKeyValues:
    """The cached keys and values of some rows."""
    some = PastKeyValues()
    some.length = past.length
    some.layers = {layer: (k[rows], v[rows]) for layer, (k, v) in past.layers.items()}
    return some


def _full_mask(new: Tensor, before: int) -> Tensor:
    """The mask under which new tokens attend to each other and to all before them."""
    length = new.shape[1]
    return torch.ones(1, 1, length, before + length, dtype=torch.bool, device=new.device)
