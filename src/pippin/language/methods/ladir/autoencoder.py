r"""The thought VAE: a sentence of reasoning as a block of latent thought tokens, and back to text.

Notable here:
- the encoder is a language model that is fine-tuned: it reads a sentence and then learned memory tokens, whose last
  hidden states give mean and log variance of the latents
- the decoder is a frozen copy of the language model; latents enter it as a soft prompt, so every thought can be decoded
  to text of this model
- latents are normalized by one shift and one scale, measured over sentences, so that the noise of the flow has the same
  scale for every model

Source: arXiv:2510.04573, section 3.1.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument, NotPrepared, Truncation
from pippin.data.text.tokenizer import Tokenizer
from pippin.language.decoder import Decoder
from pippin.language.language_model import LanguageModel
from pippin.language.methods.ladir.config import ThoughtVAEConfig
from pippin.language.methods.ladir.sample import decode_text
from pippin.nn.kv_cache import MaskedCache, PastKeyValues, causal_mask
from pippin.nn.linear import Linear
from pippin.nn.packed_layers import check_not_packed

_BATCH = 256  # sentences of one pass


class ThoughtPosterior(NamedTuple):
    """The posterior of the latents of some sentences, in the encoder's units."""

    mean: Float[Tensor, "batch tokens latent"]
    log_variance: Float[Tensor, "batch tokens latent"]


