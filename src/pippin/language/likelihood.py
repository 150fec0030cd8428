r"""How likely a text is to a model: the held-out figure by which two models, or two forms of one, are compared.

Notable here:
- nats per token, nats per byte (the same scale for every vocabulary) and perplexity, $e^{\text{nats per token}}$
- a long text is read in windows; every token but the first is counted exactly once, and with a stride below the
  window's length each has at least ``length - stride`` tokens before it
- windows of any lengths lie end to end in one pass, so short texts cost no padding; packed models compute it with their
  own kernels, and the logits of a pass never lie in memory all at once
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pippin.core import progress
from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.language.load import LanguageModel
from pippin.language.readout import LOGITS
from pippin.nn.cache import Documents

_PASS = 4096  # tokens that are computed together


@dataclass(frozen=True)
class Likelihood:
    """What a model makes of a text.

    Args:
        nats: minus the natural logarithm of its probability, given the first token of each text.
        tokens: those that were predicted: all but the first of each text.
        bytes: of these tokens.

    >>> text = Likelihood(nats=200.0, tokens=100, bytes=400)
    >>> text.per_token, text.per_byte, round(text.perplexity, 2)
    (2.0, 0.5, 7.39)
    """

    nats: float
    tokens: int
    bytes: int

    @property
    def per_token(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def per_byte(self) -> float:
        """Nats per byte of text; NaN where the tokens stand for no bytes."""
        return self.nats / self.bytes if self.bytes else math.nan

    @property
    def perplexity(self) -> float:
        """The number of equally likely tokens that would be as surprising; infinite beyond what a float holds."""
        return math.exp(self.per_token) if self.per_token < 709 else math.inf


def likelihood(
    model: LanguageModel,
    text: str | Sequence[str] | Sequence[int],
    *,
    length: int = 1024,
    stride: int | None = None,
    limit: int | None = None,
    show: bool = False,
) -> Likelihood:
    """Measure a text, several texts, or token ids.

    A window reads ``length`` tokens and predicts the one after each; the next window begins ``stride`` tokens later,
    and of it only the predictions that no window made before count.

    Args:
        model: as loaded, packed or not, on any device.
        text: one text; several, none of which sees another; or the ids of one. Texts begin with the tokenizer's begin
            token, where it uses one, and get no end token.
        length: tokens of a window; at most the model's context.
        stride: by how much windows move on; None for ``length``, the quickest, where a window's first predictions have
            little before them.
        limit: only the first so many predictions, over all texts; None for all.
        show: draw a progress bar.

    Raises:
        InvalidArgument: a length, stride or limit out of range, or an id outside the vocabulary.
        InvalidInput: there is nothing to predict: no text has two tokens.
    """
    stride = length if stride is None else stride
    if not 1 <= length <= model.context_size:
        raise InvalidArgument(f"length is {length}; windows of {model.name} hold 1 to {model.context_size} tokens")
    if not 1 <= stride <= length:
        raise InvalidArgument(f"stride is {stride}; give 1 to {length}, the length of a window")
    if limit is not None and limit < 1:
        raise InvalidArgument(f"limit is {limit}; give at least 1 token, or None")
    texts = _encoded(model, text)
    windows = list(_limited(_windows(texts, length, stride), limit))
    total = sum(window.new for window in windows)
    if total == 0:
        raise InvalidInput("there is nothing to predict: give a text of at least two tokens")
    nats, nbytes = 0.0, 0
    with torch.inference_mode(), progress.bar(total, "likelihood", unit="tokens", show=show) as bar:
        for group in _passes(windows):
            nats += _nats(model, group)
            new = sum(window.new for window in group)
            nbytes += sum(len(model.tokenizer.token_bytes(i)) for window in group for i in window.targets)
            bar.advance(new)
    return Likelihood(nats, total, nbytes)


@dataclass(frozen=True)
class _Window:
    ids: list[int]
    targets: list[int]  # what should follow the last ``new`` of the ids

    @property
    def new(self) -> int:
        return len(self.targets)


def _encoded(model: LanguageModel, text: str | Sequence[str] | Sequence[int]) -> list[list[int]]:
    if isinstance(text, str):
        text = [text]
    tokenizer = model.tokenizer
    begin = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    texts = [begin + tokenizer.encode(part) for part in text if isinstance(part, str)]
    if texts or not len(text):
        return texts
    ids = [int(index) for index in text]
    if min(ids) < 0 or max(ids) >= model.config.vocab_size:
        bad = next(index for index in ids if not 0 <= index < model.config.vocab_size)
        raise InvalidArgument(f"token id {bad} is outside the vocabulary of {model.config.vocab_size}")
    return [ids]


def _windows(texts: Sequence[list[int]], length: int, stride: int) -> Iterator[_Window]:
    for ids in texts:
        counted = 0  # predictions made so far
        for start in range(0, len(ids) - 1, stride):
            stop = min(start + length, len(ids) - 1)
            if stop > counted:
                yield _Window(ids[start:stop], ids[counted + 1 : stop + 1])
                counted = stop


def _limited(windows: Iterator[_Window], limit: int | None) -> Iterator[_Window]:
    left = limit
    for window in windows:
        if left is not None and window.new >= left:
            drop = window.new - left
            yield _Window(window.ids[: len(window.ids) - drop], window.targets[:left])
            return
        left = None if left is None else left - window.new
        yield window


def _passes(windows: Sequence[_Window]) -> Iterator[list[_Window]]:
    """Windows that are computed together."""
    group: list[_Window] = []
    size = 0
    for window in windows:
        if group and size + len(window.ids) > _PASS:
            yield group
            group, size = [], 0
        group.append(window)
        size += len(window.ids)
    if group:
        yield group


def _nats(model: LanguageModel, group: Sequence[_Window]) -> float:
    """Of the new predictions of some windows."""
    module, device = model.module, model.device
    ids = torch.tensor([index for window in group for index in window.ids], device=device)
    targets = torch.tensor([index for window in group for index in window.targets], device=device)
    hidden = module.hidden(ids[None], cache=Documents([len(window.ids) for window in group]))[0]
    ends = torch.tensor([len(window.ids) for window in group]).cumsum(0).tolist()
    wanted = [torch.arange(end - window.new, end) for end, window in zip(ends, group, strict=True)]
    hidden = hidden[torch.cat(wanted).to(device)]
    rows = max(64, LOGITS // model.config.vocab_size)
    total = torch.zeros((), dtype=torch.float64)
    for part, right in zip(hidden.split(rows), targets.split(rows), strict=True):
        losses = F.cross_entropy(module.lm_head(part).float(), right, reduction="none")
        total += losses.double().sum().cpu()
    return float(total)
