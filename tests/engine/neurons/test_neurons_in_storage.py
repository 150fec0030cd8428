"""`pippin.load(memory=...)` of a model with ReLU: answers of the whole model, and a process that holds its budget."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import pippin
from pippin.claims.worlds.sequences.byte_text import VOCABULARY, byte_model, byte_text
from pippin.core import native
from pippin.core.errors import (
    CorruptedFile,
    GenerationError,
    InvalidArgument,
    ModelNotFound,
    NotEnoughMemory,
    PromptCacheMismatch,
)
from pippin.core.memory import MemoryBudget
from pippin.core.store import reference
from pippin.engine import Engine, ModelOptions
from pippin.engine.experts.memory_share import MemoryShare
from pippin.engine.measure.measure_budgets import measure_budget
from pippin.engine.neurons import StoredFeedForward
from pippin.language import Decoder, DecoderConfig, LayerSpec, memory_placement
from pippin.language.checkpoint_headers import read_headers
from pippin.language.neuron_predictor import NeuronPredictor, NeuronPredictorConfig, fingerprint
from pippin.language.weight_packing import choose_packing
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.feedforward.feedforward import FeedForward, FeedForwardSpec
from pippin.nn.quantization.packed import AbsentWeight

WIDTH, INNER = 128, 768  # of the models here
pytestmark = pytest.mark.skipif(native.library() is None, reason="the native kernels are not built")

CHILD = """
import sys
import pippin, torch
def status(name):
    with open("/proc/self/status") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith(name))
