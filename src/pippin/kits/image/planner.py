"""From a request to a plan: everything that is checked, read and encoded before an image model begins.

Notable here:
- the order is that of cost: numbers, words, the guard, what the family can do, pictures, the text encoder, memory
- a plan holds all that a drawing needs; what was decided on the way stands in the metadata of its pictures
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
from pippin.core.reference import resolve
from pippin.generate.condition import Condition
from pippin.generate.contract import Generator
from pippin.kits.image import concepts as wanted, plan as planning, styles
from pippin.kits.image.backends import Backend, Job, Task, backend_of
from pippin.kits.image.concepts import Concept, Drawing, ExtractedText, ImageRef, Label, Mask, Text
from pippin.kits.image.plan import Cost
from pippin.kits.image.request import Request
from pippin.kits.image.text import TextEncoder
from pippin.kits.text.facts import language_of
from pippin.session.guardrails import Decision, Guardrails

SENTENCE: Final = "I would like a picture that shows {}."
GUIDANCE: Final = 2.0
"""Of models that can be guided, where neither the request nor the style nor the model's facts say."""


@dataclass(frozen=True)
class Plan:
    """A drawing that was checked and can begin.

    Attributes:
        request: as it was asked for.
        style: that it names.
        job: of the first batch; later ones count the seed on.
        together: pictures of a batch.
        details: what every picture's metadata say.
        cost: None where nothing was estimated.
        enlarged: how many times.
    """

    request: Request
    style: styles.Style
    job: Job
    together: int
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
        encoder: TextEncoder | None,
        guard: Guardrails | None,
        memory_budget: int | None,
        compose: str | None,
        model_hash: str = "",
    ) -> None:
        self.model, self.name, self.guard, self.memory_budget = model, name, guard, memory_budget
        self.styles = styles.styles_of(model.facts)
        self._encoder, self._hash = encoder, model_hash
        background: Condition | Literal["null"] | None = None
        if compose is not None:
            background = "null" if compose == "null" else self._said(compose)
        self.backend: Backend = backend_of(model, background=background)

    @property
    def encoder(self) -> TextEncoder:
        """What reads descriptions; loaded when it is first asked for.

        Raises:
            CreationUnavailable: it is not here, or not the one that the model was trained with.
        """
        if self._encoder is None:
            facts = self.model.facts.get("text_encoder") or {}
            name = facts.get("name", "all-minilm-l6-v2")
            try:
                self._refuse_encoder(name)
                self._encoder = TextEncoder.load(name, tokens=facts.get("tokens", 48), download=False)
            except ModelNotFound as error:
                raise CreationUnavailable(
                    f"the model reads descriptions through {name}, which is not here: pippin pull {name}",
                    reason="text encoder missing",
                ) from error
            if facts.get("sha256", self._encoder.sha256) != self._encoder.sha256:
                self._encoder = None
                raise CreationUnavailable(
                    f"the model was trained with other weights of {name} than those that are here; pull it again",
                    reason="text encoder differs",
                )
        return self._encoder

    def _refuse_encoder(self, name: str) -> None:
        """Refuse an encoder that does not fit beside the model, before it is read."""
        if self.memory_budget is not None:
            stored = planning.stored_weights(resolve(name, download=False).path)
            together = planning.weights_of(self.model) + stored
            planning.refuse_weights(f"{self.name} with its text encoder", together, self.memory_budget)

    @property
    def model_hash(self) -> str:
        """SHA-256 of the weights: of the file, or of the tensors where there is none."""
        if not self._hash:
            digest = hashlib.sha256()
            state = self.model.state_dict() if isinstance(self.model, nn.Module) else {}
            for name in sorted(state):
                digest.update(name.encode() + state[name].cpu().contiguous().view(torch.uint8).numpy().tobytes())
            self._hash = digest.hexdigest()
        return self._hash

    def extract(self, text: str, *, title: str, most: int) -> list[str]:
        """See `concepts.extract`; ranked by the model's encoder where it has one."""
        encoder = self.encoder if self.model.condition.text else None
        return wanted.extract(text, title=title, most=most, encoder=encoder)

    def plan(
        self,
        concepts: Concept | Sequence[Concept],
        request: Request,
        *,
        mask: Mask | None = None,
        frames: int | None = None,
        animate: bool = False,
        measure: bool = False,
    ) -> Plan:
        """Check a request and make it ready; see `images` for what is raised.

        Args:
            concepts: as `images`.
            request: how it is to be made.
            mask: as `edit`.
            frames: as `animate`.
            animate: whether a clip is wanted.
            measure: whether seconds and bytes are estimated; bytes are where there is a budget.
        """
        style = styles.choose(request.style, self.styles)
        enlarged = request.enlargement(self.model.shape)
        parts = listed(concepts)
        given = [part for part in parts if isinstance(part, ImageRef | Drawing)]
        if not parts and not measure and not self.model.condition.empty:
            raise InvalidArgument("there is nothing to draw: give at least one concept, such as a description")
        if len(given) > 1:
            raise InvalidArgument(f"{len(given)} pictures to begin from; give one")
        prompts = self._prompts(parts, style)
        notes: list[str] = []
        task = self._task(given, mask, animate)
        conditions = self._conditions(parts, prompts, given, notes)
        base = float(self.model.facts.get("guidance", GUIDANCE)) if style.guidance is None else style.guidance
        guidance = request.guided(base) if self._guides(conditions) else 1.0
        if request.guidance not in (None, 1.0) and not self._guides(conditions):
            raise CreationNotSupported(
                f"guidance={request.guidance}, but {self.name} was not trained without its condition, or there is no "
                "description; leave guidance out"
            )
        job = Job(
            request.limit,
            request.seed,
            conditions,
            request.steps or self.backend.steps(request.quality),
            guidance,
            frames=frames,
        )
        if given and not (isinstance(given[0], Drawing) and self.model.condition.map):
            job = self._beginning(job, given[0], mask, request, task, notes)
        details = self._details(request, prompts, self._classes(parts), job, task, notes)
        return self._costed(request, style, job, details, enlarged, measure)

    def _costed(
        self, request: Request, style: styles.Style, job: Job, details: dict[str, Any], enlarged: int, measure: bool
    ) -> Plan:
        """How many are drawn at once, and what it takes."""
        together, cost = min(request.together, request.limit), None
        if (measure or self.memory_budget is not None) and job.strength > 0:
            encoder = self._encoder.encoder.module if self._encoder is not None else None
            weights = planning.weights_of(self.model, encoder)
            together, each = planning.fit(
                self.backend, job, request.limit, together, weights=weights, budget=self.memory_budget
            )
            if measure:
                cost = planning.cost_of(self.backend, job, request.limit, together=together, each=each, weights=weights)
        return Plan(request, style, replace(job, n=together), together, details, cost, enlarged)

    def _prompts(self, parts: Sequence[Concept], style: styles.Style) -> list[str]:
        """Descriptions, checked; a style's template is around each."""
        said: list[str] = []
        for part in parts:
            if isinstance(part, ExtractedText):
                said += self.extract(part.text, title=part.title, most=part.most)
            elif isinstance(part, str | Text):
                said.append((part if isinstance(part, str) else part.text).strip())
        if any(not text for text in said):
            raise InvalidArgument("a description is empty; say what the picture is to show, or leave it out")
        for text in said:
            self._admit(text)
        return [style.say(text) for text in said]

    def _admit(self, text: str) -> None:
        """Language, then the guard."""
        known = tuple((self.model.facts.get("text_encoder") or {}).get("languages", ("en",)))
        language = language_of(text)
        if language is not None and language not in known:
            raise UnsupportedLanguage(
                f"the description {text!r:.60} seems to be in {language!r}; {self.name} reads {', '.join(known)}",
                language=language,
            )
        if self.guard is not None and (blocking := _blocking(self.guard, text)) is not None:
            raise ConceptsBlocked(f"the description {text!r:.60} was blocked: {blocking}", category=blocking.category)

    def _task(self, given: Sequence[Concept], mask: Mask | None, animate: bool) -> Task:
        """What is asked for, refused where the family cannot do it."""
        steered = bool(given) and isinstance(given[0], Drawing) and bool(self.model.condition.map)
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
            raise InvalidArgument("a mask needs the picture that it marks; give an ImageRef, or use edit()")
        return task

    def _conditions(
        self, parts: Sequence[Concept], prompts: Sequence[str], given: Sequence[Concept], notes: list[str]
    ) -> list[Condition]:
        """The model's conditions: one, or one for each description of a composition."""
        spec = self.model.condition
        labels = [part for part in parts if isinstance(part, Label)]
        if spec.empty and (prompts or labels):
            raise CreationNotSupported(
                f"{self.name} draws from what it has seen and reads no description; leave the description out"
            )
        if spec.empty:
            return []
        if labels and not spec.classes:
            raise CreationNotSupported(f"{self.name} knows no classes; describe the picture in words")
        if labels and len(labels) + len(prompts) > 1 and "composed" not in self.backend.family:
            raise InvalidArgument(f"{len(labels)} classes and {len(prompts)} descriptions; give one class")
        raster = None
        if spec.map:
            drawn = next((part for part in given if isinstance(part, Drawing)), None)
            shape = (spec.map, *self.model.shape[-2:])
            raster = (
                torch.zeros(shape) if drawn is None else Drawing(drawn.strokes, drawn.width, 1.0, 0.0).raster(shape)
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

    def _said(self, text: str, raster: Tensor | None = None, label: Label | None = None) -> Condition:
        """A condition of one row."""
        spec = self.model.condition
        nothing = spec.nothing(1, (self.model.shape[-2], self.model.shape[-1]))
        if raster is not None:
            nothing = replace(nothing, map=raster[None])
        if label is not None:
            return replace(nothing, labels=torch.tensor([self._class(label.name)]))
        if text and spec.text:
            states, mask = self.encoder.encode([text])
            if states.shape[-1] != spec.text:
                raise CreationUnavailable(
                    f"{self.name} reads texts of width {spec.text}, the encoder's have {states.shape[-1]}",
                    reason="text encoder differs",
                )
            return replace(nothing, text=states, text_mask=mask)
        if text and spec.classes:
            return replace(nothing, labels=torch.tensor([self._class_in(text)]))
        if text:
            raise CreationNotSupported(f"{self.name} reads no words; give a Drawing")
        return nothing

    def _class(self, name: str | int) -> int:
        names = [str(one).lower() for one in self.model.facts.get("classes", ())]
        number = name if isinstance(name, int) else names.index(name.lower()) if name.lower() in names else -1
        if not 0 <= number < self.model.condition.classes:
            shown = ", ".join(map(str, self.model.facts.get("classes", range(self.model.condition.classes))))
            raise InvalidArgument(f"there is no class {name!r}; choose one of {shown}")
        return number

    def _class_in(self, text: str) -> int:
        """The class that a description names."""
        names = [str(one) for one in self.model.facts.get("classes", ())]
        words = {word.strip(".,!?").lower() for word in text.split()}
        words |= {word.removesuffix("s") for word in words}
        hits = [i for i, name in enumerate(names) if set(name.lower().replace("/", " ").split()) & words]
        if len(hits) != 1:
            found = f"names {', '.join(names[i] for i in hits)}" if hits else "names none of them"
            raise CreationNotSupported(
                f"{self.name} knows classes, not words, and {text!r:.60} {found}: {', '.join(names)}"
            )
        return hits[0]

    def _guides(self, conditions: Sequence[Condition]) -> bool:
        """Whether a description may be followed more closely."""
        said = [part for one in conditions for part in (one.text_mask, one.map, one.vector) if part is not None]
        told = any(bool(part.any()) for part in said)
        told = told or any(one.labels is not None and bool((one.labels >= 0).any()) for one in conditions)
        return told and self.model.condition.null

    def _beginning(
        self, job: Job, given: Concept, mask: Mask | None, request: Request, task: Task, notes: list[str]
    ) -> Job:
        """The picture that a job begins from."""
        shape = self.model.shape
        if isinstance(given, Drawing):
            start = given.raster(shape)
            notes.append("the drawing is a picture to begin from: the model is not steered by drawings")
        else:
            assert isinstance(given, ImageRef)
            start = wanted.read_picture(given.image, shape)
        if task == "animate":
            return replace(job, start=start)
        strength = request.strong(isinstance(given, Drawing))
        if task == "fill":
            assert mask is not None
            strength = 1.0 if request.strength is None else request.strength
            return replace(job, start=start, strength=strength, redraw=mask.raster(shape))
        if strength == 1:
            return replace(job, strength=1.0)  # nothing of the picture would stay
        return replace(job, start=start, strength=strength)

    def _classes(self, parts: Sequence[Concept]) -> list[str]:
        """The names of the classes that were asked for, numbers where they have none."""
        names = self.model.facts.get("classes", ())
        chosen = [self._class(part.name) for part in parts if isinstance(part, Label)]
        return [str(names[number]) if number < len(names) else str(number) for number in chosen]

    def _details(
        self,
        request: Request,
        prompts: Sequence[str],
        classes: Sequence[str],
        job: Job,
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


def _blocking(guard: Guardrails, text: str) -> Decision | None:
    """What blocks a description.

    The packaged classifier has learnt from sentences, and takes "ship" alone for something illegal: it reads the
    description within a sentence, and by itself only for what no picture may show.
    """

    def blocks(read: str) -> list[Decision]:
        return [decision for decision in guard.check(read, role="input").decisions if decision.action == "block"]

    alone = [d for d in blocks(text) if d.rule != "classifier" or d.category.split("/")[0] in ("sexual", "minors")]
    return next(iter([*alone, *blocks(SENTENCE.format(text))]), None)


def listed(concepts: Any) -> list[Any]:
    """Concepts as a list.

    Raises:
        InvalidArgument: something that is none.
    """
    single = str | Text | ExtractedText | Label | ImageRef | Drawing
    parts = [concepts] if isinstance(concepts, single) else list(concepts)
    for part in parts:
        if not isinstance(part, single):
            raise InvalidArgument(
                f"{type(part).__name__} is no concept: give words, Label, ExtractedText, ImageRef or Drawing"
            )
    return parts
