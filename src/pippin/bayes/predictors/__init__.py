"""Predictors with uncertainty: MAP network, deep ensemble, MC dropout, SWAG, SGHMC and temperature scaling."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