before = status("VmRSS")
model = pippin.load(sys.argv[1], device="cpu", memory=int(sys.argv[2]), neuron_predictor=sys.argv[3] or None)
asked = ("A fox. " * 60, "9 + 9", "Cats, birds. " * 30)
texts = [model.generate(text, max_tokens=6, temperature=0).token_ids for text in asked]
stats = model.__dict__["_engine"].engine.stats()
print(__import__("json").dumps([status("VmHWM") - before, texts, stats.neuron_bytes_read, stats.neuron_misses]))
"""


@pytest.fixture
def small(monkeypatch):
    """Budgets that small models have too little memory for as a whole: what code takes does not count."""
    for name in ("_LIBRARIES", "_VOCABULARY", "_TORCH", "_BRINGING"):
        monkeypatch.setattr(memory_placement, name, 0)
    monkeypatch.setattr(memory_placement, "workspace_bytes", lambda config, tokens: 0)
    monkeypatch.setattr(memory_placement, "_neuron_workspace", lambda layers, tokens: 0)
    monkeypatch.setattr(memory_placement.MemoryBudget, "left", property(lambda budget: budget.nbytes))


@pytest.fixture
def tight(monkeypatch):
    """Neurons have the least room."""
    monkeypatch.setattr(MemoryShare, "__call__", lambda share, tokens, held: share._least)


def finds_all(model, folder):
    """A folder with a predictor of a model for which every neuron fires."""
    found, packing = reference.resolve(model), choose_packing("auto", torch.device("cpu"))
    stored = memory_placement.write_neurons(found, read_headers(found), packing, predicted=True)
    neurons = tuple(layer.neurons for layer in stored.layers)
    predictor = NeuronPredictor(NeuronPredictorConfig(stored.layers[0].width, neurons, 2, fingerprint(stored)))
    predictor.thresholds.fill_(-torch.inf)
    predictor.save(folder)
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="resident memory is read from /proc")
@pytest.mark.parametrize(
    ("gated", "predicted"), [(True, False), (True, True), pytest.param(False, False, marks=pytest.mark.slow)]
)
def test_a_process_holds_its_budget_and_answers_as_without_one(tmp_path, monkeypatch, least_of, gated, predicted):
    monkeypatch.setenv("PIPPIN_HOME", str(tmp_path / "home"))
    layer = LayerSpec(AttentionSpec(), FeedForwardSpec(8192, "relu" if gated else "relu2", gated))
    sizes = ("llama" if gated else "arcee", VOCABULARY, 512, (layer,) * (12 if gated else 24), 4, 2, 128, 2048)
    module = Decoder(DecoderConfig(*sizes)).initialize(seed=0).to(torch.bfloat16)
    for part in module.layers:  # one neuron in ten fires for a token
        mlp = part.mlp
        decides = mlp.gate_proj or mlp.up_proj
        decides.weight.data[: 9 * 8192 // 10] = -decides.weight.data[: 9 * 8192 // 10].abs()
        part.post_attention_layernorm.weight.data.abs_()
    byte_model(module).save(tmp_path / "large")
    del module
    predictor = finds_all(tmp_path / "large", tmp_path / "predictor") if predicted else None
    least = least_of(tmp_path / "large", neuron_predictor=predictor)
    whole = sum(p.stat().st_size for p in (tmp_path / "large").glob("*.safetensors"))
    if predicted:
        assert least < least_of(tmp_path / "large")
    answers = []
    for budget in (least, 10 * whole):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", CHILD, tmp_path / "large", str(budget), predictor or ""],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        peak, tokens, read, misses = json.loads(done.stdout)
        assert peak <= budget
        assert (read > 0) == (misses > 0) == (budget == least)
        answers.append(tokens)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_are_those_of_the_whole_model(folder, small, tight, least_of, dtype):
    bounded = pippin.load(folder, device="cpu", dtype=dtype, memory=least_of(folder, dtype=dtype))
    whole = pippin.load(folder, device="cpu", dtype=dtype)
    assert bounded.placement.neurons.dtype == dtype
    prompts = [byte_text().held_out[at : at + 150].tolist() for at in (0, 1000, 2000)]
    with Engine(bounded, max_num_seqs=3) as found, Engine(whole, max_num_seqs=3) as expected:
        assert isinstance(bounded.module.layers[0].mlp, StoredFeedForward)
        for prompt in prompts:
            ours, theirs = (engine.score(prompt, [[7, 8, 9], [32]]) for engine in (found, expected))
            for mine, other in zip(ours, theirs, strict=True):
                np.testing.assert_allclose(mine, other, atol=1e-4 if dtype == "float32" else 0.05)
        stats = found.stats()
        assert stats.neuron_misses > 0
        assert stats.neuron_bytes_used <= bounded.placement.least_room
        assert found.neuron_store.stats.hit_rate < 1
    assert isinstance(bounded.module.layers[0].mlp, FeedForward)
    texts = ["import os\n", "def main(", "class A:\n    "]
    answers = [
        [each.token_ids for each in model.generate(texts, max_tokens=20, temperature=0)] for model in (bounded, whole)
    ]
    alone = [bounded.generate(text, max_tokens=20, temperature=0).token_ids for text in texts]
    assert answers[0] == answers[1] == alone


def test_with_a_predictor_no_matrix_of_the_layers_is_in_memory(folder, small, tight, least_of, tmp_path):
    predictor = finds_all(folder, tmp_path / "predictor")
    least = least_of(folder, neuron_predictor=predictor)
    bounded = pippin.load(folder, device="cpu", memory=least, neuron_predictor=predictor)
    mlp = bounded.module.layers[0].mlp
    matrices = [part for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj) if part is not None]
    assert all(isinstance(part.packed, AbsentWeight) for part in matrices)
    exact = pippin.load(folder, device="cpu", memory=least_of(folder))
    assert bounded.placement.key != exact.placement.key
    prompt = byte_text().held_out[:100].tolist()
    with Engine(bounded) as found, Engine(exact) as expected:
        ours, theirs = (engine.score(prompt, [[7, 8, 9], [32]]) for engine in (found, expected))
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(one, other, atol=0.05)


def test_a_predictor_that_finds_nothing_turns_layers_off(folder, small, least_of, tmp_path):
    predictor = finds_all(folder, tmp_path / "predictor")
    nothing = NeuronPredictor.load(predictor)
    nothing.thresholds.fill_(torch.inf)
    nothing.save(tmp_path / "nothing")
    least = least_of(folder, neuron_predictor=predictor)
    prompt, scores = byte_text().held_out[:100].tolist(), []
    for each in (predictor, tmp_path / "nothing"):
        with Engine(pippin.load(folder, device="cpu", memory=least, neuron_predictor=each)) as engine:
            scores.append(engine.score(prompt, [[32]])[0])
            assert bool(engine.stats().neuron_misses) == (each == predictor)
    assert np.abs(np.subtract(*scores)).max() > 0.1


def test_a_predictor_that_does_not_fit_is_refused(folder, small, least_of, tiny, tmp_path):
    predictor = finds_all(folder, tmp_path / "predictor")
    with pytest.raises(InvalidArgument, match="give memory as well"):
        pippin.load(folder, device="cpu", neuron_predictor=predictor)
    with pytest.raises(InvalidArgument, match="give memory as well"):
        ModelOptions(neuron_predictor=predictor)
    with pytest.raises(ModelNotFound):
        pippin.load(folder, device="cpu", memory=1, neuron_predictor=tmp_path / "none")
    other = NeuronPredictor(NeuronPredictorConfig(WIDTH, (INNER, INNER + 1), 2, "another"))
    other.save(tmp_path / "other")
    with pytest.raises(
        InvalidArgument, match=f"2 layers of {INNER + 1} .*the model has 2 of {INNER} and width {WIDTH}"
    ):
        pippin.load(folder, device="cpu", memory=1, neuron_predictor=tmp_path / "other")
    tiny.save(tmp_path / "tiny")
    with pytest.raises(InvalidArgument, match=r"no such neurons; it has no experts, and none of its neurons"):
        pippin.load(tmp_path / "tiny", device="cpu", memory=1, neuron_predictor=predictor)
    least = least_of(folder, neuron_predictor=predictor, dtype="float32")
    with pytest.raises(InvalidArgument, match="another precision; train one"):
        pippin.load(folder, device="cpu", memory=least, dtype="float32", neuron_predictor=predictor)


def test_the_neurons_that_were_used_most_are_there_at_the_next_start(folder, small, least_of, monkeypatch):
    monkeypatch.setattr(MemoryShare, "__call__", lambda share, tokens, held: 600_000)
    prompt, rates = byte_text().held_out[:60].tolist(), []
    for _ in range(2):
        model = pippin.load(folder, device="cpu", memory=least_of(folder))
        hot = model.placement.neurons.path.parent / "hot.json"
        with Engine(model) as engine:
            before = engine.stats().neuron_bytes_read
            assert (before > 0) == hot.exists()
            assert engine.stats().neuron_bytes_used <= 600_000
            engine.score(prompt, [[32]])
            rates.append(engine.neuron_store.stats.hit_rate)
            used = engine.neuron_store.most_used()
        listed = json.loads(hot.read_text())["neurons"]
        assert listed == [layer.tolist() for layer in used]
    assert rates[1] > rates[0] + 0.3
    for damage in ("{}", "{", '{"neurons": [[0], [-1]]}', '{"neurons": [[0], [99999]]}', '{"neurons": [[3, 3], [1]]}'):
        hot.write_text(damage)
        with Engine(pippin.load(folder, device="cpu", memory=least_of(folder))) as engine:
            assert engine.stats().neuron_bytes_read == 0


def test_a_model_that_fits_is_in_memory(folder, least_of):
    model = pippin.load(folder, device="cpu", memory="2GB")
    assert model.placement.neurons is None
    assert model.generate("import", max_tokens=2).token_ids


def test_without_relu_the_refusal_says_why(tiny, tmp_path):
    tiny.save(tmp_path / "dense")
    with pytest.raises(NotEnoughMemory, match=r"none of its neurons is ever exactly zero \(silu\), as with ReLU"):
        pippin.load(tmp_path / "dense", device="cpu", memory=1)


def test_quantized_neurons_stay_in_memory(folder, small):
    with pytest.raises(NotEnoughMemory, match="not those of quantized weights"):
        pippin.load(folder, device="cpu", bits=8, memory=1)


def test_the_file_is_written_once_and_checked(folder, small, tight, least_of, tmp_path):
    least, times = least_of(folder), set()
    for _ in range(2):
        model = pippin.load(folder, device="cpu", memory=least)
        (path,) = (tmp_path / "home").glob("neurons/*/neurons.bin")
        times.add(path.stat().st_mtime_ns)
        with Engine(model) as engine:
            engine.score([1, 2, 3], [[4]])
    assert len(times) == 1
    os.utime(path, ns=(0, 0))
    with pytest.raises(CorruptedFile, match="was changed since"):
        Engine(model)
    path.write_bytes(bytes(each ^ 1 for each in path.read_bytes()[: model.placement.neurons.layers[1].offset])
                     + path.read_bytes()[model.placement.neurons.layers[1].offset :])  # fmt: skip
    again = pippin.load(folder, device="cpu", memory=least)
    with pytest.raises(CorruptedFile, match="checksum"):  # in neurons that were used before
        Engine(again)
    (path.parent / "hot.json").unlink()
    with Engine(again) as engine, pytest.raises(GenerationError, match="checksum"):
        engine.score(byte_text().held_out[:100].tolist(), [[4]])


def test_a_prompt_cache_tells_neurons_in_storage_apart(folder, small, tight, least_of, tmp_path):
    bounded = pippin.load(folder, device="cpu", memory=least_of(folder))
    with Engine(bounded) as engine:
        engine.prefill(list(range(64)))
        engine.save_prompt_cache(tmp_path / "prompts")
    with Engine(bounded) as engine:
        assert engine.load_prompt_cache(tmp_path / "prompts") == 1
    with Engine(pippin.load(folder, device="cpu")) as engine, pytest.raises(PromptCacheMismatch):
        engine.load_prompt_cache(tmp_path / "prompts")


def test_a_model_in_storage_is_for_generating_alone(folder, small, least_of, tmp_path):
    model = pippin.load(folder, device="cpu", memory=least_of(folder))
    with pytest.raises(InvalidArgument, match="pack"):
        model.save(tmp_path / "copy")
    with pytest.raises(InvalidArgument, match="only the engine brings them"), torch.no_grad():
        model.module(torch.tensor([[1, 2]]))


def test_a_budget_is_measured(folder, small, tight, least_of):
    budget = MemoryBudget.of(least_of(folder))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = measure_budget(
            lambda budget: pippin.load(folder, device="cpu", memory=budget), budget, prompt=20, answer=4, repeats=1
        )
    assert 0 < found.hit_rate[0] < 1
    assert found.bytes_per_token[0] > 0
