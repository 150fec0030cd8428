"""What tests of Triton kernels share: the interpreter where there is no GPU, and a compiler for GPUs elsewhere."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

GPU = torch.cuda.is_available()
if not GPU:  # read when triton is first imported
    os.environ["TRITON_INTERPRET"] = "1"
DEVICE = "cuda" if GPU else "cpu"
kernels = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

_COMPILER = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

def compiled(kernel, types, constants):
    held = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {name: "constexpr" if name in held else types[name] for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=held)
    found = triton.compile(source, target=GPUTarget("cuda", 80, 32))
    assert "cubin" in found.asm
    return found
"""


def compile_for_a_gpu(script):
    """Run a script that calls ``compiled``; in a process of its own, since interpreting is decided at the import."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILER + script + "\nprint('compiled')"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=environment,
    )
    assert done.stdout == "compiled\n", done.stderr
