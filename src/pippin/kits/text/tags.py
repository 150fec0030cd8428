"""What a text is about: its topics, names, mood and requests; and the topics of many texts.

Notable here:
- a tag is chosen, not written: candidates come from the text by rule, the model's probabilities rank and sort them
- names and requests come with their place in the text
- texts are grouped by what they tell the model about one another, or by an encoder's vectors; then it names the groups
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Float

from pippin.core.errors import AnswerTruncated, InvalidArgument
from pippin.kits.text import presets
from pippin.kits.text.classify import Classifier
from pippin.kits.text.desk import Desk
from pippin.kits.text.spans import Range, protected_ranges, sentences
from pippin.kits.text.words import CAPITALISED, FUNCTION_WORDS
from pippin.session.schema import Regex

EMOTIONS = {
    "joy": "glad, happy, delighted",
    "sadness": "sad, sorry, disappointed",
    "anger": "angry, annoyed, complaining",
    "fear": "afraid, worried, nervous",
    "surprise": "astonished, amazed",
    "gratitude": "thankful",
    "neutral": "matter-of-fact, without feeling",
}
# The word that the model is asked about, for each kind of name.
KINDS = {"person": " person.", "place": " place.", "organisation": " company.", "thing": " product."}
_TOLD = 300  # characters of a text that it is compared by
_READS = 1500  # characters of a text that its topics are read from


@dataclass(frozen=True)
class Entity:
    """Something named in the text: a person, place, organisation, thing, date, email, link or number, by its kind."""

    text: str
    kind: str
    range: Range


@dataclass(frozen=True)
class Emotion:
    """A feeling of the writer, with its probability."""

    name: str
    probability: float


@dataclass(frozen=True)
class Tags:
    """What a text is about: topics and emotions the likeliest first, entities and actions in the order of the text."""

    topics: tuple[str, ...]
    entities: tuple[Entity, ...]
    emotions: tuple[Emotion, ...]
    actions: tuple[str, ...]


def tag(desk: Desk, text: str, *, most: int = 5) -> Tags:
    """Topics, entities, emotions and requested actions of a text."""
    return Tags(
        tuple(topics_of(desk, text, most)),
        tuple(entities(desk, text)),
        tuple(emotions(desk, text)),
        tuple(actions(desk, text)),
    )


def topics_of(desk: Desk, text: str, most: int) -> list[str]:
    """The words of a text that its reading makes likelier as its topic, by log P(word | text) - log P(word)."""
    begin = text.strip()[:_READS]
    names = {word.lower() for name in _names(text) for word in name.of(text).split()}
    candidates = list(_phrases(text, names))
    if not candidates:
        return []
    frame, words = "\n\nThis text is about the", [f" {candidate}" for candidate in candidates]
    after, before = desk.score_text(begin + frame, words), desk.score_text(frame.strip(), words)
    counts = Counter(re.findall(r"[a-z]+(?:-[a-z]+)*", text.lower()))
    worth = {
        phrase: one - other + math.log(min(counts[word] for word in phrase.split()))
        for phrase, one, other in zip(candidates, after, before, strict=True)
    }
    found: list[str] = []
    for phrase in sorted(candidates, key=lambda phrase: -worth[phrase]):
        if worth[phrase] > 0 and not any(set(phrase.split()) & set(other.split()) for other in found):
            found.append(phrase)
    return found[:most]


def _phrases(text: str, names: set[str]) -> Iterator[str]:
    """Words and pairs of words that are neither names nor small words, the most frequent first."""
    counts: Counter[str] = Counter()
    for one in reversed(protected_ranges(text, ["code", "links", "emails", "placeholders"])):
        text = f"{text[: one.start]}.{text[one.end :]}"
    for sentence in re.split(r"[.,;:!?()\n\"“”]+", text):
        words = re.findall(r"[A-Za-z]+(?:-[A-Za-z]+)*", sentence.replace("’s", "").replace("'s", ""))
        plain = [word.lower() if len(word) > 3 and word.lower() not in FUNCTION_WORDS | names else "" for word in words]
        counts.update(word for word in plain if word)
        counts.update(f"{one} {other}" for one, other in pairwise(plain) if one and other)
    yield from (phrase for phrase, _ in counts.most_common(60))


_DATE = re.compile(
    r"\b\d{4}-\d{2}-\d{2}\b|\b(?:\d{1,2}(?:st|nd|rd|th)?\s+)?(?:January|February|March|April|May|June|July|August|"
    r"September|October|November|December)(?:\s+\d{1,2}(?:st|nd|rd|th)?\b)?(?:,?\s+\d{4}\b)?|\b(?:Mon|Tues|Wednes|Thurs|"
    r"Fri|Satur|Sun)day\b"
)
_GREETING = re.compile(r"(?:(?:Hi|Hello|Hey|Dear|Thanks|Thank|Regards|Best|Cheers|Yours|Sincerely)\b\s*)*")
_CAPITALISED = re.compile(r"[A-Z][\w’'&-]*(?:[^\S\n]+(?:(?:of|the|de|van|von|&)[^\S\n]+)?[A-Z][\w’'-]*)*")


def entities(desk: Desk, text: str) -> Iterator[Entity]:
    """Names, dates, addresses and numbers in their order; the model sorts the names into kinds."""
    taken = [Entity(m[0], "date", Range(m.start(), m.end())) for m in _DATE.finditer(text) if not _is_verb(text, m)]
    for kind, name in (("emails", "email"), ("links", "link"), ("numbers", "number")):
        for one in protected_ranges(text, [kind]):  # type: ignore[list-item]
            if not any(one.start < old.range.end and old.range.start < one.end for old in taken):
                taken.append(Entity(one.of(text), name, Range(one.start, one.end)))
    words = list(KINDS.values())
    plain = desk.score_text("It is the name of a", words)  # what is likely about no name in particular
    kinds: dict[str, str] = {}
    for one in _names(text, desk):
        if any(one.start < old.range.end and old.range.start < one.end for old in taken):
            continue
        name = one.of(text)
        if re.match(r"(?:Mr|Mrs|Ms|Miss|Dr|Sir|Lady|Captain|Professor|President)\b", name):
            kinds[name] = "person"
        if name not in kinds:
            around = text[max(0, one.start - 120) : one.end + 80].replace("\n", " ")
            kinds[name] = _kind(desk, name, around, words, plain)
        taken.append(Entity(name, kinds[name], one))
    yield from sorted(taken, key=lambda entity: entity.range)


def _kind(desk: Desk, name: str, around: str, words: Sequence[str], plain: Sequence[float]) -> str:
    """What a name is of: the word that it, in its surroundings, makes likelier than an "it" does."""
    told = desk.score_text(f"{around}\n\n{name} is the name of a", words)
    gains = [one - other for one, other in zip(told, plain, strict=True)]
    return list(KINDS)[gains.index(max(gains))]


def _is_verb(text: str, match: re.Match[str]) -> bool:
    """Whether "May" or "March" is the word at the beginning of a sentence rather than the month."""
    return match[0] in {"May", "March"} and text[match.end() : match.end() + 2].strip()[:1].islower()


def _names(text: str, desk: Desk | None = None) -> Iterator[Range]:
    """Runs of capitalised words; at the beginning of a sentence only if the word is not an ordinary one."""
    starts = {one.start + len(one.of(text)) - len(one.of(text).lstrip(" \n\t\"'“‘(")) for one in sentences(text)}
    starts |= {match.end() for match in re.finditer(r"\n\s*", text)}
    for match in _CAPITALISED.finditer(text):
        start, end = match.start() + len(_GREETING.match(match[0])[0]), match.end()  # type: ignore[index]
        if start == end:
            continue
        first = re.match(r"[\w’'-]+", text[start:end])[0]  # type: ignore[index]
        ordinary = first.lower() in FUNCTION_WORDS or (desk is not None and first.lower() in desk.lexicon.ranks)
        if start in starts and (ordinary or desk is None):
            rest = re.match(r"\s+", text[start + len(first) : end])
            if rest is None:
                continue
            start += len(first) + rest.end()
        name = re.sub(r"['’]s$", "", text[start:end])
        if len(name) > 1 and name.lower() not in FUNCTION_WORDS and name.lower() not in CAPITALISED:
            yield Range(start, start + len(name), "name")


def emotions(desk: Desk, text: str) -> list[Emotion]:
    """The feelings that are likelier than without a text, likeliest first; one at least."""
    chances = Classifier(desk, EMOTIONS, about="what the writer feels").classify(text[:_READS]).probabilities
    likely = [Emotion(name, chance) for name, chance in chances.items() if chance >= 1.5 / len(EMOTIONS)]
    return likely or [Emotion(*next(iter(chances.items())))]


_REQUEST = re.compile(
    r"^(?:please|kindly|let's|don't|do not|could|can|would|will)\b(?!\s+(?:be|have been)\b)|\bplease\b|"
    r"\b(?:could|can|would|will) you\b|\b(?:you|we) (?:must|should|need to|have to)\b|\bmake sure\b|\bto-?do\b|"
    r"^(?:send|call|bring|check|write|make|take|get|give|tell|ask|read|buy|book|fix|add|remove|change|move|keep|put|open|"
    r"close|contact|reply|answer|confirm|cancel|order|pay|return|remember|note|see|use|try|help|come|go|wait|stop|start)\b",
    re.IGNORECASE,
)


def actions(desk: Desk, text: str) -> Iterator[str]:
    """The sentences that ask somebody to do something, by the words that requests are made of."""
    for sentence in sentences(text):
        said = " ".join(sentence.of(text).split()).lstrip("-*• ")
        if _REQUEST.search(said) and len(said.split()) > 2:
            yield said


# --- topics of many texts ---------------------------------------------------------------------------------------------

Embed = Callable[[Sequence[str]], object]


@dataclass(frozen=True)
class Topic:
    """What several texts have in common; ``members`` are their indices, the most typical first."""

    name: str
    members: tuple[int, ...]


def group(desk: Desk, texts: Sequence[str], *, count: int | None, embed: Embed | None) -> list[Topic]:
    """Group texts by likeness and name the groups, the largest first."""
    if embed is not None:
        vectors, alike = _unit(np.asarray(embed(texts), float)), 0.25
    elif desk.can_score:
        vectors, alike = told_vectors(desk, texts), 0.15
    else:
        vectors, alike = word_vectors(texts), 0.05
    if vectors.ndim != 2 or len(vectors) != len(texts) or not np.isfinite(vectors).all():
        raise InvalidArgument(f"embed must return one vector of finite numbers for each of {len(texts)} texts")
    found = []
    for members in clusters(vectors, count, alike):
        centre = vectors[members].mean(0)
        ordered = sorted(members, key=lambda index: -float(vectors[index] @ centre))
        found.append(Topic(_topic_name(desk, [texts[index] for index in ordered]), tuple(ordered)))
    return sorted(found, key=lambda topic: -len(topic.members))


def told_vectors(desk: Desk, texts: Sequence[str]) -> Float[np.ndarray, "texts landmarks"]:
    """Unit vectors of what each text tells the model about some others: log P(other | text) - log P(other), centred.

    Texts on one topic make the same other texts likelier. The others are at most 32 of the texts, spread evenly.
    """
    short = [" ".join(text.split())[:_TOLD] for text in texts]
    count = min(len(short), 32)
    landmarks = [index * len(short) // count for index in range(count)]
    others = [short[index] for index in landmarks]
    alone = np.array(desk.score_text("\n\n", others))
    gains = np.array([desk.score_text(f"{text}\n\n", others) for text in short]) - alone
    gains = gains / np.sqrt([desk.tokens(other) for other in others])
    itself = np.zeros(gains.shape, bool)
    itself[landmarks, range(count)] = True  # a text makes itself certain, which says nothing about its topic
    kept = np.ma.array(gains, mask=itself)
    centred = kept - kept.mean(0) - kept.mean(1)[:, None] + kept.mean()
    return _unit(np.asarray(centred.filled(0.0)))


def word_vectors(texts: Sequence[str]) -> Float[np.ndarray, "texts words"]:
    """Unit vectors of word frequencies, rare words counting more: (1 + log tf) · log(1 + n / df)."""
    counts = [
        Counter(_stem(w) for w in re.findall(r"[^\W\d_]{3,}", t.lower()) if w not in FUNCTION_WORDS) for t in texts
    ]
    places = {word: at for at, word in enumerate(sorted(set().union(*counts)))}
    matrix = np.zeros((len(texts), max(len(places), 1)))
    for row, count in enumerate(counts):
        for word, times in count.items():
            matrix[row, places[word]] = 1 + math.log(times)
    return _unit(matrix * np.log1p(len(texts) / np.maximum((matrix > 0).sum(0), 1)))


def _stem(word: str) -> str:
    return re.sub(r"(?:ies|ing|ed|es|s|ly|er|y)$", "", word) if len(word) > 4 else word


def _unit(matrix: Float[np.ndarray, "rows columns"]) -> Float[np.ndarray, "rows columns"]:
    unit: Float[np.ndarray, "rows columns"] = matrix / np.maximum(np.linalg.norm(matrix, axis=-1, keepdims=True), 1e-12)
    return unit


def clusters(vectors: Float[np.ndarray, "texts words"], count: int | None, threshold: float) -> list[list[int]]:
    """Agglomerative clustering by average likeness (cosine): merge the two most alike until ``count`` are left.

    Without a count, until no two clusters are more alike than ``threshold`` on average.
    """
    likeness = vectors @ vectors.T
    np.fill_diagonal(likeness, -np.inf)
    members = [[index] for index in range(len(vectors))]
    while len(members) > (count or 1):
        one, other = sorted(divmod(int(likeness.argmax()), len(likeness)))
        if count is None and likeness[one, other] < threshold:
            break
        a, b = len(members[one]), len(members[other])
        merged = (a * likeness[one] + b * likeness[other]) / (a + b)  # average linkage, by Lance and Williams
        likeness[one], likeness[:, one] = merged, merged
        likeness[one, one] = -np.inf
        likeness = np.delete(np.delete(likeness, other, 0), other, 1)
        members[one] += members.pop(other)
    return members


def _topic_name(desk: Desk, texts: Sequence[str]) -> str:
    shown = "\n".join(f"- {' '.join(text.split())[:200]}" for text in texts[:6])
    form = Regex("[^\\W\\d_]{3,20}( [^\\W\\d_]{2,20}){0,2}") if desk.provider.capabilities.grammars else None
    prompt = f"{shown}\n\nTheir topic:"
    try:
        name = desk.ask(presets.TOPIC_NAME, prompt, generating=form, most=24, include_schema_in_prompt=False)
    except AnswerTruncated as error:
        name = error.partial
    return " ".join(str(name).split()[:4]).strip(" .\"'").lower()
