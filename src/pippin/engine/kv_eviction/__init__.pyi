from .bounded_cache import BoundedCache as BoundedCache
from .by_name import cache_settings as cache_settings
from .conversation_cache import ConversationCache as ConversationCache, SingleCache as SingleCache
from .epicache import EpiCache as EpiCache, EpisodicCache as EpisodicCache, Probe as Probe
from .episodes import (
    Episodes as Episodes,
    SegmentEncoder as SegmentEncoder,
    Utterance as Utterance,
    WordEncoder as WordEncoder,
)
from .layer_budgets import (
    allocate_budgets as allocate_budgets,
    measure_layer_sensitivity as measure_layer_sensitivity,
)
from .policies import H2O as H2O, KeyDiff as KeyDiff, SnapKV as SnapKV, StreamingLLM as StreamingLLM
from .policy import CachePolicy as CachePolicy, HeadView as HeadView
