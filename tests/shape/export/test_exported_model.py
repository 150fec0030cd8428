"""Captured models: the numbers of the module, files that are safe to open, and compression against plain formulas."""

import json

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from pippin.core.errors import (
    CorruptedFile,
    ExportError,
    InvalidArgument,
    ModelNotFound,
    SignatureMismatch,
    UnsafeCheckpoint,
)
from pippin.shape.export import (
    ExportedFunction,
    ExportedModel,
    JointCompression,
    LinearQuantization,
    Palettization,
    Pruning,
    SizeRange,
    compress,
)
from pippin.shape.export.compression import _packed, palette_of
from pippin.shape.export.exported_model import _digest


def dense(asset, name):
    """The weight that a compressed program computes, found by running the program on unit vectors."""
    module = asset.module()
    with torch.no_grad():
        return (module(torch.eye(512)) - module(torch.zeros(1, 512))).T if name == "weight" else None


@pytest.fixture(scope="module")
def matrix():
    torch.manual_seed(1)
    layer = nn.Linear(512, 24).eval()
    return layer, ExportedModel.capture(layer, {"x": torch.randn(3, 512)}, {"x": {0: SizeRange("rows", 1, 600)}})


def test_a_captured_program_computes_what_the_module_does(network, asset):
    for rows in (1, 7, 64):
        x = torch.randn(rows, 1, 8, 8)
        assert torch.equal(asset.module()(x), network(x))
    assert asset.ops()["aten.linear.default"] == 2
    assert asset.nbytes == sum(4 * weight.numel() for weight in network.parameters())


def test_a_saved_program_is_the_same_to_the_bit_and_to_the_byte(asset, network, tmp_path):
    assert asset.save(tmp_path / "a") == asset.hash
    again = ExportedModel.load(tmp_path / "a", hash=asset.hash)
    x = torch.randn(5, 1, 8, 8)
    assert torch.equal(again.module()(x), network(x))
    again.save(tmp_path / "b")
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
    text = (tmp_path / "a" / "main.json").read_text()
    assert "conftest.py" in text
    assert "/conftest.py" not in text


@settings(max_examples=12, deadline=None)
@given(where=st.floats(0, 1, exclude_max=True), which=st.integers(0, 3), bit=st.integers(0, 6))
def test_every_changed_byte_is_found(asset, tmp_path_factory, where, which, bit):
    folder = tmp_path_factory.mktemp("changed")
    asset.save(folder)
    path = sorted(folder.iterdir())[which]
    data = bytearray(path.read_bytes())
    data[int(where * len(data))] ^= 1 << bit
    path.write_bytes(data)
    with pytest.raises((CorruptedFile, UnsafeCheckpoint, ModelNotFound)):
        ExportedModel.load(folder, hash=asset.hash)


@pytest.mark.parametrize(
    ("key", "bad"),
    [
        ("target", "torch.os.system"),
        ("target", "torch.hub.load"),
        ("target", "_operator.attrgetter"),
        ("expr_str", "__import__('os').system('true')"),
        ("expr_str", "Symbol('s0').__class__"),
        ("guards_code", ["print(1)"]),
    ],
)
def test_a_program_that_would_run_something_is_refused_though_its_hashes_fit(asset, tmp_path, key, bad):
    from pippin.core.files import sha256_of

    asset.save(tmp_path)
    program, record = (json.loads((tmp_path / name).read_text()) for name in ("main.json", "asset.json"))

    def put(value):
        if isinstance(value, list):
            return any(put(inner) for inner in value)
        if not isinstance(value, dict):
            return False
        if key in value and (key != "target" or "metadata" in value):
            value[key] = bad
            return True
        return any(put(inner) for inner in value.values())

    assert put(program)
    (tmp_path / "main.json").write_text(json.dumps(program))
    record["files"]["main.json"] = sha256_of(tmp_path / "main.json")
    texts = {"main": (tmp_path / "main.json").read_bytes()}
    weights, places = asset._weights()
    signatures = {"main": record["functions"]["main"]["signature"]}
    record["hash"] = _digest(weights, places, texts, signatures, record["note"])
    (tmp_path / "asset.json").write_text(json.dumps(record))
    with pytest.raises(UnsafeCheckpoint):
        ExportedModel.load(tmp_path)


def test_functions_share_their_weights_in_memory_and_on_disk(tmp_path):
    layer = nn.Linear(64, 64)
    twice = nn.Sequential(layer, layer)
    x = {"x": torch.randn(2, 64)}
    both = ExportedModel.capture(layer, x, functions={"twice": ExportedFunction(twice, x)})
    assert both.nbytes == 4 * (64 * 64 + 64)
    both.save(tmp_path)
    assert (tmp_path / "weights.safetensors").stat().st_size < 1.1 * both.nbytes
    again = ExportedModel.load(tmp_path)
    with torch.no_grad():
        assert torch.equal(again.module("twice")(x["x"]), twice(x["x"]))


@pytest.mark.parametrize(("bits", "group"), [(8, None), (8, 64), (4, None), (4, 32), (2, 128)])
def test_linear_codes_are_the_plain_formula(matrix, bits, group):
    layer, asset = matrix
    parts = layer.weight.detach().view(24, -1, group or 512)
    scale = parts.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    wanted = ((parts / scale).round() * scale).view(24, 512)
    small = compress(asset, LinearQuantization(bits, group))
    torch.testing.assert_close(dense(small, "weight"), wanted, rtol=1e-5, atol=1e-6)
    assert small.nbytes == 24 * 512 * bits // 8 + 4 * 24 * (512 // (group or 512)) + 4 * 24


