"""A video flow and its denoiser; then videos three times as long as those in training.

Notable here:
- what is clean is known, so denoising is judged by the clean frames themselves, on clips that were not learned from
- the flow's own exact score (Tweedie) is the rival, and noise left as it is the control
- drift is measured by a tracker that looks at frames only; clips of the true movement have a drift, too, and bounces
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pippin.claims import Condition, Evidence, Scale, claim
from pippin.claims.worlds.images.moving_shapes import NOISE, ClipSize, clip_spec, held_out, supply, trained

if TYPE_CHECKING:
    from torch import Tensor

    from pippin.generate.flows.starflow.model import StarFlow

SIZES = Scale.choose(
    smoke=ClipSize((0,), 8, 4, 16, 2, (1, 2), 4, 2, 3e-3, 2),
    laptop=ClipSize((0, 1, 2), 16, 8, 48, 4, (1, 1, 1, 3), 700, 12, 4e-3, 32),
    gpu=ClipSize((0, 1, 2), 32, 16, 512, 8, (2, 2, 12), 800, 32, 5e-4, 64),
)
LONGER = 3
"""Times the trained length."""


@claim(
    id="starflow-v-denoising",
    source="arXiv:2511.20462",
    headline="flow-score matching denoises better than the flow's own score: PSNR 26.69 against 22.05 (Tweedie), 23.95 "
    "(decoder tuned on noise) and 32.22 (clean latents); a model of 5 s streams 30 s; the same flow goes on from a "
    "given frame",
    setting="videos of one moving shape, 8 frames of 16x16 in one level of Haar, 16 tokens a frame; noise 0.3; blocks "
    "of 1, 1, 1 and 3 layers and a score network of 2, width 48, trained together for 700 steps of 12 videos; 32 "
    "videos that were not trained on; streams of 24 frames, 7 kept as context",
    method="score network",
    negative_controls=("Tweedie", "noisy", "oscillating still"),
    positive_control="denoiser trained on clean frames",
    conditions=[
        Condition(
            "above Tweedie",
            "frames denoised by the score network have a PSNR at least 1 dB above Tweedie with the same flow, every "
            "seed (published: 26.69 against 22.05 dB)",
            lambda e, arm: all(a >= b + 1 for a, b in zip(e.each("PSNR", arm), e.each("PSNR", "Tweedie"), strict=True)),
            headline=True,
        ),
        Condition(
            "above the noise",
            "and at least 2 dB above the noisy frames, every seed",
            lambda e, arm: all(a >= b + 2 for a, b in zip(e.each("PSNR", arm), e.each("PSNR", "noisy"), strict=True)),
        ),
        Condition(
            "drift",
            "over 24 frames the tracked object's size and speed drift at most twice as far as those of true videos "
            "(mean absolute change from the first two frames or steps to the last two), every seed",
            lambda e, arm: all(
                a <= 2 * b
                for what in ("size drift", "speed drift")
                for a, b in zip(
                    e.each(f"{what}, thrice that", arm), e.each(f"{what}, thrice that", "true videos"), strict=True
                )
            ),
        ),
        Condition(
            "there",
            "the object is there in the last 8 frames at least 0.8 times as often as in the first, and its mean size "
            "and speed are within half of the true ones, every seed",
            lambda e, arm: (
                all(
                    late >= 0.8 * early > 0
                    for early, late in zip(
                        e.each("frames with an object, first third", arm),
                        e.each("frames with an object, last third", arm),
                        strict=True,
                    )
                )
                and all(
                    0.5 <= a / b <= 1.5
                    for what in ("size", "speed")
                    for a, b in zip(e.each(what, arm), e.each(what, "true videos"), strict=True)
                )
            ),
        ),
        Condition(
            "given",
            "a given first frame comes back with an error of 0.9 to 1.1 of the noise, and with less than that once "
            "denoised, every seed",
            lambda e, arm: (
                all(0.9 <= x <= 1.1 for x in e.each("error of a given frame over the noise", arm))
                and e.max("error of a given frame over the noise, denoised", arm)
                < e.min("error of a given frame over the noise", arm)
            ),
        ),
        Condition(
            "follows",
            "in the frame that follows a given one the object is nearer to where it was given than in videos of the "
            "same seeds without it, every seed",
            lambda e, arm: all(
                a < b
                for a, b in zip(
                    e.each("from the first frame's object to the second's, given", arm),
                    e.each("from the first frame's object to the second's, not given", arm),
                    strict=True,
                )
            ),
        ),
    ],
    uses=("pippin.generate.flows.starflow.sample",),
    version=2,
    superseded={
        1: "it allowed the score network to be 0.3 dB below Tweedie, where the paper has it 4.6 dB above, and drift "
        "was relative to the model's own, which an oscillating still passes"
    },
)
def run(scale: Scale) -> Evidence:
    """Measure denoising, long videos and given frames on each seed."""
    evidence, size = Evidence(), SIZES[scale]
    for seed in size.seeds:
        model = trained(size, seed, scale.name)
        _denoised(evidence, model, size, seed)
        _streamed(evidence, model, size, seed)
        _continued(evidence, model, size, seed)
    return evidence


def _denoised(evidence: Evidence, model: StarFlow, size: ClipSize, seed: int) -> None:
    """Record PSNR of noisy frames, and of frames denoised in three ways."""
    import torch

    clean = held_out(size, seed)
    noisy = clean + NOISE * torch.randn(clean.shape, generator=torch.Generator().manual_seed(seed))
    noisy = noisy.to(next(model.parameters()).device)
    for arm, x in (
        ("noisy", noisy),
        ("score network", model.denoise(noisy)),
        ("Tweedie", model.denoise(noisy, method="tweedie")),
        ("denoiser trained on clean frames", _regression(size, seed)(noisy.cpu().flatten(0, 1)).view_as(clean)),
    ):
        psnr = 10 * math.log10(4 / float((x.cpu() - clean).square().mean()))
        evidence.add("PSNR", psnr, arm=arm, seed=seed, unit="dB")


def _regression(size: ClipSize, seed: int) -> Any:
    """Train a small convolutional denoiser, the positive control."""
    import torch
    from torch import nn

    from pippin.claims.worlds.training import fit
    from pippin.train import Loss

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Conv2d(1 if index == 0 else size.width, size.width, 3, padding=1) for index in range(4)]
        model = nn.Sequential(
            *(m for layer in layers for m in (layer, nn.GELU())), nn.Conv2d(size.width, 1, 3, padding=1)
        )

    def objective(model: nn.Module, batch: Tensor, generator: torch.Generator) -> Loss:
        noisy = batch + NOISE * torch.randn(batch.shape, generator=generator)
        error = (model(noisy) - batch).square()
        return Loss(error.sum(), error.numel())

    def batches() -> Any:
        yield from (sampled.x.flatten(0, 1) for sampled in supply(size, seed))

    fit(model, objective, batches(), steps=size.steps, seed=seed, lr=2e-3, weight_decay=0.0)
    return model.requires_grad_(False)


def _streamed(evidence: Evidence, model: StarFlow, size: ClipSize, seed: int) -> None:
    """Record the drift of an object's size and speed over the trained length and over three times that."""
    import torch

    from pippin.data.synthetic.video_clips import sample_video_clips, track

    frames, spec = LONGER * size.frames, clip_spec(size, LONGER * size.frames)
    true = sample_video_clips(spec, size.n, seed=9_900 + seed).x
    made = torch.stack([frame.cpu() for frame in model.stream(n=size.n, frames=frames, seed=seed)], 1)
    still = torch.stack([true[:, 0].roll(index % 2, -1) for index in range(frames)], 1)
    for arm, x in (("score network", made), ("true videos", true), ("oscillating still", still)):
        found = track(x, spec.scene)
        for what, series in (("size", found.areas), ("speed", found.speeds)):
            steps = size.frames - (what == "speed")
            evidence.add(f"{what} drift, trained length", _drift(series[:, :steps]), arm=arm, seed=seed)
            evidence.add(f"{what} drift, thrice that", _drift(series), arm=arm, seed=seed)
        early, late = float(found.visible[:, : size.frames].mean()), float(found.visible[:, -size.frames :].mean())
        evidence.add("frames with an object, first third", early, arm=arm, seed=seed)
        evidence.add("frames with an object, last third", late, arm=arm, seed=seed)
        evidence.add("size", float(found.areas.mean()), arm=arm, seed=seed, unit="pixels")
        evidence.add("speed", float(found.speeds.nanmean()), arm=arm, seed=seed, unit="pixels/frame")


