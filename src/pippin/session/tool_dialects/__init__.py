"""Dialects of tool calling: how models of each family write the calls of tools, as grammars and as readers."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
