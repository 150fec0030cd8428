"""Pippin: private foundation models on the machine you have.

Importing the package is cheap: torch and everything heavy load when a name is first used. What is public stands in
`__init__.pyi` beside each face.

>>> import pippin
>>> pippin.GenerationOptions(temperature=0.7, seed=1).temperature
0.7
"""

from typing import Any

import lazy_loader

_attribute, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("pippin")
    return _attribute(name)
