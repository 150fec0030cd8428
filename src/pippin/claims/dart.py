"""A denoiser that reads every view against the Markov diffusion of the same network, and against reading one view.

Notable here:
- the baseline reads the one average of the views that holds all they tell, so both arms know equally much at every
  step; only the way in which the network gets it differs
- all arms share the initial weights, the batches, the schedule, the tokens of each pass and the number of passes
- the closed forms need no network: what views are worth, and a sampler that is given the exact mean
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pippin.claims import Evidence, Scale, claim

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from pippin.data.scenes import SceneSpec
    from pippin.generate.condition import Samples
    from pippin.generate.dart import DART
    from pippin.generate.nomad import NomadSchedule


@dataclass(frozen=True)
class Size:
    """How much is trained and looked at: seeds, side of pictures and patches, the network, steps, batch, pictures."""

    seeds: tuple[int, ...]
    side: int
    patch: int
    layers: int
    width: int
    heads: int
    steps: int
    batch: int
    pictures: int
    held_out: int
    features: int
    levels: tuple[int, ...] = (4, 8)
    flow: bool = False


SIZES = {
    "smoke": Size((0,), 16, 4, 1, 24, 2, 2, 4, 64, 48, 10),
    "laptop": Size((0, 1, 2), 16, 4, 3, 64, 4, 450, 16, 3000, 512, 250),
    "gpu": Size((0, 1, 2), 32, 4, 12, 384, 6, 1000, 64, 20_000, 2048, 1000, (4, 8, 16), True),
}
RATE = {"smoke": 3e-3, "laptop": 3e-3, "gpu": 5e-4}
ALL, MARKOV, ALONE = "all views", "Markov", "own view"
SEES = {ALL: "all", MARKOV: "statistic", ALONE: "view"}
MODES, SPREAD = (1.0, -1.0), 0.25
"""The mixture of the closed forms: where its two modes are, and their standard deviation."""
SHARES = {"even": 0.5, "uneven": 0.65}
"""The part of the first mode; few steps with the exact mean favour the larger one."""


@claim(
    id="dart",
    source="arXiv:2410.08159",
    paper="a transformer that reads the whole trajectory of views is better than the same network as a Markov "
    "diffusion at equal, small numbers of steps; token by token within a step (4.0) or with a flow as head (3.8) it is "
    "better than with means drawn in parallel (5.6; FID-50k, ImageNet-256)",
    setting="mixtures of two normal distributions at 1 and -1, deviation 0.25, in even and uneven parts; scenes of 1 "
    "or 2 objects in the cells of a 2 x 2 grid, 16 x 16 pixels in 16 tokens, the number of objects given; 3 layers of "
    "width 64, 450 steps of 16 pictures with uniform weights, averaged weights, no guidance; Frechet distance of 512 "
    "samples to 512 held-out pictures in the features of a small classifier of scenes; T = 4 and 8 passes",
    accept="closed form: total ratios come back from alphas_bar within 1e-9, the error from views 4 to 8 of 8 is at "
    "most 0.7 of that from view 4 alone, and 16 steps with the exact mean are within 0.05 (Wasserstein-1) of the "
    "mixture, with even modes and with 0.65 and 0.35 of them. "
    "Masks: noisier views' guesses do not move at all, cached and whole passes agree within 1e-5, the noises of two "
    "views correlate by less than 0.02. Frechet distance, mean over 3 seeds, T = 4 and T = 8: all views at most 5 % "
    "above Markov (not worse), and below it at both (better). Held-out error at the middle view of T = 8: all views at "
    "least 5 % below own view, on each seed. Pictures with as many connected objects as asked for, T = 4, mean over "
    "the seeds: token by token above parallel. The error of all views against Markov is reported and not judged",
)
def run(scale: Scale) -> Evidence:
    """The closed forms, then each seed."""
    evidence, size = Evidence(), SIZES[scale.name]
    closed, drawn = _closed_forms(evidence, 4_000 if scale.name == "smoke" else 100_000)
    masks = _masks(evidence)
    for seed in size.seeds:
        _seed(evidence, size, seed, scale.name)
    judged = (4, 8)
    ratios = [
        evidence.mean(f"Frechet distance, T = {t}, {ALL}") / evidence.mean(f"Frechet distance, T = {t}, {MARKOV}")
        for t in judged
    ]
    for t, ratio in zip(judged, ratios, strict=True):
        evidence.add(f"Frechet distance, T = {t}, {ALL} / {MARKOV}", ratio)
    middle = [evidence.each(f"error in the middle of T = 8, {name}") for name in (ALL, ALONE)]
    return evidence.accept(
        closed_form=closed,
        drawn_by_exact_means=drawn,
        masks=masks,
        not_worse=all(ratio <= 1.05 for ratio in ratios),
        better=all(ratio < 1 for ratio in ratios),
        views_pay=all(ours <= 0.95 * theirs for ours, theirs in zip(*middle, strict=True)),
        tokens_pay=evidence.mean("right number, T = 4, token by token") > evidence.mean(f"right number, T = 4, {ALL}"),
    )


# --- what needs no training -------------------------------------------------------------------------------------------


def _closed_forms(evidence: Evidence, count: int) -> tuple[bool, bool]:
    """What views of a mixture are worth, and whether exact means draw it."""
    import torch

    from pippin.generate.noise import Noise
    from pippin.generate.nomad import NomadSchedule, draw_views

    generator = torch.Generator().manual_seed(0)

    def drawn(share: float) -> Tensor:
        first = torch.rand(count, generator=generator, dtype=torch.float64) < share
        return torch.where(first, *MODES) + SPREAD * torch.randn(count, generator=generator, dtype=torch.float64)

    eight = NomadSchedule.cosine(8)
    again = NomadSchedule.from_alphas_bar(eight.alphas_bar)
    lost = max(abs(a / b - 1) for a, b in zip(again.total_snr, eight.total_snr, strict=True))
    evidence.add("total ratios, relative difference after coming back", lost)
    x = drawn(SHARES["even"])
    views = eight.views(x, torch.randn(count, 8, generator=generator, dtype=torch.float64))
    together = eight.statistic(views)
    errors = {}
    for t in (1, 4, 7):
        known = (together, eight.total_snr, eight.alphas_bar), (views, eight.snr, eight.gammas)
        for name, (z, ratios, shares) in zip((ALL, ALONE), known, strict=True):
            guess = mixture_mean(z[:, 8 - t] / shares[t - 1] ** 0.5, ratios[t - 1], SHARES["even"])
            errors[t, name] = float((guess - x).square().mean())
            evidence.add(f"even mixture: error at view {t} of 8, {name}", errors[t, name])
    distances = {}
    for name, share in SHARES.items():
        for steps in (4, 8, 16):
            schedule = NomadSchedule.cosine(steps)
            samples = draw_views(schedule, exact_guess(schedule, share), Noise(1, seed=1), (count,))[0].double()
            distances[name, steps] = float((samples.sort().values - drawn(share).sort().values).abs().mean())
            told = f"{name} mixture: Wasserstein-1 distance, exact means, {steps} steps"
            evidence.add(told, distances[name, steps])
    drawn_well = max(distances[name, 16] for name in SHARES) < 0.05
    return lost < 1e-9 and errors[4, ALL] <= 0.7 * errors[4, ALONE], drawn_well


def mixture_mean(y: Tensor, snr: float, share: float) -> Tensor:
    """What is expected of a sample of the mixture, seen with normal noise of variance 1 / snr."""
    import torch

    variance = SPREAD**2 + 1 / snr
    logits = [
        math.log(part) - (y - mode).square() / (2 * variance)
        for mode, part in zip(MODES, (share, 1 - share), strict=True)
    ]
    parts = torch.stack(logits).softmax(0)
    means = torch.stack([mode + SPREAD**2 / variance * (y - mode) for mode in MODES])
    return (parts * means).sum(0)


def exact_guess(schedule: NomadSchedule, share: float) -> Any:
    """The mean given all views so far, as `draw_views` asks for it."""
    import torch

    seen: list[Tensor] = []

    def guess(new: Tensor) -> Tensor:
        seen.append(new.double())
        views = torch.cat(seen, 1)
        t = schedule.steps - views.shape[1]
        z = schedule.statistic(views)[:, -1] / schedule.alphas_bar[t] ** 0.5
        return mixture_mean(z, schedule.total_snr[t], share).float()

    return guess


def _masks(evidence: Evidence) -> bool:
    """How far a clearer view moves guesses, a cache changes them, and noises of one batch go together."""
    import torch

    from pippin.generate.condition import Samples
    from pippin.generate.dart import DART, DartConfig
    from pippin.generate.dart_training import NoisyViews
    from pippin.generate.noise import Noise

    config = DartConfig((1, 16, 16), width=48)
    model = DART(config).initialise(0).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():  # the head begins at zero and would hide everything
        parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    x, noise = torch.randn(2, 1, 16, 16, generator=generator), Noise(2, seed=1).normal((8, 1, 16, 16))
    before, _ = model(x, noise, None)
    moved, reached = 0.0, math.inf
    for level in range(8):
        other = noise.clone()
        other[:, level] += 1.0
        change = (model(x, other, None)[0] - before).abs()
        moved = max(moved, float(change[:, :level].max()) if level else 0.0)
        reached = min(reached, float(change[:, level:].amax((0, 2, 3)).min()))
    evidence.add("masks: largest change of a noisier view's guess", moved)
    evidence.add("masks: smallest change of a clearer view's guess", reached)
    cached = _cached_difference(model, x, noise, before)
    evidence.add("masks: largest difference of a cached pass", cached)
    seen: list[Tensor] = []
    model.register_forward_pre_hook(lambda _, given: seen.append(given[1]))
    NoisyViews()(model, Samples(torch.zeros(256, 1, 16, 16)), generator)
    correlation = torch.corrcoef(seen[0].transpose(0, 1).flatten(1)) - torch.eye(8)
    evidence.add("masks: largest correlation of two views' noises", correlation.abs().max())
    return moved == 0 and reached > 1e-4 and cached < 1e-5 and float(correlation.abs().max()) < 0.02


def _cached_difference(model: DART, x: Tensor, noise: Tensor, whole: Tensor) -> float:
    """Between guesses from views that are read one by one, and those of one pass."""
    from pippin.nn.patches import patchify

    reading = model.reading(None, len(x))
    views = model.config.schedule.views(x, noise)
    worst = 0.0
    for level in range(views.shape[1]):
        guess = reading.guess(views[:, level : level + 1])
        worst = max(worst, float((patchify(guess, model.config.patch) - whole[:, level]).abs().max()))
    return worst


# --- what is learnt ---------------------------------------------------------------------------------------------------


def spec_of(side: int) -> SceneSpec:
    """One or two objects in four cells."""
    from pippin.data.scenes import SceneSpec

    return SceneSpec(size=side, objects=(1, 2), cells=2, radius=(1.8 * side / 16, 2.8 * side / 16))


def batches(size: Size, seed: int, device: str) -> Iterator[Samples]:
    """Random scenes of one pool, and how many objects each has."""
    import torch

    from pippin.data.scenes import scenes
    from pippin.generate.condition import Condition, Samples

    pool = scenes(spec_of(size.side), size.pictures, seed=100 + seed)
    x, labels = pool.x.to(device), (pool.counts - 1).to(device)
    generator = torch.Generator().manual_seed(seed)
    while True:
        rows = torch.randint(0, len(x), (size.batch,), generator=generator).to(device)
        yield Samples(x[rows], Condition(labels=labels[rows]))


def trained(size: Size, seed: int, scale: str, steps: int, **form: Any) -> DART:
    """One arm."""
    import torch

    from pippin.generate.condition import ConditionSpec
    from pippin.generate.dart import DART, DartConfig
    from pippin.generate.dart_training import NoisyViews
    from pippin.generate.nomad import NomadSchedule
    from pippin.train import AdamW, Cosine, Trainer

    device = "cuda" if scale == "gpu" and torch.cuda.is_available() else "cpu"
    config = DartConfig(
        (1, size.side, size.side),
        patch=size.patch,
        layers=size.layers,
        width=size.width,
        heads=size.heads,
        schedule=NomadSchedule.cosine(steps),
        condition=ConditionSpec(classes=2),
        **form,
    )
    model = DART(config).initialise(seed).to(device)
    trainer = Trainer(
        model,
        NoisyViews("uniform"),
        batches(size, seed, device),
        steps=size.steps,
        optimiser=AdamW(lr=RATE[scale], betas=(0.9, 0.95)),
        schedule=Cosine(warmup=0.05),
        clip=2.0,
        precision="bfloat16" if device == "cuda" else "float32",
        ema=0.99,
        seed=seed,
        show=False,
    )
    trainer.fit()
    assert trainer.ema is not None
    averages = trainer.ema.averages
    model.load_state_dict({**model.state_dict(), **averages})
    return model.eval().requires_grad_(False)


def _seed(evidence: Evidence, size: Size, seed: int, scale: str) -> None:
    """All arms of one seed."""
    from pippin.data.scenes import scenes

    held = scenes(spec_of(size.side), size.held_out, seed=10_000 + seed)
    for steps in size.levels:
        for name in (ALL, MARKOV, ALONE) if steps == 8 else (ALL, MARKOV):
            model = trained(size, seed, scale, steps, sees=SEES[name])
            x, condition = _shown(held, model)
            error = model.errors(x[:512], condition.rows(slice(0, 512)), seed=seed)[steps // 2 - 1]
            evidence.add(f"error in the middle of T = {steps}, {name}", error, seed=seed)
            if name != ALONE:
                _judge(evidence, size, seed, held, model, f"T = {steps}, {name}")
        variants: dict[str, dict[str, Any]] = {"token by token": {"order": "ar"}} if steps == 4 or size.flow else {}
        if size.flow:
            variants["flow"] = {"head": "fm"}
        for name, form in variants.items():
            _judge(evidence, size, seed, held, trained(size, seed, scale, steps, **form), f"T = {steps}, {name}")


def _shown(held: Any, model: DART) -> tuple[Tensor, Any]:
    """Held-out scenes and their numbers, where the model is."""
    from pippin.generate.condition import Condition

    device = model.levels.device
    return held.x.to(device), Condition(labels=(held.counts - 1).to(device))


def _judge(evidence: Evidence, size: Size, seed: int, held: Any, model: DART, name: str) -> None:
    """Samples for the numbers of the held-out scenes, in features and by the detector."""
    from pippin.data.scenes import count
    from pippin.evaluate.features import scene_features
    from pippin.evaluate.sample_quality import frechet_distance

    _, condition = _shown(held, model)
    start = time.perf_counter()
    drawn = model.sample(condition, seed=1_000_000 * (1 + seed)).cpu()
    evidence.add(f"time, {name}", (time.perf_counter() - start) / len(drawn), seed=seed, unit="s per picture")
    features = scene_features(held.spec, 0, steps=size.features)
    distance = frechet_distance(features(drawn), features(held.x))
    evidence.add(f"Frechet distance, {name}", distance, seed=seed)
    right = (count(drawn, held.spec) == held.counts).float().mean()
    evidence.add(f"right number, {name}", 100 * right, seed=seed, unit="%")
