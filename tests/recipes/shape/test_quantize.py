"""Quantization on a small model of random weights: folders that open, figures that are theirs."""

import json
import math
import time
import warnings
from dataclasses import replace

import pytest
import torch

import pippin
from pippin.core import progress
from pippin.core.errors import InvalidArgument, QualityLoss
from pippin.language import Decoder, DecoderConfig, LanguageModel, LayerSpec, quantized_checkpoint
from pippin.language.likelihood import text_likelihood
from pippin.nn.attention.attention import AttentionSpec
from pippin.nn.feedforward.feedforward import FeedForwardSpec
from pippin.recipes import shape
from pippin.recipes.shape import quantize as recipe
from pippin.recipes.shape.stored_bits import stored_bits

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
    assert result.measured_on == ("held-out data" if "text" in given else "a passage")
    passage = text_likelihood(pippin.load(tmp_path / "out", device="cpu"), recipe.PASSAGE, max_length=256)
    assert (result.loss_after == pytest.approx(passage.per_token)) == ("text" not in given)
    assert result.source_bits == 32
    summary = result.summary()
    assert summary["perplexity_after"] == pytest.approx(math.exp(summary["loss_after"]))
    assert ("perplexity_rounded" in summary) == (method == "qat")
    assert f"perplexity on {result.measured_on} after" in str(result.report())
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert config["quantization_config"]["note"]["method"] == method
    dense = pippin.load(tmp_path / "out", device="cpu", dtype="float32", pack=False)
    packed = pippin.load(tmp_path / "out", device="cpu")
    ids = torch.tensor([dense.tokenizer.encode("a bright cold day")])
    torch.testing.assert_close(packed.module(ids), dense.module(ids), rtol=0.05, atol=0.02)


def test_a_model_that_quantization_destroys_is_warned_of(folder, tmp_path, monkeypatch):
    """One matrix is halved by the quantizer that is tried; the loss grows by what a model with that matrix loses."""
    sharp = pippin.load(folder / "model", device="cpu", dtype="float32", pack=False)
    with torch.no_grad():  # predictions that a passage of its own would make likely: those that it makes most surely
        sharp.module.embed_tokens.dense_weight().mul_(30)
    sharp.save(tmp_path / "sharp")
    before = text_likelihood(sharp, recipe.PASSAGE, max_length=256).per_token

    def run(bits):
        config = shape.quantize.Config(
            model=str(tmp_path / "sharp"), out=tmp_path / str(bits), bits=bits, embedding_bits=bits, device="cpu"
        )
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            result = shape.quantize.run(config, show_progress=False)
        return result, [str(one.message) for one in given if issubclass(one.category, QualityLoss)]

    for bits in (8, 2):
        result, given = run(bits)
        after = text_likelihood(pippin.load(result.out, device="cpu"), recipe.PASSAGE, max_length=256).per_token
        assert result.loss_growth == pytest.approx(after - before, abs=1e-3)
        assert bool(given) == (result.loss_growth > math.log(2))
    monkeypatch.setattr(recipe, "DESTROYED", -10.0)
    _, (message,) = run(4)
    assert "much worse than sharp" in message
    assert message.endswith("give text to calibrate on (--data FILE), or more bits")


def test_a_model_that_has_few_bits_already_is_said(folder, tmp_path, capsys):
    quantize(folder, tmp_path / "four", bits=4)
    assert stored_bits(tmp_path / "four") == pytest.approx(4 + 16 / 64, abs=0.01)
    assert stored_bits(folder / "model") == 32
    config = shape.quantize.Config(model=str(tmp_path / "four"), out=tmp_path / "again", bits=4, device="cpu")
    shape.quantize.run(config)
    assert "four is stored in 4.2 bits per weight already, so 4 bits save little" in capsys.readouterr().err
    shape.quantize.run(replace(config, bits=2, out=tmp_path / "two"))
    assert "already" not in capsys.readouterr().err


def test_saving_says_that_it_goes_on(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.01)
    save = quantized_checkpoint.save_quantized
    monkeypatch.setattr(
        quantized_checkpoint, "save_quantized", lambda *given, **named: (time.sleep(0.3), save(*given, **named))[1]
    )
    config = shape.quantize.Config(model=str(folder / "model"), out=tmp_path / "four", bits=4, device="cpu")
    shape.quantize.run(config)
    assert "saving four: 0 s" in capsys.readouterr().err
    shape.quantize.run(replace(config, out=tmp_path / "quiet"), show_progress=False)
    assert "saving" not in capsys.readouterr().err


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
    with pytest.raises(InvalidArgument, match="holds files already; give another out"):
        shape.quantize.run(config)
    with pytest.raises(InvalidArgument, match=r"text\.txt exists already; give another out"):
        shape.quantize.run(replace(config, out=folder / "text.txt"))


def test_an_interrupt_leaves_nothing(folder, tmp_path, monkeypatch):
    from pippin.shape.quantize import rtn

    def interrupted(*given, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr(rtn, "quantize", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantize(folder, tmp_path / "out", bits=4)
    assert not (tmp_path / "out").exists()
