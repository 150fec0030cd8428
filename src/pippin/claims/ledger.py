"""What a claim is, and how evidence becomes a verdict.

Notable here:
- a condition is one object, its text beside its predicate; the predicate takes the evidence and the name of an arm, so
  that the same rule is asked of the method and of every negative control
- a condition whose figures were not measured has no outcome, and what has no outcome can never add up to `reproduced`
- a difference is paired over seeds with a 95 % interval; fewer than three pairs give an interval without bounds
- a smoke run shows that a claim still runs; a verdict on the claim needs a larger one
"""

from __future__ import annotations

import json
import math
import re
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, SupportsFloat, TypeVar

from pippin.core.errors import ClaimError
from pippin.core.files import atomic_write
from pippin.core.report import Report, Row

Verdict = Literal["reproduced", "partly", "not reproduced", "not run"]
Outcomes = Mapping[str, Mapping[str, bool | None]]
"""By arm and condition: held, failed, or None where the figures that it needs were not measured."""

SCALES = ("smoke", "laptop", "long", "gpu")
VERDICTS: tuple[Verdict, ...] = ("reproduced", "partly", "not reproduced", "not run")
SEEDS = {"smoke": 1, "laptop": 3, "long": 3, "gpu": 5}
_ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_FEWEST_PAIRS = 3

T = TypeVar("T")


@dataclass(frozen=True)
class ScaleChoice(Generic[T]):
    """A setting that depends on the scale: `STEPS[scale]`. Made by `Scale.choose`."""

    by_scale: Mapping[str, T]

    def __getitem__(self, scale: Scale) -> T:
        return self.by_scale[scale.name]


