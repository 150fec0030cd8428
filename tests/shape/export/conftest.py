"""A small network, captured once, and a small language model with a tokenizer that GGUF has a form for."""

import dataclasses

import pytest
import torch
from tokenizers import Tokenizer as Backend, decoders, models, pre_tokenizers
from torch import nn

from pippin.data.text.chat_template import ChatTemplate
from pippin.data.text.tokenizer import Tokenizer
from pippin.language import LanguageModel
from pippin.shape.export import ExportedModel, SizeRange
from pippin.shape.export.gguf import export_gguf

from ...language.families.checkpoints import read
from .gguf_checkpoints import save


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.fc1 = nn.Linear(512, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, picture):
        return self.fc2(self.fc1(self.conv(picture).relu().flatten(1)).relu())


@pytest.fixture(scope="session")
def network():
    torch.manual_seed(0)
    return Network().eval()


@pytest.fixture(scope="session")
def asset(network):
    example = {"picture": torch.randn(2, 1, 8, 8)}
    return ExportedModel.capture(network, example, {"picture": {0: SizeRange("batch", 1, 64)}}, outputs=("logits",))


@pytest.fixture(scope="session")
def merging(tiny):
    """The tiny model with a merge: GGUF has no vocabulary without any."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({token: index for index, token in enumerate([*letters, "is"])}, [("i", "s")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_end|>", "<|im_start|>"])
    tokenizer = Tokenizer(backend, eos_ids=[257])
    return dataclasses.replace(tiny, tokenizer=tokenizer, template=ChatTemplate(tiny.template.source, tokenizer))


@pytest.fixture(scope="session")
def exported(merging, tmp_path_factory):
    """The model of a case of `gguf_checkpoints` and its GGUF file in float32; each is made once."""
    made = {}

    def get(case):
        if case not in made:
            folder = tmp_path_factory.mktemp("case")
            save(case, folder)
            model = LanguageModel("small", read(folder), merging.tokenizer, None)
            made[case] = model, export_gguf(model, folder / "model.gguf", "F32", show_progress=False)
        return made[case]

    return get
