"""Whether a model can be used, on real and damaged files; the memory of a fresh process is the oracle of sizes."""

import json
import subprocess
import sys

import pytest
import torch

import pippin
from pippin.core import device as devices, native
from pippin.core.errors import CorruptedFile, InvalidArgument, ModelNotFound, PippinError
from pippin.core.store import store
from pippin.core.store.reference import resolve
from pippin.engine.model_runner import BLOCK_SIZE
from pippin.engine.runners.select import runner_class
from pippin.language.availability import Availability, availability, memory_needed
from pippin.language.checkpoint_headers import read_headers
from pippin.language.weight_packing import Packing

MEASURE = """
import ctypes, gc, re, sys
import torch
from pippin.language import load
from pippin.engine.runners import native_runner, torch_runner  # what the libraries take for themselves
from pippin.engine.model_runner import BLOCK_SIZE
from pippin.engine.runners.select import make_runner

def held():
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)  # what was freed and is kept by the allocator is no need of the model's
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

path, dtype, context = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)
torch.nn.functional.linear(torch.ones(64, 64), torch.ones(64, 64))
before = held()
model = load(path, device="cpu", dtype=dtype)
runner = make_runner(model, context // BLOCK_SIZE)
for block in range(runner.blocks):
    runner.write([block], torch.ones(1, runner.block_bytes, dtype=torch.uint8))
print(held() - before)
"""


@pytest.fixture
def empty_home(tmp_path, monkeypatch):
    """A cache with nothing in it, no login at the hub, and the network allowed."""
    monkeypatch.setenv("PIPPIN_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PIPPIN_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)


@pytest.fixture
def folder(tiny, tmp_path):
    tiny.save(tmp_path / "model")
    return tmp_path / "model"


def test_an_installed_model_is_available_and_the_answer_is_true(default_model_path):
    found = availability(default_model_path, device="cpu")
    assert found == Availability("available", found.detail)
    assert found
    assert found.available
    assert default_model_path.stem in found.detail


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_estimate_is_what_a_fresh_process_grows_by(default_model_path, dtype):
    arguments = [sys.executable, "-c", MEASURE, str(default_model_path), dtype, "4096"]
    measured = int(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout)
    estimate = memory_needed(default_model_path, dtype, device="cpu", context=4096)
    assert estimate == pytest.approx(measured, rel=0.10)


def held_by(model) -> int:
    """Bytes of the ordinary tensors and the packed weights of a loaded model, each counted once."""
    held = {}
    for part in model.module.modules():
        packed = getattr(part, "packed", None)
        if packed is not None:
            held[id(packed)] = packed.nbytes
        held.update((id(tensor), tensor.nbytes) for tensor in part.parameters(recurse=False))
    return sum(held.values())


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
def test_the_estimate_is_what_a_loaded_model_holds(folder, dtype, kernels, monkeypatch):
    if not kernels:
        monkeypatch.setattr(native, "library", lambda: None)
    loaded = pippin.load(folder, device="cpu", dtype=dtype)
    assert memory_needed(folder, dtype, device="cpu", context=0) == held_by(loaded)
    per_token = memory_needed(folder, dtype, device="cpu", context=1) - held_by(loaded)
    assert per_token * BLOCK_SIZE == runner_class(loaded).block_bytes_of(loaded)
    whole = memory_needed(folder, dtype, device="cpu")
    assert whole == held_by(loaded) + per_token * loaded.context_size


@pytest.mark.skipif(native.library() is None, reason="the native kernels are not built")
def test_fewer_bits_need_less_memory(default_model_path):
    sizes = [memory_needed(default_model_path, device="cpu", bits=bits, context=0) for bits in (2, 3, 4, 8, None)]
    assert sizes[:4] == sorted(sizes[:4])
    assert sizes[4] == held_by(pippin.load(default_model_path, device="cpu"))
    assert availability(default_model_path, device="cpu", bits=2)
    with pytest.raises(InvalidArgument, match="bits must be 2, 3, 4 or 8, got 5"):
        availability(default_model_path, device="cpu", bits=5)
    # on a GPU, codes of 3 bits take the room of 4
    seen = read_headers(resolve(default_model_path))
    gpu = {bits: Packing(torch.device("cuda"), torch.bfloat16, bits=bits) for bits in (2, 3, 4)}
    assert gpu[2].nbytes(seen.module, seen.kinds) < gpu[3].nbytes(seen.module, seen.kinds)
    assert gpu[3].nbytes(seen.module, seen.kinds) == gpu[4].nbytes(seen.module, seen.kinds)


@pytest.mark.parametrize("name", ["smollm2-135n", "no such thing", "./nowhere", "nowhere.gguf", "bfcl"])
def test_what_nothing_answers_to_is_not_found(name, empty_home):
    assert availability(name, device="cpu").reason == "not_found"


def test_a_near_name_is_suggested(empty_home):
    assert "smollm2-135m" in availability("smollm2-135n", device="cpu").detail


@pytest.mark.parametrize("name", ["smollm2-360m", "Qwen/Qwen3-0.6B", "owner/name@v1", "owner/name:file.gguf"])
def test_what_a_pull_could_bring_is_not_installed(name, empty_home):
    found = availability(name, device="cpu")
    assert found.reason == "not_installed"
    assert f"`pippin pull {name}`" in found.detail


@pytest.mark.parametrize("name", ["smollm2-360m", "gemma3-270m", "Qwen/Qwen3-0.6B"])
def test_offline_says_that_it_cannot_be_fetched_now(name, empty_home, monkeypatch):
    monkeypatch.setenv("PIPPIN_OFFLINE", "1")
    found = availability(name, device="cpu")
    assert found.reason == "offline"
    assert "PIPPIN_OFFLINE" in found.detail


def test_offline_does_not_matter_to_what_is_here(default_model_path, monkeypatch):
    monkeypatch.setenv("PIPPIN_OFFLINE", "1")
    assert availability(default_model_path, device="cpu")


def test_a_gated_model_needs_its_license_accepted_until_someone_is_logged_in(empty_home, monkeypatch):
    found = availability("gemma3-270m", device="cpu")
    assert found.reason == "license_required"
    assert "google/gemma-3-270m-it" in found.detail
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "a token")
    assert availability("gemma3-270m", device="cpu").reason == "not_installed"


