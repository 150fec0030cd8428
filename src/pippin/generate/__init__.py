"""Generators of images and videos: flows, diffusion and what lies between, behind one contract."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
