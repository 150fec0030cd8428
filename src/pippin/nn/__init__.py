"""Building blocks of models: linear layers, norms, rotary positions, attention, feed-forward layers, caches."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
