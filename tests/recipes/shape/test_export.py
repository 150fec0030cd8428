"""Exports of language models as users make them: types, sizes, names of axes, codes and tokenizers that go along."""

import json

import jaxtyping
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import pippin
from pippin.core import progress
from pippin.core.errors import InvalidArgument
from pippin.core.formats.gguf import open_gguf
from pippin.language import Decoder, DecoderConfig, LanguageModel, LayerSpec
from pippin.language.quantized_checkpoint import save_quantized
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.feedforward.feedforward import FeedForwardSpec
from pippin.recipes import shape
from pippin.recipes.shape.stored_bits import stored_bits
from pippin.shape.quantize import rtn
from pippin.shape.quantize.config import QuantizationConfig


@pytest.fixture(scope="module")
def folder(default_model_path, tmp_path_factory):
    """A quantized folder: a small model of random weights with the tokenizer of the default model's family."""
    tokenizer = pippin.load(default_model_path, device="cpu", pack=False).tokenizer
    config = DecoderConfig(
        "llama",
        49152,
        64,
        (LayerSpec(AttentionSpec(), FeedForwardSpec(128)),) * 2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    model = LanguageModel("small", Decoder(config).initialize(seed=0), tokenizer, None)
    codes = rtn.quantize(model, QuantizationConfig(bits=4, levels="balanced", group=32, embedding_bits=8))
    where = tmp_path_factory.mktemp("export") / "small"
    save_quantized(where, model, codes)
    (where / "README.md").write_text("---\nlanguage: en\nlicense: MIT # theirs\n---\n# Small\nlicense: none\n")
    return where


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the checker takes no symbolic sizes for numbers


def export(folder, to, out, **given):
    return shape.export.run(shape.export.Config(model=str(folder), to=to, out=out, **given), show_progress=False)


def test_gguf_has_its_type_its_license_and_its_own_size(folder, tmp_path):
    (tmp_path / "model.other").write_bytes(bytes(1000))
    kept = export(folder, "gguf", tmp_path / "model.gguf")
    assert kept.files == (tmp_path / "model.gguf",)
    assert kept.bytes == (tmp_path / "model.gguf").stat().st_size
    types = {tensor.name: tensor.type for tensor in open_gguf(kept.out).tensors.values()}
    assert types["blk.0.ffn_up.weight"] == "Q4_1"
    assert open_gguf(kept.out).metadata["general.license"] == "mit"
    for kind, bits in (("Q8_0", 8.5), ("Q5_1", 6), ("F16", 16)):
        made = export(folder, "gguf", tmp_path / f"{kind}.gguf", type=kind)
        tensors = open_gguf(made.out).tensors
        assert tensors["blk.0.ffn_up.weight"].type == kind
        assert stored_bits(made.out) == (bits if kind != "Q5_1" else 8.5)  # most weights are the embedding's, in Q8_0


def test_licenses_survive_saving(folder, tmp_path):
    model = pippin.load(folder, device="cpu", dtype="float32", pack=False)
    model.save(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["license"] == "mit"


def test_a_program_keeps_the_codes_names_its_axes_and_has_its_tokenizer_beside(folder, tmp_path):
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    made = export(folder, "onnx", tmp_path / "program", max_context=32)
    assert {file.name for file in made.files} == {
        "model.onnx",
        "model.step.onnx",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    program = tmp_path / "program" / "model.onnx"
    codes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert codes < program.stat().st_size < 1.5 * codes  # float32 would be more than three times as much
    axes = {}
    for name in ("model.onnx", "model.step.onnx"):
        graph = onnx.load(str(tmp_path / "program" / name)).graph
        for port in [*graph.input, *graph.output]:
            axes[port.name] = [size.dim_param or size.dim_value for size in port.type.tensor_type.shape.dim]
    assert axes["keys"] == [2, "batch", 2, "past", 16]
    assert axes["keys_1"][3] == "past + 1"
    assert axes["logits"][0] == "batch"
    main = onnx.load(str(program)).graph
    assert [size.dim_param for size in main.input[0].type.tensor_type.shape.dim] == ["batch", "length"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "program")
    ids = np.array([tokenizer("A bright cold day")["input_ids"]])
    dense = pippin.load(folder, device="cpu", dtype="float32", pack=False)
    (logits,) = runtime.InferenceSession(str(program)).run(None, {"ids": ids})
    np.testing.assert_allclose(logits, dense.module(torch.from_numpy(ids)).detach().numpy(), rtol=1e-4, atol=1e-4)


def test_a_pipe_is_told_what_takes_long(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.001)
    shape.export.run(shape.export.Config(model=str(folder), to="torch", out=tmp_path / "program", max_context=32))
    said = capsys.readouterr().err
    assert "capturing the program of small" in said
    assert "writing program" in said


def test_a_report_measures_the_codes(folder):
    config = shape.report.Config(model=str(folder), backends=("torch",), max_context=32, length=8, repetitions=1)
    found = shape.report.run(config, show_progress=False)
    codes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert codes < found.weight_bytes < 1.5 * codes


def test_types_are_for_gguf(folder, tmp_path):
    with pytest.raises(InvalidArgument, match=r"type \(--type\) is for --to gguf, not for onnx"):
        export(folder, "onnx", tmp_path / "a.onnx", type="Q8_0")
    with pytest.raises(InvalidArgument, match="type must be"):
        export(folder, "gguf", tmp_path / "a.gguf", type="Q3_K")
