"""A budget of memory: what it counts, its least, and a process that holds it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import pippin
from pippin.core import memory, native
from pippin.core.errors import (
    CorruptedFile,
    DiskFull,
    GenerationError,
    InvalidArgument,
    NotEnoughMemory,
    PromptCacheMismatch,
)
from pippin.core.memory import MemoryBudget
from pippin.engine import Engine, record_expert_trace
from pippin.engine.experts.memory_share import MemoryShare
from pippin.language.memory_placement import Placement

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native kernels are not built")

CHILD = """
import sys
import pippin, torch
def status(name):
    with open("/proc/self/status") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith(name))
before = status("VmRSS")
model = pippin.load(sys.argv[1], device="cpu", memory=int(sys.argv[2]))
asked = ("A fox. " * 100, "9 + 9", "Cats, birds. " * 40)
texts = [model.generate(text, max_tokens=12, temperature=0).text for text in asked]
stats = model.__dict__["_engine"].engine.stats()
print(__import__("json").dumps([status("VmHWM") - before, texts, stats.expert_bytes_read, stats.expert_misses]))
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PIPPIN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def small(save_mixture, tmp_path):
    return save_mixture(tmp_path / "mixture")


@pytest.fixture
def tight(monkeypatch):
    """Experts have the least room."""
    monkeypatch.setattr(MemoryShare, "__call__", lambda share, tokens, held: share._least)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
def test_a_process_holds_its_budget_and_answers_as_without_one(save_mixture, tmp_path, home, least_of):
    folder = save_mixture(tmp_path / "large", width=512, inner=512, experts=32, layers=6)
    least, whole = least_of(folder), sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert whole > 2 * least
    texts = []
    for budget in (least, 2 * least, 10 * whole):
        done = subprocess.run(
            [sys.executable, "-c", CHILD, folder, str(budget)], capture_output=True, text=True, check=True
        )
        peak, answers, read, misses = json.loads(done.stdout)
        assert peak <= budget
        assert (read > 0) == (misses > 0) == (budget < whole)
        texts.append(answers)
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("size", ["", "much", "0", 0, -5, True, 1.5, "-3GB"])
def test_what_is_no_size_is_refused(size, small):
    with pytest.raises(InvalidArgument):
        pippin.load(small, device="cpu", memory=size)


def test_auto_takes_a_model_that_fits_as_a_whole(small, monkeypatch, least_of):
    assert pippin.load(small, device="cpu", memory="auto").placement is None
    monkeypatch.setattr(memory.devices, "memory", lambda: type("", (), {"available": least_of(small)}))
    with pytest.raises(NotEnoughMemory):  # of which 80 % are not enough
        pippin.load(small, device="cpu", memory="auto")


@pytest.mark.parametrize("options", [{"pack": False}, {"dtype": "float16"}])
def test_weights_without_kernels_have_no_budget(small, options):
    with pytest.raises(InvalidArgument, match="memory needs weights that are packed for the native kernels"):
        pippin.load(small, device="cpu", memory="1GB", **options)


def test_a_dense_model_is_loaded_as_a_whole_or_refused(tiny, tmp_path, least_of):
    tiny.save(tmp_path / "dense")
    least = least_of(tmp_path / "dense")
    model = pippin.load(tmp_path / "dense", device="cpu", memory=least)
    assert model.placement == Placement(model.placement.budget, least)
    assert model.generate("abc", max_tokens=3).token_ids
    with Engine(pippin.load(tmp_path / "dense", device="cpu", memory="200MB"), max_num_seqs=64) as engine:
        assert engine.stats().blocks_total * engine._runner.block_bytes <= 200_000_000


def test_quantized_experts_are_packed_once_into_a_file(small, home, tight, least_of):
    def answer(**options):
        with Engine(pippin.load(small, device="cpu", bits=4, **options)) as engine:
            return engine.score(list(range(40)), [[1, 2]])

    least, written = least_of(small, bits=4), set()
    for _ in range(2):
        assert answer(memory=least) == answer()
        (path,) = home.glob("experts/*/experts.bin")
        written.add(path.stat().st_mtime_ns)
    assert len(written) == 1
    assert len(list(home.glob("experts/*.hot.json"))) == 1
    contents = bytearray(path.read_bytes())
    damaged = bytes(each ^ 1 for each in contents)
    path.write_bytes(damaged)
    with pytest.raises(GenerationError, match="checksum"):
        answer(memory=least)
    path.write_bytes(contents[:-1])
    with pytest.raises(CorruptedFile, match="delete it, and it is written anew"):
        answer(memory=least)


