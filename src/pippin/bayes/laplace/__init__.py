"""The Laplace approximation: subset of weights, structure of the covariance, curvature, likelihood, tuning."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
