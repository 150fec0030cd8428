from .eviction import (
    FIFO as FIFO,
    LFU as LFU,
    LRU as LRU,
    Belady as Belady,
    CachedExperts as CachedExperts,
    Clock as Clock,
    EvictionPolicy as EvictionPolicy,
    LeastStale as LeastStale,
)
from .expert_cache import CacheStats as CacheStats, ExpertCache as ExpertCache, ExpertLoader as ExpertLoader
from .expert_store import ExpertStore as ExpertStore
from .expert_trace import ExpertTrace as ExpertTrace
from .prompt_experts import PromptExperts as PromptExperts
from .simulator import Prefetch as Prefetch, Simulation as Simulation, compare as compare, simulate as simulate
