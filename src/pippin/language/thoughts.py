r"""Sentences of reasoning as a few vectors each, and back: the autoencoder under a reasoner that thinks in vectors.

Notable here:
- the encoder is a language model that is trained on: a sentence, then learnt tokens, whose last hidden states become
  mean and log variance of the latents
- the decoder is a frozen copy of the model it all begins from; latents enter it as a soft prompt, so what can be
  thought stays text that this model would write
- latents leave in units of the data: one shift and one scale, measured over sentences, so that the noise of a flow
  means the same for every model
- sentences and answers are written by one loop, over keys and values that are kept
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument, NotPrepared, Truncation, UnsupportedLayer
from pippin.language.load import LanguageModel
from pippin.language.transformer import Decoder
from pippin.nn.cache import Past, Visible, causal_mask
from pippin.nn.linear import Linear


class Encoded(NamedTuple):
    """The posterior of some sentences, in the encoder's own units."""

    mean: Float[Tensor, "rows tokens width"]
    log_variance: Float[Tensor, "rows tokens width"]


class ThoughtVAE(nn.Module):
    """A variational autoencoder of sentences over a language model.

    Parameters of the encoder are a trained copy of the model's, those of the decoder a frozen one.

    Args:
        model: whose copies they are; not packed.
        tokens: latents of a sentence.
        width: numbers of a latent.
        longest: tokens of a sentence, at most; more are cut off, with a warning.
        seed: of the new weights.

    Raises:
        InvalidArgument: numbers below 1, or a packed model.
        UnsupportedLayer: layers that see a window only, or that are no attention.

    Source: Kang et al. 2025, arXiv:2510.04573, section 3.1.
    """

    shift: Tensor
    scale: Tensor

    def __init__(
        self, model: LanguageModel, *, tokens: int = 3, width: int = 128, longest: int = 64, seed: int = 0
    ) -> None:
        super().__init__()
        if min(tokens, width, longest) < 1:
            raise InvalidArgument(f"tokens ({tokens}), width ({width}) and longest ({longest}) must be at least 1")
        check_layers(model)
        self.tokens, self.width, self.longest, self.tokenizer = tokens, width, longest, model.tokenizer
        self.end = end_of(model)
        self.encoder = copy.deepcopy(model.module).requires_grad_(True)
        self.decoder = copy.deepcopy(model.module).requires_grad_(False)
        if not model.config.tied:
            self.encoder.lm_head.requires_grad_(False)  # nothing is read from it
        inner = model.config.width
        self.memory = nn.Parameter(torch.empty(tokens, width))
        self.reconstruct = nn.Parameter(torch.empty(inner))
        self.up = Linear(width, inner, bias=True)
        self.mean, self.log_variance = (Linear(inner, width, bias=True) for _ in range(2))
        self.register_buffer("shift", torch.zeros(()))
        self.register_buffer("scale", torch.zeros(()))  # 0: not measured yet
        self._initialise(torch.Generator().manual_seed(seed))
        self.to(model.device)

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        size = embedding_size(self.decoder)
        for parameter, std in ((self.memory, 1.0), (self.reconstruct, size)):
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))
        begin(self.up, size, generator)
        begin(self.mean, 1.0, generator)
        begin(self.log_variance, 0.1, generator)
        assert self.log_variance.bias is not None
        self.log_variance.bias.fill_(-4.0)

    @property
    def calibrated(self) -> bool:
        """Whether the latents' shift and scale have been measured."""
        return float(self.scale) > 0

    def posterior(self, ids: Int[Tensor, "rows length"], counts: Int[Tensor, rows]) -> Encoded:
        """Mean and log variance of sentences.

        Args:
            ids: their tokens, padded on the right.
            counts: tokens of each.
        """
        rows, length = ids.shape
        padding = length - counts
        index = (torch.arange(length, device=ids.device) - padding[:, None]) % length
        memory: Tensor = self.up(self.memory).expand(rows, -1, -1)
        x = torch.cat([self.encoder.embed(ids.gather(1, index)), memory.to(self.encoder.embed_tokens.dtype)], 1)
        total = length + self.tokens
        mask = causal_mask(0, total, None, padding, ids.device)
        assert mask is not None
        places = (torch.arange(total, device=ids.device) - padding[:, None]).clamp(min=0)
        hidden = self.encoder.norm(self.encoder.through(x, Visible(mask, positions=places)))[:, -self.tokens :]
        return Encoded(self.mean(hidden).float(), self.log_variance(hidden).float().clamp(-12.0, 4.0))

    def prompt(self, z: Float[Tensor, "rows tokens width"]) -> Float[Tensor, "rows prompt inner"]:
        """What the decoder reads before a sentence: latents in the encoder's units, and the sign to write them out."""
        own = self.reconstruct.expand(len(z), 1, -1)
        return torch.cat([self.up(z.to(own.dtype)), own], 1).to(self.decoder.embed_tokens.dtype)

    def normalised(self, z: Tensor) -> Tensor:
        """Latents in units of the data.

        Raises:
            NotPrepared: they have not been measured.
        """
        if not self.calibrated:
            raise NotPrepared("this autoencoder was never fitted; see pippin.language.ladir_training.fit_vae")
        return (z - self.shift) / self.scale

    @torch.no_grad()
    def calibrate(self, sentences: Sequence[str]) -> None:
        """Measure shift and scale over sentences: mean and standard deviation of all numbers of their means."""
        z = torch.cat([self.posterior(*self.tokenised(part)).mean for part in pieces(sentences, 256)])
        self.shift.copy_(z.mean())
        self.scale.copy_(z.std().clamp(min=1e-6))

    @torch.no_grad()
    def encode(
        self, texts: Sequence[str], *, sample: bool = False, generator: torch.Generator | None = None
    ) -> Float[Tensor, "texts tokens width"]:
        """The latents of sentences, in units of the data.

        Args:
            texts: one sentence each.
            sample: draw from the posterior; its mean otherwise.
            generator: of the draws.

        Raises:
            InvalidArgument: no texts, or an empty one.
            NotPrepared: the autoencoder was not fitted.
        """
        encoded = [self.posterior(*self.tokenised(part)) for part in pieces(texts, 256)]
        z, spread = (torch.cat(each) for each in zip(*encoded, strict=True))
        if sample:
            draws = torch.randn(z.shape, generator=generator, device=z.device)
            z = z + (spread / 2).exp() * draws
        return self.normalised(z)

    @torch.no_grad()
    def decode(self, z: Float[Tensor, "rows tokens width"]) -> list[str]:
        """The sentences that latents, in units of the data, stand for; the likeliest token each time.

        Raises:
            InvalidArgument: latents of another size.
            NotPrepared: the autoencoder was not fitted.
        """
        if tuple(z.shape[1:]) != (self.tokens, self.width):
            raise InvalidArgument(
                f"latents of {tuple(z.shape[1:])}; this autoencoder's are {(self.tokens, self.width)}"
            )
        if not self.calibrated:
            self.normalised(z)
        x, past = self.prompt(z * self.scale + self.shift), Past()
        rows = len(x)
        seen = torch.ones(rows, 0, dtype=torch.bool, device=x.device)
        places = torch.zeros(rows, dtype=torch.long, device=x.device)
        written = write(self.decoder, x, past, seen, places, ends=(self.end,), longest=self.longest)
        return [self.tokenizer.decode(ids) for ids in written]

    def tokenised(self, texts: Sequence[str]) -> tuple[Int[Tensor, "texts length"], Int[Tensor, texts]]:
        """Tokens of sentences, padded on the right with the end token, and their counts.

        Raises:
            InvalidArgument: no texts, or an empty one.
        """
        rows = [self.tokenizer.encode(text) for text in texts]
        if not rows or not all(rows):
            raise InvalidArgument("there is no sentence to encode" if not rows else "a sentence is empty")
        longest = max(map(len, rows))
        if longest > self.longest:
            text = next(text for text, row in zip(texts, rows, strict=True) if len(row) == longest)
            warnings.warn(
                f"a sentence has {longest} tokens and its latents are made for {self.longest}; the end is left out: "
                f"{text[:60]!r}",
                Truncation,
                stacklevel=2,
            )
            rows = [row[: self.longest] for row in rows]
        counts = torch.tensor([len(row) for row in rows], device=self.memory.device)
        return padded(rows, self.end).to(self.memory.device), counts


