"""Quantization on a small model of random weights: folders that open, figures that are theirs."""

import json
from dataclasses import replace

import pytest
import torch

import pippin
from pippin.core.errors import InvalidArgument
from pippin.language import Decoder, DecoderConfig, LanguageModel, LayerSpec
from pippin.nn.attention import AttentionSpec
from pippin.nn.feedforward import FeedForwardSpec
from pippin.recipes import shape

TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 60


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """A model whose matrices groups of 32 and 64 divide, and a text."""
    layer = LayerSpec(AttentionSpec(), FeedForwardSpec(128))
    config = DecoderConfig(
        "llama",
        260,
        64,
        (layer, layer),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
    )
    where = tmp_path_factory.mktemp("quantize")
    module = Decoder(config).initialize(seed=0)
    LanguageModel("small", module, tiny.tokenizer, tiny.template).save(where / "model")
    (where / "text.txt").write_text(TEXT, encoding="utf-8")
    return where


def quantize(folder, out, *, text=False, **given):
    settings = {"max_length": 64, "batch_size": 2, "calibration_tokens": 512, "device": "cpu"} | given
    if text:
        settings["data"] = (folder / "text.txt",)
    config = shape.quantize.Config(model=str(folder / "model"), out=out, **settings)
    return shape.quantize.run(config, show_progress=False)


@pytest.mark.parametrize(
    ("given", "method", "widths"),
    [
        ({"bits": 4}, "rtn", {4: 14, 8: 1}),
        ({"bits": 4, "text": True}, "gptq", {4: 14, 8: 1}),
        ({"bits": 3, "text": True, "method": "awq", "levels": "unbalanced"}, "awq", {3: 14, 4: 1}),
        ({"bits": 2, "text": True, "steps": 2, "group_size": 32}, "qat", {2: 14, 4: 1}),
    ],
)
def test_the_folder_opens_and_the_figures_are_its_own(folder, tmp_path, given, method, widths):
    result = quantize(folder, tmp_path / "out", **given)
    assert result.method == method
    assert {bits: count for bits, count in result.widths.items() if count} == widths
    assert result.bytes_after < 0.4 * result.bytes_before
    assert result.bytes_after == (tmp_path / "out" / "model.safetensors").stat().st_size
    assert (result.held_out_after is None) == ("text" not in given)
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert config["quantization_config"]["note"]["method"] == method
    dense = pippin.load(tmp_path / "out", device="cpu", dtype="float32", pack=False)
    packed = pippin.load(tmp_path / "out", device="cpu")
    ids = torch.tensor([dense.tokenizer.encode("a bright cold day")])
    torch.testing.assert_close(packed.module(ids), dense.module(ids), rtol=0.05, atol=0.02)


def test_an_average_gives_more_bits_to_some(folder, tmp_path):
    result = quantize(folder, tmp_path / "out", average_bits=3.0, method="rtn", text=True)
    assert sum(count > 0 for bits, count in result.widths.items() if bits != 8) > 1


def test_the_report_names_what_was_clipped(folder, tmp_path):
    report = str(quantize(folder, tmp_path / "out", bits=2, embedding_bits=16).report())
    for words in (" by rtn", "weights before", "weights after", "matrices of 2 bits", "clipped weights", "in layers."):
        assert words in report


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "give either bits"),
        ({"bits": 4, "average_bits": 3.0}, "give either bits"),
        ({"bits": 5}, "bits must be 2, 3, 4 or 8, got 5"),
        ({"bits": 4, "method": "gptq"}, "method 'gptq' looks at text"),
        ({"average_bits": 3.0}, "looks at text"),
        ({"bits": 4, "steps": 3}, "are for method 'qat'"),
        ({"average_bits": 9.0, "text": True}, "average_bits must be from 2 to 8, got 9.0"),
        ({"average_bits": 3.0, "text": True, "method": "qat"}, "average_bits is for"),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_anything_is_written(folder, tmp_path, given, message):
    with pytest.raises(InvalidArgument, match=message):
        quantize(folder, tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


def test_the_model_is_not_written_over(folder):
    config = shape.quantize.Config(model=str(folder / "model"), out=folder / "model", bits=4)
    with pytest.raises(InvalidArgument, match="the model itself"):
        shape.quantize.run(config)
    with pytest.raises(InvalidArgument, match="which is a file"):
        shape.quantize.run(replace(config, out=folder / "text.txt"))


def test_an_interrupt_leaves_nothing(folder, tmp_path, monkeypatch):
    from pippin.shape.quantize import rtn

    def interrupted(*given, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr(rtn, "quantize", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantize(folder, tmp_path / "out", bits=4)
    assert not (tmp_path / "out").exists()
