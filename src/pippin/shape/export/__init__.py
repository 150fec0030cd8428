"""Exporting: one captured program, every format from it, and reports of where its time goes."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
