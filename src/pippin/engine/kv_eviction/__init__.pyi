from .bounded_cache import BoundedCache as BoundedCache
from .policies import H2O as H2O, KeyDiff as KeyDiff, SnapKV as SnapKV, StreamingLLM as StreamingLLM
from .policy import CachePolicy as CachePolicy, HeadView as HeadView
