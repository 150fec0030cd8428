"""`pippin train lora` and `pippin shape merge`, from files to an answer; a tiny model over bytes learns a tune."""

import json
from dataclasses import replace

import pytest
import torch

import pippin
from pippin.cli import main
from pippin.core import native
from pippin.language import Decoder
from pippin.language.adapters import read_pairs
from pippin.nn.feedforward import FeedForwardSpec

TUNE = "do re mi fa so la ti "


@pytest.fixture(autouse=True)
def nothing_piped_in(monkeypatch):
    monkeypatch.setattr("pippin.cli.inputs.read_stdin", lambda: None)


def small(tiny, seed: int = 0):
    """A random model of matrices that groups of 32 divide."""
    config = replace(tiny.config, layers=(replace(tiny.config.layers[0], feedforward=FeedForwardSpec(64)),) * 2)
    module = Decoder(config).initialise(seed=seed)
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
    """A text to learn."""
    path = tmp_path_factory.mktemp("data") / "tune.txt"
    path.write_text(TUNE * 120)
    return path


@pytest.fixture(scope="module")
def trained(folder, tune, tmp_path_factory):
    """An adapter, and what `--json` said of its making."""
    out = tmp_path_factory.mktemp("out") / "adapter"
    words = ["--rank", "8", "--steps", "30", "--lr", "3e-2", "--length", "64", "--rows", "2", "--held-out", str(tune)]
    with pytest.MonkeyPatch.context() as patch:
        said = []
        patch.setattr("pippin.cli.terminal.write", said.append)
        assert main(["train", "lora", str(folder), "--data", str(tune), "--out", str(out), "--json", *words]) == 0
    return out, json.loads(said[0])


def refused(capsys, *words, code) -> str:
    capsys.readouterr()
    assert main([str(word) for word in words]) == code
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = [line for line in said.err.splitlines() if line.startswith("error:")]
    return line


def test_what_was_learnt_is_told_and_kept_with_its_history(trained, folder):
    out, said = trained
    assert said["parameters"] == 2 * 8 * (4 * 32 + 2 * (32 + 16) + 3 * (32 + 64))
    assert said["steps"] == 30
    assert said["held_out_after"]["loss"] < said["held_out_before"]["loss"] - 1
    made = json.loads((out / "base_model.json").read_text())["made"]
    assert made["steps"] == 30
    assert made["held_out_after"] == said["held_out_after"]
    assert [file["name"] for file in made["data"]] == ["tune.txt"]
    assert str(folder.parent) not in (out / "base_model.json").read_text() + (out / "adapter_config.json").read_text()
    assert (out / "run" / "loss.png").is_file()


def test_the_adapter_gives_the_loss_that_was_reported(trained, folder):
    out, said = trained
    model = pippin.load(folder, device="cpu", pack=False)
    adapter = model.load_adapter("a", out)
    ids = torch.tensor([model.tokenizer.encode(TUNE * 3)])
    losses = []
    with torch.no_grad():
        for shares in (None, [(adapter, slice(None))]):
            logits = model.module(ids, adapters=shares)[0, :-1]
            losses.append(float(torch.nn.functional.cross_entropy(logits, ids[0, 1:])))
    assert losses[1] < losses[0] - 1
    assert losses[1] == pytest.approx(said["held_out_after"]["loss"], abs=0.5)


