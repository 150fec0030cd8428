"""Configs of instruction-following pruning: the base model, how much of it is kept, and the mask predictor."""

from __future__ import annotations

from dataclasses import dataclass

from pippin.core.checks import PositiveFloat, PositiveInt, checked
from pippin.language.decoder_config import DecoderConfig


@checked
@dataclass(frozen=True)
class MaskPredictorConfig:
    """Sizes of a `MaskPredictor`.

    Args:
        reader: config of the small decoder that reads the prompt.
        hidden_size: hidden width of its head.
    """

    reader: DecoderConfig
    hidden_size: PositiveInt = 128


@checked
@dataclass(frozen=True)
class InstructionPruningConfig:
    """The config of an `InstructionFollowingPruning` model.

    Args:
        base: config of the unpruned model.
        keep: number of feed-forward channels that are kept in each layer.
        eps: temperature of the soft top-k; see `pippin.nn.soft_top_k.soft_top_k`.
        predictor: config of the mask predictor; None for a `StaticMask`.
    """

    base: DecoderConfig
    keep: PositiveInt
    eps: PositiveFloat = 1.0
    predictor: MaskPredictorConfig | None = None
