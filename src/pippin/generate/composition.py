r"""Several diffusion models, or conditions of one, in one picture: each adds what it has and a background lacks.

Notable here:
- the composed score is $s_b + \sum_i w_i (s_i - s_b)$; data and noise follow the same rule, so every sampler can use it
- the background decides whether the sum means anything, so there is no default: it must look as a part does wherever
  that part has nothing to say (the empty scene, not "any scene")
- scores that are added are orthogonal where each part changes something of its own; sampling measures that as it goes,
  and says so when it does not hold
- conditions of one model are one batch: one call of the network for all of them
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.core.errors import CompositionAtRisk, InvalidArgument
from pippin.generate.condition import Condition, ConditionSpec
from pippin.generate.contract import OnStep, prepare
from pippin.generate.diffusion import Diffusion
from pippin.generate.noise import Noise
from pippin.generate.prediction import Estimate
from pippin.generate.samplers import Denoiser, Langevin, Method, integrate
from pippin.generate.schedules import NoiseSchedule

_CPU = torch.device("cpu")
DOUBTFUL, AT_RISK = 0.1, 0.3
"""Clashes of parts: up to the first a composition is sound, above the second at risk."""
DECIDED = (0.5, 0.9)
"""Shares of the way to full noise between which clashes are measured: what a picture shows is decided there, and nearer
to the data a background is asked about objects that it never saw, of which it has nothing to say."""


@dataclass(frozen=True)
class Part:
    """One model's say: an estimate of data and noise, and what has to be the same in all parts.

    Attributes:
        denoiser: the estimate at a time.
        schedule: by which samples are noised.
        shape: of one sample.
        device: where samples are to be.
        model: whose estimate it is; None for one that was given as a function.
        condition: of 1 sample or of each; None for a model without one.

    >>> from pippin.generate.prediction import Estimate
    >>> nothing = Part(lambda x, t: Estimate(0 * x, x), NoiseSchedule.vp_cosine(), (2,))
    >>> compose([nothing]).sample(n=3, steps=4).shape
    torch.Size([3, 2])
    """

    denoiser: Denoiser
    schedule: NoiseSchedule
    shape: tuple[int, ...]
    device: torch.device = _CPU
    model: Diffusion | None = None
    condition: Condition | None = None

    @classmethod
    def of(cls, model: Diffusion, condition: Condition | None = None) -> Part:
        """A model under a condition; None says nothing.

        Raises:
            InvalidArgument: a condition that the model does not read.
        """
        spec = model.condition
        device = next(model.parameters()).device
        if condition is None and not spec.empty:
            condition = _nothing(model)
        if condition is not None:
            spec.check(condition)
            condition = condition.to(device)

        def denoiser(x: Tensor, t: float) -> Estimate:
            return model.estimate(x, t, _for(condition, len(x)))

        return cls(denoiser, model.config.schedule, tuple(model.shape), device, model, condition)

    @classmethod
    def scored(
        cls,
        score: Callable[[Tensor, float], Tensor],
        schedule: NoiseSchedule,
        shape: tuple[int, ...],
        *,
        device: torch.device | str = "cpu",
    ) -> Part:
        """Anything that has a score of noised samples, such as a flow: the gradient of its log-density.

        Args:
            score: of noised samples at a time of the schedule.
            schedule: by which they are noised; `NoiseSchedule.ve` for a flow that was trained on noisy data.
            shape: of one sample.
            device: where they are.
        """

        def denoiser(x: Tensor, t: float) -> Estimate:
            a, s = schedule.a(t), schedule.s(t)
            eps = -s * score(x, t)
            return Estimate((x - s * eps) / a, eps)

        return cls(denoiser, schedule, tuple(shape), torch.device(device))


Component: TypeAlias = Part | Diffusion | Condition


def compose(
    parts: Sequence[Component],
    background: Component | Literal["null"] | None = None,
    *,
    of: Diffusion | None = None,
    weights: Sequence[float] | None = None,
) -> Composed:
    r"""The composition $p_b(x) \prod_i (p_i(x) / p_b(x))^{w_i}$ of several models or conditions.

    With weights of 1 it is right, which means that each part sees its own features as if it were alone, where every
    part changes features of its own, leaves all others as the background has them, and the background's features are
    independent of each other. Other weights change what is drawn, not only how strongly.

    Args:
        parts: models, conditions of the model ``of``, or `Part`.
        background: what the parts have in common: the model or condition of an empty scene; "null" for the model's
            condition that says nothing. It must be given with more than one part, because it decides what comes out:
            parts that each show exactly one object compose over the empty scene, and not over "any one object".
        of: the model of parts that are conditions.
        weights: of each part; None for 1.

    Raises:
        InvalidArgument: no part, no background for several parts or for a weight that is not 1, another number of
            weights than of parts, parts that differ in schedule, shape or device, a condition without a model, a null
            background of a model that has none, or conditions of different numbers of samples.

    Source: Bradley et al. 2025, arXiv:2502.04549, definition of the composition operator.
    """
    if not parts:
        raise InvalidArgument("a composition of no parts; give at least one")
    made = [_part(one, of) for one in parts]
    chosen = [1.0] * len(made) if weights is None else [float(weight) for weight in weights]
    if len(chosen) != len(made):
        raise InvalidArgument(f"{len(chosen)} weights for {len(made)} parts; give one for each")
    if background is None and (len(made) > 1 or chosen[0] != 1.0):
        raise InvalidArgument(
            f"{len(made)} parts with weights {chosen} need a background: what all of them have in common, usually the "
            "empty scene; background='null' is the model's condition that says nothing"
        )
    behind = _background(background, of, made[0])
    for index, part in enumerate([*made, *([] if behind is None else [behind])]):
        _check_alike(made[0], part, f"part {index}" if index < len(made) else "the background")
    rows = {len(part.condition) for part in [*made, behind] if part is not None and part.condition is not None} - {1}
    if len(rows) > 1:
        raise InvalidArgument(f"the conditions of the parts are of {sorted(rows)} samples; give 1 or the same number")
    return Composed(tuple(made), behind, tuple(chosen), rows.pop() if rows else None)


@dataclass(frozen=True)
class Composed:
    """A composition: a denoiser for any sampler, and a generator by itself.

    Attributes:
        parts: what is added.
        background: what it is added to; None for a single part.
        weights: of the parts.
        rows: samples that the conditions are of; None where they suit any number.
        facts: as `pippin.generate.contract.Generator` has it.
        condition: none is read: what is drawn is chosen by `compose`.
    """

    parts: tuple[Part, ...]
    background: Part | None
    weights: tuple[float, ...]
    rows: int | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    condition: ClassVar[ConditionSpec] = ConditionSpec()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample."""
        return self.parts[0].shape

    @property
    def schedule(self) -> NoiseSchedule:
        """By which all parts noise samples."""
        return self.parts[0].schedule

    def __call__(self, x: Float[Tensor, "n ..."], t: float) -> Estimate:
        """Data and noise in samples of time t."""
        return self.combined(self.estimates(x, t))

    def estimates(self, x: Float[Tensor, "n ..."], t: float) -> list[Estimate]:
        """What each part says, and last the background; one call for all conditions of one model."""
        if self.rows is not None and len(x) != self.rows:
            raise InvalidArgument(f"{len(x)} samples for conditions of {self.rows}")
        everyone = [*self.parts, *([] if self.background is None else [self.background])]
        found: dict[int, Estimate] = {}
        for index, part in enumerate(everyone):
            if index in found:
                continue
            same = [i for i in range(index, len(everyone)) if everyone[i].model is part.model is not None]
            apart = part.model is None or getattr(part.model.network, "mixes_samples", False)
            if len(same) < 2 or apart or part.model is None or part.condition is None:
                found[index] = part.denoiser(x, t)
                continue
            conditions = [_for(everyone[i].condition, len(x)) for i in same]
            joined = Condition.joined([c for c in conditions if c is not None])
            both = part.model.estimate(torch.cat([x] * len(same)), t, joined)
            found |= {i: Estimate(*each) for i, *each in zip(same, *(e.chunk(len(same)) for e in both), strict=True)}
        return [found[i] for i in range(len(everyone))]

    def combined(self, estimates: Sequence[Estimate]) -> Estimate:
        """The composition of what `estimates` gave."""
        if self.background is None:
            return estimates[0]
        *own, (x0, eps) = estimates
        for weight, part in zip(self.weights, own, strict=True):
            x0 = x0 + weight * (part.x0 - estimates[-1].x0)
            eps = eps + weight * (part.eps - estimates[-1].eps)
        return Estimate(x0, eps)

    @torch.no_grad()
    def sample(
        self,
        condition: Condition | None = None,
        n: int | None = None,
        *,
        steps: int | None = None,
        guidance: float = 1.0,
        seed: int = 0,
        on_step: OnStep | None = None,
        method: Method | None = None,
        corrector: Langevin | None = None,
    ) -> Float[Tensor, "n ..."]:
        """Draw samples.

        Args:
            condition: must be None; the parts have theirs.
            n: samples; None for as many as the parts' conditions have.
            steps: of the sampler; None for the first part's own, or 50.
            guidance: must be 1; the parts' weights do the same.
            seed: sample i depends on ``seed + i`` alone.
            on_step: see `OnStep`.
            method: of `pippin.generate.samplers.integrate`; None for the first part's own, or "heun".
            corrector: Langevin steps at a small time. They lead to the composition where the path to it does not: where
                parts are independent in features that are no rotation of the samples' coordinates.

        Raises:
            InvalidArgument: numbers out of range, or another number of samples than the conditions are of.
            NonFiniteSample: the sampling ended in infinite values or NaN.

        Warns:
            CompositionAtRisk: parts changed the same things along the way (a clash above 0.3), and nothing corrected.
        """
        _, n = prepare(self.condition, condition, self.rows if n is None else n, guidance, self.parts[0].device)
        if self.rows is not None and n != self.rows:
            raise InvalidArgument(f"n={n} samples for conditions of {self.rows}; leave n out")
        watch = _Watch(self)
        config = None if self.parts[0].model is None else self.parts[0].model.config
        steps = steps if steps is not None else 50 if config is None else config.steps
        grid = self.schedule.grid(steps)
        noise = Noise(n, seed=seed, device=self.parts[0].device)
        x = self.schedule.s(grid[0]) * noise.normal(self.shape)
        how: Method = method or ("heun" if config is None else config.method)
        x = integrate(watch, self.schedule, x, grid, method=how, noise=noise, on_step=on_step, corrector=corrector)
        if corrector is None or not corrector.steps:
            watch.warn()
        return x


