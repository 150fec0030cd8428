"""The pool against its promises: one load for many, least recently used goes first, never one in use."""

import asyncio
import threading
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from pippin.core.errors import AdapterMismatch, CorruptedFile, ModelNotFound, NotEnoughMemory, Overloaded
from pippin.serve import model_pool
from pippin.serve.model_pool import ModelPool, size_of, token_bytes
from pippin.serve.settings import ServerSettings

NAMES = ("a", "b", "c", "d")


@dataclass
class Fake:
    """A model of a size."""

    nbytes: int
    closed: bool = False
    name: str = ""
    context_size: int = 100
    adapters: dict = field(default_factory=dict)

    @property
    def model(self):
        return SimpleNamespace(template="template", load_adapter=self.adapters.__setitem__)

    @property
    def engine(self):
        return SimpleNamespace(close=lambda: setattr(self, "closed", True))


class Loader:
    """Counts its calls; slow, failing and sized as told."""

    def __init__(self, sizes=None, seconds=0.0):
        self.sizes, self.seconds = sizes or dict.fromkeys(NAMES, 100), seconds
        self.calls: list[str] = []
        self.made: list[Fake] = []
        self.error: Exception | None = None

    def __call__(self, name):
        self.calls.append(name)
        time.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        self.made.append(Fake(self.sizes[name], name=name))
        return self.made[-1]


class Clock:
    now = 0.0

    def __call__(self):
        self.now += 0.001
        return self.now


def pool(loader, *, budget=250, known=False, clock=None, **settings):
    chosen = ServerSettings(**{"models": NAMES, "memory": budget} | settings)
    needed = (lambda ref, cache: loader.sizes[ref]) if known else None
    return ModelPool(
        chosen, load=loader, load_encoder=loader, encoders={"d"}, memory_needed=needed, clock=clock or Clock()
    )


async def use(models, name):
    loaded = await models.acquire(name)
    models.release(loaded)
    return loaded


async def test_requests_for_a_loading_model_wait_for_one_load():
    loader = Loader(seconds=0.05)
    models = pool(loader)
    found = await asyncio.gather(*(models.acquire("a") for _ in range(20)))
    assert loader.calls == ["a"]
    assert len({id(one) for one in found}) == 1
    assert found[0].users == 20


async def test_a_client_that_leaves_does_not_stop_the_load_for_others():
    loader = Loader(seconds=0.05)
    models = pool(loader)
    first = asyncio.create_task(models.acquire("a"))
    await asyncio.sleep(0.01)
    second = asyncio.create_task(models.acquire("a"))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).name == "a"
    assert loader.calls == ["a"]
    assert models.loaded["a"].users == 1


@pytest.mark.parametrize("known", [True, False], ids=["size known before", "size known after"])
async def test_the_least_recently_used_makes_room(known):
    models = pool(Loader(), known=known)
    for name in ("a", "b", "a", "c"):
        await use(models, name)
    assert set(models.loaded) == {"a", "c"}
    assert models.nbytes <= models.budget


async def test_a_model_in_use_is_never_unloaded():
    loader = Loader()
    models = pool(loader)
    held = [await models.acquire("a"), await models.acquire("b")]
    with pytest.raises(Overloaded, match="answering") as caught:
        await models.acquire("c")
    assert caught.value.retry_after > 0
    assert set(models.loaded) == {"a", "b"}
    assert not any(one.closed for one in loader.made if one.name != "c")
    models.release(held[0])
    assert (await models.acquire("c")).name == "c"
    assert set(models.loaded) == {"b", "c"}


async def test_an_unloaded_model_gives_its_memory_back():
    import weakref

    loader = Loader()
    models = pool(loader, budget=100)
    await use(models, "a")
    watched = weakref.ref(loader.made.pop())
    await use(models, "b")
    assert watched() is None


@pytest.mark.parametrize("known", [True, False])
async def test_a_model_that_never_fits_says_so(known):
    loader = Loader({"a": 100, "b": 10_000})
    models = pool(loader, known=known)
    await use(models, "a")
    with pytest.raises(NotEnoughMemory, match=r"b needs 10.* all models together may take 250"):
        await models.acquire("b")
    assert set(models.loaded) == {"a"}
    assert loader.calls == (["a"] if known else ["a", "b"])
    assert not known or models.nbytes == 100


async def test_a_failure_is_remembered_for_a_moment_and_then_tried_again():
    clock, loader = Clock(), Loader()
    models = pool(loader, clock=clock)
    loader.error = CorruptedFile("broken")
    for _ in range(5):
        with pytest.raises(CorruptedFile, match="broken"):
            await models.acquire("a")
    assert loader.calls == ["a"]
    clock.now += 6
    with pytest.raises(CorruptedFile):
        await models.acquire("a")
    assert loader.calls == ["a", "a"]
    loader.error, clock.now = None, clock.now + 6
    assert (await models.acquire("a")).name == "a"


