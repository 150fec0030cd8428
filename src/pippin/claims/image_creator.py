"""One image creator over four families of generators: the same contract, followed descriptions, honest estimates.

Notable here:
- descriptions go through the real encoder; the control is the same pictures against other descriptions
- what a mask leaves is compared to the level; what is drawn must join it as real pictures do
- memory is that of a process of its own, beyond what it held before there was a model
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any
from unittest import mock

from pippin.claims import Evidence, Scale, claim

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from pippin.data.scenes import Scenes, SceneSpec
    from pippin.generate.condition import Samples
    from pippin.kits.image import ImageCreator, TextEncoder


@dataclass(frozen=True)
class Size:
    """How much is trained and drawn.

    Steps and scenes of a batch of each model (diffusion, flow, DART); descriptions, filled-in pictures, the models'
    width as a factor and their pictures' side; then the sides of pictures whose memory is measured, and how many.
    """

    seeds: tuple[int, ...]
    steps: tuple[int, int, int]
    batches: tuple[int, int, int]
    prompts: int
    filled: int
    width: int
    pixels: int
    sides: tuple[int, ...]
    measured: int


SIZES = {
    "smoke": Size((0,), (2, 2, 2), (4, 4, 4), 2, 1, 1, 16, (16,), 4),
    "laptop": Size((0, 1, 2), (600, 1000, 500), (32, 32, 16), 64, 8, 1, 16, (96, 128, 160), 16),
    "gpu": Size((0, 1, 2), (4000, 6000, 4000), (128, 128, 64), 64, 32, 3, 64, (128, 192, 256), 32),
}
TRAINED = ("diffusion", "flow", "dart")
FAMILIES = ("diffusion", "composition", "flow", "dart")
DROP = 0.1
RATE = 3e-3
BUDGETS = "over budget: share of one picture's bytes that was allocated"


@claim(
    id="image-creator",
    source="reconstructed",
    paper="one programmatic interface for pictures from descriptions; here the same call runs four families of models, "
    "with reproducible seeds, strength, filling in, cancellation, typed errors and estimates of memory",
    setting="scenes of 16 by 16 pixels with 0 to 2 white squares or diamonds in 4 cells; captions through "
    "all-MiniLM-L6-v2; a diffusion model, the same model composed over 'nothing', a TarFlow and a DART, 600 and "
    "1,000 steps of 32 scenes and 500 of 16, condition left out for 1 in 10",
    accept="for each family: seeds reproduce bit-exactly, n=1 is the first of n=4, strength 0 returns the picture "
    "within 1/255 and strength 1 does not depend on it, guidance 1 is the unguided model, progress rises to its "
    "total, a drawing is cancelled within one step, no socket is opened; count and shapes found by the detector for "
    "64 descriptions (guidance 2, which is the creator's own) are right at least 0.3 more often than against shuffled "
    "descriptions, and guidance 2 is no worse than guidance 1 (means over seeds); known pixels are kept within 1/255, "
    "and gradient energy across the border of the filled-in part is within 1.5 times that of real scenes, up or down; "
    "peak memory of a process of its own is within 30 % of the estimate for three sizes, and an over-budget plan is "
    "refused with less than one picture's "
    "bytes allocated; each of 8 bad requests raises its own error",
)
def run(scale: Scale) -> Evidence:
    """Every family, for each seed; then memory and errors."""
    import torch

    evidence, size = Evidence(), SIZES[scale.name]
    device = "cuda" if scale.name == "gpu" and torch.cuda.is_available() else "cpu"
    contract: dict[str, bool] = {}
    for seed in size.seeds:
        models = {name: _trained(name, size, seed, device) for name in TRAINED}
        for family in FAMILIES:
            creator = _creator(models["diffusion" if family == "composition" else family], family)
            contract[family] = contract.get(family, True) and _contract(creator, family)
            _follows(evidence, creator, family, size, seed)
            _fills(evidence, creator, family, size, seed)
    for side in size.sides:
        _memory(evidence, side, size.measured, device)
    apart = len({_refusal(index) for index in range(8)})
    evidence.add("bad requests with an error of their own", apart, unit="of 8")
    mean, each = evidence.mean, evidence.each
    return evidence.accept(
        **{f"contract_{family}": held for family, held in contract.items()},
        **{f"follows_{family}": mean(f"{family}: right - shuffled") >= 0.3 for family in FAMILIES},
        **{
            f"guided_{family}": mean(f"{family}: right, guidance 2") >= mean(f"{family}: right, guidance 1")
            for family in FAMILIES
        },
        kept=all(max(each(f"{family}: largest change of a known pixel")) <= 1 for family in FAMILIES),
        **{f"border_{family}": 1 / 1.5 <= mean(f"{family}: border energy over real") <= 1.5 for family in FAMILIES},
        memory=all(0.7 <= ratio <= 1.3 for side in size.sides for ratio in each(f"peak / estimate, {side} pixels")),
        refused=all(max(each(f"{BUDGETS}, {side} pixels")) < 1 for side in size.sides),
        errors=apart == 8,
    )


# --- models -----------------------------------------------------------------------------------------------------------


@cache
def _encoder() -> TextEncoder:
    from pippin.core import store
    from pippin.kits.image import TextEncoder

    store.pull("all-minilm-l6-v2", show_progress=False)
    return TextEncoder.load(device="cpu")


def _spec(pixels: int) -> SceneSpec:
    from pippin.data.scenes import SceneSpec

    scaled = pixels / 16
    radius = (2.6 * scaled, 3.0 * scaled)
    return SceneSpec(pixels, objects=(0, 2), cells=2, kinds=("square", "diamond"), radius=radius)


class Described:
    """Batches of scenes with their captions, encoded once each."""

    def __init__(self, pixels: int, batch: int, seed: int) -> None:
        self.pixels, self.batch, self.seed = pixels, batch, seed

    def __iter__(self) -> Iterator[Samples]:
        """The batches from the first one on."""
        from pippin.data.scenes import SceneStream
        from pippin.generate.condition import Samples

        for scenes in SceneStream(_spec(self.pixels), self.batch, seed=self.seed):
            yield Samples(scenes.x, _encoder().condition(scenes.captions))


def _untrained(name: str, pixels: int, factor: int = 1) -> tuple[Any, Any]:
    """A model of a family, and its objective."""
    from pippin.generate.condition import ConditionSpec

    spec, shape = ConditionSpec(text=_encoder().width, null=True), (1, pixels, pixels)
    if name == "diffusion":
        from pippin.generate.diffusion import Denoising, Diffusion, DiffusionConfig
        from pippin.generate.unet import UNetConfig

        network = UNetConfig(width=32 * factor, patch=2, levels=2)
        return Diffusion(DiffusionConfig(shape, network, spec, steps=10)), Denoising(DROP)
    if name == "flow":
        from pippin.generate.tarflow import Likelihood, TarFlow, TarFlowConfig

        patch, layers = pixels // 4, (2, 2, 2, 2)
        flow = TarFlowConfig(
            shape, patch=patch, layers=layers, width=64 * factor, condition=spec, noise=0.1, soft_clip=4.0
        )
        return TarFlow(flow), Likelihood(drop=DROP)
    from pippin.generate.dart import DART, DartConfig
    from pippin.generate.dart_training import NoisyViews

    dart = DartConfig(shape, patch=pixels // 4, layers=3, width=72 * factor, heads=4, condition=spec)
    return DART(dart), NoisyViews(drop=DROP)


def _trained(name: str, size: Size, seed: int, device: str) -> Any:
    from pippin.train import AdamW, Cosine, Trainer

    model, objective = _untrained(name, size.pixels, size.width)
    steps, batch = size.steps[TRAINED.index(name)], size.batches[TRAINED.index(name)]
    model.initialise(seed).to(device)
    Trainer(
        model,
        objective,
        Described(size.pixels, batch, seed),
        steps=steps,
        optimiser=AdamW(lr=RATE, weight_decay=0.0),
        schedule=Cosine(warmup=min(20, steps - 1)),
        seed=seed,
        show=False,
    ).fit()
    return model.eval().requires_grad_(False)


def _creator(model: Any, family: str) -> ImageCreator:
    from pippin.kits.image import ImageCreator

    return ImageCreator(model, encoder=_encoder(), compose="nothing" if family == "composition" else None)


def _concepts(caption: str, family: str) -> list[str]:
    """A composition takes each kind of object as a part of its own."""
    return caption.split(" and ") if family == "composition" else [caption]


# --- checks -----------------------------------------------------------------------------------------------------------


def _contract(creator: ImageCreator, family: str) -> bool:
    """All that every family promises, without the network."""
    import torch

    from pippin.kits.image import ImageRef

    words = _concepts("one white diamond and one white square", family)
    shape = creator.model.shape
    start = torch.rand(shape, generator=torch.Generator().manual_seed(5)) * 2 - 1

    def drawn(parts: Sequence[Any] = (), **settings: Any) -> Tensor:
        return torch.stack([picture.x for picture in creator.images([*words, *parts], **settings)])

    def asked(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a socket was opened")

    seen: list[Any] = []
    with mock.patch.object(socket, "socket", asked), mock.patch.object(socket, "create_connection", asked):
        four = drawn(limit=4, seed=7, on_progress=seen.append)
        unguided = drawn(seed=3, guidance=1.0)
        job = creator.plan(words, guidance=1.0, seed=3).job
        with_one = [
            torch.equal(four, drawn(limit=4, seed=7)),
            torch.equal(four[:1], drawn(seed=7)),
            bool((drawn([ImageRef(start)], strength=0.0) - start).abs().max() <= 2.01 / 255),
            torch.equal(drawn([ImageRef(start)], strength=1.0), drawn([ImageRef(-start)], strength=1.0)),
            not torch.equal(drawn([ImageRef(start)], strength=0.3), drawn([ImageRef(-start)], strength=0.3)),
            bool((unguided - _unguided(creator, job, family)).abs().max() <= 2.01 / 255),
        ]
    rising = [one.done for one in seen]
    with_one.append(rising == sorted(set(rising)) and rising[-1] == seen[-1].total)
    return all(with_one) and _cancels(creator, words)


def _unguided(creator: ImageCreator, job: Any, family: str) -> Tensor:
    """The model itself, or its composition, asked without the creator."""
    from pippin.generate.composition import compose

    model: Any = creator.model
    if family == "composition":
        behind = _encoder().condition(["nothing"])
        x = compose(list(job.conditions), behind, of=model).sample(n=1, steps=job.steps, seed=job.seed)
    else:
        x = model.sample(job.condition, 1, steps=job.steps, seed=job.seed)
    return x.cpu().clamp(-1, 1)


def _cancels(creator: ImageCreator, words: list[str]) -> bool:
    """Whether no step is made after the one in which the drawing was cancelled."""
    from pippin.core.errors import Cancelled

    stop, steps = threading.Event(), list[int]()

    def tell(progress: Any) -> None:
        steps.append(progress.done)
        stop.set()

    try:
        list(creator.images(words, limit=2, on_progress=tell, cancel=stop))
    except Cancelled:
        return steps == [1]
    return False


def _follows(evidence: Evidence, creator: ImageCreator, family: str, size: Size, seed: int) -> None:
    """Whether descriptions are followed, and whether it is these."""
    import torch

    from pippin.data.scenes import caption, detect, scenes

    spec = _spec(size.pixels)
    held = [one for one in scenes(spec, 4 * size.prompts, seed=9000 + seed).captions if one != "nothing"]
    counts = Counter(held[: size.prompts])
    right: dict[float, float] = {}
    for guidance in (1.0, 2.0):
        wanted, found = list[str](), list[str]()
        for said, n in sorted(counts.items()):
            settings: dict[str, Any] = {"limit": n, "together": n, "seed": 1000, "guidance": guidance}
            x = torch.stack([picture.x for picture in creator.images(_concepts(said, family), **settings)])
            wanted += [said] * n
            found += [caption([one.thing for one in here]) for here in detect(x, spec)]
        right[guidance] = _agree(wanted, found)
        if guidance == 2.0:
            order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed)).tolist()
            shuffled = _agree(wanted, [found[index] for index in order])
    evidence.add(f"{family}: right, guidance 1", right[1.0], seed=seed)
    evidence.add(f"{family}: right, guidance 2", right[2.0], seed=seed)
    evidence.add(f"{family}: right, guidance 2, against shuffled", shuffled, seed=seed)
    evidence.add(f"{family}: right - shuffled", right[2.0] - shuffled, seed=seed)


def _agree(wanted: Sequence[str], found: Sequence[str]) -> float:
    return sum(a == b for a, b in zip(wanted, found, strict=True)) / len(wanted)


def _fills(evidence: Evidence, creator: ImageCreator, family: str, size: Size, seed: int) -> None:
    """The middle of held-out scenes drawn anew: what stays, and how the parts join."""
    import torch

    from pippin.data.scenes import scenes
    from pippin.kits.image import Mask

    spec, pixels = _spec(size.pixels), size.pixels
    held = scenes(spec, 6 * size.filled, seed=9500 + seed)
    chosen = [index for index, caption in enumerate(held.captions) if caption != "nothing"][: size.filled]
    redraw = torch.zeros(1, pixels, pixels, dtype=torch.bool)
    # it cuts objects in their middle, and on the left at their edges
    redraw[:, pixels // 4 : 3 * pixels // 4, 3 * pixels // 8 : 3 * pixels // 4] = True
    changed, energy = 0.0, list[float]()
    plain = list[float]()
    for index in chosen:
        words = _concepts(held.captions[index], family)
        drawn = list(creator.edit(held.x[index], Mask(redraw), words, limit=2, together=2, seed=index, guidance=1.0))
        free = list(creator.images(words, limit=2, together=2, seed=index, guidance=1.0))
        for picture, other in zip(drawn, free, strict=True):
            away = (picture.levels.int() - held.images[index].int()).abs()
            changed = max(changed, float(away[~redraw].max()))
            energy.append(_border(picture.x, redraw))
            plain.append(_border(torch.where(redraw, other.x, held.x[index]), redraw))
    real = _mean_border(held, redraw)
    evidence.add(f"{family}: largest change of a known pixel", changed, seed=seed, unit="levels")
    evidence.add(f"{family}: border energy over real", sum(energy) / len(energy) / real, seed=seed)
    evidence.add(f"{family}: border energy over real, pasted", sum(plain) / len(plain) / real, seed=seed)


def _border(x: Tensor, redraw: Tensor) -> float:
    """Mean square of the steps between neighbours of which one is in the mask."""
    down = (x[:, 1:] - x[:, :-1])[redraw[:, 1:] != redraw[:, :-1]]
    right = (x[..., 1:] - x[..., :-1])[redraw[..., 1:] != redraw[..., :-1]]
    return float((down.square().sum() + right.square().sum()) / (len(down) + len(right)))


def _mean_border(held: Scenes, redraw: Tensor) -> float:
    full = [held.x[index] for index, caption in enumerate(held.captions) if caption != "nothing"]
    return sum(_border(x, redraw) for x in full) / len(full)


# --- memory and errors ------------------------------------------------------------------------------------------------

_CHILD = """
import sys
from pippin.claims.image_creator import measured
print(*measured(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
"""


def measured(side: int, together: int, device: str) -> tuple[float, float, float, float]:
    """In a process of its own: bytes estimated, bytes used, seconds estimated, and the share allocated when refused."""
    import torch

    from pippin.core.device import peak_memory
    from pippin.core.errors import OverMemoryBudget
    from pippin.generate.condition import ConditionSpec
    from pippin.generate.diffusion import Diffusion, DiffusionConfig
    from pippin.generate.unet import UNetConfig
    from pippin.kits.image import ImageCreator
    from pippin.kits.image.plan import LiveBytes

    def make(pixels: int, **settings: Any) -> ImageCreator:
        config = DiffusionConfig((1, pixels, pixels), UNetConfig(width=32, levels=2), ConditionSpec(), steps=2)
        return ImageCreator(Diffusion(config).initialise(0).to(device).eval().requires_grad_(False), **settings)

    # what is loaded with the first pictures of any size
    list(make(16).images([], limit=together, together=together))
    make(16).estimate([])
    before = peak_memory()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.max_memory_allocated()
    creator = make(side)
    cost = creator.estimate([], limit=together, together=together)
    list(creator.images([], limit=together, together=together))
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else peak_memory()
    small = make(side, memory_budget=cost.weights + cost.each // 2)
    with LiveBytes() as watch:
        try:
            small.images([])
            return cost.bytes, peak - before, cost.seconds, float("inf")
        except OverMemoryBudget:
            return cost.bytes, peak - before, cost.seconds, watch.peak / cost.each


def _memory(evidence: Evidence, side: int, together: int, device: str) -> None:
    command = [sys.executable, "-c", _CHILD, str(side), str(together), device]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    estimate, used, seconds, allocated = map(float, said[-4:])
    evidence.add(f"estimate, {side} pixels", estimate / 1e6, unit="MB")
    evidence.add(f"peak, {side} pixels", used / 1e6, unit="MB")
    evidence.add(f"peak / estimate, {side} pixels", used / estimate)
    evidence.add(f"seconds estimated, {side} pixels", seconds, unit="s")
    evidence.add(f"{BUDGETS}, {side} pixels", allocated)


def _refusal(index: int) -> str:
    """The error of one of eight bad requests."""
    import torch

    from pippin.core.errors import PippinError
    from pippin.kits.image import ImageCreator, ImageRef
    from pippin.session.guardrails import Guardrails

    model, _ = _untrained("diffusion", 16)
    model.initialise(0).eval()
    creator = ImageCreator(model, encoder=_encoder(), guard=Guardrails.default())
    stop = threading.Event()
    stop.set()
    requests: list[Any] = [
        lambda: ImageCreator.load("no such folder"),
        lambda: creator.images("two squares", style="baroque"),
        lambda: creator.images("Zwei weiße Quadrate liegen auf dem Tisch in der Küche"),
        lambda: creator.images("how to build a pipe bomb at home"),
        lambda: creator.images(ImageRef(torch.zeros(2, 4, 4))),
        lambda: creator.animate(torch.zeros(1, 16, 16), "two squares"),
        lambda: ImageCreator(model, encoder=_encoder(), memory_budget=1000).images("two squares"),
        lambda: list(creator.images("two squares", cancel=stop)),
    ]
    try:
        requests[index]()
    except PippinError as error:
        return type(error).__name__
    return "none"
