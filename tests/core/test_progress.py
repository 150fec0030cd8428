"""The bar as a terminal would see it, and its lines elsewhere."""

import io
import time
from contextlib import redirect_stderr

import pytest

from pippin.core import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _xterm(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")


def use(show: bool = True) -> None:
    progress.note("Fetching", show_progress=show)
    with progress.bar(10, "counting", show_progress=show) as bar:
        bar.advance(10)


def test_where_no_terminal_is_what_is_done_soon_leaves_its_note_alone(capsys):
    use()
    assert capsys.readouterr() == ("", "Fetching\n")
    use(show=False)
    assert capsys.readouterr() == ("", "")


def test_where_no_terminal_is_a_line_comes_every_few_seconds(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with progress.bar(200, "training", unit="steps", done=20) as bar:
        for _ in range(12):
            now[0] += 1.0
            bar.say("loss 1.5")
            bar.advance(2)
    assert capsys.readouterr().err.splitlines() == [
        "training: 30 of 200 steps, 2 steps/s, 1:25 left, loss 1.5",
        "training: 40 of 200 steps, 2 steps/s, 1:20 left, loss 1.5",
    ]
    with progress.bar(None, "reading") as bar:
        now[0] += 10.0
        bar.advance(5_000_000)
    assert capsys.readouterr().err == "reading: 5.0 MB, 0.5 MB/s\n"


def test_a_terminal_sees_it_only_when_it_is_wanted():
    with redirect_stderr(Terminal()) as screen:
        use(show=False)
    assert screen.getvalue() == ""
    with redirect_stderr(Terminal()) as screen:
        use()
    assert screen.getvalue().startswith("Fetching\n")
    assert "counting" in screen.getvalue()


def test_bytes_are_shown_with_rate_and_time(capsys):
    with redirect_stderr(Terminal()) as screen, progress.bar(92_871_040, "smollm2-135m", done=40_000_000) as bar:
        for _ in range(4):
            bar.advance(10_000_000)
        bar.advance(-5_000_000)
    for words in ("smollm2-135m", "40.0/92.9 MB", "75.0/92.9 MB", "B/s", "0:00"):
        assert words in screen.getvalue()
    assert capsys.readouterr().out == ""


def test_other_units_are_shown_by_name():
    with redirect_stderr(Terminal()) as screen, progress.bar(3, "training", unit="steps") as bar:
        bar.advance(2)
        bar.advance(1)
    assert "3/3" in screen.getvalue()
    assert "steps/s" in screen.getvalue()


def test_an_unknown_total_is_allowed():
    with redirect_stderr(Terminal()) as screen, progress.bar(None, "reading") as bar:
        bar.advance(5)
    assert "reading" in screen.getvalue()


def test_an_error_ends_the_bar_and_passes():
    with redirect_stderr(Terminal()) as screen, pytest.raises(ZeroDivisionError), progress.bar(1, "failing") as bar:
        bar.advance(1 // 0)
    assert screen.getvalue().endswith("\x1b[?25h")  # the cursor is shown again


def announced(seconds: float, count: int = 10, advice: str = "Ctrl-C ends it", **settings) -> list[str]:
    """What is written while units of so many seconds are done."""
    now = [100.0]
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stderr(io.StringIO()) as log,
        progress.bar(count, "training", unit="steps", advice=advice, **settings) as bar,
    ):
        patch.setattr(progress, "SECONDS_BETWEEN_LINES", 1e9)
        patch.setattr(progress.time, "monotonic", lambda: now[0])
        for step in range(6):
            now[0] += seconds + (30.0 if step == 0 else 0.0)  # the first step compiles
            bar.advance(1)
            bar.advance(0)
    return log.getvalue().splitlines()


def test_a_long_task_announces_its_duration_once_and_a_short_one_does_not():
    assert announced(2.0, 100) == ["2.0 s per step: the 98 steps that are left take about 3:16; Ctrl-C ends it"]
    assert announced(0.4, 1000) == ["2.5 steps/s: the 996 steps that are left take about 6:38; Ctrl-C ends it"]
    assert announced(2.0, 20) == announced(2.0, 100, advice="") == []
    assert announced(2.0, 100, done=80) == announced(2.0, 100, show_progress=False) == []


def test_a_terminal_is_told_the_duration_too(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with redirect_stderr(Terminal()) as screen, progress.bar(1000, "training", unit="steps", advice="stop") as bar:
        for _ in range(3):
            now[0] += 2.0
            bar.advance(1)
    assert "2.0 s per step: the 998 steps that are left take about 33:16; stop" in screen.getvalue()


def test_what_cannot_be_counted_says_that_it_still_runs(capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.01)
    for show in (True, False):
        with progress.busy("thinking", show_progress=show):
            time.sleep(0.05)
        lines = capsys.readouterr().err.splitlines()
        assert set(lines) == ({"thinking: 0 s"} if show else set())
        assert len(lines) < 4  # further and further apart
    time.sleep(0.05)
    assert capsys.readouterr().err == ""
    with redirect_stderr(Terminal()) as screen, progress.busy("thinking"):
        time.sleep(0.15)
    assert "thinking" in screen.getvalue()
