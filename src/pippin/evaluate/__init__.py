"""Evaluation: judge panels, annotation budgets, calibration, image quality, safety and canary audits."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