def write(
    decoder: Decoder,
    x: Float[Tensor, "rows new inner"],
    past: Past,
    seen: Bool[Tensor, "rows kept"],
    places: Int[Tensor, rows],
    *,
    ends: Sequence[int],
    longest: int,
    choose: Callable[[Float[Tensor, "rows vocab"]], Int[Tensor, rows]] | None = None,
) -> list[list[int]]:
    """Tokens one after another, for several rows at once, each until an end token.

    Args:
        decoder: the model.
        x: what it reads first, causally.
        past: keys and values of what is before; what is read and written joins it.
        seen: which of them each row may look at.
        places: the position of the first of ``x`` in each row.
        ends: tokens that end a row; not part of the result.
        longest: tokens of a row, at most.
        choose: the next token of each row, from logits; None takes the likeliest.
    """
    rows: list[list[int]] = [[] for _ in range(len(x))]
    open_ = set(range(len(x)))
    for _ in range(longest):
        new = x.shape[1]
        order = torch.ones(new, new, dtype=torch.bool, device=x.device).tril().expand(len(x), -1, -1)
        mask = torch.cat([seen[:, None].expand(-1, new, -1), order], 2)[:, None]
        here = places[:, None] + torch.arange(new, device=x.device)
        cache = Visible(mask, past, positions=here, keep=True)
        hidden = decoder.norm(decoder.through(x, cache)[:, -1])
        cache.advance(new)
        seen, places = torch.cat([seen, seen.new_ones(len(x), new)], 1), places + new
        logits: Tensor = decoder.lm_head(hidden).float()
        ids = logits.argmax(-1) if choose is None else choose(logits)
        for row, token in enumerate(ids.tolist()):
            if row in open_ and token in ends:
                open_.discard(row)
            elif row in open_:
                rows[row].append(token)
        if not open_:
            break
        x = decoder.embed(ids[:, None])
    return rows


