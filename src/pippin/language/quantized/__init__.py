"""Quantized folders of other libraries: how each method stores a matrix, read without a loss."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
