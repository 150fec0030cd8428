"""Shared basics that every other package uses: errors, checks, files, devices, progress, reports, store, trust."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
