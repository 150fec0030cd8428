"""Backends against torch on random inputs, and the errors that need none of their libraries."""

import importlib
import platform
import subprocess
import sys
from importlib.util import find_spec

import jaxtyping
import pytest
import tiny_model
import torch
from torch import nn

from pippin.core.errors import (
    BackendUnavailable,
    ExportError,
    InvalidArgument,
    PrecisionMismatch,
    SignatureMismatch,
    SilentFallback,
    UnsupportedOperator,
)
from pippin.nn.kv_cache import NoCache
from pippin.shape.export import (
    ExportedModel,
    LinearQuantization,
    Palettization,
    Variant,
    capture_decoder,
    choose_backend,
    compress,
    generate_interface,
    profile,
)
from pippin.shape.export.backends import find
from pippin.shape.export.compiled_model import operator_at_fault, require_device, require_precision

from ...language.families.checkpoints import read, save_random

LIBRARIES = {
    "onnxruntime": "onnxruntime",
    "openvino": "openvino",
    "coreai": "coreai_torch",
    "executorch": "executorch",
}


def needs(backend):
    return pytest.mark.skipif(find_spec(LIBRARIES[backend]) is None, reason=f"{backend} is not installed")


def skip_without(backend):
    if find_spec(LIBRARIES[backend]) is None:
        pytest.skip(f"{backend} is not installed")


@pytest.fixture(scope="module")
def onnx(asset):
    skip_without("onnxruntime")
    with asset.to("onnxruntime", threads=1) as model:
        yield model


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino", "coreai"])
@pytest.mark.parametrize("config", [None, LinearQuantization(8), Palettization(4)], ids=str)
def test_a_back_end_computes_what_torch_does(asset, backend, config):
    skip_without(backend)
    chosen = asset if config is None else compress(asset, config)
    with chosen.to(backend) as model, torch.no_grad():
        for rows in (1, 7, 64):
            x = torch.randn(rows, 1, 8, 8)
            torch.testing.assert_close(model(picture=x), chosen.module()(x), rtol=1e-5, atol=1e-5)
        if backend != "coreai" and config == LinearQuantization(8):
            assert model.nbytes < 0.45 * asset.nbytes


@needs("executorch")
@pytest.mark.slow
def test_executorch_runs_every_batch_that_the_signature_allows(asset):
    with asset.to("executorch") as model, torch.no_grad():
        for rows in (1, 16, 64):
            x = torch.randn(rows, 1, 8, 8)
            torch.testing.assert_close(model(picture=x), asset.module()(x), rtol=1e-5, atol=1e-5)
        assert "xnnpack" in model.provider_map().values()


@pytest.mark.nightly
@needs("onnxruntime")
def test_a_decoder_with_streams_windows_and_shared_caches_gives_the_logits_of_torch(tmp_path, monkeypatch):
    save_random("gemma3n_text", tmp_path)  # a window of 6 tokens, a KV cache for each of the first three layers only
    decoder = read(tmp_path).eval()
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    whole = capture_decoder(decoder, context=64, max_batch_size=4)
    monkeypatch.undo()
    seen = {}

    class Keeping(NoCache):
        def append(self, layer, k, v, window):
            seen[layer] = k, v
            return super().append(layer, k, v, window)

    with whole.to("onnxruntime") as model, torch.no_grad():
        for length in (4, 9, 20):  # within the window, and beyond it
            ids = torch.randint(0, 250, (2, length))
            wanted = decoder(ids)
            torch.testing.assert_close(model(ids=ids), wanted, rtol=1e-5, atol=2e-5)
        decoder(ids[:, :-1], cache=Keeping())
        own = decoder.config.cached_layers
        assert len(own) == 3 < len(decoder.layers)
        keys, values = (torch.stack([seen[layer][part] for layer in own]) for part in (0, 1))
        found = model.run("step", ids=ids[:, -1:].contiguous(), keys=keys, values=values)
        torch.testing.assert_close(found["logits"][:, 0], wanted[:, -1], rtol=1e-5, atol=2e-5)


