"""Oracle: the `transformers` and `safetensors` libraries, as other writers and readers of the same layout."""

import errno
import json
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from pippin.core.errors import (
    CheckpointError,
    CorruptedFile,
    DiskFull,
    InvalidArgument,
    ModelNotFound,
    UnsafeCheckpoint,
)
from pippin.core.formats import checkpoint as module
from pippin.core.formats.checkpoint import model_type, open_folder, read_json, save_folder

TENSORS = {"a.weight": torch.arange(12.0).view(3, 4), "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)}
CONFIG = {"model_type": "llama", "hidden_size": 4}


class Ends:
    eos_ids = (7, 9)
    bos_id = 1

    def save(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


def sharded(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file({"a.weight": TENSORS["a.weight"]}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": TENSORS["b"]}, folder / "model-00002-of-00002.safetensors")
    index = {"a.weight": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def test_what_is_saved_comes_back(tmp_path):
    save_folder(tmp_path / "m", CONFIG, TENSORS, Ends(), {"temperature": 0.5})
    opened = open_folder(tmp_path / "m")
    assert opened.config == CONFIG
    assert opened.generation_config == {"bos_token_id": 1, "eos_token_id": [7, 9], "temperature": 0.5}
    assert sorted(opened.names()) == sorted(TENSORS)
    for name, tensor in TENSORS.items():
        assert opened.shape(name) == tuple(tensor.shape)
        assert opened.tensor(name).dtype == tensor.dtype
        assert torch.equal(opened.tensor(name), tensor)
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_a_model_of_transformers_goes_there_and_back(tmp_path):
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, head_dim=4
    )
    theirs = AutoModelForCausalLM.from_config(config)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="1KB")
    opened = open_folder(tmp_path / "theirs")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    save_folder(tmp_path / "ours", opened.config, {name: opened.tensor(name) for name in opened.names()})
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    ids = torch.arange(10)[None]
    assert torch.equal(again(ids).logits, theirs(ids).logits)


def test_a_tensor_is_not_a_copy(tmp_path):
    save_folder(tmp_path, CONFIG, {"large": torch.zeros(1 << 20)})
    opened = open_folder(tmp_path)
    mapped = Path("/proc/self/maps")
    opened.tensor("large")
    if mapped.exists():
        assert str(tmp_path / "model.safetensors") in mapped.read_text()


def test_shards_are_one_checkpoint(tmp_path):
    opened = open_folder(sharded(tmp_path))
    assert opened.names() == ["a.weight", "b"]
    assert torch.equal(opened.tensor("a.weight"), TENSORS["a.weight"])


def test_saving_replaces_shards_and_leaves_other_files(tmp_path):
    sharded(tmp_path)
    (tmp_path / "README.md").write_text("mine")
    save_folder(tmp_path, CONFIG, {"c": torch.ones(2)})
    assert open_folder(tmp_path).names() == ["c"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


def test_the_files_are_what_other_libraries_write(tmp_path):
    save_folder(tmp_path, {"name": "é", "sizes": (1, 2)}, TENSORS, generation_config={"top_k": 3})
    assert (tmp_path / "config.json").read_bytes().decode() == (
        '{\n  "name": "é",\n  "sizes": [\n    1,\n    2\n  ]\n}\n'
    )
    assert (tmp_path / "generation_config.json").read_text() == '{\n  "top_k": 3\n}\n'
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize(
    ("eos_ids", "bos_id", "found"),
    [
        ((7,), None, {"eos_token_id": [7]}),
        ((), 0, {"bos_token_id": 0}),
        ((), None, {}),
        ((7, 9), 1, {"bos_token_id": 1, "eos_token_id": [7, 9]}),
    ],
)
def test_the_ends_of_a_text_are_those_of_the_tokenizer_unless_the_caller_says_otherwise(
    tmp_path, eos_ids, bos_id, found
):
    tokenizer = Ends()
    tokenizer.eos_ids, tokenizer.bos_id = eos_ids, bos_id
    save_folder(tmp_path, CONFIG, TENSORS, tokenizer)
    assert open_folder(tmp_path).generation_config == found
    save_folder(tmp_path, CONFIG, TENSORS, tokenizer, {"eos_token_id": 5})
    assert open_folder(tmp_path).generation_config == found | {"eos_token_id": 5}


def test_without_a_generation_config_there_are_no_defaults(tmp_path):
    assert open_folder(sharded(tmp_path)).generation_config == {}


def test_tensors_are_copied_by_what_follows_their_prefix(tmp_path):
    opened = open_folder(sharded(tmp_path))
    assert sorted(opened.tensors()) == ["a.weight", "b"]
    (found,) = opened.tensors("a.").values()
    assert list(opened.tensors("a.")) == ["weight"]
    assert opened.tensors("weight") == {}
    found.zero_()
    assert torch.equal(opened.tensor("a.weight"), TENSORS["a.weight"])
    assert repr(opened) == f"Checkpoint({tmp_path.name!r}, 2 tensors)"
    assert opened.folder == tmp_path


def test_release_forgets_the_named_tensors_which_can_be_read_again(tmp_path, monkeypatch):
    save_folder(tmp_path, CONFIG, {"large": torch.arange(1 << 16), "other": torch.ones(3)})
    opened = open_folder(tmp_path)
    opened.release(["large"])
    assert torch.equal(opened.tensor("large"), torch.arange(1 << 16))
    forgotten = []
    monkeypatch.setattr(module.memory, "forget", lambda *where: forgotten.append(where))
    opened.release(opened.names())
    assert forgotten == [(opened.tensor(name).data_ptr(), opened.tensor(name).nbytes) for name in opened.names()]
    with pytest.raises(CorruptedFile, match="no tensor named 'absent'"):
        opened.release(["absent"])


def test_one_weight_file_of_any_name_is_enough(tmp_path):
    save_file(TENSORS, tmp_path / "weights.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert sorted(open_folder(tmp_path).names()) == ["a.weight", "b"]
    save_file({"c": torch.ones(1)}, tmp_path / "model.safetensors")  # the usual name comes first
    assert open_folder(tmp_path).names() == ["c"]
    index = {"weight_map": {"a.weight": "weights.safetensors", "b": "weights.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert sorted(open_folder(str(tmp_path)).names()) == ["a.weight", "b"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"weight_map": {"b": 3}}', "no 'weight_map' from tensors to files"),
        ('{"metadata": {}}', "no 'weight_map' from tensors to files"),
        ("[" * 100_000, "not JSON"),
        ("\ud800", "not JSON"),
        ("3", "expected a JSON object, got int"),
    ],
)
def test_an_index_that_is_none_is_damage(tmp_path, text, message):
    (sharded(tmp_path) / "model.safetensors.index.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(CorruptedFile, match=f"index.json: {message}"):
        open_folder(tmp_path)


def test_a_file_of_json_is_an_object(tmp_path):
    (tmp_path / "a.json").write_text('{"é": [1]}', encoding="utf-8")
    assert read_json(tmp_path / "a.json") == {"é": [1]}


def test_the_kind_of_model_is_told_where_it_can_be_read(tmp_path, monkeypatch):
    (tmp_path / "m").mkdir()
    sharded(tmp_path / "m")
    assert model_type(tmp_path / "m") == model_type(str(tmp_path / "m")) == "llama"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model_type("~/m") == "llama"
    assert model_type(tmp_path) is None
    for text in ("{", "[]", "{}", '{"model_type": 3}'):
        (tmp_path / "m" / "config.json").write_text(text)
        assert model_type(tmp_path / "m") is None


def test_tensors_of_any_kind_are_saved_as_values(tmp_path):
    save_folder(
        tmp_path,
        CONFIG,
        {"wanted": torch.nn.Parameter(torch.ones(2)), "none": torch.empty(0), "nothing": torch.empty(0, 3)},
    )
    saved = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in saved.items()} == {
        "wanted": (2,),
        "none": (0,),
        "nothing": (0, 3),
    }


def test_everything_is_on_the_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    done, replace, fsync = [], module.os.replace, module.os.fsync

    def put(source, target):
        assert source.parent.parent == target.parent == tmp_path / "m"
        assert source.parent.name.startswith(".partial-")
        done.append(target.name)
        replace(source, target)

    monkeypatch.setattr(module.os, "fsync", lambda file: (done.append("sync"), fsync(file))[1])
    monkeypatch.setattr(module, "sync_folder", lambda path: done.append(path))
    monkeypatch.setattr(module.os, "replace", put)
    save_folder(str(tmp_path / "m"), CONFIG, TENSORS, Ends())
    assert done[:4] == ["sync"] * 4
    assert sorted(done[4:7]) == ["generation_config.json", "model.safetensors", "tokenizer.json"]
    assert done[7:] == ["config.json", tmp_path / "m"]


@pytest.mark.parametrize(
    ("raised", "error", "message"),
    [
        (SafetensorError("no room"), CheckpointError, "^{}: the weights could not be written: no room"),
        (OSError(errno.ENOSPC, "No space left on device"), DiskFull, "{}"),
    ],
)
def test_weights_that_cannot_be_written_leave_the_old_ones(tmp_path, monkeypatch, raised, error, message):
    save_folder(tmp_path, CONFIG, TENSORS)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(module, "save_file", lambda *_, **__: (_ for _ in ()).throw(raised))
    with pytest.raises(error, match=message.format(tmp_path)):
        save_folder(tmp_path, CONFIG, {"c": torch.ones(3)})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_views_of_one_tensor_are_saved_as_they_look(tmp_path):
    whole = torch.arange(8.0)
    save_folder(tmp_path, CONFIG, {"left": whole[:4], "right": whole[4:], "turned": whole.view(2, 4).T})
    saved = load_file(tmp_path / "model.safetensors")
    assert {name: tensor.tolist() for name, tensor in saved.items()} == {
        "left": [0, 1, 2, 3],
        "right": [4, 5, 6, 7],
        "turned": [[0, 4], [1, 5], [2, 6], [3, 7]],
    }


def test_a_tied_weight_is_named_not_saved_twice(tmp_path):
    tied = torch.ones(3)
    with pytest.raises(InvalidArgument, match="'embed' and 'head' share their memory; leave one out"):
        save_folder(tmp_path / "m", CONFIG, {"embed": tied, "head": tied})
    assert not (tmp_path / "m").exists()


def test_a_config_that_json_cannot_hold_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(InvalidArgument, match="JSON values only"):
        save_folder(tmp_path / "m", {"dtype": torch.float32}, TENSORS)
    assert not (tmp_path / "m").exists()


def test_a_full_disk_changes_nothing(tmp_path, monkeypatch):
    save_folder(tmp_path, CONFIG, TENSORS)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(
        module, "require_free_space", lambda folder, nbytes: (_ for _ in ()).throw(DiskFull(f"{folder} {nbytes}"))
    )
    with pytest.raises(DiskFull, match=f"^{tmp_path} 52$"):
        save_folder(tmp_path, CONFIG, TENSORS)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("fail_at", ["config.json", "model.safetensors"])
def test_a_crash_while_files_are_put_in_place_never_leaves_a_folder_that_opens_wrongly(tmp_path, monkeypatch, fail_at):
    save_folder(tmp_path, CONFIG, TENSORS)
    replace = module.os.replace

    def crash(source, target):
        if Path(target).name == fail_at:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(module.os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        save_folder(tmp_path, {**CONFIG, "hidden_size": 5}, {"c": torch.ones(5)})
    with pytest.raises((CorruptedFile, ModelNotFound)):
        open_folder(tmp_path)
    assert not list(tmp_path.glob(".partial-*"))


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt", ".pkl"])
def test_a_pickle_is_refused_with_the_way_out(tmp_path, suffix):
    (tmp_path / "config.json").write_text("{}")
    for name in ("pytorch_model", "z"):
        (tmp_path / f"{name}{suffix}").write_bytes(b"\x80\x04.")
    with pytest.raises(UnsafeCheckpoint, match=rf"'pytorch_model{suffix}' is a pickle.*safetensors"):
        open_folder(tmp_path)


def damage_missing(folder):
    (folder / "model-00002-of-00002.safetensors").unlink()


def damage_truncated(folder):
    path = folder / "model-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def damage_header(folder):
    path = folder / "model-00001-of-00002.safetensors"
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


def damage_index(folder):
    path = folder / "model.safetensors.index.json"
    path.write_text(path.read_text().replace('"b":', '"ghost":'))


def damage_index_away(folder):
    (folder / "model.safetensors.index.json").unlink()


def damage_outside(folder):
    path = folder / "model.safetensors.index.json"
    path.write_text(path.read_text().replace("model-00002-of", "../model-00002-of"))


def damage_index_type(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": [1]}')


def damage_config(folder):
    (folder / "config.json").write_text("{")


def damage_config_type(folder):
    (folder / "config.json").write_text("[]")


def damage_config_away(folder):
    (folder / "config.json").unlink()


def damage_twice(folder):
    save_file({"a.weight": torch.ones(1), "b": TENSORS["b"]}, folder / "model-00002-of-00002.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_missing, "shard 'model-00002-of-00002.safetensors' is missing"),
        (damage_truncated, "model-00001-of-00002.safetensors: damaged or truncated"),
        (damage_header, "model-00001-of-00002.safetensors: damaged or truncated"),
        (damage_index, "index names 'ghost', which no shard contains"),
        (damage_index_away, "2 weight files but no model.safetensors.index.json"),
        (damage_outside, r"'\.\./model-00002-of-00002.safetensors' lies outside"),
        (damage_index_type, "no 'weight_map'"),
        (damage_config, "config.json: not JSON"),
        (damage_config_type, "expected a JSON object, got list"),
        (damage_config_away, "no config.json; the folder is incomplete"),
        (damage_twice, "tensor 'a.weight' is in two shards"),
    ],
)
def test_damage_is_found_when_the_folder_is_opened(tmp_path, damage, message):
    damage(sharded(tmp_path))
    with pytest.raises(CorruptedFile, match=message):
        open_folder(tmp_path)


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(ModelNotFound, match=r"no folder .*nowhere"):
        open_folder(tmp_path / "nowhere")
    with pytest.raises(ModelNotFound, match=r"no model\.safetensors"):
        open_folder(tmp_path)
    with pytest.raises(CorruptedFile, match="no tensor named 'absent' among its 2"):
        open_folder(sharded(tmp_path)).tensor("absent")
