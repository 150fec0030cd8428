"""Training files of every kind, whole and damaged."""

import gzip
import json
import sys
import tracemalloc
import warnings

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from pippin.core.errors import InvalidArgument, InvalidRecord, MissingDependency
from pippin.data.records import TrainingRecord, read_records

ROWS = [{"text": "one"}, {"text": "two\nlines"}, {"text": "drei é"}]
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def texts(path, **options):
    return [record.text for record in read_records(path, **options)]


def stream(path, table, rows=2):
    """An Arrow stream, as `datasets` writes it."""
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.py", "a.txt.gz", "A.TXT"])
def test_a_text_file_is_one_document_to_the_byte(tmp_path, name):
    text = "\ufeff" + "Grüße\r\n\n  日本語\n" + "no line end"
    packed = gzip.compress(text.encode()) if name.endswith(".gz") else text.encode()
    (tmp_path / name).write_bytes(packed)
    (record,) = read_records(tmp_path / name)
    assert record == TrainingRecord(str(tmp_path / name), text=text.removeprefix("\ufeff"))


@pytest.mark.parametrize("line", ["é line of some length\n", "no line ends here é "])
def test_a_large_text_comes_in_blocks_that_add_up(tmp_path, line):
    text = line * (3_000_000 // len(line.encode()))
    (tmp_path / "large.txt").write_text(text, encoding="utf-8")
    tracemalloc.start()
    length, blocks = 0, []
    for record in read_records(tmp_path / "large.txt"):
        assert text.startswith(record.text, length)
        length += len(record.text)
        blocks.append((record.begins, record.ends))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert length == len(text)
    assert blocks == [(True, False), *[(False, False)] * (len(blocks) - 2), (False, True)]
    assert peak < 12e6


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "ndjson", "parquet", "arrow", "arrow file", "datasets"])
def test_tables_and_lines_hold_the_same_records(tmp_path, kind):
    table = pyarrow.Table.from_pylist(ROWS)
    path = tmp_path / f"data.{kind}"
    if kind in ("jsonl", "jsonl.gz", "ndjson"):
        raw = "\n".join(map(json.dumps, ROWS)).encode() + b"\n\n"
        path.write_bytes(gzip.compress(raw) if kind.endswith("gz") else raw)
    elif kind == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=2)
    elif kind == "arrow":
        stream(path, table)
    elif kind == "arrow file":
        path = tmp_path / "data.arrow"
        with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    else:  # what `Dataset.save_to_disk` leaves, with a second file that it does not list
        path.mkdir()
        stream(path / "data-00000-of-00001.arrow", table)
        stream(path / "cache-1.arrow", table)
        (path / "dataset_info.json").write_text("{}")
        (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    records = list(read_records(path))
    assert [record.text for record in records] == [row["text"] for row in ROWS]
    assert [record.line for record in records] == [1, 2, 3]


def test_conversations_prompts_and_names_of_ones_own(tmp_path):
    rows = [{"messages": CHAT, "prompt": None, "completion": None}, {"prompt": "1+1=", "completion": "2", "text": "x"}]
    for name in ("a.jsonl", "a.parquet"):
        if name.endswith("parquet"):
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / name)
        else:
            (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
        first, second = read_records(tmp_path / name)
        assert [dict(message) for message in first.messages] == CHAT
        assert (second.prompt, second.text) == ("1+1=", "2")
    (tmp_path / "b.jsonl").write_text(json.dumps({"question": "q", "answer": "a"}))
    (record,) = read_records(tmp_path / "b.jsonl", fields={"prompt": "question", "completion": "answer"})
    assert (record.prompt, record.text) == ("q", "a")


def test_a_folder_gives_its_files_in_order_of_name(tmp_path):
    (tmp_path / "b").mkdir()
    for name, text in {"b/2.txt": "third", "a.txt": "first", "b/1.md": "second", "c.png": "no", ".d.txt": "no"}.items():
        (tmp_path / name).write_text(text)
    assert texts(tmp_path) == ["first", "second", "third"]
    assert texts([tmp_path / "b", tmp_path / "a.txt"]) == ["second", "third", "first"]


@pytest.mark.parametrize(
    ("name", "content", "line", "message"),
    [
        ("a.txt", b"", None, "is empty"),
        ("a.jsonl", b"\n \n", None, "holds no records"),
        ("a.txt", b" \n\n", None, "holds no text"),
        ("a.txt", b"good\nbad " + b"\xff" * 9, None, r"not UTF-8 text \(byte 0xff at 9, line 2\); convert it first"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n\xff\xff\1', mtime=0), None, r"\(byte 0xff at 14, line 2\)"),
        ("a.txt", "né né cut €".encode()[:-1], None, r"UTF-8 text with 2 damaged bytes \(byte 0xe2 at 12, line 1\)"),
        ("a.txt", b"good\n\0\n", 2, "NUL byte"),
        ("a.txt.gz", gzip.compress(b"x" * 9999, mtime=0)[:-9], None, "gzip file is damaged"),
        ("a.txt.gz", b"not gzip", None, "gzip file is damaged"),
        ("a.jsonl", b'{"text": "a"}\n{"text": }\n', 2, "not JSON: Expecting value"),
        ("a.jsonl", b'{"text": "a"}\n\n[1]\n', 3, r"\[1\] is no object"),
        ("a.jsonl", b'{"words": "a"}\n', 1, "expected the field 'text'.*there are 'words'"),
        ("a.jsonl", b'{"text": 3}\n', 1, "expected the field 'text'"),
        ("a.jsonl", b'{"prompt": "a"}\n', 1, "expected the field 'text'"),
        ("a.jsonl", b'{"messages": "a"}\n', 1, "messages is 'a'"),
        ("a.jsonl", b'{"messages": [{"content": "a"}]}\n', 1, "messages is"),
        ("a.parquet", b"PAR1 nonsense", 1, "not a table"),
        ("a.arrow", b"nonsense", 1, "not a table"),
    ],
)
def test_a_bad_record_names_its_file_and_line(tmp_path, name, content, line, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidRecord, match=message) as caught:
        list(read_records(tmp_path / name))
    assert caught.value.path == str(tmp_path / name)
    assert caught.value.line == line
    assert str(tmp_path / name) in str(caught.value)
    assert line is None or f"line {line}:" in str(caught.value)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "windows-1252"])
