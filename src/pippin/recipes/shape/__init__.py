"""Recipes that convert a trained model, behind the commands of `pippin shape`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
