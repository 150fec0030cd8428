"""Text tasks: summarize, rewrite, proofread, extract, classify with calibrated probabilities, tag.

Notable here:
- one object, `TextTasks`, with a method for each task, for models from 135 million parameters up
- results are data: edits with positions, probabilities, tables, checked passages
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
