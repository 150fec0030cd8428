"""A small mixture whose experts are in a file."""

import copy

from pippin.language import LanguageModel
from pippin.nn.feedforward.feedforward import MixtureOfExperts
from pippin.nn.quantization.packed import AbsentWeight

EXPERTS, LAYERS, WIDTH, INNER, VOCAB = 8, 3, 64, 32, 70
SIZE = 3 * WIDTH * INNER * 4
"""Bytes of an expert."""


def model_of(module, tiny, *, absent):
    packed = copy.deepcopy(module).pack()
    for mixture in [part for part in packed.modules() if isinstance(part, MixtureOfExperts)] if absent else []:
        for expert in mixture.experts:
            for part in expert.children():
                part.packed = AbsentWeight(part.packed.format, part.packed.rows, part.packed.columns)
    return LanguageModel("mixture", packed, tiny.tokenizer, None)
