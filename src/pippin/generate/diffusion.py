r"""A network that has learnt to take noise away, as a generator: any network, schedule, prediction and sampler.

Notable here:
- training is least squares on one target; guidance, inpainting and composition happen at sampling and need no training
- a condition and its absence go through the network as one batch, so guidance costs one pass of twice the size; a
  network that says ``mixes_samples`` gets them one after the other
- sample i of a batch depends on ``seed + i`` alone; the network sees float times, so any grid will do
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pippin.core.errors import InvalidArgument
from pippin.generate.condition import Condition, ConditionSpec, Samples
from pippin.generate.contract import OnStep, check_samples, prepare
from pippin.generate.dit import DiTConfig
from pippin.generate.folder import device_of
from pippin.generate.local_net import LocalNetConfig
from pippin.generate.noise import Noise
from pippin.generate.prediction import Estimate, Kind, check_kind, estimate, noised, target
from pippin.generate.samplers import Denoiser, Langevin, Method, Project, integrate
from pippin.generate.schedules import NoiseSchedule
from pippin.generate.unet import UNetConfig
from pippin.train.objective import Loss

CAP = 5.0
"""The signal-to-noise ratio above which "min_snr" weighs no time more."""


@dataclass(frozen=True)
class DiffusionConfig:
    """A diffusion model.

    Attributes:
        shape: of one sample: channels, height, width.
        network: what predicts.
        condition: what it reads.
        schedule: how samples are noised.
        prediction: what the network says: "x0", "eps", "v" (where a² + s² = 1) or "flow".
        method: of sampling, where none is asked for.
        steps: of sampling, where none are asked for.

    Raises:
        InvalidArgument: a prediction without meaning for the schedule, or fewer than one step.
    """

    shape: tuple[int, ...]
    network: UNetConfig | DiTConfig | LocalNetConfig = dataclasses.field(default_factory=UNetConfig)
    condition: ConditionSpec = dataclasses.field(default_factory=ConditionSpec)
    schedule: NoiseSchedule = dataclasses.field(default_factory=NoiseSchedule.vp_cosine)
    prediction: Kind = "v"
    method: Method = "heun"
    steps: int = 20

    def __post_init__(self) -> None:
        check_kind(self.prediction, self.schedule)
        if self.steps < 1:
            raise InvalidArgument(f"steps is {self.steps}; give at least 1")


class Diffusion(nn.Module):
    """A diffusion model; samples are from about -1 to 1, not clipped.

    Args:
        config: all about it; made without weights of any use, see `initialise`.
    """

    config_type = DiffusionConfig

    def __init__(self, config: DiffusionConfig) -> None:
        super().__init__()
        self.config = config
        self.network = config.network.build(config.shape, config.condition)
        self.facts: dict[str, Any] = {}

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample."""
        return self.config.shape

    @property
    def condition(self) -> ConditionSpec:
        """What it reads."""
        return self.config.condition

    def initialise(self, seed: int = 0) -> Diffusion:
        """Random weights to train from, on the CPU."""
        cast(Any, self.network).initialise(torch.Generator().manual_seed(seed))
        return self

    def forward(
        self, x: Float[Tensor, "n ..."], t: float | Float[Tensor, n], condition: Condition | None = None
    ) -> Float[Tensor, "n ..."]:
        """What the network says of samples at their times, as the configured kind of prediction; float32."""
        schedule, spec = self.config.schedule, self.config.condition
        if condition is None and not spec.empty:
            condition = spec.nothing(len(x), (x.shape[-2], x.shape[-1]), x.device)
        times = t if isinstance(t, Tensor) else torch.full((len(x),), float(t), device=x.device)
        if schedule.signal_fades:
            said: Tensor = self.network(x, times, condition)
            return said
        # where noise is only added, the network sees unit variance, and the angle between signal and noise as its time
        size = (1 + times**2).rsqrt().view(-1, *[1] * (x.ndim - 1)).to(x.dtype)
        said = self.network(x * size, times.atan() * (2 / math.pi), condition)
        return said

    def estimate(
        self, x: Float[Tensor, "n ..."], t: float | Float[Tensor, n], condition: Condition | None = None
    ) -> Estimate:
        """Data and noise in samples at a time.

        Args:
            x: noised samples; of another size than the model's where the network allows it.
            t: one time for all, or one for each.
            condition: what they show; None says nothing.

        Raises:
            InvalidArgument: a time outside the schedule's, a condition that the model does not read.
        """
        lowest, highest = (float(t.min()), float(t.max())) if isinstance(t, Tensor) else (t, t)
        end = max(1.0, self.config.schedule.start) if self.config.schedule.signal_fades else math.inf
        if not (lowest >= 0 and highest <= end):
            raise InvalidArgument(f"times from {lowest} to {highest}; the schedule's are from 0 to {end}")
        return self._estimate(x, t, condition)

    def denoiser(self, condition: Condition | None = None, guidance: float = 1.0) -> Denoiser:
        """What `integrate` asks: estimates under a condition, guided.

        Args:
            condition: of as many samples as will be asked about; None says nothing.
            guidance: 1 for none, 0 for the model without its condition.

        Raises:
            InvalidArgument: guidance without a condition, or of a model that was not trained without it.
        """
        if condition is not None or guidance != 1.0:
            condition, _ = prepare(self.condition, condition, None, guidance, device_of(self))
        if guidance == 1.0 or condition is None:
            return lambda x, t: self._estimate(x, t, condition)
        if guidance == 0.0:
            nothing = condition.null()
            return lambda x, t: self._estimate(x, t, nothing)
        both = [condition, condition.null()]
        apart = getattr(self.network, "mixes_samples", False)  # experts that choose among the tokens of a batch
        joined = Condition.joined(both)

        def guide(x: Tensor, t: float) -> Estimate:
            if apart:
                given, absent = (self(x, t, one) for one in both)
            else:
                given, absent = self(torch.cat([x, x]), t, joined).chunk(2)
            # all kinds of prediction are linear in data and noise, so guiding one guides the others
            return self._from(torch.lerp(absent, given, guidance), x, t)

        return guide

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
        eta: float = 0.0,
        x_init: Float[Tensor, "n ..."] | None = None,
        t_init: float | None = None,
        corrector: Langevin | None = None,
        project: Project | None = None,
    ) -> Float[Tensor, "n ..."]:
        """Draw samples.

        Args:
            condition: what each is to show; None for nothing.
            n: samples; None for as many as ``x_init`` or else the condition has, or 1.
            steps: of the sampler; Heun asks the network twice for each.
            guidance: 1 for none (papers that count from 0 call ours ``w = guidance - 1``).
            seed: sample i depends on ``seed + i`` alone.
            on_step: called after each step.
            method: see `integrate`; None for the model's own.
            eta: noise that "ddim" draws on the way.
            x_init: samples to begin from instead of pure noise: they are noised to ``t_init`` first.
            t_init: the time to begin at; needs ``x_init``.
            corrector: steps of Langevin's at one time.
            project: applied after each step, see `keeping`.

        Raises:
            InvalidArgument: as `prepare` and `integrate`, or ``x_init`` without ``t_init``.
            NonFiniteSample: the step is named.
        """
        device, schedule = device_of(self), self.config.schedule
        if (x_init is None) != (t_init is None):
            raise InvalidArgument("x_init (what to begin from) and t_init (how much noise to add) come together")
        if n is None and x_init is not None:
            n = len(x_init)
        condition, n = prepare(self.condition, condition, n, guidance, device)
        noise = Noise(n, seed=seed, device=device)
        if x_init is not None and t_init is not None:
            check_samples(x_init, self.shape)
            if len(x_init) != n or not 0 < t_init <= schedule.start:
                raise InvalidArgument(
                    f"{len(x_init)} samples to begin from at t_init={t_init}, for n={n} samples; "
                    f"times are above 0 to {schedule.start}"
                )
            schedule = dataclasses.replace(schedule, start=t_init, least=min(schedule.least, t_init / 2))
            x = noised(x_init.to(device).float(), noise.normal(self.shape), t_init, schedule)
        else:
            x = schedule.s(schedule.start) * noise.normal(self.shape)
        return integrate(
            self.denoiser(condition, guidance),
            schedule,
            x,
            schedule.grid(self.config.steps if steps is None else steps),
            method=method or self.config.method,
            eta=eta,
            noise=noise,
            on_step=on_step,
            corrector=corrector,
            project=project,
        )

    def _estimate(self, x: Tensor, t: float | Tensor, condition: Condition | None) -> Estimate:
        return self._from(self(x, t, condition), x, t)

    def _from(self, said: Tensor, x: Tensor, t: float | Tensor) -> Estimate:
        return estimate(said, x, t, self.config.prediction, self.config.schedule)


