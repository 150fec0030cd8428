"""How often a model picks the right label: texts and sets of labels that no adapter was trained on.

Notable here:
- texts, labels and prompts are a function of the seed, so that two models are asked the same
- the label is the most probable of the answers that are labels, as `pippin classify` computes it without calibration
- the first label of each prompt is what guessing scores
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pippin.core import progress
from pippin.core.checks import PositiveInt, checked
from pippin.core.errors import ContextOverflow
from pippin.core.options import Option
from pippin.engine.options import Device, DType
from pippin.recipes import options
from pippin.recipes.evaluate import adapted_model
from pippin.recipes.evaluate.extraction import split_of

if TYPE_CHECKING:
    import numpy as np

    from pippin.core.report import Report
    from pippin.recipes.train.task_data.classification import LabeledText
    from pippin.session.providers.local import LocalModel


@checked
@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a measurement."""

    model: options.Model
    adapter: options.EvaluatedAdapter = None
    items: Annotated[PositiveInt, Option("Number of texts.", "Data")] = 200
    languages: Annotated[
        tuple[str, ...], Option("Languages of the texts; all without any.", "Data", "TAGS", parse=options.names)
    ] = ()
    seed: options.Seed = 0
    device: Device = None
    dtype: DType = "auto"


@dataclass(frozen=True)
class LabelEvaluation:
    """What was measured.

    Attributes:
        model: name of the model.
        adapter: the adapter, None for the model itself.
        right: for each text, whether its label was the most probable one.
        first: for each text, whether its label was the first of the prompt.
        probabilities: for each text, the probability of its label.
        seconds: of all texts.
    """

    model: str
    adapter: str | None
    right: tuple[bool, ...]
    first: tuple[bool, ...]
    probabilities: tuple[float, ...]
    seconds: float

    def summary(self) -> dict[str, Any]:
        """The result as JSON values."""
        import numpy as np

        return {
            "model": self.model,
            "adapter": self.adapter,
            "texts": len(self.right),
            "right": float(np.mean(self.right)),
            "first_label": float(np.mean(self.first)),
            "log_loss": float(-np.mean(np.log(np.maximum(self.probabilities, 1e-12)))),
            "seconds_per_text": self.seconds / len(self.right),
        }

    def report(self) -> Report:
        """Share of right labels, that of guessing, and the time of a text."""
        from pippin.core.report import Report, Row

        found = self.summary()
        rows = [
            Row("labels right", found["right"]),
            Row("right by taking the first label", found["first_label"]),
            Row("mean log loss of the right label", found["log_loss"]),
            Row("time of a text", found["seconds_per_text"], "s"),
        ]
        name = adapted_model.title(self.model, self.adapter)
        return Report(f"{name} on {len(self.right)} texts with labels", rows)


def run(config: Config, *, show_progress: bool = True) -> LabelEvaluation:
    """Measure how often a model picks the right label.

    Args:
        config: the settings.
        show_progress: whether progress is shown on stderr.

    Raises:
        InvalidArgument: a language that there is not.
        ModelNotFound, CheckpointError: the model or the adapter cannot be loaded.
    """
    import numpy as np

    split_of((), (), config.languages)  # which checks them
    from pippin.session.providers.local import LocalModel

    model, adapter = adapted_model.load_with_adapter(
        config.model, config.adapter, device=config.device, dtype=config.dtype
    )
    provider = LocalModel(model)
    right, first, sure, seconds = list[bool](), list[bool](), list[float](), 0.0
    with progress.bar(config.items, config.model, unit="texts", show_progress=show_progress) as shown:
        for text in texts(config.items, seed=config.seed, languages=config.languages):
            begin = time.perf_counter()
            try:
                found = probabilities(provider, text, adapter)
            except ContextOverflow:
                found = np.zeros(len(text.labels))
            seconds += time.perf_counter() - begin
            place = text.labels.index(text.label)
            right.append(bool(found.argmax() == place and found[place] > 0))
            first.append(place == 0)
            sure.append(float(found[place]))
            shown.advance(1)
    return LabelEvaluation(model.name, config.adapter, tuple(right), tuple(first), tuple(sure), seconds)


def texts(count: int, *, seed: int, languages: tuple[str, ...] = ()) -> list[LabeledText]:
    """Texts with labels from sets that are held out of training.

    Args:
        count: how many.
        seed: of the texts.
        languages: of the texts; all without any.
    """
    from pippin.recipes.train.task_data import ExampleSplit, classification

    rng, found = random.Random(f"labels/{seed}"), list[Any]()
    while len(found) < count:
        text = classification.sample_text(rng, ExampleSplit(languages=languages, held_out=True))
        if text is not None:
            found.append(text)
    return found


def probabilities(provider: LocalModel, text: LabeledText, adapter: str | None) -> np.ndarray:
    """The probability of each label, in [0, 1], summing to 1.

    Args:
        provider: the model.
        text: the text with its labels.
        adapter: name of a loaded adapter; None for the model itself.

    Raises:
        ContextOverflow: the text does not fit.
    """
    import numpy as np

    from pippin.session import chat_format
    from pippin.session.text_prompts import end_of_turn

    model = provider.model
    end = end_of_turn(model)
    prompt = chat_format.encode(model, text.transcript)
    answers = [[*model.tokenizer.encode(label), *end] for label in text.labels]
    size = len(prompt) + max(map(len, answers))
    if size > model.context_size:
        raise ContextOverflow(
            f"text and labels have {size:,} tokens, the context holds {model.context_size:,}",
            context_size=model.context_size,
            token_count=size,
        )
    scores = np.array(provider.engine.score(prompt, answers, adapter=adapter))
    weights = np.exp(scores - scores.max())
    return np.asarray(weights / weights.sum())
