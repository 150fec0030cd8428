"""Prompt caches on disk: what comes back is what was written, and any other file is refused."""

import builtins
import copy
import errno
import hashlib
import json
import os
import shutil
import signal
import stat
import struct
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from pippin.core.errors import CorruptedFile, DiskFull, InvalidInput, PromptCacheMismatch
from pippin.engine.cache import prompt_cache
from pippin.engine.cache.prefix_tree import CachedSequence, CacheKey
from pippin.engine.cache.prompt_cache import MAGIC, VERSION, adapter_hash, load, model_hash, save
from pippin.engine.model_runner import BLOCK_SIZE, GIVEN_BACK
from pippin.language import LanguageModel
from pippin.nn.lora import Adapter, LowRankUpdate
from pippin.nn.packed_layers import pack


class Memory:
    """A runner that only holds blocks; each is full of bytes that no other has."""

    def __init__(self, blocks=40, block_bytes=24, kv_cache_dtype="float32", windows=(None,)):
        self.blocks, self.block_bytes, self.kv_cache_dtype, self.invariant = blocks, block_bytes, kv_cache_dtype, True
        self.windows, self.heads_in_block = windows, 0
        self.pool = torch.randint(0, 256, (blocks, block_bytes), generator=torch.Generator().manual_seed(blocks)).byte()

    def forward(self, inputs):
        raise AssertionError("nothing is to be computed")

    def give_back(self, blocks):
        raise AssertionError("nothing is to be given back")

    def copy(self, source, target):
        raise AssertionError("nothing is to be copied")

    def read(self, blocks):
        return self.pool[list(blocks)]

    def write(self, blocks, data):
        self.pool[list(blocks)] = data

    def read_head(self, head_blocks, tokens):
        raise AssertionError("nobody's heads lie apart")

    write_head = read_head

    def close(self):
        pass


class Other(Memory):
    """Another kind of runner."""


@pytest.fixture
def model(tiny):
    return LanguageModel("tiny", copy.deepcopy(tiny.module), tiny.tokenizer, tiny.template)


@pytest.fixture
def adapter(model):
    return low_rank(model, "a", 1.0)


def low_rank(model, name, size):
    layer = next(part for name, part in model.module.named_modules() if name.endswith("o_proj"))
    return Adapter(name, {layer: (LowRankUpdate(size * torch.ones(2, 32), torch.ones(32, 2)),)})


PROMPTS = [
    CachedSequence(CacheKey("", None), [5] * 33, [(3,), (1,), (4,)]),
    CachedSequence(CacheKey("alice", None), list(range(16)), [(0,)]),
    CachedSequence(CacheKey("", None), [5] * 32 + [6], [(3,), (1,), (9,)]),  # shares two blocks with the first
]


def same(found, expected, runner):
    assert [each[:2] for each in found] == [each[:2] for each in expected]
    for one, wanted in zip(found, expected, strict=True):
        assert one.states == wanted.states == {}
        for row, blocks in zip(one.rows, wanted.rows, strict=True):
            assert [old == GIVEN_BACK for old in row] == [block == GIVEN_BACK for block in blocks]
            for old, block in zip(row, blocks, strict=True):
                assert old == GIVEN_BACK or torch.equal(one.blocks[old], runner.pool[block])


def test_what_was_written_comes_back_and_shared_blocks_are_written_once(model, tmp_path):
    runner, path = Memory(), tmp_path / "cache"
    size = save(path, model, runner, PROMPTS)
    assert size == path.stat().st_size
    assert size < 5 * 24 + 8 * 83 + 1000, "five blocks and 82 tokens, and what says so"
    same(list(load(path, model, Memory())), PROMPTS, runner)
    assert [file.name for file in tmp_path.iterdir()] == ["cache"]
    assert os.name != "posix" or stat.S_IMODE(path.stat().st_mode) == 0o600, "what was asked is nobody else's business"


