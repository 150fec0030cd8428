"""Episodes: segments of a conversation, clustered as scikit-learn clusters them, and matched to questions."""

import pytest
import torch
import torch.nn.functional as F
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score

from pippin.engine.kv_eviction import Episodes, Utterance, WordEncoder
from pippin.engine.kv_eviction.episodes import segments

TOPICS = {
    "garden": "tomatoes soil watering seeds compost roses pruning greenhouse sunlight weeds",
    "music": "guitar concert melody drummer chords rehearsal album singer piano rhythm",
    "travel": "airport hotel passport luggage train ticket beach museum flight island",
}


def talk(turns=12):
    generator, said = torch.Generator().manual_seed(0), []
    for turn in range(turns):
        words = list(TOPICS.values())[turn % 3].split()
        for speaker in ("user", "assistant"):
            chosen = [words[at] for at in torch.randperm(10, generator=generator)[:5].tolist()]
            said += [Utterance(speaker, f"About {' '.join(chosen)}.")] * 2
    return said


def blobs(count, each, width=16, noise=0.15):
    generator = torch.Generator().manual_seed(3)
    centers = torch.randn(count, width, generator=generator)
    points = centers.repeat_interleave(each, 0) + noise * torch.randn(count * each, width, generator=generator)
    return F.normalize(points, dim=-1)


@pytest.mark.parametrize(("count", "noise"), [(2, 0.1), (4, 0.2), (6, 0.6)])
def test_clusters_are_as_good_as_those_of_scikit_learn(count, noise):
    points = blobs(count, 20, noise=noise)
    found = Episodes.cluster(points, count)
    theirs = KMeans(count, n_init=10, random_state=0).fit(points.numpy())
    means = torch.stack([points[found.labels == each].mean(0) for each in range(len(found.centroids))])
    inertia = float((points - means[found.labels]).square().sum())
    assert inertia <= 1.02 * theirs.inertia_
    if noise < 0.3:
        assert adjusted_rand_score(theirs.labels_, found.labels.tolist()) == 1
    torch.testing.assert_close(found.centroids, F.normalize(means, dim=-1))


def test_topics_become_episodes_and_questions_find_theirs():
    parts = segments(talk(), 4)
    encoder = WordEncoder.fit(parts)
    vectors = encoder.embed(parts)
    episodes = Episodes.cluster(vectors, 3)
    assert len(parts) == 12
    assert [episodes.labels[at].item() for at in range(3)] * 4 == episodes.labels.tolist()
    for topic, question in enumerate(("Which ROSES need compost?", "who was the drummer", "Where is my passport?")):
        episode, cosine = episodes.match(encoder.embed([question])[0])
        assert episode == episodes.labels[topic]
        assert 0 < cosine <= 1
    chosen = episodes.medoids(vectors, int(episodes.labels[1]), 2)
    assert chosen == sorted(chosen)
    assert {each % 3 for each in chosen} == {1}
    nearest = (vectors @ episodes.centroids[episodes.labels[1]]).argmax()
    assert int(nearest) in chosen


def test_few_or_equal_segments_make_fewer_episodes():
    assert len(Episodes.cluster(blobs(1, 2), 4).centroids) <= 2
    same = Episodes.cluster(torch.ones(5, 8) / 8**0.5, 4)
    assert len(same.centroids) == 1
    assert same.medoids(torch.ones(5, 8) / 8**0.5, 0, 3) == [0, 1, 2]


def test_long_utterances_are_cut_into_sentences():
    long = " ".join(f"This is sentence number {at}." for at in range(30)) + " Oh."
    found = segments([Utterance("user", long)], 4)
    assert len(found) == 8
    assert found[0].count("user said,") == 4
    assert "Oh." not in found[-1]
    assert segments([], 4) == []
    assert segments([Utterance("user", "  ")], 4) == []


def test_words_are_counted_alike_in_any_case_and_script():
    encoder = WordEncoder.fit(["Straße und Café", "猫が寝る", "something else"])
    one, other, third = encoder.embed(["STRASSE", "straße", ""])
    assert float(one @ other) == pytest.approx(1)
    assert not third.any()
