"""The privacy report says what is found and nothing else; `harden` does what it says it did."""

import dataclasses
import json
import subprocess
import sys

import pytest

from pippin.core.trust import privacy
from pippin.core.trust.privacy import PrivacyFindings, detect, judge

BARE = PrivacyFindings(
    "Linux", swap=0, core_dumps="", dumpable=True, tpm=(), confidential_cpu="", network=(), virtual=False
)
DISK, SENDING, MEMORY, OPERATOR, PROOF = range(5)


def line(number: int, **changes):
    return judge(dataclasses.replace(BARE, **changes)).lines[number]


@pytest.mark.parametrize(
    ("number", "changes", "status", "reason"),
    [
        (DISK, {}, "kept", "no swap"),
        (DISK, {"swap": 2**30}, "best effort", "1024 MiB of swap"),
        (DISK, {"core_dumps": "core"}, "best effort", "'core'"),
        (DISK, {"swap": None}, "best effort", "cannot be seen"),
        (SENDING, {}, "kept", "no network interface"),
        (SENDING, {"network": ("eth0",)}, "best effort", "eth0"),
        (SENDING, {"network": None}, "best effort", "cannot be listed"),
        (SENDING, {"telemetry": ("LANGSMITH_TRACING",)}, "not kept", "LANGSMITH_TRACING"),
        (MEMORY, {"swap": 1}, "best effort", "swap is on"),
        (MEMORY, {"dumpable": False}, "best effort", "cannot read it"),
        (OPERATOR, {}, "not kept", "root can read"),
        (OPERATOR, {"virtual": True}, "not kept", "the host of this virtual machine"),
        (OPERATOR, {"container": "docker"}, "not kept", "docker"),
        (OPERATOR, {"confidential_cpu": "SEV-SNP"}, "best effort", "does not verify"),
        (PROOF, {}, "not kept", "no TPM"),
        (PROOF, {"tpm": ("tpm0",)}, "not kept", "is not used"),
    ],
)
def test_a_line_follows_from_the_facts(number, changes, status, reason):
    found = line(number, **changes)
    assert found.status == status
    assert reason in found.because


def test_no_fact_makes_the_operator_harmless_or_the_software_root_a_proof():
    best = dataclasses.replace(
        BARE, confidential_cpu="TDX", confidential_gpu="CC status: ON", tpm=("tpm0",), root=False, dumpable=False
    )
    statuses = {line.promise: line.status for line in judge(best).lines}
    assert statuses["the operator of the machine cannot read data"] != "kept"
    assert statuses["a client can verify what runs"] == "not kept"
    assert statuses["the operator cannot single out a user"] == "not kept"


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the facts are read from Linux' files")
class TestLinux:
    def test_a_machine_is_read_from_its_files(self, tmp_path):
        swaps = "Filename Type Size Used Priority\n/dev/sda2 partition 1024 0 -2\n/swap file 2048 0 -3\n"
        write(
            tmp_path,
            {
                "proc/swaps": swaps,
                "proc/sys/kernel/core_pattern": "|/usr/lib/systemd/systemd-coredump %P\n",
                "proc/self/status": "Name: x\nVmLck:\t  12 kB\n",
                "proc/cpuinfo": "flags : fpu hypervisor sse\n",
                "proc/1/cgroup": "0::/kubepods/burstable\n",
                "dev/tpm0": "",
                "dev/tpmrm0": "",
                "dev/sev-guest": "",
            },
        )
        facts = detect(tmp_path)
        assert facts.swap == 3072 * 1024
        assert facts.core_dumps.startswith("|/usr/lib")  # a pipe takes it whatever the limit is
        assert facts.locked_memory == 12 * 1024
        assert facts.virtual is True
        assert facts.container == "kubepods"
        assert facts.tpm == ("tpm0", "tpmrm0")
        assert facts.confidential_cpu == "SEV-SNP"

    @pytest.mark.parametrize(
        ("files", "expected"),
        [
            ({"dev/tdx_guest": ""}, "TDX"),
            ({"proc/cpuinfo": "flags : tdx_guest"}, "TDX"),
            ({"proc/cpuinfo": "flags : sev_es sme"}, ""),  # what the processor could do is not what this machine is
        ],
    )
    def test_a_confidential_machine_says_so_itself(self, tmp_path, files, expected):
        write(tmp_path, files)
        assert detect(tmp_path).confidential_cpu == expected

    def test_what_cannot_be_read_is_unknown(self, tmp_path):
        facts = detect(tmp_path)
        assert (facts.swap, facts.core_dumps) == (None, None)
        assert facts.tpm == ()

    def test_the_report_of_this_machine_agrees_with_its_files(self):
        facts = privacy.privacy_report().findings
        with open("/proc/swaps") as file:
            assert (facts.swap > 0) == (len(file.readlines()) > 1)
        with open("/proc/net/dev") as file:
            names = {each.split(":")[0].strip() for each in file.readlines()[2:]}
        assert set(facts.network) == names - {"lo"}

    def test_harden_leaves_no_core_and_the_report_says_so(self, tmp_path):
        """A process that is aborted leaves a core where cores are on, and none after `harden`."""
        code = (
            "import os, resource, sys, json\n"
            "from pippin.core.trust import privacy\n"
            "resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)\n"
            "before = privacy.detect().core_dumps\n"
            "done = privacy.harden() if sys.argv[1] == 'harden' else None\n"
            "print(json.dumps([before, privacy.detect().core_dumps, done and done.no_core_dumps]), flush=True)\n"
            "os.abort()\n"
        )
        reports = {}
        for mode in ("plain", "harden"):
            folder = tmp_path / mode
            folder.mkdir()
            done = subprocess.run([sys.executable, "-c", code, mode], cwd=folder, capture_output=True, text=True)
            reports[mode] = json.loads(done.stdout)
            assert done.returncode < 0
        assert reports["harden"][1:] == ["", True]
        assert not list((tmp_path / "harden").iterdir())
        if reports["plain"][1] == "core":  # this machine writes cores beside the process
            assert list((tmp_path / "plain").iterdir())


def test_what_a_system_refuses_is_said(monkeypatch):
    def refuse(*_):
        raise OSError("no")

    monkeypatch.setattr(privacy, "_no_cores", refuse)
    monkeypatch.setattr(privacy, "_prctl", lambda *_: -1)
    monkeypatch.setattr(privacy, "_swap", lambda _: 1)
    monkeypatch.setattr(privacy, "_lock_memory", lambda: False)
    assert privacy.harden() == privacy.Hardening(False, False, False)


@pytest.mark.parametrize(("answer", "expected"), [("CC status: OFF\n", "CC status: OFF"), (None, "not supported")])
def test_the_gpu_is_asked_through_the_drivers_tool(monkeypatch, tmp_path, answer, expected):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{'echo ' + repr(answer.strip()) if answer else 'exit 3'}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert privacy._confidential_gpu() == expected
    monkeypatch.setenv("PATH", "")
    assert privacy._confidential_gpu() == ""
