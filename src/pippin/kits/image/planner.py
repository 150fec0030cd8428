"""Validation and preparation of image requests: everything that is checked, loaded and encoded before sampling.

Notable here:
- checks are in order of cost: numbers, text, the guard, capabilities, images, the text encoder, memory
- a plan holds everything that sampling needs; decisions are recorded in the metadata of its images
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from pippin.core.errors import (
    ConceptsBlocked,
    CreationNotSupported,
    CreationUnavailable,
    InvalidArgument,
    ModelNotFound,
    UnsupportedLanguage,
)
from pippin.core.store.reference import resolve
from pippin.data.text.language import language_of
from pippin.generate.conditions import Conditioning
from pippin.generate.contract import Generator
from pippin.kits.image import concepts as wanted, plan as planning, styles
from pippin.kits.image.backends import backend_of
from pippin.kits.image.concepts import Concept, Drawing, ExtractedText, ImageRef, Label, Mask, TextConcept
from pippin.kits.image.job import ImageBackend, ImageJob, Task
from pippin.kits.image.plan import Cost
from pippin.kits.image.request import ImageRequest
from pippin.recipes.prompt_encoder import PromptEncoder
from pippin.session.guardrails import GuardrailDecision, Guardrails

SENTENCE: Final = "I would like an image that shows {}."
GUIDANCE: Final = 2.0
"""Default guidance of models that support it, if neither the request nor the style nor the metadata set it."""


@dataclass(frozen=True)
class ImagePlan:
    """A validated request, ready for sampling.

    Attributes:
        request: the request.
        style: its style.
        job: the job of the first batch; later ones continue the seeds.
        batch_size: images in a batch.
        details: metadata of every image.
        cost: None if nothing was estimated.
        enlarged: upscaling factor.
    """

    request: ImageRequest
    style: styles.Style
    job: ImageJob
    batch_size: int
    details: dict[str, Any]
    cost: Cost | None
    enlarged: int


class Planner:
    """Makes plans for one model; the arguments are those of `ImageCreator`."""

    def __init__(
        self,
        model: Generator,
        *,
        name: str,
        encoder: PromptEncoder | None,
        guard: Guardrails | None,
        memory_budget: int | None,
        compose: str | None,
        model_hash: str = "",
    ) -> None:
        self.model, self.name, self.guard, self.memory_budget = model, name, guard, memory_budget
        self.styles = styles.styles_of(model.metadata)
        self._encoder, self._hash = encoder, model_hash
        background: Conditioning | Literal["null"] | None = None
        if compose is not None:
            background = "null" if compose == "null" else self._said(compose)
        self.backend: ImageBackend = backend_of(model, background=background)

    @property
    def encoder(self) -> PromptEncoder:
        """The text encoder; loaded on first use.

        Raises:
            CreationUnavailable: it is missing, or not the one that the model was trained with.
        """
        if self._encoder is None:
            described = self.model.metadata.get("text_encoder") or {}
            name = described.get("name", "all-minilm-l6-v2")
            try:
                self._refuse_encoder(name)
                self._encoder = PromptEncoder.load(name, max_tokens=described.get("tokens", 48), download=False)
            except ModelNotFound as error:
                raise CreationUnavailable(
                    f"the model reads descriptions through {name}, which is not here: pippin pull {name}",
                    reason="text encoder missing",
                ) from error
            if described.get("sha256", self._encoder.sha256) != self._encoder.sha256:
                self._encoder = None
                raise CreationUnavailable(
                    f"the model was trained with other weights of {name} than those that are here; pull it again",
                    reason="text encoder differs",
                )
        return self._encoder

    def _refuse_encoder(self, name: str) -> None:
        """Refuse an encoder that does not fit into memory beside the model, before it is loaded."""
        if self.memory_budget is not None:
            stored = planning.stored_weights(resolve(name, download=False).path)
            together = planning.weights_of(self.model) + stored
            planning.refuse_weights(f"{self.name} with its text encoder", together, self.memory_budget)

    @property
    def model_hash(self) -> str:
        """SHA-256 of the weights: of the file, or of the tensors if there is no file."""
        if not self._hash:
            digest = hashlib.sha256()
            state = self.model.state_dict() if isinstance(self.model, nn.Module) else {}
            for name in sorted(state):
                digest.update(name.encode() + state[name].cpu().contiguous().view(torch.uint8).numpy().tobytes())
            self._hash = digest.hexdigest()
        return self._hash

    def extract(self, text: str, *, title: str, max_concepts: int) -> list[str]:
        """See `concepts.extract`; ranked by the model's encoder if there is one."""
        encoder = self.encoder if self.model.condition.text_dim else None
        return wanted.extract(text, title=title, max_concepts=max_concepts, encoder=encoder)

    def plan(
        self,
        concepts: Concept | Sequence[Concept],
        request: ImageRequest,
        *,
        mask: Mask | None = None,
        frames: int | None = None,
        animate: bool = False,
        measure: bool = False,
    ) -> ImagePlan:
        """Validate a request and prepare it; see `images` for the errors.

        Args:
            concepts: as `images`.
            request: its settings.
            mask: as `edit`.
            frames: as `animate`.
            animate: whether a video is requested.
            measure: whether seconds and bytes are estimated; bytes are where there is a budget.
        """
        style = styles.choose(request.style, self.styles)
        enlarged = request.enlargement(self.model.shape)
        parts = listed(concepts)
        given = [part for part in parts if isinstance(part, ImageRef | Drawing)]
        if not parts and not measure and not self.model.condition.empty:
            raise InvalidArgument("there is nothing to draw: give at least one concept, such as a description")
        if len(given) > 1:
            raise InvalidArgument(f"{len(given)} images to begin from; give one")
        prompts = self._prompts(parts, style)
        notes: list[str] = []
        task = self._task(given, mask, animate)
        conditions = self._conditions(parts, prompts, given, notes)
        base = float(self.model.metadata.get("guidance", GUIDANCE)) if style.guidance is None else style.guidance
        guidance = request.guided(base) if self._guides(conditions) else 1.0
        if request.guidance not in (None, 1.0) and not self._guides(conditions):
            raise CreationNotSupported(
                f"guidance={request.guidance}, but {self.name} was not trained without its condition, or there is no "
                "description; leave guidance out"
            )
        job = ImageJob(
            request.limit,
            request.seed,
            conditions,
            request.steps or self.backend.steps(request.quality),
            guidance,
            frames=frames,
        )
        if given and not (isinstance(given[0], Drawing) and self.model.condition.map_channels):
            job = self._beginning(job, given[0], mask, request, task, notes)
        details = self._details(request, prompts, self._classes(parts), job, task, notes)
        return self._costed(request, style, job, details, enlarged, measure)

    def _costed(
        self,
        request: ImageRequest,
        style: styles.Style,
        job: ImageJob,
        details: dict[str, Any],
        enlarged: int,
        measure: bool,
    ) -> ImagePlan:
        """The batch size and the cost."""
        together, cost = min(request.batch_size, request.limit), None
        if (measure or self.memory_budget is not None) and job.strength > 0:
            encoder = self._encoder.encoder.module if self._encoder is not None else None
            weights = planning.weights_of(self.model, encoder)
            together, each = planning.largest_batch(
                self.backend, job, request.limit, together, weights=weights, budget=self.memory_budget
            )
            if measure:
                cost = planning.cost_of(
                    self.backend, job, request.limit, batch_size=together, each=each, weights=weights
                )
        return ImagePlan(request, style, replace(job, n=together), together, details, cost, enlarged)

    def _prompts(self, parts: Sequence[Concept], style: styles.Style) -> list[str]:
        """Descriptions, checked, each within the style's template."""
        prompts: list[str] = []
        for part in parts:
            if isinstance(part, ExtractedText):
                prompts += self.extract(part.text, title=part.title, max_concepts=part.max_concepts)
            elif isinstance(part, str | TextConcept):
                prompts.append((part if isinstance(part, str) else part.text).strip())
        if any(not text for text in prompts):
            raise InvalidArgument("a description is empty; say what the image is to show, or leave it out")
        for text in prompts:
            self._admit(text)
        return [style.apply(text) for text in prompts]

    def _admit(self, text: str) -> None:
        """Check the language, then the guard."""
        known = tuple((self.model.metadata.get("text_encoder") or {}).get("languages", ("en",)))
        language = language_of(text)
        if language is not None and language not in known:
            raise UnsupportedLanguage(
                f"the description {text!r:.60} seems to be in {language!r}; {self.name} reads {', '.join(known)}",
                language=language,
            )
        if self.guard is not None and (blocking := _blocking(self.guard, text)) is not None:
            raise ConceptsBlocked(f"the description {text!r:.60} was blocked: {blocking}", category=blocking.category)

    def _task(self, given: Sequence[Concept], mask: Mask | None, animate: bool) -> Task:
        """The requested task; refused if the family does not support it."""
        steered = bool(given) and isinstance(given[0], Drawing) and bool(self.model.condition.map_channels)
        task: Task = "draw"
        if animate:
            task = "animate"
        elif mask is not None:
            task = "fill"
        elif given and not steered:
            task = "restyle"
        if task not in self.backend.tasks:
            raise CreationNotSupported(
                f"{self.name} is a {self.backend.family} and does not {task}; it can "
                f"{', '.join(sorted(self.backend.tasks))}"
            )
        if mask is not None and not given:
            raise InvalidArgument("a mask needs the image that it marks; give an ImageRef, or use edit()")
        return task

    def _conditions(
        self, parts: Sequence[Concept], prompts: Sequence[str], given: Sequence[Concept], notes: list[str]
    ) -> list[Conditioning]:
        """The model's conditions: one, or one for each description of a composition."""
        spec = self.model.condition
        labels = [part for part in parts if isinstance(part, Label)]
        if spec.empty and (prompts or labels):
            raise CreationNotSupported(
                f"{self.name} draws from what it has seen and reads no description; leave the description out"
            )
        if spec.empty:
            return []
        if labels and not spec.num_classes:
            raise CreationNotSupported(f"{self.name} knows no classes; describe the image in words")
        if labels and len(labels) + len(prompts) > 1 and "composed" not in self.backend.family:
            raise InvalidArgument(f"{len(labels)} classes and {len(prompts)} descriptions; give one class")
        raster = None
        if spec.map_channels:
            drawn = next((part for part in given if isinstance(part, Drawing)), None)
            shape = (spec.map_channels, *self.model.shape[-2:])
            raster = (
                torch.zeros(shape)
                if drawn is None
                else Drawing(drawn.strokes, drawn.stroke_width, 1.0, 0.0).raster(shape)
            )
            if drawn is not None:
                notes.append("the drawing steers the model as a map")
        texts = [wanted.joined(prompts)] if prompts else []
        if self.backend.family == "composed diffusion":
            texts = list(prompts)
        made = [self._said(text, raster) for text in texts] + [self._said("", raster, part) for part in labels]
        if not made and (raster is not None or spec.null):
            made = [self._said("", raster)]
        return made

    def _said(self, text: str, raster: Tensor | None = None, label: Label | None = None) -> Conditioning:
        """A condition of one row."""
        spec = self.model.condition
        nothing = spec.null_condition(1, (self.model.shape[-2], self.model.shape[-1]))
        if raster is not None:
            nothing = replace(nothing, map=raster[None])
        if label is not None:
            return replace(nothing, labels=torch.tensor([self._class(label.name)]))
        if text and spec.text_dim:
            states, mask = self.encoder.encode([text])
            if states.shape[-1] != spec.text_dim:
                raise CreationUnavailable(
                    f"{self.name} reads texts of width {spec.text_dim}, the encoder's have {states.shape[-1]}",
                    reason="text encoder differs",
                )
            return replace(nothing, text=states, text_mask=mask)
        if text and spec.num_classes:
            return replace(nothing, labels=torch.tensor([self._class_in(text)]))
        if text:
            raise CreationNotSupported(f"{self.name} reads no words; give a Drawing")
        return nothing

    def _class(self, name: str | int) -> int:
        names = [str(one).lower() for one in self.model.metadata.get("classes", ())]
        number = name if isinstance(name, int) else names.index(name.lower()) if name.lower() in names else -1
        if not 0 <= number < self.model.condition.num_classes:
            shown = ", ".join(map(str, self.model.metadata.get("classes", range(self.model.condition.num_classes))))
            raise InvalidArgument(f"there is no class {name!r}; choose one of {shown}")
        return number

    def _class_in(self, text: str) -> int:
        """The class that a description names."""
        names = [str(one) for one in self.model.metadata.get("classes", ())]
        words = {word.strip(".,!?").lower() for word in text.split()}
        words |= {word.removesuffix("s") for word in words}
        hits = [i for i, name in enumerate(names) if set(name.lower().replace("/", " ").split()) & words]
        if len(hits) != 1:
            found = f"names {', '.join(names[i] for i in hits)}" if hits else "names none of them"
            raise CreationNotSupported(
                f"{self.name} knows classes, not words, and {text!r:.60} {found}: {', '.join(names)}"
            )
        return hits[0]

    def _guides(self, conditions: Sequence[Conditioning]) -> bool:
        """Whether classifier-free guidance is possible."""
        parts = [part for one in conditions for part in (one.text_mask, one.map, one.vector) if part is not None]
        conditioned = any(bool(part.any()) for part in parts)
        conditioned = conditioned or any(one.labels is not None and bool((one.labels >= 0).any()) for one in conditions)
        return conditioned and self.model.condition.null

    def _beginning(
        self, job: ImageJob, given: Concept, mask: Mask | None, request: ImageRequest, task: Task, notes: list[str]
    ) -> ImageJob:
        """The initial image of a job."""
        shape = self.model.shape
        if isinstance(given, Drawing):
            start = given.raster(shape)
            notes.append("the drawing is an image to begin from: the model is not steered by drawings")
        else:
            assert isinstance(given, ImageRef)
            start = wanted.read_image(given.image, shape)
        if task == "animate":
            return replace(job, start=start)
        strength = request.strong(isinstance(given, Drawing))
        if task == "fill":
            assert mask is not None
            strength = 1.0 if request.strength is None else request.strength
            return replace(job, start=start, strength=strength, redraw=mask.raster(shape))
        if strength == 1:
            return replace(job, strength=1.0)  # nothing of the image would remain
        return replace(job, start=start, strength=strength)

    def _classes(self, parts: Sequence[Concept]) -> list[str]:
        """The names of the requested classes, numbers if they have none."""
        names = self.model.metadata.get("classes", ())
        chosen = [self._class(part.name) for part in parts if isinstance(part, Label)]
        return [str(names[number]) if number < len(names) else str(number) for number in chosen]

    def _details(
        self,
        request: ImageRequest,
        prompts: Sequence[str],
        classes: Sequence[str],
        job: ImageJob,
        task: Task,
        notes: Sequence[str],
    ) -> dict[str, Any]:
        return {
            "synthetic": True,
            "software": f"pippin {version('pippin')}",
            "model": self.name,
            "model_sha256": self.model_hash,
            "family": self.backend.family,
            "task": task,
            "prompts": list(prompts),
            "classes": list(classes),
            "style": request.style,
            "steps": job.steps,
            "guidance": job.guidance,
            "strength": job.strength if task in ("restyle", "fill") else None,
            "notes": list(notes),
        }


def _blocking(guard: Guardrails, text: str) -> GuardrailDecision | None:
    """The decision that blocks a description, if any.

    The packaged classifier was trained on sentences, and takes "ship" alone for something illegal: it reads the
    description within a sentence, and by itself only for content that no image may show.
    """

    def blocks(read: str) -> list[GuardrailDecision]:
        return [decision for decision in guard.check(read, role="input").decisions if decision.action == "block"]

    alone = [d for d in blocks(text) if d.rule != "classifier" or d.category.split("/")[0] in ("sexual", "minors")]
    return next(iter([*alone, *blocks(SENTENCE.format(text))]), None)


def listed(concepts: Any) -> list[Any]:
    """Concepts as a list.

    Raises:
        InvalidArgument: an invalid concept.
    """
    single = str | TextConcept | ExtractedText | Label | ImageRef | Drawing
    parts = [concepts] if isinstance(concepts, single) else list(concepts)
    for part in parts:
        if not isinstance(part, single):
            raise InvalidArgument(
                f"{type(part).__name__} is no concept: give words, Label, ExtractedText, ImageRef or Drawing"
            )
    return parts
