"""Canary audits: random texts are planted in prompts and answers, then searched for on disk and in memory."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
