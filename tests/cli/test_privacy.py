"""`pippin privacy` and `pippin attest`: the report, and the files that a client's policy is made from."""

import json

import pytest
import typer
from typer.testing import CliRunner

from pippin.cli.attest import app as attest
from pippin.cli.privacy import privacy
from pippin.core.errors import CorruptedFile, InvalidInput, NotInLog
from pippin.core.trust import attestation
from pippin.core.trust.attestation import SoftwareRoot, TransparencyLog
from pippin.core.trust.privacy import privacy_report

RUN = CliRunner()
REPORT = typer.Typer()
REPORT.command()(privacy)


def run(app, *words):
    done = RUN.invoke(app, [str(word) for word in words])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.stdout


def test_the_report_has_every_promise_and_its_reason():
    shown = " ".join(run(REPORT).split())
    for line in privacy_report().lines:
        assert line.promise in shown
        assert line.status in shown
    found = json.loads(run(REPORT, "--json"))
    assert [line["promise"] for line in found["lines"]] == [line.promise for line in privacy_report().lines]
    assert found["findings"]["system"] == privacy_report().findings.system


def test_from_a_key_to_a_pinned_log(tmp_path):
    key, log = tmp_path / "root.pem", tmp_path / "log.jsonl"
    assert run(attest, "key", key).strip() == SoftwareRoot.load(key).public
    assert run(attest, "measure").strip() == attestation.measure()
    assert run(attest, "measure", key).strip() == attestation.model_hash(key)
    TransparencyLog().add("aa" * 32).write(log)
    first = run(attest, "log", log).split()[1]
    size, root = run(attest, "log", log, "--add", "--extends", first).split()
    assert (size, root) == ("2", TransparencyLog.read(log).root)
    assert run(attest, "log", log, "--add").split() == ["2", root]  # it is in already
    assert TransparencyLog.read(log).prove(attestation.measure(), root)["index"] == 1


def test_what_is_wrong_is_refused(tmp_path):
    key, log = tmp_path / "root.pem", tmp_path / "log.jsonl"
    run(attest, "key", key)
    run(attest, "log", log, "--add")
    with pytest.raises(InvalidInput, match="never replaced"):
        run(attest, "key", key)
    with pytest.raises(NotInLog, match="never had"):
        run(attest, "log", log, "--extends", "00" * 32)
    with pytest.raises(InvalidInput):
        run(attest, "log", tmp_path / "nothing")
    for words in (["key", tmp_path / "no" / "key"], ["log", tmp_path / "no" / "log", "--add"]):
        with pytest.raises(InvalidInput, match="cannot be written"):
            run(attest, *words)
    log.write_text(log.read_text()[:-1])
    with pytest.raises(CorruptedFile, match="cut off"):
        run(attest, "log", log)
