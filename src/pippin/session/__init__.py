"""The session API: structured output, streaming and tool calling with local or remote models."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
