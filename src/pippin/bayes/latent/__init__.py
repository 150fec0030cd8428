"""Latent-variable models (VAE, Bayesian VAE), disentanglement, and Bayesian optimization in a latent space."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
