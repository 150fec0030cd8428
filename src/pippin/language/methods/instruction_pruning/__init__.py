"""Instruction-following pruning: a mask over feed-forward channels predicted from the prompt."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
