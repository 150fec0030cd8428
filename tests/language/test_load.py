"""`pippin.load` on real and on damaged checkpoints; transformers' own reading of the same file is the oracle."""

import copy
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import pippin
from pippin.core.errors import CorruptedFile, InvalidArgument, ModelNotFound, UnsafeCheckpoint, UnsupportedModel
from pippin.engine import DenseCache, Engine, Request, SamplingOptions

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def reference(default_model_path, tmp_path_factory):
    """The default model as transformers reads it from the same GGUF file, in float32."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("gguf")
    (folder / "model.gguf").symlink_to(default_model_path)
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def saved(default_model_path, tmp_path_factory):
    """The default model written as a folder in Hugging Face layout."""
    folder = tmp_path_factory.mktemp("saved")
    pippin.load(default_model_path, device="cpu", dtype="float32", pack=False).save(folder)
    return folder


def test_real_logits_equal_transformers_with_and_without_cache(default_model_path, reference):
    plain = pippin.load(default_model_path, device="cpu", dtype="float32", pack=False)
    ids = torch.tensor([plain.template.encode(QUESTION)])
    with torch.no_grad():
        expected = reference(ids).logits
        torch.testing.assert_close(plain.module(ids), expected, atol=1e-4, rtol=0)
        cache = DenseCache(plain.config, ids.shape[1])
        pieces = torch.cat([plain.module(piece, cache=cache) for piece in ids.split(10, dim=1)], 1)
        torch.testing.assert_close(pieces, expected, atol=1e-4, rtol=0)


def test_packed_weights_are_as_exact_as_transformers(model, reference):
    ids = torch.tensor([model.template.encode(QUESTION)])
    with torch.no_grad():
        single = reference(ids).logits
        exact = copy.deepcopy(reference).double()(ids).logits
        error = (model.module(ids) - exact).abs().max()
    assert error < 2 * (single - exact).abs().max()


def test_greedy_text_equals_transformers_over_64_tokens(model, reference):
    ids = model.template.encode([{"role": "user", "content": "Tell me a story about an apple tree."}])
    *tokens, _ = Engine(model).stream(Request(ids, SamplingOptions(max_tokens=64)))
    with torch.no_grad():
        expected = reference.generate(torch.tensor([ids]), max_new_tokens=64, do_sample=False)[0, len(ids) :].tolist()
    assert [token.id for token in tokens] == expected
    assert "".join(token.text for token in tokens) == model.tokenizer.decode(expected)


def test_a_saved_folder_is_read_by_transformers_and_by_us(saved, model):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = torch.tensor([model.template.encode(QUESTION)])
    theirs = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32).eval()
    ours = pippin.load(saved, device="cpu", dtype="float32", pack=False)
    with torch.no_grad():
        torch.testing.assert_close(ours.module(ids), theirs(ids).logits, atol=1e-4, rtol=0)
    tokenizer = AutoTokenizer.from_pretrained(saved)
    text = "Straße, 東京 🍎  two  spaces\n\ttab 12345"
    assert tokenizer.encode(text) == ours.tokenizer.encode(text) == model.tokenizer.encode(text)
    templated = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    assert templated == ours.template.encode(QUESTION)


def test_a_folder_is_mapped_and_not_copied(saved):
    ours = pippin.load(saved, device="cpu", dtype="float32", pack=False)
    tensors = load_file(saved / "model.safetensors")
    weight = ours.module.layers[3].mlp.up_proj.weight
    torch.testing.assert_close(weight.data, tensors["model.layers.3.mlp.up_proj.weight"], atol=0, rtol=0)
    with open("/proc/self/maps") as maps:
        spans = [line.split()[0].split("-") for line in maps if str(saved / "model.safetensors") in line]
    assert any(int(a, 16) <= weight.data_ptr() < int(b, 16) for a, b in spans), "the weight is not in the mapped file"


def test_bfloat16_answers_like_float32(default_model_path):
    loaded = pippin.load(default_model_path, device="cpu", dtype="bfloat16")
    *tokens, _ = Engine(loaded).stream(Request(loaded.template.encode(QUESTION), SamplingOptions(max_tokens=20)))
    assert "Paris" in "".join(token.text for token in tokens)
    assert loaded.dtype == torch.bfloat16


def test_a_packed_model_refuses_to_be_saved(model, tmp_path):
    with pytest.raises(InvalidArgument, match="pack=False"):
        model.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def folder(tiny, tmp_path):
    """A small checkpoint to damage."""
    tiny.save(tmp_path / "model")
    return tmp_path / "model"


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in (config | changes).items() if v is not ...}))


def test_a_small_model_survives_the_round_trip(folder, tiny):
    again = pippin.load(folder, device="cpu", dtype="float32", pack=False)
    ids = torch.arange(50)[None]
    with torch.no_grad():
        torch.testing.assert_close(again.module(ids), tiny.module(ids), atol=0, rtol=0)
    assert again.tokenizer.eos_ids == tiny.tokenizer.eos_ids


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model_type": "mamba2"}, UnsupportedModel, "mamba2"),
        ({"hidden_size": ...}, CorruptedFile, "hidden_size"),
        ({"hidden_size": "wide"}, CorruptedFile, "contradicts itself"),
        ({"num_attention_heads": 5}, CorruptedFile, "contradicts itself"),
        ({"num_hidden_layers": 3}, CorruptedFile, "lacks 9 tensors of its configuration, first 'layers.2"),
        ({"num_hidden_layers": 1}, CorruptedFile, "holds 9 tensors that its configuration has no place for"),
        ({"intermediate_size": 47}, CorruptedFile, r"has shape \(48, 32\), its configuration says \(47, 32\)"),
        ({"quantization_config": {"quant_method": "gptq"}}, UnsupportedModel, "quantised by gptq"),
    ],
)
def test_damaged_configurations_are_refused_before_a_weight_is_read(folder, changes, error, message):
    edit_config(folder, **changes)
    with pytest.raises(error, match=message):
        pippin.load(folder, device="cpu")


def test_truncated_weights_are_refused(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CorruptedFile, match=r"model\.safetensors"):
        pippin.load(folder, device="cpu")


def test_a_pickle_is_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsafeCheckpoint, match=r"pytorch_model\.bin"):
        pippin.load(folder, device="cpu")


def test_a_tensor_too_many_is_refused(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.layers.0.extra.weight": torch.zeros(3)}, folder / "model.safetensors")
    with pytest.raises(CorruptedFile, match="extra"):
        pippin.load(folder, device="cpu")


def test_a_truncated_gguf_is_refused(default_model_path, tmp_path):
    path = tmp_path / "cut.gguf"
    with open(default_model_path, "rb") as whole, open(path, "wb") as cut:
        cut.write(whole.read(20_000_000))
    with pytest.raises(CorruptedFile, match=r"cut\.gguf"):
        pippin.load(path, device="cpu")


def test_a_gguf_of_another_architecture_is_refused(default_model_path, tmp_path):
    path = tmp_path / "other.gguf"
    shutil.copy(default_model_path, path)
    with open(path, "r+b") as file:
        head = file.read(1000)
        at = head.index(b"general.architecture") + len(b"general.architecture") + 4 + 8
        assert head[at : at + 5] == b"llama"
        file.seek(at)
        file.write(b"mamba")
    with pytest.raises(UnsupportedModel, match="mamba"):
        pippin.load(path, device="cpu")


def test_what_does_not_exist_is_not_found():
    with pytest.raises(ModelNotFound, match="smollm2-135m"):
        pippin.load("smollm2-135n")


def test_unknown_precision_is_refused_before_anything_is_read(folder):
    with pytest.raises(InvalidArgument, match="int7"):
        pippin.load(folder, dtype="int7")