async def test_waiters_of_a_load_that_fails_all_hear_of_it():
    loader = Loader(seconds=0.02)
    loader.error = RuntimeError("unforeseen")
    models = pool(loader)
    found = await asyncio.gather(*(models.acquire("a") for _ in range(3)), return_exceptions=True)
    assert [str(one) for one in found] == ["unforeseen"] * 3
    loader.error = None
    assert (await models.acquire("a")).name == "a"  # what is not foreseen is not remembered


async def test_only_what_is_listed_may_be_named():
    models = pool(Loader(), adapters={"pirate": "p", "b:poet": "q"})
    assert models.resolve("") == ("a", None)
    assert models.resolve("b") == ("b", None)
    assert models.resolve("a:pirate") == ("a", "pirate")
    assert models.resolve("b:poet") == ("b", "poet")
    assert models.resolve("b:none") == ("b", "none")
    for name in ("owner/name", "smollm2-135m", "b:pirate", "a:poet", ":pirate", "../a", "a:", "A"):
        with pytest.raises(ModelNotFound, match="not served here"):
            models.resolve(name)


async def test_the_list_of_models():
    models = pool(Loader(), adapters={"pirate": "p"})
    await use(models, "b")
    found = {info.id: (info.kind, info.loaded, info.context_size) for info in models.models()}
    assert found == {
        "a": ("chat", False, None),
        "a:pirate": ("adapter", False, None),
        "b": ("chat", True, 100),
        "c": ("chat", False, None),
        "d": ("encoder", False, None),
    }


async def test_the_adapters_that_come_with_a_model_are_listed_and_loaded(monkeypatch):
    loaded = []
    monkeypatch.setattr(model_pool, "load", lambda model, task: loaded.append(task) or "its name")
    loader = Loader({"smollm2-135m": 100, "b": 100})
    models = pool(loader, models=("a=smollm2-135m", "b"))
    listed = [info.id for info in models.models()]
    assert (listed[0], listed[-1]) == ("a", "b")
    assert "a:smollm2-135m-extraction" in listed
    assert models.resolve("a:smollm2-135m-extraction") == ("a", "smollm2-135m-extraction")
    with pytest.raises(ModelNotFound):
        models.resolve("b:smollm2-135m-extraction")
    await models.acquire("a", "smollm2-135m-extraction")
    await models.acquire("a", "smollm2-135m-extraction")
    await models.acquire("a", "none")
    assert loaded == ["extraction"]
    monkeypatch.setattr(model_pool, "load", lambda model, task: None)
    models = pool(loader, models=("smollm2-135m",))
    with pytest.raises(AdapterMismatch, match="trained for"):
        await models.acquire("smollm2-135m", "smollm2-135m-extraction")


async def test_an_adapter_is_loaded_once(tmp_path):
    loader = Loader()
    models = pool(loader, adapters={"pirate": tmp_path})
    loaded = await models.acquire("a", "pirate")
    await models.acquire("a", "pirate")
    assert loader.made[0].adapters == {"pirate": tmp_path}
    assert loaded.users == 2


async def test_installed_models_may_be_named_only_if_told(monkeypatch):
    from pippin.core.store import store

    here = [SimpleNamespace(name=name, kind=kind) for name, kind in (("smollm2-135m", "model"), ("bfcl", "data"))]
    monkeypatch.setattr(store, "installed", lambda: here)
    assert set(pool(Loader()).references()) == set(NAMES)
    assert set(pool(Loader(), any_installed=True).references()) == {*NAMES, "smollm2-135m"}


async def test_random_use_keeps_the_books_right():
    """Many tasks that take and give back: the budget holds at every step, and nothing in use is closed."""
    import random

    loader, rng = Loader({"a": 100, "b": 60, "c": 90, "d": 120}), random.Random(0)
    models = pool(loader)

    async def one():
        for _ in range(15):
            try:
                loaded = await models.acquire(rng.choice(NAMES))
            except Overloaded:
                await asyncio.sleep(0)
                continue
            assert models.nbytes <= models.budget
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
            assert models.loaded[loaded.name] is loaded
            assert not loaded.model.closed
            models.release(loaded)

    await asyncio.gather(*(one() for _ in range(12)))
    assert all(loaded.users == 0 for loaded in models.loaded.values())
    models.close()
    assert all(one.closed for one in loader.made if one.name != "d")


def test_the_size_of_a_model_counts_each_weight_once(tiny):
    weights = {parameter.data_ptr(): parameter.nbytes for parameter in tiny.module.parameters()}
    assert size_of(SimpleNamespace(model=tiny)) == sum(weights.values())
    # keys and values: 2 layers, 2 heads of 8, 4 bytes
    assert token_bytes(tiny) == 2 * 2 * 2 * 8 * 4


def test_loads_run_beside_the_loop():
    """A load that takes long does not hold up the loop."""

    async def main():
        models = pool(Loader(seconds=0.1))
        load = asyncio.create_task(models.acquire("a"))
        ticks = 0
        while not load.done():
            await asyncio.sleep(0.005)
            ticks += 1
        assert ticks > 5
        assert threading.active_count() >= 1

    asyncio.run(main())
