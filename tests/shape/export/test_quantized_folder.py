"""Folders for other libraries: what they pack themselves, and read back bit-identical in every layout of the files.

That the libraries read the folders as they are written is checked beside them, by check_written.py.
"""

import json

import pytest
import torch
from safetensors.torch import load_file
from tests.language.families.checkpoints import read, save_random
from tests.language.quantized.test_dequantization import fixture, opened

import pippin
from pippin.core import native
from pippin.core.errors import InvalidArgument, UnsupportedModel
from pippin.engine import Engine, Request, SamplingOptions
from pippin.language import LanguageModel
from pippin.language.quantized_checkpoint import matrix_shapes
from pippin.nn.quantization.codes import Codes
from pippin.nn.quantization.packed import quantize
from pippin.shape.export.quantized_folder import save_quantized_as

FAMILIES = ("llama", "phi3", "gpt_neox", "gpt2", "glm4", "mixtral", "qwen3_moe")


@pytest.fixture(scope="module")
def models(tmp_path_factory, tiny):
    """A random model of a family."""
    made = {}

    def get(family):
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            save_random(family, folder, vocab_size=288)
            made[family] = LanguageModel(family, read(folder), tiny.tokenizer, None)
        return made[family]

    return get


def codes_of(model, bits=4, group=32, outer=None, zero_point=None):
    found = {}
    for name, shape in matrix_shapes(model).items():
        is_outer = name in ("embed_tokens", "lm_head", "embed_positions")
        width = outer if is_outer else bits
        if width is not None and not name.endswith(".mlp.gate") and shape[0] % 32 == 0:
            zero = 2 ** (width - 1) if zero_point is None else zero_point
            codes, scales = quantize(model.module.get_submodule(name).weight.detach(), width, group, zero_point=zero)
            found[name] = Codes(codes, scales, width, zero)
    return found


@pytest.mark.parametrize(
    ("family", "layout", "bits"),
    [
        *[(family, layout, 4) for family in FAMILIES for layout in ("gptq", "awq", "mlx")],
        *[("llama", "gptq", 2), ("llama", "gptq", 3), ("llama", "gptq", 8), ("phi3", "mlx", 3), ("llama", "mlx", 2)],
    ],
)
def test_weights_come_back_to_the_bit(models, tmp_path, family, layout, bits):
    model = models(family)
    if layout == "mlx" and model.config.layers[0].feedforward.num_experts:
        pytest.skip("refused, as tested below")
    codes = codes_of(model, bits)
    save_quantized_as(layout, tmp_path, model, codes)
    loaded = pippin.load(tmp_path, device="cpu", dtype="float32", pack=False)
    assert loaded.config == model.config
    for name, tensor in model.module.state_dict().items():
        mine = codes[name.removesuffix(".weight")].dense() if name.removesuffix(".weight") in codes else tensor
        assert torch.equal(loaded.module.state_dict()[name], mine), name


