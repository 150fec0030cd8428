"""Providers: the models and servers that answer the requests of a session."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
