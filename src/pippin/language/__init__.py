"""Language models: the spec-driven decoder, the checkpoint families it reads, and `load`."""

from pippin.language.load import LanguageModel, load
from pippin.language.transformer import Decoder, DecoderConfig, LayerSpec

__all__ = ["Decoder", "DecoderConfig", "LanguageModel", "LayerSpec", "load"]
