"""A pytest plugin of the mutation tester, for thousands of short sessions that are forked from one.

Notable here:
- a mutant is done with at the first test that fails, and most mutants fail many: the quickest test comes first, by the
  times that mutmut wrote down (it keeps the tests of a function in a set, whose order is chance)
- a mutant that never ends is ended by the time that the running test may take, not by that of all tests
- pytest collects garbage ten times a session; what was imported before the fork is taken out of that, which more than
  halves a session
"""

from __future__ import annotations

import gc
import json
import signal
from functools import cache
from pathlib import Path

import pytest

TIMES = Path("mutmut-stats.json")


def pytest_configure() -> None:
    """Leave what there is already to no collection."""
    gc.freeze()


@cache
def times() -> dict[str, float]:
    """Seconds that each test took without a mutant; none in the session that measures them."""
    return json.loads(TIMES.read_text(encoding="utf-8"))["duration_by_test"] if TIMES.exists() else {}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by the time that each test took."""
    items.sort(key=lambda item: times().get(item.nodeid, 0.0))


def pytest_runtest_logstart(nodeid: str) -> None:
    """Let the system end this process after many times the test's time; the constant is for what fixtures build."""
    if nodeid in times():
        signal.setitimer(signal.ITIMER_PROF, 10 + 10 * times()[nodeid])


def pytest_runtest_logfinish() -> None:
    """Stop the clock between tests."""
    signal.setitimer(signal.ITIMER_PROF, 0)
