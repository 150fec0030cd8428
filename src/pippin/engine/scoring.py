"""How likely given continuations of a prompt are: one pass over all of them together, after one over the prompt.

Notable here:
- the continuations lie end to end in one row, each with its own positions and its own view, so nothing is padded and
  the prompt's keys are not copied
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.core.errors import ContextOverflow, InvalidArgument
from pippin.engine.cache import Branches, DenseCache
from pippin.language.load import LanguageModel
from pippin.language.transformer import Decoder
from pippin.nn.lora import Adapter

Group = list[list[int]]


def check(model: LanguageModel, prompt: Sequence[int], continuations: Sequence[Sequence[int]], size: int) -> None:
    """Raise what cannot be scored by a model that has room for ``size`` tokens.

    Raises:
        InvalidArgument: an empty prompt or continuation, or an id outside the vocabulary.
        ContextOverflow: the prompt and its longest continuation do not fit.
    """
    if not len(prompt):
        raise InvalidArgument("the prompt is empty; give at least one token")
    check_ids(model, prompt)
    for index, ids in enumerate(continuations):
        if not len(ids):
            raise InvalidArgument(f"continuation {index} is empty; give at least one token")
        check_ids(model, ids)
    need = len(prompt) + max(map(len, continuations), default=0)
    if need > size:
        raise ContextOverflow(
            f"the prompt of {len(prompt):,} tokens and its longest continuation need {need:,} tokens, and there "
            f"is room for {size:,}; shorten one of them or take another model",
            context_size=size,
            token_count=need,
        )


def check_ids(model: LanguageModel, ids: Sequence[int]) -> None:
    """Raise for a token id that the model does not have.

    Raises:
        InvalidArgument: an id outside the vocabulary.
    """
    low, high = min(ids), max(ids)
    if low < 0 or high >= model.config.vocab_size:
        raise InvalidArgument(
            f"token id {low if low < 0 else high} is outside the vocabulary of {model.config.vocab_size:,}"
        )


def groups(continuations: Sequence[Sequence[int]], limit: int) -> list[Group]:
    """The continuations in order, in groups of at most ``limit`` tokens (or of one continuation that is longer).

    >>> groups([[1, 2], [3], [4, 5, 6, 7], [8]], 3)
    [[[1, 2], [3]], [[4, 5, 6, 7]], [[8]]]
    """
    result: list[Group] = []
    total = limit
    for ids in continuations:
        if total + len(ids) > limit:
            result.append([])
            total = 0
        result[-1].append(list(ids))
        total += len(ids)
    return result


def room(groups: Sequence[Group]) -> int:
    """Tokens that a cache needs behind the prompt to score these groups."""
    return max((sum(map(len, group)) for group in groups), default=0)


def scores(
    module: Decoder,
    cache: DenseCache,
    logits: Float[Tensor, vocab],
    groups: Sequence[Group],
    adapter: Adapter | None,
) -> Iterator[list[float]]:
    """Sum of the natural logarithms of the probabilities of each continuation; one group, and one pass, at a time.

    Args:
        module: the model.
        cache: holds the whole prompt, and has `room` for the groups; it is left as it was.
        logits: after the last token of the prompt, float32.
        groups: what to score.
        adapter: what the prompt was computed with.
    """
    return (_group(module, cache, logits, group, adapter) for group in groups)


@torch.inference_mode()
def _group(module: Decoder, cache: DenseCache, first: Tensor, group: Group, adapter: Adapter | None) -> list[float]:
    device = cache.store.device
    first = first.log_softmax(-1)
    counts = [len(ids) - 1 for ids in group]  # the last token of each has no successor to ask about
    ids = [id for ids in group for id in ids[:-1]]
    after = torch.zeros(0, device=device)
    if ids:
        shares = None if adapter is None else [(adapter, slice(None))]
        branches = Branches(cache, counts)
        logits = module(torch.tensor([ids], device=device), cache=branches, adapters=shares)[0].float()
        targets = torch.tensor([id for ids in group for id in ids[1:]], device=device)
        after = logits.gather(-1, targets[:, None])[:, 0] - logits.logsumexp(-1)
    rest = after.double().cpu().split(counts)
    return [float(first[ids[0]]) + float(part.sum()) for ids, part in zip(group, rest, strict=True)]
