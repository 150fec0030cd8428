"""Models that several processes compute together: sums over the processes, and parallel tracks."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