@pytest.mark.skipif(native.library() is None, reason="the native kernels are not built")
@pytest.mark.parametrize("layout", ["gptq", "awq", "mlx"])
@pytest.mark.parametrize("family", ["llama", "phi3", "mixtral"])
def test_codes_stay_codes_and_answers_are_those_of_the_dense_model(models, tmp_path, family, layout):
    model = models(family)
    if layout == "mlx" and model.config.layers[0].feedforward.num_experts:
        pytest.skip("refused, as tested below")
    codes = codes_of(model, outer=8 if layout == "mlx" else None)
    save_quantized_as(layout, tmp_path, model, codes)
    packed = pippin.load(tmp_path, device="cpu")
    kinds = {name: packed.module.get_submodule(name).packed.kind for name in codes}
    assert set(kinds.values()) == ({"AFFINE4", "AFFINE8"} if layout == "mlx" else {"INT4"})
    for name, each in codes.items():
        assert torch.equal(packed.module.get_submodule(name).packed.dense(), each.dense())
    assert any("stay as they are" in note and layout in note for note in packed.notes)
    dense = pippin.load(tmp_path, device="cpu", dtype="float32")
    assert all("another precision was asked for" in note for note in dense.notes)
    request = Request(list(b"def f"), SamplingOptions(max_tokens=8))
    answers = [
        [token.id for token in [*Engine(each, kv_cache_dtype="float32").stream(request)][:-1]]
        for each in (packed, dense)
    ]
    assert len(answers[0]) == 8
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("layout", "name"),
    [("gptq", "gptq-4-symmetric"), ("gptq", "gptq-8-symmetric-channel"), ("awq", "awq-symmetric")],
)
def test_the_library_packs_the_same_words(tmp_path, layout, name):
    from pippin.shape.export import quantized_folder

    tensors, _ = fixture(name)
    codes = opened(tmp_path, name)[0].read()
    write = quantized_folder._gptq if layout == "gptq" else quantized_folder._awq
    ours = write(codes.codes, codes.scales, codes.bits, lambda bits: 1 << (bits - 1))
    assert len(ours) == len(tensors)
    for part, tensor in ours.items():
        assert torch.equal(tensor, tensors[f"model.layers.0.mlp.up_proj.{part}"]), part


def test_layers_of_a_mixed_mlx_folder_are_named(models, tmp_path):
    model = models("llama")
    codes = codes_of(model, bits=3, outer=8)
    save_quantized_as("mlx", tmp_path, model, codes)
    settings = json.loads((tmp_path / "config.json").read_text())["quantization"]
    outer = {"group_size": 32, "bits": 8}
    assert settings == {
        "group_size": 32, "bits": 3, "mode": "affine", "model.embed_tokens": outer, "lm_head": outer,
    }  # fmt: skip
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["model.embed_tokens.weight"].dtype == torch.uint32
    assert tensors["model.embed_tokens.biases"].dtype == torch.float16


@pytest.mark.parametrize(
    ("layout", "options", "message"),
    [
        ("awq", {"bits": 8}, "has 8 bits, awq folders have 4"),
        ("gptq", {"zero_point": 7.5}, "has balanced levels"),
        ("gptq", {"outer": 8}, "gptq folders hold embed_tokens as it is"),
        ("mlx", {"group": 16}, "the codes have 16"),
    ],
)
def test_codes_that_a_layout_has_no_form_for_are_refused(models, tmp_path, layout, options, message):
    model = models("llama")
    with pytest.raises(InvalidArgument, match=message):
        save_quantized_as(layout, tmp_path / "out", model, codes_of(model, **options))
    assert not (tmp_path / "out").exists()


def test_models_that_a_layout_has_no_form_for_are_refused(models, tmp_path):
    model = models("llama")
    codes = codes_of(model)
    some = {name: each for name, each in codes.items() if name != "layers.1.mlp.up_proj"}
    with pytest.raises(InvalidArgument, match=r"layers.1.mlp.up_proj has no codes; gptq folders quantize every layer"):
        save_quantized_as("gptq", tmp_path / "out", model, some)
    with pytest.raises(InvalidArgument, match=r"no matrix 'layers.9.mlp.up_proj'"):
        save_quantized_as("gptq", tmp_path / "out", model, {"layers.9.mlp.up_proj": codes["layers.0.mlp.up_proj"]})
    mixed = codes | {name: each for name, each in codes_of(model, bits=8).items() if name == "layers.0.mlp.up_proj"}
    with pytest.raises(InvalidArgument, match="one number of bits"):
        save_quantized_as("gptq", tmp_path / "out", model, mixed)
    with pytest.raises(UnsupportedModel, match="models with experts are not written"):
        save_quantized_as("mlx", tmp_path / "out", models("mixtral"), codes_of(models("mixtral")))
    assert not (tmp_path / "out").exists()
