"""Training: one loop, its optimizers and schedules, and how it spreads over processes."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
