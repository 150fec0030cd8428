"""Long sequences in a bounded cache: policies that decide which keys and values stay, and the cache that they bound."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
