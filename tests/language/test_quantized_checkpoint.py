"""Quantized folders: what was saved is what runs, and a folder that contradicts itself is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import pippin
from pippin.core import native
from pippin.core.errors import CorruptedFile, InvalidArgument, UnsupportedModel
from pippin.engine import Engine, Request, SamplingOptions
from pippin.language.adapter_files import base_sha256
from pippin.language.availability import availability, memory_needed
from pippin.language.quantized_checkpoint import matrix_shapes, read_quantized, save_quantized
from pippin.nn.quantization.codes import Codes
from pippin.nn.quantization.packed import NativeWeight, middle_code, quantize
from pippin.nn.quantization.palette import Palette

with_kernels = pytest.mark.skipif(native.library() is None, reason="the native kernels are not built")


def codes_of(model, bits=2, group=32, skip=()):
    found = {}
    for name in matrix_shapes(model):
        if name not in skip:
            width = 4 if name == "embed_tokens" else bits
            part = model.module.get_submodule(name)
            group_ = group if part.dense_weight().shape[1] % group == 0 else part.dense_weight().shape[1]
            codes, scales = quantize(part.dense_weight(), width, group_)
            found[name] = Codes(codes, scales, width, middle_code(width))
    return found


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """Two layers whose width of 32 has kernels, and one matrix (48 inputs) that has none."""
    folder = tmp_path_factory.mktemp("quantized")
    save_quantized(folder, tiny, codes_of(tiny, skip=("layers.0.mlp.up_proj",)), metadata={"method": "rounding"})
    return folder


def edited(folder, tmp_path, change):
    """A copy of the folder with its configuration and its tensors changed."""
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config, tensors)
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def test_codes_come_back_as_they_were(tiny, folder, tmp_path):
    saved = codes_of(tiny, skip=("layers.0.mlp.up_proj",))
    read = read_quantized(folder)
    assert read.keys() == saved.keys()
    for name, codes in saved.items():
        assert torch.equal(read[name].codes, codes.codes)
        assert torch.equal(read[name].scales, codes.scales)
        assert (read[name].bits, read[name].zero_point) == (codes.bits, codes.zero_point)
    tiny.save(tmp_path)
    with pytest.raises(UnsupportedModel, match="holds no quantized matrices"):
        read_quantized(tmp_path)


@with_kernels
def test_weights_that_run_are_those_that_were_saved_to_the_bit(tiny, folder):
    packed, dense = (pippin.load(folder, device="cpu", pack=pack) for pack in (True, False))
    for name, codes in codes_of(tiny, skip=("layers.0.mlp.up_proj",)).items():
        held = packed.module.get_submodule(name).packed
        if codes.native_group is not None:
            assert held.kind == f"INT{codes.bits}"
            assert torch.equal(held.dense(), codes.dense())
        else:
            assert held.kind == "BF16"
        assert torch.equal(dense.module.get_submodule(name).weight, codes.dense())
    assert torch.equal(dense.module.layers[0].mlp.up_proj.weight, tiny.module.layers[0].mlp.up_proj.weight)
    assert torch.equal(dense.module.norm.weight, tiny.module.norm.weight)
    ids = torch.tensor([list(b"a quantized model")])
    with torch.no_grad():
        torch.testing.assert_close(packed.module(ids), dense.module(ids), atol=5e-3, rtol=0)


@with_kernels
def test_the_engine_answers_from_it_as_the_dense_model_does(folder):
    packed, dense = (
        pippin.load(folder, device="cpu", dtype=d, pack=p) for d, p in (("auto", True), ("float32", False))
    )
    answers = [
        [token.id for token in [*Engine(model).stream(Request(list(b"def f"), SamplingOptions(max_tokens=8)))][:-1]]
        for model in (packed, dense)
    ]
    assert len(answers[0]) == 8
    assert answers[0] == answers[1]


@with_kernels
def test_memory_is_known_before_loading(folder):
    loaded = pippin.load(folder, device="cpu")
    packed = {
        id(part.packed): part.packed for part in loaded.module.modules() if getattr(part, "packed", None) is not None
    }
    plain = sum(parameter.nbytes for parameter in loaded.module.parameters())
    assert memory_needed(folder, context=0) == sum(weight.nbytes for weight in packed.values()) + plain
    assert availability(folder)
    assert any(isinstance(weight, NativeWeight) and weight.kind == "INT2" for weight in packed.values())
    exact = pippin.load(folder, device="cpu", dtype="float32")
    assert exact.module.layers[0].self_attn.q_proj.packed.kind == "F32"


def test_the_file_holds_the_bits_that_are_counted(tiny, folder):
    tensors = load_file(folder / "model.safetensors")
    codes = codes_of(tiny, skip=("layers.0.mlp.up_proj",))
    stored = sum(tensor.nbytes for name, tensor in tensors.items() if name.endswith((".codes", ".scales")))
    assert stored == sum(one.nbytes for one in codes.values())
    bits = sum(one.bits * one.codes.numel() + 16 * one.scales.numel() for one in codes.values())
    assert 8 * stored == pytest.approx(bits, rel=0.01)


def test_the_folder_says_how_it_was_made_and_has_a_hash_of_its_own(folder):
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "pippin"
    assert config["note"] == {"method": "rounding"}
    hashes = {base_sha256(pippin.load(folder, device="cpu", pack=pack)) for pack in (True, False)}
    assert len(hashes) == 1


def test_palettes_are_stored_beside_codes(tiny, tmp_path):
    indices = torch.randint(0, 8, (48, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tables = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)).half()
    palette = Palette(indices, tables, 3, "rows", 16)
    save_quantized(tmp_path, tiny, {"layers.1.mlp.gate_proj": palette})
    loaded = pippin.load(tmp_path, device="cpu", pack=False)
    assert torch.equal(loaded.module.layers[1].mlp.gate_proj.weight, palette.dense())
    assert pippin.load(tmp_path, device="cpu").module(torch.tensor([[1, 2]])).isfinite().all()


def test_a_quantized_folder_can_be_saved_as_an_ordinary_one(folder, tmp_path):
    dense = pippin.load(folder, device="cpu", pack=False)
    dense.save(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    again = pippin.load(tmp_path, device="cpu", pack=False)
    for name, tensor in dense.module.state_dict().items():
        assert torch.equal(again.module.state_dict()[name], tensor)


def test_codes_of_another_model_are_refused(tiny, tmp_path):
    one = Codes(torch.zeros(4, 4, dtype=torch.uint8), torch.ones(1, 1).half(), 2, 1.5)
    with pytest.raises(InvalidArgument, match=r"no matrix 'layers.7.mlp.up_proj'"):
        save_quantized(tmp_path, tiny, {"layers.7.mlp.up_proj": one})
    with pytest.raises(InvalidArgument, match=r"shape \(4, 4\), the layer is \(48, 32\)"):
        save_quantized(tmp_path, tiny, {"layers.0.mlp.up_proj": one})
    assert not list(tmp_path.iterdir())


@with_kernels
def test_what_is_packed_and_has_no_codes_cannot_be_saved(folder, tmp_path):
    packed = pippin.load(folder, device="cpu")
    with pytest.raises(InvalidArgument, match="is packed for inference and not among the codes"):
        save_quantized(tmp_path, packed, {})


STEM = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda c, t: c["quantization_config"].update(quant_method="exl3"), UnsupportedModel, "quantized by exl3"),
        (lambda c, t: c["quantization_config"].pop("weights"), CorruptedFile, "has no 'weights'"),
        (lambda c, t: c["quantization_config"]["weights"][STEM].update(form="tree"), UnsupportedModel, "form 'tree'"),
        (lambda c, t: c["quantization_config"]["weights"][STEM].update(bits=5), CorruptedFile, f"{STEM} is no such"),
        (lambda c, t: c["quantization_config"]["weights"][STEM].update(columns=64), CorruptedFile, "64 columns"),
        (lambda c, t: t.pop(f"{STEM}.scales"), CorruptedFile, f"lacks '{STEM}.scales'"),
        (lambda c, t: t[f"{STEM}.scales"].fill_(torch.inf), CorruptedFile, f"{STEM} cannot be read: a scale is not"),
    ],
)
def test_a_folder_that_contradicts_itself_is_refused(folder, tmp_path, change, error, message):
    with pytest.raises(error, match=message):
        pippin.load(edited(folder, tmp_path, change), device="cpu")
