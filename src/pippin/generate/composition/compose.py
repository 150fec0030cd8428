r"""Composition of diffusion models, or conditions of one model: each part adds its difference from a background.

Notable here:
- the composed score is $s_b + \sum_i w_i (s_i - s_b)$; data and noise estimates are combined in the same way, so every
  sampler works
- the background decides whether the sum is valid, so there is no default: it must look like a part does wherever that
  part has no effect (the empty scene, not "any scene")
- score differences are orthogonal where each part changes something of its own; sampling measures that, and warns if it
  does not hold
- conditions of one model are one batch: one call of the network for all of them
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias, Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.core.errors import CompositionAtRisk, InvalidArgument
from pippin.generate.conditions import Conditioning, ConditioningSpec
from pippin.generate.contract import GeneratorOptions, prepare_sampling
from pippin.generate.diffusion.diffusion import Diffusion
from pippin.generate.diffusion.prediction import Estimate
from pippin.generate.diffusion.samplers import Denoiser, Langevin, Method, integrate
from pippin.generate.diffusion.schedules import NoiseSchedule
from pippin.generate.noise import Noise

_CPU = torch.device("cpu")
DOUBTFUL, AT_RISK = 0.1, 0.3
"""Thresholds of the clash: up to the first a composition is sound, above the second at risk."""
DECIDED = (0.5, 0.9)
"""Shares of the way to full noise between which clashes are measured: the content of an image is decided there;
nearer to the data, a background is evaluated on objects that it never saw, where it is meaningless."""


@dataclass(frozen=True)
class ComponentModel:
    """One part of a composition: an estimate of data and noise, with its schedule, shape and device.

    Attributes:
        denoiser: returns the estimate at a time.
        schedule: the noise schedule.
        shape: shape of one sample.
        device: device of the samples.
        model: the model of the estimate; None for a function.
        condition: condition of 1 sample or of each; None for an unconditional model.

    >>> from pippin.generate.diffusion.prediction import Estimate
    >>> nothing = ComponentModel(lambda x, t: Estimate(0 * x, x), NoiseSchedule.vp_cosine(), (2,))
    >>> compose([nothing]).sample(n=3, steps=4).shape
    torch.Size([3, 2])
    """

    denoiser: Denoiser
    schedule: NoiseSchedule
    shape: tuple[int, ...]
    device: torch.device = _CPU
    model: Diffusion | None = None
    condition: Conditioning | None = None

    @classmethod
    def of(cls, model: Diffusion, condition: Conditioning | None = None) -> ComponentModel:
        """A model under a condition; None for no condition.

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
    ) -> ComponentModel:
        """A part from a score of noised samples, such as that of a flow: the gradient of its log-density.

        Args:
            score: score of noised samples at a time of the schedule.
            schedule: the noise schedule; `NoiseSchedule.ve` for a flow that was trained on noisy data.
            shape: shape of one sample.
            device: device of the samples.
        """

        def denoiser(x: Tensor, t: float) -> Estimate:
            a, s = schedule.a(t), schedule.s(t)
            eps = -s * score(x, t)
            return Estimate((x - s * eps) / a, eps)

        return cls(denoiser, schedule, tuple(shape), torch.device(device))


Component: TypeAlias = ComponentModel | Diffusion | Conditioning


