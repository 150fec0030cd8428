"""What the tests of the engine share."""

import pytest

from pippin.engine import Engine
from pippin.nn.lora import Adapter

from .fake import FakeRunner


@pytest.fixture(scope="session")
def with_adapter(tiny):
    """The tiny model with an adapter of this name that changes nothing in it; the fake runner notices it."""
    from dataclasses import replace

    return replace(tiny, adapters={"a": Adapter("a", {})})


@pytest.fixture(scope="session")
def random_llama():
    """Makes Llamas of transformers whose weights are large enough that everything matters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(layers, context=1024):
        torch.manual_seed(0)
        sizes = {"vocab_size": 260, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": layers}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": context}
        model = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="eager")).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data = 0.3 * torch.randn_like(parameter)
        return model

    return make


@pytest.fixture
def as_model(tiny):
    """A Llama of transformers as a model of Pippin, packed for the kernels or not."""
    from pippin.language import Decoder, LanguageModel, families

    def convert(theirs, *, pack):
        module = Decoder(families.from_hf({**theirs.config.to_dict(), "model_type": "llama"}))
        module.load_state_dict({name.removeprefix("model."): weight for name, weight in theirs.state_dict().items()})
        return LanguageModel("llama", (module.pack() if pack else module).eval(), tiny.tokenizer, None)

    return convert


@pytest.fixture
def fake(monkeypatch):
    """Engines compute with the fake runner."""
    monkeypatch.setattr("pippin.engine.engine.make_runner", FakeRunner)
    monkeypatch.setattr("pippin.engine.cache_size.runner_class", lambda model: FakeRunner)


@pytest.fixture
def engine(tiny):
    with Engine(tiny, max_num_seqs=3, max_num_batched_tokens=32, cache_tokens=2048) as engine:
        yield engine
