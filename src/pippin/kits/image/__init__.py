"""Image generation and editing: one `ImageCreator` over every generator of this library.

Notable here:
- `ImageCreator` generates, edits, inpaints and animates with flows, diffusion, autoregressive diffusion and
  compositions
- the cost is measured before sampling, and the metadata of an image record how it was made
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
