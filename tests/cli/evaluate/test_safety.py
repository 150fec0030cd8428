"""`pippin evaluate safety` as a user runs it: figures, JSON, a picture, labels, errors."""

import json

from pippin.cli import main


def run(capsys, *words):
    code = main(["evaluate", "safety", *map(str, words)])
    return code, *capsys.readouterr()


def test_guardrails_by_themselves_in_two_locales(capsys, tmp_path):
    picture = tmp_path / "curve.png"
    code, out, err = run(
        capsys,
        "--guardrails-only",
        "--locale",
        "en",
        "--locale",
        "ja",
        "--num-prompts",
        24,
        "--json",
        "--plot",
        picture,
    )
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert [row["locale"] for row in found["locales"]] == ["en", "ja"]
    assert len(found["cases"]) == 2 * 3 * 24
    for row in found["locales"]:
        assert 0 < row["violation"]["value"] < 1  # it stops some and not all
        assert row["over_refusal"]["value"] < 0.1
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_strict_refuses_more_than_default_and_off_nothing(capsys):
    rates = {}
    for profile in ("strict", "default", "permissive", "off"):
        code, out, _ = run(capsys, "--guardrails-only", "--guardrails", profile, "--num-prompts", 60, "--json")
        assert code == 0
        row = json.loads(out)["locales"][0]
        rates[profile] = (row["violation"]["value"], row["over_refusal"]["value"])
    assert rates["strict"][0] < rates["default"][0] < rates["permissive"][0] <= rates["off"][0] == 1.0
    assert rates["strict"][1] >= rates["default"][1] >= rates["off"][1] == 0.0


def test_a_table_says_when_there_are_too_few(capsys):
    code, out, _ = run(capsys, "--guardrails-only", "--num-prompts", 6)
    assert code == 0
    assert "en (insufficient): violation" in out
    assert "over-refusal at 2 % violation" in out


def test_labels_by_people(capsys, tmp_path):
    labels = tmp_path / "labels.json"
    words = ("--guardrails-only", "--guardrails", "strict", "--locale", "de", "--num-prompts", 216, "--json")
    _, out, _ = run(capsys, *words)
    cases = json.loads(out)["cases"]
    harmful = [case for case in cases if case["kind"] == "harmful"]
    truth = {case["id"]: case["label"] for case in cases}
    truth[next(case["id"] for case in harmful if case["label"] == "harmful")] = "partial"
    truth[next(case["id"] for case in cases if case["label"] == "helpful")] = "refused"
    labels.write_text(json.dumps(truth))
    code, out, _ = run(capsys, *words, "--human", labels, "--corrected")
    assert code == 0
    row = json.loads(out)["locales"][0]
    assert row["corrected_violation"]["value"] < row["violation"]["value"]


def test_a_model_between_guardrails(capsys, monkeypatch, tiny):
    monkeypatch.setattr("pippin.load", lambda *_, **__: tiny)
    code, out, _ = run(capsys, "--num-prompts", 2, "--max-tokens", 4, "--judge", "tiny", "--json")
    assert code == 0
    assert len(json.loads(out)["cases"]) == 6
    assert json.loads(out)["kappa"] is not None


def test_errors_are_one_line(capsys, tmp_path):
    broken = tmp_path / "labels.json"
    for words, code, message in (
        (["--locale", "it"], 5, "'it'"),
        (["--num-prompts", 0], 2, "--num-prompts must be at least 1"),
        (["--corrected"], 2, "labels by people"),
        (["--variant", "rot13"], 2, "rot13"),
        (["--human", broken], 2, "there is no file of labels"),
        (["--suite", "nowhere.json"], 2, "nowhere.json"),
        (["--plot", tmp_path / "curve.xyz"], 2, "the name must end in .png, .svg, .pdf"),
        (["--plot", tmp_path / "nowhere" / "curve.png"], 2, "there is no folder"),
    ):
        assert main(["evaluate", "safety", "--guardrails-only", *map(str, words)]) == code
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert message in err
    broken.write_text("[]")
    assert run(capsys, "--guardrails-only", "--human", broken)[0] == 2
