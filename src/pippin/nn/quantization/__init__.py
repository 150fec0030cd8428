"""Quantized weights: codes and scales, packed matrices, palettes, and fake quantization for training."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
