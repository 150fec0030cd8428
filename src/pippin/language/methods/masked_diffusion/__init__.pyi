from .config import MaskedDiffusionConfig as MaskedDiffusionConfig
from .loss import MaskedDiffusion as MaskedDiffusion
from .model import (
    LikelihoodBound as LikelihoodBound,
    MaskedDiffusionLM as MaskedDiffusionLM,
    to_diffusion as to_diffusion,
)
from .sample import UnmaskingOptions as UnmaskingOptions, UnmaskingStep as UnmaskingStep, unmask as unmask
