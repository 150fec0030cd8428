r"""Diffusion models and flow matching: any network, schedule, prediction type and sampler, as one generator.

Notable here:
- training is least squares on one target; guidance, inpainting and composition happen at sampling and need no training
- the conditional and the unconditional branch of guidance are one batch of twice the size; of a network with
  ``mixes_samples`` they are two passes
- sample i of a batch depends on ``seed + i`` alone; times are continuous, so any grid can be sampled
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, Unpack, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pippin.core.checks import Fraction, PositiveFloat, PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.generate.conditions import Conditioning, ConditioningSpec, Samples
from pippin.generate.contract import GeneratorModule, GeneratorOptions, check_samples
from pippin.generate.diffusion.dit import DiTConfig
from pippin.generate.diffusion.local_network import LocalNetConfig
from pippin.generate.diffusion.prediction import Estimate, PredictionType, add_noise, check_prediction, estimate, target
from pippin.generate.diffusion.samplers import Denoiser, Langevin, Method, Project, integrate
from pippin.generate.diffusion.schedules import NoiseSchedule
from pippin.generate.diffusion.unet import UNetConfig
from pippin.train.objective import Loss

MAX_SNR = 5.0
"""The signal-to-noise ratio at which the weight of "min_snr" is clipped."""


@checked
@dataclass(frozen=True)
class DiffusionConfig:
    """A diffusion model.

    Attributes:
        shape: of one sample: channels, height, width.
        network: what predicts.
        condition: the conditions that it reads.
        schedule: how samples are noised.
        prediction: what the network says: "x0", "eps", "v" (where a² + s² = 1) or "flow".
        method: of sampling, where none is asked for.
        steps: of sampling, where none are asked for.

    Raises:
        InvalidArgument: a prediction without meaning for the schedule, or fewer than one step.
    """

    shape: tuple[int, ...]
    network: UNetConfig | DiTConfig | LocalNetConfig = dataclasses.field(default_factory=UNetConfig)
    condition: ConditioningSpec = dataclasses.field(default_factory=ConditioningSpec)
    schedule: NoiseSchedule = dataclasses.field(default_factory=NoiseSchedule.vp_cosine)
    prediction: PredictionType = "v"
    method: Method = "heun"
    steps: PositiveInt = 20

    def __post_init__(self) -> None:
        check_prediction(self.prediction, self.schedule)


class Diffusion(GeneratorModule):
    """A diffusion model; samples are from about -1 to 1, not clipped.

    Args:
        config: all about it; made without weights of any use, see `initialize`.
    """

    config: DiffusionConfig
    model_type = "pippin_diffusion"
    config_type = DiffusionConfig

    def __init__(self, config: DiffusionConfig) -> None:
        super().__init__(config)
        self.network = config.network.build(config.shape, config.condition)

    def initialize(self, seed: int = 0) -> Diffusion:
        """Random weights to train from, on the CPU."""
        cast(Any, self.network).initialize(torch.Generator().manual_seed(seed))
        return self

    def forward(
        self, x: Float[Tensor, "n ..."], t: float | Float[Tensor, n], condition: Conditioning | None = None
    ) -> Float[Tensor, "n ..."]:
        """Output of the network for noised samples, of the configured prediction type; float32."""
        schedule, spec = self.config.schedule, self.config.condition
        if condition is None and not spec.empty:
            condition = spec.null_condition(len(x), (x.shape[-2], x.shape[-1]), x.device)
        times = t if isinstance(t, Tensor) else torch.full((len(x),), float(t), device=x.device)
        if schedule.signal_fades:
            said: Tensor = self.network(x, times, condition)
            return said
        # where noise is only added, the network sees unit variance, and the angle between signal and noise as its time
        size = (1 + times**2).rsqrt().view(-1, *[1] * (x.ndim - 1)).to(x.dtype)
        said = self.network(x * size, times.atan() * (2 / math.pi), condition)
        return said

    def estimate(
        self, x: Float[Tensor, "n ..."], t: float | Float[Tensor, n], condition: Conditioning | None = None
    ) -> Estimate:
        """Data and noise in samples at a time.

        Args:
            x: noised samples; of another size than the model's where the network allows it.
            t: one time for all, or one for each.
            condition: of each sample; None for the null condition.

        Raises:
            InvalidArgument: a time outside the schedule's, a condition that the model does not read.
        """
        lowest, highest = (float(t.min()), float(t.max())) if isinstance(t, Tensor) else (t, t)
        end = max(1.0, self.config.schedule.max_time) if self.config.schedule.signal_fades else math.inf
        if not (lowest >= 0 and highest <= end):
            raise InvalidArgument(f"times from {lowest} to {highest}; the schedule's are from 0 to {end}")
        return self._estimate(x, t, condition)

    def denoiser(self, condition: Conditioning | None = None, guidance: float = 1.0) -> Denoiser:
        """What `integrate` asks: estimates under a condition, guided.

        Args:
            condition: of as many samples as will be asked about; None says nothing.
            guidance: 1 for none, 0 for the model without its condition.

        Raises:
            InvalidArgument: guidance without a condition, or of a model that was not trained without it.
        """
        if condition is not None or guidance != 1.0:
            condition = self.prepare(condition, None, guidance=guidance).condition
        if guidance == 1.0 or condition is None:
            return lambda x, t: self._estimate(x, t, condition)
        if guidance == 0.0:
            nothing = condition.null()
            return lambda x, t: self._estimate(x, t, nothing)
        both = [condition, condition.null()]
        apart = getattr(self.network, "mixes_samples", False)  # experts that choose among the tokens of a batch
        joined = Conditioning.concatenate(both)

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
        condition: Conditioning | None = None,
        n: int | None = None,
        *,
        method: Method | None = None,
        eta: float = 0.0,
        x_init: Float[Tensor, "n ..."] | None = None,
        t_init: float | None = None,
        corrector: Langevin | None = None,
        project: Project | None = None,
        **options: Unpack[GeneratorOptions],
    ) -> Float[Tensor, "n ..."]:
        """Integrate from noise to samples.

        Args:
            condition: what each sample is to show; of one sample for all of them; None for no condition.
            n: number of samples; None for as many as ``x_init`` or else the condition has, or 1.
            method: see `integrate`; None for the configured one.
            eta: amount of noise that "ddim" adds in each step, from 0 (deterministic) to 1 ("ddpm").
            x_init: samples to start from instead of pure noise: they are noised to ``t_init`` first.
            t_init: the time to start at; needs ``x_init``.
            corrector: Langevin steps at one time.
            project: applied after each step, see `inpainting`.
            **options: see `GeneratorOptions`; ``steps`` are those of the solver, of which Heun's evaluate the network
                twice.

        Raises:
            InvalidArgument: as `prepare_sampling` and `integrate`, or ``x_init`` without ``t_init``.
            NonFiniteSample: a step ended in NaN or infinity; it is named.
        """
        schedule = self.config.schedule
        if (x_init is None) != (t_init is None):
            raise InvalidArgument("x_init (what to begin from) and t_init (how much noise to add) come together")
        if n is None and x_init is not None:
            n = len(x_init)
        call = self.prepare(condition, n, **options)
        noise, n = call.noise(), call.n
        if x_init is not None and t_init is not None:
            check_samples(x_init, self.shape)
            if len(x_init) != n or not 0 < t_init <= schedule.max_time:
                raise InvalidArgument(
                    f"{len(x_init)} samples to begin from at t_init={t_init}, for n={n} samples; "
                    f"times are above 0 to {schedule.max_time}"
                )
            schedule = dataclasses.replace(schedule, max_time=t_init, min_time=min(schedule.min_time, t_init / 2))
            x = add_noise(x_init.to(call.device).float(), noise.normal(self.shape), t_init, schedule)
        else:
            x = schedule.s(schedule.max_time) * noise.normal(self.shape)
        return integrate(
            self.denoiser(call.condition, call.guidance),
            schedule,
            x,
            schedule.grid(call.steps or self.config.steps),
            method=method or self.config.method,
            eta=eta,
            noise=noise,
            on_step=call.on_step,
            corrector=corrector,
            project=project,
        )

    def _estimate(self, x: Tensor, t: float | Tensor, condition: Conditioning | None) -> Estimate:
        return self._from(self(x, t, condition), x, t)

    def _from(self, said: Tensor, x: Tensor, t: float | Tensor) -> Estimate:
        return estimate(said, x, t, self.config.prediction, self.config.schedule)


class Denoising:
    r"""Least squares on the configured target at random times; an objective for `pippin.train.Trainer`.

    The loss is $w(t)\,\lVert f(x_t, t, c) - \mathrm{target}\rVert^2$ per element of a sample, averaged over samples; a
    network's ``auxiliary_loss()``, where it has one, is added, and the metric "error" is without it.
    Batches are `Samples`; the times of a batch are spread evenly over their distribution, which lowers the variance.

    Args:
        condition_dropout: the share of samples whose condition is left out, where the model's `ConditionSpec` has
            ``null``.
        weighting: "uniform" in the target's own space, or "min_snr": as if the data were predicted, weighted by the
            ratio of signal to noise up to 5.
        times: "uniform", or "logit_normal": more of the middle times.
        logit_mean: of the normal behind "logit_normal".
        logit_std: of the same.

    Raises:
        InvalidArgument: a value out of range.

    Source: Ho et al. 2020, arXiv:2006.11239, eq. 14; Hang et al. 2023, arXiv:2303.09556 (min-SNR); Esser et al. 2024,
    arXiv:2403.03206, section 3.1 (logit-normal times).
    """

    unit = "samples"

    @checked
    def __init__(
        self,
        condition_dropout: Fraction = 0.1,
        *,
        weighting: Literal["uniform", "min_snr"] = "uniform",
        times: Literal["uniform", "logit_normal"] = "uniform",
        logit_mean: float = 0.0,
        logit_std: PositiveFloat = 1.0,
    ) -> None:
        self.condition_dropout, self.weighting, self.times = condition_dropout, weighting, times
        self.logit_mean, self.logit_std = logit_mean, logit_std

    def __call__(self, model: nn.Module, batch: Samples, generator: torch.Generator) -> Loss:
        """The loss of a batch."""
        made = cast(Diffusion, model)
        x0, condition, schedule = batch.x, batch.condition, made.config.schedule
        check_samples(x0, made.shape)
        n, device = len(x0), x0.device
        t = self.sample_times(n, schedule, generator, device)
        eps = torch.randn(x0.shape, generator=generator, device=device)
        if condition is not None and made.condition.null and self.condition_dropout:
            condition = condition.dropout(self.condition_dropout, generator)
        said = made(add_noise(x0, eps, t, schedule), t, condition)
        wanted = target(x0, eps, t, made.config.prediction, schedule)
        each = (said.float() - wanted).square().flatten(1).mean(1)
        if self.weighting == "min_snr":
            each = each * _min_snr(t, made.config.prediction, schedule)
        total = each.sum()
        auxiliary = getattr(made.network, "auxiliary_loss", None)
        extra = None if auxiliary is None else auxiliary()
        return Loss(total if extra is None else total + n * extra, n, {"error": total.detach()})

    def sample_times(
        self, n: int, schedule: NoiseSchedule, generator: torch.Generator, device: torch.device | str = "cpu"
    ) -> Float[Tensor, n]:
        """Times of a batch, above 0."""
        share = torch.rand(1, generator=generator, device=device) + torch.arange(n, device=device) / n
        share = 1 - (share % 1) * (1 - 1e-4)  # above 0: without noise there is nothing to learn
        if self.times == "logit_normal":
            share = share.clamp(max=1 - 1e-4)
            share = (self.logit_mean + self.logit_std * torch.special.ndtri(share)).sigmoid()
        return schedule.time(share)


def _min_snr(t: Tensor, kind: PredictionType, schedule: NoiseSchedule) -> Tensor:
    """The weight in the target's space: that of the data's error, times how far the target's error moves the data."""
    a, s = schedule.a(t), schedule.s(t)
    ratio = (a / s).square()
    if kind == "flow":
        becomes = s / (a * schedule.ds(t) - schedule.da(t) * s)
    else:
        becomes = {"x0": torch.ones_like(s), "eps": s / a, "v": s}[kind]
    return ratio.clamp(max=MAX_SNR) * becomes.square()


@torch.no_grad()
def held_out_loss(model: Diffusion, samples: Samples, seed: int = 0, *, batch_size: int = 256) -> float:
    """The mean of `Denoising`'s loss on samples, under noise and times that depend on the seed alone.

    Args:
        model: of any prediction; losses of different kinds cannot be compared.
        samples: that the model has not learned from.
        seed: of noise and times.
        batch_size: samples at once.
    """
    device = model.device
    generator = torch.Generator(device).manual_seed(seed)
    objective, total = Denoising(condition_dropout=0.0), 0.0
    for start in range(0, len(samples), batch_size):
        rows = slice(start, start + batch_size)
        condition = None if samples.condition is None else samples.condition.select(rows).to(device)
        total += float(objective(model, Samples(samples.x[rows].to(device), condition), generator).total)
    return total / len(samples)
