"""Profile an exported model on several backends: time per operator, module and device.

Notable here:
- total times are of uninstrumented runs, shares of instrumented ones; the time that no operator accounts for has a row
  of its own, "unattributed"
- backends fuse differently, so their nodes are mapped back to the modules of the source model before comparison
- errors are relative to torch on the same inputs; a backend that is not installed has a row that says so
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
    """A backend with options, and a label for the report."""

    backend: str
    options: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""

    def __str__(self) -> str:
        return self.label or self.backend


@dataclass(frozen=True)
class BackendRow:
    """Totals of one backend; sizes in bytes. ``missing`` says why nothing was measured."""

    label: str
    backend: str
    options: dict[str, Any]
    precision: str = ""
    p50_ms: float = 0.0
    p90_ms: float = 0.0
    load_ms: float = 0.0
    nbytes: int = 0
    memory: int = 0
    """Growth of this process's resident memory from loading to the end of the runs; 0 if freed memory was reused."""
    max_error: float = 0.0
    fallbacks: tuple[str, ...] = ()
    missing: str = ""


@dataclass(frozen=True)
class OperatorRow:
    """One node of a backend's graph; ``flops`` and ``nbytes`` are 0 if its operator is unknown."""

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
    """Bytes of its input and output tensors."""


@dataclass(frozen=True)
class PerformanceReport:
    """The measurements of `profile`."""

    function: str
    sizes: dict[str, int]
    backends: tuple[BackendRow, ...]
    operators: tuple[OperatorRow, ...]
    hash: str

    def backend(self, label: str) -> BackendRow:
        """The row of one backend.

        Raises:
            InvalidArgument: no row has this label.
        """
        for row in self.backends:
            if row.label == label:
                return row
        raise InvalidArgument(f"{label!r} was not measured; measured: {', '.join(row.label for row in self.backends)}")

    def coverage(self, label: str) -> float:
        """Total time of the operators over that of the uninstrumented run; about 1 in a reliable report."""
        total = sum(row.p50_ms for row in self.operators if row.label == label and row.name != UNATTRIBUTED)
        return total / self.backend(label).p50_ms

    @checked
    def rows(self, by: By = "op") -> list[dict[str, Any]]:
        """The operators, or their sums per module or device, slowest first for each backend."""
        if by == "op":
            rows = [asdict(row) for row in self.operators]
        else:
            sums: dict[tuple[str, str], dict[str, Any]] = {}
            for row in self.operators:
                key = getattr(row, by) if row.name != UNATTRIBUTED else UNATTRIBUTED
                entry = sums.setdefault(
                    (row.label, key),
                    {"label": row.label, by: key, "p50_ms": 0.0, "p90_ms": 0.0, "share": 0.0, "flops": 0, "nbytes": 0},
                )
                for metric in ("p50_ms", "p90_ms", "share", "flops", "nbytes"):
                    entry[metric] += getattr(row, metric)
            rows = list(sums.values())
        order = [row.label for row in self.backends]
        return sorted(rows, key=lambda row: (order.index(row["label"]), -row["share"]))

    def to_table(self, by: By = "op", *, limit: int | None = None) -> str:
        """Format the backends, then the rows of `rows`, as text; at most ``limit`` rows per backend."""
        totals = [
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
        heads = ["backend", "precision", "p50 ms", "p90 ms", "load ms", "MB", "memory MB", "max error", "fallbacks"]
        details: list[list[str]] = []
        counts: dict[str, int] = {}
        for row in self.rows(by):
            counts[row["label"]] = counts.get(row["label"], 0) + 1
            if limit is not None and counts[row["label"]] > limit:
                continue
            names = [row["name"], row["kind"], row["module"]] if by == "op" else [row[by] or "(the model itself)"]
            details.append(
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
        detail_heads = ["backend", *columns, "p50 ms", "share", "MFLOP"]
        return _text([heads, *totals]) + missing + "\n\n" + _text([detail_heads, *details])

    def to_json(self) -> str:
        """The report as a JSON object."""
        return json.dumps(asdict(self), indent=1)

    def compare(self, other: PerformanceReport) -> dict[str, float]:
        """The speedup over another report by backend: the other's median time over this one's."""
        others = {row.label: row for row in other.backends if not row.missing}
        return {
            row.label: others[row.label].p50_ms / row.p50_ms
            for row in self.backends
            if not row.missing and row.label in others
        }

    def check(self, *, max_p90_ms: float | None = None, max_error: float | None = None) -> None:
        """Check the measurements against limits.

        Raises:
            ExportError: a limit is exceeded; the message lists all such backends.
        """
        problems = []
        for row in self.backends:
            if not row.missing and max_p90_ms is not None and row.p90_ms > max_p90_ms:
                problems.append(f"{row.label} takes {row.p90_ms:.3f} ms (p90), the limit is {max_p90_ms}")
            if not row.missing and max_error is not None and row.max_error > max_error:
                problems.append(f"{row.label} has an error of {row.max_error:.1e}, the limit is {max_error:.1e}")
        if problems:
            raise ExportError("; ".join(problems))

    def plot(self, path: str | Path, *, by: By = "module", limit: int = 12) -> None:
        """Plot the slowest rows of each backend as bars, in milliseconds.

        Raises:
            MissingDependency: matplotlib is not installed.
        """
        path = Path(path)
        measured = [row for row in self.backends if not row.missing]
        figure = plotting.new(8, 1 + 2.6 * len(measured))
        panels = figure.subplots(len(measured), squeeze=False)[:, 0]
        for panel, total in zip(panels, measured, strict=True):
            rows = [row for row in self.rows(by) if row["label"] == total.label][:limit]
            names = [(row["name"] if by == "op" else row[by]) or "(the model itself)" for row in rows]
            panel.barh(range(len(rows)), [row["share"] * total.p50_ms for row in rows])
            panel.set_yticks(range(len(rows)), names)
            panel.invert_yaxis()
            panel.set_title(f"{total.label}: {total.p50_ms:.3f} ms, error {total.max_error:.0e}", loc="left")
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
    """Profile an exported model on several backends.

    Args:
        asset: the exported model.
        backends: names, or variants with options. One that is not installed gets a row that says so.
        function: name of the function to run.
        sizes: sizes of the dynamic dimensions by name; by default those of the captured example.
        warmup: number of runs before the measurement.
        runs: number of measured runs, followed by as many instrumented ones.
        seed: of the random inputs.

    Raises:
        InvalidArgument: no runs, or two variants with the same label.
        UnsupportedOperator: a backend does not support an operator.
    """
    variants = [one if isinstance(one, Variant) else Variant(one) for one in backends]
    if len({str(one) for one in variants}) < len(variants):
        raise InvalidArgument(f"labels must differ: {', '.join(map(str, variants))}")
    inputs = asset.example(function, sizes, seed=seed)
    with reference.TorchModel(asset) as model:
        expected = model.run(function, **inputs)
        costs = _costs(model.modules[function], asset.signature(function).check(inputs))
    totals: list[BackendRow] = []
    operators: list[OperatorRow] = []
    for variant in variants:
        total, rows = _measure(asset, variant, function, inputs, expected, costs, warmup, runs)
        totals.append(total)
        operators += rows
    return PerformanceReport(function, dict(sizes or {}), tuple(totals), tuple(operators), asset.hash)


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
    """Load the model on one backend, compare its outputs with torch's, and time it."""
    import psutil

    process, label = psutil.Process(), str(variant)
    before, start = process.memory_info().rss, time.perf_counter()
    try:
        model = asset.to(variant.backend, **variant.options)
    except BackendUnavailable as error:
        return BackendRow(label, variant.backend, dict(variant.options), missing=str(error)), []
    with model:
        load_ms = 1e3 * (time.perf_counter() - start)
        outputs = model.run(function, **inputs)
        max_error = max(float((outputs[name].double() - expected[name].double()).abs().max()) for name in expected)
        times = _uninstrumented(model, function, inputs, warmup, runs)
        total = BackendRow(
            label,
            variant.backend,
            dict(variant.options),
            model.precision,
            statistics.median(times),
            _p90(times),
            load_ms,
            model.nbytes,
            max(0, process.memory_info().rss - before),
            max_error,
            tuple(
                model.fallbacks("xnnpack" if variant.backend == "executorch" else variant.options.get("device", "cpu"))
            ),
        )
        nodes = model.times(function, inputs, runs)
    medians = [statistics.median(node.milliseconds) for node in nodes]
    total_ms = max(sum(medians), total.p50_ms)
    rows = []
    for node, median in zip(nodes, medians, strict=True):
        cost = [costs[source] for source in node.sources if source in costs]
        module = UNATTRIBUTED if node.module is None else node.module
        flops, nbytes = sum(flops for flops, _ in cost), sum(nbytes for _, nbytes in cost)
        p90, share = _p90(node.milliseconds), median / total_ms
        rows.append(OperatorRow(label, node.name, node.kind, module, node.device, median, p90, share, flops, nbytes))
    unattributed = max(0.0, total.p50_ms - sum(medians))
    rows.append(
        OperatorRow(label, UNATTRIBUTED, "", UNATTRIBUTED, "", unattributed, unattributed, unattributed / total_ms)
    )
    return total, rows


def _uninstrumented(
    model: CompiledModel, function: str, inputs: dict[str, torch.Tensor], warmup: int, runs: int
) -> list[float]:
    """Durations of complete runs in milliseconds."""
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
    """Runs a graph and counts operations and bytes of each operator."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.costs: dict[str, tuple[int, int]] = {}

    def run_node(self, n: Node) -> Any:
        """Run and count one node."""
        if n.op != "call_function":
            return super().run_node(n)
        from torch.utils.flop_counter import FlopCounterMode

        inputs = [tensor for tensor in map(self.env.get, n.all_input_nodes) if isinstance(tensor, torch.Tensor)]
        with FlopCounterMode(display=False) as counter:
            result = super().run_node(n)
        outputs = [tensor for tensor in torch.utils._pytree.tree_leaves(result) if isinstance(tensor, torch.Tensor)]
        self.costs[n.name] = counter.get_total_flops(), sum(tensor.nbytes for tensor in [*inputs, *outputs])
        return result


def _costs(module: GraphModule, tensors: list[torch.Tensor]) -> dict[str, tuple[int, int]]:
    """Floating-point operations (a multiply-add counts as two) and bytes of each operator, by node name."""
    counter = _Costs(module)
    with torch.no_grad():
        counter.run(*tensors)
    return counter.costs


def _text(lines: list[list[str]]) -> str:
    widths = [max(len(line[index]) for line in lines) for index in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
