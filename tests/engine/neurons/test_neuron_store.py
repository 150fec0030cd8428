"""Neurons from a file: the outputs of the whole model, bytes of the kernel and of the window's law, errors, ends."""

import gc
import sys
import threading
import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from pippin.claims.worlds.sequences.byte_text import byte_model
from pippin.core.direct_file import BLOCK, DirectFile
from pippin.core.errors import CorruptedFile, DiskFull, InvalidArgument, ModelNotFound, NotEnoughMemory, SlowStorage
from pippin.engine.model_runner import BLOCK_SIZE, ModelInput
from pippin.engine.neurons import Attached, NeuronStore, NeuronWindow
from pippin.engine.neurons.neuron_reader import NeuronReader, merge
from pippin.engine.neurons.neuron_store import least_room
from pippin.engine.runners.torch_runner import TorchRunner
from pippin.language import stored_neurons
from pippin.language.stored_neurons import is_sparse, neuron_layers, write_neurons
from pippin.nn.feedforward.feedforward import FeedForward, FeedForwardSpec
from pippin.nn.lora import Adapter, LowRankUpdate


def through(module, stored, *passes, **options):
    """Logits of some passes with neurons from a file, and the store, closed."""
    store = NeuronStore(stored, options.pop("capacity", stored.nbytes), **options)
    attached = Attached(module, store)
    try:
        return [module(ids) for ids in passes], store
    finally:
        attached.detach()
        store.close()


def firing(module, ids):
    """Of each layer which neurons fire for each token, from the whole model."""
    found, hooks = [], []
    for layer in module.layers:
        decides = layer.mlp.gate_proj or layer.mlp.up_proj
        hooks.append(decides.register_forward_hook(lambda _, given, y: found.append(y[0] > 0)))
    module(ids[None])
    for hook in hooks:
        hook.remove()
    return [each.numpy() for each in found]


