"""Perplexity of text files: transformers' losses window by window, and the errors of a sample mean."""

import json
import math

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM

from pippin.cli import main
from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.language import language_model
from pippin.recipes.evaluate import perplexity

TEXTS = {"b.md": "It was the best of times, it was the worst of times. " * 3, "a.txt": "née Dickens, 1812\n" * 4}


@pytest.fixture(scope="module")
def model(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    with torch.no_grad():  # larger weights, so that predictions differ
        for parameter in tiny.module.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    tiny.save(folder)
    with torch.no_grad():
        for parameter in tiny.module.parameters():
            if parameter.ndim == 2:
                parameter.div_(8)
    return folder


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "b.md").write_text(TEXTS["b.md"], encoding="utf-8")
    (folder / "a.txt").write_text(TEXTS["a.txt"], encoding="utf-8")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    return folder


def token_losses(folder, texts, length, stride):
    """Losses by transformers, a window at a time, each token once."""
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = language_model.load(folder).tokenizer
    found = []
    for text in texts:
        ids, done = tokenizer.encode(text), 1
        for start in range(0, len(ids) - 1, stride):
            end = min(start + length + 1, len(ids))
            if end > done:
                with torch.no_grad():
                    logits = theirs(torch.tensor([ids[start:end]])).logits[0, :-1].double()
                losses = -logits.log_softmax(-1).gather(-1, torch.tensor(ids[start + 1 : end])[:, None])[:, 0]
                found += losses[done - end :].tolist()
                done = end
    return np.array(found)


@pytest.mark.parametrize(("length", "stride", "expected_stride"), [(24, None, 12), (16, 16, 16), (30, 7, 7)])
def test_perplexity_and_its_error_are_those_of_transformers(model, texts, length, stride, expected_stride):
    config = perplexity.Config(
        model=str(model), data=(texts,), max_length=length, stride=stride, device="cpu", dtype="float32"
    )
    result = perplexity.run(config, show_progress=False)
    losses = token_losses(model, [TEXTS["a.txt"], TEXTS["b.md"]], length, expected_stride)
    summary = result.summary()
    assert [file.name for file in result.files] == ["a.txt", "b.md"]
    assert summary["tokens"] == len(losses)
    assert summary["nats_per_token"] == pytest.approx(losses.mean(), rel=1e-4)
    assert summary["nats_per_token_error"] == pytest.approx(stats.sem(losses), rel=1e-3)
    assert summary["perplexity"] == pytest.approx(math.exp(losses.mean()), rel=1e-3)
    assert summary["perplexity_error"] == pytest.approx(math.exp(losses.mean()) * stats.sem(losses), rel=1e-3)


def test_the_command_prints_what_the_recipe_finds(model, texts, capsys):
    words = ["evaluate", "perplexity", str(model), str(texts / "a.txt"), "--max-length", "24", "--max-tokens", "40"]
    assert main([*words, "--json", "--device", "cpu"]) == 0
    printed = json.loads(capsys.readouterr().out)
    config = perplexity.Config(model=str(model), data=(texts / "a.txt",), max_length=24, max_tokens=40, device="cpu")
    assert printed == perplexity.run(config, show_progress=False).summary()
    assert printed["tokens"] == 40
    assert main([*words, "--device", "cpu"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["perplexity", f"{printed['perplexity']:.4g}", f"{printed['perplexity_error']:.4g}"] in rows


def test_the_default_context_is_at_most_the_models(model, texts):
    result = perplexity.run(perplexity.Config(model=str(model), data=(texts,), device="cpu"), show_progress=False)
    assert result.max_length == min(512, language_model.load(model).context_size)


def test_what_has_no_text_is_refused(model, tmp_path):
    def run(*paths, **given):
        perplexity.run(perplexity.Config(model=str(model), data=paths, device="cpu", **given), show_progress=False)

    with pytest.raises(InvalidInput, match="has no text: no file ends in"):
        run(tmp_path)
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(InvalidInput, match="there is no text in it"):
        run(tmp_path)
    with pytest.raises(InvalidInput, match="there is no file"):
        run(tmp_path / "none.txt")
    (tmp_path / "blank.txt").write_text("some text")
    with pytest.raises(InvalidArgument, match="stride is 9"):
        run(tmp_path, max_length=8, stride=9)
