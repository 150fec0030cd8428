"""Bounded caches by the names that options have for them."""

from __future__ import annotations

from pippin.engine.kv_eviction.epicache import EpiCache
from pippin.engine.kv_eviction.policies import H2O, KeyDiff, SnapKV, StreamingLLM
from pippin.engine.kv_eviction.policy import CachePolicy
from pippin.engine.options import CacheOptions

DEFAULT_BUDGET = 1024
"""Tokens of a cache whose options name no budget."""


def cache_settings(options: CacheOptions) -> CachePolicy | EpiCache | None:
    """What `pippin.session.Session` takes as its ``cache``; None where no cache is named.

    Raises:
        InvalidArgument: a budget that is too small.

    >>> cache_settings(CacheOptions(cache="snapkv", cache_budget=512)).budget
    512
    """
    if options.cache is None:
        return None
    kinds: dict[str, type[CachePolicy] | type[EpiCache]] = {
        "streaming-llm": StreamingLLM,
        "h2o": H2O,
        "snapkv": SnapKV,
        "keydiff": KeyDiff,
        "epicache": EpiCache,
    }
    return kinds[options.cache](budget=options.cache_budget or DEFAULT_BUDGET)