def test_too_little_memory_is_told_with_both_figures(default_model_path, monkeypatch):
    weights = memory_needed(default_model_path, "float32", device="cpu", context=0)
    monkeypatch.setattr(devices, "memory", lambda: devices.MemoryInfo(1 << 34, weights))
    found = availability(default_model_path, device="cpu", dtype="float32")
    assert found.reason == "not_enough_memory"
    assert not found
    assert "2,048 tokens" in found.detail
    monkeypatch.setattr(devices, "memory", lambda: devices.MemoryInfo(1 << 34, 2 * weights))
    assert availability(default_model_path, device="cpu", dtype="float32")
    long = availability(default_model_path, device="cpu", dtype="float32", context=1 << 20)
    assert "8,192 tokens" in long.detail


def test_a_file_that_is_cut_short_is_corrupted(default_model_path, tmp_path):
    path = tmp_path / "cut.gguf"
    with open(default_model_path, "rb") as whole:
        path.write_bytes(whole.read(10_000_000))
    found = availability(path, device="cpu")
    assert found.reason == "corrupted"
    assert "cut.gguf" in found.detail
    with pytest.raises(CorruptedFile):
        memory_needed(path, device="cpu")


def test_a_weight_type_that_cannot_be_read_is_unsupported_before_it_is_loaded(default_model_path, tmp_path):
    path = tmp_path / "other.gguf"
    data = bytearray(default_model_path.read_bytes())
    at = data.index(b"blk.0.attn_norm.weight") + len(b"blk.0.attn_norm.weight")
    dimensions = int.from_bytes(data[at : at + 4], "little")
    kind = at + 4 + 8 * dimensions
    assert data[kind : kind + 4] == bytes(4)  # float32
    data[kind : kind + 4] = (26).to_bytes(4, "little")  # int32: as large, and not a weight
    path.write_bytes(data)
    assert availability(path, device="cpu").reason == "unsupported"


def damage_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def cut_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


DAMAGE = [
    (cut_weights, "corrupted"),
    (lambda folder: damage_config(folder, num_hidden_layers=3), "corrupted"),
    (lambda folder: (folder / "config.json").write_text("{"), "corrupted"),
    (lambda folder: (folder / "config.json").unlink(), "corrupted"),
    (lambda folder: damage_config(folder, model_type="no_such_family"), "unsupported"),
    (lambda folder: damage_config(folder, quantization_config={"quant_method": "hqq"}), "unsupported"),
    (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "unsupported"),
    (lambda folder: [path.unlink() for path in folder.iterdir()], "not_found"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGE)
def test_a_damaged_folder_is_told_apart_and_load_agrees(folder, damage, reason):
    assert availability(folder, device="cpu")
    damage(folder)
    found = availability(folder, device="cpu")
    assert found.reason == reason
    with pytest.raises(PippinError) as raised:
        pippin.load(folder, device="cpu")
    assert str(raised.value) == found.detail


def test_a_file_that_may_not_be_read_is_an_answer_and_not_an_exception(default_model_path, monkeypatch):
    def refuse(ref, *, download):
        raise PermissionError(13, "Permission denied", str(ref))

    monkeypatch.setattr("pippin.core.store.reference.resolve", refuse)
    found = availability(default_model_path, device="cpu")
    assert found.reason == "corrupted"
    assert "Permission denied" in found.detail


def test_a_sentence_encoder_has_weights_and_no_cache(tmp_path):
    from transformers import BertConfig, BertModel

    encoder = BertModel(
        BertConfig(vocab_size=100, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    )
    encoder.save_pretrained(tmp_path)
    numbers = sum(parameter.numel() for parameter in encoder.parameters())
    assert memory_needed(tmp_path, device="cpu") == 4 * numbers
    assert availability(tmp_path, device="cpu")


def test_nothing_is_fetched(empty_home, monkeypatch):
    monkeypatch.setattr(store, "pull", lambda *arguments, **options: pytest.fail("something was fetched"))
    assert not availability("smollm2-135m", device="cpu")
    with pytest.raises(ModelNotFound, match="pippin pull smollm2-135m"):
        memory_needed("smollm2-135m", device="cpu")


@pytest.mark.parametrize("options", [{"device": "tpu"}, {"dtype": "int7"}, {"context": -1}])
def test_arguments_out_of_range_are_refused(options, folder):
    with pytest.raises(InvalidArgument):
        availability(folder, **{"device": "cpu"} | options)
    with pytest.raises(InvalidArgument):
        memory_needed(folder, **{"device": "cpu"} | options)
    with pytest.raises(InvalidArgument):
        availability(folder, device="cpu", context=0)
