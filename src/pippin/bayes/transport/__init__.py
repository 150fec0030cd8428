"""Optimal transport: semi-balanced Sinkhorn, Gromov-Wasserstein couplings and the Gromov-Monge gap."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
