"""Tags of a text: topics, names, emotions and requested actions; and topics of many texts.

Notable here:
- a tag is chosen, not generated: rules propose candidates from the text, the model's probabilities rank them
- names and requests have their position in the text
- texts are grouped by their mutual information under the model, or by an encoder's embeddings; then the model names the
  groups
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
from pippin.kits.text import prompts
from pippin.kits.text.classify import TextClassifier
from pippin.kits.text.english_words import CAPITALIZED, FUNCTION_WORDS
from pippin.kits.text.session_pool import SessionPool
from pippin.kits.text.spans import TextSpan, protected_spans, sentences
from pippin.session.types.schema import Regex

EMOTIONS = {
    "joy": "glad, happy, delighted",
    "sadness": "sad, sorry, disappointed",
    "anger": "angry, annoyed, complaining",
    "fear": "afraid, worried, nervous",
    "surprise": "astonished, amazed",
    "gratitude": "thankful",
    "neutral": "matter-of-fact, without feeling",
}
# The word that the model scores, for each kind of name.
KINDS = {"person": " person.", "place": " place.", "organization": " company.", "thing": " product."}
_CHARACTERS = 300  # characters of a text for comparison
_READS = 1500  # characters of a text for topics


@dataclass(frozen=True)
class Entity:
    """A named entity: a person, place, organization, thing, date, email, link or number, by its kind."""

    text: str
    kind: str
    span: TextSpan


@dataclass(frozen=True)
class Emotion:
    """An emotion of the writer, with its probability."""

    name: str
    probability: float


@dataclass(frozen=True)
class Tags:
    """Tags of a text: topics and emotions the most likely first, entities and actions in the order of the text."""

    topics: tuple[str, ...]
    entities: tuple[Entity, ...]
    emotions: tuple[Emotion, ...]
    actions: tuple[str, ...]


def tag(pool: SessionPool, text: str, *, max_topics: int = 5) -> Tags:
    """Topics, entities, emotions and requested actions of a text."""
    return Tags(
        tuple(topics_of(pool, text, max_topics)),
        tuple(entities(pool, text)),
        tuple(emotions(pool, text)),
        tuple(actions(pool, text)),
    )


def topics_of(pool: SessionPool, text: str, max_topics: int) -> list[str]:
    """The words that the text makes more likely as its topic, by log P(word | text) - log P(word)."""
    begin = text.strip()[:_READS]
    names = {word.lower() for name in _names(text) for word in name.of(text).split()}
    candidates = list(_phrases(text, names))
    if not candidates:
        return []
    frame, words = "\n\nThis text is about the", [f" {candidate}" for candidate in candidates]
    after, before = pool.score_text(begin + frame, words), pool.score_text(frame.strip(), words)
    counts = Counter(re.findall(r"[a-z]+(?:-[a-z]+)*", text.lower()))
    worth = {
        phrase: one - other + math.log(min(counts[word] for word in phrase.split()))
        for phrase, one, other in zip(candidates, after, before, strict=True)
    }
    found: list[str] = []
    for phrase in sorted(candidates, key=lambda phrase: -worth[phrase]):
        if worth[phrase] > 0 and not any(set(phrase.split()) & set(other.split()) for other in found):
            found.append(phrase)
    return found[:max_topics]


def _phrases(text: str, names: set[str]) -> Iterator[str]:
    """Words and pairs of words that are neither names nor stop words, the most frequent first."""
    counts: Counter[str] = Counter()
    for one in reversed(protected_spans(text, ["code", "links", "emails", "placeholders"])):
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
_CAPITALIZED = re.compile(r"[A-Z][\w’'&-]*(?:[^\S\n]+(?:(?:of|the|de|van|von|&)[^\S\n]+)?[A-Z][\w’'-]*)*")


def entities(pool: SessionPool, text: str) -> Iterator[Entity]:
    """Names, dates, addresses and numbers in their order; the model classifies the names."""
    taken = [Entity(m[0], "date", TextSpan(m.start(), m.end())) for m in _DATE.finditer(text) if not _is_verb(text, m)]
    for kind, name in (("emails", "email"), ("links", "link"), ("numbers", "number")):
        for one in protected_spans(text, [kind]):  # type: ignore[list-item]
            if not any(one.start < old.span.end and old.span.start < one.end for old in taken):
                taken.append(Entity(one.of(text), name, TextSpan(one.start, one.end)))
    words = list(KINDS.values())
    plain = pool.score_text("It is the name of a", words)  # the prior for no name in particular
    kinds: dict[str, str] = {}
    for one in _names(text, pool):
        if any(one.start < old.span.end and old.span.start < one.end for old in taken):
            continue
        name = one.of(text)
        if re.match(r"(?:Mr|Mrs|Ms|Miss|Dr|Sir|Lady|Captain|Professor|President)\b", name):
            kinds[name] = "person"
        if name not in kinds:
            around = text[max(0, one.start - 120) : one.end + 80].replace("\n", " ")
            kinds[name] = _kind(pool, name, around, words, plain)
        taken.append(Entity(name, kinds[name], one))
    yield from sorted(taken, key=lambda entity: entity.span)


def _kind(pool: SessionPool, name: str, around: str, words: Sequence[str], plain: Sequence[float]) -> str:
    """The kind of a name: the word that the name in its context makes more likely than "it" does."""
    informed = pool.score_text(f"{around}\n\n{name} is the name of a", words)
    gains = [one - other for one, other in zip(informed, plain, strict=True)]
    return list(KINDS)[gains.index(max(gains))]


def _is_verb(text: str, match: re.Match[str]) -> bool:
    """Whether "May" or "March" is the ordinary word at the beginning of a sentence rather than the month."""
    return match[0] in {"May", "March"} and text[match.end() : match.end() + 2].strip()[:1].islower()


def _names(text: str, pool: SessionPool | None = None) -> Iterator[TextSpan]:
    """Runs of capitalized words; at the beginning of a sentence only if the word is not an ordinary one."""
    starts = {one.start + len(one.of(text)) - len(one.of(text).lstrip(" \n\t\"'“‘(")) for one in sentences(text)}
    starts |= {match.end() for match in re.finditer(r"\n\s*", text)}
    for match in _CAPITALIZED.finditer(text):
        start, end = match.start() + len(_GREETING.match(match[0])[0]), match.end()  # type: ignore[index]
        if start == end:
            continue
        first = re.match(r"[\w’'-]+", text[start:end])[0]  # type: ignore[index]
        ordinary = first.lower() in FUNCTION_WORDS or (pool is not None and first.lower() in pool.lexicon.ranks)
        if start in starts and (ordinary or pool is None):
            rest = re.match(r"\s+", text[start + len(first) : end])
            if rest is None:
                continue
            start += len(first) + rest.end()
        name = re.sub(r"['’]s$", "", text[start:end])
        if len(name) > 1 and name.lower() not in FUNCTION_WORDS and name.lower() not in CAPITALIZED:
            yield TextSpan(start, start + len(name), "name")


def emotions(pool: SessionPool, text: str) -> list[Emotion]:
    """The emotions that the text makes more likely, the most likely first; at least one."""
    chances = TextClassifier(pool, EMOTIONS, about="what the writer feels").classify(text[:_READS]).probabilities
    likely = [Emotion(name, chance) for name, chance in chances.items() if chance >= 1.5 / len(EMOTIONS)]
    return likely or [Emotion(*next(iter(chances.items())))]


_REQUEST = re.compile(
    r"^(?:please|kindly|let's|don't|do not|could|can|would|will)\b(?!\s+(?:be|have been)\b)|\bplease\b|"
    r"\b(?:could|can|would|will) you\b|\b(?:you|we) (?:must|should|need to|have to)\b|\bmake sure\b|\bto-?do\b|"
    r"^(?:send|call|bring|check|write|make|take|get|give|tell|ask|read|buy|book|fix|add|remove|change|move|keep|put|open|"
    r"close|contact|reply|answer|confirm|cancel|order|pay|return|remember|note|see|use|try|help|come|go|wait|stop|start)\b",
    re.IGNORECASE,
)


def actions(pool: SessionPool, text: str) -> Iterator[str]:
    """The sentences that request something, by the words of requests."""
    for sentence in sentences(text):
        said = " ".join(sentence.of(text).split()).lstrip("-*• ")
        if _REQUEST.search(said) and len(said.split()) > 2:
            yield said


# --- topics of many texts ---------------------------------------------------------------------------------------------

Embed = Callable[[Sequence[str]], object]


@dataclass(frozen=True)
class Topic:
    """The common topic of several texts; ``members`` are their indices, the most typical first."""

    name: str
    members: tuple[int, ...]


def group(pool: SessionPool, texts: Sequence[str], *, count: int | None, embed: Embed | None) -> list[Topic]:
    """Cluster texts by similarity and name the clusters, the largest first."""
    if embed is not None:
        vectors, alike = _unit(np.asarray(embed(texts), float)), 0.25
    elif pool.can_score:
        vectors, alike = likelihood_gain_vectors(pool, texts), 0.15
    else:
        vectors, alike = word_vectors(texts), 0.05
    if vectors.ndim != 2 or len(vectors) != len(texts) or not np.isfinite(vectors).all():
        raise InvalidArgument(f"embed must return one vector of finite numbers for each of {len(texts)} texts")
    found = []
    for members in clusters(vectors, count, alike):
        center = vectors[members].mean(0)
        ordered = sorted(members, key=lambda index: -float(vectors[index] @ center))
        found.append(Topic(_topic_name(pool, [texts[index] for index in ordered]), tuple(ordered)))
    return sorted(found, key=lambda topic: -len(topic.members))


def likelihood_gain_vectors(pool: SessionPool, texts: Sequence[str]) -> Float[np.ndarray, "texts landmarks"]:
    """Unit vectors of each text's gain in the log-likelihood of others: log P(other | text) - log P(other), centered.

    Texts on one topic make the same other texts more likely. The others are at most 32 of the texts, evenly spaced.
    """
    short = [" ".join(text.split())[:_CHARACTERS] for text in texts]
    count = min(len(short), 32)
    landmarks = [index * len(short) // count for index in range(count)]
    others = [short[index] for index in landmarks]
    alone = np.array(pool.score_text("\n\n", others))
    gains = np.array([pool.score_text(f"{text}\n\n", others) for text in short]) - alone
    gains = gains / np.sqrt([pool.token_count(other) for other in others])
    itself = np.zeros(gains.shape, bool)
    itself[landmarks, range(count)] = True  # a text makes itself certain, which carries no information about its topic
    masked = np.ma.array(gains, mask=itself)
    centered = masked - masked.mean(0) - masked.mean(1)[:, None] + masked.mean()
    return _unit(np.asarray(centered.filled(0.0)))


def word_vectors(texts: Sequence[str]) -> Float[np.ndarray, "texts words"]:
    """Unit vectors of word frequencies, with larger weights for rare words: (1 + log tf) · log(1 + n / df)."""
    counts = [
        Counter(_stem(w) for w in re.findall(r"[^\W\d_]{3,}", t.lower()) if w not in FUNCTION_WORDS) for t in texts
    ]
    columns = {word: at for at, word in enumerate(sorted(set().union(*counts)))}
    matrix = np.zeros((len(texts), max(len(columns), 1)))
    for row, count in enumerate(counts):
        for word, times in count.items():
            matrix[row, columns[word]] = 1 + math.log(times)
    return _unit(matrix * np.log1p(len(texts) / np.maximum((matrix > 0).sum(0), 1)))


def _stem(word: str) -> str:
    return re.sub(r"(?:ies|ing|ed|es|s|ly|er|y)$", "", word) if len(word) > 4 else word


def _unit(matrix: Float[np.ndarray, "rows columns"]) -> Float[np.ndarray, "rows columns"]:
    unit: Float[np.ndarray, "rows columns"] = matrix / np.maximum(np.linalg.norm(matrix, axis=-1, keepdims=True), 1e-12)
    return unit


def clusters(vectors: Float[np.ndarray, "texts words"], count: int | None, threshold: float) -> list[list[int]]:
    """Agglomerative clustering by average similarity (cosine): merge the two most similar until ``count`` are left.

    Without a count, until no two clusters have an average similarity above ``threshold``.
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


def _topic_name(pool: SessionPool, texts: Sequence[str]) -> str:
    shown = "\n".join(f"- {' '.join(text.split())[:200]}" for text in texts[:6])
    form = Regex("[^\\W\\d_]{3,20}( [^\\W\\d_]{2,20}){0,2}") if pool.provider.capabilities.grammars else None
    prompt = f"{shown}\n\nTheir topic:"
    try:
        name = pool.ask(prompts.TOPIC_NAME, prompt, generating=form, max_tokens=24, include_schema_in_prompt=False)
    except AnswerTruncated as error:
        name = error.partial
    return " ".join(str(name).split()[:4]).strip(" .\"'").lower()
