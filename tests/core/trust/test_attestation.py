"""Quotes, their signatures, the log and the policy: each check fails with its own error, and only for its own cause."""

import dataclasses
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from pippin.core.errors import (
    BadSignature,
    CorruptedFile,
    InvalidArgument,
    InvalidInput,
    ModelMismatch,
    NotInLog,
    ReplayedQuote,
    SettingsMismatch,
    StaleQuote,
    UnknownMeasurement,
)
from pippin.core.trust import attestation, merkle
from pippin.core.trust.attestation import AttestationPolicy, Quote, SoftwareRoot, TransparencyLog, model_hash

NOW = 1_800_000_000.0
CODE, MODEL, NONCE, KEY = ("11" * 32, "22" * 32, "33" * 32, "44" * 32)
ROOT = SoftwareRoot.create()
LOG = TransparencyLog().add("aa" * 32).add(CODE, version="1").add("bb" * 32)
GOOD = Quote(CODE, {"m": MODEL}, {"stateless": True, "log_prompts": False}, KEY, NONCE, NOW - 5)
POLICY = AttestationPolicy([CODE], [ROOT.public], log_root=LOG.root, models={"m": MODEL})


def judge(document, *, policy=POLICY, model="m", nonce=NONCE, now=NOW):
    return policy.check(document, nonce=nonce, model=model, now=now)


def quoted(root=ROOT, log=LOG, **changes):
    quote = dataclasses.replace(GOOD, **changes)
    return root.sign(quote, log.prove(quote.measurement))


def test_a_good_quote_is_accepted_after_a_trip_through_json():
    assert judge(json.loads(json.dumps(quoted()))) == GOOD


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"nonce": "55" * 32}, ReplayedQuote),
        ({"time": NOW - 601}, StaleQuote),
        ({"time": NOW + 60}, StaleQuote),
        ({"time": float("nan")}, StaleQuote),
        ({"measurement": "66" * 32}, UnknownMeasurement),
        ({"settings": {"stateless": False, "log_prompts": False}}, SettingsMismatch),
        ({"settings": {}}, SettingsMismatch),
        ({"models": {"m": "77" * 32}}, ModelMismatch),
        ({"models": {"other": MODEL}}, ModelMismatch),
        ({"root": "tpm"}, BadSignature),
        ({"models": ["m"]}, BadSignature),
        ({"key": "no key"}, BadSignature),
    ],
)
def test_each_cause_has_its_error(changes, error):
    quote = dataclasses.asdict(GOOD) | changes
    statement = json.dumps(quote)
    signature = ROOT._private.sign(b"pippin quote 1\n" + statement.encode()).hex()
    document = {"statement": statement, "signer": ROOT.public, "signature": signature, "inclusion": LOG.prove(CODE)}
    with pytest.raises(error) as caught:
        judge(document)
    assert type(caught.value) is error


def test_a_changed_quote_has_a_bad_signature():
    document = quoted()
    document["statement"] = document["statement"].replace(MODEL, "77" * 32)
    with pytest.raises(BadSignature, match="changed after it was signed"):
        judge(document)


def test_a_root_that_is_not_trusted_signs_nothing():
    with pytest.raises(BadSignature, match="none of the policy's roots"):
        judge(quoted(SoftwareRoot.create()))
    document = quoted(SoftwareRoot.create()) | {"signer": ROOT.public}
    with pytest.raises(BadSignature, match="does not fit"):
        judge(document)


@pytest.mark.parametrize(
    "document", [None, [], {}, {"statement": 1, "signer": ROOT.public, "signature": "zz"}, "quote"]
)
def test_what_is_no_quote_is_refused(document):
    with pytest.raises(BadSignature):
        judge(document)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda proof: None,
        lambda proof: {},
        lambda proof: proof | {"index": 0},
        lambda proof: proof | {"index": "x"},
        lambda proof: proof | {"index": float("inf")},  # which is a number in Python's JSON
        lambda proof: proof | {"path": proof["path"][:-1]},
        lambda proof: proof | {"entry": TransparencyLog().add(CODE, version="2").entries[0].decode()},
        lambda proof: LOG.prove("aa" * 32),  # a true proof, of other software
        lambda proof: TransparencyLog().add(CODE).prove(CODE),  # a true proof, in a log of the node's own
    ],
)
def test_a_proof_must_show_this_software_in_that_log(spoil):
    document = quoted()
    document["inclusion"] = spoil(document["inclusion"])
    with pytest.raises(NotInLog):
        judge(document)
    judge(document, policy=dataclasses.replace(POLICY, require_log=False))


def test_a_model_is_known_by_the_catalog_or_the_policy():
    (file,) = attestation.catalog.find("smollm2-135m").files
    judge(quoted(models={"smollm2-135m": file.sha256}), model="smollm2-135m")
    with pytest.raises(ModelMismatch, match="serves another"):
        judge(quoted(models={"smollm2-135m": MODEL}), model="smollm2-135m")
    with pytest.raises(ModelMismatch, match="no hash to know"):
        judge(quoted(models={"mine": MODEL}), model="mine")