@dataclass(frozen=True)
class Scale:
    """How large a run is.

    `smoke` takes seconds, `laptop` at most 10 minutes on 2 cores, `long` at most two hours on one thread, `gpu` as long
    as somebody with a GPU gives it.

    Attributes:
        name: one of the four.
        path: where the run may leave what a later attempt goes on from after a kill; the runner names it and removes
            it once the run is recorded. None: nothing outlives the process.

    Raises:
        ClaimError: a name that is none of these.

    >>> steps = Scale.choose(smoke=10, laptop=300)
    >>> [steps[Scale(name)] for name in ("smoke", "laptop", "long")]
    [10, 300, 300]
    """

    name: str
    path: Path | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.name not in SCALES:
            raise ClaimError(f"scale {self.name!r} is not known; use one of: {', '.join(SCALES)}")

    @staticmethod
    def choose(*, smoke: T, laptop: T, long: T | None = None, gpu: T | None = None) -> ScaleChoice[T]:
        """A setting for each scale; `long` is as `laptop` unless given, and `gpu` as `long`."""
        long = laptop if long is None else long
        return ScaleChoice({"smoke": smoke, "laptop": laptop, "long": long, "gpu": long if gpu is None else gpu})

    @property
    def seeds(self) -> range:
        """The usual seeds: one at `smoke`, three at `laptop` and `long`, five at `gpu`."""
        return range(SEEDS[self.name])

    @property
    def is_smoke(self) -> bool:
        """Whether only the code is tried, without a verdict."""
        return self.name == "smoke"

    def checkpoints(self, name: str) -> Path:
        """A folder of its own for one training run, such as `pippin.train.Checkpoints` takes.

        It survives a kill where the scale has a folder, so that the next attempt resumes.
        """
        top = self.path or Path(tempfile.mkdtemp(prefix="pippin-claim-"))
        path = top / _file_name(name)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def measured(self, name: str, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
        """The figures of one finished part of a run, measured once: after a kill they are read back.

        Args:
            name: of the part, such as an arm and a seed.
            measure: computes the figures by name.
        """
        path = None if self.path is None else self.path / f"{_file_name(name)}.json"
        if path is not None and path.is_file():
            return {key: float(value) for key, value in json.loads(path.read_text(encoding="utf-8")).items()}
        found = {key: float(value) for key, value in measure().items()}
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as file:
                file.write(json.dumps({key: str(value) for key, value in found.items()}).encode())
        return found


@dataclass(frozen=True)
class Figure:
    """One measured number.

    Attributes:
        name: what was measured.
        value: the number.
        unit: "s", "tokens/s", "%"...
        seed: None where nothing was random.
        arm: the method, control or baseline that it was measured on; None where it belongs to none.
    """

    name: str
    value: float
    unit: str = ""
    seed: int | None = None
    arm: str | None = None

    @property
    def label(self) -> str:
        """Name and arm in one: "accuracy, full cache"."""
        return _label(self.name, self.arm)


@dataclass(frozen=True)
class Paired:
    """A difference over pairs of the same seed: its mean, and the ends of its 95 % interval (Student's t)."""

    mean: float
    low: float
    high: float
    pairs: int


class NotMeasured(ClaimError):
    """A condition asks for a figure that the evidence does not hold."""


class Evidence:
    """What a claim measured.

    >>> evidence = Evidence()
    >>> for seed, value in enumerate((0.91, 0.95, 0.96)):
    ...     evidence.add("accuracy", value, arm="tuned", seed=seed)
    ...     evidence.add("accuracy", value - 0.1, arm="untuned", seed=seed)
    >>> evidence.min("accuracy", "tuned"), round(evidence.paired("accuracy", "tuned", "untuned").low, 3)
    (0.91, 0.1)
    """

    def __init__(self, figures: Sequence[Figure] = ()) -> None:
        self.figures: list[Figure] = list(figures)
        self.outcomes: Outcomes = {}
        self.verdict: Verdict = "not run"
        self.reasons: tuple[str, ...] = ()

    def add(
        self, name: str, value: SupportsFloat, *, arm: str | None = None, seed: int | None = None, unit: str = ""
    ) -> None:
        """Record one figure.

        Args:
            name: what was measured, the same for every arm and seed.
            value: a number, or a tensor or array of one element; infinities and NaN are kept as they are.
            arm: the method, control or baseline that it was measured on.
            seed: the seed behind it.
            unit: "s", "tokens/s", "%"...; the same every time.

        Raises:
            ClaimError: the name is empty, has another unit, or already has a figure for this arm and seed.
        """
        if not name.strip():
            raise ClaimError(f"a figure needs a name; this one has the value {value}")
        label = _label(name, arm)
        for figure in self.figures:
            if figure.label == label and figure.unit != unit:
                raise ClaimError(f"figure {label!r} is in {figure.unit!r} and cannot also be in {unit!r}")
            if figure.label == label and figure.seed == seed:
                raise ClaimError(f"figure {label!r} was already added for seed {seed}")
        self.figures.append(Figure(name, float(value), unit, seed, arm))

    def extend(self, other: Evidence, *, seed: int) -> None:
        """Add the figures of another, all of them under one seed."""
        for figure in other.figures:
            self.add(figure.name, figure.value, arm=figure.arm, seed=seed, unit=figure.unit)

    def each(self, name: str, arm: str | None = None) -> list[float]:
        """Every value of that name on that arm, in the order added.

        Raises:
            ClaimError: nothing of that name was measured; otherwise `all(...)` over nothing would hold.
        """
        return [figure.value for figure in self._found(name, arm)]

    def mean(self, name: str, arm: str | None = None) -> float:
        """The mean of `each(name, arm)`."""
        return statistics.fmean(self.each(name, arm))

    def min(self, name: str, arm: str | None = None) -> float:
        """The smallest of `each(name, arm)`; NaN if one of them is."""
        values = self.each(name, arm)
        return math.nan if any(map(math.isnan, values)) else min(values)

    def max(self, name: str, arm: str | None = None) -> float:
        """The largest of `each(name, arm)`; NaN if one of them is."""
        values = self.each(name, arm)
        return math.nan if any(map(math.isnan, values)) else max(values)

    def pairs(self, name: str, arm: str, other: str) -> list[tuple[float, float]]:
        """The values of two arms, seed by seed.

        Raises:
            ClaimError: one of the arms was not measured, or they were not measured on the same seeds.
        """
        first, second = self._found(name, arm), self._found(name, other)
        if [figure.seed for figure in first] != [figure.seed for figure in second]:
            raise ClaimError(f"{arm!r} and {other!r} were not measured on the same seeds of {name!r}")
        return [(one.value, two.value) for one, two in zip(first, second, strict=True)]

    def paired(self, name: str, arm: str, other: str) -> Paired:
        """The difference of two arms, `arm - other`, over the seeds that both have, with its 95 % interval.

        Fewer than three pairs say nothing about their spread: the interval is then from minus infinity to infinity.

        Raises:
            ClaimError: one of the arms was not measured, or they share no seed.
        """
        first, second = ({figure.seed: figure.value for figure in self._found(name, one)} for one in (arm, other))
        pairs = [(value, second[seed]) for seed, value in first.items() if seed in second]
        if not pairs:
            raise NotMeasured(f"{arm!r} and {other!r} share no seed of {name!r}")
        if len(pairs) < _FEWEST_PAIRS or not all(math.isfinite(a - b) for a, b in pairs):
            return Paired(statistics.fmean(a - b for a, b in pairs), -math.inf, math.inf, len(pairs))
        from pippin.metrics import paired_difference

        found = paired_difference([a for a, _ in pairs], [b for _, b in pairs])
        return Paired(found.value, found.low, found.high, found.n)

    def report(self, title: str) -> Report:
        """The figures as a table, one row per name and arm: the mean over the seeds and its standard deviation."""
        rows = []
        for label in dict.fromkeys(figure.label for figure in self.figures):
            values = self.each(label)
            unit = next(figure.unit for figure in self.figures if figure.label == label)
            finite = all(map(math.isfinite, values))  # of others there is neither a mean nor a deviation
            spread = (statistics.stdev(values) if finite else math.nan) if len(values) > 1 else None
            rows.append(Row(label, statistics.fmean(values), unit, spread))
        return Report(title, rows)

    def _found(self, name: str, arm: str | None) -> list[Figure]:
        label = _label(name, arm)
        found = [figure for figure in self.figures if figure.label == label]
        if not found:
            known = ", ".join(dict.fromkeys(repr(figure.label) for figure in self.figures)) or "nothing yet"
            raise NotMeasured(f"no figure is called {label!r}; measured: {known}")
        return found


@dataclass(frozen=True)
class Condition:
    """One condition of a rule.

    Attributes:
        name: in a word or two, unique in its rule.
        text: the condition in words, with its bound and the published number if there is one.
        predicate: whether it holds for an arm, from the evidence alone.
        headline: whether this is the sentence that the paper stands for.
        positive: whether the positive control is asked it; where no condition says so, those of the headline are asked.
    """

    name: str
    text: str
    predicate: Callable[[Evidence, str], object]
    headline: bool = False
    positive: bool = False

    def __post_init__(self) -> None:
        if not (self.name.strip() and self.text.strip()):
            raise ClaimError(f"condition {self.name!r} needs a name and a text")

    def ask(self, evidence: Evidence, arm: str) -> bool | None:
        """Whether it holds for that arm; None where a figure that it needs was not measured."""
        try:
            return _truth(self.name, self.predicate(evidence, arm))
        except NotMeasured:
            return None


class Asked(Protocol):
    """What the verdict needs to know of a condition."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def headline(self) -> bool:
        """Whether it is the sentence that the paper stands for."""
        ...

    @property
    def positive(self) -> bool:
        """Whether the positive control is asked it."""
        ...


class Rule(Protocol):
    """What the verdict needs to know of a rule, be it a claim's own or one read from an evidence file."""

    @property
    def method(self) -> str:
        """The arm that the claim is about."""
        ...

    @property
    def negative_controls(self) -> tuple[str, ...]:
        """Arms that must fail."""
        ...

    @property
    def positive_control(self) -> str | None:
        """An arm that must pass."""
        ...

    @property
    def conditions(self) -> Sequence[Asked]:
        """The conditions, in order."""
        ...


def verdict(rule: Rule, outcomes: Outcomes) -> tuple[Verdict, tuple[str, ...]]:
    """What the outcomes add up to, and what keeps it from `reproduced`.

    - `reproduced`: the method passes every condition, at least one of them the headline; each negative control fails
      at least one; the positive control passes.
    - `not reproduced`: the headline was measured and fails, or the method passes nothing.
    - `not run`: nothing was measured on the method.
    - `partly`: everything else.
    """
    own = outcomes.get(rule.method, {})
    held = {condition.name: own.get(condition.name) for condition in rule.conditions}
    if all(value is None for value in held.values()):
        return "not run", ()
    headline = [held[condition.name] for condition in rule.conditions if condition.headline]
    reasons = [f"{name}: fails" for name, value in held.items() if value is False]
    reasons += [f"{name}: not measured" for name, value in held.items() if value is None]
    if all(value is None for value in headline):
        reasons.append("the paper's headline is not measured")
    for control in rule.negative_controls:
        answers = [outcomes.get(control, {}).get(condition.name) for condition in rule.conditions]
        if False not in answers and None in answers:
            reasons.append(f"the negative control {control!r} was not measured")
        elif False not in answers:
            reasons.append(f"the negative control {control!r} passes the rule")
    if rule.positive_control is not None:
        found = outcomes.get(rule.positive_control, {})
        asked = [c.name for c in rule.conditions if c.positive] or [c.name for c in rule.conditions if c.headline]
        answers = [found.get(name) for name in asked]
        if None in answers:
            reasons.append(f"the positive control {rule.positive_control!r} was not measured")
        elif not all(answers):
            reasons.append(
                f"the positive control {rule.positive_control!r} fails: the experiment could not have worked"
            )
    measured = [value for value in headline if value is not None]
    if not any(held.values()) or (measured and not any(measured)):
        return "not reproduced", tuple(reasons)
    return ("partly" if reasons else "reproduced"), tuple(reasons)


def turned_away(rule: Rule, outcomes: Outcomes, control: str) -> list[str]:
    """The conditions that a negative control fails."""
    found = outcomes.get(control, {})
    return [condition.name for condition in rule.conditions if found.get(condition.name) is False]


@dataclass(frozen=True)
class Claim:
    """A published claim and the function that measures it.

    Attributes:
        id: lower-case words joined by hyphens; the name of the method's card, with a suffix where it has several.
        source: where it was published ("arXiv:2605.05750").
        headline: the published sentence or number, in short.
        setting: what we measure instead: model, data and sizes.
        measure: the function.
        conditions: the rule, at least one.
        method: the arm that the claim is about.
        negative_controls: arms that must fail the rule.
        positive_control: an arm that shows that the experiment could have worked.
        reported: what is measured without being judged.
        uses: modules of pippin, beside those that the file imports, whose change makes a run stale.
        version: of the rule; a new one where the old rule was bad.
        superseded: what was wrong with each earlier version.
    """

    id: str
    source: str
    headline: str
    setting: str
    measure: Callable[[Scale], Evidence]
    conditions: tuple[Condition, ...]
    method: str
    negative_controls: tuple[str, ...] = ()
    positive_control: str | None = None
    reported: str = ""
    uses: tuple[str, ...] = ()
    version: int = 1
    superseded: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.id):
            raise ClaimError(f"claim id {self.id!r} must be lower-case words joined by hyphens, like 'two-bit-qat'")
        for name in ("source", "headline", "setting", "method", "conditions"):
            value = getattr(self, name)
            if not (value.strip() if isinstance(value, str) else value):
                raise ClaimError(f"claim {self.id!r} has an empty {name!r}; it must stand before the first run")
        names = [condition.name for condition in self.conditions]
        if len(set(names)) < len(names):
            raise ClaimError(f"claim {self.id!r} has two conditions of one name: {names}")
        if missing := set(range(1, self.version)) - set(self.superseded):
            raise ClaimError(f"claim {self.id!r} must say what was wrong with version {min(missing)} of its rule")

    def ask(self, evidence: Evidence) -> Outcomes:
        """The rule, asked of the method and of every control."""
        controls = (*self.negative_controls, *([self.positive_control] if self.positive_control else []))
        return {arm: {c.name: c.ask(evidence, arm) for c in self.conditions} for arm in (self.method, *controls)}

    def __call__(self, scale: Scale) -> Evidence:
        """Measure at that scale, and ask the rule.

        Raises:
            ClaimError: the function returned no evidence, or no figure.
        """
        evidence = self.measure(scale)
        if not isinstance(evidence, Evidence):
            raise ClaimError(f"claim {self.id!r} returned {type(evidence).__name__} and not Evidence")
        if not evidence.figures:
            raise ClaimError(f"claim {self.id!r} measured nothing")
        evidence.outcomes = self.ask(evidence)
        evidence.verdict, evidence.reasons = verdict(self, evidence.outcomes)
        return evidence


