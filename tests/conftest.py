"""Shape checking for every test, and the default model."""

import json
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
from hypothesis import HealthCheck, Phase, settings  # noqa: E402

# machines differ in speed, and what a change is told must depend on the change: new examples are `make nightly`'s
unhurried = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("default", settings.get_profile("default"), derandomize=True, **unhurried)
settings.load_profile("default")
# `make nightly` chooses these: many more examples; and for the mutation tester none that is looked for twice, since a
# failure is all that it asks for
settings.register_profile("nightly", max_examples=2000, derandomize=False, **unhurried)
settings.register_profile(
    "mutation", phases=(Phase.explicit, Phase.generate), database=None, derandomize=False, **unhurried
)


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


# --- what is known of each model family -------------------------------------------------------------------------------
# Tests record it, docs/models.json keeps it, docs/models.md shows it.


@pytest.fixture(scope="session")
def least_of():
    """The least memory for the model in a folder, as the error for less says."""
    import pippin
    from pippin.core.errors import NotEnoughMemory

    def least(path, **options):
        with pytest.raises(NotEnoughMemory) as refused:
            pippin.load(path, device="cpu", memory=1, **options)
        return int(str(refused.value).partition("memory=")[2].partition(" ")[0])

    return least


@pytest.fixture(scope="session")
def save_mixture(tiny):
    """Writes a random mixture in bfloat16 with the small tokenizer to a folder, which it returns."""
    import torch

    from pippin.language import Decoder, LanguageModel, families

    def save(folder: Path, *, width: int = 64, inner: int = 64, experts: int = 8, layers: int = 2) -> Path:
        config = {"model_type": "qwen3_moe", "hidden_size": width, "moe_intermediate_size": inner, "head_dim": 32}
        config |= {"intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": 4}
        config |= {"num_key_value_heads": 2, "num_experts": experts, "num_experts_per_tok": 2, "norm_topk_prob": True}
        config |= {"vocab_size": tiny.vocab_size, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6}
        made = Decoder(families.from_hf(config | {"rope_theta": 10_000.0, "tie_word_embeddings": True}))
        made = made.initialize(seed=0).to(torch.bfloat16)
        LanguageModel("mixture", made, tiny.tokenizer, tiny.template).save(folder)
        return folder

    return save


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--write-support`: write what the tests find into docs/models.json, in place of comparing it."""
    parser.addoption("--write-support", action="store_true", help="write docs/models.json from the tests that run")


class Support:
    """Records what a test has shown of a family, or compares it with what was recorded."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._test = request.node.nodeid.partition("[")[0]
        self._write = request.config.getoption("--write-support")
        # one file for each process of pytest-xdist
        self._found = Path(request.config.rootpath) / "build" / "support" / f"{os.getpid()}.jsonl"

    def __call__(self, family: str, column: str, value: str = "yes") -> None:
        """Note at the end of a test what it has shown.

        Args:
            family: the model type; what follows a blank names a variant.
            column: a column of docs/models.md.
            value: what stands there.
        """
        family, cell = family.partition(" ")[0], {"value": value, "test": self._test}
        if self._write:
            self._found.parent.mkdir(parents=True, exist_ok=True)
            with self._found.open("a") as file:
                file.write(json.dumps([family, column, cell]) + "\n")
            return
        from model_table import SUPPORT

        kept = json.loads(SUPPORT.read_text()).get(family, {}).get(column)
        assert kept == cell, (
            f"docs/models.json has {kept} for {column!r} of {family!r}, and this test shows {cell}: run `pytest "
            "tests/language/families tests/shape/export --write-support`, then `python tools/generate_docs.py`"
        )


@pytest.fixture
def support(request: pytest.FixtureRequest) -> Support:
    """Record what a test has shown of a model family."""
    return Support(request)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Merge what was found; cells whose tests are gone go too."""
    if not session.config.getoption("--write-support") or hasattr(session.config, "workerinput"):
        return
    from model_table import SUPPORT, is_there

    kept = json.loads(SUPPORT.read_text()) if SUPPORT.exists() else {}
    for path in sorted((Path(session.config.rootpath) / "build" / "support").glob("*.jsonl")):
        for family, column, cell in map(json.loads, path.read_text().splitlines()):
            kept.setdefault(family, {})[column] = cell
        path.unlink()
    there = {
        family: {column: cell for column, cell in sorted(cells.items()) if is_there(cell["test"])}
        for family, cells in sorted(kept.items())
    }
    SUPPORT.write_text(json.dumps(there, indent=1) + "\n")
