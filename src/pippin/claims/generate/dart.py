"""A denoiser that reads every view against the Markov diffusion of the same network, and against reading one view.

Notable here:
- the baseline reads the one average of the views that holds all they tell, so both arms know equally much at every
  step; only the way in which the network gets it differs
- all arms share the initial weights, the batches, the schedule, the tokens of each pass and the number of passes; the
  learning rate of each is searched alike
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pippin.claims import Condition, Evidence, Scale, claim

if TYPE_CHECKING:
    from pippin.data.synthetic.scenes import SceneSpec
    from pippin.generate.methods.dart.model import DART


@dataclass(frozen=True)
class _Size:
    """Seeds and sizes of images, network and training; learning rates to search and numbers of passes."""

    seeds: tuple[int, ...]
    side: int
    layers: int
    width: int
    heads: int
    steps: int
    batch: int
    images: int
    held_out: int
    features: int
    rates: tuple[float, ...]
    passes: tuple[int, ...] = (4, 8)
    flow: bool = False


SIZES = Scale.choose(
    smoke=_Size((0,), 16, 1, 24, 2, 2, 4, 64, 16, 2, (3e-3,)),
    laptop=_Size((0, 1, 2), 16, 3, 64, 4, 450, 16, 3000, 512, 250, (1e-3, 3e-3, 9e-3)),
    gpu=_Size((0, 1, 2), 32, 12, 384, 6, 1000, 64, 20_000, 2048, 1000, (2e-4, 5e-4, 1e-3), (4, 8, 16), True),
)
ATTENDS_TO = {"all views": "all", "Markov": "statistic", "own view": "view"}


@claim(
    id="dart",
    source="arXiv:2410.08159",
    headline="a transformer that reads the whole trajectory of views is better than the same network as a Markov "
    "diffusion at equal, small numbers of steps; token by token within a step (4.0) or with a flow as head (3.8) it is "
    "better than with means sampled in parallel (5.6; FID-50k, ImageNet-256)",
    setting="scenes of 1 or 2 objects in the cells of a 2 x 2 grid, 16 x 16 pixels in 16 tokens, the number of objects "
    "given; 3 layers of width 64, 450 steps of 16 images with uniform weights, averaged weights, no guidance; learning "
    "rate of each arm by the same search over three, a third of the steps on a seed of its own; Frechet distance of "
    "512 samples to 512 held-out images in the features of a small classifier of scenes; 4 and 8 passes",
    method="all views",
    negative_controls=("Markov", "own view", "mean image of each class"),
    positive_control="true scenes",
    conditions=[
        Condition(
            "better than Markov",
            "the Frechet distance at 4 and at 8 passes is below that of the same network as a Markov diffusion: 95 % "
            "interval of the paired difference below 0 (published: better at equal, small numbers of steps)",
            lambda e, arm: all(e.paired(f"Frechet distance, {t} passes", arm, "Markov").high < 0 for t in (4, 8)),
            headline=True,
            positive=True,
        ),
        Condition(
            "token by token",
            "at 4 passes, sampling token by token has a lower Frechet distance than in parallel, and more images with "
            "as many objects as asked for: 95 % intervals of the paired differences (published: 4.0 against 5.6)",
            lambda e, arm: (
                e.paired("Frechet distance, 4 passes", f"{arm}, token by token", arm).high < 0
                and e.paired("images of the right number, 4 passes", f"{arm}, token by token", arm).low > 0
            ),
            headline=True,
        ),
        Condition(
            "views pay",
            "the held-out error at the middle view of 8 is at least 5 % below that of the network that reads its own "
            "view alone, every seed",
            lambda e, arm: all(
                ours <= 0.95 * theirs for ours, theirs in e.pairs("error at the middle view of 8", arm, "own view")
            ),
        ),
    ],
    reported="the flow as head, at gpu scale alone; seconds an image; the error at the middle view of 4",
    version=2,
    superseded={
        1: "half of it was closed forms of the schedule, which tests hold, and a sampler with exact means, which says "
        "nothing of a trained network (it misses an uneven mixture by 0.0525 at 16 steps, where 0.05 was asked); the "
        "rest compared means of three seeds at a learning rate that nobody had searched"
    },
)
def run(scale: Scale) -> Evidence:
    """Measure all arms on each seed, at the learning rates that a search on another seed found."""
    from pippin.claims.worlds.images.scene_pool import labeled
    from pippin.claims.worlds.training import SEARCH_SEED, best_rate, device_for
    from pippin.data.synthetic.scenes import sample_scenes

    evidence, size, device = Evidence(), SIZES[scale], device_for(scale.name)
    known = labeled(sample_scenes(_spec(size.side), min(size.held_out, 256), seed=20_000))

    def search(arm: str) -> float:
        def loss_at(rate: float) -> float:
            model = _trained(size, SEARCH_SEED, device, 8, rate, size.steps // 3, attends_to=ATTENDS_TO[arm])
            assert known.condition is not None
            return sum(model.errors(known.x.to(device), known.condition.to(device)))

        return best_rate(size.rates, loss_at)

    rates = {arm: search(arm) for arm in ATTENDS_TO}
    for arm, rate in rates.items():
        evidence.add("learning rate", rate, arm=arm)
    for seed in size.seeds:
        _seed(evidence, size, seed, device, rates)
    return evidence


def _spec(side: int) -> SceneSpec:
    """One or two objects in four cells."""
    from pippin.data.synthetic.scenes import SceneSpec

    return SceneSpec(size=side, objects=(1, 2), cells=2, radius=(1.8 * side / 16, 2.8 * side / 16))


def _trained(size: _Size, seed: int, device: str, passes: int, rate: float, steps: int, **form: Any) -> DART:
    """Train one network with that many views."""
    from pippin.claims.worlds.images.scene_pool import PoolBatches, labeled
    from pippin.claims.worlds.training import fit
    from pippin.data.synthetic.scenes import sample_scenes
    from pippin.generate.conditions import ConditioningSpec
    from pippin.generate.methods.dart.loss import NoisyViews
    from pippin.generate.methods.dart.model import DART, DartConfig
    from pippin.generate.methods.dart.schedule import NomadSchedule

    config = DartConfig(
        (1, size.side, size.side),
        num_hidden_layers=size.layers,
        hidden_size=size.width,
        num_attention_heads=size.heads,
        schedule=NomadSchedule.cosine(passes),
        condition=ConditioningSpec(num_classes=2),
        **form,
    )
    model = DART(config).initialize(seed)
    data = PoolBatches(labeled(sample_scenes(_spec(size.side), size.images, seed=100 + seed)), size.batch, seed)
    fit(
        model, NoisyViews("uniform"), data,
        steps=max(1, steps), seed=seed, lr=rate, device=device, ema=0.99, max_grad_norm=2.0,
    )  # fmt: skip
    return model.requires_grad_(False)


def _seed(evidence: Evidence, size: _Size, seed: int, device: str, rates: dict[str, float]) -> None:
    """Record all arms on one seed."""
    import torch

    from pippin.claims.worlds.images.scene_pool import Distance, labeled
    from pippin.data.synthetic.scenes import count, sample_scenes

    spec = _spec(size.side)
    held_out, other, known = (sample_scenes(spec, size.held_out, seed=n + seed) for n in (10_000, 11_000, 100))
    condition = labeled(held_out).condition
    assert condition is not None
    condition = condition.to(device)
    true, distance = other.x, Distance(held_out.x, spec, size.features)

    def judge(x: Any, passes: int, arm: str) -> None:
        evidence.add(f"Frechet distance, {passes} passes", distance(x), arm=arm, seed=seed)
        right = 100 * (count(x.cpu(), spec) == (other if x is true else held_out).counts).float().mean()
        evidence.add(f"images of the right number, {passes} passes", right, arm=arm, seed=seed, unit="%")

    def sampled(passes: int, arm: str, rate: float, **form: Any) -> DART:
        model = _trained(size, seed, device, passes, rate, size.steps, **form)
        start = time.perf_counter()
        x = model.sample(condition, seed=1_000_000 * (1 + seed))
        seconds = (time.perf_counter() - start) / len(x)
        evidence.add(f"seconds an image, {passes} passes", seconds, arm=arm, seed=seed, unit="s")
        judge(x, passes, arm)
        return model

    means = torch.stack([known.x[known.counts == n].mean(0) for n in (1, 2)])[held_out.counts - 1]
    for passes in size.passes:
        for arm, attends_to in ATTENDS_TO.items():
            if arm == "own view" and passes != 8:
                continue
            model = sampled(passes, arm, rates[arm], attends_to=attends_to)
            error = model.errors(held_out.x.to(device), condition, seed=seed)[passes // 2 - 1]
            evidence.add(f"error at the middle view of {passes}", error, arm=arm, seed=seed)
        if passes == 4 or size.flow:
            sampled(passes, "all views, token by token", rates["all views"], order="ar")
        if size.flow:
            sampled(passes, "all views, flow as head", rates["all views"], head="fm")
        judge(means, passes, "mean image of each class")
        judge(true, passes, "true scenes")
    evidence.add(
        "error at the middle view of 8", (means - held_out.x).square().mean(), arm="mean image of each class", seed=seed
    )
