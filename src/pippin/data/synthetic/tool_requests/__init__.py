"""Synthetic requests for tools: the tools on offer, what the user says, and the call or the reply that is right."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