def compose(
    parts: Sequence[Component],
    background: Component | Literal["null"] | None = None,
    *,
    of: Diffusion | None = None,
    weights: Sequence[float] | None = None,
) -> Composed:
    r"""The composition $p_b(x) \prod_i (p_i(x) / p_b(x))^{w_i}$ of several models or conditions.

    With weights of 1 it is correct, that is, the distribution of each part's features is as if it were alone, if every
    part changes features of its own, leaves all others as in the background, and the background's features are
    independent of each other. Other weights change which samples are generated, not only how strongly.

    Args:
        parts: models, conditions of the model ``of``, or `ComponentModel`.
        background: the model or condition of an empty scene; "null" for the model's null condition. It is required with
            more than one part, because it decides the result: parts that each show exactly one object compose over the
            empty scene, and not over "any one object".
        of: the model of parts that are conditions.
        weights: weight of each part; None for 1.

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
        parts: the parts.
        background: the background; None for a single part.
        weights: weights of the parts.
        rows: number of samples of the conditions; None if they fit any number.
        metadata: as `pippin.generate.contract.Generator` has it.
        condition: none is read: `compose` sets the conditions.
    """

    parts: tuple[ComponentModel, ...]
    background: ComponentModel | None
    weights: tuple[float, ...]
    rows: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    condition: ClassVar[ConditioningSpec] = ConditioningSpec()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a sample."""
        return self.parts[0].shape

    @property
    def schedule(self) -> NoiseSchedule:
        """The noise schedule of all parts."""
        return self.parts[0].schedule

    def __call__(self, x: Float[Tensor, "n ..."], t: float) -> Estimate:
        """Estimate of data and noise in samples at time t."""
        return self.combined(self.estimates(x, t))

    def estimates(self, x: Float[Tensor, "n ..."], t: float) -> list[Estimate]:
        """The estimate of each part, and last of the background; one call for all conditions of one model."""
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
            joined = Conditioning.concatenate([c for c in conditions if c is not None])
            both = part.model.estimate(torch.cat([x] * len(same)), t, joined)
            found |= {i: Estimate(*each) for i, *each in zip(same, *(e.chunk(len(same)) for e in both), strict=True)}
        return [found[i] for i in range(len(everyone))]

    def combined(self, estimates: Sequence[Estimate]) -> Estimate:
        """The composition of the results of `estimates`."""
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
        condition: Conditioning | None = None,
        n: int | None = None,
        *,
        method: Method | None = None,
        corrector: Langevin | None = None,
        **options: Unpack[GeneratorOptions],
    ) -> Float[Tensor, "n ..."]:
        """Integrate from noise to samples of the composition.

        Args:
            condition: must be None; the parts have theirs.
            n: number of samples; None for as many as the parts' conditions have.
            method: of `pippin.generate.diffusion.samplers.integrate`; None for the first part's own, or "heun".
            corrector: Langevin steps at a small time. They converge to the composition where the path from noise does
                not: where parts are independent in features that are not a rotation of the samples' coordinates.
            **options: see `GeneratorOptions`; ``steps`` are those of the solver, None for the first part's own or 50;
                ``guidance`` must be 1, as the parts' weights do the same.

        Raises:
            InvalidArgument: numbers out of range, or another number of samples than the conditions have.
            NonFiniteSample: sampling produced infinite values or NaN.

        Warns:
            CompositionAtRisk: parts changed the same things along the path (a clash above 0.3), and there was no
                corrector.
        """
        first = self.parts[0]
        call = prepare_sampling(self.condition, first.device, condition, self.rows if n is None else n, **options)
        if self.rows is not None and call.n != self.rows:
            raise InvalidArgument(f"n={call.n} samples for conditions of {self.rows}; leave n out")
        watch = _Watch(self)
        config = None if first.model is None else first.model.config
        grid = self.schedule.grid(call.steps or (50 if config is None else config.steps))
        noise = call.noise()
        x = integrate(
            watch,
            self.schedule,
            self.schedule.s(grid[0]) * noise.normal(self.shape),
            grid,
            method=method or ("heun" if config is None else config.method),
            noise=noise,
            on_step=call.on_step,
            corrector=corrector,
        )
        if corrector is None or not corrector.steps:
            watch.warn()
        return x


@dataclass(frozen=True)
class Composability:
    """Whether parts compose, judged by their scores.

    Attributes:
        cosine: cosine of the differences of each pair of parts from the background, over samples, times and
            coordinates; 0 for parts that change different things.
        clash: mean absolute cosine per sample, which decides the verdict: directions that agree in one sample and
            disagree in another are not orthogonal in either.
        overlap: overlap of the sizes of these differences by position, 0 to 1: 1 for parts that change the same places,
            which is harmless only in orthogonal directions (colors, for example).
        by_time: the largest clash of a pair, at each time.
        verdict: "sound", "doubtful" or "at risk".
        advice: what to do, as sentences.
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
        """The figures as JSON values."""
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
    r"""Check whether a composition is valid, before sampling.

    If every part changes features of its own, the differences $d_i = s_i - s_b$ are orthogonal. Their cosine is
    measured on samples noised to several times, where each time is weighted by its noise (differences of the estimated
    noise).

    Args:
        composed: at least one part; one by itself is always sound.
        x: samples like those of the composition or of the parts; None takes the states while sampling ``n`` samples in
            20 steps.
        times: times of the measurement, above 0; None for 0.5, 0.65 and 0.8 of the way to full noise. Not used without
            x: then it is measured between `DECIDED`.
        n: number of samples, without x.
        seed: seed of the noise.

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
    if not times or any(not 0 < t <= schedule.max_time for t in times):
        raise InvalidArgument(f"times {times} must be above 0 and at most {schedule.max_time}, where sampling begins")
    if tuple(x.shape[1:]) != composed.shape:
        raise InvalidArgument(f"samples of shape {tuple(x.shape[1:])}; the parts' are {composed.shape}")
    noise = Noise(len(x), seed=seed, device=x.device)
    watch = _Watch(composed, everywhere=True)
    for t in times:
        watch(schedule.a(t) * x + schedule.s(t) * noise.normal(composed.shape), t)
    return watch.report()


class _Watch:
    """A denoiser that measures during sampling how far the parts change the same things."""

    def __init__(self, composed: Composed, *, everywhere: bool = False) -> None:
        self.composed = composed
        self.between = (0.0, math.inf) if everywhere else tuple(composed.schedule.time(share) for share in DECIDED)
        self.sums: dict[float, Tensor] = {}

    def __call__(self, x: Tensor, t: float) -> Estimate:
        estimates = self.composed.estimates(x, t)
        if len(estimates) > 2 and self.between[0] <= t <= self.between[1]:
            away = torch.stack([part.eps - estimates[-1].eps for part in estimates[:-1]]).double()
            # the channels of an image are one place
            size = (away.norm(dim=2) if away.ndim == 5 else away.abs()).flatten(2)
            inner = torch.einsum("ind,jnd->nij", away.flatten(2), away.flatten(2))
            length = inner.diagonal(dim1=1, dim2=2).sqrt()
            lengths = length[:, :, None] * length[:, None]
            here = torch.stack([inner, inner.abs(), lengths, torch.einsum("ind,jnd->nij", size, size)]).sum(1)
            self.sums[t] = self.sums[t] + here if t in self.sums else here
        return self.composed.combined(estimates)

    def report(self) -> Composability:
        """The measured figures."""
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
        """Warn if the parts changed the same things."""
        if not self.sums:
            return
        report = self.report()
        if report.verdict == "at risk":
            warnings.warn(CompositionAtRisk(" ".join(report.advice)), stacklevel=3)


def _advice(clash: Tensor, overlap: Tensor, verdict: str) -> tuple[str, ...]:
    """Interpretation of the figures, as sentences."""
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


def _nothing(model: Diffusion) -> Conditioning:
    size = (model.shape[-2], model.shape[-1])
    return model.condition.null_condition(1, size, next(model.parameters()).device)


def _for(condition: Conditioning | None, n: int) -> Conditioning | None:
    """A condition of one sample, repeated for all n."""
    if condition is None or len(condition) == n:
        return condition
    if len(condition) != 1:
        raise InvalidArgument(f"{n} samples for a condition of {len(condition)}")
    return condition.select(torch.zeros(n, dtype=torch.long))


def _part(one: Component, of: Diffusion | None) -> ComponentModel:
    if isinstance(one, ComponentModel):
        return one
    if isinstance(one, Conditioning):
        if of is None:
            raise InvalidArgument("a part is a condition, of no model; give the model as of=...")
        return ComponentModel.of(of, one)
    return ComponentModel.of(one)


def _background(
    one: Component | Literal["null"] | None, of: Diffusion | None, first: ComponentModel
) -> ComponentModel | None:
    if one is None:
        return None
    if one != "null":
        return _part(one, of)
    model = of if of is not None else first.model
    if model is None or not model.condition.null:
        raise InvalidArgument(
            "background='null', but the model was not trained without its condition; give a background"
        )
    return ComponentModel.of(model)


def _check_alike(first: ComponentModel, other: ComponentModel, name: str) -> None:
    """Refuse a part that is incompatible with the first."""
    for what, one, two in (
        ("shape", first.shape, other.shape),
        ("device", first.device, other.device),
        ("schedule", (first.schedule.kind, first.schedule.betas), (other.schedule.kind, other.schedule.betas)),
    ):
        if one != two:
            raise InvalidArgument(f"{name} has the {what} {two}, part 0 has {one}; only the same can be composed")
