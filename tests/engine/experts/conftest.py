"""A small mixture, and its experts in a file."""

import random

import pytest
import torch
from tests.engine.experts.mixture import EXPERTS, INNER, LAYERS, VOCAB, WIDTH

from pippin.core import native
from pippin.language import Decoder, DecoderConfig, LayerSpec
from pippin.language.stored_experts import FileExpert, FileMatrix
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.feedforward.feedforward import FeedForwardSpec

F32 = native.GGML_FORMATS["F32"]


@pytest.fixture(scope="module")
def module():
    spec = FeedForwardSpec(INNER, num_experts=EXPERTS, num_experts_per_tok=2)
    layers = (LayerSpec(AttentionSpec(), spec),) * LAYERS
    made = Decoder(DecoderConfig("qwen3_moe", VOCAB, WIDTH, layers, 4, 2, 16, 4096, tie_word_embeddings=False))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in made.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + noise / 4 if name.endswith("norm.weight") else noise / parameter.shape[-1] ** 0.5
    return made.eval()


@pytest.fixture(scope="module")
def stored(module, tmp_path_factory):
    """A file with the float32 matrices of all experts, at offsets that are no multiples of anything."""
    path, rng, experts = tmp_path_factory.mktemp("weights") / "experts.bin", random.Random(0), []
    with path.open("wb") as file:
        for layer in module.layers:
            experts.append([])
            for expert in layer.mlp.experts:
                parts = {}
                for name in ("gate", "up", "down"):
                    file.write(rng.randbytes(rng.randrange(5000)))
                    weight = getattr(expert, f"{name}_proj").weight.detach()
                    parts[name] = FileMatrix(path, file.tell(), weight.nbytes, *weight.shape, F32, "F32")
                    file.write(weight.numpy().tobytes())
                experts[-1].append(FileExpert(parts))
    return experts
