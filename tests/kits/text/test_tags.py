"""Tags that come from the text, and groups of texts against scikit-learn's clustering."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from sklearn.cluster import AgglomerativeClustering
from sklearn.feature_extraction.text import TfidfVectorizer

from pippin.core.errors import InvalidArgument, UnsupportedCapability, UnsupportedLanguage
from pippin.kits.text import TextTasks
from pippin.kits.text.tags import clusters, word_vectors

MAIL = """Hi Tom,

the heating in Leeds has failed. Can you send somebody before 12 May? Write to help@x.org or see https://x.org/heat.
Mrs Hale of the Marrow Company paid 1,040 euros."""


@pytest.fixture(scope="module")
def tags(tiny):
    return TextTasks(tiny).tag(MAIL)


def test_entities_stand_where_they_say(tags):
    assert all(entity.span.of(MAIL) == entity.text for entity in tags.entities)
    starts = [entity.span.start for entity in tags.entities]
    assert starts == sorted(starts)


def test_entities_that_rules_tell(tags):
    kinds = {entity.text: entity.kind for entity in tags.entities}
    told = {"12 May": "date", "help@x.org": "email", "https://x.org/heat": "link", "1,040": "number"}
    assert told.items() <= kinds.items()
    assert {"Tom", "Leeds", "Marrow Company"} < set(kinds)
    assert kinds["Mrs Hale"] == "person"


def test_topics_are_words_of_the_text_and_actions_its_sentences(tags):
    words = set(MAIL.lower().replace("?", " ").replace(".", " ").split())
    assert all(word in words for topic in tags.topics for word in topic.split())
    assert tags.actions[0] == "Can you send somebody before 12 May?"
    assert tags.emotions
    assert all(0 < emotion.probability <= 1 for emotion in tags.emotions)


def test_tags_need_probabilities_and_english(scripted, tiny):
    with pytest.raises(UnsupportedCapability):
        TextTasks(scripted(str)).tag(MAIL)
    with pytest.raises(UnsupportedLanguage, match="looks like 'de'") as caught:
        TextTasks(tiny).tag("Die Lampe wird von Hand angezündet und nicht gelöscht.")
    assert caught.value.language == "de"


def partition(groups):
    return sorted(sorted(int(member) for member in group) for group in groups)


@given(st.integers(0, 10_000), st.integers(2, 12), st.data())
@settings(deadline=None)
def test_clusters_are_those_of_average_linkage(seed, size, data):
    vectors = np.random.default_rng(seed).normal(size=(size, 4))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    count = data.draw(st.integers(1, size))
    other = AgglomerativeClustering(count, metric="cosine", linkage="average").fit_predict(vectors)
    expected = [np.flatnonzero(other == label) for label in range(count)]
    assert partition(clusters(vectors, count, 0.0)) == partition(expected)


def test_without_a_count_likeness_decides():
    vectors = np.array([[1.0, 0], [0.99, 0.1], [0, 1], [0.1, 0.99]])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    assert partition(clusters(vectors, None, 0.5)) == [[0, 1], [2, 3]]
    assert partition(clusters(vectors, None, 0.999)) == [[0], [1], [2], [3]]


def test_word_vectors_weigh_words_as_another_library_does():
    texts = ["lamp harbour lamp", "harbour ferry", "ferry ferry ferry boat", "xyzzy lamp"]
    other = TfidfVectorizer(sublinear_tf=True, smooth_idf=False).fit(texts)
    names = list(other.get_feature_names_out())
    weights = np.log1p(len(texts) / np.array([sum(name in text for text in texts) for name in names]))
    counts = np.array([[text.split().count(name) for name in names] for text in texts])
    expected = np.where(counts, 1 + np.log(np.maximum(counts, 1)), 0) * weights
    expected = expected / np.linalg.norm(expected, axis=1, keepdims=True)
    assert np.allclose(word_vectors(texts) @ word_vectors(texts).T, expected @ expected.T)


def test_every_text_belongs_to_one_topic(scripted):
    texts = ["The lamp is lit.", "A ferry came.", "The lamp is out.", "The ferry left."]
    found = TextTasks(scripted(lambda prompt: "Lamp" if "lamp" in prompt else "Ferry")).topics(texts, count=2)
    assert {topic.name: set(topic.members) for topic in found} == {"lamp": {0, 2}, "ferry": {1, 3}}


def test_an_encoder_may_tell_what_is_alike(scripted):
    found = TextTasks(scripted(lambda prompt: "x")).topics(
        ["a b", "c d", "e f"], embed=lambda texts: [[1, 0], [0, 1], [1, 0.1]]
    )
    assert [set(topic.members) for topic in found] == [{0, 2}, {1}]


def test_the_model_tells_what_is_alike(tiny):
    found = TextTasks(tiny).topics(["aaaa aaaa", "bbbb bbbb", "cccc"], count=3)
    assert partition(topic.members for topic in found) == [[0], [1], [2]]


@pytest.mark.parametrize(
    ("texts", "more", "message"),
    [
        ([], {}, "a list of texts"),
        ("abc", {}, "a list of texts"),
        (["a"], {"count": 2}, "between 1 and the 1 texts"),
        (["a"], {"embed": lambda texts: [1.0]}, "one vector of finite numbers"),
    ],
)
def test_what_cannot_be_grouped(scripted, texts, more, message):
    with pytest.raises(InvalidArgument, match=message):
        TextTasks(scripted(str)).topics(texts, **more)
