"""Metrics of predictions and confidence intervals, defined once for the whole library.

Names and values follow scikit-learn and SciPy, which the tests compare with; neither is required by this package.
Metrics of probabilities take tensors; rankings, agreement and intervals take tensors, arrays or lists without torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