class ThoughtVAE(nn.Module):
    """A variational autoencoder of sentences over a language model.

    Parameters are uninitialized until a checkpoint is loaded; `from_language_model` creates one for training.

    Args:
        config: sizes.
        tokenizer: tokenizer of the language model; its first end token ends a sentence.

    Raises:
        InvalidArgument: a tokenizer without an end token.

    Source: arXiv:2510.04573, section 3.1.
    """

    latent_shift: Tensor
    latent_scale: Tensor

    def __init__(self, config: ThoughtVAEConfig, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.config, self.tokenizer, self.end_id = config, tokenizer, end_id(tokenizer)
        hidden, latent = config.decoder.hidden_size, config.latent_size
        self.encoder = Decoder(config.decoder)
        self.decoder = Decoder(config.decoder)
        self.memory_tokens = nn.Parameter(torch.empty(config.block_size, latent))
        self.reconstruct_embedding = nn.Parameter(torch.empty(hidden))
        self.up_proj = Linear(latent, hidden, bias=True)  # of latents and memory tokens alike
        self.mean_head, self.log_variance_head = (Linear(hidden, latent, bias=True) for _ in range(2))
        self.register_buffer("latent_shift", torch.zeros(()))
        self.register_buffer("latent_scale", torch.zeros(()))  # 0: not measured yet
        self._freeze()

    @classmethod
    def from_language_model(
        cls,
        model: LanguageModel,
        *,
        block_size: int = 3,
        latent_size: int = 128,
        max_sentence_length: int = 64,
        seed: int = 0,
    ) -> ThoughtVAE:
        """An autoencoder whose encoder is a trainable copy of a language model and whose decoder is a frozen one.

        Args:
            model: a language model that is not packed.
            block_size: $L_b$, latent thought tokens of a sentence.
            latent_size: $d_z$, dimensions of a latent thought token.
            max_sentence_length: tokens of a sentence; longer ones are truncated with a warning.
            seed: seed of the new weights.

        Raises:
            InvalidArgument: a size below 1, a packed model, a tokenizer without an end token.
            UnsupportedLayer: sliding windows or recurrent layers.
        """
        check_not_packed(model.module, model.name)
        vae = cls(ThoughtVAEConfig(model.config, block_size, latent_size, max_sentence_length), model.tokenizer)
        vae.encoder = copy.deepcopy(model.module).requires_grad_(True)
        vae.decoder = copy.deepcopy(model.module)
        vae._freeze()
        vae._initialize(torch.Generator().manual_seed(seed))
        return vae.to(model.device)

    def _freeze(self) -> None:
        self.decoder.requires_grad_(False)
        if not self.config.decoder.tie_word_embeddings:
            self.encoder.lm_head.requires_grad_(False)  # the encoder's hidden states are used, not its logits

    @torch.no_grad()
    def _initialize(self, generator: torch.Generator) -> None:
        size = embedding_rms(self.decoder)
        for parameter, std in ((self.memory_tokens, 1.0), (self.reconstruct_embedding, size)):
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))
        initialize_linear(self.up_proj, size, generator)
        initialize_linear(self.mean_head, 1.0, generator)
        initialize_linear(self.log_variance_head, 0.1, generator)
        assert self.log_variance_head.bias is not None
        self.log_variance_head.bias.fill_(-4.0)

    @property
    def is_fitted(self) -> bool:
        """Whether shift and scale of the latents have been measured."""
        return float(self.latent_scale) > 0

    def posterior(self, ids: Int[Tensor, "batch length"], lengths: Int[Tensor, batch]) -> ThoughtPosterior:
        """Mean and log variance of the latents of sentences.

        Args:
            ids: token ids, padded on the right.
            lengths: tokens of each sentence.
        """
        batch, length = ids.shape
        # rolled to be padded on the left, so that the memory tokens follow every sentence at once
        padding = length - lengths
        rolled = (torch.arange(length, device=ids.device) - padding[:, None]) % length
        memory: Tensor = self.up_proj(self.memory_tokens).expand(batch, -1, -1)
        x = torch.cat([self.encoder.embed(ids.gather(1, rolled)), memory.to(self.encoder.embed_tokens.dtype)], 1)
        total = length + self.config.block_size
        mask = causal_mask(0, total, None, padding, ids.device)
        assert mask is not None
        positions = (torch.arange(total, device=ids.device) - padding[:, None]).clamp(min=0)
        hidden = self.encoder.norm(self.encoder.forward_layers(x, MaskedCache(mask, positions=positions)))
        hidden = hidden[:, -self.config.block_size :]  # of the memory tokens
        return ThoughtPosterior(
            self.mean_head(hidden).float(), self.log_variance_head(hidden).float().clamp(-12.0, 4.0)
        )

    def soft_prompt(self, z: Float[Tensor, "batch tokens latent"]) -> Float[Tensor, "batch prompt hidden"]:
        """The decoder's input before a sentence: up-projected latents (in the encoder's units), and the learned
        embedding that prompts for the reconstruction.
        """
        ask = self.reconstruct_embedding.expand(len(z), 1, -1)
        return torch.cat([self.up_proj(z.to(ask.dtype)), ask], 1).to(self.decoder.embed_tokens.dtype)

    def normalize(self, z: Tensor) -> Tensor:
        """Latents in units of the data: minus the shift, divided by the scale.

        Raises:
            NotPrepared: shift and scale have not been measured.
        """
        if not self.is_fitted:
            raise NotPrepared("this autoencoder was never fitted; see pippin.language.methods.ladir.fit_vae")
        return (z - self.latent_shift) / self.latent_scale

    @torch.no_grad()
    def fit_normalization(self, sentences: Sequence[str]) -> None:
        """Measure shift and scale: mean and standard deviation of all elements of the sentences' posterior means."""
        z = torch.cat([self.posterior(*self.tokenize(part)).mean for part in _batches(sentences)])
        self.latent_shift.copy_(z.mean())
        self.latent_scale.copy_(z.std().clamp(min=1e-6))

    @torch.no_grad()
    def encode(
        self, texts: Sequence[str], *, sample: bool = False, generator: torch.Generator | None = None
    ) -> Float[Tensor, "texts tokens latent"]:
        """The latents of sentences, in units of the data.

        Args:
            texts: one sentence each.
            sample: sample from the posterior; False takes its mean.
            generator: for sampling.

        Raises:
            InvalidArgument: no texts, or an empty one.
            NotPrepared: the autoencoder was not fitted.
        """
        posteriors = [self.posterior(*self.tokenize(part)) for part in _batches(texts)]
        z, log_variance = (torch.cat(each) for each in zip(*posteriors, strict=True))
        if sample:
            noise = torch.randn(z.shape, generator=generator, device=z.device)
            z = z + (log_variance / 2).exp() * noise
        return self.normalize(z)

    @torch.no_grad()
    def decode(self, z: Float[Tensor, "batch tokens latent"]) -> list[str]:
        """Decode latents, in units of the data, to sentences, by greedy decoding.

        Raises:
            InvalidArgument: latents of another shape.
            NotPrepared: the autoencoder was not fitted.
        """
        shape = (self.config.block_size, self.config.latent_size)
        if tuple(z.shape[1:]) != shape:
            raise InvalidArgument(f"latents of {tuple(z.shape[1:])}; this autoencoder's are {shape}")
        if not self.is_fitted:
            self.normalize(z)  # raises NotPrepared
        x, past = self.soft_prompt(z * self.latent_scale + self.latent_shift), PastKeyValues()
        seen = torch.ones(len(x), 0, dtype=torch.bool, device=x.device)
        positions = torch.zeros(len(x), dtype=torch.long, device=x.device)
        length = self.config.max_sentence_length
        written = decode_text(self.decoder, x, past, seen, positions, end_ids=(self.end_id,), max_new_tokens=length)
        return [self.tokenizer.decode(ids) for ids in written]

    def tokenize(self, texts: Sequence[str]) -> tuple[Int[Tensor, "texts length"], Int[Tensor, texts]]:
        """Token ids of sentences, padded on the right with the end token, and their lengths.

        Raises:
            InvalidArgument: no texts, or an empty one.

        Warns:
            Truncation: a sentence is longer than ``max_sentence_length``.
        """
        rows = [self.tokenizer.encode(text) for text in texts]
        if not rows or not all(rows):
            raise InvalidArgument("there is no sentence to encode" if not rows else "a sentence is empty")
        longest, limit = max(map(len, rows)), self.config.max_sentence_length
        if longest > limit:
            text = next(text for text, row in zip(texts, rows, strict=True) if len(row) == longest)
            warnings.warn(
                f"a sentence has {longest} tokens, more than max_sentence_length={limit}; its end is left out: "
                f"{text[:60]!r}",
                Truncation,
                stacklevel=2,
            )
            rows = [row[:limit] for row in rows]
        lengths = torch.tensor([len(row) for row in rows], device=self.memory_tokens.device)
        return pad(rows, self.end_id).to(self.memory_tokens.device), lengths


