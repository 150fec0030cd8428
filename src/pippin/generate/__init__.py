"""Generators of images and videos: flows, diffusion models and autoregressive diffusion, behind one interface."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