def _drift(series: Tensor) -> float:
    """Mean relative change from the first two values of each row to its last two, NaN ignored."""
    change = (series[:, -2:].nanmean(1) - series[:, :2].nanmean(1)).abs()
    return float(change.nanmean() / series.nanmean())


def _continued(evidence: Evidence, model: StarFlow, size: ClipSize, seed: int) -> None:
    """Record the reconstruction of a given frame, and the position of the object in the next one."""
    import torch

    from pippin.data.synthetic.video_clips import track

    clean = held_out(size, seed)
    given = clean[:, :1].to(next(model.parameters()).device)
    spec = clip_spec(size).scene
    raw = model.sample(given=given, seed=seed, denoise=False).cpu()
    made, alone = model.sample(given=given, seed=seed).cpu(), model.sample(n=len(given), seed=seed).cpu()

    def error(x: Tensor) -> float:
        return math.sqrt(float((x[:, 0] - clean[:, 0]).square().mean()))

    def away(x: Tensor) -> float:
        """Distance of the object in pixels between the given and the second frame; half a frame if it is not found."""
        gap = track(x, spec).centers[:, 1] - track(clean, spec).centers[:, 0]
        return float(torch.nan_to_num(torch.hypot(gap[:, 0], gap[:, 1]), size.size / 2).mean())

    arm = "score network"
    evidence.add("error of a given frame over the noise", error(raw) / NOISE, arm=arm, seed=seed)
    evidence.add("error of a given frame over the noise, denoised", error(made) / NOISE, arm=arm, seed=seed)
    for name, value in (("given", away(made)), ("not given", away(alone)), ("true", away(clean))):
        evidence.add(f"from the first frame's object to the second's, {name}", value, arm=arm, seed=seed, unit="pixels")
