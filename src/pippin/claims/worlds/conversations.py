"""Long conversations about several topics, with facts that are told in passing and asked for in the end.

Notable here:
- a topic has words of its own, in which its facts, its small talk and its questions are told, so that a question can be
  traced to its topic; the answer is a value that occurs nowhere else
- a fact may be told anew later ("updated"): the last value counts
- topics come back in episodes of some turns, in random order
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

TOPICS: Final[dict[str, tuple[str, ...]]] = {
    "garden": ("garden", "roses", "soil", "compost", "tomatoes", "seeds", "watering", "fence"),
    "music": ("band", "guitar", "concert", "drummer", "song", "rehearsal", "stage", "album"),
    "travel": ("trip", "airport", "hotel", "luggage", "train", "beach", "passport", "island"),
    "kitchen": ("recipe", "oven", "soup", "dough", "spices", "pan", "dinner", "cheese"),
    "office": ("office", "manager", "meeting", "deadline", "printer", "report", "client", "desk"),
    "sports": ("team", "coach", "match", "stadium", "goal", "training", "league", "ball"),
    "house": ("house", "roof", "kitchen door", "painter", "tiles", "landlord", "stairs", "rent"),
    "health": ("doctor", "clinic", "knee", "medicine", "sleep", "dentist", "diet", "pulse"),
}
FACTS: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "garden": (
        ("name of my gardener", "name"),
        ("color of my garden gate", "color"),
        ("number of my rose bushes", "number"),
    ),
    "music": (
        ("name of our drummer", "name"),
        ("color of my guitar", "color"),
        ("number of songs on our album", "number"),
    ),
    "travel": (
        ("name of our hotel owner", "name"),
        ("color of my suitcase", "color"),
        ("number of our hotel room", "number"),
    ),
    "kitchen": (
        ("name of my cooking teacher", "name"),
        ("color of my soup pot", "color"),
        ("number of minutes for the dough", "number"),
    ),
    "office": (
        ("name of my manager", "name"),
        ("color of my desk chair", "color"),
        ("number of my office floor", "number"),
    ),
    "sports": (("name of our coach", "name"), ("color of our jerseys", "color"), ("number on my jersey", "number")),
    "house": (
        ("name of our landlord", "name"),
        ("color of our front door", "color"),
        ("number of our apartment", "number"),
    ),
    "health": (("name of my dentist", "name"), ("color of my pills", "color"), ("number of my clinic room", "number")),
}
"""Of each topic: what is told of it, and of what kind its value is."""
NAMES: Final = (
    "Agnes", "Boris", "Carla", "Dmitri", "Elsa", "Farid", "Greta", "Hugo", "Ingrid", "Jamal", "Katya", "Lionel",
    "Mabel", "Nils", "Olga", "Pedro", "Quentin", "Rosa", "Stefan", "Tilda", "Ulric", "Vera", "Walter", "Xenia",
    "Yusuf", "Zelda", "Anton", "Bettina", "Cyril", "Dagmar", "Emil", "Flora", "Gustav", "Hanna", "Igor", "Jonas",
)  # fmt: skip
COLORS: Final = (
    "red", "blue", "green", "yellow", "purple", "orange", "brown", "black", "white", "pink", "gray", "violet",
    "turquoise", "silver", "golden", "crimson",
)  # fmt: skip
SMALL_TALK: Final = (
    "I thought about the {0} and the {1} again today.",
    "The {0} was a lot of work this week, and the {1} too.",
    "Do you think that the {0} goes well with the {1}?",
    "Yesterday I spent an hour with the {0} before I looked at the {1}.",
    "My neighbor says that the {0} matters more than the {1}.",
)
REPLIES: Final = (
    "I see, the {0}.",
    "Good to hear about the {0}.",
    "All right, the {0} then.",
    "Tell me more about the {0}.",
)
TELL: Final = (
    "By the way, the {what} is {value}.",
    "I should mention that the {what} is {value}.",
    "Note that the {what} is {value}.",
)
AGAIN: Final = "That has changed: the {what} is now {value}."


@dataclass(frozen=True)
class FactQuestion:
    """A question about a fact.

    Attributes:
        text: the question.
        answer: the value, one word.
        topic: what it is about.
        kind: "fact" for one that was told once, "update" for one that was told again.
        turn: the turn that told the value.
    """

    text: str
    answer: str
    topic: str
    kind: str
    turn: int


@dataclass(frozen=True)
class Conversation:
    """What was said, and what can be asked.

    Attributes:
        turns: prompt and answer of each turn.
        questions: of all topics.
    """

    turns: tuple[tuple[str, str], ...]
    questions: tuple[FactQuestion, ...]


def conversation(seed: int, *, episodes: int = 16, turns_per_episode: int = 4, updates: int = 4) -> Conversation:
    """A conversation that comes back to each topic.

    Args:
        seed: of everything.
        episodes: stretches of turns about one topic, in random order; topics come about equally often.
        turns_per_episode: turns of each; one of them tells a fact.
        updates: facts that are told again with another value.

    >>> said = conversation(0)
    >>> len(said.turns), sum(question.kind == "update" for question in said.questions)
    (64, 4)
    """
    rng = random.Random(seed)
    topics = [*TOPICS] * -(-episodes // len(TOPICS))
    topics = topics[:episodes]
    rng.shuffle(topics)
    values = {"name": [*NAMES], "color": [*COLORS], "number": [str(each) for each in range(12, 99)]}
    for each in values.values():
        rng.shuffle(each)
    untold = {topic: rng.sample(facts, len(facts)) for topic, facts in FACTS.items()}
    known: dict[str, FactQuestion] = {}
    turns: list[tuple[str, str]] = []
    again = set(rng.sample(range(episodes // 2, episodes), updates))
    for episode, topic in enumerate(topics):
        at = rng.randrange(turns_per_episode)
        for number in range(turns_per_episode):
            words = rng.sample(TOPICS[topic], 3)
            prompt = rng.choice(SMALL_TALK).format(*words)
            if number == at:
                told = [question for question in known.values() if question.topic == topic and question.kind == "fact"]
                if (episode in again and told) or not untold[topic]:
                    what, kind, form = _again(rng.choice(told), topic)
                else:
                    (what, kind), form = untold[topic].pop(), rng.choice(TELL)
                value = values[kind].pop()
                prompt += " " + form.format(what=what, value=value)
                asked = "update" if form == AGAIN else "fact"
                known[what] = FactQuestion(f"What is the {what}?", value, topic, asked, len(turns))
            turns.append((prompt, rng.choice(REPLIES).format(words[2])))
    return Conversation(tuple(turns), tuple(known.values()))


def _again(question: FactQuestion, topic: str) -> tuple[str, str, str]:
    """The fact of a question, its kind, and the form in which it is told again."""
    what = question.text.removeprefix("What is the ").removesuffix("?")
    return what, dict(FACTS[topic])[what], AGAIN
