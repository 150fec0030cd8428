"""What a claim is, and how evidence becomes a verdict.

Notable here:
- the acceptance rule is text that stands beside the code before it runs; a run under another text does not count
- a verdict is computed from named conditions: all hold, `reproduced`; some, `partly`; none, `not reproduced`
- a smoke run shows that a claim still runs; a verdict on the claim needs a laptop or gpu run
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, SupportsFloat

from pippin.core.errors import ClaimError
from pippin.core.report import Report, Row

Verdict = Literal["reproduced", "partly", "not reproduced", "not run"]

SCALES = ("smoke", "laptop", "gpu")
VERDICTS: tuple[Verdict, ...] = ("reproduced", "partly", "not reproduced", "not run")
_ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True)
class Scale:
    """How large a run is: `smoke` takes seconds, `laptop` at most 10 minutes on 2 cores, `gpu` 10 minutes on one GPU.

    Raises:
        ClaimError: a name that is none of these.
    """

    name: str

    def __post_init__(self) -> None:
        if self.name not in SCALES:
            raise ClaimError(f"scale {self.name!r} is not known; use one of: {', '.join(SCALES)}")


@dataclass(frozen=True)
class Figure:
    """One measured number; `seed` is None where nothing was random."""

    name: str
    value: float
    unit: str = ""
    seed: int | None = None


class Evidence:
    """What a claim measured, and which of its conditions held.

    >>> evidence = Evidence()
    >>> evidence.add("accuracy", 0.91, seed=0)
    >>> evidence.add("accuracy", 0.95, seed=1)
    >>> evidence.accept(all(a >= 0.9 for a in evidence.each("accuracy"))).verdict
    'reproduced'
    """

    def __init__(self) -> None:
        self.figures: list[Figure] = []
        self.conditions: dict[str, bool] = {}

    def add(self, name: str, value: SupportsFloat, *, seed: int | None = None, unit: str = "") -> None:
        """Record one figure.

        Args:
            name: what was measured, the same for every seed.
            value: a number, or a tensor or array of one element; infinities and NaN are kept as they are.
            seed: the seed behind it.
            unit: "s", "tokens/s", "%"...; the same every time.

        Raises:
            ClaimError: the name is empty, has another unit, or already has a figure for this seed.
        """
        if not name.strip():
            raise ClaimError(f"a figure needs a name; this one has the value {value}")
        for figure in self.figures:
            if figure.name == name and figure.unit != unit:
                raise ClaimError(f"figure {name!r} is in {figure.unit!r} and cannot also be in {unit!r}")
            if figure.name == name and figure.seed == seed:
                raise ClaimError(f"figure {name!r} was already added for seed {seed}")
        self.figures.append(Figure(name, float(value), unit, seed))

    def each(self, name: str) -> list[float]:
        """Every value of that name, in the order added.

        Raises:
            ClaimError: nothing of that name was measured; otherwise `all(...)` over nothing would hold.
        """
        values = [figure.value for figure in self.figures if figure.name == name]
        if not values:
            known = ", ".join(dict.fromkeys(repr(figure.name) for figure in self.figures)) or "nothing yet"
            raise ClaimError(f"no figure is called {name!r}; measured: {known}")
        return values

    def mean(self, name: str) -> float:
        """The mean of `each(name)`."""
        return statistics.fmean(self.each(name))

    def accept(self, condition: object = None, /, **conditions: object) -> Evidence:
        """Say which conditions of the acceptance rule held; once, after measuring.

        Args:
            condition: the whole rule as one truth value.
            conditions: or its parts by name; where only some hold, the verdict is `partly`.

        Returns:
            This evidence, so that a claim can end with `return evidence.accept(...)`.

        Raises:
            ClaimError: called twice, without any condition or any figure, or with something that is no truth value.

        >>> evidence = Evidence()
        >>> evidence.add("speed", 3.0, unit="x")
        >>> evidence.accept(faster=True, smaller=False).verdict
        'partly'
        """
        if self.conditions:
            raise ClaimError(f"accept was already called, with {self.conditions}")
        if not self.figures:
            raise ClaimError("accept was called before any figure was added")
        if condition is not None:
            conditions = {"accept": condition, **conditions}
        if not conditions:
            raise ClaimError("accept needs at least one condition")
        self.conditions = {name: _truth(name, value) for name, value in conditions.items()}
        return self

    @property
    def verdict(self) -> Verdict:
        """What the conditions add up to; `not run` before `accept`."""
        return verdict(self.conditions)

    def report(self, title: str) -> Report:
        """The figures as a table, one row per name: the mean over the seeds and its spread."""
        rows = []
        for name in dict.fromkeys(figure.name for figure in self.figures):
            values = self.each(name)
            unit = next(figure.unit for figure in self.figures if figure.name == name)
            finite = all(map(math.isfinite, values))  # of others there is neither a mean nor a spread
            spread = (statistics.stdev(values) if finite else math.nan) if len(values) > 1 else None
            rows.append(Row(name, statistics.fmean(values), unit, spread))
        return Report(title, rows)


def verdict(conditions: Mapping[str, bool]) -> Verdict:
    """All conditions hold: `reproduced`; some: `partly`; none: `not reproduced`; no conditions: `not run`.

    >>> verdict({"faster": True, "as good": False})
    'partly'
    """
    if not conditions:
        return "not run"
    if all(conditions.values()):
        return "reproduced"
    return "partly" if any(conditions.values()) else "not reproduced"


@dataclass(frozen=True)
class Claim:
    """A published claim and the function that measures it.

    Attributes:
        id: lower-case words joined by hyphens; the name of the method's card, with a suffix where it has several.
        source: where it was published ("arXiv:2605.05750").
        paper: the published sentence or number, in short.
        setting: what we measure instead: model, data and sizes.
        accept: the rule, written before the first run.
        measure: the function.
    """

    id: str
    source: str
    paper: str
    setting: str
    accept: str
    measure: Callable[[Scale], Evidence]

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.id):
            raise ClaimError(f"claim id {self.id!r} must be lower-case words joined by hyphens, like 'two-bit-qat'")
        for field in ("source", "paper", "setting", "accept"):
            if not str(getattr(self, field)).strip():
                raise ClaimError(f"claim {self.id!r} has an empty {field!r}; it must stand before the first run")

    def __call__(self, scale: Scale) -> Evidence:
        """Measure at that scale.

        Raises:
            ClaimError: the function returned no evidence, or never called `accept`.
        """
        evidence = self.measure(scale)
        if not isinstance(evidence, Evidence):
            raise ClaimError(f"claim {self.id!r} returned {type(evidence).__name__} and not Evidence")
        if not evidence.conditions:
            raise ClaimError(f"claim {self.id!r} measured but never called evidence.accept(...)")
        return evidence


def claim(
    *, id: str, source: str, paper: str, setting: str, accept: str
) -> Callable[[Callable[[Scale], Evidence]], Claim]:
    """Turn a measuring function into a `Claim`; the arguments are its attributes.

    Raises:
        ClaimError: a badly formed id or an empty text.
    """

    def decorate(function: Callable[[Scale], Evidence]) -> Claim:
        return Claim(id, source, paper, setting, accept, function)

    return decorate


def _truth(name: str, value: Any) -> bool:
    """A bool, also out of NumPy or torch; a bare number is more likely a forgotten comparison."""
    plain = value.item() if hasattr(value, "item") else value
    if not isinstance(plain, bool):
        raise ClaimError(f"condition {name!r} is {value!r}, not a truth value; compare it with its bound")
    return plain
