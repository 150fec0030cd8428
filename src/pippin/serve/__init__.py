"""The server: OpenAI's HTTP API over local models, with API keys, rate limits, metrics and a web page."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
