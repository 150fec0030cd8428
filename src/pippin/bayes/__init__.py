"""Uncertainty: posteriors over weights, latent-variable models, simulation-based inference and optimal transport."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
