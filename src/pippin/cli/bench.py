"""`pippin bench`: prompt and decoding speed of a model, against the limit of memory bandwidth.

Notable here:
- the limit is that of `pippin.engine.measure.measure_speed`: measured bandwidth divided by the bytes read for each
  token
- the speed of a model of the catalog, as it is used without options, is kept for `pippin models`
- measurements of model and memory alternate, so that other load affects both and shows in the standard deviation
"""

from __future__ import annotations

import gc
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pippin.cli.common import options, terminal
from pippin.cli.common.declared_options import with_options
from pippin.core import progress
from pippin.core.errors import InvalidArgument
from pippin.core.report import Report, Row
from pippin.core.store.catalog import DEFAULT_MODEL
from pippin.engine.options import Bits, Device, DType, KVCacheChoice, KVSharingRatio, ModelOptions
from pippin.recipes import options as recipes

if TYPE_CHECKING:
    from collections.abc import Callable

    from pippin.engine.engine import Engine
    from pippin.engine.measure.measure_speed import BandwidthLimit, Speed
    from pippin.language.language_model import LanguageModel

_PARTS = ("linear layers", "attention", "other kernels", "waiting for threads")


@with_options
def bench(
    model: recipes.Model = DEFAULT_MODEL,
    prompt: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens of the prompt.")] = 512,
    answer: Annotated[int, typer.Option(min=2, metavar="N", help="Tokens of the answer, at least 2.")] = 128,
    threads: Annotated[
        str | None, typer.Option(metavar="N,N", help="Numbers of threads to measure; by default, all cores.")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE,SIZE",
            help="Budgets of memory to measure, such as 200MB,1GB; what does not fit stays in its file.",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Number of measurements.")] = 5,
    bits: Bits = None,
    kv_cache_dtype: KVCacheChoice = "auto",
    kv_sharing_ratio: KVSharingRatio = None,
    device: Device = None,
    dtype: DType = "auto",
    profile: Annotated[bool, typer.Option("--profile", help="Break down the time of an answer.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plot the figures to this file (.png, .svg, .pdf).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure prompt and decoding speed, and compare decoding with the memory bandwidth of this machine.

    pippin bench smollm2-135m --threads 1,2
    """
    counts = _counts(threads)
    model_options = ModelOptions(device=device, dtype=dtype, bits=bits, kv_sharing_ratio=kv_sharing_ratio)
    if memory is not None:
        if len(counts) > 1 or profile:
            raise InvalidArgument("--memory is measured with one number of threads and without --profile")
        budgets = [_budget(each) for each in memory.split(",")]
        sizes = {"prompt": prompt, "answer": answer, "repeats": repeats}
        _show_budgets(model, replace(model_options, threads=counts[0]), budgets, kv_cache_dtype, plot, as_json, **sizes)
        return
    language_model = options.load(model, model_options)
    report = run(
        language_model,
        counts,
        prompt=prompt,
        answer=answer,
        repeats=repeats,
        kv_cache_dtype=kv_cache_dtype,
        profile=profile,
    )
    if (bits, kv_cache_dtype, kv_sharing_ratio, device, dtype) == (None, "auto", None, None, "auto"):
        _remember(model, counts, report)
    if plot is not None:
        report.plot(plot)
        terminal.note(f"plotted to {plot}")
    if as_json:
        record = {"model": language_model.name, "circumstances": circumstances(language_model)}
        terminal.write(terminal.to_json(record | {"rows": [asdict(row) for row in report.rows]}) + "\n")
    else:
        report.print()


def _budget(text: str) -> int:
    """A budget of memory."""
    from pippin.core.memory import MemoryBudget

    return MemoryBudget.of(text).nbytes


def _show_budgets(
    model: str,
    model_options: ModelOptions,
    budgets: list[int],
    kv_cache_dtype: KVCacheChoice,
    plot: Path | None,
    as_json: bool,
    **sizes: int,
) -> None:
    """Measure a model under budgets of memory, one after the other, and print what came out."""
    from pippin.core.memory import MemoryBudget, trim
    from pippin.engine.measure import measure_budgets

    loaded: list[LanguageModel] = []

    def load(budget: MemoryBudget) -> LanguageModel:
        loaded[:] = [options.load(model, replace(model_options, memory=budget.nbytes))]
        return loaded[0]

    speeds = []
    with progress.bar(len(budgets) * sizes["repeats"], "measuring budgets", unit="runs") as bar:
        for budget in budgets:
            trim()  # what is left of the last model does not count
            speeds.append(
                measure_budgets.measure_budget(
                    load,
                    MemoryBudget.of(budget),
                    kv_cache_dtype=kv_cache_dtype,
                    on_run=lambda: bar.advance(1),
                    **sizes,
                )
            )
            facts, name = circumstances(loaded[0]), loaded[0].name
            loaded.clear()
            gc.collect()
    if plot is not None:
        measure_budgets.draw(name, speeds, plot)
        terminal.note(f"plotted to {plot}")
    if as_json:
        record = {"model": name, "circumstances": facts, "budgets": [asdict(each) for each in speeds]}
        terminal.write(terminal.to_json(record) + "\n")
    else:
        measure_budgets.report(name, speeds).print()


def _remember(model: str, counts: list[int], report: Report) -> None:
    """Keep the speed of a catalog model with the default number of threads."""
    from pippin.core import native
    from pippin.core.store import catalog
    from pippin.engine.measure.machine_speed import remember

    entry = catalog.find(model)
    if entry is not None and counts == [native.default_threads()]:
        remember(entry.name, next(row.value for row in report.rows if row.name == "answer"))


def _counts(threads: str | None) -> list[int]:
    """Parse --threads."""
    from pippin.core import device

    if threads is None:
        return [device.threads()]
    parts = [part.strip() for part in threads.split(",")]
    if not all(part.isdecimal() and part.isascii() for part in parts):
        raise InvalidArgument(f"--threads must be comma-separated whole numbers, got {threads!r}")
    counts = list(dict.fromkeys(map(int, parts)))
    for count in counts:
        device.check_threads(count)
    return counts


def run(
    model: LanguageModel,
    threads: list[int],
    *,
    prompt: int,
    answer: int,
    repeats: int,
    kv_cache_dtype: KVCacheChoice = "auto",
    profile: bool = False,
) -> Report:
    """Measure a loaded model.

    Args:
        model: a loaded model.
        threads: numbers of threads to measure.
        prompt: tokens of the prompt.
        answer: tokens of the answer, at least 2.
        repeats: number of measurements.
        kv_cache_dtype: precision of the KV cache.
        profile: whether to break down the time of an answer.

    Raises:
        ContextOverflow: prompt and answer do not fit the model's context.
        InvalidArgument: an unknown precision of the cache.
    """
    from pippin.core.threads import use_threads
    from pippin.engine import Engine
    from pippin.engine.measure import measure_speed as measure

    ids = measure.prompt_ids(model, prompt)
    rows: list[Row] = []
    for count in threads:
        use_threads(count)  # before the engine starts, since torch reads it once per thread
        named = f"{count} thread{'s'[: count > 1]}"
        with (
            Engine(model, max_num_seqs=1, kv_cache_dtype=kv_cache_dtype, enable_prefix_caching=False) as engine,
            progress.bar(repeats, f"measuring with {named}", unit="runs") as bar,
        ):
            speeds, limits = _samples(engine, model, ids, answer, count, repeats, lambda: bar.advance(1))
        label = "" if len(threads) == 1 else f", {named}"
        rows += _rows(speeds, limits, label)
        if profile:
            rows += _profile_rows(speeds, label)
    counted = f"{', '.join(map(str, threads))} {'thread' if list(threads) == [1] else 'threads'}"
    where = model.device.type if model.device.type != "cpu" else counted
    return Report(f"{model.name}: a prompt of {prompt:,} tokens, an answer of {answer:,}, {where}", rows)


def _samples(
    engine: Engine,
    model: LanguageModel,
    ids: list[int],
    answer: int,
    threads: int,
    repeats: int,
    advance: Callable[[], None],
) -> tuple[list[Speed], list[BandwidthLimit]]:
    """Alternating measurements of speed and bandwidth limit, after one warm-up answer."""
    from pippin.engine.measure import measure_speed as measure
    from pippin.language import Decoder

    decoder = isinstance(model.network, Decoder)  # what transformers reads is not known
    weights = measure.weight_bytes(model.module) if decoder else 0
    cache = measure.mean_cache_bytes(model.config, engine.kv_cache_dtype, len(ids), answer) if decoder else 0.0
    stops = sorted(model.tokenizer.eos_ids)
    speeds, limits = [], []
    measure.measure_speed(engine, ids, answer, stops=stops)
    for _ in range(repeats):
        bandwidth = measure.read_bandwidth(threads, device=model.device)
        limits.append(measure.BandwidthLimit(weights, cache, bandwidth))
        speeds.append(measure.measure_speed(engine, ids, answer, stops=stops))
        advance()
    return speeds, limits


def _rows(speeds: list[Speed], limits: list[BandwidthLimit], label: str) -> list[Row]:
    """Report rows of the measurements; bytes in decimal units, as in data sheets of memory."""
    one = limits[0]
    rows = [
        Row.of_runs(f"prompt{label}", [speed.prompt_tokens_per_second for speed in speeds], "tokens/s"),
        Row.of_runs(f"answer{label}", [speed.answer_tokens_per_second for speed in speeds], "tokens/s"),
        Row.of_runs(f"first token{label}", [1000 * speed.first_token_seconds for speed in speeds], "ms"),
    ]
    if not one.weight_bytes:
        return rows
    return [
        *rows[:2],
        Row.of_runs(f"limit of the memory{label}", [limit.tokens_per_second for limit in limits], "tokens/s"),
        Row.of_runs(
            f"share of the limit{label}",
            [100 * limit.share(speed.answer_tokens_per_second) for limit, speed in zip(limits, speeds, strict=True)],
            "%",
        ),
        rows[2],
        Row(f"weights read per token{label}", one.weight_bytes / 1e6, "MB"),
        Row(f"cache read per token{label}", one.cache_bytes / 1e6, "MB"),
        Row.of_runs(f"memory reads{label}", [limit.bandwidth / 1e9 for limit in limits], "GB/s"),
    ]


def _profile_rows(speeds: list[Speed], label: str) -> list[Row]:
    """Report rows of milliseconds per token in each kernel and outside the kernels."""
    steps = len(speeds[0].token_ids) - 1
    parts = {name: [1000 * s.profile[i] / steps for s in speeds] for i, name in enumerate(_PARTS)}
    parts["outside the kernels"] = [1000 * (s.answer_seconds - sum(s.profile)) / steps for s in speeds]
    return [Row.of_runs(f"{name}{label}", values, "ms per token") for name, values in parts.items()]


def circumstances(model: LanguageModel) -> dict[str, Any]:
    """Hardware and software of the measurement, for `--json`."""
    import os

    from pippin.core import device, native

    facts = device.machine_info()
    return {
        "cpu": facts.cpu,
        "cores": facts.threads,
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kernels": native.instruction_set() if native.library() is not None else None,
        "load": os.getloadavg()[0] if sys.platform != "win32" else None,
    }
