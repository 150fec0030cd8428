"""STARFlow and STARFlow-V: deep-shallow flows for images and video."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
