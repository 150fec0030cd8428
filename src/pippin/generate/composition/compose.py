r"""Composition of diffusion models, or of conditions of one model: each adds its score difference from a background.

Notable here:
- the composed score is $s_b + \sum_i w_i (s_i - s_b)$; data and noise estimates are combined in the same way, so every
  sampler works
- the background decides whether the sum is valid, so there is no default: it must have the distribution of each part in
  the features that this part does not control (the empty scene, not "any scene")
- the score differences of parts that control different features are orthogonal; sampling measures that, and warns if it
  does not hold
- the conditions of one model are evaluated as one batch
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
"""Thresholds of the largest clash: a composition is "sound" up to the first, and "at risk" above the second."""
DECIDED = (0.5, 0.9)
"""Range of times, as fractions of the schedule, where clashes are measured: the content of an image is decided there.
At smaller times the background is evaluated on images with objects, which are out of its distribution."""


@dataclass(frozen=True)
class ComponentModel:
    """One part of a composition: a denoiser with its schedule, sample shape and device.

    Attributes:
        denoiser: estimates data and noise at a time.
        schedule: the noise schedule.
        shape: shape of one sample.
        device: device of the samples.
        model: the diffusion model behind the denoiser; None for any other function.
        condition: condition of one sample or of each; None for an unconditional model.

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
        """A part from a diffusion model under a condition; None for its null condition.

        Raises:
            InvalidArgument: a condition that the model does not read.
        """
        spec = model.condition
        device = next(model.parameters()).device
        if condition is None and not spec.empty:
            condition = _null_condition(model)
        if condition is not None:
            spec.check(condition)
            condition = condition.to(device)

        def denoiser(x: Tensor, t: float) -> Estimate:
            return model.estimate(x, t, _expanded(condition, len(x)))

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
        """A part from a score function, such as that of a flow: the gradient of the log density of noised samples.

        Args:
            score: score of noised samples at a time of the schedule.
            schedule: the noise schedule; `NoiseSchedule.ve` for a flow that was trained on noisy data.
            shape: shape of one sample.
            device: device of the samples.
        """

        def denoiser(x: Tensor, t: float) -> Estimate:
            a, s = schedule.a(t), schedule.s(t)
            eps = -s * score(x, t)  # the score is -eps / s
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

    With weights of 1 it is a projective composition, in which the features of each part are distributed as in the part
    alone, if every part controls features of its own, leaves all others as in the background, and the features are
    independent in the background. Other weights change the distribution, not only the strength of a part.

    Args:
        parts: models, conditions of the model ``of``, or `ComponentModel`.
        background: the model or condition of an empty scene; "null" for the model's null condition. It is required with
            more than one part: parts that each show exactly one object compose over the empty scene, and not over "any
            one object".
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
    models = [_component(part, of) for part in parts]
    factors = [1.0] * len(models) if weights is None else [float(weight) for weight in weights]
    if len(factors) != len(models):
        raise InvalidArgument(f"{len(factors)} weights for {len(models)} parts; give one for each")
    if background is None and (len(models) > 1 or factors[0] != 1.0):
        raise InvalidArgument(
            f"{len(models)} parts with weights {factors} need a background: what all of them have in common, usually "
            "the empty scene; background='null' is the model's null condition"
        )
    base = _background(background, of, models[0])
    for index, model in enumerate([*models, *([] if base is None else [base])]):
        _check_compatible(models[0], model, f"part {index}" if index < len(models) else "the background")
    sizes = {len(m.condition) for m in [*models, base] if m is not None and m.condition is not None} - {1}
    if len(sizes) > 1:
        raise InvalidArgument(f"the conditions of the parts are of {sorted(sizes)} samples; give 1 or the same number")
    return Composed(tuple(models), base, tuple(factors), sizes.pop() if sizes else None)


