from .block_pool import BlockPool as BlockPool
from .paged_store import PagedStore as PagedStore
from .prefix_tree import PrefixTree as PrefixTree
from .prompt_cache import CacheOrigin as CacheOrigin, load as load, save as save
