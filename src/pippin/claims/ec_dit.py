"""Experts that choose their tokens in a diffusion transformer: quality at equal work, and where the work goes.

Notable here:
- a dense network with a wider layer, tokens that choose two experts, and experts that choose are trained on the same
  batches in the same order; what they multiply for a picture differs by the router alone
- work goes to objects only if the ratio falls to 1 with the masks of other pictures and with routers that were never
  trained; a map of such a router is a picture, too
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from pippin.claims import Evidence, Scale, claim

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from pippin.generate.condition import Samples
    from pippin.generate.diffusion import Diffusion
    from pippin.generate.dit import DiTConfig


@dataclass(frozen=True)
class Size:
    """How much is trained and looked at: seeds, side of the pictures, the network, steps, and pictures."""

    seeds: tuple[int, ...]
    side: int
    width: int
    layers: int
    experts: int
    steps: int
    batch: int
    pictures: int
    held_out: int


SIZES = {
    "smoke": Size((0,), 16, 16, 2, 8, 4, 8, 64, 32),
    "laptop": Size((0, 1, 2), 16, 32, 4, 8, 900, 16, 4000, 512),
    "gpu": Size((0, 1, 2), 32, 384, 8, 16, 1500, 128, 20_000, 1024),
}
CAPACITY = 2
RATE = 3e-3
TIMES = (0.05, 0.15, 0.25, 0.35)
"""Times at which work is looked at: less than 0.4, where objects have their edges."""
DRAWS = 8
"""Routers that were never trained, over which the control is averaged."""
WORK = "experts on objects / on ground"
ARMS = ("dense", "token choice", "expert choice")


@claim(
    id="ec-dit",
    source="arXiv:2410.02098",
    paper="experts that choose tokens scale diffusion transformers better than dense layers and token choice at equal "
    "active work (8 experts equal 16 of token choice); up to 44 % of experts choose the same detailed token",
    setting="grey scenes of 16 x 16 with 1 to 3 objects on a flat ground, classes by number; DiT of 4 layers, width "
    "32, patches of 2, 8 experts and capacity 2 in layers 2 and 4; flow matching, 900 steps of 16; dense with twice "
    "the inner width in layers 2 and 4; token choice of 2 of 8 experts without drop, balance loss 0.01; 4 experts are "
    "reported beside, for one seed",
    accept="means over 3 seeds: the held-out loss of expert choice exceeds neither that of the dense network nor that "
    "of token choice by more than one standard error of the paired difference; experts per patch on patches with "
    "objects over those on flat ground, at times below 0.4, above 1.2; the same with routers that were never trained "
    "between 0.9 and 1.1; the same with the objects of other pictures between 0.9 and 1.1; correlation of experts per "
    "patch with the patch's error above 0.2; an upcycled network differs from the dense one by less than 1e-5, and a "
    "picture alone from the picture in a batch by less than 1e-5",
)
def run(scale: Scale) -> Evidence:
    """Three networks for each seed, then the maps of the third."""
    evidence, size = Evidence(), SIZES[scale.name]
    exact = all([_one_seed(evidence, seed, size) for seed in size.seeds])
    losses = {arm: evidence.each(f"held-out loss, {arm}") for arm in ARMS}
    mean = evidence.mean
    return evidence.accept(
        dense=_no_worse(losses["expert choice"], losses["dense"]),
        token_choice=_no_worse(losses["expert choice"], losses["token choice"]),
        adaptive=mean(WORK) > 1.2,
        untrained=abs(mean(f"{WORK}, routers never trained") - 1) <= 0.1,
        shuffled=abs(mean(f"{WORK}, other pictures' objects") - 1) <= 0.1,
        correlated=mean("correlation of experts with error") > 0.2,
        exact=exact,
    )


def _no_worse(ours: list[float], theirs: list[float]) -> bool:
    """Whether the mean difference is within one standard error of 0, or below."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else 0.0
    return statistics.mean(differences) <= error


# --- training ---------------------------------------------------------------------------------------------------------


def _spec(size: Size) -> Any:
    from pippin.data.scenes import SceneSpec

    factor = size.side / 16
    return SceneSpec(size=size.side, objects=(1, 3), radius=(1.8 * factor, 2.8 * factor))


