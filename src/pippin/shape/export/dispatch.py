"""Which back end to use, from what was measured.

Notable here:
- a bound is a bound: a back end whose error or memory is over it is not chosen, however fast it is, and the choice says
  what was refused and why
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pippin.core.errors import ExportError, InvalidArgument

if TYPE_CHECKING:
    from pippin.shape.export.asset import ModelAsset
    from pippin.shape.export.compiled import CompiledModel
    from pippin.shape.export.report import BackendRow, PerformanceReport

Objective = Literal["latency", "memory", "size"]
_FIGURES = {"latency": "p50_ms", "memory": "memory", "size": "nbytes"}


@dataclass(frozen=True)
class Choice:
    """The back end that was chosen, and why the others were not."""

    label: str
    backend: str
    options: Mapping[str, Any]
    refused: Mapping[str, str]

    def open(self, asset: ModelAsset) -> CompiledModel:
        """Compile the asset for it."""
        return asset.to(self.backend, **self.options)


def dispatch(
    report: PerformanceReport,
    objective: Objective = "latency",
    *,
    max_error: float | None = None,
    max_memory: int | None = None,
) -> Choice:
    """The best back end of a report within bounds.

    Args:
        report: what `profile` measured.
        objective: the smallest median time, growth of memory, or artifact.
        max_error: largest difference from torch that is allowed.
        max_memory: largest growth of memory that is allowed, in bytes.

    Raises:
        ExportError: no back end keeps to the bounds; the message says what each of them lacks.
        InvalidArgument: another objective.
    """
    if objective not in _FIGURES:
        raise InvalidArgument(f"the objective is one of {', '.join(_FIGURES)}, not {objective!r}")
    refused = {row.label: why for row in report.backends if (why := _reason(row, max_error, max_memory))}
    left = [row for row in report.backends if row.label not in refused]
    if not left:
        raise ExportError("no back end keeps to the bounds: " + "; ".join(f"{k}: {v}" for k, v in refused.items()))
    best = min(left, key=lambda row: getattr(row, _FIGURES[objective]))
    return Choice(best.label, best.backend, best.options, refused)


def _reason(row: BackendRow, max_error: float | None, max_memory: int | None) -> str:
    if row.missing:
        return row.missing
    if max_error is not None and not row.max_error <= max_error:
        return f"its error of {row.max_error:.1e} is over {max_error:.1e}"
    if max_memory is not None and row.memory > max_memory:
        return f"its {row.memory} bytes of memory are over {max_memory}"
    return ""
