"""LoRA adapters from files to an answer; a tiny model over bytes is trained on a tune."""

import json
from dataclasses import replace

import pytest
import torch

import pippin
from pippin.core import native
from pippin.core.errors import AdapterMismatch, InvalidArgument, InvalidRecord, PippinError, VocabularyMismatch
from pippin.language import Decoder
from pippin.language.adapter_files import read_factors
from pippin.nn.feedforward.feedforward import FeedForwardSpec
from pippin.recipes.shape import merge
from pippin.recipes.train import lora

TUNE = "do re mi fa so la ti "


def small(tiny, seed: int = 0):
    """A random model of matrices that groups of 32 divide."""
    config = replace(tiny.config, layers=(replace(tiny.config.layers[0], feedforward=FeedForwardSpec(64)),) * 2)
    module = Decoder(config).initialize(seed=seed)
    for parameter in module.parameters():
        if parameter.ndim == 2:
            parameter.data *= 8  # so that its predictions are anything but even, and its layers count
    return pippin.LanguageModel("small", module, tiny.tokenizer, None)


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """A model on disk, without a chat template."""
    path = tmp_path_factory.mktemp("model")
    small(tiny).save(path)
    return path


@pytest.fixture(scope="module")
def tune(tmp_path_factory):
    """A text to train on."""
    path = tmp_path_factory.mktemp("data") / "tune.txt"
    path.write_text(TUNE * 120)
    return path


def run(model, data, out, **given):
    settings = {"max_length": 32, "batch_size": 1, "held_out": 0} | given
    return lora.run(lora.Config(model=str(model), data=(data,), out=out, **settings), show_progress=False)


@pytest.fixture(scope="module")
def trained(folder, tune, tmp_path_factory):
    """An adapter, and the result of its training."""
    out = tmp_path_factory.mktemp("out") / "adapter"
    return out, run(folder, tune, out, rank=8, steps=30, lr=3e-2, max_length=64, batch_size=2, held_out=tune)


def test_the_adapter_is_saved_with_how_it_was_made(trained, folder):
    out, result = trained
    assert result.parameters == 2 * 8 * (4 * 32 + 2 * (32 + 16) + 3 * (32 + 64))
    assert result.held_out_after["loss"] < result.held_out_before["loss"] - 1
    made = json.loads((out / "base_model.json").read_text())["made"]
    assert made["steps"] == 30
    assert made["held_out_after"] == result.held_out_after
    assert [file["name"] for file in made["data"]] == ["tune.txt"]
    assert str(folder.parent) not in (out / "base_model.json").read_text() + (out / "adapter_config.json").read_text()
    assert (out / "run" / "loss.png").is_file()


def test_the_adapter_gives_the_loss_that_was_reported(trained, folder):
    out, result = trained
    model = pippin.load(folder, device="cpu", pack=False)
    adapter = model.load_adapter("a", out)
    ids = torch.tensor([model.tokenizer.encode(TUNE * 3)])
    losses = []
    with torch.no_grad():
        for shares in (None, [(adapter, slice(None))]):
            logits = model.module(ids, adapters=shares)[0, :-1]
            losses.append(float(torch.nn.functional.cross_entropy(logits, ids[0, 1:])))
    assert losses[1] < losses[0] - 1
    assert losses[1] == pytest.approx(result.held_out_after["loss"], abs=0.5)


def test_the_merged_model_computes_what_the_adapter_does(trained, folder, tmp_path):
    out, _ = trained
    config = merge.Config(model=str(folder), adapter=(out,), out=tmp_path / "merged")
    assert merge.run(config).adapters == ("adapter",)
    model, merged = (pippin.load(path, device="cpu", pack=False) for path in (folder, tmp_path / "merged"))
    ids = torch.tensor([model.tokenizer.encode(TUNE)])
    with torch.no_grad():
        adapted = model.module(ids, adapters=[(model.load_adapter("a", out), slice(None))])
        torch.testing.assert_close(merged.module(ids), adapted, atol=1e-4, rtol=1e-4)
        assert (adapted - model.module(ids)).abs().max() > 0.1


