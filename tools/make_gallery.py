"""Train the models of the gallery, sample its images, and write the page that shows them with their commands.

python tools/make_gallery.py                    missing models, all images, docs/gallery.md
python tools/make_gallery.py --only guidance    one image
python tools/make_gallery.py --quick            a few training steps, in build/gallery-quick, to test the script

Models are in build/gallery and are trained once, by the command that the page shows (`pippin train images …`), or by a
function of this file if there is no such command. All of it takes about an hour on two cores.
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
IMAGES = ROOT / "docs" / "pictures" / "gallery"
MEASUREMENTS = ROOT / "results" / "gallery.json"
NOTICE = "<!-- Written by tools/make_gallery.py; edits are lost. -->"
CELLS = SceneSpec(cells=4, objects=(0, 1), radius=(1.2, 1.6), kinds=("square",))


@dataclass(frozen=True)
class Trained:
    """A model of the gallery: the arguments of `pippin train images`, or a function that trains it."""

    arguments: tuple[str, ...] = ()
    make: Callable[[Path, int | None], None] | None = None


@dataclass(frozen=True)
class Figure:
    """An image of the gallery: its title and text, the models that it needs, and the function that samples it."""

    title: str
    text: str
    models: tuple[str, ...]
    write: Callable[[Path], None]
    suffix: str = ".png"


class Gallery:
    """Paths of models, images and measurements."""

    def __init__(self, quick: bool) -> None:
        self.quick = quick
        self.models = ROOT / "build" / ("gallery-quick" if quick else "gallery")
        self.images = self.models / "images" if quick else IMAGES
        self.measurements = self.models / "gallery.json" if quick else MEASUREMENTS
        self.page = self.models / "gallery.md" if quick else PAGE

    @cache  # noqa: B019 -- there is one instance
    def model(self, name: str) -> Any:
        """Load a model, and train it first if it does not exist."""
        path = self.models / name
        if not (path / "config.json").is_file():
            trained = MODELS[name]
            if trained.make is not None:
                trained.make(path, 20 if self.quick else None)
            else:
                self._train(path, list(trained.arguments))
        return pippin.load(path, device="cpu")

    def _train(self, path: Path, arguments: list[str]) -> None:
        """Train a model by the command, and resume an interrupted run."""
        if self.quick:
            arguments[arguments.index("--steps") + 1] = "20"
            arguments += ["--limit", "200", "--batch-size", "8"]
        path.mkdir(parents=True, exist_ok=True)
        command = [
            str(Path(sys.executable).with_name("pippin")),
            "train",
            "images",
            *arguments,
            "--out",
            str(path),
            "--json",
        ]
        resume = ["--resume"] if any((path / "run").glob("step-*")) else []
        subprocess.run([*command, *resume], check=True, cwd=ROOT)

    def record(self, name: str, values: dict[str, Any]) -> None:
        """Save the measurements of a model."""
        self.measurements.parent.mkdir(parents=True, exist_ok=True)
        recorded = self.recorded()
        with atomic_write(self.measurements) as file:
            file.write((json.dumps(recorded | {name: values}, indent=1) + "\n").encode())

    def recorded(self) -> dict[str, Any]:
        """All saved measurements, by model."""
        return dict(json.loads(self.measurements.read_text())) if self.measurements.is_file() else {}


GALLERY = Gallery(quick="--quick" in sys.argv)


# --- models -----------------------------------------------------------------------------------------------------------


def _train(model: Any, objective: Any, data: Any, steps: int, path: Path, title: str, lr: float = 1e-3) -> None:
    """Train a model and save its averaged weights."""
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
    """Scenes of at most one object, with a map of its position as condition."""
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
    _train(
        Diffusion(config).initialize(0),
        Denoising(condition_dropout=0.0),
        Batches(),
        steps or 2500,
        path,
        "one object",
        2e-3,
    )


def _moving_shapes(path: Path, steps: int | None) -> None:
    """Videos of moving shapes."""
    from pippin.data.synthetic.video_clips import VideoClipSpec, VideoClipStream
    from pippin.generate.flows.starflow.config import StarFlowConfig
    from pippin.generate.flows.starflow.loss import LikelihoodAndScore
    from pippin.generate.flows.starflow.model import StarFlow

    class Batches:
        def __iter__(self) -> Any:
            for batch in VideoClipStream(VideoClipSpec(), 8):
                yield Samples(batch.x)

    config = StarFlowConfig(shape=(8, 1, 16, 16), noise_std=0.1, hidden_size=64, layers_per_block=(1, 1, 3))
    _train(StarFlow(config).initialize(0), LikelihoodAndScore(), Batches(), steps or 900, path, "moving shapes", 2e-3)


MODELS = {
    "fashion-mnist-unet": Trained(("fashion-mnist", "--method", "unet", "--steps", "1500", "--batch-size", "32")),
    "cifar-10-unet": Trained(
        ("cifar-10", "--method", "unet", "--hidden-size", "32", "--steps", "1500", "--batch-size", "32", "--flip")
    ),
    "fashion-mnist-tarflow": Trained(("fashion-mnist", "--method", "tarflow", "--steps", "1000", "--batch-size", "32")),
    "fashion-mnist-dart": Trained(("fashion-mnist", "--method", "dart", "--steps", "300", "--batch-size", "16")),
    "scenes-ec-dit": Trained(
        ("scenes", "--method", "ec-dit", "--steps", "1500", "--batch-size", "32", "--limit", "20000")
    ),
    "one-object": Trained(make=_one_object),
    "moving-shapes": Trained(make=_moving_shapes),
}


# --- images -----------------------------------------------------------------------------------------------------------


def _save(path: Path, samples: Tensor, columns: int, zoom: int) -> None:
    """Write samples as a grid."""
    image_files.write_image(path, image_files.image_grid(samples, columns=columns, gap=2, zoom=zoom))


def _classes(model: Any, each: int) -> Conditioning:
    """The condition of every class, ``each`` times; a column of the grid for each class."""
    return Conditioning(labels=torch.arange(len(model.metadata["classes"])).repeat(each))


def _sample(model: Any, *arguments: Any, **options: Any) -> Tensor:
    """Sample with a progress bar."""
    with sampling_progress("sampling") as on_step:
        samples: Tensor = model.sample(*arguments, on_step=on_step, **options)
    return samples


def write_fashion_mnist(path: Path) -> None:
    """Four samples of each class."""
    model = GALLERY.model("fashion-mnist-unet")
    _save(path, _sample(model, _classes(model, 4), guidance=1.5, seed=1), 10, 2)


def write_cifar_10(path: Path) -> None:
    """Four samples of each class."""
    model = GALLERY.model("cifar-10-unet")
    _save(path, _sample(model, _classes(model, 4), guidance=2.0, seed=1), 10, 2)


def write_guidance(path: Path) -> None:
    """The same noise with increasing guidance, one row each."""
    model = GALLERY.model("fashion-mnist-unet")
    rows = [_sample(model, _classes(model, 1), guidance=g, seed=3) for g in (1.0, 1.5, 2.5, 5.0)]
    _save(path, torch.cat(rows), 10, 2)


def write_denoising(path: Path) -> None:
    """The predicted clean image after each step, for eight samples."""
    model, estimates = GALLERY.model("fashion-mnist-unet"), list[Tensor]()

    def record(step: SamplingStep) -> None:
        estimates.append(step.estimate())

    labels = torch.tensor([0, 1, 2, 3, 5, 7, 8, 9])
    model.sample(Conditioning(labels=labels), steps=12, guidance=1.5, seed=5, on_step=record, method="ddim")
    _save(path, torch.stack(estimates, 1).flatten(0, 1), len(estimates), 2)


def write_interpolation(path: Path) -> None:
    """Noise on an arc between two samples of it, for three classes."""
    from pippin.generate.diffusion.samplers import integrate
    from pippin.generate.noise import Noise

    model = GALLERY.model("fashion-mnist-unet")
    first, last = Noise(2, seed=11).normal(model.shape)
    angles = torch.linspace(0, torch.pi / 2, 10).view(-1, 1, 1, 1)
    start = first * angles.cos() + last * angles.sin()
    schedule = model.config.schedule
    rows = []
    for label in (7, 8, 2):
        condition = Conditioning(labels=torch.full((10,), label))
        x = schedule.s(schedule.max_time) * start
        rows.append(integrate(model.denoiser(condition, 1.5), schedule, x, schedule.grid(20), method="heun"))
    _save(path, torch.cat(rows), 10, 2)


def write_flow(path: Path) -> None:
    """Noisy samples of a flow, and the same samples after one denoising step along its score."""
    model = GALLERY.model("fashion-mnist-tarflow")
    noisy = _sample(model, _classes(model, 2), guidance=1.5, seed=2, denoise=False)
    clean = _sample(model, _classes(model, 2), guidance=1.5, seed=2)
    _save(path, torch.cat([noisy, clean]), 10, 2)


def write_dart(path: Path) -> None:
    """The predicted image after each step of DART."""
    model, estimates = GALLERY.model("fashion-mnist-dart"), list[Tensor]()
    labels = torch.tensor([0, 1, 5, 7, 8, 9])
    model.sample(Conditioning(labels=labels), guidance=1.5, seed=4, on_step=lambda s: estimates.append(s.estimate()))
    _save(path, torch.stack(estimates, 1).flatten(0, 1), len(estimates), 2)


def write_text_to_image(path: Path) -> None:
    """Scenes from the descriptions on the page."""
    from pippin.recipes.prompt_encoder import PromptEncoder

    model, encoder = GALLERY.model("scenes-ec-dit"), PromptEncoder.load()
    condition = encoder.condition([text for text in DESCRIPTIONS for _ in range(4)])
    _save(path, _sample(model, condition, guidance=2.5, seed=0), 8, 3)


def write_compute(path: Path) -> None:
    """The number of experts of each patch."""
    from pippin.data.synthetic.scenes import sample_scenes
    from pippin.generate.diffusion.prediction import add_noise
    from pippin.generate.methods.ec_dit.compute_map import compute_map, plot_compute_map
    from pippin.recipes.prompt_encoder import PromptEncoder

    model, encoder = GALLERY.model("scenes-ec-dit"), PromptEncoder.load()
    spec = SceneSpec(size=16, colors=("red", "green", "blue", "white"), radius=(1.8, 2.8), objects=(1, 3))
    batch = sample_scenes(spec, 4, seed=9)
    noise = torch.randn(batch.x.shape, generator=torch.Generator().manual_seed(0))
    x = add_noise(batch.x, noise, 0.2, model.config.schedule)
    with torch.no_grad():
        maps = compute_map(model, x, 0.2, encoder.condition(batch.captions))
    plot_compute_map(maps, batch.x, path)


def write_composition(path: Path) -> None:
    """One to eight objects from a model trained on at most one; above, all of them in one condition."""
    from pippin.generate.composition.compose import compose

    model = GALLERY.model("one-object")
    cells = [5, 10, 3, 12, 0, 15, 6, 9]

    def at(*positions: int) -> Conditioning:
        presence = torch.zeros(1, 4, 4, dtype=torch.bool)
        presence.view(-1)[list(positions)] = True
        return Conditioning(map=cell_map(presence, 16))

    composed, conditioned = [], []
    for count in range(1, len(cells) + 1):
        parts = [at(cell) for cell in cells[:count]]
        composed.append(compose(parts, at(), of=model).sample(n=1, steps=30, seed=6))
        conditioned.append(model.sample(at(*cells[:count]), steps=30, seed=6))
    _save(path, torch.cat([*conditioned, *composed]), len(cells), 4)


def write_video(path: Path) -> None:
    """Videos three times as long as the training videos."""
    model = GALLERY.model("moving-shapes")
    videos = _sample(model, None, 6, frames=24, seed=1)
    frames = torch.stack([image_files.image_grid(frame, columns=6, gap=2) for frame in videos.transpose(0, 1)])
    image_files.write_video(path, frames, fps=8, zoom=4)


DESCRIPTIONS = ("two red discs", "one blue square and one white diamond", "three green squares", "one white disc")
FIGURES = {
    "fashion-mnist": Figure(
        "Fashion-MNIST, by flow matching",
        "A U-Net with half a million parameters: four samples of each class, one class per column, 20 steps of Heun's "
        "method, guidance 1.5.",
        ("fashion-mnist-unet",),
        write_fashion_mnist,
    ),
    "guidance": Figure(
        "Guidance",
        "The same noise with guidance 1 (none), 1.5, 2.5 and 5, one row each.",
        ("fashion-mnist-unet",),
        write_guidance,
    ),
    "denoising": Figure(
        "Denoising",
        "The predicted clean image after each of 12 DDIM steps, one sample per row.",
        ("fashion-mnist-unet",),
        write_denoising,
    ),
    "interpolation": Figure(
        "Interpolation",
        "Spherical interpolation between two noise samples, for sneakers, bags and pullovers.",
        ("fashion-mnist-unet",),
        write_interpolation,
    ),
    "cifar-10": Figure(
        "CIFAR-10",
        "The same method on photographs of 32 by 32 pixels, one class per column, guidance 2. After a few minutes of "
        "training the model has colors and the layout of sky, grass and sea; objects take longer.",
        ("cifar-10-unet",),
        write_cifar_10,
    ),
    "flow": Figure(
        "TarFlow, before and after one step along its own score",
        "A normalizing flow that is trained on noisy images samples noisy images (upper two rows). One step along the "
        "gradient of its log-likelihood denoises them (lower two rows). A flow needs more training than a diffusion "
        "model; this one had ten minutes.",
        ("fashion-mnist-tarflow",),
        write_flow,
    ),
    "dart": Figure(
        "DART",
        "Denoising as one autoregressive sequence of all steps: the predicted image after each step. After 300 updates "
        "the shapes are right, but the edges of patches do not match yet.",
        ("fashion-mnist-dart",),
        write_dart,
    ),
    "text-to-image": Figure(
        "Text to image",
        "Synthetic scenes from descriptions, encoded by all-MiniLM-L6-v2, four samples of each: "
        + "; ".join(f"“{text}”" for text in DESCRIPTIONS)
        + ".",
        ("scenes-ec-dit",),
        write_text_to_image,
    ),
    "compute": Figure(
        "Expert choice",
        "The experts of the same model choose their patches: the number of experts on each patch, in each layer with "
        "experts. Outlines of the objects show without supervision. At this size, many experts share the background, "
        "while each object gets one: the claim `ec-dit` measures this.",
        ("scenes-ec-dit",),
        write_compute,
    ),
    "composition": Figure(
        "Composition",
        "A model trained on at most one object samples one to eight. Above: all positions in one condition, which was "
        "not in training. Below: scores of single positions, added over the empty scene. Both work here, since the "
        "condition is a map and the network is local; `pippin evaluate composition` and `locality_report` predict it.",
        ("one-object",),
        write_composition,
    ),
    "video": Figure(
        "A video longer than those in training",
        "STARFlow-V, trained on videos of 8 frames, samples 24, frame by frame.",
        ("moving-shapes",),
        write_video,
        ".gif",
    ),
}


# --- figures and the page ---------------------------------------------------------------------------------------------


def measure(name: str, data: str, count: int) -> None:
    """Record Fréchet and kernel distances of samples to test images, in Inception features if these are installed."""
    from pippin.core.errors import AssetError
    from pippin.evaluate.images.inception import inception
    from pippin.evaluate.images.sample_quality import frechet_distance, kernel_distance

    try:
        features = inception()
    except AssetError as error:
        print(f"no distances: {error}", file=sys.stderr)
        return
    model = GALLERY.model(name)
    real = images.load(data, split="test", limit=2 * count).x

    def encode(x: Tensor) -> Tensor:
        return torch.cat([features(batch) for batch in x.split(16)])

    labels = torch.arange(count) % len(model.metadata["classes"])
    samples = torch.cat(
        [
            _sample(model, Conditioning(labels=batch), guidance=1.5, seed=1000 + 64 * i)
            for i, batch in enumerate(labels.split(64))
        ]
    )
    reference = encode(real[::2])
    noise = torch.randn(samples[: count // 2].shape, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    values = {"samples": count, "features": features.name}
    for what, compared in (("samples", samples), ("other real images", real[1::2]), ("noise", noise)):
        encoded = encode(compared)
        values[f"kernel distance, {what}"] = kernel_distance(encoded, reference).value
        if what != "noise":
            values[f"Frechet distance, {what}"] = frechet_distance(encoded, reference)
    GALLERY.record(name, values)


def page() -> str:
    """The gallery as Markdown."""
    lines = [
        NOTICE,
        "# Gallery",
        "",
        "Samples of small models that were trained on a laptop CPU in minutes each, with the commands that made them. "
        "`make gallery` makes all of them again.",
        "",
    ]
    for name, figure in FIGURES.items():
        lines += [f"## {figure.title}", "", figure.text, ""]
        lines += [f"![{figure.title}](pictures/gallery/{name}{figure.suffix})", ""]
        commands = [
            f"pippin train images {' '.join(MODELS[model].arguments)} --out build/gallery/{model}"
            for model in figure.models
            if MODELS[model].arguments
        ]
        lines += ["```bash", *commands, f"python tools/make_gallery.py --only {name}", "```", ""]
    measurements = GALLERY.recorded()
    if measurements:
        lines += [
            "## Distances to real images",
            "",
            "Distances to images of the test set, in features of Inception-v3. The Fréchet distance of so few samples "
            "is biased upwards, also for real images; the kernel distance is not. Do not compare either with figures "
            "from 50,000 samples.",
            "",
            "| model | samples | Fréchet | Fréchet, other real images | kernel | kernel, other real images | "
            "kernel, noise |",
            "|---|---|---|---|---|---|---|",
        ]
        for name, row in measurements.items():
            lines.append(
                f"| {name} | {row['samples']} | {row['Frechet distance, samples']:.1f} | "
                f"{row['Frechet distance, other real images']:.1f} | {row['kernel distance, samples']:.3f} | "
                f"{row['kernel distance, other real images']:.3f} | {row['kernel distance, noise']:.3f} |"
            )
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=[*FIGURES, "distances", "page"], help="images to make, besides the page"
    )
    parser.add_argument("--quick", action="store_true", help="a few training steps, in build/gallery-quick")
    parser.add_argument("--count", type=int, default=256, help="number of samples for the distances")
    options = parser.parse_args()
    chosen = options.only or [*FIGURES, "distances"]
    for name, figure in FIGURES.items():
        if name in chosen:
            GALLERY.images.mkdir(parents=True, exist_ok=True)
            figure.write(GALLERY.images / f"{name}{figure.suffix}")
            print(GALLERY.images / f"{name}{figure.suffix}")
    if "distances" in chosen:
        for name, data in (("fashion-mnist-unet", "fashion-mnist"), ("cifar-10-unet", "cifar-10")):
            measure(name, data, 16 if options.quick else options.count)
    with atomic_write(GALLERY.page) as file:
        file.write(page().encode())


if __name__ == "__main__":
    main()
