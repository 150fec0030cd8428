"""`pippin bench`: its figures belong together, and nonsense is refused before a model is loaded."""

import json
from dataclasses import replace

import pytest

import pippin as pippin_package
from pippin.cli import main
from pippin.cli.common import options
from pippin.core import device, native
from pippin.core.errors import NotEnoughMemory
from pippin.core.report import Row
from pippin.core.store import catalog
from pippin.engine.experts.memory_share import MemoryShare
from pippin.engine.measure import machine_speed, measure_speed

FIGURES = {
    "prompt": "tokens/s",
    "answer": "tokens/s",
    "limit of the memory": "tokens/s",
    "share of the limit": "%",
    "first token": "ms",
    "weights read per token": "MB",
    "cache read per token": "MB",
    "memory reads": "GB/s",
}
PARTS = ["linear layers", "attention", "other kernels", "waiting for threads", "outside the kernels"]


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch):
    real = measure_speed.read_bandwidth
    monkeypatch.setattr(
        measure_speed, "read_bandwidth", lambda threads, *, device: real(threads, device=device, size=2**22, repeats=1)
    )


@pytest.fixture
def run(monkeypatch, capsys, tiny):
    """Run words in this process with the tiny model; gives exit code, stdout and stderr."""

    def run(*words):
        monkeypatch.setattr(options, "load", lambda *_, **__: tiny)
        code = main(["bench", "tiny", "--prompt", "40", "--answer", "6", "--repeats", "2", *map(str, words)])
        return code, *capsys.readouterr()

    return run


def test_json_holds_figures_that_belong_together(run, tiny):
    code, shown, _ = run("--json", "--profile", "--repeats", "1")  # so that the figures are those of one run
    assert code == 0
    found = json.loads(shown)
    assert found["model"] == "tiny"
    assert found["circumstances"]["cpu"] == device.cpu_name()
    assert found["circumstances"]["cores"] == device.threads()
    rows = {row["name"]: row for row in found["rows"]}
    assert {name: rows[name]["unit"] for name in FIGURES} == FIGURES
    assert [name for name in rows if rows[name]["unit"] == "ms per token"] == PARTS
    assert rows["weights read per token"]["value"] == pytest.approx(measure_speed.weight_bytes(tiny.module) / 1e6)
    megabytes = rows["weights read per token"]["value"] + rows["cache read per token"]["value"]
    limit = 1000 * rows["memory reads"]["value"] / megabytes
    assert rows["limit of the memory"]["value"] == pytest.approx(limit)
    share = 100 * rows["answer"]["value"] / rows["limit of the memory"]["value"]
    assert rows["share of the limit"]["value"] == pytest.approx(share)
    # an answer of 6 tokens has 5 steps after its first token, and all their time lies somewhere
    assert sum(rows[name]["value"] for name in PARTS) == pytest.approx(1000 / rows["answer"]["value"])


def test_the_speed_of_a_catalog_model_without_options_is_kept(run, monkeypatch):
    kept = []
    monkeypatch.setattr(machine_speed, "remember", lambda name, speed: kept.append((name, speed)))
    monkeypatch.setattr(catalog, "find", {"tiny": replace(catalog.entries()["qwen3-0.6b"], name="tiny")}.get)
    threads = native.default_threads()
    code, shown, _ = run("--threads", threads, "--json")
    assert code == 0
    (answer,) = (row["value"] for row in json.loads(shown)["rows"] if row["name"] == "answer")
    assert kept == [("tiny", answer)]
    assert run("--threads", threads, "--kv-cache-dtype", "int8")[0] == 0
    assert run("--threads", threads, "--dtype", "float32")[0] == 0
    monkeypatch.setattr(native, "default_threads", lambda: threads + 1)
    assert run("--threads", threads)[0] == 0
    monkeypatch.setattr(native, "default_threads", lambda: threads)
    monkeypatch.setattr(catalog, "find", lambda _: None)
    assert run("--threads", threads)[0] == 0
    assert len(kept) == 1


def test_several_runs_have_a_spread(run):
    rows = {row["name"]: row for row in json.loads(run("--json")[1])["rows"]}
    assert rows["answer"]["spread"] >= 0
    assert rows["weights read per token"]["spread"] is None


