"""Configs of LaDiR's two networks: the VAE over sentences of reasoning, and the reasoner over its latents.

Notable here:
- both contain their decoder's config, so that a saved folder is self-contained
- sizes are named as in the paper: a block of thought has ``block_size`` tokens of ``latent_size`` dimensions
"""

from __future__ import annotations

from dataclasses import dataclass

from pippin.core.checks import Fraction, PositiveInt, checked
from pippin.core.errors import UnsupportedLayer
from pippin.language.decoder_config import DecoderConfig


@checked
@dataclass(frozen=True)
class ThoughtVAEConfig:
    """Sizes of a `ThoughtVAE`.

    Args:
        decoder: config of the language model that encoder and decoder are copies of.
        block_size: $L_b$, latent thought tokens of a sentence.
        latent_size: $d_z$, dimensions of a latent thought token.
        max_sentence_length: tokens of a sentence; longer ones are truncated with a warning.

    Raises:
        InvalidArgument: a size below 1.
        UnsupportedLayer: a decoder with sliding windows or recurrent layers.
    """

    decoder: DecoderConfig
    block_size: PositiveInt = 3
    latent_size: PositiveInt = 128
    max_sentence_length: PositiveInt = 64

    def __post_init__(self) -> None:
        check_layers(self.decoder)


@checked
@dataclass(frozen=True)
class LatentReasonerConfig:
    """Sizes of a `LatentReasoner`.

    Args:
        decoder: config of the reasoner's own language model.
        vae: config of the autoencoder, whose vocabulary is the same.
        max_blocks: blocks of a thought.
        max_answer_length: tokens of an answer, its end token included.
        null_prob: probability with which training replaces a question by the null embedding, for classifier-free
            guidance.

    Raises:
        InvalidArgument: a number out of range.
        UnsupportedLayer: a decoder with sliding windows or recurrent layers.
    """

    decoder: DecoderConfig
    vae: ThoughtVAEConfig
    max_blocks: PositiveInt = 8
    max_answer_length: PositiveInt = 64
    null_prob: Fraction = 0.1

    def __post_init__(self) -> None:
        check_layers(self.decoder)


def check_layers(decoder: DecoderConfig) -> None:
    """Refuse layers to which the bidirectional mask of a block cannot be given.

    Raises:
        UnsupportedLayer: sliding windows or recurrent layers; all are listed.
    """
    wrong = [
        f"layer {index}: {'a sliding window' if layer.recurrent is None else 'recurrent'}"
        for index, layer in enumerate(decoder.layers)
        if layer.recurrent is not None or layer.attention.window is not None
    ]
    if wrong:
        raise UnsupportedLayer(f"blocks of thought need layers with full attention; found {', '.join(wrong)}")
