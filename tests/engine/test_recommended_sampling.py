"""What a model recommends is what a request gets that names nothing: beside transformers and gguf."""

import json
import shutil

import gguf
import pytest
from transformers import GenerationConfig

from pippin.core.errors import CorruptedFile
from pippin.core.formats.gguf import open_gguf
from pippin.engine import Engine, Request, SamplingOptions, recommended_sampling
from pippin.engine.recommended_sampling import recommended, resolved
from pippin.language.language_model import load
from pippin.language.model_license import find_license
from pippin.session import GenerationOptions, Session

QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1}


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """A saved model that recommends to sample, as transformers writes it down."""
    path = tmp_path_factory.mktemp("model")
    tiny.save(path)
    kept = json.loads((path / "generation_config.json").read_text())
    GenerationConfig(**kept, **QWEN).save_pretrained(path)
    return path


def test_a_folder_recommends_what_transformers_reads(folder):
    config = GenerationConfig.from_pretrained(folder)
    found = recommended(folder)
    assert found == {name: getattr(config, name) for name in ("temperature", "top_k", "top_p", "repetition_penalty")}


def test_copies_keep_the_recommendation_the_license_and_the_dialect(folder, tmp_path):
    from pippin.language.quantized_checkpoint import save_quantized

    shutil.copytree(folder, tmp_path / "first")
    config = tmp_path / "first" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"license": "mit"}))
    model = load(tmp_path / "first", pack=False, tool_dialect="qwen3-coder")
    model.save(tmp_path / "second")
    again = load(tmp_path / "second", pack=False)
    save_quantized(tmp_path / "third", again, {})
    for copy in ("second", "third"):
        assert recommended(tmp_path / copy) == recommended(folder) != {}
        written = json.loads((tmp_path / copy / "generation_config.json").read_text())
        kept = json.loads((folder / "generation_config.json").read_text())
        assert written.items() >= {(name, kept[name]) for name in QWEN} != set()
        copied = load(tmp_path / copy)
        assert (copied.tool_dialect, find_license(copied)) == ("qwen3-coder", "mit")
        assert copied.tokenizer.chat_template == model.tokenizer.chat_template
    config = tmp_path / "third" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tool_dialect": "klingon"}))
    with pytest.raises(CorruptedFile, match="tool_dialect is 'klingon'; there are hermes"):
        load(tmp_path / "third")


def write_gguf(path, temperature):
    writer = gguf.GGUFWriter(path, "llama")
    keys = gguf.Keys.General
    writer.add_float32(keys.SAMPLING_TEMP, temperature)
    writer.add_int32(keys.SAMPLING_TOP_K, 20)
    writer.add_float32(keys.SAMPLING_MIN_P, 0.25)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_recommends_what_its_metadata_says(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, 0.5)
    assert recommended(path) == {"temperature": 0.5, "top_k": 20, "min_p": 0.25}


def test_a_header_is_read_again_only_where_the_file_changed(tmp_path, monkeypatch):
    path, opened = tmp_path / "model.gguf", []
    monkeypatch.setattr(recommended_sampling, "open_gguf", lambda file: opened.append(file) or open_gguf(file))
    for temperature, count in ((0.5, 1), (0.5, 1), (0.75, 2)):
        if len(opened) < count:
            write_gguf(path, temperature)
        assert recommended(path)["temperature"] == temperature
        assert len(opened) == count


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({}, {}),
        ({"temperature": None, "top_k": 0}, {}),
        ({"do_sample": False, "temperature": 0.6, "top_k": 20}, {"temperature": 0, "top_k": 20}),
    ],
)
def test_what_says_nothing_recommends_nothing(tmp_path, config, found):
    assert recommended(tmp_path) == recommended(tmp_path / "none") == recommended(None) == {}
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert recommended(tmp_path) == found


@pytest.mark.parametrize("config", [{"temperature": -1}, {"top_p": 3}, {"top_k": 2.5}, {"min_p": "much"}])
def test_a_recommendation_that_cannot_be_used_is_a_damaged_file(tmp_path, config):
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    with pytest.raises(CorruptedFile, match="recommended sampling"):
        recommended(tmp_path)


def test_what_a_request_names_takes_precedence():
    named = SamplingOptions(temperature=0.0, top_k=100, top_p=1.0, min_p=0.0, repetition_penalty=1.0)
    found = resolved(named, QWEN | {"min_p": 0.1}, 100)
    assert (found.temperature, found.top_k, found.top_p, found.min_p, found.repetition_penalty) == (
        0,
        None,
        None,
        None,
        1,
    )
    half = resolved(GenerationOptions(top_k=7, seed=3, reasoning="light"), QWEN, 100)
    assert half == GenerationOptions(0.6, 7, 0.95, None, 1.1, seed=3, reasoning="light")


def test_sessions_and_engines_sample_as_the_model_recommends(folder):
    model = load(folder)
    wanted = {name: value for name, value in QWEN.items() if name != "do_sample"}

    def text(**options):
        return Session(model).respond("Hello", options=GenerationOptions(max_tokens=16, seed=5, **options)).content

    assert text() == text(**wanted) != text(temperature=0.0)
    with Engine(model) as engine:
        ids = model.tokenizer.encode("Hello")
        answers = [
            list(engine.stream(Request(ids, SamplingOptions(max_tokens=16, seed=5, **options))))[:-1]
            for options in ({}, wanted, {"temperature": 0.0})
        ]
    assert answers[0] == answers[1] != answers[2]
