"""Export: capture a model as one program, convert it to other formats, compress it, and profile it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