def test_a_disk_that_fills_leaves_nothing_behind(small, home, monkeypatch, least_of):
    least = least_of(small, bits=4)
    monkeypatch.setattr("pippin.language.stored_experts._append", lambda *_: (_ for _ in ()).throw(DiskFull("full")))
    with pytest.raises(DiskFull):
        pippin.load(small, device="cpu", bits=4, memory=least)
    assert not [path for path in home.rglob("*") if path.is_file()]


def test_a_file_that_was_replaced_is_not_read(small, home, least_of):
    model = pippin.load(small, device="cpu", memory=least_of(small))
    (weights,) = small.glob("*.safetensors")
    os.utime(weights, ns=(0, 0))
    with pytest.raises(CorruptedFile, match="was changed since"):
        Engine(model)


def test_what_was_used_most_is_a_hint_that_may_be_missing_or_wrong(small, home, monkeypatch, least_of):
    least = least_of(small)
    for written in (None, "no JSON", '{"experts": [[99, 0], [0, 3]]}', '{"experts": 7}'):
        model = pippin.load(small, device="cpu", memory=least)
        hot = home / "experts" / f"{model.placement.key}.hot.json"
        if written is not None:
            hot.write_text(written)
        with Engine(model) as engine:
            engine.score([1, 2, 3], [[4]])
        assert json.loads(hot.read_text())["experts"]
    home.rename(home.with_name("elsewhere"))
    home.write_text("a file in place of the folder")
    with Engine(pippin.load(small, device="cpu", memory=least)) as engine:
        assert engine.score([1, 2, 3], [[4]])


def test_two_engines_do_not_share_a_budget(small, home, least_of):
    model = pippin.load(small, device="cpu", memory=least_of(small))
    with Engine(model), pytest.raises(InvalidArgument, match="another engine"):
        Engine(model)
    Engine(model).close()


def test_a_trace_of_a_model_in_storage_is_that_of_the_same_in_memory(small, home, tight, tmp_path, least_of):
    prompts = [list(range(50)), [7, 7, 7]]
    bounded = pippin.load(small, device="cpu", memory=least_of(small))
    for name, model in (("found", bounded), ("expected", pippin.load(small, device="cpu"))):
        record_expert_trace(model, prompts, max_tokens=5, depth=2).save(tmp_path / f"{name}.npz")
    with np.load(tmp_path / "found.npz") as found, np.load(tmp_path / "expected.npz") as expected:
        assert found.files == expected.files
        for name in set(found.files) - {"model"}:
            np.testing.assert_array_equal(found[name], expected[name])


def test_a_prompt_cache_tells_experts_in_storage_apart(small, home, tight, tmp_path, least_of):
    bounded = pippin.load(small, device="cpu", memory=least_of(small))
    with Engine(bounded) as engine:
        engine.prefill(list(range(64)))
        engine.save_prompt_cache(tmp_path / "prompts")
    with Engine(bounded) as engine:
        assert engine.load_prompt_cache(tmp_path / "prompts") == 1
    with Engine(pippin.load(small, device="cpu")) as engine, pytest.raises(PromptCacheMismatch):
        engine.load_prompt_cache(tmp_path / "prompts")


def test_a_model_in_storage_is_for_generating_alone(small, home, tmp_path, least_of):
    model = pippin.load(small, device="cpu", memory=least_of(small))
    with pytest.raises(InvalidArgument, match="pack"):
        model.save(tmp_path / "copy")
    with pytest.raises(InvalidArgument, match="only the engine brings them"), torch.no_grad():
        model.module(torch.tensor([[1, 2]]))


def test_a_budget_counts_from_when_it_was_made():
    budget = MemoryBudget.of("100MB")
    before = budget.left
    held = torch.ones(10_000_000)
    assert before - budget.left > 0.9 * held.nbytes
    assert MemoryBudget.of(budget) is budget
