"""Jacobians of a network's outputs in its weights, computed layer by layer, and Hessian-vector products."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