@pytest.mark.parametrize(
    "change",
    [
        {"measurements": []},
        {"measurements": CODE},
        {"measurements": ["AA" * 32]},
        {"roots": ["1234"]},
        {"max_age": 0},
        {"max_age": float("inf")},
        {"log_root": None},
        {"log_root": "x"},
        {"models": {"m": "x"}},
    ],
)
def test_a_policy_that_cannot_hold_is_refused(change):
    with pytest.raises(InvalidArgument):
        dataclasses.replace(POLICY, **change)


# --- binding and measuring --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change", [{"measurement": "0" * 64}, {"models": {"m": "0" * 64}}, {"settings": {}}, {"key": "0" * 64}]
)
def test_the_binding_holds_the_whole_state(change):
    assert dataclasses.replace(GOOD, **change).binding != GOOD.binding
    assert dataclasses.replace(GOOD, nonce="0" * 64, time=0.0).binding == GOOD.binding


def test_a_folder_hashes_as_sha256sum_lists_it(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.bin", ".hidden"):
        (tmp_path / name).write_bytes(name.encode())
    listing = subprocess.run(["sha256sum", "a.txt", "b.txt", "sub/c.bin"], cwd=tmp_path, capture_output=True).stdout
    assert model_hash(tmp_path) == hashlib.sha256(listing).hexdigest()
    assert model_hash(tmp_path / "a.txt") == hashlib.sha256(b"a.txt").hexdigest()
    with pytest.raises(InvalidInput):
        model_hash(tmp_path / "nothing")


def test_the_measurement_depends_on_every_file_and_on_versions(tmp_path, monkeypatch):
    package = tmp_path / "pippin" / "core" / "trust"
    package.mkdir(parents=True)
    monkeypatch.setattr(attestation, "__file__", str(package / "attestation.py"))
    found = []
    for content in (b"one", b"two"):
        (package / "attestation.py").write_bytes(content)
        found.append(attestation.measure.__wrapped__())
    (package / "attestation.pyc").write_bytes(b"compiled")
    found.append(attestation.measure.__wrapped__())
    monkeypatch.setattr(attestation, "versions", lambda: {"torch": "0"})
    found.append(attestation.measure.__wrapped__())
    assert found[1] == found[2]
    assert len(set(found)) == 3


def test_versions_are_those_of_a_server_and_not_of_the_tests():
    found = attestation.versions()
    assert {"python", "pippin", "torch", "fastapi", "cryptography"} <= set(found)
    assert "pytest" not in found


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_root_key_is_kept_in_a_file_that_only_its_owner_reads(tmp_path):
    path = tmp_path / "root.pem"
    made = SoftwareRoot.create(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert judge(
        SoftwareRoot.load(path).sign(GOOD, LOG.prove(CODE)), policy=dataclasses.replace(POLICY, roots=[made.public])
    )
    with pytest.raises(InvalidInput, match="never replaced"):
        SoftwareRoot.create(path)
    path.chmod(0o644)
    with pytest.raises(InvalidInput, match="others can read"):
        SoftwareRoot.load(path)


def test_what_is_no_root_key_is_refused(tmp_path):
    path = tmp_path / "root.pem"
    with pytest.raises(InvalidInput, match="cannot read"):
        SoftwareRoot.load(path)
    path.write_text("no key")
    path.chmod(0o600)
    with pytest.raises(CorruptedFile):
        SoftwareRoot.load(path)
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    path.write_bytes(X25519PrivateKey.generate().private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption()))
    with pytest.raises(CorruptedFile, match="Ed25519"):
        SoftwareRoot.load(path)


def test_a_log_grows_in_a_file_and_serves_those_who_pinned_it_earlier(tmp_path):
    path = tmp_path / "log.jsonl"
    LOG.write(path)
    grown = TransparencyLog.read(path).add("cc" * 32)
    assert grown.extends(LOG.root)
    assert not TransparencyLog().add("cc" * 32).extends(LOG.root)
    judge(ROOT.sign(GOOD, grown.prove(CODE, LOG.root)))
    assert grown.prove("cc" * 32, LOG.root) is None  # it was not in the log yet
    assert grown.prove(CODE, "0" * 64) is None
    assert grown.root == merkle.root_hash([*path.read_bytes().split(b"\n")[:-1], grown.entries[-1]]).hex()


@pytest.mark.parametrize("text", ["no json\n", '{"measurement": 1}\n', "[]\n", '{"measurement": "' + CODE + '"}'])
def test_a_damaged_log_is_refused(tmp_path, text):
    (tmp_path / "log.jsonl").write_text(text)
    with pytest.raises(CorruptedFile):
        TransparencyLog.read(tmp_path / "log.jsonl")
    with pytest.raises(InvalidInput):
        TransparencyLog.read(tmp_path / "nothing")
    with pytest.raises(InvalidArgument):
        TransparencyLog().add(text)


def test_importing_it_needs_no_cryptography():
    code = "import sys, pippin.core.trust.attestation, pippin.core.trust.sealing; print('cryptography' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent)
    assert done.stdout.strip() == "False", done.stderr
