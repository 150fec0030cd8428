"""What the user gives, in every shape it should not have. Nothing here needs a model."""

import json
import os

import pytest
from hypothesis import given, strategies as st

from pippin.cli.common import inputs
from pippin.core import text_files
from pippin.core.errors import InvalidArgument, InvalidInput
from pippin.core.text_files import read_text

words = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1).filter(str.strip)


@given(words, words)
def test_the_question_comes_last_and_nothing_is_lost(question, document):
    assert inputs.compose_prompt(question, [], document) == f"{document.strip()}\n\n{question.strip()}"
    assert inputs.compose_prompt(None, [], document) == document.strip()


def test_several_documents_are_told_apart_by_name(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"text of {name}\n")
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    prompt = inputs.compose_prompt("Which is longer?", files, None)
    assert prompt == f"{files[0]}:\ntext of a.txt\n\n{files[1]}:\ntext of b.txt\n\nWhich is longer?"
    assert inputs.compose_prompt("Why?", files[:1], None) == "text of a.txt\n\nWhy?"


def test_line_ends_and_byte_order_mark_of_other_systems(tmp_path):
    path = tmp_path / "dos.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert read_text(path) == "one\ntwo\n"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"caf\xe9\x81", r"is not UTF-8 text \(byte 0xe9 at 3, line 1\)"),
        (b"\x89PNG\r\n\x1a\n\0\0", "is not UTF-8 text"),
        (b"text\0more", "contains a NUL byte at character 4"),
        (b"", "is empty"),
        (b" \n\t", "is empty"),
    ],
)
def test_what_is_not_text_is_refused(tmp_path, data, message):
    path = tmp_path / "given"
    path.write_bytes(data)
    with pytest.raises(InvalidInput, match=message):
        inputs.compose_prompt("What is it?", [path], None)


def test_a_text_beyond_the_bound_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "MAX_BYTES", 3_000_000)
    path = tmp_path / "long.txt"
    path.write_bytes(b"x" * 3_000_000)
    assert len(read_text(path)) == 3_000_000
    path.write_bytes(b"x" * 3_000_001)
    with pytest.raises(InvalidInput, match="is larger than 3 MB"):
        read_text(path)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_refused(tmp_path):
    path = tmp_path / "secret"
    path.write_text("x")
    path.chmod(0)
    with pytest.raises(InvalidInput, match="cannot be read: Permission denied"):
        read_text(path)


def test_forms_of_the_answer_exclude_each_other(tmp_path):
    with pytest.raises(InvalidArgument, match="--choice and --regex exclude each other"):
        inputs.target(choices=["a", "b"], regex="a|b")
    assert inputs.target() is None


def test_json_schema_files(tmp_path):
    path = tmp_path / "schema.json"
    path.write_text('{"type": "integer"}')
    assert inputs.load_json_schema(path) == {"type": "integer"}
    path.write_text('{"type":\n "integer",}')
    with pytest.raises(InvalidInput, match=r"is not JSON: .* at line 2, column"):
        inputs.load_json_schema(path)
    path.write_text("[1]")
    with pytest.raises(InvalidInput, match="holds a JSON list; a JSON Schema is an object"):
        inputs.load_json_schema(path)
    path.write_text("[" * 100_000)
    with pytest.raises(InvalidInput, match="is nested too deeply"):
        inputs.load_json_schema(path)


def test_a_type_is_loaded_with_its_neighbors_and_forward_references(tmp_path):
    (tmp_path / "pippin_test_neighbor.py").write_text("LIMIT = 3\n")
    path = tmp_path / "shapes.py"
    path.write_text(
        "from dataclasses import dataclass\n"
        "from pydantic import BaseModel\n"
        "from pippin_test_neighbor import LIMIT\n"
        "class Tree(BaseModel):\n    name: str\n    parts: list['Tree'] = []\n"
        "@dataclass\nclass Point:\n    x: int = LIMIT\n"
        "Name = str\n"
    )
    tree = inputs.load_type(f"{path}:Tree")
    assert tree.model_validate({"name": "a", "parts": [{"name": "b"}]}).parts[0].name == "b"
    assert inputs.load_type(f"{path}:Point")().x == 3
    assert inputs.load_type(f"{path}:Name") is str


def test_a_file_with_annotations_as_values_sees_no_future_import_of_ours(tmp_path):
    path = tmp_path / "shapes.py"
    path.write_text("class A:\n    x: int\nassert A.__annotations__['x'] is int\n")
    assert inputs.load_type(f"{path}:A").__name__ == "A"


