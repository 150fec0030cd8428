"""`pippin summarize`, `extract`, `classify` and `proofread`: their output, their files, and what they refuse."""

import io
import json
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pippin.cli import main
from pippin.cli.common import options
from pippin.core import progress
from pippin.kits.text import Passage, SummaryDraft, TextTasks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
needs_pty = pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")


@pytest.fixture
def run(monkeypatch, capsys, tiny):
    """Run words in this process with the tiny model; gives exit code, stdout and stderr."""

    def run(*words, stdin=b""):
        monkeypatch.setattr(options, "load", lambda *_: tiny)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = main([str(word) for word in words])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def note(tmp_path):
    """A file with mistakes that rules find without a model, and with Windows line ends."""
    path = tmp_path / "note.txt"
    path.write_bytes(b"i should ,only.\r\nRun `i  am` both.\r\n24 + 24 = 48.\r\n")
    return path


# --- proofread --------------------------------------------------------------------------------------------------------


def test_proofread_shows_what_it_would_change_and_changes_nothing(run, note):
    before = note.read_bytes()
    code, shown, _ = run("proofread", note)
    assert code == 0
    assert "- i should ,only." in shown
    assert "+ I should, only." in shown
    assert f"{note}:1:1: capitalization: the pronoun “I” is a capital letter" in shown
    assert "24 + 24" not in shown
    assert note.read_bytes() == before


def test_proofread_write_changes_the_file_and_keeps_its_line_ends(run, note):
    code, _, message = run("proofread", note, "--write")
    assert code == 0
    assert note.read_bytes() == b"I should, only.\r\nRun `i  am` both.\r\n24 + 24 = 48.\r\n"
    assert "2 corrections made" in message
    assert [path.name for path in note.parent.iterdir()] == ["note.txt"]


def test_proofread_json_lists_the_edits(run, note):
    record = json.loads(run("proofread", note, "--json")[1])
    text = note.read_bytes().decode()
    for edit in record["edits"]:
        assert text[edit["span"]["start"] : edit["span"]["end"]] == edit["original"]
    assert [edit["replacement"] for edit in record["edits"]] == ["I", ", "]


def test_proofread_a_pipe_prints_the_corrected_text(run):
    assert run("proofread", "-", "--write", stdin=b"i should.")[:2] == (0, "I should.")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_proofread_reads_a_named_pipe_once(run, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def write():
        pipe.write_text("i should.")
        time.sleep(0.2)  # until its reader has seen the end
        pipe.write_text("")  # all that a second reader would find

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    assert run("proofread", pipe, "--write")[:2] == (0, "I should.")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # lets the writer go
    writer.join(5)
    os.close(reader)


def test_proofread_does_not_count_the_byte_order_mark(run, tmp_path):
    path = tmp_path / "note.txt"
    path.write_bytes(b"\xef\xbb\xbfi should.\n")
    assert run("proofread", path)[1].startswith(f"- i should.\n+ I should.\n  {path}:1:1: ")
    run("proofread", path, "--write")
    assert path.read_bytes() == b"\xef\xbb\xbfI should.\n"


@pytest.mark.filterwarnings("always::pippin.core.errors.GuessedEncoding")
@pytest.mark.parametrize("encoding", ["windows-1252", "utf-16-le", "utf-16-be"])
def test_proofread_keeps_the_encoding_of_a_file(run, tmp_path, encoding):
    path = tmp_path / "note.txt"
    path.write_bytes("i should. “Café”.\r\n".encode(encoding))
    code, _, said = run("proofread", path, "--write")
    assert code == 0, said
    assert f"{path} is not UTF-8; it was read as {encoding}" in said
    assert path.read_bytes() == "I should. “Café”.\r\n".encode(encoding)


def test_proofread_of_a_clean_text_says_so(run):
    assert run("proofread", stdin=b"24.") == (0, "", "nothing to correct\n")


def test_proofread_does_not_write_where_it_may_not(run, note, monkeypatch):
    from pippin.core import files

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "atomic_write", refuse)
    note.chmod(stat.S_IRUSR)
    code, shown, message = run("proofread", note, "--write")
    assert (code, shown) == (2, "")
    assert "cannot be written: Permission denied" in message