class Denoising:
    r"""Least squares on the configured target at random times; an objective for `pippin.train.Trainer`.

    The loss is $w(t)\,\lVert f(x_t, t, c) - \mathrm{target}\rVert^2$ per number of a sample, averaged over samples; a
    network's ``auxiliary_loss()``, where it has one, is added, and the metric "error" is without it.
    Batches are `Samples`; the times of a batch are spread evenly over their distribution, which lowers the variance.

    Args:
        drop: the share of samples whose condition is left out, where the model's `ConditionSpec` has ``null``.
        weighting: "uniform" in the target's own space, or "min_snr": as if the data were predicted, weighted by the
            ratio of signal to noise up to 5.
        times: "uniform", or "logit_normal": more of the middle times.
        location: of the normal behind "logit_normal".
        spread: of the same.

    Raises:
        InvalidArgument: a value out of range.

    Source: Ho et al. 2020, arXiv:2006.11239, eq. 14; Hang et al. 2023, arXiv:2303.09556 (min-SNR); Esser et al. 2024,
    arXiv:2403.03206, section 3.1 (logit-normal times).
    """

    unit = "samples"

    def __init__(
        self,
        drop: float = 0.1,
        *,
        weighting: Literal["uniform", "min_snr"] = "uniform",
        times: Literal["uniform", "logit_normal"] = "uniform",
        location: float = 0.0,
        spread: float = 1.0,
    ) -> None:
        if not 0 <= drop < 1 or not 0 < spread < math.inf or not math.isfinite(location):
            raise InvalidArgument(
                f"drop={drop} must be 0 to below 1, spread={spread} positive, location={location} finite"
            )
        if weighting not in ("uniform", "min_snr") or times not in ("uniform", "logit_normal"):
            raise InvalidArgument(
                f"weighting {weighting!r} (uniform, min_snr), times {times!r} (uniform, logit_normal)"
            )
        self.drop, self.weighting, self.times = drop, weighting, times
        self.location, self.spread = location, spread

    def __call__(self, model: nn.Module, batch: Samples, generator: torch.Generator) -> Loss:
        """The loss of a batch."""
        made = cast(Diffusion, model)
        x0, condition, schedule = batch.x, batch.condition, made.config.schedule
        check_samples(x0, made.shape)
        n, device = len(x0), x0.device
        t = self.draw_times(n, schedule, generator, device)
        eps = torch.randn(x0.shape, generator=generator, device=device)
        if condition is not None and made.condition.null and self.drop:
            condition = condition.dropped(torch.rand(n, generator=generator, device=device) >= self.drop)
        said = made(noised(x0, eps, t, schedule), t, condition)
        wanted = target(x0, eps, t, made.config.prediction, schedule)
        each = (said.float() - wanted).square().flatten(1).mean(1)
        if self.weighting == "min_snr":
            each = each * _min_snr(t, made.config.prediction, schedule)
        total = each.sum()
        auxiliary = getattr(made.network, "auxiliary_loss", None)
        extra = None if auxiliary is None else auxiliary()
        return Loss(total if extra is None else total + n * extra, n, {"error": total.detach()})

    def draw_times(
        self, n: int, schedule: NoiseSchedule, generator: torch.Generator, device: torch.device | str = "cpu"
    ) -> Float[Tensor, n]:
        """Times of a batch, above 0."""
        share = torch.rand(1, generator=generator, device=device) + torch.arange(n, device=device) / n
        share = 1 - (share % 1) * (1 - 1e-4)  # above 0: without noise there is nothing to learn
        if self.times == "logit_normal":
            share = share.clamp(max=1 - 1e-4)
            share = (self.location + self.spread * torch.special.ndtri(share)).sigmoid()
        return schedule.time(share)


