"""The ground floor: errors, checks, files, devices, progress, reports; store, formats and trust."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
