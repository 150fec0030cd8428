"""The config of a masked diffusion language model: its decoder, the mask token, and the shift."""

from __future__ import annotations

from dataclasses import dataclass

from pippin.core.errors import InvalidArgument, UnsupportedLayer
from pippin.language.decoder_config import DecoderConfig


@dataclass(frozen=True)
class MaskedDiffusionConfig:
    """The config of a masked diffusion model.

    Args:
        decoder: config of the network. Attention is full: sliding windows are not applied.
        mask_id: the mask token.
        shift: whether a token is predicted from the position before it, as in a causal model.

    Raises:
        InvalidArgument: a mask token outside the vocabulary.
        UnsupportedLayer: recurrent layers; all are listed.
    """

    decoder: DecoderConfig
    mask_id: int
    shift: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.mask_id < self.decoder.vocab_size:
            raise InvalidArgument(
                f"mask_id {self.mask_id} is outside the vocabulary of {self.decoder.vocab_size} tokens"
            )
        if recurrent := self.decoder.recurrent_layers:
            raise UnsupportedLayer(
                f"recurrent layers cannot see what comes later, and these are: {', '.join(map(str, recurrent))}"
            )