@pytest.mark.parametrize(("bits", "group"), [(1, None), (2, 8), (4, None)])
def test_palettes_are_no_worse_than_another_librarys_k_means(matrix, bits, group):
    from sklearn.cluster import KMeans

    layer, asset = matrix
    found = dense(compress(asset, Palettization(bits, group)), "weight")
    theirs = 0.0
    for part in layer.weight.detach().split(group or 24):
        assert len(found[: len(part)].unique().tolist()) >= 2**bits
        theirs += KMeans(2**bits, n_init=1, random_state=0).fit(part.reshape(-1, 1).double().numpy()).inertia_
    ours = float((found - layer.weight.detach()).square().sum())
    assert ours <= 1.02 * theirs


def test_pruning_keeps_the_largest_weights_and_joint_codes_them(matrix):
    layer, asset = matrix
    flat = layer.weight.detach().abs().flatten()
    kept = (flat >= flat.topk(len(flat) // 4).values[-1]).view(24, 512)
    pruned = dense(compress(asset, Pruning(0.75)), "weight")
    torch.testing.assert_close(pruned, torch.where(kept, layer.weight.detach(), 0.0), rtol=1e-5, atol=1e-6)
    joint = compress(asset, JointCompression(Pruning(0.75), Palettization(4)))
    found = dense(joint, "weight")
    assert ((found.abs() > 1e-6) <= kept).all()
    assert joint.nbytes == 24 * 512 // 8 + 24 * 512 // 4 // 2 + 4 * 16 + 4 * 24


def test_a_palette_is_trained_through_the_program(matrix):
    layer, asset = matrix
    small = compress(asset, Palettization(2))
    small = small.with_weights({"weight_palette": 1.5 * small.program().tensors()["weight_palette"]})
    module, x = small.module(), torch.randn(64, 512) * torch.linspace(0, 3, 512)
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        loss = (module(x) - layer(x).detach()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    tuned = small.with_weights(dict(module.named_parameters()))
    assert losses[-1] < 0.9 * losses[0]
    assert tuned.nbytes == small.nbytes
    with torch.no_grad():
        torch.testing.assert_close(tuned.module()(x), module(x))
    assert tuned.hash != small.hash


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_packed_codes_come_back(codes):
    data = _packed(torch.tensor(codes), 2)
    back = torch.stack([(data >> shift) & 3 for shift in (0, 2, 4, 6)], 1).flatten()
    assert back[: len(codes)].tolist() == codes
    assert palette_of(torch.tensor(codes).float(), 2)[0].shape == (len(codes),)


def test_a_call_that_does_not_fit_is_told_completely(asset):
    signature = asset.signature()
    assert str(signature) == "picture: float32[batch=1..64, 1, 8, 8] -> logits: float32[batch=1..64, 10]"
    with pytest.raises(SignatureMismatch, match=r"no input 'image'.*'picture' is missing"):
        signature.check({"image": torch.zeros(1, 1, 8, 8)})
    with pytest.raises(
        SignatureMismatch, match=r"float64, not float32; .*size 65 of dimension 0 is outside batch=1..64"
    ):
        signature.check({"picture": torch.zeros(65, 1, 8, 8).double()})
    with pytest.raises(SignatureMismatch, match="3 dimensions, not 4"):
        signature.check({"picture": torch.zeros(1, 8, 8)})
    with pytest.raises(SignatureMismatch, match="size 9 of dimension 3 must be 8"):
        signature.check({"picture": torch.zeros(1, 1, 8, 9)})


def test_what_cannot_be_captured_or_found_says_why(asset, tmp_path):
    class Branch(nn.Module):
        def forward(self, x):
            return x + 1 if x.sum() > 0 else x - 1

    with pytest.raises(ExportError, match="main cannot be captured"):
        ExportedModel.capture(Branch(), {"x": torch.randn(3)})
    with pytest.raises(InvalidArgument, match="'y'"):
        ExportedModel.capture(nn.Linear(2, 2), {"x": torch.randn(3, 2)}, {"y": {0: SizeRange("rows", 1, 4)}})
    with pytest.raises(ModelNotFound, match=r"no asset\.json"):
        ExportedModel.load(tmp_path)
    with pytest.raises(InvalidArgument, match="there is no function 'step'; functions: main"):
        asset.signature("step")
    with pytest.raises(InvalidArgument, match="groups of 100 do not divide"):
        compress(asset, LinearQuantization(4, 100))
    with pytest.raises(InvalidArgument, match="no weight of at least"):
        compress(asset, LinearQuantization(8), skip=("conv", "fc"))
    with pytest.raises(InvalidArgument, match="bits must be 2, 4 or 8, got 3"):
        LinearQuantization(3)
    with pytest.raises(InvalidArgument, match="sparsity must be above 0 and below 1, got 1"):
        Pruning(1.0)
    with pytest.raises(InvalidArgument, match="fc9"):
        asset.with_weights({"fc9.weight": torch.zeros(2)})
