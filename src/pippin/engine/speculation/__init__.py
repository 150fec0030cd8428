"""Speculative decoding: draft tokens, verified in one pass, which preserve the distribution of the answer."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