def _min_snr(t: Tensor, kind: Kind, schedule: NoiseSchedule) -> Tensor:
    """The weight in the target's space: that of the data's error, times how far the target's error moves the data."""
    a, s = schedule.a(t), schedule.s(t)
    ratio = (a / s).square()
    if kind == "flow":
        becomes = s / (a * schedule.ds(t) - schedule.da(t) * s)
    else:
        becomes = {"x0": torch.ones_like(s), "eps": s / a, "v": s}[kind]
    return ratio.clamp(max=CAP) * becomes.square()


@torch.no_grad()
def held_out_loss(model: Diffusion, samples: Samples, seed: int = 0, *, batch: int = 256) -> float:
    """The mean of `Denoising`'s loss on samples, under noise and times that depend on the seed alone.

    Args:
        model: of any prediction; losses of different kinds cannot be compared.
        samples: that the model has not learnt from.
        seed: of noise and times.
        batch: samples at once.
    """
    generator = torch.Generator(device_of(model)).manual_seed(seed)
    objective, total = Denoising(drop=0.0), 0.0
    device = device_of(model)
    for start in range(0, len(samples), batch):
        rows = slice(start, start + batch)
        condition = None if samples.condition is None else samples.condition.rows(rows).to(device)
        total += float(objective(model, Samples(samples.x[rows].to(device), condition), generator).total)
    return total / len(samples)
