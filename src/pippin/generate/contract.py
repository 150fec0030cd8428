"""The interface of all generators of images and videos, and the sampling options and checks that they share.

Notable here:
- the options of sampling are declared and checked once; a method's `sample` adds its own
- the guidance scale means the same everywhere: 1 is no guidance, and above 1 a sample is extrapolated away from the
  unconditional one; papers on flows count from 0 (their w is our guidance - 1)
- an exception that a step's callback raises ends the sampling: nothing is computed after it
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypedDict, TypeVar, Unpack, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from pippin.core import progress
from pippin.core.checks import NonNegativeFloat, NonNegativeInt, PositiveInt, checked
from pippin.core.errors import InvalidArgument, InvalidInput, UnsupportedModel
from pippin.core.formats import checkpoint
from pippin.core.formats.model_types import class_of
from pippin.generate.conditions import Conditioning, ConditioningSpec
from pippin.generate.noise import Noise

M = TypeVar("M", bound="GeneratorModule")


@dataclass(frozen=True)
class SamplingStep:
    """Progress of sampling after a step.

    Attributes:
        done: number of steps computed so far.
        total: total number of steps.
        estimate: computes the current estimate of the samples when it is called.
    """

    done: int
    total: int
    estimate: Callable[[], Tensor]


OnStep = Callable[[SamplingStep], None]
"""Called after each step; an exception that it raises ends the sampling there."""


class GeneratorOptions(TypedDict, total=False):
    """Keyword arguments that `sample` of every generator takes.

    Attributes:
        steps: number of steps, at least 1; each generator documents what a step is. None for its default.
        guidance: scale of classifier-free guidance, at least 0; 1 for none.
        seed: random seed, 0 by default; sample i depends on ``seed + i`` alone.
        on_step: see `OnStep`.
    """

    steps: int | None
    guidance: float
    seed: int
    on_step: OnStep | None


@checked
@dataclass(frozen=True)
class SamplingRun:
    """The checked arguments of one call of `sample`.

    Attributes:
        condition: conditions of the n samples, on the device; None for no condition.
        n: number of samples.
        device: device of the model.
        steps, guidance, seed, on_step: see `GeneratorOptions`.
    """

    condition: Conditioning | None
    n: PositiveInt
    device: torch.device
    steps: PositiveInt | None = None
    guidance: NonNegativeFloat = 1.0
    seed: NonNegativeInt = 0
    on_step: OnStep | None = None

    def noise(self) -> Noise:
        """A new source of the samples' random numbers, at its start."""
        return Noise(self.n, seed=self.seed, device=self.device)


