"""Byte decoders with ReLU, trained on the source of Python's library until few of their neurons fire."""

import pytest
import torch

from pippin.claims.worlds.sequences.byte_text import VOCABULARY, byte_decoder, byte_model, byte_text, train_bytes
from pippin.claims.worlds.sequences.sparse_neurons import SparseActivations
from pippin.language import DecoderConfig, LayerSpec
from pippin.language.stored_neurons import neuron_layers, write_neurons
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.attention.rotary import Rotary
from pippin.nn.feedforward.feedforward import FeedForwardSpec

WIDTH, INNER, LAYERS = 128, 768, 2
FORMS = {"gated": ("llama", "relu", True), "plain": ("arcee", "relu2", False)}


def _trained(form):
    family, activation, gated = FORMS[form]
    layer = LayerSpec(AttentionSpec(rotary=Rotary()), FeedForwardSpec(INNER, activation, gated))
    config = DecoderConfig(family, VOCABULARY, WIDTH, (layer,) * LAYERS, 4, 2, WIDTH // 4, 4096)
    module = byte_decoder(config, seed=0)
    train_bytes(module, steps=120, seed=0, rows=4, length=96, objective=SparseActivations())
    return module.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def gated_module():
    return _trained("gated")


@pytest.fixture(scope="session")
def plain_module():
    return _trained("plain")


@pytest.fixture(params=list(FORMS))
def module(request):
    return request.getfixturevalue(f"{request.param}_module")


@pytest.fixture
def write(tmp_path):
    """Writes the neurons of a decoder to a new folder."""

    def written(module, *, predicted=False, dtype="float32"):
        folder = tmp_path / f"neurons-{len(list(tmp_path.iterdir()))}"
        return write_neurons(folder, neuron_layers(module, predicted=predicted), module.get_parameter, dtype)

    return written


@pytest.fixture(params=list(FORMS))
def folder(request, tmp_path, monkeypatch):
    """A folder with a saved model."""
    monkeypatch.setenv("PIPPIN_HOME", str(tmp_path / "home"))
    byte_model(request.getfixturevalue(f"{request.param}_module")).save(tmp_path / "model")
    return tmp_path / "model"


def text_ids(count, *, begin=0):
    return byte_text().held_out[begin : begin + count]


@pytest.fixture
def ids():
    return text_ids


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
