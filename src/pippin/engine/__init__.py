"""The token engine: requests in, token events out."""

from pippin.engine.engine import Engine, EngineStats, shared
from pippin.engine.request import Finished, Request, Token
from pippin.engine.sampling import SamplingOptions

__all__ = ["Engine", "EngineStats", "Finished", "Request", "SamplingOptions", "Token", "shared"]
