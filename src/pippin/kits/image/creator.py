"""`ImageCreator`: images from descriptions, classes, images and drawings, with any generator of this library.

Notable here:
- one interface for every family: the same seed, strength and guidance mean the same with all of them
- invalid requests raise before any computation, each reason as its own error; nothing is replaced silently
- image i depends on ``seed + i`` alone, and by default images are sampled one at a time: more of them change none
- nothing is downloaded: a missing text encoder is an error that explains how to get it
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Unpack

from pippin.core.errors import CreationUnavailable, ModelNotFound
from pippin.core.files import sha256_of
from pippin.generate.contract import Generator, GeneratorModule
from pippin.kits.image import concepts as wanted, plan as planning, worker
from pippin.kits.image.concepts import Concept, ImageRef, Mask
from pippin.kits.image.job import Task
from pippin.kits.image.plan import Cost
from pippin.kits.image.planner import ImagePlan, Planner, listed
from pippin.kits.image.request import Blocked, CreatedImage, ImageSettings, Progress, request_of
from pippin.kits.image.worker import Event, Judge
from pippin.recipes.prompt_encoder import PromptEncoder
from pippin.session.guardrails import Guardrails


@dataclass(frozen=True)
class ImageCapabilities:
    """Capabilities of a creator.

    Attributes:
        family: family of the generator.
        tasks: "draw", "restyle", "fill", "animate".
        reads: "text", "classes", "map": the conditions that the model reads.
        size: height and width of a sampled image.
        channels: 1 or 3.
        frames: of a video; 0 for images.
        guidance: whether classifier-free guidance is available.
        classes: names of the classes.
    """

    family: str
    tasks: tuple[Task, ...]
    reads: tuple[str, ...]
    size: tuple[int, int]
    channels: int
    frames: int
    guidance: bool
    classes: tuple[str, ...]


class ImageCreator:
    """Generates images with a model.

    Args:
        model: a generator of this library.
        encoder: encodes descriptions; None loads the one that the model's metadata names, on first use.
        guard: checks descriptions; None for none.
        judge: checks finished images; None for none.
        memory_budget: bytes that weights and sampling may take; None for no limit. It is checked before sampling.
        compose: if given, each concept is a part of a composition over this background ("null", or a description such
            as "nothing") instead of all being one description.
        name: name of the model in the metadata.
        model_hash: hash of the weights in the metadata; empty computes it.

    Raises:
        UnsupportedModel: not a generator that a backend supports.
        InvalidArgument: a model that cannot compose.

    >>> creator = ImageCreator.load("painter")                                            # doctest: +SKIP
    >>> for picture in creator.images("two white squares", limit=4, seed=7):              # doctest: +SKIP
    ...     picture.save(f"{picture.index}.png")
    """

    def __init__(
        self,
        model: Generator,
        *,
        encoder: PromptEncoder | None = None,
        guard: Guardrails | None = None,
        judge: Judge | None = None,
        memory_budget: int | None = None,
        compose: str | None = None,
        name: str = "",
        model_hash: str = "",
    ) -> None:
        self.model, self.judge = model, judge
        self.name = name or type(model).__name__
        self._planner = Planner(
            model,
            name=self.name,
            encoder=encoder,
            guard=guard,
            memory_budget=memory_budget,
            compose=compose,
            model_hash=model_hash,
        )
        self.backend = self._planner.backend

    @classmethod
    def load(
        cls,
        ref: str | Path,
        *,
        device: str | None = None,
        memory_budget: int | None = None,
        guard: Guardrails | Literal["default"] | None = "default",
        judge: Judge | None = None,
        compose: str | None = None,
    ) -> ImageCreator:
        """Load a model's folder; nothing is downloaded.

        Args:
            ref: a folder that a generator's ``save`` or `pippin train images` wrote.
            device: as `pippin.load` takes it; None chooses.
            memory_budget: see the class; weights beyond it are not read.
            guard: "default" for the packaged guardrails, None for none.
            judge: see the class.
            compose: see the class.

        Raises:
            CreationUnavailable: there is no such folder, or it holds no weights.
            UnsupportedModel: it holds another kind of model.
            CorruptedFile: a file is damaged.
            OverMemoryBudget: its weights alone are beyond the budget.
        """
        folder = Path(ref).expanduser()
        weights = planning.stored_weights(folder) if folder.is_dir() else 0
        if not weights:
            missing = "holds no weights" if folder.is_dir() else "is not there"
            raise CreationUnavailable(
                f"{folder} {missing}; give the folder of a generator, such as `pippin train images` writes",
                reason="weights missing",
            )
        planning.refuse_weights(str(ref), weights, memory_budget)
        try:
            model = GeneratorModule.load(folder, device=device)
        except ModelNotFound as error:
            raise CreationUnavailable(str(error), reason="weights missing") from error
        checked = Guardrails.default() if guard == "default" else guard
        single = folder / "model.safetensors"
        return cls(
            model,
            guard=checked,
            judge=judge,
            memory_budget=memory_budget,
            compose=compose,
            name=folder.resolve().name,
            model_hash=sha256_of(single) if single.is_file() else "",
        )

    # --- capabilities -------------------------------------------------------------------------------------------------

    @property
    def available_styles(self) -> tuple[str, ...]:
        """Names of the styles that `images` takes."""
        return tuple(style.name for style in self._planner.styles)

    @property
    def capabilities(self) -> ImageCapabilities:
        """The capabilities; every other request is refused."""
        spec, shape = self.model.condition, self.model.shape
        return ImageCapabilities(
            family=self.backend.family,
            tasks=tuple(sorted(self.backend.tasks)),
            reads=tuple(
                name
                for name, size in (("text", spec.text_dim), ("classes", spec.num_classes), ("map", spec.map_channels))
                if size
            ),
            size=(shape[-2], shape[-1]),
            channels=shape[-3],
            frames=shape[0] if len(shape) == 4 else 0,
            guidance=spec.null,
            classes=tuple(str(name) for name in self.model.metadata.get("classes", ())),
        )

    @property
    def encoder(self) -> PromptEncoder:
        """The text encoder; loaded on first use.

        Raises:
            CreationUnavailable: it is missing, or not the one that the model was trained with.
        """
        return self._planner.encoder

    @property
    def model_hash(self) -> str:
        """SHA-256 of the weights: of the file, or of the tensors if there is no file."""
        return self._planner.model_hash

    def extract(self, text: str, *, title: str = "", max_concepts: int = 3) -> list[str]:
        """The phrases that an `ExtractedText` stands for, to be shown and edited; see `concepts.extract`."""
        return self._planner.extract(text, title=title, max_concepts=max_concepts)

    # --- sampling -----------------------------------------------------------------------------------------------------

    def images(
        self,
        concepts: Concept | Sequence[Concept],
        *,
        on_progress: Callable[[Progress], None] | None = None,
        cancel: threading.Event | None = None,
        **settings: Unpack[ImageSettings],
    ) -> Iterator[CreatedImage]:
        """Sample images.

        Args:
            concepts: what the images show and start from: descriptions, a `Label`, one `ImageRef` or `Drawing`.
            on_progress: called after each step.
            cancel: if it is set, from any thread, sampling stops after the current step.
            settings: see `ImageRequest`.

        Returns:
            The images, each as soon as it is finished. All checks are made before the first is requested.

        Raises:
            InvalidArgument: a setting out of range, an unknown style or class, no concept.
            UnsupportedLanguage: the encoder does not support the language of the description.
            ConceptsBlocked: the guard blocks the description; or, after the last image, the judge withheld some.
            CreationNotSupported: the model does not support the request.
            CreationUnavailable: the text encoder is missing.
            UnsupportedInputImage: an image that cannot be read.
            OverMemoryBudget: it does not fit; nothing was allocated.
            CreationFailed: sampling failed; ``step`` is the step.
            Cancelled: ``cancel`` was set.
        """
        return self._pictures(self.plan(concepts, **settings), on_progress, cancel)

    def edit(
        self,
        image: wanted.ImageSource,
        mask: Mask | None = None,
        concepts: Concept | Sequence[Concept] = (),
        *,
        on_progress: Callable[[Progress], None] | None = None,
        cancel: threading.Event | None = None,
        **settings: Unpack[ImageSettings],
    ) -> Iterator[CreatedImage]:
        """Edit an image: inside a mask, or everywhere with a strength.

        Args:
            image: the image.
            mask: white where the image is generated again; all other pixels stay unchanged. None for everywhere.
            concepts: what the result shows.
            on_progress: see `images`.
            cancel: see `images`.
            settings: see `ImageRequest`; with a mask ``strength`` is 1 unless it is given.

        Returns, Raises:
            As `images`.
        """
        plan = self.plan([*listed(concepts), ImageRef(image)], mask=mask, **settings)
        return self._pictures(plan, on_progress, cancel)

    def animate(
        self,
        image: wanted.ImageSource,
        concepts: Concept | Sequence[Concept] = (),
        *,
        frames: int | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        cancel: threading.Event | None = None,
        **settings: Unpack[ImageSettings],
    ) -> Iterator[CreatedImage]:
        """Generate a video that starts with an image.

        Args:
            image: its first frame.
            concepts: what the video shows.
            frames: number of frames; None for the model's own.
            on_progress: see `images`.
            cancel: see `images`.
            settings: see `ImageRequest`.

        Returns, Raises:
            As `images`; CreationNotSupported: the model does not generate videos.
        """
        plan = self.plan([*listed(concepts), ImageRef(image)], frames=frames, animate=True, **settings)
        return self._pictures(plan, on_progress, cancel)

    def events(
        self, concepts: Concept | Sequence[Concept], *, mask: Mask | None = None, **settings: Unpack[ImageSettings]
    ) -> Iterator[Event]:
        """`Progress` after each step, each `CreatedImage`, and `Blocked` for one that is withheld.

        Leaving the loop ends the sampling within one step. Arguments and errors are those of `images` and `edit`.
        """
        plan = self.plan(concepts, mask=mask, **settings)
        return worker.events(self.backend, self.judge, plan)

    async def aimages(
        self, concepts: Concept | Sequence[Concept], *, mask: Mask | None = None, **settings: Unpack[ImageSettings]
    ) -> AsyncIterator[CreatedImage]:
        """As `images`, for `async for`; cancelling the task stops sampling within one step."""
        plan = await asyncio.to_thread(self.plan, concepts, mask=mask, **settings)
        withheld: list[Blocked] = []
        events = worker.aevents(self.backend, self.judge, plan)
        try:
            async for item in events:
                if isinstance(item, CreatedImage):
                    yield item
                elif isinstance(item, Blocked):
                    withheld.append(item)
        finally:
            await events.aclose()
        worker.tell_withheld(withheld)

    def estimate(
        self, concepts: Concept | Sequence[Concept] = "", *, mask: Mask | None = None, **settings: Unpack[ImageSettings]
    ) -> Cost:
        """Estimate the cost of a request: its first steps are run, measured and discarded.

        Raises:
            As `images`.
        """
        cost = self.plan(concepts or (), mask=mask, measure=True, **settings).cost
        assert cost is not None
        return cost

    def plan(
        self,
        concepts: Concept | Sequence[Concept],
        *,
        mask: Mask | None = None,
        frames: int | None = None,
        animate: bool = False,
        measure: bool = False,
        **settings: Unpack[ImageSettings],
    ) -> ImagePlan:
        """Validate a request and prepare it; see `images` for the errors.

        Args:
            concepts: as `images`.
            mask: as `edit`.
            frames: as `animate`.
            animate: whether a video is requested.
            measure: whether seconds and bytes are estimated; bytes are where there is a budget.
            settings: see `ImageRequest`.
        """
        request = request_of(settings)
        return self._planner.plan(concepts, request, mask=mask, frames=frames, animate=animate, measure=measure)

    def _pictures(
        self, plan: ImagePlan, on_progress: Callable[[Progress], None] | None, cancel: threading.Event | None
    ) -> Iterator[CreatedImage]:
        withheld: list[Blocked] = []
        tell, stop = on_progress or (lambda progress: None), cancel or threading.Event()
        for item in worker.run(self.backend, self.judge, plan, tell, stop):
            if isinstance(item, Blocked):
                withheld.append(item)
            else:
                yield item
        worker.tell_withheld(withheld)