def test_the_answer_with_the_adapter_is_that_of_the_merged_model(trained, folder, tmp_path, capsys):
    out, _ = trained
    assert main(["shape", "merge", str(folder), "--adapter", str(out), "--out", str(tmp_path / "merged")]) == 0
    ask = ["ask", "do re mi ", "--max-tokens", "9", "--temperature", "0", "--dtype", "float32"]
    capsys.readouterr()
    answers = []
    for words in (["--model", folder, "--adapter", out], ["--model", tmp_path / "merged"], ["--model", folder]):
        assert main([*ask, *map(str, words)]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != answers[2]


def test_several_are_added_up_and_cut_to_a_rank(trained, folder, tmp_path, capsys):
    out, _ = trained
    words = ["--adapter", out, "--weight", "0.5", "--adapter", out, "--weight", "-0.25", "--rank", "9", "--json"]
    assert main(["shape", "merge", str(folder), *map(str, words), "--out", str(tmp_path / "sum")]) == 0
    assert json.loads(capsys.readouterr().out)["rank"] == 9
    model = pippin.load(folder, device="cpu", pack=False)
    before, after = read_pairs(model, out), read_pairs(model, tmp_path / "sum")
    assert {len(down) for down, _ in after.values()} == {9}
    for layer, (down, up) in after.items():
        torch.testing.assert_close(up @ down, 0.25 * before[layer][1] @ before[layer][0], atol=1e-5, rtol=0)


def test_a_run_goes_on_where_it_stopped_and_a_new_one_may_begin_from_an_adapter(
    trained, folder, tune, tmp_path, capsys
):
    words = ["--data", tune, "--rank", "2", "--length", "32", "--rows", "1", "--held-out", "0", "--json"]
    run = ["train", "lora", folder, *words, "--targets", "q_proj,up_proj", "--out"]
    assert main([str(w) for w in (*run, tmp_path / "whole", "--steps", "6", "--every", "3")]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert "go on with it with --resume" in refused(capsys, *run, tmp_path / "whole", "--steps", "6", code=2)
    (tmp_path / "whole" / "adapter_model.safetensors").unlink()
    assert main([str(w) for w in (*run, tmp_path / "whole", "--steps", "6", "--every", "3", "--resume")]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["last_loss"] == whole["last_loss"]
    model = pippin.load(folder, device="cpu", pack=False)
    pairs = read_pairs(model, tmp_path / "whole")
    words = ["--begin", tmp_path / "whole", "--steps", "1", "--lr", "1e-9", "--rank", "4"]
    run[run.index("2")] = "4"
    assert main([str(w) for w in (*run, tmp_path / "next", *words[:-2])]) == 0
    for layer, (down, up) in read_pairs(model, tmp_path / "next").items():
        torch.testing.assert_close(up @ down, pairs[layer][1] @ pairs[layer][0], atol=1e-5, rtol=0)


@pytest.mark.skipif(native.library() is None, reason="the native kernels are not built")
def test_a_recovery_adapter_over_two_bits_begins_nearer_and_learns_from_the_original(folder, tune, tmp_path, capsys):
    losses = []
    for start in ([], ["--recover", folder]):
        out = tmp_path / f"{len(start)}"
        words = ["--bits", "2", "--rank", "8", "--steps", "2", "--lr", "1e-9", "--length", "64", "--rows", "1", *start]
        words += ["--teacher", folder, "--data", tune, "--held-out", tune, "--json", "--out", out]
        assert main([str(word) for word in ("train", "lora", folder, *words)]) == 0
        losses.append(json.loads(capsys.readouterr().out)["last_loss"])
    assert losses[1] < losses[0]  # cross-entropy against the teacher, nine parts to one


def test_what_cannot_be_trained_is_refused_before_the_first_step(trained, folder, tune, tmp_path, capsys, tiny):
    out, _ = trained
    run = ["train", "lora", folder, "--out", tmp_path / "none", "--steps", "1", "--length", "32"]
    chats, wrong = (tmp_path / f"{name}.jsonl" for name in ("chats", "wrong"))
    chats.write_text('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n')
    wrong.write_text('{"text": "fine"}\n{"text": \n')
    assert "'qproj'" in refused(capsys, *run, "--data", tune, "--targets", "qproj", code=2)
    assert "at least 1, got 0" in refused(capsys, *run, "--data", tune, "--rank", "0", code=2)
    assert "rank 40 is more than" in refused(capsys, *run, "--data", tune, "--rank", "40", code=2)
    assert "template" in refused(capsys, *run, "--data", chats, code=2)
    assert "wrong.jsonl" in refused(capsys, *run, "--data", wrong, code=2)
    assert "give one of them" in refused(capsys, *run, "--data", tune, "--begin", out, "--recover", folder, code=2)
    other = tmp_path / "other"
    small(tiny, seed=5).save(other)
    assert "made for" in refused(capsys, "train", "lora", other, *run[3:], "--data", tune, "--begin", out, code=4)
    assert "made for" in refused(capsys, "ask", "x", "--model", other, "--adapter", out, code=4)
    assert "made for" in refused(capsys, "shape", "merge", other, "--adapter", out, "--out", tmp_path / "none", code=4)
    away = ["ask", "x", "--url", "http://localhost:9/v1", "--adapter", out]
    assert "--adapter: for a model of this machine" in refused(capsys, *away, code=2)
    merge = ["shape", "merge", folder, "--adapter", out, "--out", tmp_path / "none"]
    assert "2 weights were given for 1 adapters" in refused(capsys, *merge, "--weight", "1", "--weight", "2", code=2)
    assert "--rank must be at least 1, got 0" in refused(capsys, *merge, "--rank", "0", code=2)
    assert not (tmp_path / "none").exists()


def test_a_teacher_of_another_vocabulary_is_refused(folder, tune, default_model_path, tmp_path, capsys):
    run = ["train", "lora", folder, "--out", tmp_path / "none", "--steps", "1", "--length", "32", "--data", tune]
    assert "differ in token" in refused(capsys, *run, "--teacher", default_model_path, code=4)
