"""Experts chosen by the prompt: a router over the leading layers picks a set for a stretch of text."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