@dataclass(frozen=True)
class Composability:
    """Whether parts compose, as far as their scores tell.

    Attributes:
        cosine: of the differences that each pair of parts makes to the background, over samples, times and coordinates;
            0 for parts that change different things.
        clash: the mean size of these cosines, sample by sample: what the verdict goes by, as directions that agree in
            one sample and disagree in another are not orthogonal in either.
        overlap: of the sizes of these differences, place by place, 0 to 1: 1 for parts that change the same places,
            which is harmless only where they do it in orthogonal directions (colours, say).
        by_time: the largest clash of a pair, at each time.
        verdict: "sound", "doubtful" or "at risk".
        advice: what to do, in sentences.
    """

    cosine: Float[Tensor, "parts parts"]
    clash: Float[Tensor, "parts parts"]
    overlap: Float[Tensor, "parts parts"]
    by_time: tuple[tuple[float, float], ...]
    verdict: Literal["sound", "doubtful", "at risk"]
    advice: tuple[str, ...]

    @property
    def largest(self) -> float:
        """The largest clash of two different parts; 0 for one part."""
        return float(_pairs(self.clash).max()) if len(self.clash) > 1 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return {
            "cosine": self.cosine.tolist(),
            "clash": self.clash.tolist(),
            "overlap": self.overlap.tolist(),
            "by_time": [list(row) for row in self.by_time],
            "largest": self.largest,
            "verdict": self.verdict,
            "advice": list(self.advice),
        }

    def __str__(self) -> str:
        def table(values: Tensor) -> list[str]:
            return ["  " + " ".join(f"{value:6.2f}" for value in row) for row in values.tolist()]

        lines = [f"composition: {self.verdict} (largest clash {self.largest:.2f})"]
        lines += ["cosine of what the parts change", *table(self.cosine), "overlap of where", *table(self.overlap)]
        return "\n".join([*lines, *(f"- {sentence}" for sentence in self.advice)])


