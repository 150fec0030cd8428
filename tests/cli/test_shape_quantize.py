"""`pippin shape quantize` as a user runs it, on a small model of random weights."""

import json

import pytest
import torch

from pippin.language import Decoder, DecoderConfig, LanguageModel, LayerSpec
from pippin.nn.attention import AttentionSpec
from pippin.nn.feedforward import FeedForwardSpec

TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 60


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """A model whose matrices groups of 32 and 64 divide, and a text."""
    layer = LayerSpec(AttentionSpec(), FeedForwardSpec(128))
    config = DecoderConfig("llama", 260, 64, (layer, layer), heads=4, kv_heads=2, head_dim=16, max_context=256)
    where = tmp_path_factory.mktemp("quantize")
    module = Decoder(config).initialise(seed=0)
    LanguageModel("small", module, tiny.tokenizer, tiny.template).save(where / "model")
    (where / "text.txt").write_text(TEXT, encoding="utf-8")
    return where


def call(*words):
    """Run in this process, which is quicker; the streams and the exit code are the same."""
    from typer.testing import CliRunner

    from pippin.cli.app import app

    return CliRunner().invoke(app, ["shape", "quantize", *map(str, words)])


def common(folder, out):
    return (folder / "model", "--out", out, "--length", "64", "--rows", "2", "--tokens", "512", "--json")


@pytest.mark.parametrize(
    ("options", "method", "widths"),
    [
        (("--bits", "4"), "rtn", {"4": 14, "8": 1}),
        (("--bits", "4", "--data", "text.txt"), "gptq", {"4": 14, "8": 1}),
        (("--bits", "3", "--data", "text.txt", "--method", "awq", "--levels", "unbalanced"), "awq", {"3": 14, "4": 1}),
        (("--bits", "2", "--data", "text.txt", "--steps", "2", "--group", "32"), "qat", {"2": 14, "4": 1}),
    ],
)
def test_the_folder_opens_and_the_figures_are_its_own(folder, tmp_path, options, method, widths):
    import pippin

    options = [folder / word if word == "text.txt" else word for word in options]
    done = call(*common(folder, tmp_path / "out"), *options)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["method"] == method
    assert {bits: count for bits, count in told["widths"].items() if count} == widths
    assert told["bytes_after"] < 0.4 * told["bytes_before"]
    assert told["bytes_after"] == (tmp_path / "out" / "model.safetensors").stat().st_size
    assert (told["held_out_after"] is None) == ("--data" not in options)
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert config["quantization_config"]["note"]["method"] == method
    dense = pippin.load(tmp_path / "out", device="cpu", dtype="float32", pack=False)
    packed = pippin.load(tmp_path / "out", device="cpu")
    ids = torch.tensor([dense.tokenizer.encode("a bright cold day")])
    torch.testing.assert_close(packed.module(ids), dense.module(ids), rtol=0.05, atol=0.02)


def test_an_average_gives_more_bits_to_some(folder, tmp_path):
    words = ("--average-bits", "3", "--data", folder / "text.txt", "--method", "rtn")
    done = call(*common(folder, tmp_path / "out"), *words)
    assert done.exit_code == 0, done.output
    widths = json.loads(done.stdout)["widths"]
    assert sum(count > 0 for bits, count in widths.items() if bits != "8") > 1


def test_the_table_names_what_was_clipped(folder, tmp_path):
    done = call(folder / "model", "--out", tmp_path / "out", "--bits", "2", "--embedding-bits", "16")
    assert done.exit_code == 0, done.output
    assert "small by rtn" in done.stdout or "model by rtn" in done.stdout
    for words in ("weights before", "weights after", "matrices of 2 bits", "clipped weights", "most, in layers."):
        assert words in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "give either --bits or --average-bits"),
        (("--bits", "4", "--average-bits", "3"), "give either --bits or --average-bits"),
        (("--bits", "5"), "bits is 5"),
        (("--bits", "4", "--method", "hqq"), "--method is 'hqq'"),
        (("--bits", "4", "--method", "gptq"), "--method gptq looks at text"),
        (("--average-bits", "3"), "--average-bits looks at text"),
        (("--bits", "4", "--steps", "3"), "--steps and --resume are for --method qat"),
        (("--bits", "4", "--group", "48"), "--group is 48"),
        (("--bits", "4", "--tokens", "1"), "--tokens must be at least 2"),
        (("--average-bits", "9", "--data", "text.txt"), "an average of 9.0 bits"),
        (("--average-bits", "3", "--data", "text.txt", "--method", "qat"), "--average-bits is for rtn"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_anything_is_written(folder, tmp_path, words, message):
    words = [folder / word if word == "text.txt" else word for word in words]
    done = call(*common(folder, tmp_path / "out"), *words)
    assert message in f"{done.output}{done.exception}"
    assert done.exit_code != 0
    assert not (tmp_path / "out").exists()


def test_the_model_is_not_written_over(folder):
    done = call(folder / "model", "--out", folder / "model", "--bits", "4")
    assert "the model itself" in f"{done.output}{done.exception}"
    done = call(folder / "model", "--out", folder / "text.txt", "--bits", "4")
    assert "which is a file" in f"{done.output}{done.exception}"


def test_an_interrupt_leaves_nothing(folder, tmp_path, monkeypatch):
    from pippin.shape.quantise import rtn

    def interrupted(*given, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr(rtn, "quantise", interrupted)
    done = call(folder / "model", "--out", tmp_path / "out", "--bits", "4")
    assert done.exit_code != 0
    assert not (tmp_path / "out").exists()
