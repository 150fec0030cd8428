"""Data: tokenizers and chat templates; files, packing and streams of training data; images and synthetic data."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