def test_each_number_of_threads_has_its_rows(run):
    counts = sorted({1, device.threads()})
    code, shown, _ = run("--threads", ",".join(map(str, counts)))
    assert code == 0
    assert shown.startswith(f"tiny: a prompt of 40 tokens, an answer of 6, {', '.join(map(str, counts))} threads")
    for count in counts if len(counts) > 1 else []:
        assert f"answer, {count} thread" in shown
    assert "linear layers" not in shown


def test_the_precision_of_the_cache_shows_in_what_is_read(run, tiny):
    read = {}
    for kv_cache_dtype in ("float32", "int8"):
        rows = json.loads(run("--json", "--kv-cache-dtype", kv_cache_dtype)[1])["rows"]
        (read[kv_cache_dtype],) = (row["value"] for row in rows if row["name"] == "cache read per token")
    # a head of 8 numbers: 4 bytes each, or one each and a scale
    assert read["int8"] == pytest.approx(read["float32"] * (8 + 4) / (8 * 4))


def test_a_plot_is_drawn(run, tmp_path):
    code, _, said = run("--plot", tmp_path / "speed.svg")
    assert code == 0
    assert "speed.svg" in said
    picture = (tmp_path / "speed.svg").read_text()
    assert picture.count("<svg") == 1
    assert "</svg>" in picture


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--answer", "1"), "'--answer': Input should be greater than or equal to 2"),
        (("--threads", "two"), "--threads must be comma-separated whole numbers, got 'two'"),
        (("--threads", "1,"), "--threads must be comma-separated whole numbers, got '1,'"),
        (("--threads", "0"), "0 threads were requested; this process may use 1 to"),
        (("--threads", "1,4096"), "4096 threads were requested"),
        (("--memory", "1GB,much"), "'much' is not a size"),
        (("--memory", "1GB", "--threads", "1,2"), "one number of threads"),
    ],
)
def test_nonsense_is_refused_before_a_model_is_loaded(words, message, monkeypatch, capsys):
    monkeypatch.setattr(options, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    assert main(["bench", *words]) != 0
    shown, said = capsys.readouterr()
    assert shown == ""
    assert said.startswith("error: ")
    assert message in said


def test_what_does_not_fit_the_context_is_refused(run):
    code, shown, said = run("--prompt", "5000")
    assert code != 0
    assert shown == ""
    assert "5,000 tokens" in said


def test_the_installed_command_measures_the_default_model(pippin, default_model_path):
    done = pippin("bench", "--prompt", "16", "--answer", "4", "--repeats", "1", "--threads", "1", "--json")
    assert done.returncode == 0, done.stderr.decode()
    rows = {row["name"]: row["value"] for row in json.loads(done.stdout)["rows"]}
    assert 50 < rows["weights read per token"] < 600
    assert 0 < rows["share of the limit"] < 200


def test_the_middle_and_the_spread():
    row = Row.of_runs("answer", [1.0, 2.0, 6.0], "tokens/s")
    assert (row.value, row.spread) == (2.0, pytest.approx(7**0.5))
    assert Row.of_runs("answer", [3.0], "tokens/s").spread is None


@pytest.mark.skipif(native.library() is None, reason="the native kernels are not built")
def test_budgets_are_measured_one_after_the_other(save_mixture, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PIPPIN_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(MemoryShare, "__call__", lambda share, tokens, held: share._least)
    folder, plot = save_mixture(tmp_path / "mixture"), tmp_path / "budgets.svg"
    with pytest.raises(NotEnoughMemory, match="pass memory=") as refused:
        pippin_package.load(folder, device="cpu", memory=1)
    least = str(refused.value).partition("memory=")[2].partition(" ")[0]
    words = ["bench", str(folder), "--memory", f"{least},4GB", "--prompt", "20", "--answer", "4", "--repeats", "2"]
    assert main([*words, "--threads", "1", "--json", "--plot", str(plot)]) == 0
    less, more = json.loads(capsys.readouterr().out)["budgets"]
    assert less["budget"] == int(least) < more["budget"]
    assert max(less["hit_rate"]) < 1
    assert set(more["hit_rate"]) == {1.0}
    assert min(less["bytes_per_token"]) > 0 == max(more["bytes_per_token"])
    assert len(less["answer"]) == len(less["prompt"]) == len(less["resident"]) == 2
    assert "budget, MB" in plot.read_text() or plot.stat().st_size > 10_000
    assert main([*words[:4], "1kB"]) != 0
