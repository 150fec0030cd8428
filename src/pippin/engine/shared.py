"""The engine that all sessions over one loaded model share."""

from __future__ import annotations

import threading

from pippin.engine.engine import Engine
from pippin.language.language_model import LanguageModel


class _Holder:
    """Holds the shared engine of a model; a copy of the model starts without one."""

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine

    def __reduce__(self) -> tuple[type[_Holder], tuple[()]]:
        return _Holder, ()


_sharing = threading.Lock()


def shared_engine(model: LanguageModel) -> Engine:
    """The engine that all sessions of a model share; created by the first call, and closed with the model.

    Raises:
        NotEnoughMemory: there is no memory for the cache.
    """
    with _sharing:
        # an attribute of the model, so that both have the same lifetime
        holder: _Holder = vars(model).setdefault("_engine", _Holder())
        if holder.engine is None or not holder.engine.is_open:
            holder.engine = Engine(model)
        return holder.engine
