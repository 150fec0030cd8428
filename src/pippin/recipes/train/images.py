"""Image generation: train a generator on a folder of images, a data set of the catalog, or synthetic scenes.

Notable here:
- seven methods with one interface (see `image_generators`), conditioned on the classes or captions of the images
- the moving average of the weights is saved, with a grid of samples
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pippin.core import progress
from pippin.core.checks import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.core.options import Option
from pippin.engine.options import Device
from pippin.recipes import options
from pippin.recipes.options import DATA, RUN

if TYPE_CHECKING:
    from pippin.core.report import Report
    from pippin.data.images import ImageSet
    from pippin.generate.conditions import Conditioning, ConditioningSpec, Samples
    from pippin.recipes.prompt_encoder import PromptEncoder
    from pippin.recipes.train.image_generators import UntrainedGenerator
    from pippin.train import TrainingResult

_MODEL = "Model"
MAX_HELD_OUT = 512
"""Maximum number of images that the loss is evaluated on."""

FALLING = 0.02
"""Share by which the loss falls in the second half of a run that is too short."""


@checked
@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a run."""

    data: Annotated[
        str,
        Option(
            "fashion-mnist, cifar-10, a folder of images (each folder in it one class; NAME.txt beside NAME.png is its "
            "caption), a .npz file, or scenes (synthetic images with captions).",
            positional=True,
        ),
    ]
    out: options.Out
    method: Annotated[
        options.GeneratorMethod,
        Option("unet, dit, ec-dit, tarflow, itarflow, starflow or dart.", _MODEL),
    ] = "unet"
    condition_on: Annotated[
        Literal["class", "text", "nothing"] | None,
        Option("class, text or nothing; without it, what the images come with.", _MODEL),
    ] = None
    hidden_size: Annotated[
        PositiveInt | None, Option("Width of the hidden states (unet: channels of its first level).", _MODEL)
    ] = None
    num_hidden_layers: Annotated[
        PositiveInt | None, Option("Layers in all (flows: of each block; unet: levels).", _MODEL)
    ] = None
    patch_size: Annotated[PositiveInt | None, Option("Side of a token in pixels.", _MODEL)] = None
    noise_std: Annotated[
        NonNegativeFloat | None,
        Option(
            "Gaussian noise of the training. tarflow: 0.1 without it, 0 for exact likelihoods (bits_per_dim); "
            "starflow: 0.3 without it.",
            _MODEL,
        ),
    ] = None
    image_size: options.ImageSize = None
    channels: Annotated[Literal[1, 3] | None, Option("1 for gray, 3 for color.", DATA)] = None
    limit: options.Limit = None
    skip_bad: options.SkipBad = False
    flip: Annotated[bool, Option("Mirror half of the images, left to right.", DATA)] = False
    held_out: Annotated[Fraction, Option("Share of the images that the loss is evaluated on.", DATA, "SHARE")] = 0.02
    steps: options.Steps = None
    epochs: options.Epochs = 1.0
    batch_size: Annotated[PositiveInt, Option("Images computed together.", RUN)] = 32
    lr: Annotated[PositiveFloat | None, Option("Highest learning rate; the method's own without it.", RUN)] = None
    precision: options.Precision = "float32"
    eval_every: options.EvalEvery = None
    save_every: options.SaveEvery = None
    seed: options.Seed = 0
    resume: options.Resume = False
    device: Device = None

    @property
    def run_path(self) -> Path:
        """The folder of checkpoints, log and loss curve."""
        return Path(self.out) / "run"


@dataclass(frozen=True)
class ImageGenerationResult:
    """The result of a run.

    Attributes:
        out: folder of the generator and of samples.png.
        parameters: number of them.
        unit: of the loss.
        training: every step and evaluation.
    """

    out: Path
    parameters: int
    unit: str
    training: TrainingResult = field(repr=False)

    @property
    def stopped(self) -> str | None:
        """Why the run ended before its last step: "interrupted", "exhausted", or None."""
        return self.training.stopped

    @property
    def held_out_loss(self) -> float | None:
        """The last evaluation; None where nothing is held out."""
        return self.training.evaluations[-1][1]["loss"] if self.training.evaluations else None

    def summary(self) -> dict[str, Any]:
        """The result as JSON values."""
        losses = self.training.losses
        return {
            "out": str(self.out),
            "parameters": self.parameters,
            "steps": len(self.training.steps),
            "first_loss": losses[0] if losses else None,
            "last_loss": losses[-1] if losses else None,
            "held_out_loss": self.held_out_loss,
            "unit": self.unit,
            "seconds": self.training.seconds,
            "images_per_second": self.training.units_per_second,
            "stopped": self.stopped,
        }

    def report(self) -> Report:
        """Losses, time and speed."""
        from pippin.core.report import Report, Row

        made = self.summary()
        names = ("first_loss", "last_loss", "held_out_loss")
        rows = [Row(name.replace("_", " "), made[name], self.unit) for name in names if made[name] is not None]
        rows += [Row("time", made["seconds"], "s"), Row("speed", made["images_per_second"], "images/s")]
        return Report(self.training.title, rows)