def pieces(items: Sequence[str], size: int) -> Iterable[Sequence[str]]:
    """Consecutive parts of a sequence; one empty part of an empty one, for the sake of its error."""
    return (items[start : start + size] for start in range(0, max(len(items), 1), size))


def padded(rows: Sequence[Sequence[int]], fill: int, *, left: bool = False) -> Int[Tensor, "rows length"]:
    """Rows of tokens as one tensor.

    >>> padded([[1], [2, 3]], 0, left=True).tolist()
    [[0, 1], [2, 3]]
    """
    length = max(map(len, rows))
    gaps = [[fill] * (length - len(row)) for row in rows]
    return torch.tensor([[*gap, *row] if left else [*row, *gap] for row, gap in zip(rows, gaps, strict=True)])


def end_of(model: LanguageModel) -> int:
    """The token that closes sentences and answers.

    Raises:
        InvalidArgument: the tokenizer has none.
    """
    if not model.tokenizer.eos_ids:
        raise InvalidArgument(f"the tokenizer of {model.name} has no end token, which closes sentences and answers")
    return model.tokenizer.eos_ids[0]


def check_layers(model: LanguageModel) -> None:
    """Refuse what cannot be trained here, or what a mask of ours does not describe.

    Raises:
        InvalidArgument: a packed model.
        UnsupportedLayer: layers that see a window only, or that are no attention; all are listed.
    """
    if any(getattr(module, "packed", None) is not None for module in model.module.modules()):
        raise InvalidArgument(f"{model.name} is packed for inference; load it with pack=False")
    wrong = [
        f"layer {index}: {'a window' if layer.recurrent is None else 'a recurrence'}"
        for index, layer in enumerate(model.config.layers)
        if layer.recurrent is not None or layer.attention.window is not None
    ]
    if wrong:
        raise UnsupportedLayer(
            f"blocks of thought need layers that see everything; {model.name} has {', '.join(wrong)}"
        )


@torch.no_grad()
def embedding_size(decoder: Decoder) -> float:
    """Root mean square of what enters the first layer."""
    weight = decoder.embed_tokens.weight
    assert weight is not None
    return float(weight.float().square().mean().sqrt()) * decoder.config.embedding_scale


@torch.no_grad()
def begin(layer: Linear, size: float, generator: torch.Generator) -> None:
    """Random weights whose results are of about ``size`` where inputs are of size 1; no bias."""
    assert layer.weight is not None
    layer.weight.copy_(torch.empty(layer.weight.shape).normal_(0.0, size * layer.inputs**-0.5, generator=generator))
    if layer.bias is not None:
        layer.bias.zero_()