@given(
    st.lists(
        st.tuples(st.sampled_from(["", "a", "ü"]), st.lists(st.integers(0, 259), max_size=70), st.integers(0, 9)),
        max_size=6,
    )
)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_any_prompts_come_back(model, tmp_path, prompts):
    runner, path = Memory(), tmp_path / "any"
    held = [
        CachedSequence(CacheKey(owner, None), ids, [((at + first) % 40,) for at in range(-(-len(ids) // BLOCK_SIZE))])
        for owner, ids, first in prompts
    ]
    save(path, model, runner, held)
    same(list(load(path, model, Memory())), [one for one in held if one[1]], runner)


def test_blocks_behind_windows_and_variants_come_back(model, tmp_path):
    runner, path = Memory(windows=(None, 16)), tmp_path / "cache"
    held = [
        CachedSequence(CacheKey("", None, variant="steered"), [5] * 33, [(3, GIVEN_BACK), (1, 2), (4, 5)]),
        CachedSequence(CacheKey("", None), [7, -12345678901234567, 8], [(6, 7)]),
    ]
    save(path, model, runner, held)
    same(list(load(path, model, Memory(windows=(None, 16)))), held, runner)
    refused(path, model, Memory(windows=(None,)), PromptCacheMismatch, "windows")


def test_a_newer_file_replaces_an_older_one_whole(model, tmp_path):
    runner, path = Memory(), tmp_path / "cache"
    save(path, model, runner, PROMPTS)
    save(path, model, runner, PROMPTS[:1])
    same(list(load(path, model, runner)), PROMPTS[:1], runner)


def test_adapters_are_known_by_what_they_change(model, adapter, tmp_path):
    runner, path = Memory(), tmp_path / "cache"
    held = [CachedSequence(CacheKey("", adapter), [1, 2], [(0,)]), CachedSequence(CacheKey("", None), [1, 2], [(1,)])]
    model.adapters["a"] = adapter
    save(path, model, runner, held)
    same(list(load(path, model, runner)), held, runner)
    # under another name it is the same, with other weights it is not: its prompts are passed over
    model.adapters.clear()
    same(list(load(path, model, runner)), held[1:], runner)
    model.adapters["b"] = again = low_rank(model, "b", 1.0)
    same(list(load(path, model, runner)), [CachedSequence(CacheKey("", again), [1, 2], [(0,)]), held[1]], runner)
    model.adapters["b"] = low_rank(model, "b", 2.0)
    same(list(load(path, model, runner)), held[1:], runner)
    assert adapter_hash(model, adapter) == adapter_hash(model, again) != adapter_hash(model, model.adapters["b"])


# --- files that are refused -------------------------------------------------------------------------------------------


def refused(path, model, runner, error, match):
    before = runner.pool.clone()
    with pytest.raises(error, match=match) as caught:
        list(load(path, model, runner))
    assert str(path) in str(caught.value)
    assert torch.equal(before, runner.pool)


def test_every_changed_byte_and_every_length_is_noticed(model, tmp_path):
    runner, path = Memory(block_bytes=8), tmp_path / "cache"
    save(path, model, runner, PROMPTS)
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        version = 8 <= at < 12
        with pytest.raises(PromptCacheMismatch if version else CorruptedFile):
            next(load(path, model, runner))
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptedFile):
            next(load(path, model, runner))
    path.write_bytes(whole + b"0")
    refused(path, model, runner, CorruptedFile, "damaged")


@pytest.mark.parametrize("content", [b"", b"PIPPIN", b"GGUF" + bytes(100), b"\x80\x04}\x94.", bytes(64)])
def test_another_file_is_no_prompt_cache(model, tmp_path, content):
    path = tmp_path / "cache"
    path.write_bytes(content)
    refused(path, model, Memory(), CorruptedFile, "is no prompt cache")


def forged(header, body=b"", *, version=VERSION):
    """A file whose hash is right, whatever it says."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    data = struct.pack("<8sII", MAGIC, version, len(text)) + text + body
    return data + hashlib.sha256(data).digest()


@pytest.mark.parametrize(
    "change",
    [
        {"blocks": -1}, {"blocks": "2"}, {"sequences": None}, {"sequences": [1]},
        {"sequences": [{"owner": 1, "adapter": None, "variant": "", "tokens": 1, "rows": [[0]], "states": []}]},
        {"sequences": [{"owner": "", "adapter": 2, "variant": "", "tokens": 1, "rows": [[0]], "states": []}]},
        {"sequences": [{"owner": "", "adapter": None, "variant": "", "tokens": 0, "rows": [], "states": []}]},
        {"sequences": [{"owner": "", "adapter": None, "variant": "", "tokens": 17, "rows": [[0]], "states": []}]},
        {"sequences": [{"owner": "", "adapter": None, "variant": "", "tokens": 1, "rows": [[1]], "states": []}]},
        {"sequences": [{"owner": "", "adapter": None, "variant": "", "tokens": 1, "rows": [[-1]], "states": []}]},
        {"sequences": [{"owner": "", "adapter": None, "variant": "", "tokens": 1, "rows": [["0"]], "states": []}]},
        {"sequences": [{"owner": "", "adapter": None, "variant": 1, "tokens": 1, "rows": [[0]], "states": []}]},
        {"sequences": [{"owner": "", "adapter": None, "variant": "", "tokens": 1, "rows": [[0, 0]], "states": []}]},
        {"blocks": 2}, {"states": None}, {"states": [1]}, {"states": [[[0, "float32", [2]]]]},
        {"sequences": [{"owner": "", "adapter": None, "variant": "", "tokens": 1, "rows": [[0]], "states": [[0, 0]]}]},
    ],
)  # fmt: skip
def test_a_file_that_contradicts_itself_is_refused_though_its_hash_is_right(model, tmp_path, change):
    runner, path = Memory(), tmp_path / "cache"
    save(path, model, runner, [CachedSequence(CacheKey("", None), [7], [(0,)])])
    _, _, length = struct.unpack("<8sII", path.read_bytes()[:16])
    header = json.loads(path.read_bytes()[16 : 16 + length])
    body = path.read_bytes()[16 + length : -32]
    path.write_bytes(forged(header, body))
    assert len(list(load(path, model, runner))) == 1
    path.write_bytes(forged(header | change, body))
    refused(path, model, runner, CorruptedFile, "damaged")
    path.write_bytes(forged(header, body[:-8] + struct.pack("<q", 260)))
    refused(path, model, runner, CorruptedFile, "tokens that tiny does not have")
    path.write_bytes(forged(b"[" * 100_000))
    refused(path, model, runner, CorruptedFile, "header")
    path.write_bytes(forged([], body))
    refused(path, model, runner, CorruptedFile, "header")
    path.write_bytes(forged(header, body, version=VERSION + 1))
    refused(path, model, runner, PromptCacheMismatch, f"form {VERSION + 1}")


def test_another_model_precision_or_kind_of_runner_is_named(model, tmp_path):
    path = tmp_path / "cache"
    save(path, model, Memory(), PROMPTS)
    refused(path, model, Memory(kv_cache_dtype="int8"), PromptCacheMismatch, "in float32, not int8")
    refused(path, model, Memory(block_bytes=32), PromptCacheMismatch, "block_bytes 24, not 32")
    refused(path, model, Other(), PromptCacheMismatch, "runner Memory, not Other")
    with torch.no_grad():
        model.module.layers[0].self_attn.o_proj.weight[0, 0] += 1
    refused(path, model, Memory(), PromptCacheMismatch, "another model")


def test_the_hash_of_a_model_is_that_of_its_weights_as_they_run(tiny):
    plain = copy.deepcopy(tiny.module)
    assert model_hash(tiny) == model_hash(replace(tiny, name="other", network=plain))
    half = replace(tiny, network=copy.deepcopy(tiny.module).bfloat16())
    assert model_hash(half) != model_hash(tiny)
    other = copy.deepcopy(tiny.module)
    other.config = replace(other.config, max_position_embeddings=64)
    assert model_hash(replace(tiny, network=other)) != model_hash(tiny)
    packed = copy.deepcopy(tiny.module)
    with torch.no_grad():
        pack(packed.layers)
    one = model_hash(replace(tiny, network=packed))
    assert one == model_hash(replace(tiny, network=packed)) != model_hash(tiny)
    changed = copy.deepcopy(tiny.module)
    with torch.no_grad():
        changed.layers[1].mlp.down_proj.weight[3, 3] += 1e-3
        pack(changed.layers)
    assert model_hash(replace(tiny, network=changed)) != one, "weights that were packed are looked at, too"


# --- places that cannot be written or read ----------------------------------------------------------------------------


def test_places_that_cannot_be_used_are_told(model, tmp_path, monkeypatch):
    runner = Memory()
    with pytest.raises(InvalidInput, match="is a folder"):
        save(tmp_path, model, runner, PROMPTS)
    with pytest.raises(InvalidInput, match="no folder"):
        save(tmp_path / "none" / "cache", model, runner, PROMPTS)
    with pytest.raises(InvalidInput, match="cannot be read: No such file"):
        list(load(tmp_path / "none", model, runner))
    with pytest.raises(InvalidInput, match="is a folder"):
        list(load(tmp_path, model, runner))
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(InvalidInput, match="no right to write"):
        save(tmp_path / "cache", model, runner, PROMPTS)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with a name here")
def test_a_pipe_is_not_waited_for_and_a_device_is_not_replaced_by_a_file(model, tmp_path):
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(os.devnull)
    for path in (pipe, link):
        with pytest.raises(InvalidInput, match="is a device or a pipe"):
            list(load(path, model, Memory()))
        with pytest.raises(InvalidInput, match="is a device or a pipe"):
            save(path, model, Memory(), PROMPTS)
    assert link.is_symlink()
    assert pipe.is_fifo()


def test_a_file_that_may_not_be_opened_is_told(model, tmp_path, monkeypatch):
    path = tmp_path / "cache"
    save(path, model, Memory(), PROMPTS)

    def forbid(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(type(path), "open", forbid)
    with pytest.raises(InvalidInput, match="cannot be read: Permission denied"):
        list(load(path, model, Memory()))
    with pytest.raises(InvalidInput, match="cannot be written: Permission denied"):
        save(path, model, Memory(), PROMPTS)


def test_a_full_disk_is_told_before_or_while_writing_and_the_older_file_stays(model, tmp_path, monkeypatch):
    runner, path = Memory(), tmp_path / "cache"
    save(path, model, runner, PROMPTS)
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
        with pytest.raises(DiskFull, match=r"100 B are free.*another disk"):
            save(path, model, runner, PROMPTS[:1])
    read = runner.read

    def full(blocks):
        raise OSError(errno.ENOSPC, "No space left on device")

    runner.read = full  # in the middle of the file, as when the disk fills up
    with pytest.raises(DiskFull, match="No space left"):
        save(path, model, runner, PROMPTS[:1])
    runner.read = read
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["cache"]
    same(list(load(path, model, runner)), PROMPTS, runner)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_real_disk_that_is_full_while_writing(model, tmp_path, monkeypatch):
    path = tmp_path / "cache"
    path.write_bytes(b"older")
    real = builtins.open
    monkeypatch.setattr(
        type(path),
        "open",
        lambda self, mode, **more: real("/dev/full" if "x" in mode else self, mode.replace("x", "w")),
    )
    monkeypatch.setattr(prompt_cache.os, "chmod", lambda *_: None)
    with pytest.raises(DiskFull, match="another disk"):
        save(path, model, Memory(block_bytes=1 << 18), PROMPTS)
    assert path.read_bytes() == b"older"
    assert [file.name for file in tmp_path.iterdir()] == ["cache"]


def test_what_a_killed_writer_left_is_deleted_and_what_is_being_written_stays(model, tmp_path):
    path, runner = tmp_path / "a[1].prompts", Memory()
    pid = os.fork()
    if pid == 0:
        runner.read = lambda blocks: os.kill(os.getpid(), signal.SIGKILL)
        save(path, model, runner, PROMPTS)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.endswith(".partial")
    seen = []
    read = runner.read

    def look(blocks):
        seen.append(left.exists())
        prompt_cache.remove_partials(path)  # as another process would
        return read(blocks)

    runner.read = look
    save(path, model, runner, PROMPTS)
    assert set(seen) == {False}
    assert list(tmp_path.iterdir()) == [path]