def test_several_are_added_up_and_cut_to_a_rank(trained, folder, tmp_path):
    out, _ = trained
    config = merge.Config(model=str(folder), adapter=(out, out), weight=(0.5, -0.25), rank=9, out=tmp_path / "sum")
    assert merge.run(config).rank == 9
    model = pippin.load(folder, device="cpu", pack=False)
    before, after = read_factors(model, out), read_factors(model, tmp_path / "sum")
    assert {len(down) for down, _ in after.values()} == {9}
    for layer, (down, up) in after.items():
        torch.testing.assert_close(up @ down, 0.25 * before[layer][1] @ before[layer][0], atol=1e-5, rtol=0)


def test_a_run_continues_where_it_stopped_and_a_new_one_may_start_from_an_adapter(folder, tune, tmp_path):
    given = {"rank": 2, "targets": ("q_proj", "up_proj")}
    whole = run(folder, tune, tmp_path / "whole", **given, steps=6, eval_every=3)
    (tmp_path / "whole" / "adapter_model.safetensors").unlink()
    again = run(folder, tune, tmp_path / "whole", **given, steps=6, eval_every=3, resume=True)
    assert again.training.losses == whole.training.losses
    model = pippin.load(folder, device="cpu", pack=False)
    pairs = read_factors(model, tmp_path / "whole")
    given |= {"rank": 4, "init_adapter": tmp_path / "whole", "steps": 1, "lr": 1e-9}
    run(folder, tune, tmp_path / "next", **given)
    for layer, (down, up) in read_factors(model, tmp_path / "next").items():
        torch.testing.assert_close(up @ down, pairs[layer][1] @ pairs[layer][0], atol=1e-5, rtol=0)


@pytest.mark.skipif(native.library() is None, reason="the native kernels are not built")
def test_a_recovery_adapter_over_two_bits_starts_nearer_to_the_original(folder, tune, tmp_path):
    losses = []
    for start in ({}, {"recover": str(folder)}):
        given = {"bits": 2, "rank": 8, "steps": 2, "lr": 1e-9, "max_length": 64, "held_out": tune}
        result = run(folder, tune, tmp_path / f"{len(start)}", **given, **start, teacher=str(folder))
        losses.append(result.training.losses[-1])
    assert losses[1] < losses[0]  # cross-entropy against the teacher, nine parts to one


def test_what_cannot_be_trained_is_refused_before_the_first_step(trained, folder, tune, tmp_path, tiny):
    out, _ = trained
    new = tmp_path / "none"
    chats, wrong, other = tmp_path / "chats.jsonl", tmp_path / "wrong.jsonl", tmp_path / "other"
    chats.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    wrong.write_text('{"text": "fine"}\n{"text": \n')
    small(tiny, seed=5).save(other)
    with pytest.raises(InvalidArgument, match="'qproj'"):
        run(folder, tune, new, targets=("qproj",))
    with pytest.raises(InvalidArgument, match="rank must be at least 1, got 0"):
        run(folder, tune, new, rank=0)
    with pytest.raises(InvalidArgument, match="rank 40 is more than"):
        run(folder, tune, new, rank=40)
    with pytest.raises(PippinError, match="template"):
        run(folder, chats, new)
    with pytest.raises(InvalidRecord, match=r"wrong\.jsonl"):
        run(folder, wrong, new)
    with pytest.raises(InvalidArgument, match="give one of them"):
        run(folder, tune, new, init_adapter=out, recover=str(folder))
    with pytest.raises(AdapterMismatch, match="made for"):
        run(other, tune, new, init_adapter=out)
    with pytest.raises(AdapterMismatch, match="made for"):
        merge.run(merge.Config(model=str(other), adapter=(out,), out=new))
    with pytest.raises(InvalidArgument, match="2 weights were given for 1 adapters"):
        merge.run(merge.Config(model=str(folder), adapter=(out,), weight=(1.0, 2.0), out=new))
    assert not new.exists()


def test_a_teacher_of_another_vocabulary_is_refused(folder, tune, default_model_path, tmp_path):
    with pytest.raises(VocabularyMismatch, match="differ in token"):
        run(folder, tune, tmp_path / "none", teacher=str(default_model_path))
