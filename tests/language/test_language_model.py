"""`pippin.load` on real and on damaged checkpoints; transformers' own reading of the same file is the oracle."""

import copy
import json
import os
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import pippin
from pippin.core import native
from pippin.core.errors import CorruptedFile, InvalidArgument, ModelNotFound, UnsafeCheckpoint, UnsupportedModel
from pippin.core.formats.gguf import open_gguf
from pippin.engine import Engine, Request, SamplingOptions
from pippin.language.availability import memory_needed
from pippin.language.weight_packing import choose_packing, group_of
from pippin.nn.quantization.packed import NativeWeight, dequantize, middle_code, quantize

from .dense import DenseCache

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
with_kernels = pytest.mark.skipif(native.library() is None, reason="the native kernels are not built")


def packed_weights(model):
    parts = model.module.named_modules()
    return {name: part.packed for name, part in parts if isinstance(getattr(part, "packed", None), NativeWeight)}


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
    if native.library() is None:
        assert loaded.dtype == torch.bfloat16
    else:  # weights of bfloat16, activations of float32
        assert loaded.dtype == torch.float32
        assert {weight.kind for weight in packed_weights(loaded).values()} == {"BF16"}


def test_a_packed_model_refuses_to_be_saved(model, tmp_path):
    with pytest.raises(InvalidArgument, match="pack=False"):
        model.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@with_kernels
def test_weights_of_a_file_stay_in_their_formats_and_nothing_is_held_twice(default_model_path, model):
    loaded, file = pippin.load(default_model_path, device="cpu"), open_gguf(default_model_path)
    weights = packed_weights(loaded)
    names = {"self_attn.q_proj": "attn_q", "self_attn.o_proj": "attn_output", "mlp.down_proj": "ffn_down"}
    for ours, theirs in names.items():
        stored = file.tensors[f"blk.7.{theirs}.weight"]
        weight = weights[f"layers.7.{ours}"]
        assert (weight.kind, weight.rows, weight.columns) == (stored.type, *stored.shape)
        # the float32 model was dequantized and its query rows put in order by other code
        assert torch.equal(weight.dense(), packed_weights(model)[f"layers.7.{ours}"].dense())
    assert weights["lm_head"] is weights["embed_tokens"]
    assert weights["embed_tokens"].kind == file.tensors["token_embd.weight"].type
    assert sum({id(weight): weight.nbytes for weight in weights.values()}.values()) < file.path.stat().st_size
    assert {parameter.dtype for parameter in loaded.module.parameters()} == {torch.float32}
    assert sum(parameter.numel() for parameter in loaded.module.parameters()) < 100_000  # norms alone
    assert (loaded.dtype, loaded.device.type) == (torch.float32, "cpu")


@with_kernels
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_nothing_of_the_file_stays_in_memory(default_model_path, saved):
    for path in (default_model_path, saved / "model.safetensors"):
        loaded = pippin.load(path if path.suffix == ".gguf" else saved, device="cpu")
        with open("/proc/self/maps") as maps:
            assert os.path.realpath(path) not in maps.read()
        assert loaded.source is not None


@pytest.fixture
def wide(folder):
    """A small checkpoint whose rows groups of 32 divide."""
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in tensors:
        if "mlp" in name:
            shape = (32, 64) if "down_proj" in name else (64, 32)
            tensors[name] = torch.randn(shape, generator=generator)
    save_file(tensors, folder / "model.safetensors")
    edit_config(folder, intermediate_size=64)
    return folder


@with_kernels
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_weights_are_quantized_from_those_of_the_file(wide, bits):
    weights = packed_weights(pippin.load(wide, device="cpu", bits=bits))
    exact = load_file(wide / "model.safetensors")
    assert weights["lm_head"] is weights["embed_tokens"]
    for name, weight in weights.items():
        outer = name in ("lm_head", "embed_tokens")
        stored = exact["model.embed_tokens.weight" if outer else f"model.{name}.weight"]
        wanted = max(bits, 4) if outer else bits
        group = 64 if "down_proj" in name else 32
        assert (weight.kind, weight.group) == (f"INT{wanted}", group)
        codes, scales = quantize(stored, wanted, group)
        assert torch.equal(weight.dense(), dequantize(codes, scales, middle_code(wanted)))
    with pytest.raises(InvalidArgument, match="pack=False"):
        pippin.load(wide, device="cpu", bits=bits).save(wide)


