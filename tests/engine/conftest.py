"""What the tests of the engine share."""

import pytest

from pippin.nn.lora import Adapter


@pytest.fixture(scope="session")
def with_adapter(tiny):
    """The tiny model with an adapter of this name that changes nothing in it; the fake runner notices it."""
    from dataclasses import replace

    return replace(tiny, adapters={"a": Adapter("a", {})})
