"""Matrices of other libraries' folders: values bit-identical to those of the reference, dense and in the kernels.

The fixtures and their hashes are made by the libraries themselves: see make_fixtures.py.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pippin.core import native
from pippin.core.errors import CorruptedFile, UnsupportedModel
from pippin.core.formats.checkpoint import open_folder
from pippin.language.quantized import METHODS, read_matrices, settings_of

from .make_fixtures import digest

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = sorted(path.stem for path in FIXTURES.glob("*.safetensors"))
# what the kernels have a form for, and how they keep it
KINDS = {
    **{"gptq-2": "AFFINE2/32", "gptq-3": "AFFINE3/32", "gptq-4": "AFFINE4/32", "gptq-8": "AFFINE8/32"},
    **{"gptq-4-symmetric": "INT4/32", "gptq-8-symmetric-channel": "INT8/64"},
    **{"gptq-v2-3": "AFFINE3/32", "gptq-v2-4": "AFFINE4/32", "awq-32": "AFFINE4/32", "awq-64": "AFFINE4/64"},
    **{"awq-symmetric": "INT4/32"},
    **{"compressed-tensors-int4": "INT4/32", "compressed-tensors-int4-asymmetric": "AFFINE4/32"},
    **{"compressed-tensors-int3": "INT3/32", "compressed-tensors-int8-packed": "INT8/64"},
    **{"compressed-tensors-int8": "INT8/64", "compressed-tensors-int8-tensor": "INT8/64"},
    **{"compressed-tensors-int8-asymmetric": "AFFINE8/64", "compressed-tensors-mxfp4": "Q5_0"},
    **{"mlx-2-32-float32": "AFFINE2/32", "mlx-3-64-float16": "AFFINE3/64", "mlx-4-32-float16": "AFFINE4/32"},
    **{"mlx-4-64-bfloat16": "AFFINE4/64", "mlx-5-32-float32": "AFFINE5/32", "mlx-6-64-bfloat16": "AFFINE6/64"},
    **{"mlx-8-64-float16": "AFFINE8/64", "mlx-mxfp4": "Q5_0", "mxfp4": "Q5_0", "mxfp4-wide": "AFFINE5/32"},
}


def fixture(name):
    """The tensors and the metadata of a fixture."""
    path = FIXTURES / f"{name}.safetensors"
    with safe_open(path, "pt") as file:
        return load_file(path), file.metadata()


def folder_of(tmp_path, tensors, settings):
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    return open_folder(tmp_path)


def read(folder):
    return read_matrices(folder, *settings_of(folder))


def opened(tmp_path, name):
    """The only matrix of a fixture, and its metadata."""
    tensors, metadata = fixture(name)
    (matrix,) = read(folder_of(tmp_path, tensors, json.loads(metadata["quantization_config"]))).values()
    return matrix, metadata


def test_every_method_has_fixtures():
    used = {json.loads(fixture(name)[1]["quantization_config"]).get("quant_method", "mlx") for name in NAMES}
    assert used == set(METHODS)
    assert set(KINDS) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_values_are_those_of_the_reference_to_the_bit(tmp_path, name):
    matrix, metadata = opened(tmp_path, name)
    values = matrix.dense().to(getattr(torch, metadata["dtype"]))
    torch.testing.assert_close(values[0].float(), torch.tensor(json.loads(metadata["first_row"])), rtol=0, atol=0)
    assert digest(values) == metadata["sha256"]
    assert values.shape[-1] == matrix.shape[-1]


@pytest.mark.skipif(native.library() is None, reason="the native kernels are not built")
@pytest.mark.parametrize("name", NAMES)
def test_what_the_kernels_keep_is_the_same_to_the_bit(tmp_path, name):
    matrix, _ = opened(tmp_path, name)
    assert matrix.kind == KINDS.get(name, "")
    if matrix.kind:
        packed, dense = matrix.read().pack(), matrix.dense()
        assert torch.equal(packed.dense(), dense)
        assert packed.kind == matrix.kind.partition("/")[0]
    else:
        assert matrix.reason


@pytest.mark.parametrize("name", NAMES)
def test_some_rows_are_those_of_the_whole(tmp_path, name):
    from dataclasses import replace

    matrix, _ = opened(tmp_path, name)
    rows = torch.tensor([5, 3, 31, 3])
    assert torch.equal(replace(matrix, rows=rows).dense(), matrix.dense()[rows])


# --- what is refused --------------------------------------------------------------------------------------------------


def scale_of(tensors):
    return next(name for name in tensors if name.endswith(("scales", "weight_scale", "scale_inv", "absmax", "SCB")))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 0.0])
@pytest.mark.parametrize("name", NAMES)
def test_a_scale_that_is_not_usable_is_refused_with_the_headers(tmp_path, name, value):
    tensors, metadata = fixture(name)
    scale = scale_of(tensors)
    if not tensors[scale].is_floating_point():
        pytest.skip("powers of two and codes of scales are tested below")
    if value == 0.0 and name.startswith(("bitsandbytes", "modelopt", "compressed-tensors-nvfp4")):
        pytest.skip("these write a scale of zero for a block of zeros")
    if value == torch.inf and tensors[scale].dtype == torch.float8_e4m3fn:
        pytest.skip("has no infinity")
    tensors[scale].view(-1)[-1] = value
    folder = folder_of(tmp_path, tensors, json.loads(metadata["quantization_config"]))
    with pytest.raises(CorruptedFile, match=r"has a scale (that is not finite|of zero)"):
        read(folder)


@pytest.mark.parametrize("name", ["mxfp4", "mlx-mxfp4", "compressed-tensors-mxfp4"])
def test_an_exponent_that_is_no_number_is_refused(tmp_path, name):
    tensors, metadata = fixture(name)
    tensors[scale_of(tensors)].view(-1)[3] = 255
    with pytest.raises(CorruptedFile, match="a scale that is not a number"):
        read(folder_of(tmp_path, tensors, json.loads(metadata["quantization_config"])))


@pytest.mark.parametrize("name", NAMES)
def test_each_part_is_needed(tmp_path, name):
    tensors, metadata = fixture(name)
    settings = json.loads(metadata["quantization_config"])
    for part in tensors:
        if part.endswith(("g_idx", "input_scale", "weight_format")):  # a folder may lack these
            continue
        rest = {other: tensor for other, tensor in tensors.items() if other != part}
        with pytest.raises(CorruptedFile, match=r"lacks|without the rest|holds no quantized matrix"):
            read(folder_of(tmp_path, rest, settings))


@pytest.mark.parametrize("name", NAMES)
def test_each_part_has_one_shape(tmp_path, name):
    tensors, metadata = fixture(name)
    settings = json.loads(metadata["quantization_config"])
    for part, tensor in tensors.items():
        if part.endswith(("input_scale", "weight_format")) or "quant_state" in part:
            continue
        if name.endswith("-tensor") and part.endswith("weight"):  # one scale fits a matrix of any shape
            continue
        changed = {**tensors, part: torch.cat([tensor.reshape(-1, *tensor.shape[1:])] * 3)}
        with pytest.raises((CorruptedFile, UnsupportedModel)):
            read(folder_of(tmp_path, changed, settings))


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("gptq-4", {"quant_method": "sparkle"}, UnsupportedModel, "quantized by sparkle, which is not supported"),
        ("gptq-4", {"bits": 5}, UnsupportedModel, "bits=5 are not supported"),
        ("gptq-4", {"bits": None}, UnsupportedModel, "bits=None"),
        ("gptq-4", {"bits": 8}, CorruptedFile, r"qweight has shape \(8, 32\), the quantized matrix needs \(16, 32\)"),
        ("gptq-4", {"group_size": 48}, UnsupportedModel, "groups of 48, which do not divide the 64 inputs"),
        ("gptq-4", {"group_size": 64}, CorruptedFile, "2 scales a row, groups of 64 need 1"),
        ("gptq-4", {"group_size": "big"}, CorruptedFile, "group_size is 'big'"),
        ("gptq-4", {"checkpoint_format": "gptq_v9"}, UnsupportedModel, "checkpoint_format='gptq_v9'"),
        ("gptq-4", {"is_marlin_format": True}, UnsupportedModel, "is_marlin_format=True"),
        ("awq-32", {"version": "gemv"}, UnsupportedModel, "version='gemv'"),
        ("awq-32", {"bits": 8}, UnsupportedModel, "bits=8"),
        ("awq-32", {"group_size": 48}, UnsupportedModel, "groups of 48"),
        ("compressed-tensors-int4", {"format": "marlin-24"}, UnsupportedModel, "format='marlin-24'"),
        ("compressed-tensors-int4", {"sparsity_config": {"format": "sparse-bitmask"}}, UnsupportedModel, "sparse"),
        ("compressed-tensors-int4", {"config_groups": None}, CorruptedFile, "no object 'config_groups'"),
        ("compressed-tensors-int4", {"config_groups": {}}, CorruptedFile, "no group in quantization_config says how"),
        ("mlx-4-64-bfloat16", {"bits": 7}, UnsupportedModel, "bits=7"),
        ("mlx-4-64-bfloat16", {"bits": 8}, CorruptedFile, "the quantized matrix needs"),
        ("mlx-4-64-bfloat16", {"group_size": 0}, CorruptedFile, "has group_size 0"),
        ("mlx-4-64-bfloat16", {"mode": "nvfp9"}, UnsupportedModel, "mode='nvfp9'"),
        ("fp8-block", {"weight_block_size": [0, 1]}, CorruptedFile, r"are \[0, 1\]"),
        ("fp8-block", {"weight_block_size": [16, 16]}, CorruptedFile, r"needs \(2, 4\)"),
        ("modelopt-nvfp4", {"quant_algo": "W4A8"}, UnsupportedModel, "quant_algo='W4A8'"),
    ],
)
def test_settings_that_are_unknown_or_wrong_are_refused(tmp_path, name, change, error, message):
    tensors, metadata = fixture(name)
    with pytest.raises(error, match=message):
        read(folder_of(tmp_path, tensors, {**json.loads(metadata["quantization_config"]), **change}))


def test_groups_that_have_no_scales_are_refused(tmp_path):
    tensors, metadata = fixture("gptq-4-act-order")
    tensors["model.layers.0.mlp.up_proj.g_idx"][7] = 2
    with pytest.raises(CorruptedFile, match="names groups that have no scales: there are 2"):
        read(folder_of(tmp_path, tensors, json.loads(metadata["quantization_config"])))


def test_a_state_that_is_no_json_is_refused(tmp_path):
    tensors, metadata = fixture("bitsandbytes-nf4")
    state = next(name for name in tensors if "quant_state" in name)
    for content in (b"{", b"[]", b'{"quant_type": "nf9"}', b'{"quant_type": "nf4", "shape": [1]}'):
        changed = {**tensors, state: torch.tensor(list(content), dtype=torch.uint8)}
        with pytest.raises((CorruptedFile, UnsupportedModel)):
            read(folder_of(tmp_path, changed, json.loads(metadata["quantization_config"])))


def test_settings_of_a_layer_override_those_of_the_model(tmp_path):
    """Mixed folders: MLX names layers, GPTQModel patterns, compressed-tensors groups of names."""
    stem = "model.layers.0.mlp.up_proj"
    tensors, metadata = fixture("mlx-8-64-float16")
    folder = folder_of(tmp_path, tensors, {"group_size": 32, "bits": 4, stem: {"group_size": 64, "bits": 8}})
    assert digest(read(folder)[f"{stem}.weight"].dense()) == metadata["sha256"]
    tensors, metadata = fixture("gptq-8-symmetric-channel")
    dynamic = {r"-:.*down.*": {}, r"+:.*up_proj": {"bits": 8, "group_size": -1}}
    folder = folder_of(tmp_path, tensors, {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": dynamic})
    assert digest(read(folder)[f"{stem}.weight"].dense().half()) == metadata["sha256"]
    tensors, metadata = fixture("compressed-tensors-int3")
    settings = json.loads(metadata["quantization_config"])
    own = settings["config_groups"]["group_0"]
    general = {"targets": ["Linear"], "weights": {**own["weights"], "num_bits": 8}}
    groups = {"group_0": general, "group_1": {**own, "targets": ["re:.*up_proj"]}}
    folder = folder_of(tmp_path, tensors, {**settings, "config_groups": groups})
    assert digest(read(folder)[f"{stem}.weight"].dense().half()) == metadata["sha256"]
