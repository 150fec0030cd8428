"""Shape checking for every test, and the default model."""

import os
import sys
from pathlib import Path
from types import ModuleType

from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

# Threads that wait by spinning slow each other down where several processes share the cores, as in these tests.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")
if "PYTEST_XDIST_WORKER" in os.environ:  # one of several processes: a core for each
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# jaxtyping imports its type checker by name; this one lets an int stand for a float, as PEP 484 does
checker = ModuleType("pippin_type_checker")
checker.check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # type: ignore[attr-defined]
sys.modules[checker.__name__] = checker
# the floors where tensors live; above them, types are pydantic's matter
FLOORS = ("core", "nn", "data", "language", "generate", "bayes", "engine")
install_import_hook([f"pippin.{floor}" for floor in FLOORS], "pippin_type_checker.check")

import pytest  # noqa: E402
from hypothesis import Phase, settings  # noqa: E402

settings.register_profile("default", settings.get_profile("default"), deadline=None)  # machines differ in speed
settings.load_profile("default")
# `make nightly` chooses these: many more examples; and for the mutation tester none that is looked for twice, since a
# failure is all that it asks for
settings.register_profile("nightly", max_examples=2000, deadline=None)
settings.register_profile("mutation", phases=(Phase.explicit, Phase.generate), database=None, deadline=None)


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's file; fetched once into the user's cache."""
    from pippin.core.errors import OfflineError
    from pippin.core.store import store
    from pippin.core.store.catalog import DEFAULT_MODEL

    try:
        return store.pull(DEFAULT_MODEL, show_progress=False)
    except OfflineError as error:
        pytest.skip(f"the default model is not in the cache: {error}")


@pytest.fixture(scope="session")
def model(default_model_path):
    """The default model as a session loads it, in float32 so that results do not depend on the processor."""
    import pippin

    return pippin.load(default_model_path, device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def tiny():
    """A random two-layer model over bytes: every token is one byte, id 256 ends an answer."""
    import tiny_model

    return tiny_model.build()
