"""Experts of a mixture in limited memory: which ones stay, which ones leave, and traces to compare policies with."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
