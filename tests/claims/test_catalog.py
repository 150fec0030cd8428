"""Claims are read without importing them, and what is read is what runs."""

import subprocess
import sys

import pytest

from pippin.claims import catalog, runner
from pippin.core.errors import ClaimError

TOY = '''
from pippin.claims import Condition, Evidence, Scale, claim
from pippin.train import Trainer

raise SystemExit("imported")

LIMIT, OTHER = 0.5, 1
MORE = ("prior",)

def close(e, arm):
    """Near the limit."""
    return e.mean("a", arm) < LIMIT

@claim(
    id="toy",
    source="s",
    headline="it " "is " + "close",
    setting=f"limit {LIMIT:.2f}",
    method="soup",
    negative_controls=("mean", *MORE),
    conditions=[
        Condition("close", f"below {LIMIT}", close, headline=True),
        Condition("other", "b", lambda e, arm: e.mean("b", arm) > 0),
    ],
    uses=("pippin.metrics.calibration",),
)
def run(scale: Scale) -> Evidence:
    return Evidence()
'''


@pytest.fixture
def toy(tmp_path):
    path = tmp_path / "toy.py"
    path.write_text(TOY)
    return path


def test_a_claim_is_read_without_running_its_file(toy):
    stated = catalog.get(str(toy))
    assert (stated.id, stated.headline, stated.setting) == ("toy", "it is close", "limit 0.50")
    assert stated.rule.negative_controls == ("mean", "prior")
    assert [(c.name, c.text, c.headline) for c in stated.rule.conditions] == [
        ("close", "below 0.5", True),
        ("other", "b", False),
    ]


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ('e.mean("a", arm) < LIMIT', 'e.mean("a", arm) <= LIMIT', False),
        ("LIMIT, OTHER = 0.5, 1", "LIMIT, OTHER = 0.6, 1", False),
        ('"b", lambda e, arm: e.mean("b", arm) > 0', '"b", lambda e, arm: e.mean("b", arm) > -1', False),
        ('MORE = ("prior",)', 'MORE = ("posterior",)', False),
        (", headline=True", "", False),
        ('lambda e, arm: e.mean("b", arm) > 0', "lambda e, arm: (e.mean('b', arm) > 0)", True),
        ('source="s"', 'source="t"', True),
        ("Near the limit.", "Closer than the limit.", True),
    ],
)
def test_the_hash_of_a_rule_covers_text_and_predicates_and_what_they_reach(toy, old, new, same):
    before = catalog.get(str(toy)).rule.hash
    assert old in TOY
    toy.write_text(TOY.replace(old, new))
    assert (catalog.get(str(toy)).rule.hash == before) is same


def test_modules_are_the_file_its_imports_and_what_it_names(toy):
    found = catalog.modules(catalog.get(str(toy)))
    assert set(found) == {"toy", "pippin.train.trainer", "pippin.metrics.calibration"}


def test_worlds_and_what_they_import_count():
    found = catalog.modules(catalog.get("rope-sbi"))
    assert {"pippin.claims.bayes.rope_sbi", "pippin.bayes.simulation.npe"} <= set(found)
    assert not {
        name for name in found if name.startswith("pippin.claims.") and "." not in name[len("pippin.claims.") :]
    }


PLAIN = "LIMIT = 1\n\ndef f(x):\n    return {'limit': x + LIMIT}\n"


@pytest.mark.parametrize(
    ("text", "same"),
    [
        (f'"""Doc."""\n\n# note\n{PLAIN}', True),
        (PLAIN.replace("    return", '    """Doc\n    of two lines."""\n    return'), True),
        (PLAIN.replace("LIMIT = 1\n", 'LIMIT = 1  # the reason\n"""What it limits."""\n'), True),
        (PLAIN.replace("{'limit': x + LIMIT}", '{\n        "limit": (x + LIMIT),\n    }'), True),
        (PLAIN.replace("x + LIMIT", "x - LIMIT"), False),
        (PLAIN.replace("'limit'", "'# limit'"), False),
        (PLAIN.replace("LIMIT = 1\n", "LIMIT = 2\n"), False),
    ],
)
def test_only_code_changes_the_hash_of_a_module(tmp_path, text, same):
    plain, changed = tmp_path / "plain.py", tmp_path / "changed.py"
    plain.write_text(PLAIN)
    changed.write_text(text)
    assert (catalog.content_hash(changed) == catalog.content_hash(plain)) is same


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('source="s"', "source=str(1)", "'source' is not a literal"),
        ("conditions=[", "conditions=list([", "written out as a list"),
        ('Condition("other"', 'Other("other"', "written out as a list"),
        ("def run", "def run(:", "cannot be read as a claim"),
        ("@claim(", "@other(", "holds none"),
    ],
)
def test_what_cannot_be_read_is_named(toy, old, new, message):
    text = TOY.replace(old, new)
    toy.write_text(text.replace("    ],\n", "    ]),\n") if "list([" in new else text)
    with pytest.raises(ClaimError, match=message):
        catalog.get(str(toy))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ClaimError, match=r"nowhere\.py cannot be read"):
        catalog.get(str(tmp_path / "nowhere.py"))


@pytest.mark.parametrize("stated", catalog.find().values(), ids=lambda stated: stated.id)
def test_what_is_read_of_a_claim_is_what_runs(stated):
    one = runner.load(stated)
    assert (one.source, one.headline, one.setting) == (stated.source, stated.headline, stated.setting)
    assert (one.method, one.negative_controls, one.positive_control, one.version) == (
        stated.rule.method,
        stated.rule.negative_controls,
        stated.rule.positive_control,
        stated.rule.version,
    )
    assert [(c.name, c.text, c.headline, c.positive) for c in one.conditions] == [
        (c.name, c.text, c.headline, c.positive) for c in stated.rule.conditions
    ]
    assert catalog.modules(stated)


def test_listing_claims_imports_none_and_no_torch():
    code = (
        "import sys; from pippin.claims import catalog; catalog.find();"
        "print([n for n in sys.modules if n == 'torch' or n.startswith('pippin.claims.') and n.count('.') > 2])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