def test_files_of_other_systems_are_read_in_their_encoding(tmp_path, encoding):
    text = "Père Noël\n" * 60_000  # several blocks
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_bytes(text.encode(encoding))
    with gzip.open(tmp_path / "c.jsonl.gz", "wb") as file:
        file.write('{"text": "Noël"}\n{"text": "Père"}\n'.encode(encoding))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        *blocks, first, second = texts(tmp_path)
    assert ("".join(blocks), first, second) == (text + text, "Noël", "Père")
    assert len(said) == (encoding != "utf-8-sig")  # once for a folder
    assert all("a.txt is not UTF-8; it was read as" in str(one.message) for one in said)


def test_files_are_checked_before_the_first_record_is_read(tmp_path):
    (tmp_path / "good.txt").write_text("text")
    (tmp_path / "empty.txt").touch()
    with pytest.raises(InvalidRecord, match="is empty"):
        read_records([tmp_path / "good.txt", tmp_path / "empty.txt"])
    with pytest.raises(InvalidArgument, match="there is no file or folder"):
        read_records([tmp_path / "good.txt", tmp_path / "none.txt"])
    (tmp_path / "picture.png").write_bytes(b"x")
    with pytest.raises(InvalidArgument, match=r"named .png are not known"):
        read_records(tmp_path / "picture.png")
    with pytest.raises(InvalidArgument, match="no data was given"):
        read_records([])
    with pytest.raises(InvalidArgument, match="there is no field 'words'"):
        read_records(tmp_path / "good.txt", fields={"words": "text"})
    (tmp_path / "folder").mkdir()
    with pytest.raises(InvalidArgument, match="holds no file of a known kind"):
        read_records(tmp_path / "folder")


def test_the_splits_of_a_data_set_are_not_mixed(tmp_path):
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(InvalidArgument, match=r"several splits.*name one of .*train, .*test"):
        read_records(tmp_path)


def test_tables_without_pyarrow_name_the_extra(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.ipc", None)
    with pytest.raises(MissingDependency, match=r"pippin\[train\]"):
        read_records(tmp_path / "a.parquet")
