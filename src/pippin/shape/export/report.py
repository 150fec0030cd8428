"""Where an exported model spends its time, on every back end: per operator, per module, per device.

Notable here:
- the total is that of a plain run, shares are those of an instrumented one, and what no operator accounts for is a row
  of its own, "unattributed"
- back ends fuse differently, so their nodes are brought back to the modules of the source before they are compared
- errors are measured against torch on the same inputs; a back end that is not here is a row that says why
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.fx import GraphModule, Interpreter, Node

from pippin.core import plotting
from pippin.core.checks import NonNegativeInt, PositiveInt, checked
from pippin.core.errors import BackendUnavailable, ExportError, InvalidArgument
from pippin.shape.export.backends import torch as reference
from pippin.shape.export.compiled_model import CompiledModel

if TYPE_CHECKING:
    from pippin.shape.export.exported_model import ExportedModel

UNATTRIBUTED = "unattributed"
By = Literal["op", "module", "device"]


@dataclass(frozen=True)
class Variant:
    """A back end with options, under a name of its own."""

    backend: str
    options: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""

    def __str__(self) -> str:
        return self.label or self.backend


@dataclass(frozen=True)
class BackendRow:
    """One back end as a whole. Times in milliseconds, sizes in bytes; ``missing`` says why nothing was measured."""

    label: str
    backend: str
    options: dict[str, Any]
    precision: str = ""
    p50_ms: float = 0.0
    p90_ms: float = 0.0
    load_ms: float = 0.0
    nbytes: int = 0
    memory: int = 0
    """Growth of this process's resident memory from loading to the end of the runs; 0 where older memory sufficed."""
    max_error: float = 0.0
    fallbacks: tuple[str, ...] = ()
    missing: str = ""


@dataclass(frozen=True)
class OperatorRow:
    """One node of one back end's graph; ``flops`` and ``nbytes`` are 0 where its operator is not known."""

    label: str
    name: str
    kind: str
    module: str
    device: str
    p50_ms: float
    p90_ms: float
    share: float
    flops: int = 0
    nbytes: int = 0
    """Bytes of the tensors that it reads and writes."""


