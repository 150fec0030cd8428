"""Shape checking for every test, and the default model."""

import os
from pathlib import Path

from jaxtyping import install_import_hook

install_import_hook("pippin", "beartype.beartype")

import pytest  # noqa: E402
import torch  # noqa: E402


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's file; fetched once into the user's cache."""
    from pippin.core import store
    from pippin.core.catalogue import DEFAULT_MODEL
    from pippin.core.errors import OfflineError

    try:
        return store.pull(DEFAULT_MODEL, show_progress=False)
    except OfflineError as error:
        pytest.skip(f"the default model is not in the cache: {error}")


@pytest.fixture(scope="session")
def model(default_model_path):
    """The default model as a session loads it, in float32 so that results do not depend on the processor."""
    import pippin

    return pippin.load(default_model_path, device="cpu", dtype="float32")


@pytest.fixture(autouse=True)
def _threads():
    """Leave a core for the other worker where tests run in parallel."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
