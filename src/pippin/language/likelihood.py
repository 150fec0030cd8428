r"""Log-likelihood of texts under a model, to compare models or versions of one.

Notable here:
- nats per token, nats per byte (comparable across vocabularies) and perplexity, $e^{\text{nats per token}}$
- a long text is split into windows; every token but the first is predicted exactly once, and with a stride below the
  window's length each has at least ``length - stride`` tokens of context
- windows of any lengths are packed end to end in one pass, so short texts need no padding; packed models use their own
  kernels, and logits are computed in chunks
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from pippin.core import progress
from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.language.chunked_loss import MAX_LOGITS
from pippin.language.decoder import logits_of
from pippin.language.language_model import LanguageModel
from pippin.nn.kv_cache import PackedDocuments

_PASS = 4096  # tokens of one pass


@dataclass(frozen=True)
class TextLikelihood:
    """Log-likelihood of a text under a model.

    Args:
        nats: negative log-likelihood (natural logarithm), given the first token of each text.
        tokens: number of predicted tokens: all but the first of each text.
        bytes: bytes of these tokens.
        squared_nats: the sum of the squared negative log-likelihoods of the tokens, from which the standard error is
            computed.

    >>> text = TextLikelihood(nats=200.0, tokens=100, bytes=400)
    >>> text.per_token, text.per_byte, round(text.perplexity, 2)
    (2.0, 0.5, 7.39)
    """

    nats: float
    tokens: int
    bytes: int
    squared_nats: float = math.nan

    @property
    def per_token(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def per_byte(self) -> float:
        """Nats per byte of text; NaN if the tokens have no bytes."""
        return self.nats / self.bytes if self.bytes else math.nan

    @property
    def perplexity(self) -> float:
        """The perplexity, $e^{\\text{nats per token}}$; infinite if it overflows."""
        return math.exp(self.per_token) if self.per_token < 709 else math.inf

    @property
    def standard_error(self) -> float:
        """Standard error of the nats per token, as if tokens were independent; NaN for a single token."""
        if self.tokens < 2:
            return math.nan
        variance = (self.squared_nats - self.nats**2 / self.tokens) / (self.tokens - 1)
        return math.sqrt(max(variance, 0.0) / self.tokens)

    @property
    def perplexity_error(self) -> float:
        """Standard error of the perplexity, to first order: the perplexity times that of the nats per token."""
        return self.perplexity * self.standard_error


@checked
def text_likelihood(
    model: LanguageModel,
    text: str | Sequence[str] | Sequence[int],
    *,
    max_length: PositiveInt = 1024,
    stride: PositiveInt | None = None,
    max_tokens: PositiveInt | None = None,
    show_progress: bool = False,
) -> TextLikelihood:
    """Measure a text, several texts, or token ids.

    A window has ``max_length`` tokens and predicts the one after each; the next window begins ``stride`` tokens later,
    and only its predictions of new tokens count.

    Args:
        model: a loaded model, packed or not, on any device.
        text: one text; several independent texts; or the token ids of one. Texts begin with the tokenizer's begin
            token, if it uses one, and get no end token.
        max_length: tokens of a window; at most the model's context.
        stride: distance between windows in tokens; None for ``max_length``, the fastest, where a window's first
            predictions have little context.
        max_tokens: maximum number of predictions, over all texts; None for all.
        show_progress: whether to show a progress bar.

    Raises:
        InvalidArgument: a ``max_length`` above the model's context, a stride above ``max_length``, or an id outside the
            vocabulary.
        InvalidInput: there is nothing to predict: no text has two tokens.
    """
    stride = max_length if stride is None else stride
    if max_length > model.context_size:
        raise InvalidArgument(f"max_length is {max_length}; {model.name} reads at most {model.context_size} tokens")
    if stride > max_length:
        raise InvalidArgument(f"stride is {stride}, which must be at most max_length ({max_length})")
    texts = _encoded(model, text)
    windows = list(_limited(_windows(texts, max_length, stride), max_tokens))
    total = sum(window.new for window in windows)
    if total == 0:
        raise InvalidInput("there is nothing to predict: give a text of at least two tokens")
    nats, squared_nats, nbytes = 0.0, 0.0, 0
    with torch.inference_mode(), progress.bar(total, "likelihood", unit="tokens", show_progress=show_progress) as bar:
        for group in _passes(windows):
            losses = _nats(model, group)
            nats += float(losses.sum())
            squared_nats += float(losses.square().sum())
            new = sum(window.new for window in group)
            nbytes += sum(len(model.tokenizer.token_bytes(i)) for window in group for i in window.targets)
            bar.advance(new)
    return TextLikelihood(nats, total, nbytes, squared_nats)


@dataclass(frozen=True)
class _Window:
    ids: list[int]
    targets: list[int]  # the tokens that follow the last ``new`` of the ids

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
    """Groups of windows of about `_PASS` tokens, each computed in one pass."""
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


def _nats(model: LanguageModel, group: Sequence[_Window]) -> Float[Tensor, " new"]:
    """Negative log-likelihoods of the new predictions of some windows, in nats, in float64 on the CPU."""
    module, device = model.module, model.device
    ids = torch.tensor([index for window in group for index in window.ids], device=device)
    targets = torch.tensor([index for window in group for index in window.targets], device=device)
    hidden = module.hidden(ids[None], cache=PackedDocuments([len(window.ids) for window in group]))[0]
    ends = torch.tensor([len(window.ids) for window in group]).cumsum(0).tolist()
    wanted = [torch.arange(end - window.new, end) for end, window in zip(ends, group, strict=True)]
    hidden = hidden[torch.cat(wanted).to(device)]
    rows = max(64, MAX_LOGITS // model.config.vocab_size)
    losses = [
        F.cross_entropy(logits_of(module, part).float(), right, reduction="none").cpu().double()
        for part, right in zip(hidden.split(rows), targets.split(rows), strict=True)
    ]
    return torch.cat(losses)