@needs_pty
def test_a_terminal_sees_corrections_in_color(terminal, default_model_path, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("I recieved it yesterday.")
    screen = terminal("proofread", path, "--model", default_model_path)
    screen.wait_for("- I recieved it yesterday.")
    screen.wait_for("+ I received it yesterday.")
    screen.wait_for("spelling: spelled “received”")
    assert screen.exit_code() == 0


# --- classify ---------------------------------------------------------------------------------------------------------


def test_classify_ranks_the_labels(run):
    code, shown, _ = run("classify", "--labels", "good, bad", stdin=b"It rained.")
    assert code == 0
    rows = [line.split() for line in shown.splitlines()]
    assert {label for label, _ in rows} == {"good", "bad"}
    assert sum(float(chance) for _, chance in rows) == pytest.approx(1, abs=0.002)
    assert float(rows[0][1]) >= float(rows[1][1])


def test_classify_lines_and_json(run):
    words = ["classify", "--labels", "good,bad", "--lines"]
    _, shown, _ = run(*words, stdin=b"It rained.\n\nSun!\n")
    assert [line.split("\t")[2] for line in shown.splitlines()] == ["It rained.", "Sun!"]
    record = json.loads(run(*words, "--json", stdin=b"It rained.\n\nSun!\n")[1])
    assert [result["label"] for result in record["results"]] == [line.split("\t")[0] for line in shown.splitlines()]
    assert set(record["results"][0]) == {"text", "label", "probabilities", "scores"}


def test_classify_reads_labels_and_examples_from_files(run, tmp_path):
    labels, examples = tmp_path / "labels.txt", tmp_path / "examples.tsv"
    labels.write_text("good: the writer is glad\nbad\n")
    examples.write_text("good\tSun!\nbad\tRain again.\n")
    words = ["classify", "--labels-file", labels, "--json"]
    plain = run(*words, stdin=b"Fog.")
    shown = run(*words, "--examples", examples, stdin=b"Fog.")
    fitted = run(*words, "--fit", examples, stdin=b"Fog.")
    assert [code for code, *_ in (plain, shown, fitted)] == [0, 0, 0]
    assert len({output for _, output, _ in (plain, shown, fitted)}) == 3


def test_classify_says_how_far_its_probabilities_hold(run, tmp_path):
    pytest.importorskip("matplotlib")
    known = tmp_path / "known.tsv"
    known.write_text("good\tSun!\nbad\tRain again.\nbad\tFog.\n")
    words = ["classify", "--labels", "good,bad", "--measure", known]
    code, shown, _ = run(*words)
    assert code == 0
    assert "expected calibration error" in shown
    report = json.loads(run(*words, "--json", "--plot", tmp_path / "known.png")[1])
    figures = {row["name"]: row["value"] for row in report["rows"]}
    assert figures["examples"] == 3
    assert 0 <= figures["expected calibration error"] <= 1
    assert (tmp_path / "known.png").stat().st_size > 1000


class Letters:
    """An encoder that counts the letters of a text."""

    name = "letters"

    def embed(self, texts):
        counts = torch.tensor([[float(text.lower().count(letter)) for letter in "aeiourstn"] for text in texts])
        return torch.nn.functional.normalize(counts + 0.01, dim=-1)


@pytest.mark.filterwarnings("ignore::pippin.core.errors.InferenceAtRisk")  # so few examples are all told apart
def test_classify_learns_from_labeled_texts(run, tmp_path, monkeypatch):
    monkeypatch.setattr("pippin.language.encoder.load_encoder", lambda *_, **__: Letters())
    taught = tmp_path / "taught.tsv"
    texts = {
        "sea": ["sea tea", "tea sea eat", "no tea", "eat sea", "a sea"],
        "out": ["out you", "our", "route out", "you", "a out"],
    }
    taught.write_text("".join(f"{label}\t{text}\n" for label, some in texts.items() for text in some))
    code, shown, _ = run("classify", "--learn", taught, "--lines", stdin=b"sea eat\nour route\n")
    assert code == 0
    assert [line.split("\t")[0] for line in shown.splitlines()] == ["sea", "out"]
    code, shown, _ = run("classify", "--learn", taught, "--measure", taught, "--json")
    assert code == 0
    assert json.loads(shown)["rows"][0] == {"name": "examples", "value": 10, "unit": "", "spread": None}


# --- summarize and extract --------------------------------------------------------------------------------------------


def test_summarize_selects_sentences(run):
    text = b"The first one is here. The second one is there. The third one is gone."
    code, shown, message = run("summarize", "--method", "select", "--length", "2", stdin=text)
    assert (code, message) == (0, "")
    assert all(part.encode() in text for part in shown.strip().split(". "))


def test_summarize_writes_and_names_what_is_not_in_the_text(in_process):
    code, shown, _ = in_process("summarize", EXAMPLES / "article.txt", "--length", "short", "--json")
    assert code == 0
    record = json.loads(shown)
    assert list(record) == ["model", "summary", "unverified"]
    assert record["summary"].startswith("The")


def test_summarize_says_which_part_it_writes_and_how_fast(run, monkeypatch, tmp_path):
    def drafts(tasks, text, **_):
        for part, tokens in [(0, 2), (0, 4), (1, 1), (1, 3), (1, 2), (2, 5)]:
            clock.now += 0.5
            yield SummaryDraft(part, 3, "text", tokens)
        yield SummaryDraft(2, 3, "text", 5, Passage("All of it."))

    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(TextTasks, "summarize_drafts", drafts)
    monkeypatch.setattr("pippin.cli.summarize.time", clock)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    code, shown, message = run("summarize", stdin=b"A text.")
    assert (code, shown) == (0, "All of it.\n")
    lines = [line for line in message.splitlines() if line.startswith("summarizing: ")]
    assert [line.split("parts/s")[1].split(" left")[-1].lstrip(", ") for line in lines] == [
        "part 1 of 3: 4 tokens written, 4.0 tokens/s",
        "part 2 of 3: 1 tokens written",
        "part 2 of 3: 3 tokens written, 4.0 tokens/s",
        "part 2 of 3: 2 tokens written",  # written once more
        "part 3 of 3: 5 tokens written",
        "part 3 of 3: 5 tokens written",
        "part 3 of 3: 5 tokens written",
    ]
    assert [line.split(",")[0] for line in lines[-2:]] == ["summarizing: 2 of 3 parts", "summarizing: 3 of 3 parts"]
    assert " s left, " in lines[-2]


def test_extract_fills_in_a_form(in_process):
    words = ["extract", EXAMPLES / "letter.txt"]
    code, shown, _ = in_process(*words, "--type", f"{EXAMPLES / 'forms.py'}:Invoice")
    assert code == 0
    invoice = json.loads(shown)
    letter = (EXAMPLES / "letter.txt").read_text()
    assert invoice["payment_due"] in ("2026-03-12", "2026-04-11")
    assert str(invoice["total"]) in letter


def test_extract_takes_fields_and_says_where_they_are(in_process):
    words = ["extract", EXAMPLES / "letter.txt", "--field", "total:number", "--field", "date:date", "--field", "place"]
    code, shown, _ = in_process(*words, "--json")
    assert code == 0
    found = json.loads(shown)
    letter = (EXAMPLES / "letter.txt").read_text()
    assert set(found) == {"model", "content", "spans"}
    assert found["content"]["date"] in ("2026-03-12", "2026-04-11")
    assert all(letter[span["start"] : span["end"]] == span["text"] for span in found["spans"])
    assert {span["name"]: span["value"] for span in found["spans"]} == found["content"]


def test_extract_shows_a_table_on_a_terminal(in_process, monkeypatch):
    monkeypatch.setattr("pippin.cli.common.terminal.watched", lambda stream: True)
    code, shown, _ = in_process("extract", EXAMPLES / "letter.txt", "--field", "date:date")
    assert code == 0
    assert all(title in shown for title in ("field", "value", "in the text", "line", "confidence"))
    assert "2026" in shown
    assert "%" in shown


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["summarize", "nothing.txt"], "there is no file 'nothing.txt'"),
        (["summarize"], "there is no text; name a file or pipe one in"),
        (["summarize", "--length", "huge"], "length must be 'short', 'medium' or 'long'"),
        (["summarize", "--length", "²"], "length must be 'short', 'medium' or 'long'"),
        (["summarize", "--method", "guess"], "'guess' is not one of 'write', 'select'"),
        (["extract"], "give the type of the result"),
        (["extract", "--schema", "a.json", "--type", "a.py:B"], "give the type of the result"),
        (["extract", "--field", "a", "--field", "a:date"], "different names, got 'a:date'"),
        (["extract", "--field", "a:money"], "the type is one of text, date"),
        (["extract", "--field", ":date"], "NAME or NAME:TYPE"),
        (["classify"], "give the labels"),
        (["classify", "--labels", "a,b", "--labels-file", "c"], "give the labels"),
        (["classify", "--labels", "a"], "at least two distinct labels"),
        (["classify", "--labels", "a,,b"], "distinct labels, got 'a', '', 'b'"),
        (["classify", "--labels", "a,b", "--fit", "nothing.tsv"], "there is no file of examples"),
        (["classify", "--labels", "a,b", "--measure", "nothing.tsv"], "there is no file of examples"),
        (["classify", "--labels", "a,b", "--plot", "a.png"], "--plot needs --measure"),
        (["classify", "--labels", "a,b", "--measure", "a.tsv", "--plot", "a.doc"], "must end in"),
        (["classify", "--learn", "a.tsv", "--labels", "a,b"], "labels and examples come from its file"),
        (["classify", "--learn", "nothing.tsv"], "there is no file of examples"),
    ],
)
def test_what_cannot_be_used_is_refused_before_a_model_is_loaded(monkeypatch, capsys, words, message):
    monkeypatch.setattr(options, "load", lambda *_: pytest.fail("a model was loaded"))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    code = main(words)
    shown, said = capsys.readouterr()
    assert (code, shown) == (2, "")
    assert message in said


def test_examples_that_are_none(run, tmp_path):
    path = tmp_path / "examples.tsv"
    for text, message in (("", "has no examples"), ("good Sun!\n", "line 1 of"), ("good\t \n", "line 1 of")):
        path.write_text(text)
        code, _, said = run("classify", "--labels", "good,bad", "--fit", path, stdin=b"x")
        assert code == 2
        assert message in said


def test_bytes_that_are_no_text(run):
    code, _, said = run("summarize", stdin=b"\x81\x8d\x90 and so on")
    assert code == 2
    assert "standard input is not UTF-8 text" in said


@pytest.mark.nightly
def test_the_example_corrects_labels_selects_and_fills_in(default_model_path):
    env = os.environ | {"PIPPIN_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(EXAMPLES / "text_tasks.py")]
    done = subprocess.run(words, capture_output=True, text=True, env=env, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("I received your letter on Monday, it was too late. Run `teh tool` again.\n")
    assert done.stdout.endswith("invoice_number='2026-117' total=1040 currency='EUR'\n")