def _batches(items: Sequence[str]) -> Iterator[Sequence[str]]:
    """Consecutive parts; one empty part of an empty sequence, so that it is refused where it is read."""
    return (items[start : start + _BATCH] for start in range(0, max(len(items), 1), _BATCH))


def pad(rows: Sequence[Sequence[int]], value: int, *, left: bool = False) -> Int[Tensor, "rows length"]:
    """Rows of token ids as one tensor, padded on the right or on the left.

    >>> pad([[1], [2, 3]], 0, left=True).tolist()
    [[0, 1], [2, 3]]
    """
    length = max(map(len, rows))
    padding = [[value] * (length - len(row)) for row in rows]
    return torch.tensor([[*gap, *row] if left else [*row, *gap] for row, gap in zip(rows, padding, strict=True)])


def end_id(tokenizer: Tokenizer) -> int:
    """The token that ends sentences and answers.

    Raises:
        InvalidArgument: the tokenizer has none.
    """
    if not tokenizer.eos_ids:
        raise InvalidArgument("the tokenizer has no end token, which ends sentences and answers")
    return tokenizer.eos_ids[0]


@torch.no_grad()
def embedding_rms(decoder: Decoder) -> float:
    """Root mean square of the embeddings that enter the first layer."""
    weight = decoder.embed_tokens.weight
    return float(weight.float().square().mean().sqrt()) * decoder.config.embedding_scale


@torch.no_grad()
def initialize_linear(layer: Linear, rms: float, generator: torch.Generator) -> None:
    """Random weights whose outputs have about this root mean square for inputs of size 1; biases at zero."""
    layer.weight.copy_(torch.empty(layer.weight.shape).normal_(0.0, rms * layer.inputs**-0.5, generator=generator))
    if layer.bias is not None:
        layer.bias.zero_()
