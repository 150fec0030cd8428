"""Choosing a backend from a performance report.

Notable here:
- backends whose error or memory exceeds a bound are excluded; the choice lists them with the reason
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pippin.core.checks import checked
from pippin.core.errors import ExportError

if TYPE_CHECKING:
    from pippin.shape.export.compiled_model import CompiledModel
    from pippin.shape.export.exported_model import ExportedModel
    from pippin.shape.export.report import BackendRow, PerformanceReport

_FIGURES = {"latency": "p50_ms", "memory": "memory", "size": "nbytes"}


@dataclass(frozen=True)
class BackendChoice:
    """The backend that was chosen, and why the others were not."""

    label: str
    backend: str
    options: Mapping[str, Any]
    refused: Mapping[str, str]

    def open(self, asset: ExportedModel) -> CompiledModel:
        """Compile an exported model for the chosen backend."""
        return asset.to(self.backend, **self.options)


@checked
def choose_backend(
    report: PerformanceReport,
    objective: Literal["latency", "memory", "size"] = "latency",
    *,
    max_error: float | None = None,
    max_memory: int | None = None,
) -> BackendChoice:
    """The best backend of a report within bounds.

    Args:
        report: the report of `profile`.
        objective: minimize the median time ("latency"), the growth of memory, or the size of the artifact.
        max_error: maximum difference from torch.
        max_memory: maximum growth of memory, in bytes.

    Raises:
        ExportError: no backend is within the bounds; the message lists the reasons.
    """
    refused = {row.label: why for row in report.backends if (why := _reason(row, max_error, max_memory))}
    left = [row for row in report.backends if row.label not in refused]
    if not left:
        raise ExportError("no backend is within the bounds: " + "; ".join(f"{k}: {v}" for k, v in refused.items()))
    best = min(left, key=lambda row: getattr(row, _FIGURES[objective]))
    return BackendChoice(best.label, best.backend, best.options, refused)


def _reason(row: BackendRow, max_error: float | None, max_memory: int | None) -> str:
    if row.missing:
        return row.missing
    if max_error is not None and not row.max_error <= max_error:
        return f"its error of {row.max_error:.1e} is over {max_error:.1e}"
    if max_memory is not None and row.memory > max_memory:
        return f"its {row.memory} bytes of memory are over {max_memory}"
    return ""
