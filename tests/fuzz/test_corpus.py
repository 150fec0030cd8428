"""Every input that the fuzzer kept, given to its target again: only typed errors, as `tools/fuzz.py` says."""

import fuzz
import pytest

KEPT = [(name, path) for name in fuzz.TARGETS for path in sorted((fuzz.CORPUS / name).glob("*"))]


@pytest.mark.parametrize("name", fuzz.TARGETS)
def test_every_target_has_a_corpus_that_reaches_further_than_nothing(name):
    assert any(target == name for target, _ in KEPT)


@pytest.mark.parametrize(("name", "path"), KEPT, ids=lambda value: getattr(value, "name", value))
def test_what_was_kept_raises_nothing_but_typed_errors(name, path):
    fuzz.run(fuzz.TARGETS[name], path.read_bytes())


def test_folders_of_the_corpus_have_a_target():
    assert {path.name for path in fuzz.CORPUS.iterdir()} <= set(fuzz.TARGETS)


def test_an_error_that_is_not_typed_is_a_failure():
    def wrong(data):
        raise KeyError(data)

    with pytest.raises(KeyError):
        fuzz.run(wrong, b"a")
