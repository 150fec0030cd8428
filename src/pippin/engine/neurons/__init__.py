"""Neurons of ReLU layers in storage: which ones fire, what of them is in memory, and how the others are read."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