@dataclass(frozen=True)
class Composed:
    """A composition: a denoiser for any sampler, and a generator.

    Attributes:
        parts: the parts.
        background: the background; None for a single part.
        weights: weights of the parts.
        num_samples: number of samples of the parts' conditions; None if they fit any number.
        metadata: see `pippin.generate.contract.Generator`.
        condition: empty, since the parts have their conditions.
    """

    parts: tuple[ComponentModel, ...]
    background: ComponentModel | None
    weights: tuple[float, ...]
    num_samples: int | None = None
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
        """The composed estimate of data and noise in samples at time t."""
        return self.combined(self.estimates(x, t))

    def estimates(self, x: Float[Tensor, "n ..."], t: float) -> list[Estimate]:
        """The estimate of each part, then that of the background; the conditions of one model are one batch.

        Raises:
            InvalidArgument: another number of samples than the conditions have.
        """
        if self.num_samples is not None and len(x) != self.num_samples:
            raise InvalidArgument(f"{len(x)} samples for conditions of {self.num_samples}; give as many samples")
        components = [*self.parts, *([] if self.background is None else [self.background])]
        estimates: dict[int, Estimate] = {}
        for index, part in enumerate(components):
            if index in estimates:
                continue
            same = [i for i in range(index, len(components)) if components[i].model is part.model is not None]
            separate = part.model is None or getattr(part.model.network, "mixes_samples", False)
            if len(same) < 2 or separate or part.model is None or part.condition is None:
                estimates[index] = part.denoiser(x, t)
                continue
            conditions = [_expanded(components[i].condition, len(x)) for i in same]
            batch = Conditioning.concatenate([c for c in conditions if c is not None])
            joint = part.model.estimate(torch.cat([x] * len(same)), t, batch)  # (len(same) * n, ...)
            chunks = (tensor.chunk(len(same)) for tensor in joint)
            estimates |= {i: Estimate(*chunk) for i, *chunk in zip(same, *chunks, strict=True)}
        return [estimates[i] for i in range(len(components))]

    def combined(self, estimates: Sequence[Estimate]) -> Estimate:
        r"""Combine the results of `estimates`: $e_b + \sum_i w_i (e_i - e_b)$ for data and for noise."""
        if self.background is None:
            return estimates[0]
        *parts, (x0, eps) = estimates
        for weight, part in zip(self.weights, parts, strict=True):
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
            condition: must be None; the parts have their conditions.
            n: number of samples; None for as many as the parts' conditions have.
            method: see `pippin.generate.diffusion.samplers.integrate`; None for that of the first part's model, or
                "heun".
            corrector: Langevin steps at a small time. They converge to the composition where integration from noise
                does not: where the parts' features are independent, but are not a rotation of the samples' coordinates.
            **options: see `GeneratorOptions`; ``steps`` are those of the solver, None for those of the first part's
                model, or 50; ``guidance`` must be 1, since the parts' weights have this effect.

        Raises:
            InvalidArgument: numbers out of range, or another number of samples than the conditions have.
            NonFiniteSample: sampling produced infinite values or NaN.

        Warns:
            CompositionAtRisk: parts changed the same features during sampling (a clash above 0.3), and there was no
                corrector.
        """
        first = self.parts[0]
        n = self.num_samples if n is None else n
        call = prepare_sampling(self.condition, first.device, condition, n, **options)
        if self.num_samples is not None and call.n != self.num_samples:
            raise InvalidArgument(f"n={call.n} samples for conditions of {self.num_samples}; leave n out")
        monitor = _ClashMonitor(self)
        config = None if first.model is None else first.model.config
        grid = self.schedule.grid(call.steps or (50 if config is None else config.steps))
        noise = call.noise()
        x = integrate(
            monitor,
            self.schedule,
            self.schedule.s(grid[0]) * noise.normal(self.shape),
            grid,
            method=method or ("heun" if config is None else config.method),
            noise=noise,
            on_step=call.on_step,
            corrector=corrector,
        )
        if corrector is None or not corrector.steps:
            monitor.warn()
        return x


@dataclass(frozen=True)
class Composability:
    """Whether parts compose, by the orthogonality of their score differences.

    Attributes:
        cosine: cosine of the score differences of each pair of parts, over samples, times and coordinates, -1 to 1; 0
            for parts that change different features.
        clash: mean absolute cosine per sample, 0 to 1, which decides the verdict: directions that agree in one sample
            and disagree in another are orthogonal in neither.
        overlap: cosine of the magnitudes of the differences by position, 0 to 1: 1 for parts that change the same
            positions, which is harmless only in orthogonal directions (colors, for example).
        by_time: time, and the largest clash of a pair at that time.
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
        """The largest clash of two parts; 0 for one part."""
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
        lines += ["cosine of score differences", *table(self.cosine), "overlap of positions", *table(self.overlap)]
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

    If every part controls features of its own, the score differences $d_i = s_i - s_b$ are orthogonal. Their cosine is
    measured on noised samples, from the differences of estimated noise, $-s(t)\,d_i$.

    Args:
        composed: the composition; a single part is always sound.
        x: samples like those of the composition or of the parts; None uses the states of sampling ``n`` samples in 20
            steps.
        times: times of the measurement, above 0; None for those at fractions 0.5, 0.65 and 0.8 of the schedule. Not
            used without x: then the times are those of sampling between `DECIDED`.
        n: number of samples, without x.
        seed: seed of the noise.

    Raises:
        InvalidArgument: times outside the schedule, or samples of another shape.

    Source: Bradley et al. 2025, arXiv:2502.04549, on orthogonality of score differences.
    """
    schedule = composed.schedule
    if x is None:
        monitor = _ClashMonitor(composed)
        n = n if composed.num_samples is None else composed.num_samples
        noise = Noise(n, seed=seed, device=composed.parts[0].device)
        grid = schedule.grid(20)
        start = schedule.s(grid[0]) * noise.normal(composed.shape)
        integrate(monitor, schedule, start, grid, method="ddim", noise=noise)
        return monitor.report()
    times = [schedule.time(fraction) for fraction in (0.5, 0.65, 0.8)] if times is None else list(times)
    if not times or any(not 0 < t <= schedule.max_time for t in times):
        raise InvalidArgument(f"times {times} must be above 0 and at most {schedule.max_time}, where sampling begins")
    if tuple(x.shape[1:]) != composed.shape:
        raise InvalidArgument(f"samples of shape {tuple(x.shape[1:])}; the parts' are {composed.shape}")
    noise = Noise(len(x), seed=seed, device=x.device)
    monitor = _ClashMonitor(composed, all_times=True)
    for t in times:
        monitor(schedule.a(t) * x + schedule.s(t) * noise.normal(composed.shape), t)
    return monitor.report()


class _ClashMonitor:
    """A denoiser that measures during sampling how far the parts change the same features.

    For each time, ``sums`` has four tensors (parts, parts), summed over samples: inner products of score differences,
    their absolute values, products of norms, and inner products of magnitudes by position.
    """

    def __init__(self, composed: Composed, *, all_times: bool = False) -> None:
        self.composed = composed
        self.between = (0.0, math.inf) if all_times else tuple(composed.schedule.time(share) for share in DECIDED)
        self.sums: dict[float, Tensor] = {}

    def __call__(self, x: Tensor, t: float) -> Estimate:
        estimates = self.composed.estimates(x, t)
        if len(estimates) > 2 and self.between[0] <= t <= self.between[1]:
            diff = torch.stack([part.eps - estimates[-1].eps for part in estimates[:-1]]).double()  # (parts, n, ...)
            # (parts, n, positions): the channels of an image are one position
            magnitude = (diff.norm(dim=2) if diff.ndim == 5 else diff.abs()).flatten(2)
            inner = torch.einsum("ind,jnd->nij", diff.flatten(2), diff.flatten(2))  # (n, parts, parts)
            norm = inner.diagonal(dim1=1, dim2=2).sqrt()  # (n, parts)
            norms = norm[:, :, None] * norm[:, None]
            overlap = torch.einsum("ind,jnd->nij", magnitude, magnitude)
            sums = torch.stack([inner, inner.abs(), norms, overlap]).sum(1)  # (4, parts, parts)
            self.sums[t] = self.sums[t] + sums if t in self.sums else sums
        return self.composed.combined(estimates)

    def report(self) -> Composability:
        """The figures over all times so far."""
        k = len(self.composed.parts)
        if not self.sums:
            ones = torch.ones(k, k)
            return Composability(ones, ones, ones, (), "sound", ("A single part composes with any background.",))
        inner, absolute, norms, magnitudes = torch.stack(list(self.sums.values())).sum(0)
        clash = (absolute / norms.clamp_min(1e-30)).float()
        clashes = ((t, _pairs(sums[1] / sums[2].clamp_min(1e-30))) for t, sums in sorted(self.sums.items()))
        by_time = tuple((t, float(values.max())) for t, values in clashes)
        largest = float(_pairs(clash).max())
        verdict: Literal["sound", "doubtful", "at risk"] = (
            "sound" if largest <= DOUBTFUL else "doubtful" if largest <= AT_RISK else "at risk"
        )
        overlap = _cosine(magnitudes)
        return Composability(_cosine(inner), clash, overlap, by_time, verdict, _advice(clash, overlap, verdict))

    def warn(self) -> None:
        """Warn if the verdict is "at risk"."""
        if not self.sums:
            return
        report = self.report()
        if report.verdict == "at risk":
            warnings.warn(CompositionAtRisk(" ".join(report.advice)), stacklevel=3)


def _advice(clash: Tensor, overlap: Tensor, verdict: str) -> tuple[str, ...]:
    """Sentences that interpret the pair of parts with the largest clash."""
    pairs = torch.triu_indices(len(clash), len(clash), 1)
    first, second = pairs[:, int(_pairs(clash).argmax())].tolist()
    value, shared = float(clash[first, second]), float(overlap[first, second])
    if verdict == "sound":
        summary = f"The parts change different features (largest cosine {value:.2f}), so their scores can be added."
        return (summary, "They share positions, in orthogonal directions.") if shared > 0.5 else (summary,)
    return (
        f"Parts {first} and {second} change the same features (cosine {value:.2f}, position overlap {shared:.0%}).",
        "If the background contains what the parts add, as 'any one object' does, choose one that does not: the empty "
        "scene.",
        "If the parts overlap, choose others, or move them further apart.",
        "If their features are independent but mixed in the samples' coordinates, add Langevin steps at a small time: "
        "corrector=Langevin(steps=..., step_size=..., t=...).",
    )


def _cosine(gram: Tensor) -> Tensor:
    """Cosines from inner products, both (parts, parts)."""
    norm = gram.diagonal().sqrt()
    return (gram / (norm[:, None] * norm[None]).clamp_min(1e-30)).float()


def _pairs(values: Tensor) -> Tensor:
    """The values of all pairs of different parts, those above the diagonal."""
    rows, columns = torch.triu_indices(len(values), len(values), 1)
    return values[rows, columns]


def _null_condition(model: Diffusion) -> Conditioning:
    """The null condition of one sample of a model."""
    size = (model.shape[-2], model.shape[-1])
    return model.condition.null_condition(1, size, next(model.parameters()).device)


def _expanded(condition: Conditioning | None, n: int) -> Conditioning | None:
    """A condition of one sample, repeated for all n."""
    if condition is None or len(condition) == n:
        return condition
    if len(condition) != 1:
        raise InvalidArgument(f"{n} samples for a condition of {len(condition)}; give one condition, or one for each")
    return condition.select(torch.zeros(n, dtype=torch.long))


def _component(part: Component, of: Diffusion | None) -> ComponentModel:
    """Convert a model or a condition of the model ``of`` to a `ComponentModel`."""
    if isinstance(part, ComponentModel):
        return part
    if isinstance(part, Conditioning):
        if of is None:
            raise InvalidArgument("a part is a condition, but no model was given; give the model as of=...")
        return ComponentModel.of(of, part)
    return ComponentModel.of(part)


def _background(
    background: Component | Literal["null"] | None, of: Diffusion | None, first: ComponentModel
) -> ComponentModel | None:
    """Convert the background; "null" is the null condition of ``of``, or else of the first part's model."""
    if background is None:
        return None
    if background != "null":
        return _component(background, of)
    model = of if of is not None else first.model
    if model is None or not model.condition.null:
        raise InvalidArgument(
            "background='null', but the model was not trained without its condition; give a background"
        )
    return ComponentModel.of(model)


def _check_compatible(first: ComponentModel, other: ComponentModel, name: str) -> None:
    """Refuse a part whose shape, device or schedule differs from the first part's."""
    for what, expected, actual in (
        ("shape", first.shape, other.shape),
        ("device", first.device, other.device),
        ("schedule", (first.schedule.kind, first.schedule.betas), (other.schedule.kind, other.schedule.betas)),
    ):
        if actual != expected:
            raise InvalidArgument(f"{name} has the {what} {actual}, part 0 has {expected}; they must be the same")
