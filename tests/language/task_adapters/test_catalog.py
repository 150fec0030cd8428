"""The adapters that come with Pippin: whole, for their model only, and used for their task only."""

import json
from contextlib import suppress

import pytest
import torch

import pippin
from pippin.core.errors import CorruptedFile
from pippin.core.files import sha256_of
from pippin.kits.text import TextTasks
from pippin.language import task_adapters
from pippin.language.adapter_files import BASE, WEIGHTS, base_sha256
from pippin.language.task_adapters import catalog
from pippin.serve.task_model import TaskCancellation, TaskModel
from pippin.session.providers.local import LocalModel
from pippin.shape.lora import LowRankModel


@pytest.fixture
def loaded(default_model_path):
    """The default model, to which nothing else of these tests has been added."""
    return pippin.load(default_model_path, device="cpu", dtype="float32")


@pytest.fixture
def made(loaded, default_model_path, tmp_path, monkeypatch):
    """A catalog with one adapter that changes a lot, for tool calls and for extraction."""
    dense = pippin.load(default_model_path, device="cpu", dtype="float32", pack=False)
    adapted = LowRankModel(dense.module, rank=2, alpha=64.0, targets=["o_proj"])
    for up in adapted.up.values():
        torch.nn.init.normal_(up, generator=torch.Generator().manual_seed(0))
    entries = []
    for task in ("tools", "extraction"):
        adapted.save(tmp_path / task, dense, metadata={"task": task, "seed": 3})
        config = dense.config
        weights = tmp_path / task / WEIGHTS
        entries.append(
            {
                "name": task,
                "model": "smollm2-135m",
                "task": task,
                "shape": [len(config.layers), config.hidden_size, config.vocab_size],
                "base_sha256": base_sha256(dense),
                "sha256": sha256_of(weights),
                "size": weights.stat().st_size,
            }
        )
    (tmp_path / "catalog.json").write_text(json.dumps(entries))
    monkeypatch.setattr(catalog, "FOLDER", tmp_path)
    catalog.task_adapters.cache_clear()
    yield tmp_path
    catalog.task_adapters.cache_clear()


def test_every_adapter_is_the_file_of_the_catalog():
    for each in task_adapters.task_adapters():
        assert sha256_of(each.path / WEIGHTS) == each.sha256
        assert (each.path / WEIGHTS).stat().st_size == each.size < 12_000_000
        assert each.provenance["task"] == each.task
        assert json.loads((each.path / BASE).read_text())["sha256"] == each.base_sha256
        assert each.provenance["evaluations"]


def test_every_adapter_belongs_to_its_model(loaded):
    for each in task_adapters.task_adapters():
        if each.model == "smollm2-135m":
            assert task_adapters.find(loaded, each.task) == each
            assert task_adapters.load(loaded, each.task) == each.name
            assert loaded.adapter(each.name).changes


def test_an_adapter_is_loaded_once_and_for_its_model_alone(made, loaded, tiny):
    assert task_adapters.find(tiny, "tools") is None
    assert task_adapters.load(tiny, "tools") is None
    assert task_adapters.load(loaded, "summaries") is None
    assert task_adapters.load(loaded, "tools") == "tools"
    first = loaded.adapter("tools")
    assert task_adapters.load(loaded, "tools") == "tools"
    assert loaded.adapter("tools") is first
    assert task_adapters.find(loaded, "tools").provenance == {"task": "tools", "seed": 3}


def test_a_damaged_adapter_is_refused(made, loaded):
    path = made / "tools" / WEIGHTS
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(CorruptedFile, match="reinstall"):
        task_adapters.load(loaded, "tools")
    assert "tools" not in loaded.adapters


def test_a_session_takes_the_adapter_of_its_task(made, loaded):
    text, form = "Order 4711, total 12.50 EUR", {"properties": {"total": {"type": "number"}}}

    def confidence(session, **more):
        found = session.extract(text, form, **more)
        return None if found.span("total") is None else found.span("total").confidence

    plain = confidence(pippin.Session(loaded, adapter=None))
    assert "extraction" not in loaded.adapters
    adapted = confidence(pippin.Session(loaded))
    assert "extraction" in loaded.adapters
    assert adapted != plain
    assert confidence(pippin.Session(loaded), adapter=None) == plain
    assert confidence(pippin.Session(loaded, adapter="extraction")) == adapted


def test_tools_are_a_task_unless_the_session_has_another(made, loaded):
    def clock() -> str:
        """The time."""
        return "12:00"

    def adapter(**more):
        return pippin.Session(loaded, **more)._settings(pippin.GenerationOptions()).adapter()

    assert adapter() is None
    assert adapter(tools=[clock]) == "tools"
    assert adapter(tools=[clock], adapter=None) is None
    assert adapter(task="extraction") == "extraction"
    assert adapter(task="summaries", tools=[clock]) is None
    assert adapter(adapter="mine", tools=[clock]) == "mine"


def test_text_tasks_take_the_adapters_of_their_tasks(made, loaded, monkeypatch):
    asked = []
    monkeypatch.setattr(catalog, "load", lambda model, task: asked.append(task))
    monkeypatch.setattr(task_adapters, "load", lambda model, task: asked.append(task))
    tasks = TextTasks(loaded)
    tasks.classify("It rains.", ["weather", "sports"])
    assert set(asked) == {"classification"}
    asked.clear()
    tasks.extract("It rains on 3 May 2024.", {"type": "string", "format": "date"})
    assert asked == ["extraction"]
    asked.clear()
    with suppress(pippin.errors.AnswerTruncated):
        TextTasks(loaded, options=pippin.GenerationOptions(max_tokens=5)).summarize(
            "It rains on 3 May 2024. All streets are wet.", length="short"
        )
    assert set(asked) == {"summaries"}
    asked.clear()
    tasks.rewrite("It rains.", tone="formal")
    assert asked == []
    TextTasks(pippin.Session(loaded, adapter=None)).classify("It rains.", ["weather", "sports"])
    assert asked == []


def test_labels_are_scored_with_the_adapter(made, loaded):
    plain = TextTasks(pippin.Session(loaded, adapter=None)).classify("It rains.", ["weather", "sports"])
    assert TextTasks(loaded).classify("It rains.", ["weather", "sports"]) == plain  # there is none for this task
    changed = TextTasks(pippin.Session(loaded, adapter=task_adapters.load(loaded, "tools")))
    assert changed.classify("It rains.", ["weather", "sports"]).scores != plain.scores


def test_other_weights_of_the_same_shape_have_no_adapter(made, loaded):
    entries = json.loads((made / "catalog.json").read_text())
    (made / "catalog.json").write_text(json.dumps([each | {"base_sha256": "0" * 64} for each in entries]))
    catalog.task_adapters.cache_clear()
    assert task_adapters.find(loaded, "tools") is None


def test_a_task_of_the_server_scores_with_the_adapter_too(made, loaded):
    name = task_adapters.load(loaded, "tools")
    ours, served = LocalModel(loaded), TaskModel(LocalModel(loaded), TaskCancellation())
    scores = [
        TextTasks(pippin.Session(provider, adapter=adapter)).classify("It rains.", ["weather", "sports"]).scores
        for provider, adapter in ((ours, name), (served, name), (served, None))
    ]
    assert scores[0] == scores[1] != scores[2]
