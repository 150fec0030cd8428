"""Train the models of the gallery, draw its pictures, and write the page that shows them with their commands.

python tools/make_gallery.py                    what is missing of models, all pictures, docs/gallery.md
python tools/make_gallery.py --only guidance    one picture
python tools/make_gallery.py --quick            a few steps of training, into build/gallery-quick: a trial of the script

Models lie under build/gallery and are trained once, by the command that the page shows (`pippin train images …`), or by
the function here where there is no such command. The whole takes about an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pippin
from pippin.core.files import atomic_write
from pippin.data import image_files, images
from pippin.data.synthetic.scenes import SceneSpec, SceneStream, cell_map
from pippin.generate.conditions import Conditioning, ConditioningSpec, Samples
from pippin.generate.contract import SamplingStep, sampling_progress

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "gallery.md"
PICTURES = ROOT / "docs" / "pictures" / "gallery"
FIGURES = ROOT / "results" / "gallery.json"
NOTICE = "<!-- Written by tools/make_gallery.py; edits are lost. -->"
CELLS = SceneSpec(cells=4, objects=(0, 1), radius=(1.2, 1.6), kinds=("square",))


@dataclass(frozen=True)
class Trained:
    """A model of the gallery: the words after `pippin train images`, or a function that trains it."""

    words: tuple[str, ...] = ()
    make: Callable[[Path, int | None], None] | None = None


@dataclass(frozen=True)
class Drawing:
    """A picture of the gallery: what it shows, the models it needs, and the function that draws it."""

    title: str
    text: str
    models: tuple[str, ...]
    draw: Callable[[Path], None]
    suffix: str = ".png"


class Workshop:
    """Where models are and pictures go."""

    def __init__(self, quick: bool) -> None:
        self.quick = quick
        self.models = ROOT / "build" / ("gallery-quick" if quick else "gallery")
        self.pictures = self.models / "pictures" if quick else PICTURES
        self.figures = self.models / "gallery.json" if quick else FIGURES
        self.page = self.models / "gallery.md" if quick else PAGE

    @cache  # noqa: B019 -- one for the whole run
    def model(self, name: str) -> Any:
        """A model, trained if it is not there."""
        path = self.models / name
        if not (path / "config.json").is_file():
            trained = MODELS[name]
            if trained.make is not None:
                trained.make(path, 20 if self.quick else None)
            else:
                self._train(path, list(trained.words))
        return pippin.load(path, device="cpu")

    def _train(self, path: Path, words: list[str]) -> None:
        if self.quick:
            words[words.index("--steps") + 1] = "20"
            words += ["--limit", "200", "--batch-size", "8"]
        path.mkdir(parents=True, exist_ok=True)
        command = [
            str(Path(sys.executable).with_name("pippin")),
            "train",
            "images",
            *words,
            "--out",
            str(path),
            "--json",
        ]
        resume = ["--resume"] if any((path / "run").glob("step-*")) else []
        subprocess.run([*command, *resume], check=True, cwd=ROOT)

    def keep(self, name: str, values: dict[str, Any]) -> None:
        """Remember figures for the page."""
        self.figures.parent.mkdir(parents=True, exist_ok=True)
        before = json.loads(self.figures.read_text()) if self.figures.is_file() else {}
        with atomic_write(self.figures) as file:
            file.write((json.dumps(before | {name: values}, indent=1) + "\n").encode())

    def kept(self) -> dict[str, Any]:
        """All figures that were remembered."""
        return dict(json.loads(self.figures.read_text())) if self.figures.is_file() else {}


SHOP = Workshop(quick="--quick" in sys.argv)


# --- models -----------------------------------------------------------------------------------------------------------


def _run(model: Any, objective: Any, data: Any, steps: int, path: Path, title: str, lr: float = 1e-3) -> None:
    from pippin.train import AdamW, CosineSchedule, Trainer

    trainer = Trainer(
        model,
        objective,
        data,
        steps=steps,
        optimizer=AdamW(lr=lr, weight_decay=0.01),
        schedule=CosineSchedule(warmup_steps=0.05),
        ema=1 - 10 / max(steps, 20),
        title=title,
    )
    trainer.fit()
    assert trainer.ema is not None
    with trainer.ema.applied(model):
        model.eval().save(path)


def _one_object(path: Path, steps: int | None) -> None:
    """Scenes of one object or none, told by a map where it is."""
    from pippin.generate.diffusion.diffusion import Denoising, Diffusion, DiffusionConfig
    from pippin.generate.diffusion.unet import UNetConfig

    class Batches:
        def __iter__(self) -> Any:
            for batch in SceneStream(CELLS, 32):
                yield Samples(batch.x, Conditioning(map=cell_map(batch.presence, CELLS.size)))

    config = DiffusionConfig(
        (1, 16, 16),
        UNetConfig(base_channels=24, attention=False, pool=False, patch_size=2),
        ConditioningSpec(map_channels=1),
        prediction="v",
    )
    _run(
        Diffusion(config).initialize(0),
        Denoising(condition_dropout=0.0),
        Batches(),
        steps or 2500,
        path,
        "one object",
        2e-3,
    )


def _clips(path: Path, steps: int | None) -> None:
    """Moving shapes."""
    from pippin.data.synthetic.video_clips import VideoClipSpec, VideoClipStream
    from pippin.generate.flows.starflow.config import StarFlowConfig
    from pippin.generate.flows.starflow.loss import LikelihoodAndScore
    from pippin.generate.flows.starflow.model import StarFlow

    class Batches:
        def __iter__(self) -> Any:
            for batch in VideoClipStream(VideoClipSpec(), 8):
                yield Samples(batch.x)

    config = StarFlowConfig(shape=(8, 1, 16, 16), noise_std=0.1, hidden_size=64, layers_per_block=(1, 1, 3))
    _run(StarFlow(config).initialize(0), LikelihoodAndScore(), Batches(), steps or 900, path, "moving shapes", 2e-3)


MODELS = {
    "clothes": Trained(("fashion-mnist", "--method", "unet", "--steps", "1500", "--batch-size", "32")),
    "things": Trained(
        ("cifar-10", "--method", "unet", "--hidden-size", "32", "--steps", "1500", "--batch-size", "32", "--flip")
    ),
    "clothes-flow": Trained(("fashion-mnist", "--method", "tarflow", "--steps", "1000", "--batch-size", "32")),
    "clothes-dart": Trained(("fashion-mnist", "--method", "dart", "--steps", "300", "--batch-size", "16")),
    "words": Trained(("scenes", "--method", "ec-dit", "--steps", "1500", "--batch-size", "32", "--limit", "20000")),
    "one-object": Trained(make=_one_object),
    "clips": Trained(make=_clips),
}


# --- pictures ---------------------------------------------------------------------------------------------------------


def _save(path: Path, samples: Tensor, columns: int, zoom: int) -> None:
    image_files.write_image(path, image_files.image_grid(samples, columns=columns, gap=2, zoom=zoom))


def _classes(model: Any, each: int) -> Conditioning:
    """Every class so many times, one class a column."""
    return Conditioning(labels=torch.arange(len(model.metadata["classes"])).repeat(each))


def _drawn(model: Any, *arguments: Any, **how: Any) -> Tensor:
    with sampling_progress("drawing") as on_step:
        made: Tensor = model.sample(*arguments, on_step=on_step, **how)
    return made


def draw_clothes(path: Path) -> None:
    """Four of each class."""
    model = SHOP.model("clothes")
    _save(path, _drawn(model, _classes(model, 4), guidance=1.5, seed=1), 10, 2)


def draw_things(path: Path) -> None:
    """Four of each class."""
    model = SHOP.model("things")
    _save(path, _drawn(model, _classes(model, 4), guidance=2.0, seed=1), 10, 2)


def draw_guidance(path: Path) -> None:
    """The same noise under growing guidance, a row each."""
    model = SHOP.model("clothes")
    rows = [_drawn(model, _classes(model, 1), guidance=g, seed=3) for g in (1.0, 1.5, 2.5, 5.0)]
    _save(path, torch.cat(rows), 10, 2)


def draw_denoising(path: Path) -> None:
    """What is left of the noise after each step, for eight samples."""
    model, seen = SHOP.model("clothes"), list[Tensor]()

    def watch(step: SamplingStep) -> None:
        seen.append(step.estimate())

    labels = torch.tensor([0, 1, 2, 3, 5, 7, 8, 9])
    model.sample(Conditioning(labels=labels), steps=12, guidance=1.5, seed=5, on_step=watch, method="ddim")
    _save(path, torch.stack(seen, 1).flatten(0, 1), len(seen), 2)


def draw_interpolation(path: Path) -> None:
    """Along an arc between two noises, and between two classes."""
    from pippin.generate.diffusion.samplers import integrate
    from pippin.generate.noise import Noise

    model = SHOP.model("clothes")
    first, last = Noise(2, seed=11).normal(model.shape)
    angles = torch.linspace(0, torch.pi / 2, 10).view(-1, 1, 1, 1)
    start = first * angles.cos() + last * angles.sin()
    schedule = model.config.schedule
    rows = []
    for label in (7, 8, 2):
        condition = Conditioning(labels=torch.full((10,), label))
        x = schedule.s(schedule.start) * start
        rows.append(integrate(model.denoiser(condition, 1.5), schedule, x, schedule.grid(20), method="heun"))
    _save(path, torch.cat(rows), 10, 2)


def draw_flow(path: Path) -> None:
    """Samples of a flow as they come, noisy, and after one step along its own score."""
    model = SHOP.model("clothes-flow")
    raw = _drawn(model, _classes(model, 2), guidance=1.5, seed=2, denoise=False)
    clean = _drawn(model, _classes(model, 2), guidance=1.5, seed=2)
    _save(path, torch.cat([raw, clean]), 10, 2)


def draw_dart(path: Path) -> None:
    """What DART sees of the end after each of its steps."""
    model, seen = SHOP.model("clothes-dart"), list[Tensor]()
    labels = torch.tensor([0, 1, 5, 7, 8, 9])
    model.sample(Conditioning(labels=labels), guidance=1.5, seed=4, on_step=lambda step: seen.append(step.estimate()))
    _save(path, torch.stack(seen, 1).flatten(0, 1), len(seen), 2)


def draw_words(path: Path) -> None:
    """From descriptions; the same descriptions stand on the page."""
    from pippin.recipes.prompt_encoder import PromptEncoder

    model, encoder = SHOP.model("words"), PromptEncoder.load()
    condition = encoder.condition([text for text in DESCRIPTIONS for _ in range(4)])
    _save(path, _drawn(model, condition, guidance=2.5, seed=0), 8, 3)


def draw_compute(path: Path) -> None:
    """How many experts each patch is given."""
    from pippin.data.synthetic.scenes import sample_scenes
    from pippin.generate.diffusion.prediction import add_noise
    from pippin.generate.methods.ec_dit.compute_map import compute_map, plot_compute_map
    from pippin.recipes.prompt_encoder import PromptEncoder

    model, encoder = SHOP.model("words"), PromptEncoder.load()
    spec = SceneSpec(size=16, colors=("red", "green", "blue", "white"), radius=(1.8, 2.8), objects=(1, 3))
    batch = sample_scenes(spec, 4, seed=9)
    noise = torch.randn(batch.x.shape, generator=torch.Generator().manual_seed(0))
    x = add_noise(batch.x, noise, 0.2, model.config.schedule)
    with torch.no_grad():
        maps = compute_map(model, x, 0.2, encoder.condition(batch.captions))
    plot_compute_map(maps, batch.x, path)


def draw_composition(path: Path) -> None:
    """One to eight objects by a model that saw one at most; above, one description of all of them at once."""
    from pippin.generate.composition.compose import compose

    model = SHOP.model("one-object")
    cells = [5, 10, 3, 12, 0, 15, 6, 9]

    def where(*chosen: int) -> Conditioning:
        presence = torch.zeros(1, 4, 4, dtype=torch.bool)
        presence.view(-1)[list(chosen)] = True
        return Conditioning(map=cell_map(presence, 16))

    composed, at_once, numbers = [], [], (1, 2, 3, 4, 5, 6, 7, 8)
    for number in numbers:
        parts = [where(cell) for cell in cells[:number]]
        composed.append(compose(parts, where(), of=model).sample(n=1, steps=30, seed=6))
        at_once.append(model.sample(where(*cells[:number]), steps=30, seed=6))
    _save(path, torch.cat([*at_once, *composed]), len(numbers), 4)


def draw_clip(path: Path) -> None:
    """A clip three times as long as those it learned from."""
    model = SHOP.model("clips")
    with sampling_progress("drawing frames") as on_step:
        made = model.sample(None, 6, frames=24, seed=1, on_step=on_step)
    frames = torch.stack([image_files.image_grid(frame, columns=6, gap=2) for frame in made.transpose(0, 1)])
    image_files.write_video(path, frames, fps=8, zoom=4)


DESCRIPTIONS = ("two red discs", "one blue square and one white diamond", "three green squares", "one white disc")
DRAWINGS = {
    "clothes": Drawing(
        "Fashion-MNIST, by flow matching",
        "A U-Net of half a million parameters that learned to turn noise into clothes: four samples of each class, a "
        "class a column, 20 steps of Heun's method, guidance 1.5.",
        ("clothes",),
        draw_clothes,
    ),
    "guidance": Drawing(
        "Guidance",
        "The same noise with guidance 1 (none), 1.5, 2.5 and 5, a row each.",
        ("clothes",),
        draw_guidance,
    ),
    "denoising": Drawing(
        "Denoising",
        "What the model takes for the picture after each of 12 DDIM steps, a sample a row.",
        ("clothes",),
        draw_denoising,
    ),
    "interpolation": Drawing(
        "Interpolation",
        "Noise on an arc between two draws, for sneakers, bags and pullovers.",
        ("clothes",),
        draw_interpolation,
    ),
    "things": Drawing(
        "CIFAR-10",
        "The same method on photographs of 32 by 32 pixels, a class a column, guidance 2. After a few minutes it knows "
        "the colors and the layout of sky, grass and sea; things take longer.",
        ("things",),
        draw_things,
    ),
    "flow": Drawing(
        "TarFlow, before and after one step along its own score",
        "A normalizing flow trained on noisy pictures draws noisy pictures (two rows above). Its likelihood says where "
        "the noise is, and takes it away (the same samples below). A flow needs longer than a diffusion model to get "
        "shapes right; this one had ten minutes.",
        ("clothes-flow",),
        draw_flow,
    ),
    "dart": Drawing(
        "DART",
        "Denoising as one sequence that remembers all its steps: the picture as it is foreseen after each of them. "
        "After 300 updates shapes are there, and patches do not agree at their edges yet.",
        ("clothes-dart",),
        draw_dart,
    ),
    "words": Drawing(
        "From words",
        "Synthetic scenes from descriptions, read by all-MiniLM-L6-v2, four samples of each: "
        + "; ".join(f"“{text}”" for text in DESCRIPTIONS)
        + ".",
        ("words",),
        draw_words,
    ),
    "compute": Drawing(
        "Where the experts work",
        "The same model has experts that choose their patches: how many took each patch, in each layer that has them. "
        "Nobody told it where the objects are, and yet their outlines show. At this size it is the ground that many "
        "experts share, while each object is left to one of its own: the claim `ec-dit` measures this.",
        ("words",),
        draw_compute,
    ),
    "composition": Drawing(
        "Composition",
        "A model that saw one object at most, asked for one to eight. Above: all places at once in its condition, "
        "which it never saw. Below: scores of one place each, added over the empty scene. Both hold here, since its "
        "condition is a map and its network is local; `pippin evaluate composition` and `locality_report` tell before.",
        ("one-object",),
        draw_composition,
    ),
    "clip": Drawing(
        "A clip longer than any it saw",
        "STARFlow-V learned from clips of 8 frames and draws 24, frame by frame.",
        ("clips",),
        draw_clip,
        ".gif",
    ),
}


# --- figures and the page ---------------------------------------------------------------------------------------------


def measure(name: str, data: str, count: int) -> None:
    """Fréchet and kernel distances of samples to test pictures, in Inception features where they are here."""
    from pippin.core.errors import AssetError
    from pippin.evaluate.images.inception import inception
    from pippin.evaluate.images.sample_quality import frechet_distance, kernel_distance

    try:
        features = inception()
    except AssetError as error:
        print(f"no distances: {error}", file=sys.stderr)
        return
    model = SHOP.model(name)
    real = images.load(data, split="test", limit=2 * count).x

    def read(x: Tensor) -> Tensor:
        return torch.cat([features(part) for part in x.split(16)])

    labels = torch.arange(count) % len(model.metadata["classes"])
    drawn = torch.cat(
        [
            _drawn(model, Conditioning(labels=part), guidance=1.5, seed=1000 + 64 * i)
            for i, part in enumerate(labels.split(64))
        ]
    )
    a, b, c = read(drawn), read(real[::2]), read(real[1::2])
    noise = read(torch.randn(drawn[: count // 2].shape, generator=torch.Generator().manual_seed(0)).clamp(-1, 1))
    figures = {"samples": count, "features": features.name}
    for what, other in (("samples", a), ("other real pictures", c), ("noise", noise)):
        figures[f"kernel distance, {what}"] = kernel_distance(other, b).value
        if what != "noise":
            figures[f"Frechet distance, {what}"] = frechet_distance(other, b)
    SHOP.keep(name, figures)


def page() -> str:
    """The gallery as Markdown."""
    lines = [
        NOTICE,
        "# Gallery",
        "",
        "Pictures by models that were trained on a laptop's processor, in minutes each: small, and honest about it. "
        "Each stands with the commands that made it; `make gallery` makes all of them again.",
        "",
    ]
    for name, drawing in DRAWINGS.items():
        lines += [f"## {drawing.title}", "", drawing.text, ""]
        lines += [f"![{drawing.title}](pictures/gallery/{name}{drawing.suffix})", ""]
        commands = [
            f"pippin train images {' '.join(MODELS[model].words)} --out build/gallery/{model}"
            for model in drawing.models
            if MODELS[model].words
        ]
        lines += ["```bash", *commands, f"python tools/make_gallery.py --only {name}", "```", ""]
    figures = SHOP.kept()
    if figures:
        lines += [
            "## How far from real pictures",
            "",
            "Distances to pictures of the test set, in features of Inception-v3. The Fréchet distance of so few "
            "samples is biased upwards, for real pictures too; the kernel distance is not. "
            "Neither is to be compared with figures from 50,000 samples.",
            "",
            "| model | samples | Fréchet | Fréchet, other real pictures | kernel | kernel, other real pictures | "
            "kernel, noise |",
            "|---|---|---|---|---|---|---|",
        ]
        for name, row in figures.items():
            lines.append(
                f"| {name} | {row['samples']} | {row['Frechet distance, samples']:.1f} | "
                f"{row['Frechet distance, other real pictures']:.1f} | {row['kernel distance, samples']:.3f} | "
                f"{row['kernel distance, other real pictures']:.3f} | {row['kernel distance, noise']:.3f} |"
            )
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Do what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=[*DRAWINGS, "distances", "page"], help="these pictures, and the page"
    )
    parser.add_argument("--quick", action="store_true", help="a few steps of training, in a folder of their own")
    parser.add_argument("--count", type=int, default=256, help="samples for the distances")
    options = parser.parse_args()
    chosen = options.only or [*DRAWINGS, "distances"]
    for name, drawing in DRAWINGS.items():
        if name in chosen:
            SHOP.pictures.mkdir(parents=True, exist_ok=True)
            drawing.draw(SHOP.pictures / f"{name}{drawing.suffix}")
            print(SHOP.pictures / f"{name}{drawing.suffix}")
    if "distances" in chosen:
        for name, data in (("clothes", "fashion-mnist"), ("things", "cifar-10")):
            measure(name, data, 16 if options.quick else options.count)
    with atomic_write(SHOP.page) as file:
        file.write(page().encode())


if __name__ == "__main__":
    main()
