"""EpiCache: a long conversation in a few bounded caches, one for each of its topics.

Source: Kim et al. 2025, EpiCache, arXiv:2509.17396.

Notable here:
- the conversation is computed block by block, and behind each block a cache keeps what the text that stands for its
  episode attends to (`Probe`); a question goes to the cache whose episode it is nearest to
- every cache reads the whole conversation, and catches up when it is asked again: the paper appends a turn to the cache
  that answered it only, so that a question about what was said last could go to a cache that never saw it
- a cache is computed when it is first asked for, and the episodes are found anew when the conversation has doubled
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor

from pippin.core.checks import NonNegativeInt, PositiveInt, checked
from pippin.core.errors import InvalidArgument
from pippin.engine.kv_eviction.bounded_cache import BoundedCache
from pippin.engine.kv_eviction.conversation_cache import CacheMaker, ConversationCache
from pippin.engine.kv_eviction.episodes import Episodes, SegmentEncoder, Utterance, WordEncoder, segments
from pippin.engine.kv_eviction.policy import CachePolicy, HeadView

INSTRUCTION: Final = (
    "Read this part of the conversation. Note who speaks and what they are like, what happened and when, personal "
    "details, promises and plans, opinions, how people are related, and what is special about it."
)
"""What a probe asks of the model, before the text of its episode."""


@checked
@dataclass(frozen=True, kw_only=True)
class Probe(CachePolicy):
    """Keeps what some tokens attend to, which are computed behind each block and are not kept.

    Args:
        token_ids: the tokens; those of a summary's request give InfiniPot, those of an episode EpiCache.
    """

    token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.token_ids:
            raise InvalidArgument("a probe without tokens attends to nothing; give at least one")

    def probe(self) -> Sequence[int]:
        """See `CachePolicy.probe`."""
        return self.token_ids

    def scores(self, head: HeadView) -> Float[Tensor, tokens]:
        """The largest attention that any token of the probe gives in any query head."""
        return head.received


@checked
@dataclass(frozen=True, kw_only=True)
class EpiCache:
    """Settings of the caches of a conversation.

    Args:
        budget: tokens that stay for each head, on average over the heads of a layer.
        block_size: tokens between two evictions.
        episodes: topics, each with a cache; only the one that is asked lies in the engine's pool.
        segment_utterances: utterances of a segment, which is what episodes consist of.
        medoids: segments that stand for an episode.
        probe_tokens: most tokens of a probe, which are in memory while it is computed.
        new_episode_below: a question whose cosine to every episode is below this one begins an episode; None for none.
        encoder: a sentence encoder, such as `pippin.load_encoder()`; None compares words.
        sink_tokens, recent_tokens, share_heads, layer_budgets: see `CachePolicy`.
        seed: of the clustering.

    Raises:
        InvalidArgument: as `CachePolicy`.

    >>> from pippin.session import Session
    >>> session = Session("smollm2-135m", cache=EpiCache(budget=512))                 # doctest: +SKIP
    """

    budget: PositiveInt
    block_size: PositiveInt = 256
    episodes: PositiveInt = 4
    segment_utterances: PositiveInt = 4
    medoids: PositiveInt = 4
    probe_tokens: PositiveInt = 512
    new_episode_below: float | None = None
    encoder: SegmentEncoder | None = None
    sink_tokens: NonNegativeInt = 4
    recent_tokens: NonNegativeInt = 16
    share_heads: bool = True
    layer_budgets: tuple[int, ...] | None = None
    seed: NonNegativeInt = 0

    def __post_init__(self) -> None:
        self.policy((0,))  # its checks

    @property
    def most_tokens(self) -> int:
        """Tokens for each head that all caches of a conversation may have at any time."""
        return (self.episodes + 1) * (self.budget + self.block_size + self.probe_tokens)

    def policy(self, token_ids: Sequence[int]) -> Probe:
        """The policy of one cache.

        Args:
            token_ids: the probe, which is cut to ``probe_tokens``.
        """
        return Probe(
            budget=self.budget,
            block_size=self.block_size,
            sink_tokens=self.sink_tokens,
            recent_tokens=self.recent_tokens,
            share_heads=self.share_heads,
            layer_budgets=self.layer_budgets,
            token_ids=tuple(token_ids[: self.probe_tokens]),
        )


class EpisodicCache(ConversationCache):
    """The caches of one conversation.

    Args:
        settings: budget and episodes.
        engine: makes the caches and computes in them.
        encode: gives the tokens of a text, as of a message to the model.

    Attributes:
        caches: the caches that were asked for, by episode; `NO_EPISODE` is that of a conversation that fits one.
        episodes: the topics; None while one cache holds everything.

    Raises:
        UnsupportedModel, InvalidArgument, NotEnoughMemory: as `pippin.engine.engine.Engine.bounded_cache`.
    """

    NO_EPISODE: Final = -1

    def __init__(self, settings: EpiCache, engine: CacheMaker, encode: Callable[[str], Sequence[int]]) -> None:
        super().__init__(settings, engine)
        self._encode = encode
        self.episodes: Episodes | None = None
        self.encoder: SegmentEncoder | None = settings.encoder
        self.probes: list[str] = []
        self.clustered_segments = 0
        self.cache(self.NO_EPISODE)  # what the engine cannot do is refused now

    def match(self, question: str) -> tuple[int, float]:
        """The episode that a question belongs to, and the cosine to it; (`NO_EPISODE`, 1) while there are none."""
        if self.episodes is None or self.encoder is None:
            return self.NO_EPISODE, 1.0
        return self.episodes.match(self._vector(question))

    def cache_for(self, num_tokens: int, utterances: Sequence[Utterance], question: str) -> BoundedCache:
        """See `ConversationCache.cache_for`."""
        settings, found = self.settings, segments(utterances, self.settings.segment_utterances)
        fits = num_tokens <= settings.budget + settings.block_size
        if not found or (self.episodes is None and fits):
            return self.cache(self.NO_EPISODE)
        if self.episodes is None or len(found) >= 2 * self.clustered_segments:
            self._cluster(found)
        episode, cosine = self.match(question)
        least = settings.new_episode_below
        if least is not None and cosine < least and question.strip():
            assert self.episodes is not None
            self.episodes = self.episodes.add(self._vector(question))
            self.probes.append(question)
            episode = len(self.probes) - 1
        return self.cache(episode)

    def _saved(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {} if self.episodes is None else vars(self.episodes).copy()
        if isinstance(self.encoder, WordEncoder):
            tensors["rarity"] = self.encoder.rarity
        return tensors, {"probes": self.probes, "clustered_segments": self.clustered_segments}

    def _restored(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any], names: Sequence[str]) -> None:
        if "labels" in tensors:
            self.episodes = Episodes(tensors["labels"], tensors["centroids"])
        if "rarity" in tensors:
            self.encoder = WordEncoder(tensors["rarity"])
        self.probes, self.clustered_segments = list(values["probes"]), int(values["clustered_segments"])
        self.caches = {}
        for name in names:
            self.cache(int(name))

    def _cluster(self, found: Sequence[str]) -> None:
        """Find the episodes, and what stands for each."""
        settings = self.settings
        if settings.encoder is None:
            self.encoder = WordEncoder.fit(found)
        assert self.encoder is not None
        vectors = self.encoder.embed(found, truncate=True)
        episodes = Episodes.cluster(vectors, settings.episodes, seed=settings.seed)
        chosen = [episodes.medoids(vectors, episode, settings.medoids) for episode in range(len(episodes.centroids))]
        self.episodes, self.probes = episodes, ["\n".join(found[each] for each in some) for some in chosen]
        self.caches, self.clustered_segments = {}, len(found)

    def _vector(self, question: str) -> Tensor:
        assert self.encoder is not None
        if not question.strip():
            return torch.zeros_like(self.episodes.centroids[0]) if self.episodes else torch.zeros(1)
        return self.encoder.embed([question], truncate=True)[0]

    def cache(self, episode: int) -> BoundedCache:
        """The cache of an episode, made when it is first asked for."""
        if episode not in self.caches:
            said = "" if episode == self.NO_EPISODE else self.probes[episode]
            ids = self._encode(f"{INSTRUCTION}\n\n{said}" if said else INSTRUCTION)
            self.caches[episode] = self._engine.bounded_cache(self.settings.policy(ids))
        return self.caches[episode]
