"""Synthetic documents in five languages whose facts, and the places in the text that state them, are known exactly."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
