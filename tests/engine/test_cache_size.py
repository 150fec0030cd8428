"""What an engine computes and keeps at once within a budget of memory."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import pippin
from pippin.core import native
from pippin.core.errors import NotEnoughMemory
from pippin.core.memory import MemoryBudget
from pippin.engine import Engine
from pippin.engine.cache_size import engine_size
from pippin.language import Decoder, LanguageModel, families

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native kernels are not built")

CHILD = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
import pippin, torch
from pippin.engine import Engine
def status(name):
    with open("/proc/self/status") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith(name))
before = status("VmRSS")
model = pippin.load(sys.argv[1], device="cpu", memory=int(sys.argv[2]))
with Engine(model) as engine, ThreadPoolExecutor(8) as pool:
    prompts = [[10 + number, *range(100, 140)] for number in range(8)]
    scores = list(pool.map(lambda prompt: engine.score(prompt, [[each] * 9 for each in range(40)]), prompts))
print(json.dumps([status("VmHWM") - before, scores]))
"""
STATE = 6 * 4 * (24 * 128 * 128)
"""Bytes of the recurrent states of a sequence; a few more are those of convolutions."""


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """A model whose states take much more memory than its weights."""
    config = {"model_type": "qwen3_5_text", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 8}
    config |= {"layer_types": [*["linear_attention"] * 3, "full_attention"] * 2, "head_dim": 32, "hidden_act": "silu"}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": tiny.vocab_size}
    config |= {"linear_num_key_heads": 4, "linear_num_value_heads": 24, "linear_key_head_dim": 128}
    config |= {"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "max_position_embeddings": 2048}
    config |= {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "partial_rotary_factor": 0.25, "tie_word_embeddings": True}
    made = Decoder(families.from_hf(config)).initialize(seed=0).to(torch.bfloat16)
    folder = tmp_path_factory.mktemp("recurrent")
    LanguageModel("recurrent", made, tiny.tokenizer, tiny.template).save(folder)
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
def test_states_snapshots_and_logits_are_held_to_a_budget(folder, least_of):
    least, found = least_of(folder), []
    assert least > 3 * STATE
    for budget in (least, 2 * least):
        done = subprocess.run(
            [sys.executable, "-c", CHILD, folder, str(budget)], capture_output=True, text=True, check=True
        )
        peak, scores = json.loads(done.stdout)
        assert peak <= budget
        found.append(scores)
    assert found[0] == found[1]


def test_a_larger_budget_never_runs_less(folder, least_of):
    model, sizes = pippin.load(folder, device="cpu", memory=least_of(folder)), []
    for left in (STATE, 10 * STATE, 100 * STATE, 1000 * STATE):
        budget = MemoryBudget(left)  # from now on
        model = replace(model, placement=replace(model.placement, budget=budget))
        size = engine_size(model, 8)
        assert 1 <= size.max_num_seqs <= 8
        assert size.max_snapshots * STATE <= left
        sizes.append((size.max_num_seqs, size.max_scored_rows, size.num_blocks, size.max_snapshots))
    assert sizes == sorted(sizes)
    assert sizes[0][0] < sizes[-1][0] == 8


def test_a_cache_beyond_the_budget_is_refused_and_the_most_that_is_named_works(tiny, tmp_path, least_of):
    tiny.save(tmp_path / "dense")
    model = pippin.load(tmp_path / "dense", device="cpu", memory=least_of(tmp_path / "dense"))
    with pytest.raises(NotEnoughMemory, match="take fewer, or load it with more memory") as refused:
        Engine(model, cache_tokens=16 * 10**9)
    most = int(str(refused.value).partition("leaves room for ")[2].partition(";")[0].replace(",", ""))
    with Engine(model, cache_tokens=most // 2, max_num_seqs=1) as engine:
        assert engine.stats().blocks_total == most // 2 // 16
