"""The table of model types."""

import pytest

from pippin.core.errors import UnsupportedModel
from pippin.core.formats.model_types import class_of


@pytest.mark.parametrize("name", ["llama", None])
def test_an_unknown_type_is_refused_with_those_that_are_known(name):
    with pytest.raises(UnsupportedModel, match=rf"{name!r}; known types are .*pippin_ladir"):
        class_of(name)
