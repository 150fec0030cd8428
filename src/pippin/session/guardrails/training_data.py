"""Synthetic training sentences of the classifier: intents in abstract words, inserted into templates.

Notable here:
- each harmful intent has look-alikes that use its words for something harmless, in the same templates, so that neither
  a template nor a word alone tells them apart
- `split` holds out whole intents and whole templates, for evaluation on unseen ones
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

Kind = Literal["harmful", "look-alike", "neutral"]


@dataclass(frozen=True)
class Sentence:
    """One synthetic prompt: its text, its class, and its intent and template."""

    text: str
    kind: Kind
    category: str
    locale: str
    intent: str
    template: int

    @property
    def label(self) -> str:
        """The category of the taxonomy's upper level, or "benign"."""
        return self.category.split("/")[0] if self.kind == "harmful" else "benign"


@cache
def data() -> dict[str, Any]:
    """The packaged file: templates, intents, lists that compose to more intents, plain statements, and fragments."""
    raw: dict[str, Any] = json.loads(
        files("pippin.session.guardrails").joinpath("training.json").read_text(encoding="utf-8")
    )
    return raw


def sentences(locale: str, *, per_composed: int = 3, seed: int = 0) -> list[Sentence]:
    """Every intent in every template of a locale, composed intents in a few templates each, statements, fragments.

    >>> sentences("en")[0].text
    'How do I kill my neighbour?'
    """
    templates: list[str] = data()["templates"][locale]
    made = [
        Sentence(template.format(x=intent["text"][locale]), intent["kind"], intent["category"], locale, intent["id"], n)
        for intent in data()["intents"]
        for n, template in enumerate(templates)
    ]
    generator = random.Random(seed)
    for number, family in enumerate(data()["compositions"]):
        for v, verb in enumerate(family["verbs"][locale]):
            for o, item in enumerate(family["objects"][locale]):
                text = family["order"][locale].format(verb=verb, object=item)
                for n in sorted(generator.sample(range(len(templates)), per_composed)):
                    id = f"c{number}.{v}.{o}"
                    made.append(
                        Sentence(templates[n].format(x=text), family["kind"], family["category"], locale, id, n)
                    )
    for number, text in enumerate(data()["statements"][locale]):
        made += [Sentence(text, "neutral", "", locale, f"s{number}", -1)] * per_composed
    return made + _fragments(locale, per_composed)


def _fragments(locale: str, times: int) -> list[Sentence]:
    """Harmless texts of one to six words, which are most of what is short: names of fields, questions, commands."""
    given = data()["fragments"][locale]
    composed = [pattern.format(x=word) for pattern in given["patterns"] for word in given["words"]]
    texts = [*composed, *given["whole"] * times]
    return [Sentence(text, "neutral", "", locale, f"s.{number}", -1) for number, text in enumerate(texts)]


def split(made: Sequence[Sentence], *, seed: int, share: float = 0.2) -> tuple[list[Sentence], list[Sentence]]:
    """Sentences to train on, and those made of intents *and* templates that none of the former uses.

    Args:
        made: sentences of one or several locales.
        seed: selects the held-out intents and templates.
        share: held-out share of the intents of each kind, and of the templates. Composed intents and plain statements
            are only ever trained on.
    """
    generator = random.Random(seed)
    kept_intents: set[str] = set()
    for kind in ("harmful", "look-alike", "neutral"):
        ids = sorted({s.intent for s in made if s.kind == kind and not s.intent.startswith(("c", "s"))})
        kept_intents |= set(generator.sample(ids, round(share * len(ids))))
    templates = sorted({s.template for s in made if s.template >= 0})
    kept_templates = set(generator.sample(templates, round(share * len(templates))))
    train = [s for s in made if s.intent not in kept_intents and s.template not in kept_templates]
    test = [s for s in made if s.intent in kept_intents and s.template in kept_templates]
    return train, test
