"""Every family with experts, loaded under the least budget: logits bit-identical to those with all in memory."""

import json

import pytest
import torch

import pippin
from pippin.core import native
from pippin.core.errors import NotEnoughMemory
from pippin.engine import Engine
from pippin.engine.experts.memory_share import MemoryShare
from pippin.nn.feedforward.feedforward import MixtureOfExperts

from ...language.families.checkpoints import CHECKPOINTS, GRANITE_EXPERTS, NEMOTRON_EXPERTS, save_random

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native kernels are not built")

CHANGES = {"nemotron_h": NEMOTRON_EXPERTS, "granitemoehybrid": GRANITE_EXPERTS}
TRANSPOSED = ("gpt_oss",)
WORDS = ("expert", "moe")
FAMILIES = [name for name, fields in CHECKPOINTS.items() if any(word in json.dumps(fields) for word in WORDS)]
IDS = torch.randint(0, 250, (40,), generator=torch.Generator().manual_seed(1)).tolist()


def logprobs(model):
    with Engine(model, max_num_seqs=1, cache_tokens=64) as engine:
        found = [token.logprob for token in engine.prompt_logprobs(IDS)[1:]]
        return found, engine.stats()


@pytest.mark.parametrize(
    ("family", "dtype"),
    [(family, "auto") for family in (*FAMILIES, *CHANGES)]
    + [
        (family, "float32")
        for family in ("qwen3_moe", "mixtral", "gpt_oss", "gemma4_text with experts and keys as values")
    ],
)
def test_logits_are_bit_identical(family, dtype, tiny, tmp_path, monkeypatch):
    """As bfloat16 in a file of their own; as float32 where they are, unless all are in one tensor in another order."""
    monkeypatch.setattr(MemoryShare, "__call__", lambda share, tokens, held: share._least)
    monkeypatch.setenv("PIPPIN_HOME", str(tmp_path / "home"))
    folder = tmp_path / "model"
    save_random(family, folder, **CHANGES.get(family, {}))
    tiny.tokenizer.save(folder)
    with pytest.raises(NotEnoughMemory, match="pass memory=") as refused:
        pippin.load(folder, device="cpu", memory=1, dtype=dtype)
    least = int(str(refused.value).partition("memory=")[2].partition(" ")[0])
    model = pippin.load(folder, device="cpu", memory=least, dtype=dtype)
    mixtures = sum(isinstance(part, MixtureOfExperts) for part in model.module.modules())
    assert len(model.placement.experts) == mixtures > 0
    found, stats = logprobs(model)
    expected, _ = logprobs(pippin.load(folder, device="cpu", dtype=dtype))
    assert found == expected
    assert stats.expert_bytes_read
    assert stats.expert_bytes_used <= model.placement.least_room
    written = (tmp_path / "home" / "experts" / model.placement.key).exists()
    assert written == (dtype == "auto" or family in TRANSPOSED)
    with pytest.raises(NotEnoughMemory):
        pippin.load(folder, device="cpu", memory=least - 1, dtype=dtype)
