"""Routers of prompts on a small mixture: forecasts, training together, asking with them, errors before any work."""

import json

import pytest
import torch
from typer.testing import CliRunner

import pippin
from pippin.claims.worlds.sequences.byte_text import VOCABULARY, byte_decoder, byte_model
from pippin.cli.app import app
from pippin.core.errors import InvalidArgument, PippinError, UnsupportedModel
from pippin.engine import Engine, ModelOptions
from pippin.engine.experts import PromptExperts, prompt_experts
from pippin.language.methods.prompt_experts import PromptRouter
from pippin.language.presets import preset
from pippin.recipes import train
from pippin.session import GenerationOptions, Session
from pippin.session.providers.local import LocalModel


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("route")
    for name in ("nano", "nano-moe"):
        byte_model(byte_decoder(preset(name, VOCABULARY), seed=0)).save(folder / name)
    texts = ["The rain in Spain stays mainly in the plain.\n" * 60, "1 + 2 = 3; 4 + 5 = 9; 7 + 1 = 8.\n" * 60]
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return folder


def route(base, out, model="nano-moe", **given):
    always = {"max_length": 64, "stretch": 16, "keep": 3, "batch_size": 2, "eval_every": 99, "device": "cpu"}
    config = train.route.Config(model=str(base / model), data=(base / "text.jsonl",), out=out, **(always | given))
    return train.route.run(config, show_progress=False)


def test_a_forecast_is_trained_and_asked_with(base, tmp_path):
    result = route(base, tmp_path / "router", steps=6, lr=1e-2)
    assert result.held_out_after["loss"] < result.held_out_before["loss"]
    assert (result.keep, result.experts, result.router) == (3, 8, tmp_path / "router")
    router = PromptRouter.load(tmp_path / "router")
    assert result.parameters == sum(p.numel() for p in router.parameters())
    options = ModelOptions(prompt_router=tmp_path / "router", keep_experts=4, reselect_every=0)
    assert prompt_experts.from_options(options).num_kept == 4
    asked = ["ask", "-m", str(base / "nano-moe"), "--device", "cpu", "--max-tokens", "20", "--json", "The rain"]
    found = CliRunner().invoke(app, [*asked, "--prompt-router", str(tmp_path / "router"), "--keep-experts", "2"])
    assert found.exit_code == 0, found.output
    answers = []
    for experts in (None, PromptExperts(router, 2)):
        model = pippin.load(base / "nano-moe", device="cpu")
        with Engine(model, experts=experts) as engine:
            session = Session(LocalModel(model, engine=engine))
            answers.append(session.respond("The rain", options=GenerationOptions(max_tokens=20)).content)
    assert json.loads(found.stdout)["content"] == answers[1] != answers[0]


def test_both_are_trained_together(base, tmp_path):
    result = route(base, tmp_path / "tuned", stage="together", steps=4, lr=5e-3)
    assert result.held_out_after["loss"] < result.held_out_before["loss"]
    assert 0 <= result.held_out_after["swapped"] <= 1
    before, after = (
        pippin.load(path, device="cpu", dtype="float32", pack=False) for path in (base / "nano-moe", tmp_path / "tuned")
    )
    assert not torch.equal(before.module.lm_head.weight, after.module.lm_head.weight)
    router = PromptRouter.load(result.router)
    PromptExperts(router).check(after)
    assert router.config.eps > 0


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"keep": 1}, InvalidArgument, "keep must be from 2"),
        ({"keep": 9}, InvalidArgument, "to 8 experts, got 9"),
        ({"max_length": 16}, InvalidArgument, "max_length .* is 16"),
        ({"model": "nano"}, UnsupportedModel, "0 mixtures"),
        ({"depth": 4}, UnsupportedModel, "0 mixtures from layer 4"),
    ],
)
def test_errors_before_any_work(base, tmp_path, given, error, message):
    with pytest.raises(error, match=message):
        route(base, tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "given", [{"keep_experts": 3}, {"reselect_every": 3}, {"prompt_router": "r", "speculate": "ngram"}]
)
def test_options_that_contradict_each_other(given):
    with pytest.raises(InvalidArgument, match="prompt"):
        ModelOptions(**given)


def test_a_router_that_is_not_there(base):
    found = CliRunner().invoke(app, ["ask", "-m", str(base / "nano-moe"), "--prompt-router", "nowhere", "Hi"])
    assert found.exit_code != 0
    with pytest.raises(PippinError, match="nowhere"):
        PromptRouter.load("nowhere")
