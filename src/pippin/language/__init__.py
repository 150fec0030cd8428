"""Language models: the spec-driven decoder, the checkpoint families it reads, and `load`; sentence encoders."""

from pippin.language.afm import AFMConfig
from pippin.language.diffusion import MaskedDiffusionLM, load_diffusion, to_diffusion
from pippin.language.diffusion_sampling import Unmasking
from pippin.language.encoder import TextEncoder, load_encoder
from pippin.language.load import LanguageModel, load
from pippin.language.transformer import Decoder, DecoderConfig, LayerSpec

__all__ = [
    "AFMConfig",
    "Decoder",
    "DecoderConfig",
    "LanguageModel",
    "LayerSpec",
    "MaskedDiffusionLM",
    "TextEncoder",
    "Unmasking",
    "load",
    "load_diffusion",
    "load_encoder",
    "to_diffusion",
]
