"""Model references, the catalog, and the content-addressed cache that downloads fill."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
