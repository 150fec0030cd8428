"""Task adapters: the low-rank updates that come with Pippin, which make a small model better at one task."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