@torch.no_grad()
def composability(
    composed: Composed,
    x: Float[Tensor, "n ..."] | None = None,
    *,
    times: Sequence[float] | None = None,
    n: int = 16,
    seed: int = 0,
) -> Composability:
    r"""Say whether a composition will work, before anything is drawn by it.

    Where every part changes features of its own the differences $d_i = s_i - s_b$ are orthogonal. Their cosine is
    measured on samples noised to several times, where each time counts by its noise (differences of the estimated
    noise).

    Args:
        composed: at least one part; one by itself is always sound.
        x: samples that are like what is to be drawn, or like the parts'; None takes the states of a sampling of
            ``n`` samples in 20 steps.
        times: at which it is measured, above 0; None for 0.5, 0.65 and 0.8 of the way to full noise. Not used without
            x: a sampling is measured between `DECIDED`.
        n: samples, without x.
        seed: of the noise.

    Raises:
        InvalidArgument: times outside the schedule, or samples of another shape.

    Source: Bradley et al. 2025, arXiv:2502.04549, on orthogonality of score differences.
    """
    schedule = composed.schedule
    if x is None:
        watch = _Watch(composed)
        rows = n if composed.rows is None else composed.rows
        noise = Noise(rows, seed=seed, device=composed.parts[0].device)
        grid = schedule.grid(20)
        start = schedule.s(grid[0]) * noise.normal(composed.shape)
        integrate(watch, schedule, start, grid, method="ddim", noise=noise)
        return watch.report()
    times = [schedule.time(share) for share in (0.5, 0.65, 0.8)] if times is None else list(times)
    if not times or any(not 0 < t <= schedule.start for t in times):
        raise InvalidArgument(f"times {times} must be above 0 and at most {schedule.start}, where sampling begins")
    if tuple(x.shape[1:]) != composed.shape:
        raise InvalidArgument(f"samples of shape {tuple(x.shape[1:])}; the parts' are {composed.shape}")
    noise = Noise(len(x), seed=seed, device=x.device)
    watch = _Watch(composed, everywhere=True)
    for t in times:
        watch(schedule.a(t) * x + schedule.s(t) * noise.normal(composed.shape), t)
    return watch.report()


