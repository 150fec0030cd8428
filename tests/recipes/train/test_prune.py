"""Instruction-following pruning and specialization on a small model: folders that open, errors before any work."""

import json

import pytest
import torch

import pippin
from pippin.claims.worlds.sequences.byte_text import byte_config, byte_model
from pippin.core.errors import InvalidArgument, PippinError, VocabularyMismatch
from pippin.language import Decoder
from pippin.language.methods.instruction_pruning.pruned_model import PrunedModel
from pippin.recipes import shape, train

TEXT = "The rain in Spain stays mainly in the plain.\n"


@pytest.fixture
def base(tmp_path):
    byte_model(Decoder(byte_config(layers=2, width=32)).initialize(seed=0)).save(tmp_path / "base")
    (tmp_path / "text.txt").write_text(TEXT * 60)
    pairs = [{"prompt": f"Say {n}.", "completion": f"It is {n}."} for n in range(60)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    return tmp_path


def prune(base, model, out, *, data="text.txt", **given):
    always = {"max_length": 32, "batch_size": 2, "eval_every": 99, "device": "cpu"}
    config = train.prune.Config(model=str(base / model), data=(base / data,), out=base / out, **(always | given))
    return train.prune.run(config, show_progress=False)


def specialize(base, model, **given):
    config = shape.specialize.Config(model=base / model, out=base / "small", device="cpu", **given)
    return shape.specialize.run(config).figures


def test_a_model_is_pruned_tuned_and_made_small(base):
    result = prune(base, "base", "pruned", keep=32, steps=4, lr=5e-3)
    assert result.held_out_after["loss"] < result.held_out_before["loss"]
    assert result.held_out_after["kept"] == pytest.approx(32 / 96)
    assert result.held_out_after["in use"] >= 32 / 96 - 1e-6
    first = PrunedModel.load(base / "pruned", device="cpu")
    assert (first.module.keep, first.module.intermediate_size) == (32, 96)

    assert prune(base, "pruned", "tuned", data="pairs.jsonl", stage="instruct", steps=2).stage == "instruct"
    tuned = PrunedModel.load(base / "tuned", device="cpu")
    assert tuned.module.keep == 32
    assert not torch.equal(tuned.module.predictor.outer.weight, first.module.predictor.outer.weight)

    figures = specialize(base, "tuned", prompt="Say 4.")
    small = pippin.load(base / "small", device="cpu", dtype="float32", pack=False)
    parameters = sum(p.numel() for p in small.module.parameters())
    assert figures["parameters after"] == parameters < figures["parameters before"]
    assert 0 < figures["bytes read for a token, after / before"] < 1
    ids = torch.arange(20)[None]
    with torch.no_grad():
        masks = tuned.module.masks(torch.tensor([tuned.prompt_ids("Say 4.")]))
        torch.testing.assert_close(small.module(ids), tuned.module(ids, masks), atol=1e-5, rtol=1e-5)


def test_one_mask_for_all_prompts_needs_none(base):
    prune(base, "base", "pruned", keep=33, steps=2, predictor="static", start="random")
    assert "parameters after" in specialize(base, "pruned")
    assert pippin.load(base / "small", device="cpu").config.layers[0].feedforward.intermediate_size == 33


def test_a_trained_reader_must_have_the_same_tokens(base, tiny):
    tiny.save(base / "other")
    with pytest.raises(VocabularyMismatch, match="differ in token"):
        prune(base, "base", "pruned", keep=32, predictor=str(base / "other"), steps=1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "keep .* is missing"),
        ({"keep": 97}, "at most 96"),
        ({"keep": 32, "narrow": 2.0}, "narrow must be from 0 to 1, got 2.0"),
        ({"keep": 32, "chunks": 1}, "at least 2"),
        ({"keep": 32, "eps": 0.0}, "eps must be above 0"),
        ({"keep": 32, "stage": "instruct"}, "the data holds no prompts with answers"),
    ],
)
def test_settings_that_make_no_sense_are_refused_before_any_work(base, given, message):
    with pytest.raises(InvalidArgument, match=message):
        prune(base, "base", "pruned", steps=1, **given)
    assert not (base / "pruned" / "config.json").exists()


def test_what_cannot_be_specialized_says_so(base):
    with pytest.raises(InvalidArgument, match="neither a model that"):
        specialize(base, "base", prompt="a")
    prune(base, "base", "pruned", keep=32, steps=1, predictor=str(base / "base"))
    with pytest.raises(PippinError, match="give a prompt"):
        specialize(base, "pruned")
    with pytest.raises(InvalidArgument, match="give prompt, not"):
        specialize(base, "pruned", weights="a=1")
    with pytest.raises(InvalidArgument, match="has a predictor already"):
        prune(base, "pruned", "again", predictor="small", steps=1)
    assert isinstance(pippin.load(base / "pruned", device="cpu"), PrunedModel)
