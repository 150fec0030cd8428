"""The machine as the system itself describes it: fake /proc and /sys trees with known answers, and this machine."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from pippin.core import device
from pippin.core.errors import InvalidArgument
from pippin.core.threads import use_threads

SAPPHIRE_RAPIDS = (
    "model name\t: Intel(R) Xeon(R) 8481C\nflags\t\t: fpu fma avx2 f16c avx512f avx512_bf16 amx_bf16 amx_tile\n"
)
HASWELL = "model name\t: Intel(R) Core(TM) i7-4770\nflags\t\t: fpu fma avx2 f16c\n"
GRAVITON_3 = "processor\t: 0\nFeatures\t: fp asimd asimddp fphp sve i8mm bf16\n"
GRAVITON_2 = "processor\t: 0\nFeatures\t: fp asimd asimddp fphp\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("cpuinfo", "sets", "fast"),
    [
        (SAPPHIRE_RAPIDS, {"avx2", "fma", "f16c", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16"}, True),
        (HASWELL, {"avx2", "fma", "f16c"}, False),
        (GRAVITON_3, {"neon", "dotprod", "fp16", "sve", "i8mm", "bf16"}, True),
        (GRAVITON_2, {"neon", "dotprod", "fp16"}, False),
        ("", set(), False),
    ],
)
def test_instruction_sets_decide_fast_bf16(monkeypatch, cpuinfo, sets, fast):
    found = device._parse_instruction_sets(cpuinfo)
    monkeypatch.setattr(device, "instruction_sets", lambda: found)
    assert set(found) == sets
    assert device.has_fast_bf16() is fast
    assert device.has_fast_bf16(torch.device("cpu")) is fast


@pytest.mark.parametrize(("capability", "fast"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_fast_bf16_on_cuda_begins_with_ampere(monkeypatch, capability, fast):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert device.has_fast_bf16(torch.device("cuda:0")) is fast


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="affinity is a Linux matter")
def test_threads_count_physical_cores_among_the_allowed(monkeypatch, tmp_path):
    # 4 processors, two on each core: 0 with 2, 1 with 3.
    pairs = {0: "0,2\n", 1: "1,3\n", 2: "0,2\n", 3: "1,3\n"}
    tree(tmp_path, {f"sys/devices/system/cpu/cpu{i}/topology/thread_siblings_list": t for i, t in pairs.items()})
    for allowed, cores in (({0, 1, 2, 3}, 2), ({0, 2}, 1), ({0, 3}, 2), ({1}, 1)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, allowed=allowed: allowed)
        assert device.threads(tmp_path) == cores


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="affinity is a Linux matter")
@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        # The parent group's limit binds, though the process's own has none.
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
            },
            3,
        ),
        # Version 1, seen from inside a container: the named path does not exist, the mount's top holds the limit.
        (
            {
                "proc/self/cgroup": "5:memory:/docker/ff\n4:cpu,cpuacct:/docker/ff\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
        ({}, 8),
    ],
)
def test_threads_keep_to_the_quota_of_the_control_group(monkeypatch, tmp_path, files, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert device.threads(tree(tmp_path, files)) == expected


def test_memory_is_the_smaller_of_machine_and_control_group(tmp_path):
    machine = psutil.virtual_memory().total
    assert device.memory(tmp_path).total == machine
    limited = {
        "proc/self/cgroup": "0::/x\n",
        "sys/fs/cgroup/x/memory.max": "1000000\n",
        "sys/fs/cgroup/x/memory.current": "400000\n",
    }
    assert device.memory(tree(tmp_path, limited)) == device.MemoryInfo(1_000_000, 600_000)
    older = {
        "proc/self/cgroup": "7:memory:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "400000\n",
    }
    assert device.memory(tree(tmp_path / "v1", older)).total == machine


def test_peak_memory_is_this_process_s_own_and_keeps_what_was_freed():
    script = (
        "from pippin.core.device import peak_memory\n"
        "before = peak_memory(); block = bytearray(300_000_000); block[::4096] = b'x' * len(block[::4096])\n"
        "del block; print(before, peak_memory())"
    )
    ballast = bytearray(400_000_000)
    ballast[::4096] = b"x" * len(ballast[::4096])  # a parent this large must not show in the child's figure
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before < 200_000_000
    assert 290_000_000 < after - before < 340_000_000


def test_facts_agree_with_torch_and_psutil():
    facts = device.machine_info()
    assert facts.logical_cores == os.cpu_count()
    assert 1 <= facts.threads <= facts.logical_cores
    assert facts.memory_total <= psutil.virtual_memory().total
    assert (facts.accelerators != ()) == (torch.cuda.is_available() or torch.backends.mps.is_available())
    capability = torch.backends.cpu.get_cpu_capability()  # "DEFAULT", "AVX2", "AVX512": torch's own reading of cpuid
    assert ("avx512f" in facts.instruction_sets) >= (capability == "AVX512")
    assert ("avx2" in facts.instruction_sets) >= (capability in {"AVX2", "AVX512"})


def test_choose_takes_what_is_there_and_names_it_otherwise(monkeypatch):
    assert device.choose("cpu") == torch.device("cpu")
    gpus = (device.Accelerator("cuda:0", "one", 1), device.Accelerator("cuda:1", "two", 1))
    monkeypatch.setattr(device, "accelerators", lambda: gpus)
    assert device.choose() == device.choose("auto") == device.choose("cuda") == torch.device("cuda:0")
    assert device.choose("cuda:1") == torch.device("cuda:1")
    with pytest.raises(InvalidArgument, match="'cuda:7' is not on this machine; use one of: cpu, cuda:0, cuda:1"):
        device.choose("cuda:7")
    monkeypatch.setattr(device, "accelerators", lambda: ())
    assert device.choose() == torch.device("cpu")
    with pytest.raises(InvalidArgument, match=r"device 'mps' is not on this machine; use one of: cpu"):
        device.choose("mps")


@pytest.mark.parametrize("name", ["gpu", "", "CPU", "cuda:", "cuda:x", "cpu; rm -rf /"])
def test_an_unknown_device_name_is_refused(name):
    with pytest.raises(InvalidArgument, match="is not known"):
        device.choose(name)


def test_processor_facts_need_no_torch():
    script = (
        "import sys; from pippin.core import device; device.instruction_sets(); device.cpu_name(); device.threads();"
        "device.memory(); device.has_fast_bf16(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_threads_of_torch_and_of_the_kernels_go_together(monkeypatch):
    from pippin.core import native

    asked = []
    monkeypatch.setattr(torch, "set_num_threads", lambda count: asked.append(("torch", count)))
    monkeypatch.setattr(native, "library", lambda: object())
    monkeypatch.setattr(native, "set_threads", lambda count: asked.append(("kernels", count)))
    monkeypatch.setattr(device, "threads", lambda: 8)
    use_threads(3)
    assert asked == [("torch", 3), ("kernels", 3)]
    asked.clear()
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    use_threads()
    assert asked == [("kernels", 2)], "torch has heeded it already"
    asked.clear()
    monkeypatch.delenv("OMP_NUM_THREADS")
    use_threads()
    assert asked == [("torch", 8), ("kernels", 8)]
    monkeypatch.setattr(native, "library", lambda: None)
    use_threads(1)
    assert asked[2:] == [("torch", 1)]
    for count in (0, 9, -1):
        with pytest.raises(InvalidArgument, match=f"{count} threads were requested; this process may use 1 to 8"):
            use_threads(count)