@pytest.mark.parametrize(
    ("source", "reference", "kind", "message"),
    [
        ("class A: pass", "Invoice", InvalidArgument, "does not name a type; write FILE.py:NAME"),
        ("class A: pass", "shapes.py:", InvalidArgument, "does not name a type"),
        ("class A: pass", "shapes.txt:A", InvalidArgument, "does not name a type"),
        ("class A: pass\nclass C: pass", "shapes.py:B", InvalidArgument, r"has no 'B'; it has A, C"),
        ("from enum import Enum", "shapes.py:B", InvalidArgument, "has no 'B'; it defines no class"),
        ("class A: pass", "other.py:A", InvalidInput, "there is no Python file 'other.py'"),
        ("class A\n", "shapes.py:A", InvalidInput, "is not Python: .* at line 1"),
        ("raise KeyError('boom')", "shapes.py:A", InvalidInput, "raised KeyError: 'boom'"),
        ("raise SystemExit(3)", "shapes.py:A", InvalidInput, "raised SystemExit: 3"),
        ("import pippin_no_such_module", "shapes.py:A", InvalidInput, "raised ModuleNotFoundError: No module named"),
    ],
)
def test_type_references_that_do_not_work(tmp_path, monkeypatch, source, reference, kind, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shapes.py").write_text(source)
    with pytest.raises(kind, match=message):
        inputs.load_type(reference)


# --- the same through the command: one line, an exit code, no traceback, and soon ------------------------------------


def test_prompts_that_are_none(refused):
    assert refused("ask", code=2).startswith("there is no prompt")
    assert refused("ask", "", code=2) == "the prompt is empty"
    assert refused("ask", "  \n", code=2) == "the prompt is empty"
    assert refused("ask", stdin=b" \n", code=2) == "the prompt is empty"


def test_prompts_that_are_not_text(refused):
    assert refused("ask", stdin=b"\x7fELF\x02\x01\xff\xfe", code=2).startswith("standard input is not UTF-8 text")
    assert refused("ask", "What is this?", stdin=b"\0\0\0", code=2).startswith("standard input is not text")
    assert refused("ask", os.fsdecode(b"caf\xe9"), code=2) == "the prompt is not UTF-8 text (at character 3)"


def test_files_that_cannot_be_read(refused, tmp_path):
    assert refused("ask", "x", "--file", tmp_path / "none", code=2) == f"there is no file {str(tmp_path / 'none')!r}"
    assert refused("ask", "x", "--file", tmp_path, code=2) == f"{str(tmp_path)!r} is a folder; give a file"
    assert refused("ask", "x", "--schema", tmp_path / "none", code=2).startswith("there is no schema file")
    assert refused("ask", "x", "--type", f"{tmp_path}/none.py:A", code=2).startswith("there is no Python file")


def test_schemas_that_cannot_be_used(refused, tmp_path):
    path = tmp_path / "schema.json"
    path.write_text("not json")
    assert "is not JSON" in refused("ask", "x", "--schema", path, code=2)
    path.write_text(json.dumps({"type": "integer", "minimum": 5, "maximum": 3}))
    assert refused("ask", "x", "--schema", path, code=2)
    path.write_text(json.dumps({"$ref": "#/$defs/none"}))
    assert "none" in refused("ask", "x", "--schema", path, code=2)


def test_types_that_cannot_be_used(refused, tmp_path):
    path = tmp_path / "shapes.py"
    path.write_text("import threading\nclass Lock:\n    def __init__(self, lock: threading.Lock): ...\n1 / 0\n")
    line = refused("ask", "x", "--type", f"{path}:Lock", code=2)
    assert "raised ZeroDivisionError: division by zero" in line
    path.write_text("import threading\nLock = threading.Event\n")
    assert refused("ask", "x", "--type", f"{path}:Lock", code=2)
    assert "has no 'Key'" in refused("ask", "x", "--type", f"{path}:Key", code=2)


def test_forms_and_options_out_of_range(refused):
    assert "exclude each other" in refused("ask", "x", "--regex", "a", "--choice", "b", "--choice", "c", code=2)
    assert "not a regular expression" in refused("ask", "x", "--regex", "(", code=2)
    assert "temperature" in refused("ask", "x", "--temperature", "-1", code=2)
    assert "--top-p" in refused("ask", "x", "--top-p", "1.5", code=2)
    assert "--max-tokens must be at least 1" in refused("ask", "x", "--max-tokens", "0", code=2)


def test_models_and_devices_that_are_not_there(refused):
    assert "smollm2-135m" in refused("ask", "x", "--model", "smollm2-135", code=3)
    assert refused("ask", "x", "--model", "no-such.gguf", code=3).startswith("there is no file or folder")
    assert "device 'tpu' is not known" in refused("ask", "x", "--device", "tpu", code=2)
    assert "float12" in refused("ask", "x", "--dtype", "float12", code=2)


def test_more_threads_than_cores_and_other_settings_of_the_engine(refused, default_model_path, tmp_path):
    words = ("ask", "x", "--model", default_model_path)
    assert "threads is 4096, and this process may use" in refused(*words, "--threads", 4096, code=2)
    assert "threads must be at least 1, got 0" in refused(*words, "--threads", 0, code=2)
    assert "bits" in refused(*words, "--bits", 5, code=2)
    assert "float16" in refused(*words, "--kv-cache-dtype", "float16", code=2)
    assert "no-such-model" in refused(*words, "--speculate", "no-such-model", code=3)
    assert "cannot draft for itself" in refused(*words, "--speculate", "self", code=2)
    assert "is a folder; name a file" in refused(*words, "--prompt-cache", tmp_path, code=2)
    assert "there is no folder" in refused(*words, "--prompt-cache", tmp_path / "none" / "cache", code=2)


def test_debug_shows_the_traceback(pippin, tmp_path):
    done = pippin("ask", "x", "--file", tmp_path, "--debug")
    assert done.returncode == 2
    assert b"Traceback (most recent call last)" in done.stderr
    assert done.stderr.decode().splitlines()[-1].startswith("error: ")
    assert b"Traceback" in pippin("ask", "", env={"PIPPIN_DEBUG": "1"}).stderr


def test_a_typed_answer_from_a_document_needs_no_question(tmp_path):
    path = tmp_path / "letter.txt"
    path.write_text("Total: 40 EUR")
    assert inputs.compose_prompt(None, [path], None, typed=True).startswith("Total: 40 EUR\n\n")
    with pytest.raises(InvalidInput, match="there is no prompt"):
        inputs.compose_prompt(None, [path], None)
    with pytest.raises(InvalidInput, match="there is no prompt"):
        inputs.compose_prompt(None, [], None, typed=True)
