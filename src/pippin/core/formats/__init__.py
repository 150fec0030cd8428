"""Checkpoint formats: Hugging Face folders, GGUF and its block types, tensors in torch files."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
