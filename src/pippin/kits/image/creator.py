"""`ImageCreator`: pictures from words, classes, pictures and drawings, with any generator of this library.

Notable here:
- one interface for every family: the same seed, strength and guidance mean the same with all of them
- what can be refused is refused before any work, each reason as an error of its own; nothing is replaced in silence
- picture i depends on ``seed + i`` alone, and by default every picture is drawn by itself: more of them change none
- nothing is fetched: a text encoder that is missing is an error that says how to get it
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
from pippin.generate import folder as folders
from pippin.generate.contract import Generator
from pippin.kits.image import concepts as wanted, plan as planning, running
from pippin.kits.image.backends import Task
from pippin.kits.image.concepts import Concept, ImageRef, Mask
from pippin.kits.image.plan import Cost
from pippin.kits.image.planner import Plan, Planner, listed
from pippin.kits.image.request import Blocked, Picture, Progress, Settings, request_of
from pippin.kits.image.running import Event, Judge
from pippin.kits.image.text import TextEncoder
from pippin.session.guardrails import Guardrails


@dataclass(frozen=True)
class Capabilities:
    """What a creator can do.

    Attributes:
        family: of the generator.
        tasks: "draw", "restyle", "fill", "animate".
        reads: "text", "classes", "map": what a drawing is steered by.
        size: height and width of a picture as it is drawn.
        channels: 1 or 3.
        frames: of a clip; 0 for pictures.
        guidance: whether a description may be followed more closely than was learnt.
        classes: their names.
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
    """Makes pictures with a model.

    Args:
        model: a generator of this library.
        encoder: reads descriptions; None loads the one that the model's facts name, when it is first needed.
        guard: checks descriptions; None for none.
        judge: checks finished pictures; None for none.
        memory_budget: bytes that weights and drawing may take; None for any. It is checked before a drawing.
        compose: given, each concept is a part of a composition over this background ("null", or a description such as
            "nothing") instead of all being one description.
        name: for metadata.
        model_hash: for metadata; empty computes it from the weights.

    Raises:
        UnsupportedModel: no generator that a backend draws with.
        InvalidArgument: a model that cannot compose.

    >>> creator = ImageCreator.load("painter")                                            # doctest: +SKIP
    >>> for picture in creator.images("two white squares", limit=4, seed=7):              # doctest: +SKIP
    ...     picture.save(f"{picture.index}.png")
    """

    def __init__(
        self,
        model: Generator,
        *,
        encoder: TextEncoder | None = None,
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
        """Load a model's folder; nothing is fetched.

        Args:
            ref: a folder that `pippin.generate.folder.save` or `pippin train images` wrote.
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
            model = folders.load(folder, device=device)
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

    # --- what it can do -----------------------------------------------------------------------------------------------

    @property
    def available_styles(self) -> tuple[str, ...]:
        """Names of the styles that `images` takes."""
        return tuple(style.name for style in self._planner.styles)

    @property
    def capabilities(self) -> Capabilities:
        """What it can do; every other request is refused."""
        spec, shape = self.model.condition, self.model.shape
        return Capabilities(
            family=self.backend.family,
            tasks=tuple(sorted(self.backend.tasks)),
            reads=tuple(name for name in ("text", "classes", "map") if getattr(spec, name)),
            size=(shape[-2], shape[-1]),
            channels=shape[-3],
            frames=shape[0] if len(shape) == 4 else 0,
            guidance=spec.null,
            classes=tuple(str(name) for name in self.model.facts.get("classes", ())),
        )

    @property
    def encoder(self) -> TextEncoder:
        """What reads descriptions; loaded when it is first asked for.

        Raises:
            CreationUnavailable: it is not here, or not the one that the model was trained with.
        """
        return self._planner.encoder

    @property
    def model_hash(self) -> str:
        """SHA-256 of the weights: of the file, or of the tensors where there is none."""
        return self._planner.model_hash

    def extract(self, text: str, *, title: str = "", most: int = 3) -> list[str]:
        """The phrases that an `ExtractedText` stands for, to be shown and edited; see `concepts.extract`."""
        return self._planner.extract(text, title=title, most=most)

    # --- drawing ------------------------------------------------------------------------------------------------------

    def images(
        self,
        concepts: Concept | Sequence[Concept],
        *,
        on_progress: Callable[[Progress], None] | None = None,
        cancel: threading.Event | None = None,
        **settings: Unpack[Settings],
    ) -> Iterator[Picture]:
        """Draw pictures.

        Args:
            concepts: what they show and begin from: words, a `Label`, one `ImageRef` or `Drawing`.
            on_progress: called after each step.
            cancel: set, from anywhere, it ends the drawing after the step that is being made.
            settings: see `Request`.

        Returns:
            The pictures, each as soon as it is finished. All checks are made before the first is asked for.

        Raises:
            InvalidArgument: a setting out of range, an unknown style or class, no concept.
            UnsupportedLanguage: the description is in a language that the encoder does not read.
            ConceptsBlocked: the guard refuses the description; or, after the last picture, the judge withheld some.
            CreationNotSupported: the model cannot do this.
            CreationUnavailable: the text encoder is missing.
            UnsupportedInputImage: a picture that cannot be used.
            OverMemoryBudget: it does not fit; nothing was allocated.
            CreationFailed: drawing began and went wrong; ``step`` says where.
            Cancelled: ``cancel`` was set.
        """
        return self._pictures(self.plan(concepts, **settings), on_progress, cancel)

    def edit(
        self,
        image: wanted.PictureSource,
        mask: Mask | None = None,
        concepts: Concept | Sequence[Concept] = (),
        *,
        on_progress: Callable[[Progress], None] | None = None,
        cancel: threading.Event | None = None,
        **settings: Unpack[Settings],
    ) -> Iterator[Picture]:
        """Change a picture: inside a mask, or everywhere by a strength.

        Args:
            image: the picture.
            mask: white where it is to be drawn anew; all other pixels stay as they are. None for everywhere.
            concepts: what it is to show.
            on_progress: see `images`.
            cancel: see `images`.
            settings: see `Request`; with a mask ``strength`` is 1 unless it is given.

        Returns, Raises:
            As `images`.
        """
        plan = self.plan([*listed(concepts), ImageRef(image)], mask=mask, **settings)
        return self._pictures(plan, on_progress, cancel)

    def animate(
        self,
        image: wanted.PictureSource,
        concepts: Concept | Sequence[Concept] = (),
        *,
        frames: int | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        cancel: threading.Event | None = None,
        **settings: Unpack[Settings],
    ) -> Iterator[Picture]:
        """Make a clip that begins with a picture.

        Args:
            image: its first frame.
            concepts: what it is to show.
            frames: of the clip; None for the model's own.
            on_progress: see `images`.
            cancel: see `images`.
            settings: see `Request`.

        Returns, Raises:
            As `images`; CreationNotSupported: the model makes no clips.
        """
        plan = self.plan([*listed(concepts), ImageRef(image)], frames=frames, animate=True, **settings)
        return self._pictures(plan, on_progress, cancel)

    def events(
        self, concepts: Concept | Sequence[Concept], *, mask: Mask | None = None, **settings: Unpack[Settings]
    ) -> Iterator[Event]:
        """The drawing as it goes: `Progress` after each step, each `Picture`, and `Blocked` for one that is withheld.

        Leaving the loop ends the drawing within one step. Arguments and errors are those of `images` and `edit`.
        """
        plan = self.plan(concepts, mask=mask, **settings)
        return running.events(self.backend, self.judge, plan)

    async def aimages(
        self, concepts: Concept | Sequence[Concept], *, mask: Mask | None = None, **settings: Unpack[Settings]
    ) -> AsyncIterator[Picture]:
        """As `images`, for `async for`; a cancelled task ends the drawing within one step."""
        plan = await asyncio.to_thread(self.plan, concepts, mask=mask, **settings)
        withheld: list[Blocked] = []
        events = running.aevents(self.backend, self.judge, plan)
        try:
            async for item in events:
                if isinstance(item, Picture):
                    yield item
                elif isinstance(item, Blocked):
                    withheld.append(item)
        finally:
            await events.aclose()
        running.tell_withheld(withheld)

    def estimate(
        self, concepts: Concept | Sequence[Concept] = "", *, mask: Mask | None = None, **settings: Unpack[Settings]
    ) -> Cost:
        """What a request would take: its first steps are made, measured and thrown away.

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
        **settings: Unpack[Settings],
    ) -> Plan:
        """Check a request and make it ready; see `images` for what is raised.

        Args:
            concepts: as `images`.
            mask: as `edit`.
            frames: as `animate`.
            animate: whether a clip is wanted.
            measure: whether seconds and bytes are estimated; bytes are where there is a budget.
            settings: see `Request`.
        """
        request = request_of(settings)
        return self._planner.plan(concepts, request, mask=mask, frames=frames, animate=animate, measure=measure)

    def _pictures(
        self, plan: Plan, on_progress: Callable[[Progress], None] | None, cancel: threading.Event | None
    ) -> Iterator[Picture]:
        withheld: list[Blocked] = []
        tell, stop = on_progress or (lambda progress: None), cancel or threading.Event()
        for item in running.run(self.backend, self.judge, plan, tell, stop):
            if isinstance(item, Blocked):
                withheld.append(item)
            else:
                yield item
        running.tell_withheld(withheld)