def _network(arm: str, size: Size) -> DiTConfig:
    from pippin.generate.dit import DiTConfig

    base = DiTConfig(width=size.width, layers=size.layers, heads=4, experts=size.experts, capacity=CAPACITY)
    if arm == "dense":
        # the layers that are sparse elsewhere are as wide as all experts that work on a token together
        return replace(base, hidden=tuple(4 * size.width * (CAPACITY if i % 2 else 1) for i in range(size.layers)))
    return replace(base, feed_forward="token_choice" if arm == "token choice" else "expert_choice")


def _model(arm: str, size: Size, seed: int) -> Diffusion:
    from pippin.generate.condition import ConditionSpec
    from pippin.generate.diffusion import Diffusion, DiffusionConfig
    from pippin.generate.schedules import NoiseSchedule

    config = DiffusionConfig(
        (1, size.side, size.side),
        _network(arm, size),
        ConditionSpec(classes=3),
        NoiseSchedule.flow(),
        prediction="flow",
    )
    return Diffusion(config).initialise(seed)


class Batches:
    """Random batches of fixed pictures without end, the same for every network of a seed."""

    def __init__(self, samples: Samples, batch: int, seed: int) -> None:
        self.samples, self.batch, self.seed = samples, batch, seed

    def __iter__(self) -> Iterator[Samples]:
        """From the first one on."""
        import torch

        generator = torch.Generator().manual_seed(self.seed)
        while True:
            yield _rows(self.samples, torch.randint(len(self.samples), (self.batch,), generator=generator))


def _rows(samples: Samples, rows: Any) -> Samples:
    from pippin.generate.condition import Samples

    assert samples.condition is not None
    return Samples(samples.x[rows], samples.condition.rows(rows))


def _pictures(size: Size, n: int, seed: int) -> tuple[Samples, Tensor]:
    """Pictures with their classes, and where their objects are."""
    from pippin.data.scenes import scenes
    from pippin.generate.condition import Condition, Samples

    drawn = scenes(_spec(size), n, seed=seed)
    return Samples(drawn.x, Condition(labels=drawn.counts - 1)), drawn.masks


def _device(size: Size) -> str:
    import torch

    return "cuda" if size.side > 16 and torch.cuda.is_available() else "cpu"


def _trained(evidence: Evidence, name: str, model: Diffusion, size: Size, seed: int, data: Batches) -> None:
    """Train one network; its pace and its cost are noted."""
    from pippin.generate.diffusion import Denoising
    from pippin.train import AdamW, Cosine, Trainer

    device = _device(size)
    training = Trainer(
        model,
        Denoising(drop=0.0, times="logit_normal"),
        data,
        steps=size.steps,
        optimiser=AdamW(lr=RATE * (32 / size.width) ** 0.5, weight_decay=0.01),
        schedule=Cosine(warmup=0.05),
        precision="bfloat16" if device == "cuda" else "float32",
        device=device,
        seed=seed,
        show=False,
    ).fit()
    model.eval()
    network: Any = model.network
    pace = statistics.median(step.seconds for step in training.steps)
    evidence.add(f"time of a step, {name}", pace, seed=seed, unit="s")
    evidence.add(f"multiply-adds of a picture, {name}", network.multiply_adds(), seed=seed)


def _one_seed(evidence: Evidence, seed: int, size: Size) -> bool:
    """All arms of one seed; whether upcycling and batches are exact."""
    from pippin.generate.diffusion import held_out_loss

    learnt, _ = _pictures(size, size.pictures, 100 + seed)
    held, masks = _pictures(size, size.held_out, 900 + seed)
    few, where = _rows(held, slice(0, 256)), masks[:256]
    arms = [(arm, arm, size) for arm in ARMS]
    if seed == 0:
        arms.append(("expert choice of 4", "expert choice", replace(size, experts=4)))
    models = {}
    for name, arm, form in arms:
        model = models[name] = _model(arm, form, seed)
        _trained(evidence, name, model, form, seed, Batches(learnt, size.batch, seed))
        evidence.add(f"held-out loss, {name}", held_out_loss(model, held, 7), seed=seed)
    _adaptivity(evidence, "", models["expert choice"], few, where, seed)
    if seed == 0:
        _adaptivity(evidence, ", 4 experts", models["expert choice of 4"], few, where, seed)
    fresh = [_model("expert choice", size, 1000 + draw).to(_device(size)).eval() for draw in range(DRAWS)]
    beginning = statistics.mean(_ratio(model, few, where, seed)[0] for model in fresh)
    evidence.add(f"{WORK}, network before training", beginning, seed=seed)
    return _exact(evidence, models["dense"].cpu(), models["expert choice"].cpu(), few, seed)