@runtime_checkable
class Generator(Protocol):
    """A model that generates samples.

    Attributes:
        metadata: JSON values that are saved with the model, such as "classes" (names), "data" and "text_encoder".
    """

    metadata: dict[str, Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a sample: (channels, height, width) of an image, (frames, channels, height, width) of a video."""

    @property
    def condition(self) -> ConditioningSpec:
        """The conditions that the model reads."""

    def sample(
        self, condition: Conditioning | None = None, n: int | None = None, **options: Unpack[GeneratorOptions]
    ) -> Float[Tensor, "n ..."]:
        """Generate samples in the documented range (images: about -1 to 1, not clipped).

        Args:
            condition: one for each sample, or one for all; None for no condition.
            n: number of samples; None for as many as the condition has, or 1.
            **options: see `GeneratorOptions`.
        """


@runtime_checkable
class HasLikelihood(Protocol):
    """A generator with a tractable likelihood."""

    def log_prob(self, x: Float[Tensor, "n ..."], condition: Conditioning | None = None) -> Float[Tensor, n]:
        """Log density of each sample, in nats; not divided by its dimensions."""


class GeneratorModule(nn.Module):
    """Base class of generators that are one network: configuration, metadata, saving, and checks of `sample`.

    Args:
        config: a frozen dataclass of the class's ``config_type``, with ``shape`` and ``condition``.

    Attributes:
        config: the configuration.
        metadata: see `Generator`; saved with the model.
    """

    model_type: ClassVar[str]
    config_type: ClassVar[type[Any]]

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.metadata: dict[str, Any] = {}

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a sample."""
        shape: tuple[int, ...] = self.config.shape
        return shape

    @property
    def condition(self) -> ConditioningSpec:
        """The conditions that the model reads."""
        spec: ConditioningSpec = self.config.condition
        return spec

    def sample(
        self, condition: Conditioning | None = None, n: int | None = None, **options: Unpack[GeneratorOptions]
    ) -> Float[Tensor, "n ..."]:
        """See `Generator.sample`."""
        raise NotImplementedError

    def save(self, path: str | Path) -> None:
        """Write the model to a folder that `load` reads.

        Args:
            path: the folder, created if it does not exist; a model in it is replaced atomically.

        Raises:
            InvalidArgument: metadata that JSON cannot represent.
            DiskFull: the disk is full; nothing was written.
        """
        checkpoint.save(self, path, model_type=self.model_type, config=self.config, metadata=self.metadata)

    @classmethod
    def load(cls: type[M], path: str | Path, *, device: str | None = None) -> M:
        """Read what `save` wrote; the model is in evaluation mode, without gradients.

        `GeneratorModule.load` itself opens a generator of any class.

        Args:
            path: the folder.
            device: as `pippin.load` takes it; None chooses.

        Raises:
            ModelNotFound: there is no such folder.
            UnsupportedModel: the folder holds another kind of model.
            CorruptedFile: a file is damaged, or tensors do not fit the configuration.
        """

        if cls is GeneratorModule:
            model_class = class_of(checkpoint.open_folder(path).config.get("model_type"))
            if not issubclass(model_class, GeneratorModule):
                raise UnsupportedModel(f"{path} holds a {model_class.__name__}, which is no generator of images")
            loaded: M = model_class.load(path, device=device)
            return loaded

        def build(saved: checkpoint.SavedModel[Any]) -> M:
            model = cls(saved.config)
            model.metadata = saved.metadata
            return model

        model = checkpoint.load(path, build, model_type=cls.model_type, config_type=cls.config_type, device=device)
        return model.requires_grad_(False)

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(self.parameters()).device

    def prepare(
        self,
        condition: Conditioning | None,
        n: int | None,
        *,
        unconditional_guidance: bool = False,
        **options: Unpack[GeneratorOptions],
    ) -> SamplingRun:
        """Check the arguments of `sample`; see `prepare_sampling`."""
        return prepare_sampling(
            self.condition, self.device, condition, n, unconditional_guidance=unconditional_guidance, **options
        )


def prepare_sampling(
    spec: ConditioningSpec,
    device: torch.device,
    condition: Conditioning | None = None,
    n: int | None = None,
    *,
    unconditional_guidance: bool = False,
    **options: Unpack[GeneratorOptions],
) -> SamplingRun:
    """Check the arguments of `sample` and move the condition to the device.

    Args:
        spec: the conditions that the model reads.
        device: device of the model.
        condition: conditions of n samples, or of one for all.
        n: number of samples; None for as many as the condition has, or 1.
        unconditional_guidance: whether the model can guide without a condition, too.
        **options: see `GeneratorOptions`; guidance other than 1 needs a condition, and a model with a null condition.

    Raises:
        InvalidArgument: a number out of range, a condition that the model does not read or of another number of
            samples, or guidance without a null condition.
    """
    if n is None:
        n = 1 if condition is None else len(condition)
    run = SamplingRun(condition, n, torch.device(device), **options)
    if condition is not None:
        spec.check(condition)
        if len(condition) not in (1, n):
            raise InvalidArgument(
                f"a condition of {len(condition)} samples for n={n}; give one for each, or one for all"
            )
        run = dataclasses.replace(run, condition=condition.expand(n).to(device))
    needs_null = condition is not None or not unconditional_guidance
    if run.guidance != 1.0 and needs_null and (condition is None or not spec.null):
        raise InvalidArgument(
            f"guidance={run.guidance} compares a condition with none, and "
            + ("no condition was given" if condition is None else "the model was not trained without its condition")
            + "; leave guidance at 1"
        )
    return run


def check_samples(x: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse samples that a model of samples of ``shape`` cannot read.

    Raises:
        InvalidArgument: samples of another shape.
        InvalidInput: samples that are not floating point, or not finite.
    """
    if tuple(x.shape[1:]) != tuple(shape):
        raise InvalidArgument(f"samples of shape {tuple(x.shape[1:])}; the model's are {tuple(shape)}")
    if not x.is_floating_point():
        raise InvalidInput(f"samples of type {x.dtype}; give floating point from -1 to 1 (levels / 127.5 - 1)")
    if not bool(x.isfinite().all()):
        raise InvalidInput("samples hold NaN or infinite values")


@contextmanager
def sampling_progress(title: str, *, unit: str = "steps", show_progress: bool = True) -> Iterator[OnStep]:
    """A callback for ``on_step`` that shows a progress bar with rate and remaining time, on a terminal.

    >>> with sampling_progress("sampling", show_progress=False) as on_step:
    ...     on_step(SamplingStep(1, 2, lambda: torch.zeros(1)))
    """
    with progress.bar(None, title, unit=unit, show_progress=show_progress) as bar:
        before = 0

        def on_step(step: SamplingStep) -> None:
            nonlocal before
            bar.advance(step.done - before)
            bar.say(f"of {step.total}")
            before = step.done

        yield on_step