@dataclass(frozen=True)
class PerformanceReport:
    """What `profile` measured."""

    function: str
    sizes: dict[str, int]
    backends: tuple[BackendRow, ...]
    operators: tuple[OperatorRow, ...]
    hash: str

    def backend(self, label: str) -> BackendRow:
        """The row of one back end.

        Raises:
            InvalidArgument: none has this label.
        """
        for row in self.backends:
            if row.label == label:
                return row
        raise InvalidArgument(f"{label!r} was not measured; measured: {', '.join(row.label for row in self.backends)}")

    def coverage(self, label: str) -> float:
        """Time of all operators in the instrumented run, as a share of the plain run's; about 1 in a good report."""
        spent = sum(row.p50_ms for row in self.operators if row.label == label and row.name != UNATTRIBUTED)
        return spent / self.backend(label).p50_ms

    @checked
    def rows(self, by: By = "op") -> list[dict[str, Any]]:
        """The operators, or their sums per module or device, the slowest first within each back end."""
        if by == "op":
            found = [asdict(row) for row in self.operators]
        else:
            sums: dict[tuple[str, str], dict[str, Any]] = {}
            for row in self.operators:
                key = getattr(row, by) if row.name != UNATTRIBUTED else UNATTRIBUTED
                entry = sums.setdefault(
                    (row.label, key),
                    {"label": row.label, by: key, "p50_ms": 0.0, "p90_ms": 0.0, "share": 0.0, "flops": 0, "nbytes": 0},
                )
                for figure in ("p50_ms", "p90_ms", "share", "flops", "nbytes"):
                    entry[figure] += getattr(row, figure)
            found = list(sums.values())
        order = [row.label for row in self.backends]
        return sorted(found, key=lambda row: (order.index(row["label"]), -row["share"]))

    def to_table(self, by: By = "op", *, limit: int | None = None) -> str:
        """The back ends, then the rows of `rows`, as text; ``limit``: so many rows for each back end."""
        whole = [
            [
                row.label,
                row.precision,
                f"{row.p50_ms:.3f}",
                f"{row.p90_ms:.3f}",
                f"{row.load_ms:.0f}",
                f"{row.nbytes / 1e6:.2f}",
                f"{row.memory / 1e6:.0f}",
                f"{row.max_error:.1e}",
                str(len(row.fallbacks)),
            ]
            for row in self.backends
            if not row.missing
        ]
        heads = ["back end", "precision", "p50 ms", "p90 ms", "load ms", "MB", "memory MB", "max error", "fallbacks"]
        parts: list[list[str]] = []
        seen: dict[str, int] = {}
        for row in self.rows(by):
            seen[row["label"]] = seen.get(row["label"], 0) + 1
            if limit is not None and seen[row["label"]] > limit:
                continue
            names = [row["name"], row["kind"], row["module"]] if by == "op" else [row[by] or "(the model itself)"]
            parts.append(
                [
                    row["label"],
                    *names,
                    f"{row['p50_ms']:.4f}",
                    f"{100 * row['share']:.1f} %",
                    f"{row['flops'] / 1e6:.2f}",
                ]
            )
        columns = ["name", "operator", "module"] if by == "op" else [by]
        missing = "".join(f"\n{row.label}: {row.missing}" for row in self.backends if row.missing)
        below = [["back end", *columns, "p50 ms", "share", "MFLOP"], *parts]
        return _text([heads, *whole]) + missing + "\n\n" + _text(below)

    def to_json(self) -> str:
        """Everything, as one JSON object."""
        return json.dumps(asdict(self), indent=1)

    def compare(self, other: PerformanceReport) -> dict[str, float]:
        """For each back end that both measured: the other's median time over this one's; above 1, this is faster."""
        theirs = {row.label: row for row in other.backends if not row.missing}
        return {
            row.label: theirs[row.label].p50_ms / row.p50_ms
            for row in self.backends
            if not row.missing and row.label in theirs
        }

    def check(self, *, max_p90_ms: float | None = None, max_error: float | None = None) -> None:
        """Compare what was measured with bounds.

        Raises:
            ExportError: the message lists every back end that is over a bound.
        """
        wrong = []
        for row in self.backends:
            if not row.missing and max_p90_ms is not None and row.p90_ms > max_p90_ms:
                wrong.append(f"{row.label} takes {row.p90_ms:.3f} ms (p90), allowed are {max_p90_ms}")
            if not row.missing and max_error is not None and row.max_error > max_error:
                wrong.append(f"{row.label} is off by {row.max_error:.1e}, allowed are {max_error:.1e}")
        if wrong:
            raise ExportError("; ".join(wrong))

    def plot(self, path: str | Path, *, by: By = "module", limit: int = 12) -> None:
        """Draw the slowest rows of each back end as bars of milliseconds.

        Raises:
            MissingDependency: matplotlib is not installed.
        """
        path = Path(path)
        measured = [row for row in self.backends if not row.missing]
        figure = plotting.new(8, 1 + 2.6 * len(measured))
        panels = figure.subplots(len(measured), squeeze=False)[:, 0]
        for panel, whole in zip(panels, measured, strict=True):
            rows = [row for row in self.rows(by) if row["label"] == whole.label][:limit]
            names = [(row["name"] if by == "op" else row[by]) or "(the model itself)" for row in rows]
            panel.barh(range(len(rows)), [row["share"] * whole.p50_ms for row in rows])
            panel.set_yticks(range(len(rows)), names)
            panel.invert_yaxis()
            panel.set_title(f"{whole.label}: {whole.p50_ms:.3f} ms, error {whole.max_error:.0e}", loc="left")
            panel.set_xlabel("ms")
        plotting.save(figure, path)


@checked
def profile(
    asset: ExportedModel,
    backends: Sequence[str | Variant] = ("torch", "onnxruntime"),
    *,
    function: str = "main",
    sizes: Mapping[str, int] | None = None,
    warmup: NonNegativeInt = 5,
    runs: PositiveInt = 30,
    seed: int = 0,
) -> PerformanceReport:
    """Measure an asset on several back ends.

    Args:
        asset: the model.
        backends: names, or variants with options. One that is not installed becomes a row that says so.
        function: which function.
        sizes: of the dynamic dimensions by name; those of the captured example where none are given.
        warmup: runs before the measurement.
        runs: runs that are measured, and again as many that are instrumented.
        seed: of the inputs.

    Raises:
        InvalidArgument: no runs, or two variants under one label.
        UnsupportedOperator: a back end has no form of an operator.
    """
    variants = [one if isinstance(one, Variant) else Variant(one) for one in backends]
    if len({str(one) for one in variants}) < len(variants):
        raise InvalidArgument(f"labels must differ: {', '.join(map(str, variants))}")
    inputs = asset.example(function, sizes, seed=seed)
    with reference.TorchModel(asset) as model:
        expected = model.run(function, **inputs)
        costs = _costs(model.modules[function], asset.signature(function).check(inputs))
    wholes: list[BackendRow] = []
    operators: list[OperatorRow] = []
    for variant in variants:
        whole, rows = _measure(asset, variant, function, inputs, expected, costs, warmup, runs)
        wholes.append(whole)
        operators += rows
    return PerformanceReport(function, dict(sizes or {}), tuple(wholes), tuple(operators), asset.hash)