# --- where the work goes ----------------------------------------------------------------------------------------------


def _adaptivity(evidence: Evidence, name: str, model: Diffusion, held: Samples, masks: Tensor, seed: int) -> None:
    """The ratio with its two controls, the correlation with the error, and the busiest patch."""
    import copy

    import torch

    from pippin.nn.expert_choice import ExpertChoiceFFN

    ratio, correlation, most = _ratio(model, held, masks, seed)
    shuffled, *_ = _ratio(model, held, masks.roll(1, 0), seed)
    redrawn = []
    for draw in range(DRAWS):
        other, generator = copy.deepcopy(model), torch.Generator().manual_seed(draw)
        for layer in other.modules():
            if isinstance(layer, ExpertChoiceFFN):
                weights = torch.randn(layer.router.shape, generator=generator) / layer.router.shape[1] ** 0.5
                layer.router.data.copy_(weights)
        redrawn.append(_ratio(other, held, masks, seed)[0])
    evidence.add(f"{WORK}{name}", ratio, seed=seed)
    evidence.add(f"{WORK}, other pictures' objects{name}", shuffled, seed=seed)
    evidence.add(f"{WORK}, routers never trained{name}", statistics.mean(redrawn), seed=seed)
    evidence.add(f"correlation of experts with error{name}", correlation, seed=seed)
    evidence.add(f"largest share of experts on one patch{name}", most, seed=seed)


def _ratio(model: Diffusion, held: Samples, masks: Tensor, seed: int) -> tuple[float, float, float]:
    """Means over the times: the ratio, the correlation with the error, and the largest share of experts on a patch."""
    import torch
    import torch.nn.functional as F

    from pippin.generate.compute_map import compute_map
    from pippin.generate.folder import device_of

    generator = torch.Generator().manual_seed(seed)
    covered = masks.float()[:, None]
    objects = F.max_pool2d(covered, 2)[:, 0] > 0
    ground = F.max_pool2d(F.max_pool2d(covered, 5, 1, 2), 2)[:, 0] == 0  # two pixels and more from every object
    network, device = cast(Any, model.network), device_of(model)
    condition = None if held.condition is None else held.condition.to(device)
    x, objects, ground = held.x.to(device), objects.to(device), ground.to(device)
    ratios, correlations, most = [], [], []
    for t in TIMES:
        eps = torch.randn(x.shape, generator=generator).to(device)
        noisy = (1 - t) * x + t * eps
        experts = compute_map(model, noisy, t, condition).float()
        with torch.no_grad():
            error = F.avg_pool2d((model(noisy, t, condition) - (eps - x)).square(), 2)[:, 0]
        taken = experts.mean(1)
        ratios.append(float(taken[objects].mean() / taken[ground].mean()))
        correlations.append(float(torch.corrcoef(torch.stack([taken.flatten(), error.flatten()]))[0, 1]))
        most.append(float(experts.max()) / network.config.experts)
    return statistics.mean(ratios), statistics.mean(correlations), max(most)


def _exact(evidence: Evidence, dense: Diffusion, sparse: Diffusion, held: Samples, seed: int) -> bool:
    """Whether an upcycled network says what the dense one says, and a picture what it says in a batch."""
    import torch

    from pippin.generate.upcycling import upcycle

    few = _rows(held, slice(0, 16))
    with torch.no_grad():
        upcycled = float((upcycle(dense, 4)(few.x, 0.3, few.condition) - dense(few.x, 0.3, few.condition)).abs().max())
        together = sparse(few.x, 0.3, few.condition)
        ones = [_rows(few, slice(i, i + 1)) for i in range(16)]
        apart = float((torch.cat([sparse(one.x, 0.3, one.condition) for one in ones]) - together).abs().max())
    evidence.add("largest difference after upcycling", upcycled, seed=seed)
    evidence.add("largest difference alone and in a batch", apart, seed=seed)
    return upcycled < 1e-5 and apart < 1e-5
