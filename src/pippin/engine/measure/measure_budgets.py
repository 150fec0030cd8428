"""Speed of a model under budgets of memory: what a budget buys, and from where on more of it buys nothing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge

from pippin.core import memory, plotting
from pippin.core.checks import PositiveInt, checked
from pippin.core.files import format_bytes
from pippin.core.report import Report, Row
from pippin.engine.engine import Engine
from pippin.engine.engine_stats import EngineStats
from pippin.engine.measure.measure_speed import measure_speed, prompt_ids
from pippin.engine.model_runner import KVCacheDtypeChoice
from pippin.language.language_model import LanguageModel


@dataclass(frozen=True)
class BudgetSpeed:
    """What was measured under one budget, each number of every run.

    Attributes:
        budget: the budget in bytes.
        prompt: prompt tokens per second, up to the first token of the answer.
        answer: tokens per second after the first one.
        hit_rate: share of the experts or neurons that were in memory when they were needed; 1 if all are.
        bytes_per_token: bytes read from storage for each token of prompt and answer.
        resident: resident memory that the model adds, after the run.
    """

    budget: int
    prompt: tuple[float, ...]
    answer: tuple[float, ...]
    hit_rate: tuple[float, ...]
    bytes_per_token: tuple[float, ...]
    resident: tuple[int, ...]


@checked
def measure_budget(
    load: Callable[[memory.MemoryBudget], LanguageModel],
    budget: memory.MemoryBudget,
    *,
    prompt: PositiveInt,
    answer: Annotated[int, Ge(2)],
    repeats: PositiveInt,
    kv_cache_dtype: KVCacheDtypeChoice = "auto",
    on_run: Callable[[], None] = lambda: None,
) -> BudgetSpeed:
    """Load a model under a budget and time greedy answers, after one that warms up.

    Args:
        load: loads the model.
        budget: the budget.
        prompt: tokens of the prompt.
        answer: tokens of the answer, at least 2.
        repeats: number of answers.
        kv_cache_dtype: precision of the cache.
        on_run: called after each answer.

    Raises:
        NotEnoughMemory: the budget is too small for the model.
        ContextOverflow: prompt and answer do not fit.
    """
    model = load(budget)
    ids, stops = prompt_ids(model, prompt), sorted(model.tokenizer.eos_ids)
    found: list[tuple[float, float, float, float, int]] = []
    with Engine(model, max_num_seqs=1, kv_cache_dtype=kv_cache_dtype, enable_prefix_caching=False) as engine:
        measure_speed(engine, ids, answer, stops=stops)
        for _ in range(repeats):
            before = engine.stats()
            speed = measure_speed(engine, ids, answer, stops=stops)
            after = engine.stats()
            hits, misses, nbytes = (b - a for a, b in zip(_brought(before), _brought(after), strict=True))
            read = nbytes / (prompt + answer)
            rate = hits / (hits + misses) if hits + misses else 1.0
            resident = budget.nbytes - budget.left
            found.append((speed.prompt_tokens_per_second, speed.answer_tokens_per_second, rate, read, resident))
            on_run()
    return BudgetSpeed(budget.nbytes, *zip(*found, strict=True))


def _brought(stats: EngineStats) -> tuple[int, int, int]:
    """Experts or neurons that were in memory when they were needed, those that were not, and bytes read."""
    return (
        stats.expert_hits + stats.neuron_hits,
        stats.expert_misses + stats.neuron_misses,
        stats.expert_bytes_read + stats.neuron_bytes_read,
    )


def report(name: str, speeds: Sequence[BudgetSpeed]) -> Report:
    """A report of several budgets.

    Args:
        name: of the model.
        speeds: what was measured.
    """
    rows = []
    for each in speeds:
        label = format_bytes(each.budget)
        read = [nbytes / 1e6 for nbytes in each.bytes_per_token]
        rows += [
            Row.of_runs(f"prompt, {label}", each.prompt, "tokens/s"),
            Row.of_runs(f"answer, {label}", each.answer, "tokens/s"),
            Row.of_runs(f"in memory when needed, {label}", [100 * rate for rate in each.hit_rate], "%"),
            Row.of_runs(f"read from storage for a token, {label}", read, "MB"),
            Row.of_runs(f"resident, {label}", [nbytes / 1e6 for nbytes in each.resident], "MB"),
        ]
    return Report(f"{name} under budgets of memory", rows)


def draw(name: str, speeds: Sequence[BudgetSpeed], path: str | Path) -> None:
    """Draw speed, hits and bytes against the budget.

    Raises:
        InvalidArgument: a suffix other than .png, .svg or .pdf. MissingDependency: matplotlib is not installed.
    """
    figure = plotting.new(7, 8)
    figure.suptitle(f"{name} under budgets of memory")
    panels = figure.subplots(3, 1, sharex=True)
    budgets = [each.budget / 1e6 for each in speeds]
    curves: list[tuple[Any, str, list[Sequence[float]]]] = [
        (panels[0], "answer", [each.answer for each in speeds]),
        (panels[0], "prompt", [each.prompt for each in speeds]),
        (panels[1], "", [[100 * rate for rate in each.hit_rate] for each in speeds]),
        (panels[2], "", [[nbytes / 1e6 for nbytes in each.bytes_per_token] for each in speeds]),
    ]
    for panel, label, values in curves:
        middle = [statistics.median(runs) for runs in values]
        spread = [statistics.stdev(runs) if len(runs) > 1 else 0.0 for runs in values]
        panel.errorbar(budgets, middle, yerr=spread, marker="o", capsize=3, label=label or None)
    panels[0].set_ylabel("tokens/s")
    panels[0].set_yscale("log")
    panels[0].legend()
    panels[1].set_ylabel("experts or neurons in\nmemory when needed, %")
    panels[2].set_ylabel("read from storage\nfor a token, MB")
    panels[2].set_xlabel("budget, MB")
    plotting.save(figure, path)