def one_by_one(module, stored, ids, **options):
    """Bytes that each token reads, one pass for each, and the store, closed."""
    store = NeuronStore(stored, options.pop("capacity", stored.nbytes), **options)
    runner = TorchRunner(byte_model(module), 16)
    runner.fetch_neurons(store)
    attached, read, logits = Attached(module, store), [0], []
    for at, token in enumerate(ids.tolist()):
        logits += runner.forward([ModelInput([token], at, range(at // BLOCK_SIZE + 1), range(1))])
        read.append(int(store.stats.bytes_read.sum()))
    attached.detach()
    store.close()
    return np.diff(read), torch.cat(logits), store


def test_few_neurons_of_the_models_fire(module, ids):
    assert all(0.001 < fires.mean() < 0.15 for fires in firing(module, ids(300)))


@pytest.mark.parametrize(("window", "share"), [(1, 1), (5, 1), (None, 0.3), (3, 0)])
@pytest.mark.parametrize("threads", [1, 4])
def test_outputs_are_those_of_the_whole_model(module, write, ids, window, share, threads):
    stored, batch = write(module), torch.stack([ids(150), ids(150, begin=500), ids(150, begin=900)])
    capacity = max(least_room(stored), int(share * stored.nbytes))
    (y,), store = through(module, stored, batch, window=window, capacity=capacity, threads=threads)
    torch.testing.assert_close(y, module(batch), atol=1e-5, rtol=1e-5)
    assert store.nbytes <= capacity
    fires = [fires for row in batch for fires in firing(module, row)]
    assert store.stats.active.sum() == sum(each.sum() for each in fires)
    assert store.stats.tokens.tolist() == [batch.numel()] * len(module.layers)


def test_the_room_changes_no_bit(module, write, ids):
    stored = write(module)
    expected, _ = through(module, stored, ids(80)[None], window=None)
    for capacity, window in ((stored.nbytes // 2, 2), (stored.nbytes, 1)):
        found, _ = through(module, stored, ids(40)[None], ids(80)[None], window=window, capacity=capacity)
        assert torch.equal(found[1], expected[0])


def test_a_sequence_in_a_batch_is_as_alone(module, write, ids):
    rows = torch.stack([ids(60, begin=at) for at in (0, 400, 800)])
    together, _ = through(module, write(module), rows)
    for row, y in zip(rows, together[0], strict=True):
        alone, _ = through(module, write(module), row[None])
        torch.testing.assert_close(y, alone[0][0], atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the kernel's count is read from /proc")
@pytest.mark.parametrize(("threads", "gap"), [(1, 0), (3, 2)])
def test_bytes_read_are_those_of_the_kernel(module, write, ids, threads, gap):
    stored, text = write(module), ids(100)[None]
    reads = [line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("read_bytes")]
    before = int(reads[0].split()[1])
    _, store = through(module, stored, text, threads=threads, gap=gap)
    reads = [line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("read_bytes")]
    if not store.stats.direct:
        pytest.skip("this file system has no direct reads")
    assert int(reads[0].split()[1]) - before == store.stats.bytes_read.sum() > 0


@pytest.mark.parametrize("window", [1, 5])
def test_a_token_reads_the_neurons_that_the_last_ones_did_not_have(module, write, ids, window):
    """s_agg(k + 1) - s_agg(k), and the blocks of those neurons, from the activations of the whole model."""
    stored, text = write(module), ids(60)
    expected, blocks = 0, np.zeros(len(text), dtype=np.int64)
    for layer, fires in enumerate(firing(module, text)):
        size, offset = stored.bundle_bytes(layer), stored.layers[layer].offset
        for token in range(len(text)):
            earlier = fires[max(0, token - window) : token].any(0)
            new = np.flatnonzero(fires[token] & ~earlier)
            starts = offset + new * size
            touched = {block for a in starts.tolist() for block in range(a // BLOCK, (a + size - 1) // BLOCK + 1)}
            expected += len(new) * size
            blocks[token] += len(touched) * BLOCK
    read, logits, store = one_by_one(module, stored, text, window=window)
    brought = sum(
        int(each) * stored.bundle_bytes(layer) for layer, each in enumerate(store.stats.needed - store.stats.hits)
    )
    assert brought == pytest.approx(expected, rel=0.01)  # a neuron near zero may fire in one order of sums alone
    np.testing.assert_allclose(read.sum(), blocks.sum(), rtol=0.01)
    torch.testing.assert_close(logits, module(text[None])[0], atol=1e-5, rtol=1e-5)


def test_a_longer_window_reads_less_and_holds_more(module, write, ids):
    totals, held = [], []
    for window in (1, 5, 20):
        read, _, store = one_by_one(module, write(module), ids(80), window=window)
        totals.append(read.sum())
        held.append(store.nbytes)
    assert totals[0] > totals[1] > totals[2]
    assert held[0] < held[1] < held[2]


def test_adapters_on_every_matrix_are_exact(module, write, ids):
    generator = torch.Generator().manual_seed(0)

    def update(layer):
        shapes = ((2, layer.inputs), (layer.outputs, 2))
        return (LowRankUpdate(*(0.1 * torch.randn(shape, generator=generator) for shape in shapes)),)

    mlp = module.layers[0].mlp
    parts = [part for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj) if part is not None]
    adapter = Adapter("noise", {part: update(part) for part in parts})
    slices = [(adapter, slice(20, 50))]
    expected, stored = module(ids(50)[None], adapters=slices), write(module)
    store = NeuronStore(stored, stored.nbytes)
    attached = Attached(module, store)
    found = module(ids(50)[None], adapters=slices)
    attached.detach()
    assert (expected - module(ids(50)[None])).abs().max() > 0.01
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_bfloat16_is_half_as_large(module, write, ids):
    half, whole = write(module, dtype="bfloat16"), write(module)
    assert 2 * half.nbytes == whole.nbytes
    (y,), _ = through(module, half, ids(50)[None])
    rounded = {name: module.get_parameter(name) for layer in half.layers for name in layer.names}
    kept = {name: weight.clone() for name, weight in rounded.items()}
    for weight in rounded.values():
        weight.copy_(weight.bfloat16())
    expected = module(ids(50)[None])
    for name, weight in rounded.items():
        weight.copy_(kept[name])
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)


@given(
    st.lists(st.tuples(st.sets(st.integers(0, 19), min_size=1, max_size=6), st.integers(1, 4)), min_size=1, max_size=30)
)
@settings(deadline=None)
def test_a_window_has_what_a_dictionary_has(steps):
    """Rows stay those of their neurons while others come and go."""
    window, last = NeuronWindow(20, 3, torch.float32, 8), {}
    for now, (wanted, reach) in enumerate(steps):
        window.forget(now - reach)
        last = {neuron: when for neuron, when in last.items() if when >= now - reach}
        needed = np.array(sorted(wanted))
        missing = window.missing(needed)
        assert missing.tolist() == [neuron for neuron in needed if neuron not in last]
        there = needed[~np.isin(needed, missing)]
        window.touch(there, np.full(len(there), now))
        excess = len(last) + len(missing) - 8
        window.make_room(len(missing), needed)
        gone = set(last) - set(window.neurons.tolist())
        assert len(gone) == max(0, excess)
        assert not gone & wanted
        left = [when for neuron, when in last.items() if neuron not in gone | wanted]
        assert not gone or not left or max(last[each] for each in gone) <= min(left)
        rows = window.append(missing, np.full(len(missing), now))
        rows[:] = torch.from_numpy(missing)[:, None].float()
        last = {neuron: when for neuron, when in last.items() if neuron not in gone} | dict.fromkeys(wanted, now)
        assert sorted(window.neurons.tolist()) == sorted(last)
        assert window.gather(np.array(sorted(last)))[:, 1].tolist() == sorted(last)


@given(st.sets(st.integers(0, 200), min_size=1), st.integers(1, 3), st.integers(0, 5))
def test_reads_have_all_blocks_and_none_twice(neurons, blocks, gap):
    begin = np.array(sorted(neurons)) * blocks // 2
    runs = merge(begin, begin + blocks, gap)
    assert (runs.begin[1:] > runs.end[:-1] + gap).all()
    assert (runs.begin[runs.of] <= begin).all()
    assert (begin + blocks <= runs.end[runs.of]).all()
    if gap == 0:
        covered = {block for a in begin.tolist() for block in range(a, a + blocks)}
        assert (runs.end - runs.begin).sum() == len(covered)


def test_only_relu_has_sparse_neurons():
    def sparse(**options):
        return is_sparse(FeedForward(FeedForwardSpec(8, **options), 4))

    assert sparse(activation="relu")
    assert sparse(activation="relu2", gated=False)
    assert not sparse(activation="silu")
    assert not sparse(activation="gelu_tanh")
    assert not sparse(activation="relu", limit=7.0)
    with pytest.raises(InvalidArgument, match="none has sparse neurons"):
        write_neurons(Path("unused"), (), lambda name: torch.empty(0), "float32")


def test_a_damaged_block_is_refused_and_named(module, write, ids):
    stored = write(module)
    content = bytearray(stored.path.read_bytes())
    content[stored.layers[1].offset + 7] ^= 1
    stored.path.write_bytes(content)
    with pytest.raises(CorruptedFile, match=r"neurons.bin is damaged at byte .*delete .*neurons-"):
        through(module, stored, ids(200)[None])


def test_a_damaged_table_or_a_short_file_is_refused(module, write):
    stored = write(module)
    content = stored.path.read_bytes()
    for wrong in (content[:-1], content[:-1] + bytes([content[-1] ^ 1])):
        stored.path.write_bytes(wrong)
        with pytest.raises(CorruptedFile, match="delete it, and it is written anew"):
            write_neurons(stored.path.parent, neuron_layers(module), module.get_parameter, "float32")


def test_a_file_that_is_gone_or_shrinks(module, write, ids):
    stored = write(module)
    content = stored.path.read_bytes()
    store = NeuronStore(stored, stored.nbytes)
    attached = Attached(module, store)
    stored.path.write_bytes(content[:BLOCK])
    with pytest.raises(CorruptedFile, match="ends at byte"):
        module(ids(100)[None])
    stored.path.write_bytes(content)
    y = module(ids(100)[None])  # what failed left nothing behind
    attached.detach()
    torch.testing.assert_close(y, module(ids(100)[None]), atol=1e-5, rtol=1e-5)
    stored.path.unlink()
    with pytest.raises(ModelNotFound, match="no file"):
        NeuronStore(stored, stored.nbytes)


def test_a_disk_that_fills_leaves_nothing_behind(module, tmp_path, monkeypatch):
    def full(*_):
        raise DiskFull("full")

    monkeypatch.setattr(stored_neurons, "_append", full)
    with pytest.raises(DiskFull):
        write_neurons(tmp_path / "full", neuron_layers(module), module.get_parameter, "float32")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    monkeypatch.setattr(stored_neurons, "stored_bytes", lambda *_: 10**18)
    with pytest.raises(DiskFull, match="free"):
        write_neurons(tmp_path / "none", neuron_layers(module), module.get_parameter, "float32")


def test_bad_numbers_are_refused(module, write):
    stored = write(module)
    for wrong in ({"window": 0}, {"window": -3}, {"threads": 0}, {"gap": -1}, {"capacity": 0}):
        with pytest.raises(InvalidArgument):
            NeuronStore(stored, **({"capacity": stored.nbytes} | wrong))
    least = least_room(stored)
    with pytest.raises(NotEnoughMemory, match=f"{least:,}"):
        NeuronStore(stored, least - 1)
    NeuronStore(stored, least).close()


def test_neurons_of_another_model_are_refused(gated_module, plain_module, write):
    stored = write(plain_module)
    with pytest.raises(InvalidArgument, match="do not fit the decoder without a predictor"):
        Attached(gated_module, NeuronStore(stored, stored.nbytes))
    assert isinstance(gated_module.layers[0].mlp, FeedForward)


def test_a_closed_store_is_refused(module, write, ids):
    stored = write(module)
    store = NeuronStore(stored, stored.nbytes)
    attached = Attached(module, store)
    store.close()
    store.close()
    with pytest.raises(InvalidArgument, match="closed"):
        module(ids(30)[None])
    attached.detach()


def test_closing_waits_for_a_read(module, write, ids, monkeypatch):
    reading, go, ended = threading.Event(), threading.Event(), threading.Event()
    read = DirectFile.read

    def slow(*given):
        reading.set()
        go.wait(10)
        return read(*given)

    monkeypatch.setattr(DirectFile, "read", slow)
    stored = write(module)
    reader, row = NeuronReader(stored, threads=2), np.empty((4, stored.layers[0].numbers), dtype=np.uint32)
    failed = []

    def work():
        try:
            reader.read(0, np.array([0, 40, 80, 120]), row)
        except BaseException as error:
            failed.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    reading.wait(10)
    closer = threading.Thread(target=lambda: (reader.close(), ended.set()))
    closer.start()
    assert not ended.wait(0.05)
    go.set()
    worker.join(10)
    closer.join(10)
    assert ended.is_set()
    assert not failed
    assert all(file.closed for file in reader._files)
    parts = [module.get_parameter(name) for name in stored.layers[0].names]
    first = torch.cat([(each.T if each.shape[0] != 768 else each)[40] for each in parts])
    assert torch.equal(torch.from_numpy(row.view(np.float32)[1]), first)


def test_a_reader_that_its_own_thread_finds_forgotten_ends(module, write, monkeypatch):
    stored, failed = write(module), []
    monkeypatch.setattr(sys, "unraisablehook", failed.append)
    reader = NeuronReader(stored, threads=2)
    files, pool, ended = reader._files, reader._pool, weakref.ref(reader)
    forgotten, collected = threading.Event(), threading.Event()

    def collect():
        forgotten.wait(10)
        gc.collect()
        collected.set()

    pool.submit(collect)
    cycle = [reader]
    cycle.append(cycle)  # which only the collector finds
    del reader, cycle
    forgotten.set()
    assert collected.wait(10)
    for thread in list(pool._threads):
        thread.join(10)
    assert ended() is None
    assert not failed
    assert all(file.closed for file in files)


def test_reads_through_the_page_cache_are_said(module, write, ids, monkeypatch):
    monkeypatch.setattr(NeuronReader, "direct", False)
    with pytest.warns(SlowStorage, match="page cache"):
        through(module, write(module), ids(5)[None], ids(5)[None])


def test_a_model_that_reads_nearly_everything_is_told_so(write, ids):
    from pippin.language import Decoder, DecoderConfig, LayerSpec
    from pippin.nn.attention.attention import AttentionSpec

    layer = LayerSpec(AttentionSpec(), FeedForwardSpec(512, "relu", gated=False))
    dense = Decoder(DecoderConfig("arcee", 257, 128, (layer,), 4, 2, 32, 128)).initialize(seed=0).eval()
    dense.requires_grad_(False)
    stored = write(dense)
    with pytest.warns(SlowStorage, match=r"(4|5)\d% of the neurons are active for a token") as given:
        one_by_one(dense, stored, ids(80), capacity=least_room(stored), window=1)
    assert len(given) == 1


def test_a_sparse_model_is_not_warned_of(module, write, ids):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one_by_one(module, write(module), ids(80))