class _Watch:
    """A denoiser that measures, on the way, how far the parts change the same things."""

    def __init__(self, composed: Composed, *, everywhere: bool = False) -> None:
        self.composed = composed
        self.between = (0.0, math.inf) if everywhere else tuple(composed.schedule.time(share) for share in DECIDED)
        self.sums: dict[float, Tensor] = {}

    def __call__(self, x: Tensor, t: float) -> Estimate:
        estimates = self.composed.estimates(x, t)
        if len(estimates) > 2 and self.between[0] <= t <= self.between[1]:
            away = torch.stack([part.eps - estimates[-1].eps for part in estimates[:-1]]).double()
            # of a picture, channels are one place
            size = (away.norm(dim=2) if away.ndim == 5 else away.abs()).flatten(2)
            inner = torch.einsum("ind,jnd->nij", away.flatten(2), away.flatten(2))
            length = inner.diagonal(dim1=1, dim2=2).sqrt()
            lengths = length[:, :, None] * length[:, None]
            here = torch.stack([inner, inner.abs(), lengths, torch.einsum("ind,jnd->nij", size, size)]).sum(1)
            self.sums[t] = self.sums[t] + here if t in self.sums else here
        return self.composed.combined(estimates)

    def report(self) -> Composability:
        """What was measured."""
        k = len(self.composed.parts)
        if not self.sums:
            one = torch.ones(k, k)
            return Composability(one, one, one, (), "sound", ("A single part composes with any background.",))
        inner, sizes, lengths, places = torch.stack(list(self.sums.values())).sum(0)
        clash = (sizes / lengths.clamp_min(1e-30)).float()
        each = ((t, _pairs(sums[1] / sums[2].clamp_min(1e-30))) for t, sums in sorted(self.sums.items()))
        by_time = tuple((t, float(values.max())) for t, values in each)
        largest = float(_pairs(clash).max())
        verdict: Literal["sound", "doubtful", "at risk"] = (
            "sound" if largest <= DOUBTFUL else "doubtful" if largest <= AT_RISK else "at risk"
        )
        overlap = _cosine(places)
        return Composability(_cosine(inner), clash, overlap, by_time, verdict, _advice(clash, overlap, verdict))

    def warn(self) -> None:
        """Say it where the parts changed the same things."""
        if not self.sums:
            return
        report = self.report()
        if report.verdict == "at risk":
            warnings.warn(CompositionAtRisk(" ".join(report.advice)), stacklevel=3)


