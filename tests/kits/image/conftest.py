"""An encoder of eight words, and a small model of each family with random weights that are not nothing."""

from types import SimpleNamespace

import pytest
import torch

from pippin.generate.conditions import ConditioningSpec
from pippin.generate.diffusion.diffusion import Diffusion, DiffusionConfig
from pippin.generate.diffusion.unet import UNetConfig
from pippin.generate.flows.starflow.config import StarFlowConfig
from pippin.generate.flows.starflow.model import StarFlow
from pippin.generate.flows.tarflow import TarFlow, TarFlowConfig
from pippin.generate.methods.dart.model import DART, DartConfig
from pippin.kits.image import ImageCreator

WORDS = ("one", "two", "white", "gray", "disc", "discs", "square", "squares")
TEXT = ConditioningSpec(text_dim=8, null=True)


class Words:
    """Each known word is a unit vector."""

    name, sha256, width, tokens, encoder = "words", "0" * 64, 8, 8, SimpleNamespace(module=None)

    def encode(self, texts):
        """Tokens and mask."""
        longest = max(1, *(len(text.split()) for text in texts))
        states, mask = torch.zeros(len(texts), longest, 8), torch.zeros(len(texts), longest, dtype=torch.bool)
        for row, text in enumerate(texts):
            for column, word in enumerate(text.split()):
                if word in WORDS:
                    states[row, column, WORDS.index(word)] = 8**0.5
                mask[row, column] = True
        return states, mask


def stirred(model):
    """Random weights everywhere: what begins at zero would ignore its condition."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def make(family, condition=TEXT, **settings):
    """A small model of a family."""
    shape = (1, 8, 8)
    if family in ("diffusion", "composed diffusion"):
        network = UNetConfig(base_channels=8, patch_size=2, num_levels=1, attention=False)
        return stirred(Diffusion(DiffusionConfig(shape, network, condition, steps=4, **settings)).initialize(0))
    if family == "flow":
        config = TarFlowConfig(
            shape,
            patch_size=4,
            layers_per_block=(1, 1),
            hidden_size=16,
            num_attention_heads=2,
            condition=condition,
            noise_std=0.1,
        )
        return stirred(TarFlow(config).initialize(0))
    if family == "deep-shallow flow":
        config = StarFlowConfig(
            shape, hidden_size=16, num_attention_heads=2, layers_per_block=(1, 1), condition=condition, score=None
        )
        return stirred(StarFlow(config).initialize(0))
    config = DartConfig(
        shape, patch_size=4, num_hidden_layers=1, hidden_size=24, num_attention_heads=2, condition=condition
    )
    return stirred(DART(config).initialize(0))


def creator(family, condition=TEXT, **settings):
    """A creator over such a model."""
    compose = "null" if family == "composed diffusion" else None
    return ImageCreator(make(family, condition), encoder=Words(), compose=compose, **settings)


FAMILIES = ("diffusion", "composed diffusion", "flow", "deep-shallow flow", "autoregressive diffusion")


@pytest.fixture(scope="session", params=FAMILIES)
def family_creator(request):
    """A creator over each family."""
    return creator(request.param)


@pytest.fixture(scope="session")
def diffusion_creator():
    """A creator over a diffusion model."""
    return creator("diffusion")