def run(config: Config, *, show_progress: bool = True) -> ImageGenerationResult:
    """Train a generator of images, and save it for `pippin imagine` and `pippin.generate.load`.

    Args:
        config: the settings.
        show_progress: whether progress is shown on stderr.

    Raises:
        InvalidArgument: settings that are incompatible with each other or with the images.
        InvalidInput: images that cannot be read.
        TrainingError: the loss is not finite, or the checkpoints in the folder are of another run.
    """
    from pippin.core.files import check_folder
    from pippin.data.streams import Shuffled
    from pippin.recipes.train.image_generators import untrained
    from pippin.train import AdamW, Checkpoints, CosineSchedule, Evaluation, Trainer

    options.refuse_existing_run(config.out, config.resume)
    check_folder(config.run_path)
    images = _images(config, show_progress=show_progress)
    if images.skipped:
        progress.note(
            f"left out {len(images.skipped)} files that cannot be read: {', '.join(images.skipped[:3])}",
            show_progress=show_progress,
        )
    kind = _condition_kind(images, config.condition_on)
    encoder = _encoder(config.device) if kind == "text" else None
    made = untrained(
        config.method,
        images.shape,
        _condition_spec(images, kind, encoder),
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        patch_size=config.patch_size,
        noise_std=config.noise_std,
        seed=config.seed,
    )
    model: Any = made.model
    model.metadata = {"data": images.name, "method": config.method}
    model.metadata |= {"classes": list(images.class_names)} if kind == "class" else {}
    model.metadata |= {"text_encoder": encoder.metadata} if encoder is not None else {}
    training, held_out = _divide(len(images), config.held_out, config.seed)
    collate = _Collate(images, kind, encoder, config.flip, config.seed)
    batches = Shuffled(training, config.batch_size, seed=config.seed, collate=collate)
    steps = config.steps or max(1, round(config.epochs * len(training) / config.batch_size))
    parameters = sum(p.numel() for p in model.parameters())
    progress.note(
        f"{config.method} from {kind}, {parameters:,} parameters, {len(training):,} images of {images.shape}, "
        f"{steps} steps",
        show_progress=show_progress,
    )
    eval_every = config.eval_every or max(1, steps // 10)
    measure = _measure(made, _Collate(images, kind, encoder, False, 0), held_out)
    config.run_path.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(
        model,
        made.objective,
        batches,
        steps=steps,
        optimizer=AdamW(lr=config.lr or made.lr, weight_decay=0.01),
        schedule=CosineSchedule(warmup_steps=0.05),
        precision=config.precision,
        ema=min(made.ema, 1 - 10 / max(steps, 20)),  # averages about the last tenth of a short run
        evaluation=Evaluation(measure, eval_every) if held_out else None,
        checkpoints=Checkpoints(config.run_path, config.save_every or eval_every, resume=config.resume),
        seed=config.seed,
        device=config.device,
        title=f"{config.method} on {images.name}",
        show_progress=show_progress,
    )
    result = trainer.fit()
    assert trainer.ema is not None
    with trainer.ema.applied(model):
        model.eval()
        model.save(config.out)
        _write_samples(model, images, encoder, Path(config.out) / "samples.png", show_progress=show_progress)
    if (hint := still_falling(result)) is not None and result.stopped is None:
        progress.note(f"{hint}: train longer with --steps {4 * steps}", show_progress=show_progress)
    return ImageGenerationResult(Path(config.out), parameters, made.unit, result)


def still_falling(result: TrainingResult) -> str | None:
    """A sentence if the held-out loss fell by more than `FALLING` in the second half of the run; None if it did not."""
    losses = [measures["loss"] for _, measures in result.evaluations]
    if len(losses) < 4:
        return None
    half, last = losses[len(losses) // 2 - 1], losses[-1]
    fallen = (half - last) / abs(half) if half else 0.0
    if not fallen > FALLING:
        return None
    return f"the held-out loss was still falling, from {half:.3g} to {last:.3g} in the second half of the run"


def _images(config: Config, *, show_progress: bool) -> ImageSet:
    from pippin.data import images
    from pippin.data.synthetic.scenes import SceneSpec, sample_scenes

    if config.data != "scenes":
        return images.load(
            config.data,
            size=config.image_size,
            channels=config.channels,
            limit=config.limit,
            skip_bad=config.skip_bad,
            show_progress=show_progress,
        )
    side = config.image_size or 16
    colors = ("white",) if config.channels == 1 else ("red", "green", "blue", "white")
    spec = SceneSpec(size=side, colors=colors, radius=(side * 0.1125, side * 0.175), objects=(1, 3))
    made = sample_scenes(spec, config.limit or 4000)
    return images.ImageSet(made.images, captions=tuple(made.captions), name="scenes")


def _condition_kind(images: ImageSet, wanted: str | None) -> str:
    """The kind of condition: as requested, or by default the captions or classes of the images."""
    kind = wanted or ("text" if images.captions else "class" if images.labels is not None else "nothing")
    if kind == "class" and images.labels is None:
        raise InvalidArgument(f"{images.name} has no classes; put the images of each class into a folder of its own")
    if kind == "text" and images.captions is None:
        raise InvalidArgument(f"{images.name} has no captions; put NAME.txt beside each NAME.png")
    return kind


def _encoder(device: str | None) -> PromptEncoder:
    from pippin.recipes.prompt_encoder import PromptEncoder

    return PromptEncoder.load(device=device)


def _condition_spec(images: ImageSet, kind: str, encoder: PromptEncoder | None) -> ConditioningSpec:
    from pippin.generate.conditions import ConditioningSpec

    if kind == "nothing":
        return ConditioningSpec()
    if encoder is not None:
        return ConditioningSpec(text_dim=encoder.width, null=True)
    return ConditioningSpec(num_classes=len(images.class_names), null=True)


def _divide(count: int, share: float, seed: int) -> tuple[list[int], list[int]]:
    """ExampleSplit into indices of training images and of held-out images."""
    import numpy as np

    held_out = min(MAX_HELD_OUT, round(share * count))
    if held_out and count - held_out < 1:
        raise InvalidArgument(
            f"{count} images with {held_out} of them held out leave none to train on; lower held_out (--held-out)"
        )
    order = np.random.default_rng((seed, 1)).permutation(count).tolist()
    return order[held_out:], order[:held_out]


class _Collate:
    """Collates images and their conditions into a batch."""

    def __init__(self, images: ImageSet, kind: str, encoder: PromptEncoder | None, flip: bool, seed: int) -> None:
        self.images, self.kind, self.encoder, self.flip, self.seed = images, kind, encoder, flip, seed

    def __call__(self, chosen: list[int]) -> Samples:
        """The batch of the chosen indices; they also seed the choice of images to flip."""
        import torch

        from pippin.generate.conditions import Samples

        rows = self.images.select(torch.tensor(chosen))
        x = rows.x
        if self.flip:
            mirrored = torch.rand(len(x), generator=torch.Generator().manual_seed(self.seed + sum(chosen))) < 0.5
            x = torch.where(mirrored.view(-1, 1, 1, 1), x.flip(3), x)
        return Samples(x, self._condition(rows))

    def _condition(self, rows: ImageSet) -> Conditioning | None:
        from pippin.generate.conditions import Conditioning

        if self.encoder is not None and rows.captions is not None:
            return self.encoder.condition(list(rows.captions))
        return Conditioning(labels=rows.labels) if self.kind == "class" else None


def _measure(made: UntrainedGenerator, collate: _Collate, held_out: list[int]) -> Any:
    """A function that computes the loss on the held-out images, with the same noise in every evaluation."""

    def measure(model: Any) -> dict[str, float]:
        import torch

        from pippin.train.batch import to_device

        device = next(model.parameters()).device
        generator, total, count = torch.Generator(device).manual_seed(0), 0.0, 0.0
        for start in range(0, len(held_out), 64):
            loss = made.objective(model, to_device(collate(held_out[start : start + 64]), device), generator)
            total, count = total + float(loss.total), count + loss.count
        return {"loss": total / count}

    return measure


def _write_samples(
    model: Any, images: ImageSet, encoder: PromptEncoder | None, path: Path, *, show_progress: bool
) -> None:
    """Write a grid of samples as one image."""
    import torch

    from pippin.data import image_files
    from pippin.generate.conditions import Conditioning
    from pippin.generate.contract import sampling_progress
    from pippin.generate.flows.itarflow import IterativeTarFlow

    if getattr(model.config, "noise_std_range", None):
        model = IterativeTarFlow(model)
    condition, n = None, 16
    if encoder is not None and images.captions is not None:
        condition = encoder.condition([images.captions[i % len(images)] for i in range(n)])
    elif "classes" in model.metadata:
        condition = Conditioning(labels=torch.arange(min(len(images.class_names), 32)).repeat_interleave(2))
        n = len(condition)
    with sampling_progress("sampling", show_progress=show_progress) as on_step:
        samples = model.sample(condition, n, on_step=on_step)
    columns = n // 2 if "classes" in model.metadata and n <= 20 else None
    if columns:
        samples = torch.cat([samples[::2], samples[1::2]])
    image_files.write_image(path, image_files.image_grid(samples.cpu(), columns=columns, zoom=2))