class Prose:
    """The rule in prose of an old run: its parts are known by name alone, without a headline or controls."""

    method = ""
    negative_controls: tuple[str, ...] = ()
    positive_control: str | None = None

    def __init__(self, names: Sequence[str]) -> None:
        self.conditions = tuple(Condition(name, name, lambda evidence, arm: None) for name in names)


def claim(
    *,
    id: str,
    source: str,
    setting: str,
    headline: str,
    method: str,
    conditions: Sequence[Condition],
    negative_controls: Sequence[str] = (),
    positive_control: str | None = None,
    reported: str = "",
    uses: Sequence[str] = (),
    version: int = 1,
    superseded: Mapping[int, str] | None = None,
) -> Callable[[Callable[[Scale], Evidence]], Claim]:
    """Turn a measuring function into a `Claim`; the arguments are its attributes, and must be literals.

    Claims are listed by reading their files, not by importing them: every argument but the predicates is written out,
    or is an f-string over constants of the file.

    Raises:
        ClaimError: a badly formed id, an empty text, no condition, or conditions of one name.
    """

    def decorate(function: Callable[[Scale], Evidence]) -> Claim:
        return Claim(
            id, source, headline, setting, function, tuple(conditions), method, tuple(negative_controls),
            positive_control, reported, tuple(uses), version, dict(superseded or {}),
        )  # fmt: skip

    return decorate


def _label(name: str, arm: str | None) -> str:
    return name if arm is None else f"{name}, {arm}"


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.=-]+", "-", name).strip("-.") or "part"


def _truth(name: str, value: Any) -> bool:
    """A bool, also out of NumPy or torch; a bare number is more likely a forgotten comparison."""
    plain = value.item() if hasattr(value, "item") else value
    if not isinstance(plain, bool):
        raise ClaimError(f"condition {name!r} is {value!r}, not a truth value; compare it with its bound")
    return plain
