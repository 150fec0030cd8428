"""Guardrails: content filtering of input and output by named rules, with a reason for every decision."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