@with_kernels
def test_eight_bits_of_the_real_model_are_nearly_as_good_as_all(default_model_path, model):
    loaded, ids = pippin.load(default_model_path, device="cpu", bits=8), torch.tensor([model.template.encode(QUESTION)])
    with torch.no_grad():
        expected = model.module(ids)
        assert (loaded.module(ids) - expected).norm() < 0.1 * expected.norm()  # of which most is in the activations
    assert loaded.dtype == torch.float32
    held = sum({id(weight): weight.nbytes for weight in packed_weights(loaded).values()}.values())
    norms = sum(parameter.nbytes for parameter in loaded.module.parameters())
    assert memory_needed(default_model_path, device="cpu", bits=8, context=0) == held + norms


@with_kernels
def test_precisions_are_those_that_were_asked_for(default_model_path, folder):
    kinds = {"auto": "BF16", "bfloat16": "BF16", "float32": "F32"}
    for dtype, kind in kinds.items():
        loaded = pippin.load(folder, device="cpu", dtype=dtype)
        assert {weight.kind for weight in packed_weights(loaded).values()} == {kind}
    half = pippin.load(folder, device="cpu", dtype="float16")
    assert packed_weights(half) == {}
    assert half.dtype == torch.float16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 5}, "bits must be 2, 3, 4 or 8, got 5"),
        ({"bits": 4, "pack": False}, "which pack=False forbids"),
        ({"bits": 4, "dtype": "float16"}, "leave dtype='float16' out"),
    ],
)
def test_bits_that_nothing_computes_with_are_refused_before_anything_is_read(folder, options, message):
    with pytest.raises(InvalidArgument, match=message):
        pippin.load(folder, device="cpu", **options)


def test_bits_need_kernels(folder, monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(native, "unavailable_reason", lambda: "the reason")
    with pytest.raises(InvalidArgument, match="bits=4 needs the native kernels: the reason"):
        pippin.load(folder, device="cpu", bits=4)
    with pytest.raises(InvalidArgument, match="kernels for the CPU and for CUDA, not for mps"):
        choose_packing("auto", torch.device("mps"), bits=4)
    monkeypatch.setattr("pippin.nn.triton.triton_matvec.TritonWeight.missing", lambda: "no triton")
    with pytest.raises(InvalidArgument, match="bits=4 cannot be computed on cuda: no triton"):
        choose_packing("auto", torch.device("cuda"), bits=4)


@with_kernels
def test_a_matrix_that_groups_do_not_divide_is_named_before_a_weight_is_read(folder, monkeypatch):
    monkeypatch.setattr(
        sys.modules["pippin.language.weight_loading"], "quantize", lambda *_: pytest.fail("a weight was quantized")
    )
    with pytest.raises(InvalidArgument, match=r"layers\.0\.mlp\.down_proj\.weight has rows of 48 weights"):
        pippin.load(folder, device="cpu", bits=4)
    assert [group_of("a", columns) for columns in (64, 96, 576)] == [64, 32, 64]


@with_kernels
def test_weights_that_are_not_finite_are_named(wide):
    tensors = load_file(wide / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"][0, 5] = float("nan")
    save_file(tensors, wide / "model.safetensors")
    with pytest.raises(InvalidArgument, match=r"layers\.1\.self_attn\.v_proj\.weight holds values that are not finite"):
        pippin.load(wide, device="cpu", bits=4)


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
        ({"model_type": "mamba9"}, UnsupportedModel, "mamba9"),
        ({"hidden_size": ...}, CorruptedFile, "hidden_size"),
        ({"hidden_size": "wide"}, CorruptedFile, "contradicts itself"),
        ({"num_attention_heads": 5}, CorruptedFile, "contradicts itself"),
        ({"num_hidden_layers": 3}, CorruptedFile, r"in 9 tensors: 'layers\.2\.[a-z_.]+' is missing; .*; "),
        ({"num_hidden_layers": 1}, CorruptedFile, r"in 9 tensors: 'layers\.1\.[a-z_.]+' is not expected; "),
        (
            {"intermediate_size": 47},
            CorruptedFile,
            r"in 6 tensors: .*'layers\.1\.mlp\.up_proj.weight' has shape \(48, 32\) instead",
        ),
        ({"quantization_config": {"quant_method": "eetq"}}, UnsupportedModel, "eetq"),
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