@needs("onnxruntime")
def test_a_decoder_and_its_step_give_the_logits_of_the_whole(monkeypatch):
    decoder = tiny_model.build().module
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the checker takes no symbolic sizes for numbers
    whole = capture_decoder(decoder, context=64, max_batch_size=4)
    monkeypatch.undo()
    with whole.to("onnxruntime") as model, torch.no_grad():
        ids = torch.randint(0, 260, (2, 9))
        wanted = decoder(ids)
        torch.testing.assert_close(model(ids=ids), wanted, rtol=1e-5, atol=1e-5)
        seen = []

        def keep(cache_module, given, output):
            seen.append(output[1][:2])

        hooks = [layer.self_attn.register_forward_hook(keep) for layer in decoder.layers]
        decoder(ids[:, :8])
        for hook in hooks:
            hook.remove()
        keys, values = (torch.stack([read[part] for read in seen]) for part in (0, 1))
        found = model.run("step", ids=ids[:, 8:].contiguous(), keys=keys, values=values)
        torch.testing.assert_close(found["logits"][:, 0], wanted[:, 8], rtol=1e-5, atol=1e-5)
        assert found["keys"].shape[3] == 9


@needs("onnxruntime")
def test_a_report_names_modules_adds_up_and_draws(asset, tmp_path):
    report = profile(asset, ["torch", "onnxruntime", "coreml"], sizes={"batch": 64}, warmup=2, runs=5)
    for label in ("torch", "onnxruntime"):
        assert sum(row["share"] for row in report.rows() if row["label"] == label) == pytest.approx(1.0)
        modules = {row["module"] for row in report.rows("module") if row["label"] == label}
        assert {"fc1", "fc2", "unattributed"} <= modules
    flops = {row.name: row.flops for row in report.operators if row.label == "torch"}
    assert flops["linear"] == 2 * 64 * 512 * 32
    assert flops["conv2d"] == 2 * 64 * 64 * 9 * 8
    assert report.backend("onnxruntime").max_error < 1e-5
    assert report.backend("onnxruntime").fallbacks == ()
    if platform.system() != "Darwin":
        assert "macOS only" in report.backend("coreml").missing
    assert "unattributed" in report.to_table("module")
    report.plot(tmp_path / "report.png")
    assert (tmp_path / "report.png").stat().st_size > 1000
    assert report.compare(report) == {"torch": 1.0, "onnxruntime": 1.0}
    with pytest.raises(ExportError, match=r"onnxruntime takes .* ms"):
        report.check(max_p90_ms=0.0)
    with pytest.raises(ExportError, match=r"no backend is within .*torch: its error"):
        choose_backend(report, max_error=-1.0)


@needs("openvino")
def test_the_dispatcher_refuses_a_back_end_that_is_not_exact_enough(asset):
    try:
        report = profile(asset, ["torch", Variant("openvino", {"precision": "bfloat16"}, "bf16")], runs=2, warmup=0)
    except PrecisionMismatch:
        pytest.skip("this processor has no bfloat16")
    assert choose_backend(report, max_error=1e-5).label == "torch"
    assert "over" in choose_backend(report, max_error=1e-5).refused["bf16"]
    assert report.backend("bf16").precision == "bfloat16"


