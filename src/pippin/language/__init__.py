"""Language models: the spec-driven decoder, the checkpoint families it reads, and `load`; sentence encoders."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