def _advice(clash: Tensor, overlap: Tensor, verdict: str) -> tuple[str, ...]:
    """What the figures mean, in sentences."""
    pairs = torch.triu_indices(len(clash), len(clash), 1)
    first, second = pairs[:, int(_pairs(clash).argmax())].tolist()
    value, same = float(clash[first, second]), float(overlap[first, second])
    if verdict == "sound":
        said = f"The parts change different things (largest cosine {value:.2f}): adding their scores is right."
        return (said, "They share places, in orthogonal directions.") if same > 0.5 else (said,)
    return (
        f"Parts {first} and {second} change the same things (cosine {value:.2f}, {same:.0%} of it in the same places).",
        "If the background shows what the parts are about, as 'any one object' does, choose one without: the empty "
        "scene.",
        "If the parts themselves meet, choose others, or put them further apart.",
        "If they are independent in features that are mixed in the samples, Langevin steps at a small time repair the "
        "result: corrector=Langevin(steps=..., step_size=..., t=...).",
    )


def _cosine(gram: Tensor) -> Tensor:
    size = gram.diagonal().sqrt()
    return (gram / (size[:, None] * size[None]).clamp_min(1e-30)).float()


def _pairs(values: Tensor) -> Tensor:
    """The values of all pairs of different parts."""
    rows, columns = torch.triu_indices(len(values), len(values), 1)
    return values[rows, columns]


def _nothing(model: Diffusion) -> Condition:
    size = (model.shape[-2], model.shape[-1])
    return model.condition.nothing(1, size, next(model.parameters()).device)


def _for(condition: Condition | None, n: int) -> Condition | None:
    """A condition of one sample for all n."""
    if condition is None or len(condition) == n:
        return condition
    if len(condition) != 1:
        raise InvalidArgument(f"{n} samples for a condition of {len(condition)}")
    return condition.rows(torch.zeros(n, dtype=torch.long))


def _part(one: Component, of: Diffusion | None) -> Part:
    if isinstance(one, Part):
        return one
    if isinstance(one, Condition):
        if of is None:
            raise InvalidArgument("a part is a condition, of no model; give the model as of=...")
        return Part.of(of, one)
    return Part.of(one)


def _background(one: Component | Literal["null"] | None, of: Diffusion | None, first: Part) -> Part | None:
    if one is None:
        return None
    if one != "null":
        return _part(one, of)
    model = of if of is not None else first.model
    if model is None or not model.condition.null:
        raise InvalidArgument(
            "background='null', but the model was not trained without its condition; give a background"
        )
    return Part.of(model)


def _check_alike(first: Part, other: Part, name: str) -> None:
    """Refuse a part that cannot be added to the first."""
    for what, one, two in (
        ("shape", first.shape, other.shape),
        ("device", first.device, other.device),
        ("schedule", (first.schedule.kind, first.schedule.betas), (other.schedule.kind, other.schedule.betas)),
    ):
        if one != two:
            raise InvalidArgument(f"{name} has the {what} {two}, part 0 has {one}; only the same can be composed")
