"""The linearized network: its posterior mode, its evidence, and the scale invariance of normalized layers."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
