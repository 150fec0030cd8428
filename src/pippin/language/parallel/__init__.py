"""Decoders in several processes: parallel tracks (PT-MoE), tensor parallelism, and training of tracks."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
