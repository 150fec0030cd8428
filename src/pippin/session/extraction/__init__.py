"""Values from a text: forms that only parts of the text can fill in, and the provenance of each value."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
