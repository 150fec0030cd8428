r"""Diffusion models and flow matching: any network, schedule, prediction type and sampler, as one generator.

Notable here:
- training is least squares on one target; guidance, inpainting and composition happen at sampling and need no training
- the conditional and the unconditional branch of guidance are one batch of twice the size; for networks with
  ``mixes_samples`` (experts that choose among the tokens of the batch) they are two passes
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
"""The signal-to-noise ratio at which "min_snr" clips the weight (gamma of the paper)."""


@checked
@dataclass(frozen=True)
class DiffusionConfig:
    """Configuration of a diffusion model.

    Attributes:
        shape: shape of one sample: (channels, height, width).
        network: configuration of the network.
        condition: the conditions that the model reads.
        schedule: the noise schedule.
        prediction: prediction type of the network: "x0", "eps", "v" (only where a² + s² = 1) or "flow".
        method: default sampling method.
        steps: default number of sampling steps.

    Raises:
        InvalidArgument: a prediction type that the schedule does not allow, or fewer than one step.
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
        config: the configuration. Weights are uninitialized; call `initialize`, or load them.
    """

    config: DiffusionConfig
    model_type = "pippin_diffusion"
    config_type = DiffusionConfig

    def __init__(self, config: DiffusionConfig) -> None:
        super().__init__(config)
        self.network = config.network.build(config.shape, config.condition)

    def initialize(self, seed: int = 0) -> Diffusion:
        """Set random initial weights, on the CPU."""
        cast(Any, self.network).initialize(torch.Generator().manual_seed(seed))
        return self

    def forward(
        self, x: Float[Tensor, "n ..."], t: float | Float[Tensor, n], condition: Conditioning | None = None
    ) -> Float[Tensor, "n ..."]:
        """Output of the network for noised samples at time t, of the configured prediction type; float32."""
        schedule, spec = self.config.schedule, self.config.condition
        if condition is None and not spec.empty:
            condition = spec.null_condition(len(x), (x.shape[-2], x.shape[-1]), x.device)
        times = t if isinstance(t, Tensor) else torch.full((len(x),), float(t), device=x.device)
        if schedule.signal_fades:
            output: Tensor = self.network(x, times, condition)
            return output
        # variance-exploding: scale the input to unit variance, and map times to 0 to 1 by the angle arctan(s / a)
        scale = (1 + times**2).rsqrt().view(-1, *[1] * (x.ndim - 1)).to(x.dtype)
        output = self.network(x * scale, times.atan() * (2 / math.pi), condition)
        return output

    def estimate(
        self, x: Float[Tensor, "n ..."], t: float | Float[Tensor, n], condition: Conditioning | None = None
    ) -> Estimate:
        """Estimate data and noise in noised samples.

        Args:
            x: noised samples; their height and width may differ from the model's where the network allows it.
            t: time of all samples, or of each.
            condition: condition of each sample; None for the null condition.

        Raises:
            InvalidArgument: a time outside the schedule, or a condition that the model does not read.
        """
        lowest, highest = (float(t.min()), float(t.max())) if isinstance(t, Tensor) else (t, t)
        end = max(1.0, self.config.schedule.max_time) if self.config.schedule.signal_fades else math.inf
        if not (lowest >= 0 and highest <= end):
            raise InvalidArgument(f"times from {lowest} to {highest}; the schedule's are from 0 to {end}")
        return self._estimate(x, t, condition)

    def denoiser(self, condition: Conditioning | None = None, guidance: float = 1.0) -> Denoiser:
        """A denoiser for `integrate`, with classifier-free guidance.

        Args:
            condition: condition of each sample that will be denoised; None for the null condition.
            guidance: guidance scale; 1 for no guidance, 0 for the unconditional model.

        Raises:
            InvalidArgument: guidance without a condition, or for a model that was not trained without its condition.
        """
        if condition is not None or guidance != 1.0:
            condition = self.prepare(condition, None, guidance=guidance).condition
        if guidance == 1.0 or condition is None:
            return lambda x, t: self._estimate(x, t, condition)
        if guidance == 0.0:
            null_condition = condition.null()
            return lambda x, t: self._estimate(x, t, null_condition)
        branches = [condition, condition.null()]
        separate = getattr(self.network, "mixes_samples", False)  # experts that choose among the tokens of a batch
        batch = Conditioning.concatenate(branches)

        def guide(x: Tensor, t: float) -> Estimate:
            if separate:
                conditional, unconditional = (self(x, t, branch) for branch in branches)
            else:
                conditional, unconditional = self(torch.cat([x, x]), t, batch).chunk(2)
            # all prediction types are linear in data and noise, so guidance may extrapolate the network's output
            return self._from(torch.lerp(unconditional, conditional, guidance), x, t)

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
            condition: one for each sample, or one for all; None for no condition.
            n: number of samples; None for as many as ``x_init`` or else the condition has, or 1.
            method: see `integrate`; None for the configured one.
            eta: factor on the noise that "ddim" adds in each step, from 0 (deterministic) to 1 ("ddpm").
            x_init: samples to start from instead of pure noise; they are noised to ``t_init`` first.
            t_init: the time to start at; needs ``x_init``.
            corrector: Langevin steps at one time.
            project: applied after each step, see `inpainting`.
            **options: see `GeneratorOptions`; ``steps`` are those of the solver, each of which evaluates the network
                once, or twice with "heun".

        Raises:
            InvalidArgument: as `prepare_sampling` and `integrate`, or ``x_init`` without ``t_init``.
            NonFiniteSample: a step gave NaN or infinity; the step is named.
        """
        schedule = self.config.schedule
        if (x_init is None) != (t_init is None):
            raise InvalidArgument("x_init (samples to start from) and t_init (time to noise them to) come together")
        if n is None and x_init is not None:
            n = len(x_init)
        call = self.prepare(condition, n, **options)
        noise, n = call.noise(), call.n
        if x_init is not None and t_init is not None:
            check_samples(x_init, self.shape)
            if len(x_init) != n or not 0 < t_init <= schedule.max_time:
                raise InvalidArgument(
                    f"{len(x_init)} samples to start from at t_init={t_init}, for n={n} samples; the numbers must "
                    f"agree, and t_init must be above 0 and at most {schedule.max_time}"
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

    def _from(self, output: Tensor, x: Tensor, t: float | Tensor) -> Estimate:
        return estimate(output, x, t, self.config.prediction, self.config.schedule)


class Denoising:
    r"""Least squares on the configured target at random times; an objective for `pippin.train.Trainer`.

    The loss is $w(t)\,\lVert f(x_t, t, c) - \mathrm{target}\rVert^2$ per element of a sample, averaged over samples.
    The network's ``auxiliary_loss()``, if it has one, is added; the metric "error" does not include it. Batches are
    `Samples`; the times of a batch are stratified, which lowers the variance.

    Args:
        condition_dropout: fraction of samples whose condition is replaced by the null condition, where the model's
            `ConditioningSpec` has ``null``.
        weighting: "uniform" in the space of the target, or "min_snr": as if the data were predicted, weighted by the
            signal-to-noise ratio, clipped at 5.
        times: "uniform", or "logit_normal", which has more of the middle times.
        logit_mean: mean of the logit of "logit_normal" times.
        logit_std: standard deviation of that logit.

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
        """The loss of a batch, summed over samples."""
        diffusion = cast(Diffusion, model)
        x0, condition, schedule = batch.x, batch.condition, diffusion.config.schedule
        check_samples(x0, diffusion.shape)
        n, device = len(x0), x0.device
        t = self.sample_times(n, schedule, generator, device)
        eps = torch.randn(x0.shape, generator=generator, device=device)
        if condition is not None and diffusion.condition.null and self.condition_dropout:
            condition = condition.dropout(self.condition_dropout, generator)
        output = diffusion(add_noise(x0, eps, t, schedule), t, condition)
        expected = target(x0, eps, t, diffusion.config.prediction, schedule)
        losses = (output.float() - expected).square().flatten(1).mean(1)  # (n,)
        if self.weighting == "min_snr":
            losses = losses * _min_snr(t, diffusion.config.prediction, schedule)
        total = losses.sum()
        auxiliary_loss = getattr(diffusion.network, "auxiliary_loss", None)
        auxiliary = None if auxiliary_loss is None else auxiliary_loss()
        return Loss(total if auxiliary is None else total + n * auxiliary, n, {"error": total.detach()})

    def sample_times(
        self, n: int, schedule: NoiseSchedule, generator: torch.Generator, device: torch.device | str = "cpu"
    ) -> Float[Tensor, n]:
        """Stratified random times of a batch, above 0."""
        u = torch.rand(1, generator=generator, device=device) + torch.arange(n, device=device) / n
        u = 1 - (u % 1) * (1 - 1e-4)  # above 0: without noise there is nothing to learn
        if self.times == "logit_normal":
            u = u.clamp(max=1 - 1e-4)
            u = (self.logit_mean + self.logit_std * torch.special.ndtri(u)).sigmoid()
        return schedule.time(u)


def _min_snr(t: Tensor, kind: PredictionType, schedule: NoiseSchedule) -> Tensor:
    """Weights (n,) in the target's space: min(SNR, 5) times the squared slope of the data by the target."""
    a, s = schedule.a(t), schedule.s(t)
    snr = (a / s).square()
    if kind == "flow":
        slope = s / (a * schedule.ds(t) - schedule.da(t) * s)
    else:
        slope = {"x0": torch.ones_like(s), "eps": s / a, "v": s}[kind]
    return snr.clamp(max=MAX_SNR) * slope.square()


@torch.no_grad()
def held_out_loss(model: Diffusion, samples: Samples, seed: int = 0, *, batch_size: int = 256) -> float:
    """The mean loss of `Denoising` on held-out samples, with noise and times that depend on the seed only.

    Args:
        model: the model; losses of different prediction types cannot be compared.
        samples: samples that the model was not trained on.
        seed: seed of noise and times.
        batch_size: batch size; the result depends on it.
    """
    device = model.device
    generator = torch.Generator(device).manual_seed(seed)
    objective, total = Denoising(condition_dropout=0.0), 0.0
    for start in range(0, len(samples), batch_size):
        rows = slice(start, start + batch_size)
        condition = None if samples.condition is None else samples.condition.select(rows).to(device)
        total += float(objective(model, Samples(samples.x[rows].to(device), condition), generator).total)
    return total / len(samples)