def _measure(
    asset: ExportedModel,
    variant: Variant,
    function: str,
    inputs: dict[str, torch.Tensor],
    expected: dict[str, torch.Tensor],
    costs: dict[str, tuple[int, int]],
    warmup: int,
    runs: int,
) -> tuple[BackendRow, list[OperatorRow]]:
    """Load, run and time one back end."""
    import psutil

    process, label = psutil.Process(), str(variant)
    before, start = process.memory_info().rss, time.perf_counter()
    try:
        model = asset.to(variant.backend, **variant.options)
    except BackendUnavailable as error:
        return BackendRow(label, variant.backend, dict(variant.options), missing=str(error)), []
    with model:
        loaded = 1e3 * (time.perf_counter() - start)
        found = model.run(function, **inputs)
        off = max(float((found[name].double() - expected[name].double()).abs().max()) for name in expected)
        times = _plain(model, function, inputs, warmup, runs)
        whole = BackendRow(
            label,
            variant.backend,
            dict(variant.options),
            model.precision,
            statistics.median(times),
            _p90(times),
            loaded,
            model.nbytes,
            max(0, process.memory_info().rss - before),
            off,
            tuple(
                model.fallbacks("xnnpack" if variant.backend == "executorch" else variant.options.get("device", "cpu"))
            ),
        )
        nodes = model.times(function, inputs, runs)
    medians = [statistics.median(node.milliseconds) for node in nodes]
    whole_ms = max(sum(medians), whole.p50_ms)
    rows = []
    for node, median in zip(nodes, medians, strict=True):
        cost = [costs[source] for source in node.sources if source in costs]
        module = UNATTRIBUTED if node.module is None else node.module
        flops, nbytes = sum(flops for flops, _ in cost), sum(nbytes for _, nbytes in cost)
        p90, share = _p90(node.milliseconds), median / whole_ms
        rows.append(OperatorRow(label, node.name, node.kind, module, node.device, median, p90, share, flops, nbytes))
    rest = max(0.0, whole.p50_ms - sum(medians))
    rows.append(OperatorRow(label, UNATTRIBUTED, "", UNATTRIBUTED, "", rest, rest, rest / whole_ms))
    return whole, rows


def _plain(model: CompiledModel, function: str, inputs: dict[str, torch.Tensor], warmup: int, runs: int) -> list[float]:
    """Milliseconds of whole runs."""
    times = []
    for index in range(warmup + runs):
        start = time.perf_counter()
        model.run(function, **inputs)
        if index >= warmup:
            times.append(1e3 * (time.perf_counter() - start))
    return times


def _p90(times: Sequence[float]) -> float:
    return sorted(times)[min(len(times) - 1, int(0.9 * len(times)))]


class _Costs(Interpreter):
    """Runs a graph once and counts the work of each operator."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.found: dict[str, tuple[int, int]] = {}

    def run_node(self, n: Node) -> Any:
        """Count one node."""
        if n.op != "call_function":
            return super().run_node(n)
        from torch.utils.flop_counter import FlopCounterMode

        read = [tensor for tensor in map(self.env.get, n.all_input_nodes) if isinstance(tensor, torch.Tensor)]
        with FlopCounterMode(display=False) as counter:
            result = super().run_node(n)
        written = [tensor for tensor in torch.utils._pytree.tree_leaves(result) if isinstance(tensor, torch.Tensor)]
        self.found[n.name] = counter.get_total_flops(), sum(tensor.nbytes for tensor in [*read, *written])
        return result


def _costs(module: GraphModule, tensors: list[torch.Tensor]) -> dict[str, tuple[int, int]]:
    """Floating-point operations (a multiplication and an addition are two) and bytes of each operator by its name."""
    counter = _Costs(module)
    with torch.no_grad():
        counter.run(*tensors)
    return counter.found


def _text(lines: list[list[str]]) -> str:
    widths = [max(len(line[index]) for line in lines) for index in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
