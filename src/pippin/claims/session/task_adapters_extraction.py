"""An adapter of a few megabytes makes a small frozen model fill in forms of kinds that it never saw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pippin.claims import Condition, Evidence, Scale, claim
from pippin.claims.worlds import form_baselines, forms
from pippin.core.errors import PippinError
from pippin.evaluate.extraction import ExtractionScore, choices_of, score
from pippin.recipes.train import task_adapter
from pippin.recipes.train.task_data import ExampleSplit, extraction

MODEL = "smollm2-135m"
STEPS = Scale.choose(smoke=1, laptop=14, long=110)
BATCH_TOKENS = Scale.choose(smoke=600, laptop=2048)
ITEMS = Scale.choose(smoke=1, laptop=12, long=40)
UNSEEN_KINDS = ("event_invitation", "lab_report", "recipe")
UNSEEN_LAYOUT, UNSEEN_LANGUAGE = "thread", "it"
SPLITS = ("kinds", "layout and language")


@claim(
    id="task-adapters-extraction",
    source="arXiv:2407.21075, task adapters: rank 16 over a frozen base; the tables compare summaries by human graders",
    headline="a low-rank adapter specializes a small frozen model to a task",
    setting="SmolLM2-135M (4 bits) fills in random forms from generated documents under the grammar of extraction; "
    "adapters of rank 16, trained by the recipe for the same steps on documents of other kinds than those evaluated, "
    "or of other layouts and languages; three seeds",
    method="adapter",
    positive_control="known facts",
    negative_controls=("base model", "shuffled answers", "rules", "majority", "nothing filled in"),
    conditions=[
        Condition(
            "better than the base",
            "fields right on kinds that were not trained on: at least 10 points above the base model, and the 95 % "
            "interval of the paired difference above 0",
            lambda e, arm: (
                e.mean("fields right, unseen kinds", arm) >= e.mean("fields right, unseen kinds", "base model") + 0.1
                and e.paired("fields right, unseen kinds", arm, "base model").low > 0
            ),
            headline=True,
        ),
        Condition(
            "other layouts and languages",
            "the same for a layout and a language that were not trained on",
            lambda e, arm: (
                e.mean("fields right, unseen layout and language", arm)
                >= e.mean("fields right, unseen layout and language", "base model") + 0.1
                and e.paired("fields right, unseen layout and language", arm, "base model").low > 0
            ),
        ),
        Condition(
            "better than rules",
            "fields right on unseen kinds: above labels and types alone, 95 % interval of the difference above 0",
            lambda e, arm: e.paired("fields right, unseen kinds", arm, "rules").low > 0,
        ),
        Condition(
            "empty fields",
            "at least half of the fields that a text does not say are left empty, on both",
            lambda e, arm: all(e.mean(f"empty fields right, unseen {split}", arm) >= 0.5 for split in SPLITS),
        ),
        Condition(
            "nothing invented",
            "no value that is not in its text",
            lambda e, arm: all(e.max(f"values invented, unseen {split}", arm) == 0 for split in SPLITS),
        ),
    ],
    reported="the adapter that comes with Pippin on the same documents, where there is one",
)
def run(scale: Scale) -> Evidence:
    """Train two adapters for each seed and measure every arm on the same documents."""
    evidence = Evidence()
    for seed in scale.seeds:
        for arm, extract in _arms(scale, seed).items():
            for split in SPLITS:
                measure = partial(_measure, scale, seed, split, extract)
                figures = scale.measured(f"{arm}, {split}, {seed}", measure)
                for name, value in figures.items():
                    evidence.add(f"{name}, unseen {split}", value, seed=seed, arm=arm)
    return evidence


def _arms(scale: Scale, seed: int) -> dict[str, Callable[[extraction.FormItem], Any]]:
    """How each arm fills in a form."""
    from pippin.language import task_adapters
    from pippin.language.language_model import load
    from pippin.session.session import Session

    model = load(MODEL)
    session = Session(model)

    def with_adapter(name: str | None) -> Callable[[extraction.FormItem], Any]:
        return lambda item: session.extract(item.text, item.schema, language=item.language, adapter=name).content

    for arm in ("adapter", "shuffled answers"):
        model.load_adapter(arm, _train(scale, seed, arm))
    others = extraction.items(100, seed=5000 + seed, split=ExampleSplit())
    majority = form_baselines.Majority([(each.schema, each.expected) for each in others])
    arms: dict[str, Callable[[extraction.FormItem], Any]] = {
        "adapter": with_adapter("adapter"),
        "base model": with_adapter(None),
        "shuffled answers": with_adapter("shuffled answers"),
        "rules": lambda item: form_baselines.LabelPatterns().fill(item.text, item.schema),
        "majority": lambda item: majority.fill(item.text, item.schema),
        "nothing filled in": lambda item: {},
        "known facts": lambda item: item.expected,
    }
    shipped = task_adapters.load(model, "extraction")
    return arms if shipped is None else arms | {"shipped adapter": with_adapter(shipped)}


def _train(scale: Scale, seed: int, arm: str) -> Any:
    """The folder of an adapter of this seed."""
    out = scale.checkpoints(f"{arm} {seed}")
    config = task_adapter.Config(
        model=MODEL, task="extraction", out=out, steps=STEPS[scale], lr=1e-3, batch_tokens=BATCH_TOKENS[scale],
        held_out_kinds=UNSEEN_KINDS, held_out_layouts=(UNSEEN_LAYOUT,), held_out_languages=(UNSEEN_LANGUAGE,),
        save_every=10, seed=seed, resume=True,
    )  # fmt: skip
    shuffle = forms.shuffled_examples if arm == "shuffled answers" else None
    task_adapter.run(config, examples=shuffle, show_progress=False)
    return out


def _measure(scale: Scale, seed: int, split: str, extract: Callable[[extraction.FormItem], Any]) -> dict[str, float]:
    """Shares over the documents of one seed."""
    total = ExtractionScore()
    for item in _items(split, ITEMS[scale], seed):
        try:
            found = extract(item)
        except PippinError:  # no answer: every field is wrong
            found = None
        total += score(item.expected, found, item.text, choices=choices_of(item.schema))
    return {
        "fields right": total.accuracy,
        "empty fields right": total.nulls_right / max(1, total.nulls),
        "values invented": total.invented,
        "documents right": total.whole_right / total.whole,
    }


def _items(split: str, count: int, seed: int) -> Sequence[extraction.FormItem]:
    from pippin.data.synthetic import documents

    known = tuple(
        kind for kind in documents.KINDS if kind not in UNSEEN_KINDS and UNSEEN_LAYOUT in documents.layouts(kind)
    )
    part = (
        ExampleSplit(kinds=UNSEEN_KINDS)
        if split == "kinds"
        else ExampleSplit(kinds=known, layouts=(UNSEEN_LAYOUT,), languages=(UNSEEN_LANGUAGE,))
    )
    return extraction.items(count, seed=1000 + seed, split=part)
