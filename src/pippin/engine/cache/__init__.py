"""The key-value cache: block pool, prefix tree, paged storage, and prompt caches on disk."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