def test_calls_over_bound_memory_compute_the_same_and_allocate_no_tensor(asset, onnx):
    from torch.profiler import ProfilerActivity, profile as watch

    from pippin.shape.export.backends.onnxruntime import StaticCall

    call = StaticCall(onnx, {"batch": 3})
    call.inputs["picture"].normal_()
    call()
    with torch.no_grad():
        torch.testing.assert_close(call.outputs["logits"], asset.module()(call.inputs["picture"]), rtol=1e-5, atol=1e-5)
    with watch(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    assert [event.name for event in seen.events() if event.name == "[memory]"] == []
    with pytest.raises(InvalidArgument, match=r"picture needs one size within batch=1\.\.64, got None"):
        StaticCall(onnx)


FILES = ("use.py", "digits.py")


def test_the_interface_is_typed_and_checks_before_the_back_end(asset, tmp_path, monkeypatch):
    path = tmp_path / FILES[1]
    generate_interface(asset, path, "Digits")
    (tmp_path / FILES[0]).write_text(
        "import torch\nfrom digits import Digits\n\n"
        "def f(model: Digits) -> torch.Tensor:\n    return model.main(picture=torch.zeros(1, 1, 8, 8))\n\n"
        "def g(model: Digits) -> int:\n    return model.main(image=torch.zeros(1))\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=skip", "--allow-subclassing-any", *FILES],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    wrong = [line for line in done.stdout.splitlines() if "error" in line and "Found" not in line]
    assert wrong
    assert all(line.startswith("use.py:8") for line in wrong), done.stdout
    monkeypatch.syspath_prepend(tmp_path)
    model = importlib.import_module("digits").Digits(asset, backend="torch")
    monkeypatch.setattr(model.compiled, "execute", lambda *_: pytest.fail("the backend was called"))
    with pytest.raises(SignatureMismatch, match="float64, not float32"):
        model.main(picture=torch.zeros(1, 1, 8, 8).double())
    with pytest.raises(SignatureMismatch, match="outside batch"):
        model.main(picture=torch.zeros(65, 1, 8, 8))
    with pytest.raises(TypeError, match="image"):
        model.main(image=torch.zeros(1))
    with pytest.raises(InvalidArgument, match="'class'"):
        generate_interface(asset, path, "class")


def test_what_is_not_installed_is_named(asset, monkeypatch, tmp_path):
    real = importlib.import_module

    def missing(name, *more):
        if name.split(".")[0] in ("onnx", "openvino", "coreai_torch", "executorch", "coremltools"):
            raise ImportError(name)
        return real(name, *more)

    monkeypatch.setattr("pippin.shape.export.compiled_model.importlib.import_module", missing)
    for backend, wheel in (("onnxruntime", "onnx"), ("openvino", "openvino"), ("coreai", "coreai-torch")):
        with pytest.raises(BackendUnavailable, match=rf"'{backend}' needs {wheel}: pip install"):
            asset.to(backend)
    with pytest.raises(BackendUnavailable, match="coremltools"):
        find("coreml").write(asset, tmp_path / "a.mlpackage")
    if platform.system() != "Darwin":
        with pytest.raises(BackendUnavailable, match="macOS only"):
            asset.to("coreml")
    with pytest.raises(InvalidArgument, match=r"backend must be 'torch', .* got 'tpu'"):
        asset.to("tpu")
    with pytest.raises(InvalidArgument, match="'torch' has no option 'fast'"):
        asset.to("torch", fast=True)


def test_a_precision_or_a_device_other_than_asked_is_refused():
    with pytest.raises(PrecisionMismatch, match="asked to compute in float32 and computes in bfloat16"):
        require_precision("openvino", "float32", "bfloat16")
    with pytest.raises(SilentFallback, match=r"asked for cuda only, but put elsewhere: node_1 \(cpu\)"):
        require_device("onnxruntime", "cuda", ["node_1 (cpu)"])


@needs("onnxruntime")
def test_a_device_that_is_not_here_is_no_silent_fallback(asset):
    runtime = importlib.import_module("onnxruntime")
    if "CUDAExecutionProvider" in runtime.get_available_providers():
        pytest.skip("there is one")
    with pytest.raises(SilentFallback, match="cuda only"):
        asset.to("onnxruntime", device="cuda", strict=True)


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        return self.inner(x)


class Inner(nn.Module):
    def forward(self, x):
        return torch.special.bessel_j0(x) + 1


def test_an_operator_without_a_form_is_named_with_its_module_and_line():
    odd = ExportedModel.capture(Odd(), {"x": torch.randn(3)})
    told = operator_at_fault(odd, "main", "No decompositions registered for aten.special_bessel_j0.default")
    assert told.startswith("aten.special_bessel_j0.default in inner (test_backends.py:")
    skip_without("onnxruntime")
    with pytest.raises(UnsupportedOperator, match=r"special_bessel_j0\.default in inner \(test_backends\.py:\d+\)"):
        odd.to("onnxruntime")


def test_core_ml_is_written_anywhere_and_its_specification_fits(asset):
    if find_spec("coremltools") is None:
        pytest.skip("coremltools is not installed")
    from pippin.shape.export.backends.coreml import convert

    spec = convert(asset).get_spec()
    assert [port.name for port in spec.description.input] == ["picture"]
    assert [port.name for port in spec.description.output] == ["logits"]
    ranges = spec.description.input[0].type.multiArrayType.shapeRange.sizeRanges
    assert (ranges[0].lowerBound, ranges[0].upperBound) == (1, 64)
